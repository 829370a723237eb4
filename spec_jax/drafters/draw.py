"""Sampling for drafters: a token and the q array that it was drawn from, over the target's vocabulary.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from spec_jax.sampling import SamplingConfig, likeliest, logits_to_probs, sample


def draw(keys: Array, logits: Array, sampling: SamplingConfig) -> tuple[Array, Array | None]:
    """Draws one token a row.

    Args:
      keys: [B] PRNG keys.
      logits: [B, V].
      sampling: the target's.

    Returns:
      tokens [B] int32, and the q [B, V] that they were drawn from; q is None where greedy (one-hot). A greedy token
      is -1 where the logits have no maximum.
    """
    with jax.named_scope('draw'):
        if sampling.temperature == 0:
            return likeliest(logits, sampling), None
        probs = logits_to_probs(logits, sampling)
        return sample(keys, probs), probs


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """Cuts or pads logits [..., V'] to [..., vocab_size]; ids that the draft lacks get -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, widths, constant_values=-jnp.inf)
