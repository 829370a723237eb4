"""Checks of a draft by itself: what it proposes, and the q that it reports.

Axes: B rows, G draft length, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.conformance.driven import drive, uneven_script
from spec_jax.conformance.results import Fault, Make, checked
from spec_jax.conformance.tables import (
    GAMMA,
    LIMIT,
    SAMPLED,
    SAMPLES,
    SMALL_GAMMA,
    SMALL_V,
    V,
    prompts,
    rows,
    table_probs,
    table_target,
)
from spec_jax.decoding import DecodeConfig
from spec_jax.exactness import statistics
from spec_jax.measure.scoring import cumulative_place
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.testing import TableModel, chi_square, complete, enumerate_round, joint
from spec_jax.types import Draft
from spec_jax.verification import residual_distribution

_SHARP = SamplingConfig(temperature=0.8, top_k=4)  # a draft that ignores either of the two fails
_EXACT = 1e-6  # of probabilities, against a closed form
_SUM = 1e-5  # of probabilities in float32
_BINS = 8


@checked
def shapes(make: Make) -> str:
    """Shapes, kinds of numbers, sums of probabilities, tokens of the vocabulary; the state keeps its shape."""
    target = table_target(V)
    drafter = make(target)
    for leaf in jax.tree.leaves(drafter):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise Fault(
                f'expected a pytree of arrays, such as a flax.struct.dataclass; got a {type(leaf).__name__} in it: '
                'mark what is no array with pytree_node=False'
            )
    for gamma, sampling in (1, SAMPLED), (GAMMA, SAMPLED), (GAMMA, GREEDY):
        _trace(target, drafter, gamma, sampling)
    drafts = drive(target, drafter, *rows(8), *uneven_script())
    for number, draft in enumerate(drafts):
        _sound(draft, f'round {number}')
    kind = 'deterministic' if drafts[0].probs is None else 'sampled'
    return (
        f'{8 * len(drafts)} proposals of {GAMMA} tokens, {kind}, are sound; traced at gamma 1 and greedy too'
    )


def _trace(target, drafter, gamma, sampling) -> None:
    """Raises where the loop could not be compiled, or its carry would change."""
    config = DecodeConfig(gamma, LIMIT, sampling)
    before = jax.eval_shape(partial(decoding.start, target, drafter, config=config), *rows(8))
    step = partial(decoding.speculative_step, target, drafter, config=config)
    after = jax.eval_shape(step, before)  # ValueError at a draft of wrong shapes
    kinds = [jax.tree.map(lambda x: f'{x.dtype}{[*x.shape]}', state.draft_state) for state in (before, after)]
    if kinds[0] != kinds[1]:
        raise Fault(f'expected update to return a state like that of init, {kinds[0]}; got {kinds[1]}')


def _sound(draft: Draft, where: str) -> None:
    """Raises where a draft is invalid."""
    gamma = draft.tokens.shape[1]
    if not ((draft.length >= 0) & (draft.length <= gamma)).all():
        raise Fault(f'{where}: expected Draft.length from 0 to {gamma}, got {_some(draft.length)}')
    valid = np.arange(gamma) < draft.length[:, None]
    outside = valid & ((draft.tokens < 0) | (draft.tokens >= V))
    if outside.any():
        raise Fault(
            f'{where}: expected tokens of the vocabulary, 0 to {V - 1}, got {_some(draft.tokens[outside])}'
        )
    if draft.probs is None:
        return
    sums = draft.probs.sum(-1)[valid]
    wrong = ~(np.abs(sums - 1) <= _SUM)  # so NaN is wrong
    if wrong.any():
        raise Fault(f'{where}: expected probabilities that sum to 1, got sums of {_some(sums[wrong])}')
    if (draft.probs[valid] < 0).any():
        raise Fault(f'{where}: expected probabilities >= 0, got {draft.probs[valid].min():.3g}')


def _some(values: np.ndarray) -> str:
    return ', '.join(f'{value:.6g}' for value in np.unique(values)[:4])


# --- many proposals after every context ---------------------------------------------------------------------


def _proposals(make: Make) -> tuple[TableModel, list[tuple[np.ndarray, Draft]]]:
    """The proposals after every text of up to 2 tokens, under `_SHARP`.

    Returns:
      The target; and for 0, 1 and 2 tokens the contexts [B, 3], a prompt's first token and the last two tokens of
      the text, with the `Draft` after each.
    """
    target, row = table_target(SMALL_V), np.arange(SAMPLES)
    prompt, first, second = (row // SMALL_V**i % SMALL_V for i in range(3))
    extra = np.stack([first, second, second]).astype(np.int32)  # draft tokens are never accepted
    inputs, keys = prompts(prompt, SMALL_V), row_keys(jax.random.key(2), row)
    config = DecodeConfig(SMALL_GAMMA, LIMIT, _SHARP)
    drafts = drive(target, make(target), inputs, keys, np.zeros_like(extra), extra, config=config)
    start = np.full_like(row, target.start_id)
    contexts = (prompt, start, start), (prompt, start, first), (prompt, first, second)
    return target, [
        (np.stack(context, axis=1), draft) for context, draft in zip(contexts, drafts, strict=True)
    ]


@checked
def closed_form(make: Make) -> str:
    """The reported q, enumerated: after each context a round emits the target's distribution, to 1e-6."""
    target, proposals = _proposals(make)
    table = table_probs(target, _SHARP)
    largest, number, singles = 0.0, 0, 0
    for contexts, draft in proposals:
        for context in np.unique(contexts, axis=0):
            here = Draft(*(None if x is None else x[(contexts == context).all(1)] for x in _fields(draft)))
            p, text = table[context[0]], context[1:]
            deviation = _of_chain(here, [p[tuple(text)], p[text[1]], p])
            if deviation is None:
                singles += 1
                deviation = _of_single_tokens(here, p, text)
            number += 1
            if not deviation <= _EXACT:  # so NaN fails
                raise Fault(
                    f'after {text.tolist()} with prompt {context[0]}: expected a round to emit the '
                    f"target's distribution within {_EXACT:g}, it is off by {deviation:.2g}: q is no distribution"
                )
            largest = max(largest, deviation)
    exceptions = f', {singles} token by token, since q is no function of the text' if singles else ''
    return f'{number} contexts, {SMALL_GAMMA} draft tokens{exceptions}: largest deviation {largest:.1g}'


