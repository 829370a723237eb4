"""Key/value cache with one length per row.

A slot holds one token's key and value. Row b's live slots are 0 .. length[b] - 1; what stands
behind them is stale: it is masked out, never assumed to be zero, and overwritten by the next write.
Rolling back is a change of `length` and touches no array of the cache.

         slot      0    1    2    3    4    5
    row 0        [ a    b    c    d ]  x    x      length 4, x stale
    row 1        [ a    b ]  x    x    x    x      length 2

Axes: B rows, H heads, L slots, K head width, T tokens of one call.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from spec_jax.runtime.sharding import rows_are_apart

NO_POSITION = -1  # position of a slot that no query may look at

# Up to this many rows, one in-place update a row is faster on every backend than a scatter.
_MAX_UNROLLED_ROWS = 16


@flax.struct.dataclass
class KVCache:
    """Self-attention cache of a decoder.

    Attributes:
      keys: one [B, H, K, L] array per layer: the scores of a few queries are a product of two matrices as they lie.
      values: one [B, H, L, K] array per layer.
      positions: [B, L] int32, the position of the token in each slot; `NO_POSITION` hides a slot.
      length: [B] int32, number of live slots.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    length: Array

    @property
    def num_slots(self) -> int:
        return self.positions.shape[1]


def init(num_layers: int, batch: int, num_heads: int, num_slots: int, head_dim: int, dtype) -> KVCache:
    """An empty cache: length 0 in every row."""
    return KVCache(
        keys=tuple(jnp.zeros((batch, num_heads, head_dim, num_slots), dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros((batch, num_heads, num_slots, head_dim), dtype) for _ in range(num_layers)),
        positions=jnp.full((batch, num_slots), NO_POSITION, jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
    )


def write(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes `update` into `buffer` along `axis`, from a start of its own in each row.

    Args:
      buffer: [B, ...].
      update: [B, ...], as `buffer` but for its size T along `axis`.
      start: [B] int32; the caller sees to start + T <= buffer.shape[axis], since
        `dynamic_update_slice` clamps without a word.
      axis: which axis is written along (not 0).

    Returns:
      [B, ...], the buffer with row b's slots start[b] .. start[b] + T - 1 replaced.
    """
    update = update.astype(buffer.dtype)
    if buffer.shape[0] > _MAX_UNROLLED_ROWS or rows_are_apart():  # one row's update would go to every device
        one_row = lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis - 1)  # noqa: E731
        return jax.vmap(one_row)(buffer, update, start)
    for row in range(buffer.shape[0]):
        at = [0] * buffer.ndim
        at[0], at[axis] = row, start[row]
        buffer = lax.dynamic_update_slice(buffer, update[row : row + 1], at)
    return buffer


def write_new(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes the keys or values of new tokens; a slot behind them may be overwritten, too.

    A single slot of a single row is written twice, at `start` and behind it, where all is stale. XLA's CPU backend
    takes the update of one slot for an operation on one array, does it once for the attention and once for the
    loop, and copies the whole buffer for each: a sixth of a plain step of the demo target.

    Args:
      buffer: [B, H, K, L] or [B, H, L, K].
      update: as `buffer`, but T in place of L.
      start: [B] int32; start + T < L.
      axis: L's.
    """
    if update.shape[0] == update.shape[axis] == 1:
        update = jnp.concatenate([update, update], axis)
    return write(buffer, update, start, axis)


def append(cache: KVCache, positions: Array) -> tuple[KVCache, Array]:
    """Makes room for T new tokens a row; their keys and values are written layer by layer after it.

    Args:
      positions: [B, T] int32, positions of the new tokens.

    Returns:
      The cache with the new positions and length + T, and the first new slot of each row [B].
    """
    start = cache.length
    return cache.replace(
        positions=write(cache.positions, positions, start, axis=1), length=start + positions.shape[1]
    ), start


def causal_mask(cache: KVCache, num_tokens: int) -> Array:
    """Which slots each of the newest `num_tokens` tokens may look at.

    Returns:
      [B, T, L] bool: the token's own slot and those before it, hidden slots excepted.
    """
    own = cache.length[:, None] - num_tokens + jnp.arange(num_tokens)  # [B, T]
    seen = jnp.arange(cache.num_slots) <= own[:, :, None]  # [B, T, L]
    return seen & (cache.positions != NO_POSITION)[:, None, :]


def rollback(cache: KVCache, length: Array) -> KVCache:
    """Keeps the first `length` [B] slots of each row; the rest become stale."""
    return cache.replace(length=length)
