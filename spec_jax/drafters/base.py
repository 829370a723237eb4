"""What the decoding loop asks of a draft.

A drafter is a pytree, as a model is: arrays are leaves and enter `jax.jit` as arguments, all else is
static. Its methods are pure and are traced once. Any class with these members will do.

Axes: B rows, G draft depth, N nodes of a draft, V vocabulary, D model width, F feature width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from spec_jax.models.base import Model
from spec_jax.sampling import SamplingConfig, likeliest, logits_to_probs, sample
from spec_jax.types import Context, Draft, Inputs, Prefill, Verification


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """What is static in a drafter's proposals.

    Attributes:
      nodes: N, tokens of a draft.
      depth: G, most of them that can be accepted in one round.
      deterministic: whether `Draft.probs` is None at any temperature.
      may_be_empty: whether `Draft.length` can be less than N; a call over fewer rows is worth having then.
    """

    nodes: int
    depth: int
    deterministic: bool = False
    may_be_empty: bool = True


@flax.struct.dataclass
class Round:
    """What a drafter is told before a round.

    Attributes:
      context: the text so far.
      keys: [B] PRNG keys of this round.
      gamma: G asked for, at least 1.
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
    """What a drafter is told after a round.

    Attributes:
      context: the text with this round's tokens.
      verification: the verdict.
      hidden: [B, N + 1, D], the target's hidden states at the newest token and at each node.
      features: [B, N + 1, F], likewise, where the target's `spec.feature_layers` names any; else None.
    """

    context: Context
    verification: Verification
    hidden: Array
    features: Array | None = None


class Drafter(Protocol):
    """Guesses the target's next tokens."""

    def shape(self, gamma: int) -> DraftShape:
        """The shape of the proposals for a draft depth of gamma."""
        ...

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Any:
        """The state for a batch of prompts; `target` is as prefilled, `num_slots` as of `Model.prefill`."""
        ...

    def propose(self, state: Any, round: Round) -> tuple[Draft, Any]:
        """Guesses what follows the context; the state is then the one that `update` gets.

        The law of `Draft.length` holds: how many tokens are valid must not depend on a token that is withheld.
        """
        ...

    def update(self, state: Any, outcome: Outcome) -> Any:
        """The state for the next round."""
        ...


@flax.struct.dataclass
class NoDrafter:
    """Guesses nothing: plain decoding."""

    def shape(self, gamma: int) -> DraftShape:
        return DraftShape(nodes=0, depth=0, deterministic=True, may_be_empty=False)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> tuple:
        return ()

    def propose(self, state: tuple, round: Round) -> tuple[Draft, tuple]:
        batch = len(round.context.length)
        return Draft(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros((batch,), jnp.int32)), state

    def update(self, state: tuple, outcome: Outcome) -> tuple:
        return state


def draw(keys: Array, logits: Array, sampling: SamplingConfig) -> tuple[Array, Array | None]:
    """Draws one token a row.

    Args:
      keys: [B] PRNG keys.
      logits: [B, V].
      sampling: the target's.

    Returns:
      tokens [B] int32, and q [B, V] that they were drawn from; None where greedy (one-hot). A greedy token is -1
      where the logits have no highest.
    """
    with jax.named_scope('draw'):
        if sampling.temperature == 0:
            return likeliest(logits, sampling), None
        probs = logits_to_probs(logits, sampling)
        return sample(keys, probs), probs
