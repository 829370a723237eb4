"""The interface of every form of T5 files: a configuration, and parameters that are read one by one.

    t5_hf.py  config.json and safetensors    t5x.py  T5X's zarr arrays    t5_orbax.py  config.json and Orbax arrays

A parameter's name is its path in the model with dots between, such as `decoder.0.mlp.up`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spec_jax.models.t5 import T5, T5Config, T5Module


class StoredT5(Protocol):
    """A T5 in files.

    Attributes:
      config: sizes.
      dtype: bfloat16 where all its arrays are stored so, float32 otherwise.
    """

    config: T5Config
    dtype: np.dtype

    def read(self, name: str) -> np.ndarray:
        """A parameter in our shape and in the float type it is stored in; ValueError where it is damaged."""


@functools.cache
def leaf_paths(config: T5Config) -> dict[tuple, tuple[int, ...]]:
    """The shape of every parameter by its path, as `nnx.to_flat_state` gives it."""
    state = nnx.state(nnx.eval_shape(lambda: T5Module(config, rngs=nnx.Rngs(0))), nnx.Param)
    return {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}


def leaf_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its name."""
    return {dotted(path): shape for path, shape in leaf_paths(config).items()}


def dotted(path: tuple) -> str:
    """('decoder', 0, 'mlp', 'up') -> 'decoder.0.mlp.up'."""
    return '.'.join(map(str, path))


def to_be_saved(model: T5, dtype) -> tuple[Callable[[str], np.ndarray], np.dtype]:
    """A function that gives a parameter by name, and the dtype to store it in, by default the parameters'."""
    if model.config.fused is not None:
        raise ValueError(
            'expected a T5 as it was loaded or trained, got one laid out by `for_decoding`; save the former'
        )
    leaves = {dotted(path): leaf for path, leaf in nnx.to_flat_state(model.params)}
    dtype = checked_dtype(leaves['embedding'].dtype if dtype is None else dtype)
    return lambda name: np.asarray(leaves[name][...]), dtype


def checked_dtype(dtype) -> np.dtype:
    """float32 or bfloat16; ValueError for any other dtype."""
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f'expected dtype float32 or bfloat16, got {dtype!r}; use one of them') from None
    if dtype == jnp.float16:
        raise ValueError('expected dtype float32 or bfloat16, got float16; T5 overflows in it, use bfloat16')
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f'expected dtype float32 or bfloat16, got {dtype}; use one of them')
    return dtype
