"""Checks and loads what a config names: settings, lines, tokenizer and target.

Axes: S source length.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from spec_jax.decoding import MAX_GAMMA, DecodeConfig
from spec_jax.lenience import lenient
from spec_jax.models.base import Model
from spec_jax.models.load import load_model
from spec_jax.runtime import sharding
from spec_jax.sampling import SamplingConfig
from spec_jax.text import data, hub_data
from spec_jax.text.tokenizers import load_tokenizer

AUTO = 'auto'  # in place of a gamma: `auto_gamma` chooses it


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to decode the lines of a file.

    Attributes:
      decode: how to decode a batch.
      batch_size: rows of a batch.
      max_source_length: widest source, EOS included.
      narrowest: narrowest batch that sources are padded to; the wider, the fewer programs are compiled.
      seed: of the run; each line's key is folded from it and the line's number.
      pad_id: padding of sources; the target's (`fit_to_vocabulary`).
    """

    decode: DecodeConfig
    batch_size: int = 1
    max_source_length: int = 128
    narrowest: int = 16
    seed: int = 0
    pad_id: int = 0

    def decoding(self, **changes) -> Settings:
        """The same with other values in `decode`."""
        return dataclasses.replace(self, decode=dataclasses.replace(self.decode, **changes))

    def sampled(self, **changes) -> Settings:
        """The same with other values in `decode.sampling`."""
        return self.decoding(sampling=dataclasses.replace(self.decode.sampling, **changes))


def settings_from(config: ConfigDict, auto: int | None = None) -> Settings:
    """The settings of a config; plain decoding (gamma 0) where it names no draft.

    The batch size is rounded up to a multiple of `mesh.data`.

    Args:
      config: a recipe.
      auto: used for a gamma of `AUTO` until one is chosen; None refuses `AUTO`.

    Raises:
      ValueError: for a value out of range.
    """
    for name, lowest in (('batch_size', 1), ('max_new_tokens', 1), ('max_source_length', 2), ('repeats', 1)):
        if config[name] < lowest:
            raise ValueError(f'{name}: expected an integer >= {lowest}, got {config[name]}')
    if config.data.limit < 0:
        raise ValueError(f'data.limit: expected an integer >= 0, got {config.data.limit}; 0 takes all lines')
    gamma = config.gamma if auto is None or config.gamma != AUTO else auto
    if type(gamma) is not int or not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(
            f'gamma: expected an integer from 0 to {MAX_GAMMA}{"" if auto is None else " or auto"}, got '
            f'{config.gamma}; 0 decodes plainly'
        )
    if not 0 < config.lenience <= 1:
        raise ValueError(f'lenience: expected a number in (0, 1], got {config.lenience}; 1 is exact')
    rows_at_once, _ = sharding.mesh_sizes(config.get('mesh'))
    decode = DecodeConfig(
        gamma=0 if config.draft.kind == 'none' else gamma,
        max_new_tokens=config.max_new_tokens,
        sampling=SamplingConfig(config.temperature, config.top_k, config.top_p),
        rule=lenient(config.lenience),
    )
    return Settings(
        decode,
        batch_size=-(-config.batch_size // rows_at_once) * rows_at_once,
        max_source_length=config.max_source_length,
        seed=config.seed,
    )


def fit_to_vocabulary(settings: Settings, target: Model, tokenizer) -> Settings:
    """Excludes ids that the head has rows for but the tokenizer no pieces (T5: 32128 and 32100)."""
    if len(tokenizer) > target.spec.vocab_size:
        raise ValueError(
            f"expected a tokenizer of at most {target.spec.vocab_size} pieces, the rows of the target's head; "
            f'got {len(tokenizer)}: use the tokenizer that the target was trained with'
        )
    settings = settings.sampled(vocab_limit=len(tokenizer))
    return dataclasses.replace(settings, pad_id=target.spec.pad_id)


def checksum(sources: Sequence[np.ndarray]) -> int:
    """CRC-32 of a set of encoded lines, for journals."""
    return zlib.crc32(b''.join(ids.tobytes() for ids in sources))


def one_width(settings: Settings, sources: Sequence[np.ndarray]) -> Settings:
    """Pads all batches to the longest source: for runs in which further compilations cost more than padding."""
    longest = max([settings.narrowest, *map(len, sources)])
    return dataclasses.replace(settings, max_source_length=longest, narrowest=longest)


@dataclasses.dataclass(frozen=True)
class Job:
    """The loaded contents of a config.

    Attributes:
      examples: lines of the data.
      sources: int32 [S] each, the same lines encoded.
      num_truncated: how many of them were cut.
      tokenizer: the target's.
      target: the model.
      settings: of the config, fitted to the vocabulary.
    """

    examples: list[data.Example]
    sources: list[np.ndarray]
    num_truncated: int
    tokenizer: Any
    target: Model
    settings: Settings

    def truncation(self) -> str:
        """How many sources were cut, in words; empty for none."""
        if not self.num_truncated:
            return ''
        longest = self.settings.max_source_length
        return f'{self.num_truncated} of {len(self.sources)} sources cut to {longest} tokens'


def load(config: ConfigDict, settings: Settings, default_limit: int | None = None) -> Job:
    """Reads the data, the target and its tokenizer, and sets the config's mesh for all later placements.

    Args:
      config: with `target`, `dtype`, `max_source_length`, `on_long`, `mesh` and `data`: `path` is a file
        (`data.read_examples`) or a data set (`hub_data`), `target_path` parallel text (`data.add_targets`).
      settings: of `settings_from`.
      default_limit: how many lines to take where `data.limit` is 0; None for all.

    Raises:
      OSError, ValueError: a file, a data set or a model is missing, damaged or unsuitable.
    """
    sharding.use_mesh(*sharding.mesh_sizes(config.get('mesh')))
    examples = _read(config.data, config.data.limit or default_limit)
    tokenizer = load_tokenizer(config.target)
    target = load_model(config.target, config.dtype)
    sources, num_truncated = data.encode_sources(
        tokenizer,
        [example.source for example in examples],
        prefix=config.data.prefix,
        max_source_length=config.max_source_length,
        on_long=config.on_long,
    )
    settings = fit_to_vocabulary(settings, target, tokenizer)
    return Job(examples, sources, num_truncated, tokenizer, target, settings)


def _read(where: ConfigDict, limit: int | None) -> list[data.Example]:
    """The lines that a config's `data` section names; old recipes lack the three keys that have defaults here."""
    keys = dict(source_key=where.get('source_key', 'source'), target_key=where.get('target_key', 'target'))
    target_path = where.get('target_path', '')
    if not hub_data.is_named(where.path):
        examples = data.read_examples(where.path, where.format or None, **keys)
        return (data.add_targets(examples, target_path, where.path) if target_path else examples)[:limit]
    if target_path:
        raise ValueError(
            f'data.target_path: expected none beside a data set; got {target_path}: use data.target_key'
        )
    return hub_data.read_dataset(where.path, **keys, limit=limit)
