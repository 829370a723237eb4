"""Losses over padded batches. Axes: B rows, T tokens, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, labels: Array, mask: Array, smoothing: float = 0.0) -> tuple[Array, Array]:
    """Token cross-entropy, in nats.

    Args:
      logits: [B, T, V] float32.
      labels: [B, T] int32.
      mask: [B, T] bool, True where a label counts.
      smoothing: mass moved from the label to the uniform distribution.

    Returns:
      The sum over the labels that count and their number, both float32 scalars.
    """
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = log_normalizer - label_logit
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_normalizer - logits.mean(-1))
    weight = mask.astype(jnp.float32)
    return (loss * weight).sum(), weight.sum()
