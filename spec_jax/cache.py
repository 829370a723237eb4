"""Key/value cache with a length of its own in each row.

One slot rule: the token at position i stands in slot i + 1. Slot 0 holds a filler that no token looks at, so that a
window of the last two tokens fits from the first token on. A call writes its block from slot length + 1 on and
leaves `length` as it is; `keep` then says how many tokens stay. To roll back is to change `length`; the slots after
it are stale: masked, overwritten by the next call, never assumed to be zero.

         slot      0    1    2    3    4    5
    row 0        [ -    a    b    c ]  x    x      length 3, x stale
    row 1        [ -    a ]  x    x    x    x      length 1

Axes: B rows, J key/value heads, L slots, K head width, T tokens of one call, G draft depth.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array

from spec_jax.runtime.updates import SPARE_SLOTS, write, write_new
from spec_jax.types import Block


@flax.struct.dataclass
class KVCache:
    """Self-attention cache of a decoder.

    Attributes:
      keys: one [B, J, K, L] array per layer: the scores of a few queries are a product of two matrices as they lie.
      values: one [B, J, L, K] array per layer.
      length: [B] int32, tokens kept; -1 where the next block begins with the filler.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array

    @property
    def num_slots(self) -> int:
        return self.values[0].shape[2]


def init(num_layers: int, batch: int, num_heads: int, num_tokens: int, head_dim: int, dtype) -> KVCache:
    """An empty cache with room for `num_tokens` tokens a row."""
    slots = num_tokens + 1 + SPARE_SLOTS
    return KVCache(
        keys=tuple(jnp.zeros((batch, num_heads, head_dim, slots), dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros((batch, num_heads, slots, head_dim), dtype) for _ in range(num_layers)),
        length=jnp.zeros((batch,), jnp.int32),
    )


def store(cache: KVCache, layer: int, key: Array, value: Array) -> KVCache:
    """Writes a layer's keys [B, J, K, T] and values [B, J, T, K] of a block after the tokens that are kept."""
    keys, values, start = list(cache.keys), list(cache.values), cache.length + 1
    keys[layer] = write_new(keys[layer], key, start, axis=3)
    values[layer] = write_new(values[layer], value, start, axis=2)
    return cache.replace(keys=tuple(keys), values=tuple(values))


def slot_positions(cache: KVCache, block: Block) -> Array:
    """The position of the token in each slot, [1 or B, L] int32; of stale slots, any."""
    positions = jnp.arange(cache.num_slots)[None] - 1
    if block.mask is None:
        return positions
    index, inside = _in_block(cache, block)
    return jnp.where(inside, jnp.take_along_axis(block.positions, index, axis=1), positions)


def visible(cache: KVCache, block: Block) -> Array:
    """Which slots each of a block's tokens may look at, [B, T, L] bool: those kept, and the block's by its mask."""
    slot, size = jnp.arange(cache.num_slots), block.tokens.shape[1]
    if block.mask is None:
        own = cache.length[:, None] + 1 + jnp.arange(size)  # [B, T]
        return (slot > 0) & (slot <= own[:, :, None])
    index, inside = _in_block(cache, block)
    mask = jnp.broadcast_to(block.mask, (len(index), size, size))
    mask = jnp.take_along_axis(mask, index[:, None], axis=2)  # [B, T, L]
    return jnp.where(inside[:, None], mask, (slot > 0) & (slot <= cache.length[:, None])[:, None])


def _in_block(cache: KVCache, block: Block) -> tuple[Array, Array]:
    """For each slot [B, L] its index in the block, clipped, and whether it is one of the block's."""
    index = jnp.arange(cache.num_slots) - (cache.length[:, None] + 1)
    last = block.tokens.shape[1] - 1
    return jnp.clip(index, 0, last), (index >= 0) & (index <= last)


def keep(cache: KVCache, nodes: Array | None, length: Array) -> KVCache:
    """Keeps `length` [B] tokens; the rest become stale.

    Where `nodes` [B, G + 1] say at which places of the last call's block the accepted tokens stand, the first G are
    moved to follow the block's first token; None where they do already.
    """
    if nodes is None:
        return cache.replace(length=length)
    slots, start = cache.length[:, None] + 1 + nodes[:, :-1], cache.length + 2  # [B, G], [B]

    def moved(buffer, axis):
        index = jnp.expand_dims(slots, tuple(i for i in range(1, 4) if i != axis))
        return write(buffer, jnp.take_along_axis(buffer, index, axis), start, axis)

    keys = tuple(moved(buffer, 3) for buffer in cache.keys)
    return KVCache(keys, tuple(moved(buffer, 2) for buffer in cache.values), length)
