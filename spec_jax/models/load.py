"""Loads a model of any known family from a folder or the hub.

    folder or hub id  --load_model-->  Model, laid out for decoding, on the mesh in use
    folder or name    --describe---->  ModelShape, no weights read

The family is config.json's `model_type`. A new family is one more entry in `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

import jax.numpy as jnp

from spec_jax.models import hf_folder, t5x
from spec_jax.models.base import Model
from spec_jax.models.shape import ModelShape
from spec_jax.models.t5 import PARTITION_RULES
from spec_jax.models.t5_shape import T5Shape
from spec_jax.models.t5_sizes import config_of
from spec_jax.models.t5_weights import load_t5
from spec_jax.runtime import sharding


@dataclasses.dataclass(frozen=True)
class Family:
    """The functions that read models of one `model_type`.

    Attributes:
      load: (folder, dtype) -> the model, laid out for decoding, on the mesh in use.
      describe: a folder, or the name of a public size -> its shape.
    """

    load: Callable[[pathlib.Path, object], Model]
    describe: Callable[[str | os.PathLike], ModelShape]


def load_model(source: str | os.PathLike, dtype=jnp.float32, revision: str | None = None) -> Model:
    """Reads a model and lays it out for decoding; it can no longer be trained or saved.

    Args:
      source: a folder in a form that the family reads, or a hub id where there is no such folder.
      dtype: float32 or bfloat16, of parameters and activations.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: a file or the repository is missing.
      ValueError: the files are damaged or hold a model of no known family, or dtype is neither.
    """
    folder = hf_folder.fetch(source, revision)
    return FAMILIES[_model_type(folder)].load(folder, dtype)


def describe(source: str | os.PathLike) -> ModelShape:
    """A model's shape, from a folder's config.json or a name such as google/t5-v1_1-xxl; nothing is downloaded.

    Raises:
      ValueError: the config.json is damaged or of no known family, or the name contains no known size.
    """
    return FAMILIES[_model_type(pathlib.Path(source).expanduser())].describe(source)


def _load_t5(folder: pathlib.Path, dtype) -> Model:
    return sharding.shard(load_t5(folder, dtype, place=sharding.placer(PARTITION_RULES)).for_decoding())


def _describe_t5(source: str | os.PathLike) -> T5Shape:
    return T5Shape(config_of(source))


FAMILIES = {'t5': Family(_load_t5, _describe_t5)}  # by model_type


def _model_type(folder: pathlib.Path) -> str:
    """A key of `FAMILIES`; 't5' without a config.json: T5X folders have none, and the public names are T5's."""
    where = folder / hf_folder.CONFIG
    if t5x.is_t5x(folder) or not where.is_file():
        return 't5'
    kind = hf_folder.read_config(folder).get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ' or '.join(f'"{name}"' for name in FAMILIES)
        raise ValueError(f'{where}: expected model_type {known}, got {kind!r}; name a folder of such a model')
    return kind
