"""Converts T5 files from one form to another, a parameter at a time.

T5X, Hugging Face or Orbax  --convert-->  Hugging Face or Orbax
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil

import numpy as np
from tqdm import tqdm

from spec_jax.models import hf_folder, t5_hf, t5_orbax
from spec_jax.models.t5_stored import StoredT5, checked_dtype, leaf_shapes
from spec_jax.models.t5_weights import open_t5
from spec_jax.text.tokenizers import tokenizer_files

FORMATS = ('hf', 'orbax')


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    form: str,
    dtype=None,
    max_shard_size: int = 5 * 10**9,
    d_kv: int | None = None,
) -> tuple[StoredT5, np.dtype]:
    """Writes a T5 in another form, with the tokenizer's files if the source has them.

    Args:
      source: a folder in any form that `load_t5` reads, or a hub id.
      output: another folder; see `hf_folder.replacing`.
      form: 'hf' or 'orbax'.
      dtype: of the stored weights, float32 or bfloat16; by default the source's (`StoredT5.dtype`).
      max_shard_size: most bytes of a safetensors file; unused for 'orbax'.
      d_kv: expected head width of a T5X source.

    Returns:
      The source, and the dtype that was written.

    Raises:
      FileNotFoundError: the source is missing or incomplete.
      OSError: the output cannot be written; nothing half-written is left.
      ValueError: the source is damaged or not a T5, output and source are one folder, or an argument is invalid.
    """
    if form not in FORMATS:
        raise ValueError(f'expected format {" or ".join(FORMATS)}, got {form!r}; use one of them')
    folder = hf_folder.fetch(source)
    target = pathlib.Path(output).expanduser().resolve()
    if target == folder.resolve():
        raise ValueError(
            f'{output}: expected an output folder other than the source, got the source; name another folder'
        )
    stored = open_t5(folder, d_kv)
    dtype = stored.dtype if dtype is None else checked_dtype(dtype)
    shapes = leaf_shapes(stored.config)
    _check_room(target, sum(map(math.prod, shapes.values())) * dtype.itemsize)

    with (
        tqdm(total=len(shapes), unit='array', dynamic_ncols=True) as bar,
        hf_folder.replacing(target) as staging,
    ):

        def read(name: str) -> np.ndarray:
            bar.update()
            return stored.read(name)

        for path in tokenizer_files(folder):
            shutil.copyfile(path, staging / path.name)
        if form == 'hf':
            t5_hf.write(staging, stored.config, dtype, read, max_shard_size)
        else:
            t5_orbax.write(staging, stored.config, dtype, read)
    return stored, dtype


def _check_room(target: pathlib.Path, needed: int) -> None:
    """Raises OSError where the disk is too small, before hours of work."""
    parent = next(path for path in (target, *target.parents) if path.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise OSError(f'{target}: expected {needed / 1e9:.1f} GB free, got {free / 1e9:.1f} GB; make room')
