"""The loop with a witness: what the draft proposed in every round, and how the target itself rates a text.

Axes: B rows, G draft length, N tokens of a text, R rounds, S source length, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.decoding import cond_fn, finish, plain_step, prefill, speculative_step, start_plain
from spec_jax.drafters.base import Drafter
from spec_jax.exactness.statistics import cumulative_place
from spec_jax.models.base import Model
from spec_jax.runtime.backend import jit
from spec_jax.sampling import SamplingConfig, logits_to_probs
from spec_jax.types import Cache, Context, Draft, Inputs, Output, SpecState, Stats, Verification


@flax.struct.dataclass
class Trace:
    """What passed between drafter and loop; of a row only its first `Stats.rounds` rounds mean anything.

    Attributes:
      length: [R, B] int32, draft tokens meant.
      below, mass: [R, B, G] float32, where each stands in its q (`statistics.cumulative_place`); 0 and 1 for
        q one-hot.
      total: [R, B, G] float32, sum of q.
      outside: [R, B, G] bool, tokens that are none of the vocabulary.
      num_accepted: [R, B] int32, the verdict.
      end: [R, B] int32, length of the context behind the round.
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
    """A drafter that is watched, and otherwise left alone.

    Attributes:
      drafter: the one in question.
      gamma: draft length.
      num_rounds: the most that a text can take.
    """

    drafter: Drafter
    gamma: int = flax.struct.field(pytree_node=False)
    num_rounds: int = flax.struct.field(pytree_node=False)

    @property
    def always_guesses(self) -> bool:
        return getattr(self.drafter, 'always_guesses', False)

    def init(self, inputs: Inputs, num_slots: int) -> tuple[Any, Trace, Array]:
        batch = inputs.tokens.shape[0]
        rows = jnp.zeros((self.num_rounds, batch), jnp.int32)
        places = jnp.zeros((self.num_rounds, batch, self.gamma), jnp.float32)
        trace = Trace(rows, places, places, places, places > 0, rows, rows)
        return self.drafter.init(inputs, num_slots), trace, jnp.zeros((), jnp.int32)

    def propose(
        self, state: Any, context: Context, keys: Array, gamma: int, sampling: SamplingConfig, vocab_size: int
    ) -> tuple[Draft, Any]:
        own, trace, number = state
        draft, own = self.drafter.propose(own, context, keys, gamma, sampling, vocab_size)
        return draft, (own, trace, number, draft, vocab_size)

    def update(self, state: Any, context: Context, verified: Verification, hidden: Array) -> Any:
        own, trace, number, draft, vocab_size = state
        ones = jnp.ones(draft.tokens.shape)
        below, mass, total = 0 * ones, ones, ones
        if draft.probs is not None:
            below, mass = cumulative_place(draft.probs, draft.tokens)
            total = draft.probs.sum(-1)
        outside = (draft.tokens < 0) | (draft.tokens >= vocab_size)
        new = Trace(draft.length, below, mass, total, outside, verified.num_accepted, context.length)
        trace = jax.tree.map(lambda old, row: old.at[number].set(row), trace, new)
        return self.drafter.update(own, context, verified, hidden), trace, number + 1


@jit(static_argnames=('gamma', 'max_new_tokens'))
def start(
    target: Model, drafter: Drafter, inputs: Inputs, keys: Array, *, gamma: int, max_new_tokens: int
) -> SpecState:
    """`decoding.prefill`, apart, so that one prefill serves many keys."""
    return prefill(target, drafter, inputs, keys, gamma=gamma, max_new_tokens=max_new_tokens)


@jit(static_argnames=('gamma', 'max_new_tokens', 'sampling', 'lenience'))
def decode(
    target: Model,
    drafter: Drafter,
    state: SpecState,
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    lenience: float,
) -> tuple[Output, Any]:
    """The loop of `decoding.generate` from `start` to its end: the output, and the drafter's last state."""
    how = dict(gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling, lenience=lenience)
    state = lax.while_loop(cond_fn, partial(speculative_step, target, drafter, **how), state)
    output = finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)
    return output, state.draft_state


@jit(static_argnames='max_new_tokens')
def plain_start(target: Model, inputs: Inputs, keys: Array, *, max_new_tokens: int) -> SpecState:
    """The plain decoder's prefill."""
    return start_plain(target, inputs, keys, max_new_tokens=max_new_tokens)


