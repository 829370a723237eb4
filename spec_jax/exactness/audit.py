"""The loop with a recorded trace: what the draft proposed in every round, and how the target scores a text.

Axes: B rows, G draft depth, N tokens of a text, R rounds, S source length, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax import decoding
from spec_jax.decoding import DecodeConfig, finish, speculative_step, unfinished
from spec_jax.drafters.base import Drafter, DraftShape, Outcome, Round
from spec_jax.measure.scoring import cumulative_place, score_from
from spec_jax.models.base import Model, ModelSpec
from spec_jax.runtime.backend import jit
from spec_jax.state import Output, SpecState, Stats
from spec_jax.types import Draft, Inputs, Prefill


@flax.struct.dataclass
class Trace:
    """What drafter and loop exchanged; of a row only the first `Stats.rounds` rounds are valid.

    Attributes:
      length: [R, B] int32, valid draft tokens.
      below, mass: [R, B, G] float32, the place of each in its q (`scoring.cumulative_place`); 0 and 1 for q
        one-hot.
      total: [R, B, G] float32, sum of q.
      outside: [R, B, G] bool, tokens outside the vocabulary.
      num_accepted: [R, B] int32, accepted tokens.
      end: [R, B] int32, tokens of the output after the round; -1 where there was none.
    """

    length: Array
    below: Array
    mass: Array
    total: Array
    outside: Array
    num_accepted: Array
    end: Array


@flax.struct.dataclass
class Audited:
    """A drafter whose proposals are recorded, and otherwise unchanged.

    Attributes:
      drafter: the one to audit.
      gamma: draft length.
      num_rounds: the most that a text can take.
    """

    drafter: Drafter
    gamma: int = flax.struct.field(pytree_node=False)
    num_rounds: int = flax.struct.field(pytree_node=False)

    def shape(self, gamma: int) -> DraftShape:
        return self.drafter.shape(gamma)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> tuple:
        batch = inputs.tokens.shape[0]
        rows = jnp.zeros((self.num_rounds, batch), jnp.int32)
        places = jnp.zeros((self.num_rounds, batch, self.gamma), jnp.float32)
        trace = Trace(rows, places, places, places, places > 0, rows, rows - 1)
        return self.drafter.init(target, prefill, inputs, num_slots), trace, jnp.zeros((), jnp.int32)

    def propose(self, state: tuple, round: Round) -> tuple[Draft, tuple]:
        inner, trace, number = state
        draft, inner = self.drafter.propose(inner, round)
        return draft, (inner, trace, number, draft, round.vocab_size)

    def update(self, state: tuple, outcome: Outcome) -> tuple:
        inner, trace, number, draft, vocab_size = state
        ones = jnp.ones(draft.tokens.shape)
        below, mass, total = 0 * ones, ones, ones
        if draft.probs is not None:
            below, mass = cumulative_place(draft.probs, draft.tokens)
            total = draft.probs.sum(-1)
        outside = (draft.tokens < 0) | (draft.tokens >= vocab_size)
        accepted, end = outcome.verification.num_accepted, outcome.context.emitted
        new = Trace(draft.length, below, mass, total, outside, accepted, end)
        trace = jax.tree.map(lambda old, row: old.at[number].set(row), trace, new)
        return self.drafter.update(inner, outcome), trace, number + 1


# `decoding.start` as a separate program, so that one prefill serves many keys.
start = jit(decoding.start, static_argnames='config')


@jit(static_argnames='config')
def decode(target: Model, drafter: Drafter, state: SpecState, *, config: DecodeConfig) -> tuple[Output, Any]:
    """The loop of `decoding.generate` from `start` to its end: the output, and the drafter's last state."""
    state = lax.while_loop(unfinished, partial(speculative_step, target, drafter, config=config), state)
    return finish(target, state, config=config), state.draft_state


# The target's scores of given texts, from a plain decoder's `start`.
rescore = jit(score_from, static_argnames='config')


def miscounted(output: Output, spec: ModelSpec) -> np.ndarray:
    """[B] bool, rows whose length or counts contradict their tokens or each other.

    A text ends after its first EOS or at the limit, and padding follows. A round emits what it accepted and one
    token more; only the last round may end within the accepted tokens.
    """
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    stats = jax.tree.map(np.asarray, output.stats)
    limit = tokens.shape[1]
    is_eos = np.isin(tokens, spec.eos_ids)
    ends = np.where(is_eos.any(1), is_eos.argmax(1) + 1, limit)
    after_end = np.arange(limit) >= length[:, None]
    finished = length == 0  # a filler row
    wrong = ((length != ends) & ~finished) | ((tokens != spec.pad_id) & after_end).any(1)
    wrong |= (stats.emitted != length) | (stats.histogram.sum(1) != stats.rounds)
    wrong |= stats.calls.sum(1) != stats.rounds
    wrong |= (stats.histogram * np.arange(stats.histogram.shape[1])).sum(1) != stats.accepted
    wrong |= (stats.accepted > stats.tested) | (stats.emitted > stats.accepted + stats.rounds)
    return wrong | ((stats.emitted < stats.accepted + stats.rounds - 1) & ~finished)


def proposed(trace: Trace, stats: Stats) -> np.ndarray:
    """[R, B, G] bool, draft tokens that were valid, in rounds that were counted."""
    active = np.arange(len(trace.length))[:, None] < np.asarray(stats.rounds)
    return active[:, :, None] & (np.arange(trace.below.shape[2]) < np.asarray(trace.length)[:, :, None])


def recounted(trace: Trace, stats: Stats) -> np.ndarray:
    """[B] bool, rows whose counts differ from those of the trace of their rounds."""
    trace, stats = jax.tree.map(np.asarray, (trace, stats))
    active = np.arange(len(trace.end))[:, None] < stats.rounds  # [R, B]
    emitted = np.where(active, np.diff(trace.end, axis=0, prepend=0), 0)
    accepted = np.minimum(emitted, trace.num_accepted)
    bins = np.arange(stats.histogram.shape[1])
    histogram = ((accepted[:, :, None] == bins) & active[:, :, None]).sum(0)
    wrong = (histogram != stats.histogram).any(1) | (emitted.sum(0) != stats.emitted)
    wrong |= np.where(active, accepted, 0).sum(0) != stats.accepted
    tested = np.where(active, np.minimum(emitted, trace.length), 0)
    tested_at = (np.arange(stats.tested_at.shape[1]) < tested[:, :, None]).sum(0)
    lengths = ((trace.length[:, :, None] == bins) & active[:, :, None]).sum(0)
    wrong |= (stats.calls.cumsum(1) > lengths.cumsum(1)).any(1)  # a call is over the whole draft, or more
    return wrong | (tested_at != stats.tested_at).any(1)
