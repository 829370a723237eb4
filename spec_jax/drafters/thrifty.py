"""A draft that falls silent where its guesses do not pay for the rows that they take in the target's call.

For drafts that cost next to nothing themselves, on a backend where rows cost time: there, at batch 1, a round
without a guess is a call over one row (`decoding.skips_rows`), and a poor guess is dearer than none. In a larger
batch a row keeps the same rule, so that its output does not depend on its neighbours.

A draft may say beforehand how sure it is, by a method `confidence`. Guesses of which it is sure fare better than
others, so each step of its confidence has an account of its own, and a guess that is not wanted is not made.

Axes: B rows, G draft length, N accounts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.backend import rows_toll
from spec_jax.drafters.base import Drafter
from spec_jax.sampling import SamplingConfig
from spec_jax.types import Context, Draft, Inputs, Verification

_MEMORY = 0.8  # how much of the yield so far a new guess leaves
_PATIENCE = 8  # silent rounds, after which one guess is tried
_STEPS = np.array([0.15, 0.3, 0.45, 0.6, 0.8])  # of confidence, between the accounts
# Tokens that a guess should bring where it is as likely to pass as it says, token by token: c + c^2 + c^3; the last
# account is for a draft without an opinion.
_EXPECTED = np.array([0.08, 0.28, 0.57, 0.94, 1.53, 2.44, 1.0], np.float32)


@flax.struct.dataclass
class ThriftyState:
    """Per row: the inner draft's state, and how its guesses fared.

    Attributes:
      inner: the wrapped draft's state.
      gain: [B, N] float32, tokens accepted a guess, by its confidence, the latest weighing most.
      silent: [B] int32, rounds since a guess was last tried.
      guessed: [B] int32, length of this round's draft.
      account: [B] int32, that of this round's draft.
    """

    inner: Any
    gain: Array
    silent: Array
    guessed: Array
    account: Array


@flax.struct.dataclass
class Thrifty:
    """Lets a draft speak while it gains, and now and then to see whether it does again.

    Whether it speaks depends on what became of earlier drafts and on its confidence, not on the tokens that it
    draws, so the output's distribution is the target's as ever.

    Attributes:
      drafter: the draft. It may have a method `confidence` (state, context) -> [B] float32, how likely the first
        token that it would propose is to pass, if its `propose` leaves the state as it is.
      toll: tokens that a guess must bring to pay for its rows: cost of gamma + 1 rows - 1; None takes what rows
        cost this backend.
    """

    drafter: Drafter
    toll: float | None = flax.struct.field(default=None, pytree_node=False)

    def init(self, inputs: Inputs, num_slots: int) -> ThriftyState:
        batch = inputs.tokens.shape[0]
        zeros = jnp.zeros((batch,), jnp.int32)
        gain = jnp.tile(_EXPECTED, (batch, 1))
        return ThriftyState(self.drafter.init(inputs, num_slots), gain, zeros, zeros, zeros)

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
        gain = jnp.take_along_axis(state.gain, account[:, None], axis=1)[:, 0]
        toll = rows_toll(gamma + 1) if self.toll is None else self.toll
        speaks = (gain >= toll) | (state.silent >= _PATIENCE)

        if confidence is None:
            draft, inner = propose()
        else:
            shapes, inner = jax.eval_shape(propose)[0], state.inner
            nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
            draft = lax.cond(speaks.any(), lambda: propose()[0], lambda: nothing)
        length = jnp.where(speaks, draft.length, 0)
        return draft.replace(length=length), state.replace(inner=inner, guessed=length, account=account)

    def update(
        self, state: ThriftyState, context: Context, verified: Verification, hidden: Array
    ) -> ThriftyState:
        guessed = state.guessed > 0
        gain = _MEMORY * state.gain + (1 - _MEMORY) * verified.num_accepted[:, None]
        mine = guessed[:, None] & (jnp.arange(gain.shape[1]) == state.account[:, None])
        return state.replace(
            inner=self.drafter.update(state.inner, context, verified, hidden),
            gain=jnp.where(mine, gain, state.gain),
            silent=jnp.where(guessed, 0, state.silent + 1),
        )


def outspoken(drafter: Drafter | None) -> Drafter | None:
    """The draft itself, which speaks whenever it has a guess."""
    return drafter.drafter if isinstance(drafter, Thrifty) else drafter
