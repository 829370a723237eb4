"""The measuring rod itself: a table model must notice a cache at fault, and the counts must be right.

Axes: B rows, L cache slots, T tokens of one call, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.base import Round
from spec_jax.sampling import GREEDY, SamplingConfig
from spec_jax.testing import (
    NanAt,
    ScriptedDrafter,
    TableModel,
    TraceCounter,
    Traced,
    chi_square,
    histogram,
    joint,
    next_distributions,
    prompts,
)
from spec_jax.types import Block, Context

V = 4
MODEL = TableModel.random(jax.random.key(0), V, order=2, num_tables=2)
TEXT = np.array([[0, 3, 1, 2, 2, 1], [0, 1, 1, 3, 0, 2]])
EXPECTED = np.stack([MODEL.table[row, [0, *text[:-1]], text] for row, text in enumerate(TEXT)])  # [B, T, V]


@jax.jit
def read(model, cache, tokens, positions):
    """The hidden states of a block, and the cache with all of it kept."""
    hidden, _, cache = model.decode(Block(tokens, positions), cache)
    return hidden, model.keep(cache, None, positions[:, -1] + 1)


def block(start, end):
    return jnp.asarray(TEXT[:, start:end]), jnp.broadcast_to(jnp.arange(start, end), (2, end - start))


def empty(model=MODEL):
    return model.prefill(prompts([0, 1]), 9).cache


def cache_of(num_tokens):
    return read(MODEL, empty(), *block(0, num_tokens))[1]


def test_tokens_read_at_once_or_in_blocks_look_up_the_same_rows():
    cache = empty()
    for start, end in (0, 1), (1, 4), (4, 6):
        hidden, cache = read(MODEL, cache, *block(start, end))
        np.testing.assert_array_equal(hidden, EXPECTED[:, start:end])
    np.testing.assert_array_equal(MODEL.logits(hidden), hidden)


def test_a_filler_is_invisible():
    cache = empty()
    tokens, positions = block(0, 3)
    tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=3)
    cache = MODEL.keep(cache, None, jnp.array([-1, -1]))
    hidden, cache = read(MODEL, cache, tokens, jnp.pad(positions, ((0, 0), (1, 0)), constant_values=-1))
    np.testing.assert_array_equal(hidden[:, 1:], EXPECTED[:, :3])
    np.testing.assert_array_equal(read(MODEL, cache, *block(3, 6))[0], EXPECTED[:, 3:])


def test_rolled_back_tokens_have_no_effect():
    wrong = jnp.full((2, 3), 3), jnp.broadcast_to(jnp.arange(2, 5), (2, 3))
    _, cache = read(MODEL, cache_of(2), *wrong)
    cache = MODEL.keep(cache, None, jnp.array([2, 2]))
    np.testing.assert_array_equal(read(MODEL, cache, *block(2, 6))[0], EXPECTED[:, 2:])


@pytest.mark.parametrize('length', [3, 5], ids=['one short', 'one too long'])
def test_a_cache_that_is_off_by_one_gives_nan(length):
    cache = MODEL.keep(cache_of(6), None, jnp.array([4, length]))
    hidden, _ = read(MODEL, cache, *block(4, 5))
    np.testing.assert_array_equal(hidden[0], EXPECTED[0, 4:5])
    assert np.isnan(hidden[1]).all()


def test_a_stale_token_gives_another_row_of_the_table():
    cache = cache_of(4)
    stale = cache.self_attention.values[0].at[1, 0, 4, 0].set(0)
    attention = cache.self_attention.replace(values=(stale,))
    hidden, _ = read(MODEL, cache.replace(self_attention=attention), *block(4, 5))
    np.testing.assert_array_equal(hidden[1, 0], MODEL.table[1, 0, TEXT[1, 4]])


def test_models_from_probabilities_and_from_texts():
    probs = np.array([[[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    p = next_distributions(TableModel.from_probs(probs), prompts([0]), 2, SamplingConfig())
    np.testing.assert_allclose(p[0], probs[0, 0], atol=1e-7)
    np.testing.assert_allclose(p[1], probs[0], atol=1e-7)
    writer = TableModel.from_texts([[2, 3, 1], [3]], V, eos_id=1)
    np.testing.assert_array_equal(writer.table.argmax(-1), [[2, 0, 3, 1], [3, 0, 0, 0]])
    assert (writer.order, writer.vocab_size, writer.eos_id) == (1, V, 1)


def test_every_text_of_a_model_is_enumerated():
    p = next_distributions(MODEL, prompts([1]), 3, SamplingConfig())
    assert [p_i.shape for p_i in p] == [(V,), (V, V), (V, V, V)]
    table = np.asarray(jax.nn.softmax(MODEL.table[1]))  # [V, V, V]
    np.testing.assert_allclose(p[0], table[0, 0], atol=1e-6)
    np.testing.assert_allclose(p[1], table[0], atol=1e-6)
    np.testing.assert_allclose(p[2], table, atol=1e-6)
    texts = joint(p)
    assert texts[2, 0, 3] == pytest.approx(table[0, 0, 2] * table[0, 2, 0] * table[2, 0, 3])
    assert texts.sum() == pytest.approx(1)


def test_after_an_eos_there_is_only_padding():
    p = [np.array([0.5, 0.5]), np.array([[0.25, 0.75], [0.5, 0.5]])]
    np.testing.assert_array_equal(joint(p, eos_id=1), [[0.125, 0.375], [0.5, 0]])
    np.testing.assert_array_equal(joint(p), [[0.125, 0.375], [0.25, 0.25]])


def test_nan_comes_at_its_position_and_only_there():
    model = NanAt(MODEL, jnp.array([2, 99]))
    hidden, _ = read(model, empty(model), *block(0, 6))
    np.testing.assert_array_equal(np.isnan(hidden).all(-1), [[0, 0, 1, 0, 0, 0], [0] * 6])
    np.testing.assert_array_equal(np.isnan(hidden).any(-1), [[0, 0, 1, 0, 0, 0], [0] * 6])


def test_traces_are_counted_and_runs_are_not():
    counter = TraceCounter()
    for seed in range(3):
        model = Traced(TableModel.random(jax.random.key(seed), V, order=2, num_tables=2), counter)
        read(model, empty(model), *block(0, 2))
    assert counter.count == 1
    read(model, empty(model), *block(0, 3))
    assert counter.count == 2


def test_a_script_is_proposed_from_the_texts_place_on():
    tokens = jnp.array([[1, 2, 3], [3, 2, 1]])
    probs = jnp.arange(24.0).reshape(2, 3, 4)
    drafter = ScriptedDrafter(tokens, probs, jnp.array([[2, 0, 9], [1, 1, 1]]))
    state = drafter.init(None, None, prompts([0, 1, 2]), 9)
    context = Context(jnp.zeros((3, 9), jnp.int32), jnp.ones(3, jnp.int32), jnp.array([1, 2, 3]))
    round = Round(context, None, 2, GREEDY, V)
    draft, _ = drafter.propose(state, round)
    np.testing.assert_array_equal(draft.tokens, [[1, 2], [2, 1], [3, 3]])
    np.testing.assert_array_equal(draft.length, [2, 1, 2])
    np.testing.assert_array_equal(draft.probs[1], probs[1, 1:3])
    bare, _ = ScriptedDrafter(tokens).propose(state, round)
    np.testing.assert_array_equal(bare.length, [2, 2, 2])
    assert bare.probs is None


def test_texts_are_counted():
    counts = histogram(np.array([[0, 1], [1, 1], [0, 1]]), 2)
    np.testing.assert_array_equal(counts, [[0, 2], [0, 1]])


def test_p_values_by_hand_and_of_impossible_counts():
    assert chi_square(np.array([60, 40]), np.array([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)  # 2 sigma
    assert chi_square(np.array([50, 50]), np.array([0.5, 0.5])) == 1
    assert chi_square(np.array([99, 1]), np.array([1.0, 0.0])) == 0
    assert chi_square(np.array([99, 0]), np.array([1.0, 0.0])) == 1  # nothing left to be wrong


def test_p_values_of_true_samples_are_uniform():
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(30))
    values = [chi_square(random.multinomial(2000, probs), probs) for _ in range(1000)]
    assert np.histogram(values, bins=5, range=(0, 1))[0] == pytest.approx(200, abs=60)
