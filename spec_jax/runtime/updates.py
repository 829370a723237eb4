"""Writes into buffers that are carried through a loop, in a form that each backend updates in place.

Axes: B rows, L slots, T tokens of one call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from spec_jax.runtime.sharding import rows_are_apart

# Up to this many rows, one in-place update per row is faster on every backend than a scatter.
_MAX_UNROLLED_ROWS = 16
SPARE_SLOTS = 1  # that `write_new` may overwrite after the last one


def write(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes `update` into `buffer` along `axis`, at a separate start in each row.

    Args:
      buffer: [B, ...].
      update: [B, ...], as `buffer` but for its size T along `axis`.
      start: [B] int32; the caller must ensure start + T <= buffer.shape[axis], since `dynamic_update_slice` clamps
        without an error.
      axis: which axis is written along (not 0).

    Returns:
      [B, ...], the buffer with row b's slots start[b] .. start[b] + T - 1 replaced.
    """
    update = update.astype(buffer.dtype)
    if (
        buffer.shape[0] > _MAX_UNROLLED_ROWS or rows_are_apart()
    ):  # one row's update would be sent to every device
        one_row = lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis - 1)  # noqa: E731
        return jax.vmap(one_row)(buffer, update, start)
    for row in range(buffer.shape[0]):
        at = [0] * buffer.ndim
        at[0], at[axis] = row, start[row]
        buffer = lax.dynamic_update_slice(buffer, update[row : row + 1], at)
    return buffer


def write_new(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes the keys or values of new tokens; one slot after them may be overwritten, too.

    A single slot of a single row is written twice, at `start` and in the stale slot after it. XLA's CPU backend
    fuses the update of one slot as an elementwise operation, computes it once for the attention and once for the
    loop, and copies the whole buffer for each: a sixth of a plain step of the demo target (two cores).

    Args:
      buffer: [B, ...], L slots along `axis`.
      update: as `buffer`, but T in place of L.
      start: [B] int32; start + T + SPARE_SLOTS <= L.
      axis: L's.
    """
    if update.shape[0] == update.shape[axis] == 1:
        update = jnp.concatenate([update, update], axis)
    return write(buffer, update, start, axis)
