"""The key/value cache: which slots a block is written to, what its tokens see, and what is kept of it.

Axes: B rows, J key/value heads, L slots, K head width, T tokens of one call.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as kv
from spec_jax.types import Block

SLOTS = 9  # 6 tokens, the filler, and what `updates.write_new` may overwrite


def uneven_cache():
    """Row 0 has kept 4 tokens, row 1 one; each slot's key and value are its number, of stale ones as well."""
    cache = kv.init(1, 2, 1, 7, 1, jnp.float32)
    slots = jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.float32), (2, SLOTS))
    values = slots[:, None, :, None]
    return cache.replace(keys=(values.swapaxes(2, 3),), values=(values,), length=jnp.array([4, 1], jnp.int32))


def block_of(cache, size, mask=None, depths=None):
    """A block after what is kept, whose tokens are 10, 11, ..."""
    depths = jnp.arange(size) if depths is None else jnp.asarray(depths)
    tokens = jnp.broadcast_to(10 + jnp.arange(size), (2, size))
    return Block(tokens, cache.length[:, None] + depths, mask)


def store(cache, block):
    new = block.tokens[:, None, :, None].astype(jnp.float32)
    return kv.store(cache, 0, new.swapaxes(2, 3), new)


def slots_of(cache):
    """The values of both rows, and that the keys are the same."""
    np.testing.assert_array_equal(cache.keys[0][:, 0, 0], cache.values[0][:, 0, :, 0])
    return cache.values[0][:, 0, :, 0]


def test_a_new_cache_is_empty_and_has_room_for_a_filler():
    cache = kv.init(3, 2, 4, 7, 5, jnp.bfloat16)
    assert [array.shape for array in cache.keys] == 3 * [(2, 4, 5, SLOTS)]
    assert [array.shape for array in cache.values] == 3 * [(2, 4, SLOTS, 5)]
    assert cache.keys[0].dtype == jnp.bfloat16
    assert cache.num_slots == SLOTS
    np.testing.assert_array_equal(cache.length, [0, 0])


def test_a_blocks_tokens_are_written_to_the_slots_after_those_kept_by_position_plus_one():
    cache = uneven_cache()
    np.testing.assert_array_equal(
        slots_of(store(cache, block_of(cache, 2))),
        [[0, 1, 2, 3, 4, 10, 11, 7, 8], [0, 1, 10, 11, 4, 5, 6, 7, 8]],
    )


def test_a_window_of_the_first_token_begins_with_the_filler():
    cache = kv.keep(uneven_cache(), None, jnp.array([3, -1]))
    np.testing.assert_array_equal(
        slots_of(store(cache, block_of(cache, 2))),
        [[0, 1, 2, 3, 10, 11, 6, 7, 8], [10, 11, 2, 3, 4, 5, 6, 7, 8]],
    )
    np.testing.assert_array_equal(
        kv.visible(cache, block_of(cache, 2))[1].astype(int), [[0] * SLOTS, [0, 1] + [0] * 7]
    )


def test_a_token_sees_itself_and_those_before_it_but_no_filler_and_nothing_stale():
    cache = uneven_cache()
    np.testing.assert_array_equal(
        kv.visible(cache, block_of(cache, 2)).astype(int),
        [
            [[0, 1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0, 0]],
            [[0, 1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0]],
        ],
    )
    np.testing.assert_array_equal(kv.slot_positions(cache, block_of(cache, 2)), [np.arange(SLOTS) - 1])


TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)  # 0 -> 1, 0 -> 2 -> 3


def test_in_a_tree_a_token_sees_the_text_and_the_nodes_it_follows_at_positions_by_depth():
    cache = uneven_cache()
    block = block_of(cache, 4, jnp.asarray(TREE)[None], [0, 1, 1, 2])
    np.testing.assert_array_equal(
        kv.visible(cache, block)[1].astype(int),
        [
            [0, 1, 1, 0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 0, 0, 0, 0, 0],
            [0, 1, 1, 0, 1, 0, 0, 0, 0],
            [0, 1, 1, 0, 1, 1, 0, 0, 0],
        ],
    )
    np.testing.assert_array_equal(kv.slot_positions(cache, block)[1, 1:6], [0, 1, 2, 2, 3])
    np.testing.assert_array_equal(kv.slot_positions(cache, block)[0, 1:], [0, 1, 2, 3, 4, 5, 5, 6])


def test_a_mask_that_is_causal_is_no_mask():
    cache = uneven_cache()
    causal = jnp.tril(jnp.ones((1, 3, 3), bool))
    np.testing.assert_array_equal(
        kv.visible(cache, block_of(cache, 3, causal)), kv.visible(cache, block_of(cache, 3))
    )


def test_to_keep_fewer_tokens_changes_lengths_only():
    before = uneven_cache()
    cache = kv.keep(before, None, jnp.array([1, 3]))
    np.testing.assert_array_equal(cache.length, [1, 3])
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(cache.replace(length=before.length)), strict=True
    ):
        assert old is new


def test_an_accepted_path_is_moved_to_follow_the_blocks_first_token():
    """Nodes 2 and 3 of the block's four in row 0, node 1 in row 1; what is written after them is stale."""
    cache = uneven_cache()
    cache = store(cache.replace(length=jnp.array([1, 2])), block_of(cache, 4))
    kept = kv.keep(cache, jnp.array([[2, 3, 9], [1, 1, 9]]), jnp.array([4, 4]))
    np.testing.assert_array_equal(kept.length, [4, 4])
    np.testing.assert_array_equal(slots_of(kept)[0, :5], [0, 1, 10, 12, 13])
    np.testing.assert_array_equal(slots_of(kept)[1, :5], [0, 1, 2, 10, 11])
