"""What can make a row of no use: detected inside the compiled loop, reported outside it.

Axes: B rows, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import enum

import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.runtime import processes
from spec_jax.types import Draft

SUM_TOLERANCE = 1e-3  # of a draft's probabilities: far above rounding, far below what a pass would hide


class Failure(enum.IntFlag):
    """Bits of `Output.failed`."""

    TARGET = 1  # the target's logits have a NaN or +inf, or nothing above -inf
    DRAFT_PROBS = 2  # the draft's probabilities do not sum to 1
    DRAFT_TOKEN = 4  # the draft's token is none of the vocabulary, or it had none to give


_MESSAGES = {
    Failure.TARGET: 'expected finite logits from the target, got NaN or inf; check the weights (a T5 overflows in '
    'float16: use bfloat16 or float32)',
    Failure.DRAFT_PROBS: 'expected probabilities that sum to 1 from the draft, got others or NaN; check its '
    'weights, and that it passes its logits through logits_to_probs',
    Failure.DRAFT_TOKEN: 'expected tokens of the vocabulary from the draft, got others, or none for '
    'NaN among its logits; check its weights and what it proposes',
}


def failures(no_target: Array, draft: Draft, vocab_size: int) -> Array:
    """[B] int32, bits of `Failure`.

    Args:
      no_target: [B] bool, rows for which the target gave no distribution.
      draft: of the round; only its valid tokens count.
      vocab_size: V.
    """
    valid = jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]
    outside = (draft.tokens < 0) | (draft.tokens >= vocab_size)
    bits = {Failure.TARGET: no_target, Failure.DRAFT_TOKEN: (outside & valid).any(-1)}
    if draft.probs is not None:
        sums_to_1 = jnp.abs(draft.probs.sum(-1) - 1) < SUM_TOLERANCE  # NaN does not
        bits[Failure.DRAFT_PROBS] = (~sums_to_1 & valid).any(-1)
    return sum(jnp.where(rows, kind.value, 0) for kind, rows in bits.items())


def check_draft(draft: Draft, batch: int, nodes: int, vocab_size: int, sampled: bool) -> None:
    """Raises ValueError, as the loop is traced, for a draft that is not what its drafter's shape says.

    Args:
      draft: of B rows.
      batch: B.
      nodes: N.
      vocab_size: V.
      sampled: whether it has to have `probs`.
    """
    expected = dict(tokens=(jnp.integer, (batch, nodes)), length=(jnp.integer, (batch,)))
    if draft.probs is not None:
        expected['probs'] = (jnp.floating, (batch, nodes, vocab_size))
    for name, (kind, shape) in expected.items():
        array = jnp.asarray(getattr(draft, name))
        if array.shape != shape or not jnp.issubdtype(array.dtype, kind):
            raise ValueError(
                f'Draft.{name}: expected {kind.__name__} numbers of shape {list(shape)}, got {array.dtype} of '
                f"shape {list(array.shape)}; see the drafter's propose"
            )
    if sampled and draft.probs is None:
        raise ValueError(
            'Draft.probs: expected the distributions that tokens were sampled from, got None; give them, or say in '
            "the drafter's shape that it is deterministic"
        )
    parents = draft.parents
    if parents is not None and (
        len(parents) != nodes or not all(-1 <= parent < node for node, parent in enumerate(parents))
    ):
        raise ValueError(
            f'Draft.parents: expected {nodes} integers, each from -1 to below its own place, got {parents}; see '
            "the drafter's propose"
        )


def raise_on_failure(output):
    """Gives back what has a `failed` [B] of 0 in every row, such as an `Output`; else raises FloatingPointError.

    Of several processes, each gets all rows.
    """
    output = processes.whole(output)
    failed = np.asarray(output.failed)
    for kind, message in _MESSAGES.items():
        rows = np.flatnonzero(failed & kind.value)
        if rows.size:
            raise FloatingPointError(f'rows {rows.tolist()[:8]}: {message}')
    return output
