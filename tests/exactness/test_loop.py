"""The real loop's checks on tables: what is right passes, and each audit distinguishes right from wrong.

Axes: B rows, R rounds, G draft length.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.exactness import audit
from spec_jax.exactness.checks import Pair, choose, to_inputs
from spec_jax.exactness.greedy import greedy
from spec_jax.exactness.sampled import Size, sampled
from spec_jax.measure.scoring import score_texts
from spec_jax.measure.setup import Settings
from spec_jax.models.base import ModelSpec
from spec_jax.state import Output, Stats
from spec_jax.testing import ScriptedDrafter, TableModel

V, EOS, PAD = 6, 1, 0
SPEC = ModelSpec(V, (EOS,), PAD)
SOURCES = [np.array(ids, np.int32) for ids in ([0, 1], [1, 2, 3, 1], [2, 2, 1])]
SIZE = Size(samples=512, tokens=6, rows=128)


@pytest.fixture(scope='module')
def pair():
    target = TableModel.random(jax.random.key(0), V, num_tables=3, eos_id=EOS)
    draft = TableModel.random(jax.random.key(1), V, num_tables=3, eos_id=EOS)
    settings = Settings(DecodeConfig(2, 8))
    return Pair(target, ModelDrafter(draft), settings, 'float32')


def test_a_right_pair_passes_every_check(pair):
    greedy_result, texts = greedy(pair, SOURCES), sampled(pair, SOURCES, SIZE)
    assert [check.passed for check in greedy_result.checks] == [True] * 4
    assert [check.passed for check in texts.checks] == [True] * 8
    assert greedy_result.agreement == dict(greedy_match=1.0, near_ties=[], mismatches=[])
    assert greedy_result.stats.emitted > 0 and texts.stats.tested > 500


def test_a_draft_that_misreports_q_fails_the_audit_of_q_and_of_the_texts(pair):
    """Token 2 each time, reported as drawn from a distribution that has it at 1/4."""
    probs = jnp.full((1, 1, V), 0.15).at[..., 2].set(0.25)
    lying = dataclasses.replace(pair, drafter=ScriptedDrafter(jnp.array([[2]]), probs))
    failed = {check.tested for check in sampled(lying, SOURCES, SIZE).checks if check.passed is False}
    assert 'draft tokens against the q that the draft reports' in failed
    assert "each token against the target's own probabilities" in failed
    honest = dataclasses.replace(pair, drafter=ScriptedDrafter(jnp.array([[2]])))
    assert not [check for check in sampled(honest, SOURCES, SIZE).checks if check.passed is False]


def test_rescoring_by_hand():
    """After start (0) and 2: the places and gaps of the table's rows."""
    probs = np.full((1, 3, 3), 1 / 3)
    probs[0, 0], probs[0, 2] = [0.125, 0.25, 0.625], [0.25, 0.5, 0.25]
    target = TableModel.from_probs(probs)
    inputs = to_inputs([np.array([0]), np.array([0])], 1)
    scores = score_texts(target, inputs.tokens, inputs.mask, jnp.array([[2, 2], [2, 1]]))
    np.testing.assert_allclose(scores.below, [[0, 0.75], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(scores.mass, [[0.625, 0.25], [0.625, 0.5]], atol=1e-6)
    np.testing.assert_allclose(scores.gap, [[0, np.log(2)], [0, 0]], atol=1e-6)


def output(tokens, length, rounds, tested_at, accepted, histogram, emitted, calls):
    counts = rounds, tested_at, accepted, histogram, np.zeros(len(length)), emitted, calls
    stats = Stats(*map(np.asarray, counts))
    return Output(np.asarray(tokens), np.asarray(length), np.zeros(len(length), int), stats)


RIGHT = dict(
    tokens=[[2, 3, EOS, PAD], [2, 3, 4, 5], [PAD] * 4, [EOS, PAD, PAD, PAD]],
    length=[3, 4, 0, 1],
    rounds=[2, 2, 0, 1],
    tested_at=[[1, 1], [2, 1], [0, 0], [1, 0]],
    accepted=[1, 2, 0, 1],
    histogram=[[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0]],
    emitted=[3, 4, 0, 1],
    calls=[[0, 2, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]],
)
WRONG = {
    'a token after EOS': ('tokens', 0, [2, 3, EOS, 5]),
    'a length after EOS': ('length', 0, 4),
    'emitted': ('emitted', 1, 3),
    'rounds': ('rounds', 1, 3),
    'histogram': ('histogram', 1, [0, 1, 1]),
    'accepted': ('accepted', 0, 2),
    'tested': ('tested_at', 1, [1, 0]),
    'calls': ('calls', 1, [0, 0, 1]),
}


def test_right_counts_are_let_pass():
    np.testing.assert_array_equal(audit.miscounted(output(**RIGHT), SPEC), False)


@pytest.mark.parametrize('name', WRONG)
def test_each_wrong_count_is_seen_in_its_row(name):
    field, row, value = WRONG[name]
    changed = [*RIGHT[field]]
    changed[row] = value
    wrong = audit.miscounted(output(**RIGHT | {field: changed}), SPEC)
    np.testing.assert_array_equal(wrong, np.arange(4) == row)


def test_counts_are_those_that_the_trace_adds_up_to():
    """Two rounds: 2 of 2 accepted and one more token; then 1 of 1 valid, cut by the limit."""
    zeros = np.zeros((2, 1, 2))
    trace = audit.Trace(
        length=np.array([[2], [1]]),
        below=zeros,
        mass=zeros,
        total=zeros,
        outside=zeros > 0,
        num_accepted=np.array([[2], [1]]),
        end=np.array([[3], [4]]),
    )
    right = dict(
        rounds=[2],
        tested_at=[[2, 1]],
        accepted=[3],
        histogram=[[0, 1, 1]],
        overlap=[0.0],
        emitted=[4],
        calls=[[0, 0, 2]],
    )
    assert not audit.recounted(trace, Stats(**{name: np.array(value) for name, value in right.items()})).any()
    wrong = dict(tested_at=[[2, 2]], accepted=[2], histogram=[[0, 0, 2]], emitted=[5], calls=[[0, 2, 0]])
    for name, value in wrong.items():
        stats = Stats(**{key: np.array(one) for key, one in (right | {name: value}).items()})
        assert audit.recounted(trace, stats).all(), name


def test_prompts_are_spread_over_the_lengths():
    sources = [np.ones(size, np.int32) for size in (9, 1, 3, 5, 1, 7)]
    assert [len(source) for source in choose(sources, 3)] == [3, 7, 9]
    assert len(choose(sources, 10)) == 4
    with pytest.raises(ValueError, match='expected a line with text in it'):
        choose([np.ones(1, np.int32)], 2)
