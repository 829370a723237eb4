"""Trains the demo target: English to German, 17.8M parameters."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            model=dict(
                d_model=384,
                d_kv=64,
                d_ff=1024,
                num_heads=6,
                num_encoder_layers=3,
                num_decoder_layers=4,
                activation='gelu',
                gated=True,
                tied_head=True,
                scale_head_input=True,
                dropout=0.1,
            ),
            tokenizer='',
            dtype='bfloat16',
            data=dict(train='', valid='', max_source_length=128, max_target_length=128),
            optimizer='adamw',
            peak_learning_rate=1e-3,
            warmup_steps=500,
            decay_fraction=0.25,
            weight_decay=0.01,
            clip=1.0,
            label_smoothing=0.0,
            tokens_per_batch=1024,
            steps=9000,
            eval_every=500,
            checkpoint_every=500,
        )
    )
