"""A draft that guesses no more tokens than pay for the rows that they take in the target's call.

For drafts that cost next to nothing themselves, on a backend where rows cost time: there, at batch 1, a short
draft is scored by a call over fewer rows (`backend.call_lengths`), and a poor guess is dearer than none. In a
larger batch a row keeps the same rule, so that its output does not depend on its neighbours.

A draft may say beforehand how sure it is, by a method `confidence`. Guesses of which it is sure fare better than
others, so each step of its confidence has an account of its own, and a guess that is not wanted is not made.

Axes: B rows, G draft length, N accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.drafters.base import Drafter
from spec_jax.runtime.backend import call_lengths, rows_toll
from spec_jax.sampling import SamplingConfig
from spec_jax.types import Context, Draft, Inputs, Verification

_MEMORY = 0.85  # how much of an account a new guess leaves
_PATIENCE = 8  # silent rounds, after which a short guess is tried
_STEPS = np.array([0.15, 0.3, 0.45, 0.6, 0.8])  # of confidence, between the accounts
# How likely a guess's first token is to pass before any was tried: the middle of each step; the last account is for
# a draft without an opinion.
_FIRST = np.array([0.08, 0.22, 0.37, 0.52, 0.7, 0.88, 0.35], np.float32)
_LATER = 0.5  # the same of a token behind one that passed


@flax.struct.dataclass
class ThriftyState:
    """Per row: the inner draft's state, and how its guesses fared.

    Attributes:
      inner: the wrapped draft's state.
      first: [B, N] float32, share that passed of the first tokens of guesses, by account, the latest weighing most.
      later: [B, N] float32, the same of the tokens behind one that passed.
      silent: [B] int32, rounds since a guess was last tried.
      guessed: [B] int32, length of this round's draft.
      account: [B] int32, that of this round's draft.
    """

    inner: Any
    first: Array
    later: Array
    silent: Array
    guessed: Array
    account: Array


@flax.struct.dataclass
class Thrifty:
    """Lets a draft speak for as long as that gains, and now and then to see whether it does again.

    How long depends on what became of earlier drafts and on the draft's confidence, not on the tokens that it
    draws, so the output's distribution is the target's as ever.

    Attributes:
      drafter: the draft. It may have a method `confidence` (state, context) -> [B] float32, how likely the first
        token that it would propose is to pass, if its `propose` leaves the state as it is.
      toll: of a number of rows, what a call over them costs beyond one over a single row, in calls over one.
    """

    drafter: Drafter
    toll: Callable[[int], float] = flax.struct.field(default=rows_toll, pytree_node=False)

    def init(self, inputs: Inputs, num_slots: int) -> ThriftyState:
        batch = inputs.tokens.shape[0]
        zeros = jnp.zeros((batch,), jnp.int32)
        first = jnp.tile(_FIRST, (batch, 1))
        inner = self.drafter.init(inputs, num_slots)
        return ThriftyState(inner, first, jnp.full_like(first, _LATER), zeros, zeros, zeros)

    def propose(
        self,
        state: ThriftyState,
        context: Context,
        keys: Array,
        gamma: int,
        sampling: SamplingConfig,
        vocab_size: int,
    ) -> tuple[Draft, ThriftyState]:
        propose = partial(self.drafter.propose, state.inner, context, keys, gamma, sampling, vocab_size)
        confidence = getattr(self.drafter, 'confidence', None)
        account = jnp.full_like(context.length, len(_STEPS) + 1)
        if confidence is not None:
            account = (confidence(state.inner, context)[:, None] >= _STEPS).sum(-1)
        rates = (
            jnp.take_along_axis(one, account[:, None], axis=1)[:, 0] for one in (state.first, state.later)
        )
        lengths = [length for length in call_lengths(gamma, self.toll) if length]
        wanted = best_length(*rates, lengths, [self.toll(length + 1) for length in lengths])
        wanted = jnp.where(state.silent >= _PATIENCE, jnp.maximum(wanted, lengths[0]), wanted)

        if confidence is None:
            draft, inner = propose()
        else:
            shapes, inner = jax.eval_shape(propose)[0], state.inner
            nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
            draft = lax.cond((wanted > 0).any(), lambda: propose()[0], lambda: nothing)
        length = jnp.minimum(draft.length, wanted)
        return draft.replace(length=length), state.replace(inner=inner, guessed=length, account=account)

    def update(
        self, state: ThriftyState, context: Context, verified: Verification, hidden: Array
    ) -> ThriftyState:
        guessed, accepted = state.guessed, verified.num_accepted
        mine = jnp.arange(len(_FIRST)) == state.account[:, None]
        rate = _MEMORY * state.first + (1 - _MEMORY) * (accepted > 0)[:, None]
        later = 1 - (1 - state.later) * _MEMORY ** jnp.maximum(accepted - 1, 0)[:, None]
        later = jnp.where((accepted < guessed)[:, None], _MEMORY * later, later)
        return state.replace(
            inner=self.drafter.update(state.inner, context, verified, hidden),
            first=jnp.where(mine & (guessed > 0)[:, None], rate, state.first),
            later=jnp.where(mine & (accepted > 0)[:, None], later, state.later),
            silent=jnp.where(guessed > 0, 0, state.silent + 1),
        )


def best_length(first: Array, later: Array, lengths: Sequence[int], tolls: Sequence[float]) -> Array:
    """The length [B] of a draft with which a row gets on fastest: most tokens by the time of a call; 0 for none.

    Args:
      first: [B], how likely the first token is to pass.
      later: [B], the same of each token behind one that passed.
      lengths: to choose from, ascending, besides 0.
      tolls: what a draft of each adds to the cost of a call over one row.
    """
    passing = first[:, None] * later[:, None] ** jnp.arange(lengths[-1])  # [B, most]
    tokens = 1 + jnp.cumsum(passing, axis=1)[:, np.array(lengths) - 1]
    speed = jnp.pad(tokens / (1 + np.array(tolls)), ((0, 0), (1, 0)), constant_values=1.0)
    return jnp.array([0, *lengths])[jnp.argmax(speed, axis=1)]


def outspoken(drafter: Drafter | None) -> Drafter | None:
    """The draft itself, which speaks whenever it has a guess."""
    return drafter.drafter if isinstance(drafter, Thrifty) else drafter
