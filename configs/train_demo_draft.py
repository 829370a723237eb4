"""Trains the demo draft, 1.9M parameters, on the demo target's own translations.

python scripts/distill.py --config=configs/distill_demo.py --workdir=W/distilled \
    --config.target=W/target/export --config.data.train=W/data/train.tsv
python scripts/train.py --config=configs/train_demo_draft.py --workdir=W/draft \
    --config.tokenizer=W/target/export --config.data.train=W/distilled/distilled.tsv \
    --config.data.valid=W/data/valid_libreoffice.tsv,W/data/valid_tatoeba.tsv

With --config.distill_from=W/target/export --config.distill_weight=0.9 the draft also learns the probabilities
that the target gives to the other words; a step then takes as long as the target's forward pass besides.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            model=dict(
                d_model=128,
                d_kv=64,
                d_ff=512,
                num_heads=2,
                num_encoder_layers=2,  # run once a sentence: better drafts at no cost per step
                num_decoder_layers=1,
                activation='gelu',
                gated=True,
                tied_head=True,
                scale_head_input=True,
                dropout=0.0,  # so small a model cannot learn its data by heart
            ),
            tokenizer='',
            dtype='bfloat16',
            data=dict(train='', valid='', prefix='', max_source_length=128, max_target_length=128),
            optimizer='scaled_adam',
            peak_learning_rate=0.015,
            warmup_steps=100,
            decay_fraction=0.4,
            weight_decay=0.0,
            clip=1.0,
            label_smoothing=0.0,
            distill_from='',
            distill_weight=0.0,
            tokens_per_batch=1024,
            steps=10000,
            eval_every=1000,
            eval_bleu_sentences=100,
            eval_batch_size=32,
            checkpoint_every=1000,
            export_dtype='bfloat16',
        )
    )
