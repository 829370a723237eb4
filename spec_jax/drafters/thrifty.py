"""A draft that falls silent where its guesses do not pay for the rows that they take in the target's call.

For drafts that cost next to nothing themselves, on a backend where rows cost time: there, at batch 1, a round
without a guess is a call over one row (`decoding.skips_rows`), and a poor guess is dearer than none. In a larger
batch a row keeps the same rule, so that its output does not depend on its neighbours.

Axes: B rows, G draft length.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

from spec_jax.drafters.base import Drafter
from spec_jax.sampling import SamplingConfig
from spec_jax.types import Context, Draft, Inputs, Verification

_MEMORY = 0.8  # how much of the yield so far a new guess leaves
_PATIENCE = 8  # silent rounds, after which one guess is tried


@flax.struct.dataclass
class ThriftyState:
    """Per row: the inner draft's state, and how its guesses fared.

    Attributes:
      inner: the wrapped draft's state.
      gain: [B] float32, tokens accepted a guess, the latest weighing most; 1 at first.
      silent: [B] int32, rounds since a guess was last tried.
      guessed: [B] int32, length of this round's draft.
    """

    inner: Any
    gain: Array
    silent: Array
    guessed: Array


@flax.struct.dataclass
class Thrifty:
    """Lets a draft speak while it gains, and now and then to see whether it does again.

    Whether it speaks depends on what became of earlier drafts alone, not on the tokens it is about to draw, so the
    output's distribution is the target's as ever.

    Attributes:
      drafter: the draft.
      toll: tokens that a guess must bring to pay for its rows: cost of gamma + 1 rows - 1.
    """

    drafter: Drafter
    toll: float = flax.struct.field(pytree_node=False)

    def init(self, inputs: Inputs, num_slots: int) -> ThriftyState:
        batch = inputs.tokens.shape[0]
        zeros = jnp.zeros((batch,), jnp.int32)
        return ThriftyState(self.drafter.init(inputs, num_slots), jnp.ones((batch,)), zeros, zeros)

    def propose(
        self,
        state: ThriftyState,
        context: Context,
        keys: Array,
        gamma: int,
        sampling: SamplingConfig,
        vocab_size: int,
    ) -> tuple[Draft, ThriftyState]:
        draft, inner = self.drafter.propose(state.inner, context, keys, gamma, sampling, vocab_size)
        speaks = (state.gain >= self.toll) | (state.silent >= _PATIENCE)
        length = jnp.where(speaks, draft.length, 0)
        return draft.replace(length=length), state.replace(inner=inner, guessed=length)

    def update(
        self, state: ThriftyState, context: Context, verified: Verification, hidden: Array
    ) -> ThriftyState:
        guessed = state.guessed > 0
        gain = _MEMORY * state.gain + (1 - _MEMORY) * verified.num_accepted
        return ThriftyState(
            inner=self.drafter.update(state.inner, context, verified, hidden),
            gain=jnp.where(guessed, gain, state.gain),
            silent=jnp.where(guessed, 0, state.silent + 1),
            guessed=state.guessed,
        )


def outspoken(drafter: Drafter | None) -> Drafter | None:
    """The draft itself, which speaks whenever it has a guess."""
    return drafter.drafter if isinstance(drafter, Thrifty) else drafter
