"""The interface between the decoding loop and a drafter.

A drafter is a pytree, as a model is: arrays are leaves and enter `jax.jit` as arguments, all else is static. Its
methods are pure and are traced once. Any class with these members can be used.

Axes: B rows, G draft depth, N nodes of a draft, V vocabulary, D model width, F feature width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import flax.struct
from jax import Array

from spec_jax.models.base import Model
from spec_jax.sampling import SamplingConfig
from spec_jax.types import Context, Draft, Inputs, Prefill, Verification


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """What is static in a drafter's proposals."""

    nodes: int  # N, tokens of a draft
    depth: int  # G, most of them that can be accepted in one round
    deterministic: bool = False  # whether `Draft.probs` is None at any temperature
    may_be_empty: bool = (
        True  # whether `Draft.length` can be 0; calls over fewer rows are then compiled as well
    )


@flax.struct.dataclass
class Round:
    """What a drafter gets before a round.

    Attributes:
      context: the text so far.
      keys: [B] PRNG keys of this round.
      gamma: G, the draft depth, at least 1.
      sampling: the target's; a draft that samples passes its logits through the same `logits_to_probs`.
      vocab_size: V of the target, the width of `Draft.probs`.
    """

    context: Context
    keys: Array
    gamma: int = flax.struct.field(pytree_node=False)
    sampling: SamplingConfig = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Outcome:
    """What a drafter gets after a round."""

    context: Context  # with this round's tokens
    verification: Verification  # the rule's result
    hidden: Array  # [B, N + 1, D], the target's states at the newest token and at each node
    features: Array | None = None  # [B, N + 1, F]; None where the target's `spec.feature_layers` is empty


class Drafter(Protocol):
    """Proposes the target's next tokens."""

    def shape(self, gamma: int) -> DraftShape:
        """The shape of the proposals for a draft depth of gamma."""
        ...

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Any:
        """The state for a batch of prompts; `target` is as prefilled, `num_slots` as of `Model.prefill`."""
        ...

    def propose(self, state: Any, round: Round) -> tuple[Draft, Any]:
        """Proposes what follows the context; `update` gets the state returned here.

        The law of `Draft.length` holds: how many tokens are valid must not depend on a token that is withheld.
        """
        ...

    def update(self, state: Any, outcome: Outcome) -> Any:
        """The state for the next round."""
        ...