def _fields(draft: Draft):
    return draft.tokens, draft.probs, draft.length


def _q(draft: Draft) -> np.ndarray:
    if draft.probs is None:
        return (draft.tokens[..., None] == np.arange(SMALL_V)).astype(np.float32)
    return draft.probs


def _of_chain(draft: Draft, p: list[np.ndarray]) -> float | None:
    """The deviation of a round after one context; None where q is not a function of context and prefix.

    After a prefix that was never drafted, p is used for q: it has almost no weight.
    """
    length = int(draft.length[0])
    if (draft.length != length).any():
        return None
    p, q = p[: length + 1], _q(draft)
    chain = [p_i.copy() for p_i in p[:length]]
    for i, q_i in enumerate(chain):
        prefix = tuple(draft.tokens[:, :i].T)
        q_i[prefix] = q[:, i] if i else q[0, 0]
        if not np.allclose(q_i[prefix], q[:, i], atol=_EXACT, rtol=0, equal_nan=True):
            return None
    return float(np.abs(complete(enumerate_round(p, chain), p) - joint(p)).max())


def _of_single_tokens(draft: Draft, table: np.ndarray, text: np.ndarray) -> float:
    """The largest deviation of rounds of one token, each with the q reported for it; table [V, V, V]."""
    texts = np.concatenate([np.broadcast_to(text, (len(draft.tokens), 2)), draft.tokens], axis=1)
    p, q = table[texts[:, :-2], texts[:, 1:-1]], _q(draft)  # [B, G, V]
    passed = np.minimum(p, q)
    rejected = (q - passed).sum(-1, keepdims=True)
    emitted = passed + rejected * np.asarray(residual_distribution(jnp.asarray(p), jnp.asarray(q)))
    valid = np.arange(SMALL_GAMMA) < draft.length[:, None]
    return float(np.abs(emitted - p)[valid].max(initial=0))


@checked
def tokens_follow_q(make: Make) -> str:
    """Each token, given those before it, is drawn from the q that is reported for it.

    By `scoring.cumulative_place`: under the reported q, the places of a draft's tokens are uniform and independent
    of each other, whatever q is; their cells are counted jointly.
    """
    _, proposals = _proposals(make)
    if proposals[0][1].probs is None:
        return 'deterministic: q is one-hot by definition'
    random, counts = np.random.default_rng(3), np.zeros((_BINS,) * SMALL_GAMMA)
    for contexts, draft in proposals:
        below, mass = map(np.asarray, cumulative_place(draft.probs, draft.tokens))
        valid = np.arange(SMALL_GAMMA) < draft.length[:, None]
        if (impossible := valid & ~(mass > 0)).any():
            row, i = np.argwhere(impossible)[0]
            raise Fault(
                f'token {draft.tokens[row, i]} was proposed after {contexts[row, 1:].tolist()}, and its q is '
                f'{mass[row, i]:g}: expected Draft.probs to be the array that each token was drawn from'
            )
        even = random.random(mass.shape)
        place = np.where(valid, below + even * mass, even)
        np.add.at(counts, tuple(np.clip(place.T * _BINS, 0, _BINS - 1).astype(int)), 1)
    samples = int(counts.sum())
    p_value = chi_square(counts, np.full(counts.shape, 1 / counts.size))
    what = f'{samples} proposals of {SMALL_GAMMA} tokens after all texts of up to 2 tokens'
    if not p_value >= statistics.FAILS_BELOW:
        raise Fault(
            f'{what}: tokens do not follow the q reported for them, p = {p_value:.1g}: expected Draft.probs to be '
            'the array that each token was drawn from, and Draft.length not to depend on a token that it withholds'
        )
    detectable = statistics.detectable(samples, counts.size - 1)
    return f'{what}: p = {p_value:.2g}; {detectable:.1%} of the probability in wrong places would be found'
