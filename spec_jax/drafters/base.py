"""What the decoding loop asks of a draft.

A drafter is a pytree, as a model is: arrays are leaves and enter `jax.jit` as arguments, all else is
static. Its methods are pure and are traced once. Any class with these members will do.

Axes: B rows, G draft length, N length of the token buffer, S source length, V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax import Array

from spec_jax.sampling import SamplingConfig, likeliest, logits_to_probs, sample
from spec_jax.types import Context, Draft, Inputs, Verification


class Drafter(Protocol):
    """Guesses the target's next tokens.

    A class may have `always_guesses = True`, which says that `Draft.length` is never 0; the loop then has no way
    round the call over G + 1 rows.
    """

    def init(self, inputs: Inputs, num_slots: int) -> Any:
        """The drafter's state for a batch of prompts; `num_slots` tokens a row will pass, drafts included."""
        ...

    def propose(
        self, state: Any, context: Context, keys: Array, gamma: int, sampling: SamplingConfig, vocab_size: int
    ) -> tuple[Draft, Any]:
        """Guesses the `gamma` tokens that follow the context.

        Args:
          state: from `init` or `update`.
          context: the text so far.
          keys: [B] PRNG keys for this round.
          gamma: G, at least 1.
          sampling: the target's; a draft that samples passes its logits through the same `logits_to_probs`.
          vocab_size: V of the target, the width of `Draft.probs`.

        Returns:
          The draft and the state that `update` gets.
        """
        ...

    def update(self, state: Any, context: Context, verified: Verification, hidden: Array) -> Any:
        """Takes note of what became of the draft.

        Args:
          state: from `propose`.
          context: the text with this round's tokens.
          verified: the verdict.
          hidden: [B, G + 1, D], the target's hidden states at the newest token and at each draft token.
        """
        ...


def draw(keys: Array, logits: Array, sampling: SamplingConfig) -> tuple[Array, Array | None]:
    """A token for each row, and what it was drawn from.

    Args:
      keys: [B] PRNG keys.
      logits: [B, V].
      sampling: the target's.

    Returns:
      tokens [B] int32, and q [B, V], or None where greedy (one-hot, which the loop need not be told). A greedy
      token is -1 where the logits have no highest.
    """
    with jax.named_scope('draw'):
        if sampling.temperature == 0:
            return likeliest(logits, sampling), None
        probs = logits_to_probs(logits, sampling)
        return sample(keys, probs), probs
