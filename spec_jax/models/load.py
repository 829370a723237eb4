"""A model from a folder or the hub, of whatever family, ready to decode with.

    folder or hub id  --load_model-->  Model, laid out for decoding, on the mesh in use

Which family a folder holds is its config.json's `model_type`. A new family is one more entry in `FAMILIES`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import jax.numpy as jnp

from spec_jax.models import hf_folder, t5x
from spec_jax.models.base import Model
from spec_jax.models.t5 import PARTITION_RULES
from spec_jax.models.t5_weights import load_t5
from spec_jax.runtime import sharding


def load_model(source: str | os.PathLike, dtype=jnp.float32, revision: str | None = None) -> Model:
    """Reads a model and prepares it for decoding; it is not to be trained or saved.

    Args:
      source: a folder in a form that the family knows, or a hub id where there is no such folder.
      dtype: float32 or bfloat16, of parameters and activations.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: a file or the repository is missing.
      ValueError: the files are damaged or hold a model of no known family, or dtype is refused.
    """
    folder = hf_folder.fetch(source, revision)
    return FAMILIES[_model_type(folder)](folder, dtype)


def _t5(folder: pathlib.Path, dtype) -> Model:
    return sharding.shard(load_t5(folder, dtype, place=sharding.placer(PARTITION_RULES)).for_decoding())


FAMILIES: dict[str, Callable[[pathlib.Path, object], Model]] = {'t5': _t5}  # by model_type


def _model_type(folder: pathlib.Path) -> str:
    """A key of `FAMILIES`. T5X's folders have no config.json; `load_t5` says what a folder without either lacks."""
    where = folder / hf_folder.CONFIG
    if t5x.is_t5x(folder) or not where.is_file():
        return 't5'
    kind = hf_folder.read_config(folder).get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ' or '.join(f'"{name}"' for name in FAMILIES)
        raise ValueError(f'{where}: expected model_type {known}, got {kind!r}; name a folder of such a model')
    return kind
