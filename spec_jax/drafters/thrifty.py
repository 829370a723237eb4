"""Drafts only as many tokens as are expected to gain more than their rows cost in the target's call.

For drafters of negligible cost, on a backend where each row of a call costs time: there, at batch 1, a short draft
is scored by a call over fewer rows (`backend.compiled_lengths`), and a draft that is likely to be rejected costs
more than an empty one. In a larger batch a row follows the same rule, so that its output does not depend on its
neighbours.

A drafter may report a confidence before it proposes. Acceptance rates are then tracked separately for each interval
of the confidence (an account), and a draft that is not expected to gain is not made.

Axes: B rows, G draft depth, A accounts.
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
from spec_jax.runtime.backend import compiled_lengths, row_cost
from spec_jax.types import Context, Draft, Inputs, Prefill

_DECAY = 0.85  # weight of the old acceptance rate when a draft is counted
_RETRY_AFTER = 8  # rounds without a draft, after which a short one is tried
_STEPS = np.array([0.15, 0.3, 0.45, 0.6, 0.8])  # confidences that separate the accounts
# Initial acceptance rate of a draft's first token: the middle of each interval; the last account is for a drafter
# without a confidence.
_FIRST = np.array([0.08, 0.22, 0.37, 0.52, 0.7, 0.88, 0.35], np.float32)
_LATER = 0.5  # the same of a token after an accepted one


@flax.struct.dataclass
class ThriftyState:
    """Per row: the inner drafter's state, and the acceptance rates of its drafts.

    Attributes:
      inner: the wrapped drafter's state.
      first: [B, A] float32, acceptance rate of a draft's first token, by account, the latest weighted most.
      later: [B, A] float32, the same of the tokens after an accepted one.
      rounds_skipped: [B] int32, rounds since the last draft that was not empty.
      proposed: [B] int32, length of this round's draft.
      account: [B] int32, the account of this round's draft.
    """

    inner: Any
    first: Array
    later: Array
    rounds_skipped: Array
    proposed: Array
    account: Array


@flax.struct.dataclass
class Thrifty:
    """Shortens a drafter's proposals to the length that gains most.

    After `_RETRY_AFTER` rounds without a proposal it makes a short one. The length depends on the acceptance of
    earlier drafts and on the drafter's confidence, not on the tokens drawn in this round: so the law of
    `Draft.length` holds, and the output's distribution is the target's.

    Attributes:
      drafter: the inner drafter; with a confidence, its `propose` must leave its state unchanged.
      confidence: (drafter, state, context) -> [B] float32, the estimated probability that the first proposed token
        is accepted; None where the drafter has no estimate.
      cost: of a number of rows, the extra cost of a call over them, relative to a call over one row.
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
        lengths = [length for length in compiled_lengths(round.gamma, self.cost) if length]
        most = best_length(first, later, lengths, [self.cost(length + 1) for length in lengths])
        most = jnp.where(state.rounds_skipped >= _RETRY_AFTER, jnp.maximum(most, lengths[0]), most)

        if self.confidence is None:
            draft, inner = self.drafter.propose(state.inner, round)
        else:
            draft, inner = self._proposed_where_any(most > 0, state.inner, round), state.inner
        length = jnp.minimum(draft.length, most)
        return draft.replace(length=length), state.replace(inner=inner, proposed=length, account=account)

    def _proposed_where_any(self, due: Array, inner: Any, round: Round) -> Draft:
        """The inner drafter's proposal, or zeros if no row is due [B]."""
        shapes = jax.eval_shape(self.drafter.propose, inner, round)[0]
        nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        return lax.cond(due.any(), lambda: self.drafter.propose(inner, round)[0], lambda: nothing)

    def update(self, state: ThriftyState, outcome: Outcome) -> ThriftyState:
        proposed, accepted = state.proposed, outcome.verification.num_accepted
        counted = jnp.arange(len(_FIRST)) == state.account[:, None]
        rate = _DECAY * state.first + (1 - _DECAY) * (accepted > 0)[:, None]
        later = 1 - (1 - state.later) * _DECAY ** jnp.maximum(accepted - 1, 0)[:, None]
        later = jnp.where((accepted < proposed)[:, None], _DECAY * later, later)
        return state.replace(
            inner=self.drafter.update(state.inner, outcome),
            first=jnp.where(counted & (proposed > 0)[:, None], rate, state.first),
            later=jnp.where(counted & (accepted > 0)[:, None], later, state.later),
            rounds_skipped=jnp.where(proposed > 0, 0, state.rounds_skipped + 1),
        )


def best_length(first: Array, later: Array, lengths: Sequence[int], costs: Sequence[float]) -> Array:
    """The draft length [B] with the most expected tokens per unit of call time; 0 for an empty draft.

    Args:
      first: [B], probability that the first token is accepted.
      later: [B], the same of each token after an accepted one.
      lengths: to choose from, ascending, besides 0.
      costs: the cost that a draft of each length adds, relative to a call over one row.
    """
    passing = first[:, None] * later[:, None] ** jnp.arange(lengths[-1])  # [B, longest]
    tokens = 1 + jnp.cumsum(passing, axis=1)[:, np.array(lengths) - 1]
    speed = jnp.pad(tokens / (1 + np.array(costs)), ((0, 0), (1, 0)), constant_values=1.0)
    return jnp.array([0, *lengths])[jnp.argmax(speed, axis=1)]


def without_thrift(drafter: Drafter | None) -> Drafter | None:
    """The inner drafter of a `Thrifty`, which proposes in every round; any other drafter unchanged."""
    return drafter.drafter if isinstance(drafter, Thrifty) else drafter
