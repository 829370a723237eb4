"""Counts n-grams of one to three tokens in the demo target's translations, as a draft of negligible cost.

python scripts/distill.py --config=configs/distill_demo.py --workdir=W/distilled \
    --config.target=W/target/export --config.data.train=W/data/train.tsv
python scripts/train.py --config=configs/train_ngram_demo.py --workdir=W/ngram \
    --config.tokenizer=W/target/export --config.data.train=W/distilled/distilled.tsv \
    --config.data.valid=W/data/valid_libreoffice.tsv,W/data/valid_tatoeba.tsv

Any text in the target's language will do as data.train: a file of pairs, whose target side is counted, or one
text per line. spec_jax/training/ngram.py documents the keys.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            recipe='ngram',
            tokenizer='',  # the target's
            data=dict(train='', valid=''),
            order=3,
            min_counts=(1, 2, 3),  # by order
            max_successors=256,
        )
    )
