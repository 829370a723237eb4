"""T5 v1.0 large, the public multi-task weights, with t5-small as the draft, on a chip of 16 GB.

python scripts/benchmark.py --config=configs/t5_large.py:wmt_ende --workdir=W

or :cnndm; another draft by --config.draft.path=google-t5/t5-base.
Weights: google-t5/t5-large and google-t5/t5-small. Pickles are refused: a model of which the hub has no safetensors
must be converted once, and its folder given by --config.target.
Chip: 16 GB (TPU v5e): 1.5 GB of weights in bfloat16, and .1 MB of cache per position. A T4 has no
bfloat16 arithmetic: give --config.dtype=float32.
Time: about 12 minutes on a TPU v5e, after the download, were a plain step 2 ms (reading the weights takes .9): 100
sentences of about 40 tokens or 50 summaries of about 75, both ways, 3 times, in about 9 cells.
Expected, not measured: Theorem 3.8, alpha taken to be the paper's, which is of other weights (T5 v1.1 XXL,
fine-tuned), and c to be the weights that a draft step reads over those that a plain step reads.

    task      draft  T  gamma  alpha  c     speed-up
    wmt_ende  small  0  5      .75    .100  2.19
    wmt_ende  base   0  3      .80    .321  1.50
    wmt_ende  small  1  3      .62    .100  1.73
    wmt_ende  base   1  2      .68    .321  1.30
    cnndm     small  0  3      .65    .100  1.81
    cnndm     base   0  2      .73    .321  1.38
    cnndm     small  1  2      .53    .100  1.51
    cnndm     base   1  1      .55    .321  1.17

At T = 1 give --config.temperature=1 and the gamma of the table.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

GAMMA = dict(wmt_ende=5, cnndm=3)  # at temperature 0


def get_config(task='wmt_ende') -> ConfigDict:
    t5_pair = run_path(Path(__file__).with_name('t5_pair.py'))['get_config']
    config = t5_pair(task, 'google-t5/t5-large', 'google-t5/t5-small', GAMMA.get(task))
    config.alpha.drafts = config.benchmark.drafts = (
        'model=google-t5/t5-small,model=google-t5/t5-base,prompt_lookup'
    )
    return config
