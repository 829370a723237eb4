"""The paper's pair on WMT14 English to German: T5 v1.1 XXL with small, base or large, as you have tuned them.

python scripts/benchmark.py --config=configs/t5_v1_1_xxl_wmt_ende.py:small --workdir=W \
    --config.target=XXL_FOLDER --config.draft.path=SMALL_FOLDER

Weights: yours. Of v1.1 only pretrained weights are public (google/t5-v1_1-*), which neither translate nor
summarize; those of the paper were never published.
Chip: 32 GB or more (the paper's was a TPU v4): 22 GB of weights in bfloat16, and .4 MB of cache per position.
Time: about 40 minutes on a TPU v4 were a plain step 10 ms (reading the weights takes 9.3):
100 sentences of about 40 tokens, both ways, 3 times, in about 9 cells that take a minute each to compile.
Expected, not measured: Theorem 3.8 with the paper's alpha and c (its Tables 2 and 4).

    draft  T  gamma  alpha  c    speed-up
    small  0  7      .75    .02  3.16
    base   0  7      .80    .04  3.25
    large  0  7      .82    .11  2.50
    small  1  7      .62    .02  2.26
    base   1  5      .68    .04  2.35
    large  1  3      .71    .11  1.93

At T = 1 give --config.temperature=1 and the gamma of the table; for more drafts
--config.benchmark.drafts=model=SMALL_FOLDER,model=BASE_FOLDER.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict


def get_config(draft='small') -> ConfigDict:
    t5_pair = run_path(Path(__file__).with_name('t5_pair.py'))
    # Name your folders on the command line.
    return t5_pair['paper_pair']('wmt_ende', 'xxl', draft, './t5_v1_1_{}_wmt_ende')
