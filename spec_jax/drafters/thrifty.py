"""A draft that guesses no more tokens than pay for the rows that they take in the target's call.

For drafts that cost next to nothing themselves, on a backend where rows cost time: there, at batch 1, a short
draft is scored by a call over fewer rows (`backend.call_lengths`), and a poor guess is dearer than none. In a
larger batch a row keeps the same rule, so that its output does not depend on its neighbours.

A draft may say beforehand how sure it is. Guesses of which it is sure fare better than others, so each step of its
confidence has an account of its own, and a guess that does not pay is not made.

Axes: B rows, G draft length, A accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.drafters.base import Drafter, DraftShape, Outcome, Round
from spec_jax.models.base import Model
from spec_jax.runtime.backend import call_lengths, row_cost
from spec_jax.types import Context, Draft, Inputs, Prefill

_MEMORY = 0.85  # how much of an account a new guess leaves
_PATIENCE = 8  # rounds without a guess, after which a short one is tried
_STEPS = np.array([0.15, 0.3, 0.45, 0.6, 0.8])  # of confidence, between the accounts
# How likely a guess's first token is to pass before any was tried: the middle of each step; the last account is for
# a draft without a confidence.
_FIRST = np.array([0.08, 0.22, 0.37, 0.52, 0.7, 0.88, 0.35], np.float32)
_LATER = 0.5  # the same of a token after one that passed


@flax.struct.dataclass
class ThriftyState:
    """Per row: the inner draft's state, and how its guesses fared.

    Attributes:
      inner: the wrapped draft's state.
      first: [B, A] float32, share that passed of the first tokens of guesses, by account, the latest weighing most.
      later: [B, A] float32, the same of the tokens after one that passed.
      rounds_skipped: [B] int32, rounds since a guess was last tried.
      proposed: [B] int32, length of this round's draft.
      account: [B] int32, that of this round's draft.
    """

    inner: Any
    first: Array
    later: Array
    rounds_skipped: Array
    proposed: Array
    account: Array


@flax.struct.dataclass
class Thrifty:
    """Has a draft guess for as long as that gains, and now and then to see whether it does again.

    How many tokens it guesses depends on what became of earlier drafts and on the draft's confidence, not on the
    tokens that it draws: so the law of `Draft.length` holds, and the output's distribution is the target's.

    Attributes:
      drafter: the draft, whose `propose` leaves its state as it is where there is a confidence.
      confidence: (drafter, state, context) -> [B] float32, how likely the first token that it would propose is to
        pass; None for a draft that cannot say.
      cost: of a number of rows, what a call over them costs beyond one over a single row, in calls over one.
    """

    drafter: Drafter
    confidence: Callable[[Drafter, Any, Context], Array] | None = flax.struct.field(
        default=None, pytree_node=False
    )
    cost: Callable[[int], float] = flax.struct.field(default=row_cost, pytree_node=False)

    def shape(self, gamma: int) -> DraftShape:
        shape = self.drafter.shape(gamma)
        return DraftShape(shape.nodes, shape.depth, shape.deterministic, may_be_empty=True)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> ThriftyState:
        batch = inputs.tokens.shape[0]
        zeros = jnp.zeros((batch,), jnp.int32)
        first = jnp.tile(_FIRST, (batch, 1))
        inner = self.drafter.init(target, prefill, inputs, num_slots)
        return ThriftyState(inner, first, jnp.full_like(first, _LATER), zeros, zeros, zeros)

    def propose(self, state: ThriftyState, round: Round) -> tuple[Draft, ThriftyState]:
        account = jnp.full_like(round.context.length, len(_STEPS) + 1)
        if self.confidence is not None:
            confidence = self.confidence(self.drafter, state.inner, round.context)
            account = (confidence[:, None] >= _STEPS).sum(-1)
        first, later = (
            jnp.take_along_axis(rates, account[:, None], axis=1)[:, 0] for rates in (state.first, state.later)
        )
        lengths = [length for length in call_lengths(round.gamma, self.cost) if length]
        most = best_length(first, later, lengths, [self.cost(length + 1) for length in lengths])
        most = jnp.where(state.rounds_skipped >= _PATIENCE, jnp.maximum(most, lengths[0]), most)

        if self.confidence is None:
            draft, inner = self.drafter.propose(state.inner, round)
        else:
            draft, inner = self._proposed_where_any(most > 0, state.inner, round), state.inner
        length = jnp.minimum(draft.length, most)
        return draft.replace(length=length), state.replace(inner=inner, proposed=length, account=account)

    def _proposed_where_any(self, due: Array, inner: Any, round: Round) -> Draft:
        """The inner draft, or zeros where no row is due [B]."""
        shapes = jax.eval_shape(self.drafter.propose, inner, round)[0]
        nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        return lax.cond(due.any(), lambda: self.drafter.propose(inner, round)[0], lambda: nothing)

    def update(self, state: ThriftyState, outcome: Outcome) -> ThriftyState:
        proposed, accepted = state.proposed, outcome.verification.num_accepted
        mine = jnp.arange(len(_FIRST)) == state.account[:, None]
        rate = _MEMORY * state.first + (1 - _MEMORY) * (accepted > 0)[:, None]
        later = 1 - (1 - state.later) * _MEMORY ** jnp.maximum(accepted - 1, 0)[:, None]
        later = jnp.where((accepted < proposed)[:, None], _MEMORY * later, later)
        return state.replace(
            inner=self.drafter.update(state.inner, outcome),
            first=jnp.where(mine & (proposed > 0)[:, None], rate, state.first),
            later=jnp.where(mine & (accepted > 0)[:, None], later, state.later),
            rounds_skipped=jnp.where(proposed > 0, 0, state.rounds_skipped + 1),
        )


def best_length(first: Array, later: Array, lengths: Sequence[int], costs: Sequence[float]) -> Array:
    """The length [B] of a draft with which a row advances fastest: most tokens by the time of a call; 0 for none.

    Args:
      first: [B], how likely the first token is to pass.
      later: [B], the same of each token after one that passed.
      lengths: to choose from, ascending, besides 0.
      costs: what a draft of each adds to the cost of a call over one row.
    """
    passing = first[:, None] * later[:, None] ** jnp.arange(lengths[-1])  # [B, longest]
    tokens = 1 + jnp.cumsum(passing, axis=1)[:, np.array(lengths) - 1]
    speed = jnp.pad(tokens / (1 + np.array(costs)), ((0, 0), (1, 0)), constant_values=1.0)
    return jnp.array([0, *lengths])[jnp.argmax(speed, axis=1)]


def without_thrift(drafter: Drafter | None) -> Drafter | None:
    """The draft itself, which guesses whenever it can."""
    return drafter.drafter if isinstance(drafter, Thrifty) else drafter
