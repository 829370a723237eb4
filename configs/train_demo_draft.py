"""Trains the demo draft, 1.9M parameters, on the demo target's translations.

python scripts/distill.py --config=configs/distill_demo.py --workdir=W/distilled \
    --config.target=W/target/export --config.data.train=W/data/train.tsv
D='--config.tokenizer=W/target/export --config.data.train=W/distilled/distilled.tsv'
python scripts/train.py --config=configs/train_demo_draft.py --workdir=W/draft $D \
    --config.steps=8000 --config.decay_fraction=0
python scripts/train.py --config=configs/train_demo_draft.py --workdir=W/draft $D \
    --config.distill_from=W/target/export --config.distill_weight=0.9

The first 8,000 steps are trained on the target's tokens, at a high rate; the others, while the rate falls, on its
distributions over all tokens. These take twice as long per step, for the target's forward pass.
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
                num_encoder_layers=2,  # run once per sentence: better drafts at no cost per step
                num_decoder_layers=1,
                activation='gelu',
                gated=True,
                tied_head=True,
                scale_head_input=True,
                dropout=0.0,  # so small a model does not overfit
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
            steps=15000,
            eval_every=1000,
            eval_bleu_sentences=100,
            eval_batch_size=32,
            checkpoint_every=1000,
            export_dtype='bfloat16',
        )
    )
