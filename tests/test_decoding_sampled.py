"""What the compiled loop samples, counted and compared with every text's exact probability.

Axes: B rows, G draft length, R tables, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.generation import generate, plain_generate
from spec_jax.sampling import SamplingConfig
from spec_jax.testing import (
    ScriptedDrafter,
    TableModel,
    chi_square,
    histogram,
    joint,
    next_distributions,
    prompts,
)

pytestmark = pytest.mark.usefixtures('optimised')

V, EOS = 5, 1
BATCH = 20_000
LENGTH = 6
NEVER, ALWAYS, CHANCE = range(3)  # how often the draft of a row's table is right


def pair_of_models():
    """Three tables of order 2: the target never generates 4, the first draft only 4; the second is right."""
    target = TableModel.random(jax.random.key(0), V, order=2, num_tables=3, eos_id=EOS)
    draft = TableModel.random(jax.random.key(1), V, order=2, num_tables=3, eos_id=EOS)
    table = target.table.at[NEVER, ..., 4].set(-jnp.inf)
    drafts = draft.table.at[NEVER, ..., :4].set(-jnp.inf).at[ALWAYS].set(table[ALWAYS])
    return target.replace(table=table), ModelDrafter(draft.replace(table=drafts))


def continuations(target, drafter, kinds, sampling, calls, seed):
    """`calls` batches of outputs [BATCH, LENGTH], joined, with their counts."""
    inputs = prompts(np.resize(kinds, BATCH))
    config = DecodeConfig(3, LENGTH, sampling)
    parts = [generate(target, drafter, inputs, jax.random.key(seed + i), config) for i in range(calls)]
    parts = [(np.asarray(part.tokens), jax.tree.map(np.asarray, part.stats)) for part in parts]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def assert_distributed_as(tokens, expected):
    """Joint of the first four tokens, and of each pair of neighbours, against expected [V] * N."""
    count = histogram(tokens, V)
    places = range(expected.ndim)
    for kept in [*([i, i + 1] for i in places[:-1]), places[:4]]:
        rest = tuple(place for place in places if place not in kept)
        p_value = chi_square(count.sum(rest), expected.sum(rest))
        assert p_value > 0.001, f'tokens {[*kept]}: p = {p_value:.2g}'


CONFIGS = [SamplingConfig(), SamplingConfig(temperature=0.8, top_k=4, top_p=0.9)]


@pytest.mark.parametrize(
    'sampling',
    [
        pytest.param(one, marks=() if one == SamplingConfig() else pytest.mark.slow, id=str(one))
        for one in CONFIGS
    ],
)
def test_200_000_continuations_are_distributed_as_the_targets(sampling):
    target, drafter = pair_of_models()
    calls = 10 if sampling == SamplingConfig() else 4
    tokens, stats = continuations(target, drafter, [CHANCE], sampling, calls, seed=0)
    p = next_distributions(target, prompts([CHANCE]), LENGTH, sampling)
    assert_distributed_as(tokens, joint(p, EOS))
    tested, accepted, overlap = (getattr(stats, name).sum() for name in ('tested', 'accepted', 'overlap'))
    assert 0.2 < accepted / tested < 0.9
    assert accepted / tested == pytest.approx(overlap / tested, abs=4 * (0.25 / tested) ** 0.5)


def test_rows_of_uneven_acceptance_in_one_batch_are_each_distributed_as_their_target():
    """Acceptances of 0, gamma and chance side by side; a batch minimum would show in the counts."""
    target, drafter = pair_of_models()
    kinds = np.array([NEVER, ALWAYS, CHANCE])
    tokens, stats = continuations(target, drafter, kinds, CONFIGS[0], calls=10, seed=100)
    row = np.tile(np.resize(kinds, BATCH), 10)
    assert stats.accepted[row == NEVER].max() == 0
    np.testing.assert_array_equal(stats.accepted[row == ALWAYS], stats.tested[row == ALWAYS])
    np.testing.assert_array_equal(stats.rounds[row == NEVER], stats.emitted[row == NEVER])
    for kind in kinds:
        p = next_distributions(target, prompts([kind]), LENGTH, CONFIGS[0])
        assert_distributed_as(tokens[row == kind], joint(p, EOS))


def test_plain_continuations_are_distributed_as_the_targets():
    target, _ = pair_of_models()
    inputs = prompts([CHANCE] * BATCH)
    output = plain_generate(target, inputs, jax.random.key(9), DecodeConfig(0, LENGTH, CONFIGS[0]))
    p = next_distributions(target, prompts([CHANCE]), LENGTH, CONFIGS[0])
    assert_distributed_as(output.tokens, joint(p, EOS))


def test_a_draft_without_probabilities_and_of_any_length_leaves_the_distribution_alone():
    target, _ = pair_of_models()
    drafter = ScriptedDrafter(jnp.array([[2, 3, 0, 4]]), lengths=jnp.array([[2, 0, 1, 2]]))
    inputs = prompts([CHANCE] * BATCH)
    output = generate(target, drafter, inputs, jax.random.key(3), DecodeConfig(2, 4, CONFIGS[0]))
    assert_distributed_as(
        output.tokens, joint(next_distributions(target, prompts([CHANCE]), 4, CONFIGS[0]), EOS)
    )
    assert (np.asarray(output.stats.tested) <= 4).all() and output.stats.accepted.sum() > 0


def fit(model, vocab_size):
    """The same model with rows of its head cut off, or added with far too much mass."""
    table = model.table
    for axis in range(1, table.ndim):
        extra = vocab_size - table.shape[axis]
        if extra < 0:
            table = jax.lax.slice_in_dim(table, 0, vocab_size, axis=axis)
        else:
            widths = [(0, extra if axis == i else 0) for i in range(table.ndim)]
            table = jnp.pad(table, widths, constant_values=20.0)
    return model.replace(table=table)


@pytest.mark.parametrize(('target_rows', 'draft_rows', 'limit'), [(8, 5, V), (5, 8, None)])
def test_padding_rows_of_either_head_are_never_drawn_and_change_nothing(target_rows, draft_rows, limit):
    """Vocabularies that agree on the first 5 ids; the larger head has most of its mass beyond them."""
    target, drafter = pair_of_models()
    wide = fit(target, target_rows), ModelDrafter(fit(drafter.model, draft_rows))
    config = DecodeConfig(3, 3, SamplingConfig(vocab_limit=limit))
    output = generate(*wide, prompts([CHANCE] * BATCH), jax.random.key(5), config)
    p = next_distributions(target, prompts([CHANCE]), 3, CONFIGS[0])
    assert output.tokens.max() < V
    assert chi_square(histogram(output.tokens, V), joint(p, EOS)) > 0.001
    assert output.stats.accepted.sum() > 0.2 * output.stats.tested.sum()
