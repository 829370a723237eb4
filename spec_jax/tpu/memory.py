"""Memory of a pair and the chips that it fits on, from shapes alone: no weights are read, no chip is needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from tabulate import tabulate

from spec_jax.decoding import DecodeConfig, start
from spec_jax.drafters.model import ModelDrafter
from spec_jax.models.shape import ModelShape
from spec_jax.runtime.backend import tracing_for
from spec_jax.tpu.chips import CHIPS
from spec_jax.types import Inputs

_GIB = 2**30
# Bytes of one JAX device, smallest first; of v2 and v3 that is one of a chip's two cores.
HBM = {'v2, a core': 8 * _GIB, 'v3, a core': 16 * _GIB} | {
    name: int(chip.hbm) for name, chip in CHIPS.items()
}
HBM = dict(sorted(HBM.items(), key=lambda one: one[1]))
# Share of a device's memory kept for logits, activations, the program, and the padding of arrays to tiles.
SPARE = 0.2


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that a pair takes while it decodes.

    Attributes:
      weights: of both models, laid out for decoding.
      caches: keys and values of both, of self-attention and of cross-attention, with the rest of the loop's state.
    """

    weights: int
    caches: int

    def fits(self, hbm: int) -> bool:
        """Whether it fits on a device of `hbm` bytes, with `SPARE` left over."""
        return self.weights + self.caches <= (1 - SPARE) * hbm


def need(
    target: ModelShape,
    draft: ModelShape,
    *,
    gamma: int,
    max_new_tokens: int,
    source_length: int,
    batch_size: int = 1,
    dtype: str = 'bfloat16',
) -> Need:
    """The memory that a pair needs, from shapes alone.

    Args:
      target: its shape.
      draft: likewise.
      gamma: draft length.
      max_new_tokens: most tokens of an output.
      source_length: tokens of a source.
      batch_size: rows decoded together.
      dtype: of weights and caches.
    """
    size = batch_size, source_length
    inputs = Inputs(jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, jnp.bool_))
    keys = jax.eval_shape(partial(jax.random.split, num=batch_size), jax.random.key(0))
    with tracing_for('tpu'):
        pair = target.abstract(dtype), ModelDrafter(draft.abstract(dtype))
        config = DecodeConfig(gamma, max_new_tokens)
        state = jax.eval_shape(partial(start, config=config), *pair, inputs, keys)
    return Need(_bytes(pair), _bytes((state.target_cache, state.draft_state)))


def _bytes(arrays) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def table(needs: Mapping[str, Need]) -> str:
    """Markdown: a row for each pair, by its name, and a column for each device of `HBM`."""
    rows = [
        [name, f'{one.weights / _GIB:.2f}', f'{one.caches / _GIB:.2f}']
        + ['yes' if one.fits(hbm) else '' for hbm in HBM.values()]
        for name, one in needs.items()
    ]
    devices = [f'{name}: {hbm / _GIB:.0f}' for name, hbm in HBM.items()]
    return tabulate(rows, ['pair', 'weights', 'caches', *devices], tablefmt='pipe', disable_numparse=True)