@jit(static_argnames=('max_new_tokens', 'sampling'))
def plain_decode(target: Model, state: SpecState, *, max_new_tokens: int, sampling: SamplingConfig) -> Output:
    """The loop of `decoding.plain_generate` from `plain_start` to its end."""
    step = partial(plain_step, target, max_new_tokens=max_new_tokens, sampling=sampling)
    state = lax.while_loop(cond_fn, step, state)
    return finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)


@jit(static_argnames='sampling')
def rescore(
    target: Model, cache: Cache, tokens: Array, *, sampling: SamplingConfig
) -> tuple[Array, Array, Array]:
    """How the target rates each token behind those before it, in calls of one token, as the plain decoder's.

    Args:
      target: the model.
      cache: of `plain_start`, nothing read yet.
      tokens: [B, N].
      sampling: how its logits become a distribution.

    Returns:
      below and mass [B, N] of `statistics.cumulative_place`; gap [B, N], nats between a token and the likeliest.
    """

    def step(cache, column):
        previous, token, position = column
        positions = jnp.full((len(token), 1), position)
        hidden, cache = target.decode(previous[:, None], positions, cache)
        logits = target.logits(hidden)[:, 0]
        if sampling.vocab_limit is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < sampling.vocab_limit, logits, -jnp.inf)
        gap = logits.max(-1) - jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return cache, (*cumulative_place(logits_to_probs(logits, sampling), token), gap)

    begin = jnp.full((tokens.shape[0], 1), target.start_id, tokens.dtype)
    previous = jnp.concatenate([begin, tokens[:, :-1]], axis=1)
    _, columns = lax.scan(step, cache, (previous.T, tokens.T, jnp.arange(tokens.shape[1])))
    return tuple(column.T for column in columns)


def miscounted(output: Output, eos_id: int, pad_id: int) -> np.ndarray:
    """[B] bool, rows whose length or counts contradict their tokens or each other.

    A text ends behind its first EOS or at the limit, and padding follows. A round emits what it accepted and
    one token more, but for the last, which may end among the accepted.
    """
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    stats = jax.tree.map(np.asarray, output.stats)
    limit = tokens.shape[1]
    is_eos = tokens == eos_id
    ends = np.where(is_eos.any(1), is_eos.argmax(1) + 1, limit)
    behind = np.arange(limit) >= length[:, None]
    finished = length == 0  # a filler row
    wrong = ((length != ends) & ~finished) | ((tokens != pad_id) & behind).any(1)
    wrong |= (stats.emitted != length) | (stats.histogram.sum(1) != stats.rounds)
    wrong |= stats.calls.sum(1) != stats.rounds
    wrong |= (stats.histogram * np.arange(stats.histogram.shape[1])).sum(1) != stats.accepted
    wrong |= (stats.accepted > stats.tested) | (stats.emitted > stats.accepted + stats.rounds)
    return wrong | ((stats.emitted < stats.accepted + stats.rounds - 1) & ~finished)


def meant(trace: Trace, stats: Stats) -> np.ndarray:
    """[R, B, G] bool, draft tokens that were meant, in rounds that were counted."""
    active = np.arange(len(trace.length))[:, None] < np.asarray(stats.rounds)
    return active[:, :, None] & (np.arange(trace.below.shape[2]) < np.asarray(trace.length)[:, :, None])


def recounted(trace: Trace, stats: Stats) -> np.ndarray:
    """[B] bool, rows whose counts are not those that the trace of their rounds adds up to."""
    trace, stats = jax.tree.map(np.asarray, (trace, stats))
    active = np.arange(len(trace.end))[:, None] < stats.rounds  # [R, B]
    emitted = np.where(active, np.diff(trace.end, axis=0, prepend=1), 0)
    accepted = np.minimum(emitted, trace.num_accepted)
    bins = np.arange(stats.histogram.shape[1])
    histogram = ((accepted[:, :, None] == bins) & active[:, :, None]).sum(0)
    wrong = (histogram != stats.histogram).any(1) | (emitted.sum(0) != stats.emitted)
    wrong |= np.where(active, accepted, 0).sum(0) != stats.accepted
    tested = np.where(active, np.minimum(emitted, trace.length), 0)
    tested_at = (np.arange(stats.tested_at.shape[1]) < tested[:, :, None]).sum(0)
    meant = ((trace.length[:, :, None] == bins) & active[:, :, None]).sum(0)
    wrong |= (stats.calls.cumsum(1) > meant.cumsum(1)).any(1)  # a call is over the whole draft, or more
    return wrong | (tested_at != stats.tested_at).any(1)
