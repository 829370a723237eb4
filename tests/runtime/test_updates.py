"""Writes into buffers.

Axes: B rows, H heads, L slots, K head width, T tokens of one call.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.runtime import updates


def written_by_hand(buffer, update, start, axis):
    buffer = np.array(buffer)
    for row, at in enumerate(start):
        where = [slice(None)] * (buffer.ndim - 1)
        where[axis - 1] = slice(at, at + update.shape[axis])
        buffer[row][tuple(where)] = update[row]
    return buffer


@pytest.mark.parametrize('batch', [1, 3, 16, 17, 40])  # 16 rows are written one by one, 17 by a scatter
@pytest.mark.parametrize(('shape', 'axis'), [((9,), 1), ((2, 9, 3), 2)], ids=['positions', 'keys'])
def test_each_row_is_written_from_its_own_start_and_nowhere_else(batch, shape, axis):
    random = np.random.default_rng(batch)
    buffer = random.normal(size=(batch, *shape)).astype(np.float32)
    update = np.take(random.normal(size=buffer.shape), range(4), axis).astype(np.float32)
    start = random.integers(0, 6, batch)  # 5 is the last that fits
    start[0], start[-1] = 0, 5
    written = updates.write(jnp.asarray(buffer), jnp.asarray(update), jnp.asarray(start), axis)
    np.testing.assert_array_equal(written, written_by_hand(buffer, update, start, axis))


def test_written_values_take_the_buffers_dtype():
    buffer = jnp.zeros((2, 5), jnp.bfloat16)
    written = updates.write(buffer, jnp.full((2, 1), 1 / 3, jnp.float32), jnp.array([0, 4]), axis=1)
    assert written.dtype == jnp.bfloat16
    assert written[1, 4] == jnp.bfloat16(1 / 3)


@pytest.mark.parametrize('axis', [2, 3])
@pytest.mark.parametrize('batch, tokens', [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_new_tokens_are_written_where_they_should_be_and_nothing_before_them_changes(batch, tokens, axis):
    buffer = jnp.arange(batch * 2 * 6 * 3, dtype=jnp.float32).reshape(batch, 2, 6, 3)
    update = -1 - jnp.arange(batch * 2 * tokens * 3, dtype=jnp.float32).reshape(batch, 2, tokens, 3)
    start = jnp.array([2, 1])[:batch]
    slots_last = lambda array: array if axis == 2 else array.swapaxes(2, 3)  # noqa: E731
    written = slots_last(updates.write_new(slots_last(buffer), slots_last(update), start, axis))
    for row, at in enumerate(start.tolist()):
        np.testing.assert_array_equal(written[row, :, :at], buffer[row, :, :at])
        np.testing.assert_array_equal(written[row, :, at : at + tokens], update[row])
