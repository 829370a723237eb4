"""T5 as an Orbax checkpoint: config.json, as for Hugging Face, beside the folder `params`.

`params` is what `ocp.StandardCheckpointer` restores as a dictionary of arrays, by names such as `decoder.0.mlp.up`
and in the shapes of `t5.py`: a directory of chunks for each, so that each host of a mesh reads only its part.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx

from spec_jax.models import hf_folder, t5_hf
from spec_jax.models.hf_folder import PARAMS
from spec_jax.models.t5 import T5, T5Config
from spec_jax.models.t5_stored import checked_dtype, dotted, leaf_paths, leaf_shapes, to_be_saved
from spec_jax.models.zarr_folder import Arrays, shortly

_CHUNK = 2**24  # bytes; a host reads whole chunks, so at a shard's borders up to a chunk more than it needs


class OrbaxT5:
    """A T5 in an Orbax checkpoint, as `t5_stored.StoredT5` describes.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: arrays are missing, damaged, or not of the shapes of config.json.
    """

    def __init__(self, folder: pathlib.Path):
        where = folder / hf_folder.CONFIG
        self.config = t5_hf.config_from_hf(hf_folder.read_config(folder), where)
        self._arrays = _open(folder / PARAMS)
        shapes = leaf_shapes(self.config)
        self._arrays.expect(shapes.keys(), f'{where}')
        for name, shape in shapes.items():
            if (actual := self._arrays.shape(name)) != shape:
                raise ValueError(
                    f'{folder / PARAMS}: expected {name} of shape {shape}, got {actual}; correct {where}'
                )
        low = all(self._arrays.dtype(name) == 'bfloat16' for name in shapes)
        self.dtype = np.dtype('bfloat16' if low else 'float32')

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """As `StoredT5.read`, or only the part at `index`."""
        return self._arrays.read(name, index)


def restore_t5(
    folder: str | os.PathLike,
    sharding: Callable[[tuple, tuple[int, ...]], jax.sharding.Sharding],
    dtype=jnp.float32,
) -> T5:
    """Reads a T5 straight into shards: every host reads only what its devices hold.

    Args:
      folder: one that `save_t5_orbax` or `convert` wrote.
      sharding: of a parameter, given its path as in `nnx.to_flat_state` and its shape.
      dtype: float32 or bfloat16, of parameters and activations.

    Raises:
      FileNotFoundError, ValueError: as of `OrbaxT5`; ValueError also for another dtype.
    """
    dtype = checked_dtype(dtype)
    stored = OrbaxT5(pathlib.Path(folder).expanduser().absolute())

    def restored(path, shape):
        # One array at a time: Orbax restores several at once, and these add a large part of the weights' memory.
        def part(index):
            return stored.read(dotted(path), index).astype(dtype, copy=False)

        return nnx.Param(jax.make_array_from_callback(shape, sharding(path, shape), part))

    leaves = {path: restored(path, shape) for path, shape in leaf_paths(stored.config).items()}
    return T5(nnx.from_flat_state(leaves), stored.config, dtype)


def save_t5_orbax(model: T5, folder: str | os.PathLike, dtype=None) -> None:
    """Writes a T5 from a single host; arguments and errors as of `t5_weights.save_t5`."""
    read, dtype = to_be_saved(model, dtype)
    t5_hf.config_to_hf(model.config, dtype)  # raises before anything is written
    with hf_folder.replacing(folder) as staging:
        write(staging, model.config, dtype, read)


def write(folder: pathlib.Path, config: T5Config, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> None:
    """Writes `params` and config.json.

    Args:
      folder: an empty one.
      config: sizes.
      dtype: of the stored weights.
      read: gives a parameter by name, in our shape; called once for each.

    Raises:
      OSError: they cannot be written.
    """
    arrays = {name: _Unread(name, shape, dtype) for name, shape in leaf_shapes(config).items()}
    handler = _OneByOne(lambda name: np.asarray(read(name), dtype, order='C'))
    registry = ocp.type_handlers.create_type_handler_registry((_Unread, handler))
    chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK)
    try:
        with ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=False)
        ) as checkpointer:
            save_args = dict.fromkeys(arrays, chunks)
            checkpointer.save(folder / PARAMS, args=ocp.args.PyTreeSave(arrays, save_args))
    except Exception as error:  # Orbax and TensorStore raise many kinds
        if handler.reading_failed is not None:
            raise handler.reading_failed from None
        raise OSError(shortly(error)) from error
    hf_folder.write_config(folder, t5_hf.config_to_hf(config, dtype))


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A placeholder in Orbax's tree for an array that is read when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Reads and writes one array at a time; Orbax's own handlers need all of them in memory."""

    def __init__(self, read: Callable[[str], np.ndarray]):
        super().__init__(deepcopy_host_arrays=False)
        self._read = read
        self.reading_failed = None

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args, strict=True):
            try:
                array = self._read(value.name)
            except Exception as error:
                self.reading_failed = error
                raise
            for written in await super().serialize([array], [info], [arg]):
                written.result()
        return []


def _open(folder: pathlib.Path) -> Arrays:
    """The arrays of an Orbax checkpoint: in a directory each, or in one store (OCDBT), which is Orbax's default."""
    if not (folder / 'manifest.ocdbt').exists():
        names = [path.parent.name for path in folder.glob('*/.zarray')]
        return Arrays(folder, names, lambda name: {'driver': 'file', 'path': f'{folder / name}/'})
    store = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{folder}/'}}
    try:
        keys = ts.KvStore.open(store).result().list().result()
    except Exception as error:
        raise ValueError(
            f'{folder}: expected a whole checkpoint, got {shortly(error)}; copy it again'
        ) from error
    names = [key.decode().removesuffix('/.zarray') for key in keys if key.endswith(b'/.zarray')]
    return Arrays(folder, names, lambda name: store | {'path': f'{name}/'})
