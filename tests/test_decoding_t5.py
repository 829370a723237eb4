"""The loop around a tiny T5 with random weights: caches and acceptance of a real architecture.

Axes: B rows, G draft length, S source length, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spec_jax import decoding
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import Round
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.generation import generate, plain_generate
from spec_jax.models.t5 import T5, T5Config
from spec_jax.runtime import backend
from spec_jax.sampling import GREEDY, row_keys
from spec_jax.types import Block, Inputs

CONFIG = T5Config(
    vocab_size=24,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=2,
    eos_id=-1,  # texts go on to the limit
)
INPUTS = Inputs(jnp.arange(15).reshape(3, 5) + 2, jnp.arange(5) < jnp.array([5, 3, 4])[:, None])
KEYS = row_keys(jax.random.key(0), range(3))


def sharp_t5(seed):
    """Scores spread enough for the argmax to be no near-tie."""
    model = jax.jit(partial(T5.create, CONFIG))(jax.random.key(seed))
    return model.replace(params=jax.tree.map(lambda x: 2 * x, model.params))


def blurred(model, noise):
    """A draft that is sometimes right."""
    random = np.random.default_rng(9)
    blur = lambda x: (x + noise * x.std() * random.normal(size=x.shape)).astype(np.float32)  # noqa: E731
    return ModelDrafter(
        model.replace(params=jax.tree.map(lambda x: jnp.asarray(blur(np.asarray(x))), model.params))
    )


@pytest.fixture(scope='module')
def target():
    return sharp_t5(0)


def test_greedy_ids_equal_plain_decodings_and_acceptance_does_not_decay(target):
    config = DecodeConfig(4, 50 * 5, GREEDY)
    expected = plain_generate(target, INPUTS, KEYS, config)
    perfect = generate(target, ModelDrafter(target), INPUTS, KEYS, config)
    np.testing.assert_array_equal(perfect.tokens, expected.tokens)
    np.testing.assert_array_equal(perfect.stats.rounds, 50)
    np.testing.assert_array_equal(perfect.stats.accepted, 50 * 4)
    chance = generate(target, blurred(target, 0.06), INPUTS, KEYS, config)
    np.testing.assert_array_equal(chance.tokens, expected.tokens)
    assert (chance.stats.accepted < chance.stats.tested).all()


@partial(jax.jit, static_argnames='rounds')
def run(target, drafter, *, rounds):
    """The state after some rounds, and both models' distributions of the next token [B, V], drafted afresh."""
    config = DecodeConfig(3, 40, GREEDY)
    state = decoding.start(target, drafter, INPUTS, KEYS, config=config)
    step = partial(decoding.speculative_step, target, drafter, config=config)
    state = lax.fori_loop(0, rounds, lambda _, state: step(state), state)
    draft, _ = NoDrafter().propose((), Round(state.context, KEYS, 0, GREEDY, CONFIG.vocab_size))
    logits, *_ = decoding.target_call(target, state.target_cache, state.context, draft)
    return state, logits[:, 0]


@jax.jit
def next_from_scratch(model, context):
    """Logits [B, V] after each row's text, in one call on an empty cache."""
    size = context.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), context.tokens.shape)
    hidden, *_ = model.decode(Block(context.tokens, positions), model.prefill(INPUTS, size).cache)
    return model.logits(hidden)[jnp.arange(3), context.length - 1]


def test_caches_after_uneven_rollback_equal_a_fresh_prefill_of_the_output(target):
    drafter = blurred(target, 0.03)
    state, logits = run(target, drafter, rounds=6)
    assert len(set(state.context.length.tolist())) == 3  # no two rows alike
    np.testing.assert_allclose(logits, next_from_scratch(target, state.context), atol=1e-4)
    np.testing.assert_array_equal(state.target_cache.self_attention.length, state.context.length - 1)
    with backend.tracing_for('gpu'):
        draft = propose(drafter, state)  # by steps over two tokens, where the rounds so far looked at one
    context = state.context
    for place in range(3):
        expected = next_from_scratch(drafter.model, context).argmax(-1)
        np.testing.assert_array_equal(draft.tokens[:, place], expected)
        tokens = context.tokens.at[jnp.arange(3), context.length].set(expected)
        context = context.replace(tokens=tokens, length=context.length + 1)


@jax.jit
def propose(drafter, state):
    round = Round(state.context, KEYS, 3, GREEDY, CONFIG.vocab_size)
    return drafter.propose(state.draft_state, round)[0]
