"""Checks of the compiled loop's output with a draft: the texts, their distribution, and independence of rows.

Axes: B rows, G draft length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import jax
import numpy as np

from spec_jax.conformance.driven import drive, uneven_script
from spec_jax.conformance.results import Fault, Make, checked
from spec_jax.conformance.tables import (
    EOS,
    GAMMA,
    LIMIT,
    ROWS,
    SAMPLED,
    SAMPLES,
    SMALL_GAMMA,
    SMALL_V,
    V,
    acceptances,
    decode,
    ending,
    prompts,
    rows,
    table_probs,
    table_target,
    take,
)
from spec_jax.decoding import DecodeConfig
from spec_jax.exactness import statistics
from spec_jax.generation import generate
from spec_jax.sampling import GREEDY
from spec_jax.state import Output
from spec_jax.testing import chi_square, histogram, joint
from spec_jax.types import Draft, Inputs

_TEXT = 4  # tokens of the texts that are counted


@checked
def greedy_identity(make: Make) -> str:
    """At temperature 0 the output is that of plain decoding, token for token."""
    target = table_target(V)
    drafter, (inputs, keys) = make(target), rows()
    for eos in EOS, -1:
        output = decode(ending(target, eos), drafter, inputs, keys, GREEDY)
        for row, first in enumerate(np.asarray(inputs.tokens)[:, 0]):
            expected = _greedy_text(np.asarray(target.table[first]), eos)
            ours = output.tokens[row, : output.length[row]].tolist()
            if ours != expected:
                raise Fault(f"row {row}: expected the target's own output {expected}, got {ours}")
    return f'2 x {ROWS} texts of up to {LIMIT} tokens are those of the table; {acceptances(output.stats)}'


def _greedy_text(table: np.ndarray, eos: int) -> list[int]:
    """The most probable tokens by a table [V, V, V]."""
    text = [0, 0]  # start tokens
    while len(text) < LIMIT + 2 and (len(text) == 2 or text[-1] != eos):
        text.append(int(table[text[-2], text[-1]].argmax()))
    return text[2:]


@checked
def joint_distribution(make: Make) -> str:
    """The texts that the compiled loop samples, counted against the probability of every text."""
    target = table_target(SMALL_V)
    first = np.arange(SAMPLES) % 2 + 2  # two tables side by side
    drafter, inputs = make(target), prompts(first, SMALL_V)
    config = DecodeConfig(SMALL_GAMMA, _TEXT, SAMPLED)
    counts = 0
    for seed in range(2):
        output = generate(target, drafter, inputs, jax.random.key(seed), config)
        counts += histogram(np.concatenate([first[:, None], output.tokens], axis=1), SMALL_V)
    probs = np.zeros(counts.shape)  # [V] * (1 + texts)
    for table in np.unique(first):
        p = table_probs(target, SAMPLED)[table]
        probs[table] = joint([p[0, 0], p[0], p, np.broadcast_to(p, (SMALL_V, *p.shape))], EOS) / 2
    samples, lowest = int(counts.sum()), 1.0
    for kept in range(_TEXT), (0, 1), (_TEXT - 2, _TEXT - 1):
        rest = tuple(1 + place for place in range(_TEXT) if place not in kept)
        p_value = chi_square(counts.sum(rest), probs.sum(rest))
        lowest = min(lowest, p_value)
        if not p_value >= statistics.FAILS_BELOW:
            raise Fault(
                f"{samples} texts: tokens {[*kept]} are not distributed as the target's, p = {p_value:.1g}"
            )
    detectable = statistics.detectable(samples, int((samples * probs >= 5).sum()))
    return (
        f'{samples} texts of {_TEXT} tokens: lowest p = {lowest:.2g} of 3; {detectable:.1%} of the probability in '
        f'wrong places would be found; {acceptances(output.stats)}'
    )


# --- rows and their neighbours ------------------------------------------------------------------------------


def _valid(draft: Draft) -> Draft:
    """The draft with zeros from `length` on, where tokens are not valid."""
    inside = np.arange(draft.tokens.shape[1]) < draft.length[:, None]
    probs = None if draft.probs is None else np.where(inside[..., None], draft.probs, 0)
    return Draft(np.where(inside, draft.tokens, 0), probs, draft.length)


@checked
def uneven_batches(make: Make) -> str:
    """Rows that accept 0 .. gamma tokens in one batch propose and emit the same as each of them alone."""
    target = table_target(V)
    drafter, (inputs, keys) = make(target), rows()
    script, few = uneven_script(), np.arange(8)
    together = drive(target, drafter, *take((inputs, keys), few), *script)
    for row in few:
        accept, extra = (part[:, [row]] for part in script)
        alone = drive(target, drafter, *take((inputs, keys), [row]), accept, extra)
        for number, (ours, theirs) in enumerate(zip(alone, together, strict=True)):
            if not _same(_valid(ours), _valid(take(theirs, [row]))):
                raise Fault(
                    f'row {row}, which accepts {accept[:, 0].tolist()} tokens, proposes in round {number} '
                    f'{ours.tokens[0].tolist()} alone, {theirs.tokens[row].tolist()} in a batch, or differs in q'
                )
    batch = decode(ending(target, -1), drafter, inputs, keys)
    _equal_alone(target, drafter, inputs, keys, batch, few)
    return (
        f'8 rows in {len(together)} rounds of scripted acceptances 0 .. {GAMMA}, and 8 texts of the loop, '
        f'equal those alone; the loop: {acceptances(batch.stats)}'
    )


@checked
def seeds(make: Make) -> str:
    """A row's text depends on its prompt and key only, not on the batch, its order, or the other rows."""
    target, every, even = table_target(V), np.arange(ROWS), np.arange(0, ROWS, 2)
    drafter, (inputs, keys) = make(target), rows()
    run = partial(decode, ending(target, -1), drafter)
    together = run(inputs, keys)
    order = np.random.default_rng(4).permutation(ROWS)
    shuffled = run(*take((inputs, keys), order))
    mixed = run(*take((inputs, keys), np.where(every % 2, order, every)))  # every other row is another
    empty = run(Inputs(inputs.tokens, inputs.mask & (every % 2 == 0)[:, None]), keys)
    for place, row in enumerate(order):
        _equal_row(shuffled, place, together, row, 'in another order')
    for row in even:
        _equal_row(mixed, row, together, row, 'among other rows')
        _equal_row(empty, row, together, row, 'among empty rows')
    _equal_alone(target, drafter, inputs, keys, together, range(0, ROWS, 16))
    return (
        f'{ROWS} rows alone, in a batch, in another order, among others and among empty rows: the same texts'
    )


