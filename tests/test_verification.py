"""Exactness of the accept/resample rule: by enumeration first, then of the code by counting.

Axes: B rows, G draft length, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.lenience import LenientRule
from spec_jax.sampling import GREEDY, SamplingConfig, likeliest, logits_to_probs, row_keys, sample, split_rows
from spec_jax.testing import chi_square, complete, enumerate_round, joint
from spec_jax.types import Draft
from spec_jax.verification import (
    Scores,
    TokenRule,
    acceptance_probability,
    overlap,
    residual_distribution,
    verify_chain,
    verify_greedy,
)

pytestmark = pytest.mark.usefixtures('optimised')

V = 5
ROWS = 200_000
FEW, GAMMA = 20_000, 3  # one shape for what needs no statistics
CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.6, top_k=3),
    SamplingConfig(top_p=0.8),
    SamplingConfig(top_k=4, top_p=0.7, vocab_limit=4),
    GREEDY,
]
distributions = jax.jit(logits_to_probs, static_argnames='config')
verify = jax.jit(verify_chain)
draw = jax.jit(sample)


def chains(seed, gamma, config=CONFIGS[0]):
    """Random p (gamma + 1 arrays) and q (gamma arrays); the i-th, [V] * (i + 1), depends on all i tokens."""
    random = np.random.default_rng(seed)

    shapes = [(V,) * (i + 1) for i in [*range(gamma + 1), *range(gamma)]]
    logits = 2 * random.normal(size=(sum(map(np.prod, shapes)) // V, V)).astype(np.float32)
    probs = np.asarray(distributions(np.resize(logits, (1000, V)), config))  # one size, one compilation
    ends = np.cumsum([np.prod(shape) // V for shape in shapes])
    arrays = [part.reshape(shape) for part, shape in zip(np.split(probs, ends)[:-1], shapes, strict=True)]
    return arrays[: gamma + 1], arrays[gamma + 1 :]


@partial(jax.jit, static_argnums=0)
def keys(num, seed=0):
    return row_keys(jax.random.key(seed), np.arange(num))


@partial(jax.jit, static_argnums=(0, 1))
def step_keys(num, steps, seed):
    return split_rows(row_keys(jax.random.key(seed), np.arange(num)), steps)


# --- closed form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('config', CONFIGS, ids=str)
@pytest.mark.parametrize('gamma', [1, 2, 3])
def test_what_a_round_emits_is_distributed_as_the_target_exactly(gamma, config):
    for seed in range(3):
        p, q = chains(seed, gamma, config)
        emitted = enumerate_round(p, q)
        assert sum(part.sum() for part in emitted) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(complete(emitted, p), joint(p), atol=1e-6)
        reach = 1.0  # [V] * i, the probability that i given tokens come out and the round goes on after them
        for i in range(gamma + 1):
            longer = [part.sum(tuple(range(i + 1, part.ndim))) for part in emitted[i:]]
            np.testing.assert_allclose(sum(longer), np.expand_dims(reach, -1) * p[i], atol=1e-6)
            reach = sum(longer) - emitted[i]


def test_the_enumeration_by_hand():
    """q=[.8,.2], p=[.6,.4]: x=0 passes with .75; a rejected 0 always becomes 1; 1 always passes."""
    p, q = np.float32([0.6, 0.4]), np.float32([0.8, 0.2])
    bonus = np.float32([[0.9, 0.1], [0.3, 0.7]])
    rejected, accepted = enumerate_round([p, bonus], [q])
    np.testing.assert_allclose(rejected, [0, 0.2], atol=1e-7)
    np.testing.assert_allclose(accepted, [[0.6 * 0.9, 0.6 * 0.1], [0.2 * 0.3, 0.2 * 0.7]], atol=1e-7)
    np.testing.assert_allclose(rejected + accepted.sum(1), p, atol=1e-7)


def test_a_q_other_than_the_one_sampled_from_is_noticed():
    """The enumeration itself must be able to fail: draft from q, test against another q."""
    p, q = chains(0, 2)
    wrong = [np.roll(x, 1, axis=-1) for x in q]
    emitted = enumerate_round(p, q)
    lied = enumerate_round(p, wrong)
    emitted[0] = lied[0]
    assert abs(complete(emitted, p) - joint(p)).max() > 0.01


def test_acceptance_probability_and_residual_by_hand():
    p = jnp.array([[0.5, 0.25, 0.25, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    q = jnp.array([[0.25, 0.5, 0.125, 0.125], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    np.testing.assert_array_equal(acceptance_probability(p, q), [0.625, 1, 0])
    np.testing.assert_allclose(
        residual_distribution(p, q), [[2 / 3, 0, 1 / 3, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]], atol=1e-7
    )


def test_a_residual_of_a_few_float32_steps_is_still_normalised():
    p = jnp.full((1, 4), 0.25).at[0, 1].add(2.0**-25)
    residual = residual_distribution(p, jnp.full((1, 4), 0.25))
    np.testing.assert_array_equal(residual, [[0, 1, 0, 0]])


# --- the code, by counting ----------------------------------------------------------------------------------


def draw_drafts(q, num, seed=0):
    """Draft tokens [num, G] sampled from the chain q, and the very arrays they were sampled from."""
    tokens, probs = np.zeros((num, 0), np.int32), []
    for i, q_i in enumerate(q):
        probs.append(q_i[tuple(tokens.T)] if tokens.shape[1] else np.broadcast_to(q_i, (num, V)))
        drawn = np.asarray(draw(step_keys(num, len(q), seed)[i], probs[-1]))
        tokens = np.concatenate([tokens, drawn[:, None]], axis=1)
    return tokens, np.stack(probs, axis=1)


def target_rows(p, tokens):
    """p [B, G + 1, V] after each prefix of the draft tokens [B, G]."""
    rows = [np.broadcast_to(p[0], (len(tokens), V))]
    rows += [p[i][tuple(tokens[:, :i].T)] for i in range(1, len(p))]
    return jnp.asarray(np.stack(rows, axis=1))


def outcomes(verified, gamma):
    """How often each text was emitted: gamma + 1 arrays of counts, as `enumerate_round` has probabilities."""
    accepted, tokens = np.asarray(verified.num_accepted), np.asarray(verified.tokens)
    counts = [np.zeros((V,) * (i + 1)) for i in range(gamma + 1)]
    for i, count in enumerate(counts):
        np.add.at(count, tuple(tokens[accepted == i, : i + 1].T), 1)
    return counts


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


@pytest.mark.parametrize('config', CONFIGS[:4], ids=str)
def test_200_000_rounds_of_the_code_agree_with_the_enumeration(config):
    gamma = 2
    p, q = chains(7, gamma, config)
    tokens, probs = draw_drafts(q, ROWS)
    draft = Draft(jnp.asarray(tokens), jnp.asarray(probs), jnp.full(ROWS, gamma))
    counts = outcomes(verify(target_rows(p, tokens), draft, keys(ROWS, 1)), gamma)
    assert chi_square(flat(counts), flat(enumerate_round(p, q))) > 0.001
    first = sum(count.sum(tuple(range(1, count.ndim))) for count in counts)
    assert chi_square(first, p[0]) > 0.001


def test_q_8_2_and_p_6_4_give_6_4():
    p, q = np.float32([[0.6, 0.4]]), np.float32([[0.8, 0.2]])
    tokens = draw(keys(ROWS), np.broadcast_to(q, (ROWS, 2)))[:, None]
    p_rows = jnp.broadcast_to(jnp.asarray(p), (ROWS, 2, 2))
    draft = Draft(tokens, jnp.broadcast_to(jnp.asarray(q), (ROWS, 1, 2)), jnp.ones(ROWS, jnp.int32))
    verified = verify(p_rows, draft, keys(ROWS, 1))
    assert chi_square(np.bincount(verified.tokens[:, 0]), p[0]) > 0.001
    assert chi_square(np.bincount(verified.num_accepted), np.array([0.2, 0.8])) > 0.001


@pytest.mark.parametrize('lengths', [[0], [1], [0, 1, 2, 3]], ids=str)
def test_a_draft_cut_short_is_followed_by_a_token_from_p_itself(lengths):
    gamma = 3
    p, q = chains(3, gamma)
    tokens, probs = draw_drafts(q, ROWS)
    length = np.resize(lengths, ROWS)
    tokens[np.arange(gamma) >= length[:, None]] = 4  # what stands there must not matter
    probs[np.arange(gamma) >= length[:, None]] = np.eye(V)[4]
    draft = Draft(jnp.asarray(tokens), jnp.asarray(probs), jnp.asarray(length))
    verified = verify(target_rows(p, tokens), draft, keys(ROWS, 1))
    assert (np.asarray(verified.num_accepted) <= length).all()
    for cut in lengths:
        mine = jax.tree.map(lambda x, cut=cut: x[length == cut], verified)
        expected = enumerate_round(p[: cut + 1], q[:cut])
        assert chi_square(flat(outcomes(mine, cut)), flat(expected)) > 0.001


# --- the edges ----------------------------------------------------------------------------------------------


def test_equal_distributions_always_accept():
    q, _ = chains(5, GAMMA)
    tokens, probs = draw_drafts(q[:GAMMA], FEW)
    p = target_rows(q, tokens)
    np.testing.assert_array_equal(p[:, :GAMMA], probs)  # bitwise
    draft = Draft(jnp.asarray(tokens), jnp.asarray(probs), jnp.full(FEW, GAMMA))
    verified = verify(p, draft, keys(FEW, 1))
    np.testing.assert_array_equal(verified.num_accepted, GAMMA)
    np.testing.assert_array_equal(verified.tokens[:, :GAMMA], tokens)


def test_disjoint_supports_never_accept_and_replace_from_p():
    p = jnp.broadcast_to(jnp.array([0.0, 0.0, 0.25, 0.75, 0.0]), (FEW, GAMMA + 1, V))
    q = jnp.broadcast_to(jnp.array([0.5, 0.5, 0.0, 0.0, 0.0]), (FEW, GAMMA, V))
    draft = Draft(jnp.zeros((FEW, GAMMA), jnp.int32), q, jnp.full(FEW, GAMMA))
    verified = verify(p, draft, keys(FEW))
    np.testing.assert_array_equal(verified.num_accepted, 0)
    assert chi_square(np.bincount(verified.tokens[:, 0], minlength=V), p[0, 0]) > 0.001


@pytest.mark.parametrize('uniform', [0.0, 1 - 2.0**-23])
def test_at_the_ends_of_the_unit_interval_the_accept_test_is_strict(uniform, monkeypatch):
    """u = 0 must not pass a token with p = 0, and the largest u must pass one with p = q."""
    monkeypatch.setattr(jax.random, 'uniform', lambda key: jnp.float32(uniform))
    p = jnp.array([[[0.0, 1.0], [0.5, 0.5]], [[0.25, 0.75], [0.5, 0.5]]])
    q = jnp.array([[[1.0, 0.0]], [[0.25, 0.75]]])
    draft = Draft(jnp.array([[0], [0]]), q, jnp.array([1, 1]))
    verify_now = jax.jit(lambda *args: verify_chain(*args))  # traced anew, with this uniform
    verified = verify_now(p, draft, keys(2))
    np.testing.assert_array_equal(verified.num_accepted, [0, 1])
    assert verified.tokens[0, 0] == 1
    certain = verify_now(p, draft.replace(probs=None), keys(2))
    np.testing.assert_array_equal(certain.num_accepted, [0, int(uniform == 0)])
    assert certain.tokens[0, 0] == 1


def test_a_draft_without_probabilities_is_one_hot_bit_for_bit():
    p, q = chains(9, GAMMA)
    tokens, _ = draw_drafts(q, FEW)
    length = jnp.asarray(np.resize([0, 1, 2, 3], FEW))
    certain = Draft(jnp.asarray(tokens), None, length)
    one_hot = certain.replace(probs=jax.nn.one_hot(certain.tokens, V))
    np.testing.assert_array_equal(one_hot.probs, np.eye(V)[tokens])
    one, other = (verify(target_rows(p, tokens), draft, keys(FEW)) for draft in (certain, one_hot))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_draft_without_probabilities_is_exact():
    """Accept with p(x), residual p without x; the draft is the likeliest continuation."""
    p, _ = chains(11, 2)
    first = p[0].argmax()
    second = p[1][first].argmax()
    tokens = np.broadcast_to(np.int32([first, second]), (ROWS, 2))
    q = [np.eye(V)[first], np.broadcast_to(np.eye(V)[second], (V, V))]
    counts = outcomes(
        verify(target_rows(p, tokens), Draft(tokens, None, jnp.full(ROWS, 2)), keys(ROWS, 1)), 2
    )
    assert chi_square(flat(counts), flat(enumerate_round(p, q))) > 0.001


def test_greedy_accepts_the_argmax_prefix_and_then_gives_the_argmax():
    texts = [[1, 2, 3, 4], [1, 2, 3], [1], [1, 2]]
    tokens = np.resize([[1, 2, 3], [1, 2, 0], [0, 2, 3], [1, 0, 3]], (FEW, GAMMA))
    p = jnp.asarray(np.eye(V, dtype=np.float32)[np.broadcast_to([1, 2, 3, 4], (FEW, GAMMA + 1))])
    for probs in None, jnp.asarray(np.eye(V, dtype=np.float32)[tokens]):
        verified = verify(p, Draft(jnp.asarray(tokens), probs, jnp.full(FEW, GAMMA)), keys(FEW))
        np.testing.assert_array_equal(verified.num_accepted, np.resize([3, 2, 0, 1], FEW))
        for row, text in enumerate(texts):
            np.testing.assert_array_equal(verified.tokens[row, : len(text)], text)


def test_a_row_is_verified_alike_alone_and_in_any_batch():
    p, q = chains(13, GAMMA)
    tokens, probs = draw_drafts(q, FEW)
    p = target_rows(p, tokens)
    draft = Draft(jnp.asarray(tokens), jnp.asarray(probs), jnp.full(FEW, GAMMA))
    together = verify(p, draft, keys(FEW))
    assert set(together.num_accepted[:100].tolist()) == {0, 1, 2, 3}

    def assert_alike(rows):
        picked = verify(p[rows], jax.tree.map(lambda x: x[rows], draft), keys(FEW)[rows])
        beta = together.beta[rows]
        np.testing.assert_allclose(beta, picked.beta, rtol=1e-6)  # a sum, whose order may vary
        expected = jax.tree.map(lambda x: x[rows], together).replace(beta=picked.beta)
        jax.tree.map(np.testing.assert_array_equal, expected, picked)

    assert_alike(np.random.default_rng(0).permutation(FEW))
    assert_alike(np.array([5]))


def test_acceptances_of_one_row_are_independent_of_each_other_and_of_the_replacement():
    """Each of G tests passes with 1/2, whatever the others did; a shared random number would show here."""
    gamma = 3
    p = jnp.broadcast_to(jnp.array([0.5, 0.5, 0, 0, 0]), (ROWS, gamma + 1, V))
    draft = Draft(jnp.zeros((ROWS, gamma), jnp.int32), None, jnp.full(ROWS, gamma))
    verified = verify(p, draft, keys(ROWS, 3))
    assert chi_square(np.bincount(verified.num_accepted), np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])) > 0.001
    bonus = np.asarray(verified.tokens[:, gamma])[np.asarray(verified.num_accepted) == gamma]
    assert chi_square(np.bincount(bonus), np.array([0.5, 0.5])) > 0.001


# --- lenience (LOSSY) ---------------------------------------------------------------------------------------


def test_lenience_by_hand_and_no_token_is_likelier_than_p_over_l():
    """p / l = (1, .6, .4); of q, (.1, .2, .4) passes and .3 is drawn anew from (.8, .2, 0)."""
    p, q, lenience = np.array([0.5, 0.3, 0.2], np.float32), np.array([0.1, 0.2, 0.7], np.float32), 0.5
    tokens, probs = np.asarray(draw(keys(FEW, 1), np.tile(q, (FEW, 1)))), np.tile(q, (FEW, 1, 1))
    rows = np.tile(p, (FEW, 2, 1))
    bound = LenientRule(lenience).bound(Scores(np.log(rows), CONFIGS[0]))
    np.testing.assert_allclose(bound[0, 0], [1, 0.6, 0.4], rtol=1e-6)
    verified = verify(rows, Draft(tokens[:, None], probs, np.ones(FEW, np.int32)), keys(FEW, 2), bound)
    first = np.bincount(verified.tokens[:, 0], minlength=3)
    assert chi_square(first, np.array([0.34, 0.26, 0.4])) > 0.001
    assert chi_square(np.bincount(verified.num_accepted, minlength=2), np.array([0.3, 0.7])) > 0.001


def test_greedy_lenience_passes_what_is_nearly_as_likely_as_the_best():
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], np.float32))
    scores, limited = Scores(logits, GREEDY), SamplingConfig(temperature=0.0, vocab_limit=2)
    np.testing.assert_array_equal(LenientRule(0.5).bound(scores), [[1, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(LenientRule(0.1).bound(scores), np.ones((2, 3)))
    np.testing.assert_array_equal(LenientRule(0.999).bound(scores), logits_to_probs(logits, GREEDY))
    np.testing.assert_array_equal(LenientRule(0.1).bound(Scores(logits, limited))[0], [1, 1, 0])


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_a_round_without_a_guess_draws_what_the_rule_makes_of_a_draft_of_length_0(config):
    """From the first distribution and the same random number, for any tokens in the draft and after it."""
    random = np.random.default_rng(3)
    logits = random.normal(size=(FEW, GAMMA + 1, V)).astype(np.float32)
    tokens = random.integers(0, V, (FEW, GAMMA)).astype(np.int32)
    draft = Draft(tokens, None, np.zeros(FEW, np.int32))
    nothing = verify(distributions(logits, config), draft, keys(FEW))
    drawn = jax.jit(TokenRule())(Scores(logits[:, :1], config), draft.first(0), keys(FEW))
    assert not nothing.num_accepted.any() and not drawn.num_accepted.any()
    np.testing.assert_array_equal(drawn.tokens, nothing.tokens[:, :1])
    assert len(np.unique(drawn.tokens)) == min(V, config.vocab_limit or V)


def test_scores_without_a_distribution_are_invalid():
    logits = jnp.array([[0.0, 1.0], [0.0, jnp.nan], [jnp.inf, 0.0], [-jnp.inf, -jnp.inf]])[:, None]
    for config in (GREEDY, SamplingConfig()):
        np.testing.assert_array_equal(Scores(logits, config).invalid, [False, True, True, True])


@pytest.mark.parametrize('sampled', [False, True], ids=['q one-hot', 'q as it comes'])
def test_the_greedy_rule_is_the_rule_where_p_is_one_hot(sampled):
    random = np.random.default_rng(4)
    logits = random.integers(0, 3, (FEW, GAMMA + 1, V)).astype(np.float32)  # with ties
    tokens = random.integers(0, V, (FEW, GAMMA)).astype(np.int32)
    q = random.dirichlet(np.full(V, 0.3), (FEW, GAMMA)).astype(np.float32) if sampled else None
    draft = Draft(tokens, q, random.integers(0, GAMMA + 1, FEW).astype(np.int32))
    p, best = distributions(logits, GREEDY), likeliest(logits, GREEDY)
    expected, greedy_verdict = verify(p, draft, keys(FEW)), verify_greedy(best, draft)
    np.testing.assert_array_equal(greedy_verdict.num_accepted, expected.num_accepted)
    emitted = np.arange(GAMMA + 1) <= np.asarray(greedy_verdict.num_accepted)[:, None]
    np.testing.assert_array_equal(
        np.where(emitted, greedy_verdict.tokens, 0), np.where(emitted, expected.tokens, 0)
    )
    np.testing.assert_array_equal(greedy_verdict.beta, overlap(p[:, :-1], draft))
    assert np.bincount(greedy_verdict.num_accepted).min() > 20
