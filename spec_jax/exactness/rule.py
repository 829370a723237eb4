"""The distribution that the accept/resample rule emits, integrated exactly over its random numbers.

The rule is called with keys that hold the numbers to be drawn from them, and must split them as
`verification.verify_chain` does. For a given draft each test passes for all uniforms below a bound, and each token
is emitted for one interval of them; both are found by bisection down to float32's last bit. Bounds and intervals
give the probability of everything that a round can emit, to within the 2^-23 of JAX's uniforms.

Axes: R rules (a draft text under one sampling and draft length), Q points at which each is called, G draft depth,
V vocabulary, C coordinates of a key.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from spec_jax.exactness.checks import Check, Progress, quiet
from spec_jax.sampling import GREEDY, SamplingConfig, logits_to_probs
from spec_jax.testing import complete, enumerate_round, joint
from spec_jax.types import Draft
from spec_jax.verification import Rule, Scores, TokenRule, acceptance_probability

VOCAB = 5
_EXACT = TokenRule()
_STEPS = 2**23  # of a float32 uniform in [0, 1)
_COORDINATES = 8
_TOLERANCE = 1e-6
_SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.6, top_k=3),
    SamplingConfig(top_p=0.8),
    GREEDY,
)


def closed_form(rule: Rule | None = None, progress: Progress = quiet) -> list[Check]:
    """Checks a rule over a vocabulary of 5, draft lengths to 3, with temperature, top-k, top-p and greedy.

    Args:
      rule: `TokenRule` by default. Its name and `lossy` are not used.
      progress: wraps the list of parts.
    """
    rule = TokenRule() if rule is None else rule
    parts = [(gamma, sampled) for gamma in (1, 2, 3) for sampled in (True, False)]
    integrals = {True: Integral(), False: Integral()}
    for gamma, sampled in progress(parts, desc='the rule'):
        chosen = _SAMPLINGS if gamma < 3 else _SAMPLINGS[:2] if sampled else _SAMPLINGS[2:]  # 125 texts each
        chains = [random_chain(seed, gamma, sampling) for seed, sampling in enumerate(chosen)]
        if not sampled:
            chains = [deterministic(chain) for chain in chains]
        integrals[sampled] += integrate(chains, sampled, rule)
    both = integrals[True] + integrals[False]
    wrong = both.ends + both.others
    ends = 'p = 0 never passes, p >= q always, and each random number decides one thing'
    return [
        _deviation('what a round emits; draft that samples', integrals[True].rules, integrals[True].emitted),
        _deviation('what a round emits; q one-hot', integrals[False].rules, integrals[False].emitted),
        _deviation('residual, and alpha = sum of min(p, q)', both.rules, max(both.enumerated, both.accepted)),
        Check('rule', ends, f'{both.rules} drafts', f'{wrong} wrong', 'any', wrong == 0),
    ]


def _deviation(tested: str, num_rules: int, size: float) -> Check:
    return Check(
        tier='rule',
        tested=tested,
        samples=f'{num_rules} drafts, all random numbers',
        found=f'largest deviation {size:.1g}',
        finds=f'a probability off by {_TOLERANCE:g}',
        passed=bool(size <= _TOLERANCE),
    )


# --- keys that hold what is drawn ---------------------------------------------------------------------------


def _seed(seed):
    return jnp.zeros(_COORDINATES + 2, jnp.uint32)


def _split(key, shape):
    """Child i of n gets the coordinates i, i + n, i + 2 n, ... of its parent's."""
    num = math.prod(shape)
    start, stride = key[-2], key[-1]
    indices = [start + stride * jnp.arange(num, dtype=jnp.uint32), jnp.full(num, stride * num)]
    held = jnp.broadcast_to(key[:-2], (num, _COORDINATES))
    return jnp.concatenate([held, jnp.stack(indices, axis=1)], axis=1).reshape(*shape, -1)


def _bits(key, bit_width, shape):
    return jnp.broadcast_to(key[key[-2]], shape)  # the first of the key's coordinates


