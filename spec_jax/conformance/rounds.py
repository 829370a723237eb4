"""Checks of the loop's bookkeeping, round by round: where texts end, how long they get, what is counted.

Axes: B rows, G draft length, R rounds, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax import decoding
from spec_jax.conformance.driven import watched_step
from spec_jax.conformance.results import Fault, Make, checked
from spec_jax.conformance.tables import (
    CONFIG,
    EOS,
    GAMMA,
    LIMIT,
    ROWS,
    SAMPLED,
    V,
    decode,
    ending,
    rows,
    table_probs,
    table_target,
)
from spec_jax.drafters.base import Drafter
from spec_jax.runtime.backend import jit
from spec_jax.state import Output
from spec_jax.testing import TableModel
from spec_jax.types import Draft

_COUNTS = 'rounds', 'tested', 'accepted', 'emitted'


@jit
def _watch(target, drafter, inputs, keys, limits) -> tuple[Output, Draft, Array]:
    """The loop of `generate`, up to `limits` [B] <= `LIMIT` tokens: an argument, so that one program serves all."""

    def one_round(state, _):
        draft, state = watched_step(target, drafter, state, config=CONFIG)
        return state, (draft, state.context.emitted)

    state = decoding.start(target, drafter, inputs, keys, limits, config=CONFIG)
    state, (drafts, lengths) = lax.scan(one_round, state, length=LIMIT)
    return decoding.finish(target, state, config=CONFIG), drafts, lengths


def _watched(target: TableModel, drafter: Drafter, eos: int = EOS, limit: int = LIMIT):
    """The output, every round's draft [R, B, ...], and the length of the output after it [R, B]; NumPy."""
    limits = jnp.full((ROWS,), limit, jnp.int32)
    return jax.tree.map(np.asarray, _watch(ending(target, eos), drafter, *rows(), limits))


@checked
def eos_in_every_place(make: Make) -> str:
    """A text with an EOS is the text without one, cut after its first EOS, at any place in a block."""
    target = table_target(V)
    drafter = make(target)
    whole, _, _ = _watched(target, drafter, eos=-1)
    output, drafts, lengths = _watched(target, drafter)
    drafted, followed = np.zeros(GAMMA, int), np.zeros(GAMMA + 1, int)
    for row in range(ROWS):
        text = whole.tokens[row].tolist()
        expected = text[: text.index(EOS) + 1] if EOS in text else text
        padded = expected + [target.spec.pad_id] * (LIMIT - len(expected))
        if output.tokens[row].tolist() != padded or output.length[row] != len(expected):
            raise Fault(
                f'row {row}: expected {expected}, up to the first {EOS} of the text without an end; got '
                f'{output.tokens[row].tolist()} of length {output.length[row]}'
            )
        if output.stats.emitted[row] != len(expected):
            raise Fault(
                f'row {row}: expected {len(expected)} tokens counted, got {output.stats.emitted[row]}'
            )
        if EOS in text:
            last = output.stats.rounds[row] - 1
            place = len(expected) - 1 - (lengths[last - 1, row] if last else 0)
            is_draft = place < drafts.length[last, row] and drafts.tokens[last, row, place] == EOS
            (drafted if is_draft else followed)[place] += 1
    return (
        f'{ROWS} texts; EOS as a draft token in places 1 .. {GAMMA} of a block {drafted.tolist()} times, as the '
        f"target's own in places 1 .. {GAMMA + 1} {followed.tolist()} times"
    )


@checked
def length_limits(make: Make) -> str:
    """At each limit from 1 to 2 gamma + 2 a text has that length, and is the beginning of the longer one."""
    target = table_target(V)
    drafter = make(target)
    whole, _, _ = _watched(target, drafter, eos=-1)
    limits = [*range(1, 2 * GAMMA + 3), LIMIT]
    for limit in limits:
        output, _, lengths = _watched(target, drafter, eos=-1, limit=limit)
        if not (output.length == output.stats.emitted).all() or not (output.length == limit).all():
            raise Fault(f'limit {limit}: expected {limit} tokens in each row, got {output.length.tolist()}')
        if lengths.max() > limit:
            raise Fault(f'limit {limit}: expected at most {limit} tokens in the context, got {lengths.max()}')
        for row in range(ROWS):
            ours, expected = output.tokens[row, :limit].tolist(), whole.tokens[row, :limit].tolist()
            if ours != expected:
                raise Fault(f'limit {limit}, row {row}: expected {expected}, as without it; got {ours}')
    return f'{ROWS} texts at limits of {limits} tokens: as long as that, and the beginning of the longest'


@checked
def honest_counts(make: Make) -> str:
    """The counts of `generate`, recounted by their definitions from the proposals and the output."""
    target = table_target(V)
    drafter, (inputs, keys) = make(target), rows()
    output = decode(ending(target), drafter, inputs, keys)
    watched, drafts, lengths = _watched(target, drafter)
    tables = table_probs(target, SAMPLED)[np.asarray(inputs.tokens)[:, 0]]  # [B, V, V, V]
    for row in range(ROWS):
        if (watched.tokens[row] != output.tokens[row]).any():
            raise Fault(
                f'row {row}: {output.tokens[row].tolist()} is {watched.tokens[row].tolist()} when watched'
            )
        draft = jax.tree.map(lambda array, row=row: array[:, row], drafts)
        text = [target.start_id, target.start_id, *watched.tokens[row].tolist()]
        for name, expected in _recount(tables[row], text, draft, [0, *lengths[:, row]]).items():
            ours = getattr(output.stats, name)[row]
            if not np.allclose(ours, expected, atol=1e-3):
                raise Fault(f'row {row}: expected {name} {expected}, by its definition; got {ours}')
    total = [f'{name} {getattr(output.stats, name).sum()}' for name in _COUNTS]
    return f'{ROWS} rows recounted: {", ".join(total)}'


def _recount(table: np.ndarray, text: list[int], draft: Draft, lengths: list[int]) -> dict[str, Any]:
    """The counts of one row.

    Args:
      table: [V, V, V], the target's distributions.
      text: two start tokens, then the output.
      draft: of all rounds, [R, G].
      lengths: R + 1 lengths of the output: before the first round, and after each.
    """
    counts = dict.fromkeys(_COUNTS, 0) | dict(overlap=0.0, histogram=np.zeros(GAMMA + 1, int))
    for number, (before, after) in enumerate(zip(lengths[:-1], lengths[1:], strict=True)):
        if after == before:
            break
        accepted = 0
        for i in range(min(draft.length[number], after - before)):  # what is not emitted was not tested
            place, token = before + 2 + i, draft.tokens[number, i]
            p = table[text[place - 2], text[place - 1]]
            q = np.arange(V) == token if draft.probs is None else draft.probs[number, i]
            counts['tested'] += 1
            counts['overlap'] += float(np.minimum(p, q).sum())
            if text[place] != token:  # never in the residual, once rejected
                break
            accepted += 1
        counts['rounds'] += 1
        counts['accepted'] += accepted
        counts['histogram'][accepted] += 1
        counts['emitted'] += int(after - before)
    return counts
