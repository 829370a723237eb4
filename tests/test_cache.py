"""Axes: B rows, H heads, L slots, K head width, T tokens of one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as kv


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
    written = kv.write(jnp.asarray(buffer), jnp.asarray(update), jnp.asarray(start), axis)
    np.testing.assert_array_equal(written, written_by_hand(buffer, update, start, axis))


def test_written_values_take_the_buffers_dtype():
    buffer = jnp.zeros((2, 5), jnp.bfloat16)
    written = kv.write(buffer, jnp.full((2, 1), 1 / 3, jnp.float32), jnp.array([0, 4]), axis=1)
    assert written.dtype == jnp.bfloat16
    assert written[1, 4] == jnp.bfloat16(1 / 3)


@pytest.mark.parametrize('axis', [2, 3])
@pytest.mark.parametrize('batch, tokens', [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_new_tokens_are_written_where_they_should_be_and_nothing_before_them_changes(batch, tokens, axis):
    buffer = jnp.arange(batch * 2 * 6 * 3, dtype=jnp.float32).reshape(batch, 2, 6, 3)
    update = -1 - jnp.arange(batch * 2 * tokens * 3, dtype=jnp.float32).reshape(batch, 2, tokens, 3)
    start = jnp.array([2, 1])[:batch]
    slots_last = lambda array: array if axis == 2 else array.swapaxes(2, 3)  # noqa: E731
    written = slots_last(kv.write_new(slots_last(buffer), slots_last(update), start, axis))
    for row, at in enumerate(start.tolist()):
        np.testing.assert_array_equal(written[row, :, :at], buffer[row, :, :at])
        np.testing.assert_array_equal(written[row, :, at : at + tokens], update[row])


def test_a_new_cache_is_empty_and_all_its_slots_are_hidden():
    cache = kv.init(3, 2, 4, 7, 5, jnp.bfloat16)
    assert [array.shape for array in cache.keys] == 3 * [(2, 4, 5, 7)]
    assert [array.shape for array in cache.values] == 3 * [(2, 4, 7, 5)]
    assert cache.keys[0].dtype == jnp.bfloat16
    assert cache.num_slots == 7
    np.testing.assert_array_equal(cache.length, [0, 0])
    np.testing.assert_array_equal(cache.positions, np.full((2, 7), kv.NO_POSITION))


def uneven_cache():
    """Row 0 holds the positions 0 .. 3, row 1 a filler and the positions 0 and 1; stale slots behind."""
    cache = kv.init(1, 2, 1, 6, 1, jnp.float32)
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4]])
    return cache.replace(positions=positions, length=jnp.array([4, 3]))


def test_new_tokens_stand_behind_each_rows_own_length():
    cache, start = kv.append(uneven_cache(), jnp.array([[4, 5], [2, 3]]))
    np.testing.assert_array_equal(start, [4, 3])
    np.testing.assert_array_equal(cache.length, [6, 5])
    np.testing.assert_array_equal(cache.positions, [[0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4]])


def test_a_token_sees_itself_and_what_stands_before_it_but_no_filler_and_nothing_stale():
    cache, _ = kv.append(uneven_cache(), jnp.array([[4, 5], [2, 3]]))
    np.testing.assert_array_equal(
        kv.causal_mask(cache, 2).astype(int),
        [
            [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
            [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]],
        ],
    )
    np.testing.assert_array_equal(  # of the last token alone
        kv.causal_mask(cache, 1).astype(int), [[[1, 1, 1, 1, 1, 1]], [[0, 1, 1, 1, 1, 0]]]
    )


def test_rollback_changes_lengths_only_and_the_next_write_covers_the_stale_slots():
    before = uneven_cache()
    cache = kv.rollback(before, jnp.array([1, 3]))
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(cache.replace(length=before.length)), strict=True
    ):
        assert old is new
    cache, start = kv.append(cache, jnp.array([[1, 2], [2, 3]]))
    np.testing.assert_array_equal(start, [1, 3])
    np.testing.assert_array_equal(cache.positions, [[0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(
        kv.causal_mask(cache, 1).astype(int), [[[1, 1, 1, 0, 0, 0]], [[0, 1, 1, 1, 1, 0]]]
    )
