"""Loads and saves T5 checkpoints in three forms.

    folder or hub id  --load_t5-->  T5  --save_t5-->  folder that transformers loads

The form is recognised by the files in a folder: Hugging Face's (`t5_hf.py`), T5X's (`t5x.py`), or an Orbax
checkpoint with a config.json (`t5_orbax.py`).
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spec_jax.models import hf_folder, t5_hf, t5x
from spec_jax.models.t5 import T5
from spec_jax.models.t5_stored import StoredT5, checked_dtype, dotted, leaf_paths, to_be_saved

Place = Callable[[tuple, np.ndarray], jax.Array]


def load_t5(
    source: str | os.PathLike, dtype=jnp.float32, revision: str | None = None, place: Place | None = None
) -> T5:
    """Reads a T5 from a folder, or from the hub where there is no such folder.

    Args:
      source: a folder in one of the three forms, or a hub id.
      dtype: float32 or bfloat16, of parameters and activations; files may hold any float type.
      revision: branch, tag or commit on the hub.
      place: puts a parameter, given its path as in `nnx.to_flat_state` and its values, on its device or its
        shards. Parameters are passed one at a time, the largest first, so that no device needs to hold more than
        its part; by default they go to the first device.

    Raises:
      FileNotFoundError: a file or the repository is missing.
      ValueError: the files are damaged, do not hold a supported T5 or contradict each other, or dtype is neither.
    """
    dtype = checked_dtype(dtype)
    stored = open_t5(hf_folder.fetch(source, revision))
    place = place or (lambda path, array: jnp.asarray(array))
    leaves, shapes = {}, leaf_paths(stored.config)
    for path in sorted(shapes, key=lambda path: -math.prod(shapes[path])):
        array = np.asarray(stored.read(dotted(path)), dtype, order='C')
        leaves[path] = nnx.Param(place(path, array))
    return T5(nnx.from_flat_state({path: leaves[path] for path in shapes}), stored.config, dtype)


def save_t5(model: T5, folder: str | os.PathLike, dtype=None, max_shard_size: int = 5 * 10**9) -> None:
    """Writes a folder that transformers loads as T5ForConditionalGeneration; see `hf_folder.replacing`.

    Args:
      model: the T5.
      folder: created where it does not exist; in one that does, files that do not belong to a model stay.
      dtype: of the stored weights, float32 or bfloat16; that of the parameters by default.
      max_shard_size: bytes beyond which the weights are split over several files.

    Raises:
      OSError: the folder cannot be written.
      ValueError: dtype is neither, or Hugging Face's form cannot express the configuration.
    """
    read, dtype = to_be_saved(model, dtype)
    t5_hf.config_to_hf(model.config, dtype)  # raises before anything is written
    with hf_folder.replacing(folder) as staging:
        t5_hf.write(staging, model.config, dtype, read, max_shard_size)


def open_t5(folder: pathlib.Path, d_kv: int | None = None) -> StoredT5:
    """The T5 in a folder, its parameters not yet read.

    Args:
      folder: in one of the three forms.
      d_kv: as of `t5x.T5X`.

    Raises:
      FileNotFoundError, ValueError: as of `load_t5`.
    """
    if t5x.is_t5x(folder):
        return t5x.T5X(folder, d_kv)
    if (folder / hf_folder.PARAMS).is_dir():
        from spec_jax.models import t5_orbax  # Orbax is slow to import, and most runs do not need it

        return t5_orbax.OrbaxT5(folder)
    if not (folder / hf_folder.CONFIG).exists() and not any(folder.glob('*.safetensors')):
        raise FileNotFoundError(_no_model(folder))
    return t5_hf.HuggingFaceT5(folder)


def _no_model(folder: pathlib.Path) -> str:
    what = f'{hf_folder.CONFIG} with safetensors or Orbax params, or arrays target.* of T5X'
    expected = f'{folder}: expected a T5 ({what})'
    if steps := sorted(folder.glob('checkpoint_*')):
        return f'{expected}, got checkpoints of a T5X run; name one of them, such as {steps[-1].name}'
    return f'{expected}, found none; check the path'
