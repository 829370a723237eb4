"""The keys of a training configuration, and their checks.

seed                   of the weights, the order of the data and the dropout
model                  fields of T5Config; vocab_size is the tokenizer's where it is not given
tokenizer              folder or hub id; where empty, distill_from's
dtype                  float32 or bfloat16, of the activations; parameters are float32
data.train             files of pairs, separated by commas; one that is named twice counts twice
data.valid             files of pairs, separated by commas, or none
data.prefix            put before each source
data.max_source_length, data.max_target_length
                       the most tokens of a pair; longer ones are left out
optimizer              adamw, adafactor or scaled_adam
peak_learning_rate, warmup_steps, decay_fraction
                       see `train.learning_rate`
weight_decay, clip     see `train.make_optimizer`
label_smoothing        mass moved from the label to the uniform distribution
distill_from           folder or hub id of a teacher of the same vocabulary, or none
distill_weight         share of the loss that is measured against the teacher's distribution
tokens_per_batch       rows times width of a batch
steps                  of the whole run
eval_every             steps from one validation to the next; there is one at the end too
eval_bleu_sentences    how many sentences of each validation file are translated for BLEU; 0 for none
eval_batch_size        of these translations
checkpoint_every       steps from one checkpoint to the next; each validation has one before it
export_dtype           float32 or bfloat16, of the exported weights
"""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from spec_jax.models.t5 import ACTIVATIONS, T5Config

_KEYS = frozenset(
    'seed model tokenizer dtype data optimizer peak_learning_rate warmup_steps decay_fraction weight_decay '
    'clip label_smoothing distill_from distill_weight tokens_per_batch steps eval_every eval_bleu_sentences '
    'eval_batch_size checkpoint_every export_dtype'.split()
)
_DATA_KEYS = frozenset('train valid prefix max_source_length max_target_length'.split())
_AT_LEAST = {
    'steps': 1,
    'tokens_per_batch': 1,
    'eval_every': 1,
    'eval_batch_size': 1,
    'checkpoint_every': 1,
    'warmup_steps': 0,
    'eval_bleu_sentences': 0,
    'weight_decay': 0,
    'peak_learning_rate': 0,
}
_SHARES = 'decay_fraction', 'label_smoothing', 'distill_weight'


def check_recipe(config: ConfigDict) -> None:
    """Raises ValueError for a key that is missing or unknown, or a value out of range."""
    _check_keys('config', config, _KEYS)
    _check_keys('config.data', config.data, _DATA_KEYS)
    for name, least in _AT_LEAST.items():
        if not least <= config[name] < math.inf:
            raise ValueError(f'{name}: expected a number of {least} or more, got {config[name]}')
    for name in _SHARES:
        if not 0 <= config[name] <= 1:
            raise ValueError(f'{name}: expected a number from 0 to 1, got {config[name]}')
    if not config.clip > 0:
        raise ValueError(f'clip: expected a norm above 0, got {config.clip}; a large one clips nothing')
    for name in ('dtype', 'export_dtype'):
        if config[name] not in ('float32', 'bfloat16'):
            raise ValueError(f"{name}: expected 'float32' or 'bfloat16', got {config[name]!r}")
    if not files(config.data.train):
        raise ValueError(
            'data.train: expected files of pairs, got none; name one by --config.data.train=FILE'
        )
    if not (config.tokenizer or config.distill_from):
        raise ValueError(
            'tokenizer: expected a folder or hub id, got none; name it by --config.tokenizer=DIR'
        )
    if config.distill_weight and not config.distill_from:
        raise ValueError('distill_from: expected the teacher that distill_weight asks for, got none')


def model_config(config: ConfigDict, num_pieces: int) -> T5Config:
    """The sizes of the model, for a tokenizer of so many pieces.

    Raises:
      ValueError: a field is unknown or out of range.
    """
    fields = {field.name for field in dataclasses.fields(T5Config)}
    if unknown := sorted(set(config.model) - fields):
        raise ValueError(f'config.model: expected fields of T5Config, got {unknown[0]!r} besides')
    sizes = T5Config(**{'vocab_size': num_pieces, **config.model})
    for name in ('d_model', 'd_kv', 'd_ff', 'num_heads', 'num_encoder_layers', 'num_decoder_layers'):
        if getattr(sizes, name) < 1:
            raise ValueError(f'model.{name}: expected 1 or more, got {getattr(sizes, name)}')
    if sizes.vocab_size < num_pieces:
        raise ValueError(
            f"model.vocab_size: expected the tokenizer's {num_pieces} pieces or more, got {sizes.vocab_size}"
        )
    if sizes.activation not in ACTIVATIONS:
        known = ', '.join(ACTIVATIONS)
        raise ValueError(f'model.activation: expected one of {known}, got {sizes.activation!r}')
    if not 0 <= sizes.dropout < 1:
        raise ValueError(f'model.dropout: expected a number from 0 to below 1, got {sizes.dropout}')
    return sizes


def files(names: str) -> list[str]:
    """The file names of a list that is separated by commas."""
    return [name.strip() for name in names.split(',') if name.strip()]


def _check_keys(where: str, given: ConfigDict, expected: frozenset[str]) -> None:
    if missing := sorted(expected - set(given)):
        raise ValueError(
            f'{where}: expected the key {missing[0]!r}, which is missing; see training/recipe.py'
        )
    if unknown := sorted(set(given) - expected):
        raise ValueError(f'{where}: got the unknown key {unknown[0]!r}; see training/recipe.py')
