"""T5 v1.0 11B, the public multi-task weights, on WMT14 English to German; t5-small, -base or -large drafts.

python scripts/benchmark.py --config=configs/t5_v1_0_11b_wmt_ende.py:small --workdir=W

Weights: google-t5/t5-11b and google-t5/t5-small, -base or -large. Pickles are refused: a model of which the hub has
no safetensors must be converted once, and its folder given by --config.target.
Chip: 32 GB or more (TPU v4 or v6e): 23 GB of weights in bfloat16, and 1.6 MB of cache per position.
Time: about 40 minutes on a TPU v4, after the download, were a plain step 10 ms (reading the weights takes 9.5):
100 sentences of about 40 tokens, both ways, 3 times, in about 9 cells that take a minute each to compile.
Expected, not measured: Theorem 3.8 with the paper's alpha and c, which are of other weights, its own fine-tuned T5
v1.1 XXL and drafts. scripts/measure_alpha.py measures those of these weights.

    draft  T  gamma  alpha  c    speed-up
    small  0  7      .75    .02  3.16
    base   0  7      .80    .04  3.25
    large  0  7      .82    .11  2.50
    small  1  7      .62    .02  2.26
    base   1  5      .68    .04  2.35
    large  1  3      .71    .11  1.93

At T = 1 give --config.temperature=1 and the gamma of the table.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict


def get_config(draft='small') -> ConfigDict:
    t5_pair = run_path(Path(__file__).with_name('t5_pair.py'))
    config = t5_pair['paper_pair']('wmt_ende', '11b', draft, 'google-t5/t5-{}')
    sizes = draft, *sorted(t5_pair['GAMMA']['wmt_ende'].keys() - {draft})
    drafts = [f'model=google-t5/t5-{size}' for size in sizes]
    config.alpha.drafts = config.benchmark.drafts = ','.join([*drafts, 'prompt_lookup'])
    config.alpha.batch_size = config.verify.rows = 4  # its 128 heads make a cache four times XXL's
    config.benchmark.batch_sizes = '1,2,4'
    return config