_POINT = define_prng_impl(
    key_shape=(_COORDINATES + 2,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=lambda key, data: key,
    name='point',
    tag='pt',
)
_TOKEN = 1  # the coordinate of the last draw; that of test i is 2 i, as `verify_chain` splits a key


def _point_keys(coordinates):
    """Keys [B] whose draws are `coordinates` [B, C] int in [0, 2^23), over 2^23."""
    bits = coordinates.astype(jnp.uint32) << 9  # a uniform takes the upper 23 bits
    indices = jnp.broadcast_to(jnp.array([0, 1], jnp.uint32), (len(bits), 2))
    return jax.random.wrap_key_data(jnp.concatenate([bits, indices], axis=1), impl=_POINT)


@flax.struct.dataclass
class _Given(Scores):
    """Scores whose `logits` are already p."""

    @property
    def p(self) -> jax.Array:
        return self.logits


@partial(jax.jit, static_argnames='rule')
def _outcome(p, draft, coordinates, *, rule):
    """How many draft tokens pass, and the token after them: [R, Q] each, at coordinates [R, Q, C]."""
    num_rules, num_questions = coordinates.shape[:2]
    p, draft = jax.tree.map(lambda x: jnp.repeat(x, num_questions, axis=0), (p, draft))
    keys = _point_keys(coordinates.reshape(-1, _COORDINATES))
    verified = rule(_Given(p, SamplingConfig()), draft, keys)
    token = jnp.take_along_axis(verified.tokens, verified.num_accepted[:, None], axis=1)[:, 0]
    return jax.tree.map(lambda x: x.reshape(num_rules, num_questions), (verified.num_accepted, token))


# --- the rules ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chain:
    """Distributions of the next token after every text, under one sampling.

    Attributes:
      p: G + 1 float32 arrays of the target's; the i-th, [V] * (i + 1), depends on all i tokens.
      q: G arrays of the draft's; one-hot where it is deterministic.
    """

    p: list[np.ndarray]
    q: list[np.ndarray]


def random_chain(seed: int, gamma: int, sampling: SamplingConfig) -> Chain:
    """From normally distributed logits, by the library's `logits_to_probs`."""
    shapes = [(VOCAB,) * (i + 1) for i in [*range(gamma + 1), *range(gamma)]]
    sizes = [math.prod(shape) // VOCAB for shape in shapes]
    logits = 2 * np.random.default_rng(seed).normal(size=(sum(sizes), VOCAB)).astype(np.float32)
    logits = np.resize(logits, (256, VOCAB))  # one size for every gamma, one compilation

    def arrays(flat):
        parts = np.split(np.asarray(flat), np.cumsum(sizes))
        return [part.reshape(shape) for part, shape in zip(parts[:-1], shapes, strict=True)]

    probs = arrays(_probs(logits, sampling))
    return Chain(probs[: gamma + 1], probs[gamma + 1 :])


_probs = partial(jax.jit, static_argnums=1)(logits_to_probs)


def deterministic(chain: Chain) -> Chain:
    """The same target with a draft that always takes its most probable token."""
    return dataclasses.replace(
        chain, q=[np.eye(VOCAB, dtype=np.float32)[array.argmax(-1)] for array in chain.q]
    )


@dataclasses.dataclass
class Integral:
    """The result over all rules.

    Attributes:
      rules: how many draft texts, each under one sampling and one draft length.
      emitted: largest deviation of the probability of any text of draft length + 1 tokens from the target's.
      enumerated: the same by `testing.enumerate_round`, out of min(p, q) and `residual_distribution`.
      accepted: largest deviation of the first test's passing from `acceptance_probability`.
      ends: tests that a token with p = 0 passes, or that one with p >= q can fail, or of a token that is not valid.
      others: points at which the rule's outcome differs from that of the bounds and intervals.
    """

    rules: int = 0
    emitted: float = 0.0
    enumerated: float = 0.0
    accepted: float = 0.0
    ends: int = 0
    others: int = 0

    def __add__(self, other: Integral) -> Integral:
        return Integral(
            self.rules + other.rules,
            max(self.emitted, other.emitted),
            max(self.enumerated, other.enumerated),
            max(self.accepted, other.accepted),
            self.ends + other.ends,
            self.others + other.others,
        )


def integrate(chains: Sequence[Chain], with_probs: bool, rule: Rule = _EXACT, seed: int = 0) -> Integral:
    """Integrates a rule over its random numbers, for every draft text of every chain.

    Args:
      chains: of one gamma.
      with_probs: whether `Draft.probs` is given; if not, each q must be one-hot.
      rule: the rule.
      seed: of the points at which the bounds are checked.
    """
    gamma = len(chains[0].q)
    texts = np.array(list(itertools.product(range(VOCAB), repeat=gamma)), np.int32)  # [texts, G]
    drafts = _drafts(chains, texts, with_probs, rule)
    passing, stretches = _measure(drafts)
    integral = Integral(len(drafts.tokens), ends=_wrong_ends(drafts, passing))
    integral.others = _others(drafts, passing, stretches, seed)

    shape = (len(chains), gamma + 1, len(texts))  # of the rules: chain, draft length, text
    passing = (passing / _STEPS).reshape(*shape, gamma)
    chances = np.diff(stretches / _STEPS, axis=-1, prepend=0, append=1).reshape(*shape, gamma + 1, VOCAB)
    for index, chain in enumerate(chains):
        weight = joint(chain.q)  # [V] * G
        for length in range(gamma + 1):
            emitted = _emitted(texts, weight, passing[index, length], chances[index, length])[: length + 1]
            expected = joint(chain.p[: length + 1])
            integral.emitted = max(
                integral.emitted, _largest(complete(emitted, chain.p[: length + 1]), expected)
            )
        listed = complete(enumerate_round(chain.p, chain.q), chain.p)
        integral.enumerated = max(integral.enumerated, _largest(listed, expected))
        share = (weight.ravel() * passing[index, gamma, :, 0]).sum()
        alpha = float(acceptance_probability(jnp.asarray(chain.p[0]), jnp.asarray(chain.q[0])))
        integral.accepted = max(integral.accepted, abs(share - alpha))
    return integral


@dataclasses.dataclass(frozen=True)
class _Drafts:
    """R drafts, each under one rule and one way of sampling.

    Attributes:
      p: [R, G + 1, V].
      q: [R, G, V].
      tokens: [R, G], the draft.
      length: [R], how many of them are valid.
      with_probs: whether the rule gets q.
      rule: the rule.
    """

    p: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    length: np.ndarray
    with_probs: bool
    rule: Rule

    def outcome(self, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draft tokens passed and the token after them, [R, Q] each, at coordinates [R, Q, C]."""
        draft = Draft(self.tokens, self.q if self.with_probs else None, self.length)
        return jax.tree.map(np.asarray, _outcome(self.p, draft, coordinates, rule=self.rule))


def _drafts(chains: Sequence[Chain], texts: np.ndarray, with_probs: bool, rule: Rule) -> _Drafts:
    """Every text [texts, G] of every chain at every draft length."""
    gamma = texts.shape[1]

    def following(arrays):
        """[texts, len(arrays), V], the distributions after each beginning of each text."""
        rows = [array[tuple(texts[:, :i].T)] for i, array in enumerate(arrays)]
        return np.stack([np.broadcast_to(row, (len(texts), VOCAB)) for row in rows], axis=1)

    def rows(name):
        return np.concatenate(
            [np.tile(following(getattr(chain, name)), (gamma + 1, 1, 1)) for chain in chains]
        )

    return _Drafts(
        p=rows('p'),
        q=rows('q'),
        tokens=np.tile(texts, (len(chains) * (gamma + 1), 1)),
        length=np.tile(np.repeat(np.arange(gamma + 1, dtype=np.int32), len(texts)), len(chains)),
        with_probs=with_probs,
        rule=rule,
    )


def _measure(drafts: _Drafts) -> tuple[np.ndarray, np.ndarray]:
    """Bounds and intervals of the uniforms, in steps of 2^-23.

    Returns:
      passing [R, G], how many of a test's uniforms pass it, those before it having passed; and
      stretches [R, G + 1, V - 1], how many uniforms give token 0, 0 or 1, ... after so many passed draft tokens.
    """
    num, gamma = drafts.tokens.shape
    tests, ends = np.arange(gamma), [(n, y) for n in range(gamma + 1) for y in range(VOCAB - 1)]
    passed, upto = np.array(ends).T
    at = np.zeros((gamma + len(ends), _COORDINATES), int)  # 0 passes any test that can be passed
    failing = passed < gamma
    at[gamma:][failing, 2 * passed[failing]] = _STEPS - 1  # fails any test that can be failed
    varied = np.concatenate([2 * tests, np.full(len(ends), _TOKEN)])

    below = np.zeros((num, len(at)), int)
    for bit in reversed(range(24)):  # 2^23 is possible: all pass
        trial = below + (1 << bit)
        coordinates = np.broadcast_to(at, (num, *at.shape)).copy()
        coordinates[:, np.arange(len(at)), varied] = np.minimum(trial, _STEPS) - 1
        accepted, token = drafts.outcome(coordinates)
        holds = np.concatenate([accepted[:, :gamma] > tests, token[:, gamma:] <= upto], axis=1)
        below = np.where(holds & (trial <= _STEPS), trial, below)
    return below[:, :gamma], below[:, gamma:].reshape(num, gamma + 1, VOCAB - 1)


def _wrong_ends(drafts: _Drafts, passing: np.ndarray) -> int:
    """How many tests break one of these: p = 0 never passes, p >= q always passes, an invalid token never."""

    def of_token(probs):
        return np.take_along_axis(probs, drafts.tokens[:, :, None], axis=2)[:, :, 0]

    gamma = drafts.tokens.shape[1]
    p, q = of_token(drafts.p[:, :gamma]), of_token(drafts.q) if drafts.with_probs else 1.0
    valid = np.arange(gamma) < drafts.length[:, None]
    reached = np.cumprod(np.pad(passing[:, :-1], ((0, 0), (1, 0)), constant_values=1) > 0, axis=1) > 0
    wrong = np.where(valid & (p > 0), (p >= q) & (passing < _STEPS), passing > 0)
    return int((wrong & reached).sum())


def _others(drafts: _Drafts, passing: np.ndarray, stretches: np.ndarray, seed: int) -> int:
    """At how many random points the rule's outcome differs from that of the bounds and intervals.

    0 if each random number decides its own test or token and nothing else.
    """
    num, gamma = passing.shape
    shape = (num, gamma + (gamma + 1) * (VOCAB - 1), _COORDINATES)  # that of `_measure`, already compiled
    points = np.random.default_rng(seed).integers(_STEPS, size=shape)
    accepted, token = drafts.outcome(points)
    passed = points[:, :, 2 * np.arange(gamma)] < passing[:, None]
    expected = np.cumprod(passed, axis=2).sum(2)  # [R, Q]
    ends = np.take_along_axis(stretches, expected[:, :, None], axis=1)  # [R, Q, V - 1]
    expected_token = (points[:, :, _TOKEN, None] >= ends).sum(-1)
    return int(((accepted != expected) | (token != expected_token)).sum())


def _emitted(texts, weight, passing, chances) -> list[np.ndarray]:
    """The probability that i draft tokens pass and i + 1 given tokens come out, as of `testing.enumerate_round`.

    Args:
      texts: [texts, G].
      weight: [V] * G, the probability of each draft.
      passing: [texts, G], of each test.
      chances: [texts, G + 1, V], of the token after i passed draft tokens.
    """
    gamma = texts.shape[1]
    reach = np.cumprod(np.pad(passing, ((0, 0), (1, 0)), constant_values=1.0), axis=1)  # [texts, G + 1]
    fails = 1 - np.pad(passing, ((0, 0), (0, 1)))
    emitted = []
    for i in range(gamma + 1):
        part = np.zeros((VOCAB,) * (i + 1))
        rows = weight.reshape(-1, 1) * (reach[:, i] * fails[:, i])[:, None] * chances[:, i]
        np.add.at(part, tuple(texts[:, :i].T), rows if i else rows.sum(0))
        emitted.append(part)
    return emitted


def _largest(array: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(array - expected).max())
