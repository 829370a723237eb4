"""The shipped pair: English to German, on the sentences that come with it.

    python scripts/generate.py --config=configs/demo_ende.py --workdir=W

translates the 200 shipped sentences; --config.data.path=FILE translates
a file of yours, and --config.compare=True decodes it both ways and measures the speed-up.
"""

from ml_collections import ConfigDict

from spec_jax import demo


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            target=str(demo.TARGET),  # a folder or a hub id
            draft=dict(kind='model', path=str(demo.DRAFT)),  # kind 'none' decodes plainly
            dtype='float32',
            gamma=3,
            batch_size=1,
            max_new_tokens=128,
            max_source_length=128,
            on_long='truncate',  # or 'refuse'
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            lenience=1.0,  # below 1 drafts pass more easily: LOSSY
            seed=0,
            data=dict(
                path=str(demo.SENTENCES), format='', prefix='', limit=0
            ),  # format '' goes by the suffix
            compare=False,
            repeats=3,  # timed runs of a batch, of which the median counts
        )
    )