def _same(one, other) -> bool:
    """Equal integers, and floats equal up to rounding, which may change with the number of rows."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(x, y, atol=1e-4 if x.dtype.kind == 'f' else 0, rtol=0) for x, y in pairs)


def _equal_alone(target, drafter, inputs, keys, batch: Output, some: Iterable[int]) -> None:
    for row in some:
        alone = decode(ending(target, -1), drafter, *take((inputs, keys), [row]))
        _equal_row(alone, 0, batch, row, 'alone')


def _equal_row(one: Output, i: int, batch: Output, row: int, where: str) -> None:
    """Raises where row i of one output differs from that row of the batch, in its tokens or in its counts.

    `Stats.calls` is not compared: a row alone may have calls over fewer rows.
    """
    one, other = take(one, [i]), take(batch, [row])
    if not _same(one.tokens, other.tokens):
        raise Fault(
            f'row {row} is {one.tokens[0].tolist()} {where} and {other.tokens[0].tolist()} in the batch'
        )
    if not _same(one.stats.replace(calls=other.stats.calls), other.stats):
        raise Fault(
            f'row {row}, rounds by number of accepted tokens: {one.stats.histogram[0].tolist()} {where} and '
            f'{other.stats.histogram[0].tolist()} in the batch'
        )


# --- where the draft can be the target ----------------------------------------------------------------------


@checked
def acceptance_of_1(make_same: Make) -> str:
    """With the target itself as the draft all tokens are accepted in every round; not one of `CHECKS`.

    Args:
      make_same: TableModel -> the draft whose q is that model's p.
    """
    target = table_target(V)
    drafter, (inputs, keys) = make_same(target), rows()
    num_rounds = LIMIT // (GAMMA + 1)
    for name, sampling in ('sampled', SAMPLED), ('greedy', GREEDY):
        stats = decode(ending(target, -1), drafter, inputs, keys, sampling).stats
        if (stats.accepted != stats.tested).any() or (stats.rounds != num_rounds).any():
            rate = stats.accepted.sum() / max(1, stats.tested.sum())
            raise Fault(
                f'{name}: expected {num_rounds} rounds, all {GAMMA} tokens accepted in each; got an acceptance of '
                f'{rate:.3f} and {stats.rounds.mean():.1f} rounds: a cache without the last token of a round of '
                'full acceptance does this'
            )
    return f'{ROWS} rows, {num_rounds} rounds of {GAMMA} tokens, sampled and greedy: all accepted'
