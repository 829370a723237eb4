"""Losses over padded batches, in nats. Axes: B rows, T tokens, V vocabulary.

Each returns a sum over the labels that count and their number, so that batches can be averaged together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def cross_entropy(logits: Array, labels: Array, mask: Array, smoothing: float = 0.0) -> tuple[Array, Array]:
    """Token cross-entropy.

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


def distillation(
    logits: Array,
    teacher_logits: Array,
    labels: Array,
    mask: Array,
    weight: float = 1.0,
    smoothing: float = 0.0,
) -> tuple[Array, Array]:
    """Word-level distillation (Kim and Rush 2016): cross-entropy under the teacher's distribution and the label.

    With weight 1 it is KL(teacher, student) plus the teacher's entropy, which does not depend on the student.
    Teacher and label are mixed into one distribution first: fewer passes over the vocabulary than two losses.

    Args:
      logits: [B, T, V] float32.
      teacher_logits: [B, T, V] float32.
      labels: [B, T] int32.
      mask: [B, T] bool, True where a position counts.
      weight: the teacher's share; the label has the rest.
      smoothing: mass moved from the label to the uniform distribution.

    Returns:
      The sum over the positions that count and their number, both float32 scalars.
    """
    vocab_size = logits.shape[-1]
    label = (
        jnp.where(jnp.arange(vocab_size) == labels[..., None], 1 - smoothing, 0.0) + smoothing / vocab_size
    )
    mixture = weight * jax.nn.softmax(teacher_logits, axis=-1) + (1 - weight) * label
    loss = jax.nn.logsumexp(logits, axis=-1) - (lax.stop_gradient(mixture) * logits).sum(-1)
    weight = mask.astype(jnp.float32)
    return (loss * weight).sum(), weight.sum()
