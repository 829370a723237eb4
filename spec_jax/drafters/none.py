"""No draft: plain decoding, the same loop with an empty draft."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp

from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.models.base import Model
from spec_jax.types import Draft, Inputs, Prefill


@flax.struct.dataclass
class NoDrafter:
    """Proposes no tokens."""

    def shape(self, gamma: int) -> DraftShape:
        return DraftShape(nodes=0, depth=0, deterministic=True, may_be_empty=False)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> tuple:
        return ()

    def propose(self, state: tuple, round: Round) -> tuple[Draft, tuple]:
        batch = len(round.context.length)
        return Draft(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros((batch,), jnp.int32)), state

    def update(self, state: tuple, outcome: Outcome) -> tuple:
        return state
