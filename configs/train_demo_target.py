"""Trains the demo target: English to German, 17.8M parameters.

python scripts/train.py --config=configs/train_demo_target.py --workdir=W/target --config.tokenizer=W/tokenizer \
    --config.data.train=W/data/train.tsv \
    --config.data.valid=W/data/valid_libreoffice.tsv,W/data/valid_tatoeba.tsv

W/data is scripts/prepare_demo_data.py's output, W/tokenizer scripts/train_tokenizer.py's.
"""

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
            steps=4600,
            eval_every=500,
            eval_bleu_sentences=100,
            eval_batch_size=32,
            checkpoint_every=500,
            export_dtype='bfloat16',
        )
    )
