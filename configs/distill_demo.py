"""Translates the demo target's training sources with it, as training data for the demo draft.

python scripts/distill.py --config=configs/distill_demo.py --workdir=W/distilled \
    --config.target=W/target/export --config.data.train=W/data/train.tsv
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            target='',  # folder or hub id
            tokenizer='',  # empty: the target's
            dtype='float32',
            seed=0,
            data=dict(
                train='',  # files, separated by commas; only their sources are read
                prefix='',
                max_source_length=128,
                limit=0,  # number of sources, chosen at random; 0 takes all
            ),
            batch_size=128,
            temperature=0.0,
        )
    )
