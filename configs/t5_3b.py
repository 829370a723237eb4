"""T5 v1.0 3B, the public multi-task weights, with t5-small as the draft, on a chip of 16 GB.

python scripts/benchmark.py --config=configs/t5_3b.py:wmt_ende --workdir=W

or :cnndm; another draft by --config.draft.path=google-t5/t5-base.
Weights: google-t5/t5-3b and google-t5/t5-small. Pickles are refused: a model of which the hub has no safetensors
must be converted once, and its folder given by --config.target.
Chip: 16 GB (TPU v5e): 5.7 GB of weights in bfloat16, and .4 MB of cache per position.
Time: about 20 minutes on a TPU v5e, after the download, were a plain step 5 ms (reading the weights takes 3.5): 100
sentences of about 40 tokens or 50 summaries of about 75, both ways, 3 times, in about 9 cells.
Expected, not measured: Theorem 3.8, alpha taken to be the paper's, which is of other weights (T5 v1.1 XXL,
fine-tuned), and c to be the weights that a draft step reads over those that a plain step reads.

    task      draft  T  gamma  alpha  c     speed-up
    wmt_ende  small  0  7      .75    .027  3.03
    wmt_ende  base   0  6      .80    .086  2.61
    wmt_ende  large  0  4      .82    .267  1.69
    wmt_ende  small  1  5      .62    .027  2.19
    wmt_ende  base   1  4      .68    .086  1.99
    wmt_ende  large  1  2      .71    .267  1.44
    cnndm     small  0  5      .65    .027  2.33
    cnndm     base   0  5      .73    .086  2.20
    cnndm     large  0  3      .74    .267  1.50
    cnndm     small  1  4      .53    .027  1.84
    cnndm     base   1  3      .55    .086  1.60
    cnndm     large  1  1      .56    .267  1.23

At T = 1 give --config.temperature=1 and the gamma of the table.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

GAMMA = dict(wmt_ende=7, cnndm=5)  # at temperature 0


def get_config(task='wmt_ende') -> ConfigDict:
    t5_pair = run_path(Path(__file__).with_name('t5_pair.py'))['get_config']
    config = t5_pair(task, 'google-t5/t5-3b', 'google-t5/t5-small', GAMMA.get(task))
    config.alpha.drafts = config.benchmark.drafts = (
        'model=google-t5/t5-small,model=google-t5/t5-base,model=google-t5/t5-large,prompt_lookup'
    )
    return config
