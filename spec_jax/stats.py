"""Counts kept inside the loop.

Axes: B rows, G draft depth, N nodes of a draft.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array


@flax.struct.dataclass
class Stats:
    """Counts kept per row inside the loop; every figure is derived from them afterwards.

    Attributes:
      rounds: [B] int32, target calls while the row was unfinished.
      tested_at: [B, G] int32, rounds in which a draft token at that depth met the accept test; none after a
        rejection, an EOS or the limit.
      accepted: [B] int32, how many tokens passed it.
      histogram: [B, G + 1] int32, rounds by number of accepted tokens.
      overlap: [B] float32, sum of beta over the tested tokens.
      emitted: [B] int32, tokens of the output, EOS included.
      calls: [B, N + 1] int32, rounds by the number of draft tokens that the target call was over, valid or not.
    """

    rounds: Array
    tested_at: Array
    accepted: Array
    histogram: Array
    overlap: Array
    emitted: Array
    calls: Array

    @property
    def tested(self) -> Array:
        """[B] int32, draft tokens that met the accept test."""
        return self.tested_at.sum(-1)

    @classmethod
    def zero(cls, batch: int, depth: int, nodes: int) -> Stats:
        """No rounds yet; depth is G and nodes N."""
        zero = jnp.zeros((batch,), jnp.int32)
        return cls(
            rounds=zero,
            tested_at=jnp.zeros((batch, depth), jnp.int32),
            accepted=zero,
            histogram=jnp.zeros((batch, depth + 1), jnp.int32),
            overlap=jnp.zeros((batch,), jnp.float32),
            emitted=zero,
            calls=jnp.zeros((batch, nodes + 1), jnp.int32),
        )


def count_round(
    stats: Stats, *, proposed: Array, accepted: Array, emitted: Array, beta: Array, called: Array
) -> Stats:
    """Adds one round. A draft token after an EOS or the limit was not tested and is not counted.

    Args:
      stats: of the rounds before.
      proposed: [B] int32, depth of the draft.
      accepted: [B] int32, as the rule has it.
      emitted: [B] int32; 0 for a row that is done or failed.
      beta: [B, G] float32, probability of acceptance by depth.
      called: scalar int32, draft tokens that the target call was over.
    """
    active = emitted > 0
    tested = jnp.minimum(emitted, proposed)
    accepted = jnp.minimum(emitted, accepted)
    counted = jnp.arange(beta.shape[1]) < tested[:, None]
    by_number = jnp.arange(stats.histogram.shape[1]) == accepted[:, None]
    by_call = jnp.arange(stats.calls.shape[1]) == called
    return Stats(
        rounds=stats.rounds + active,
        tested_at=stats.tested_at + counted,
        accepted=stats.accepted + accepted,
        histogram=stats.histogram + (by_number & active[:, None]),
        overlap=stats.overlap + jnp.where(counted, beta, 0.0).sum(-1),
        emitted=stats.emitted + emitted,
        calls=stats.calls + (by_call & active[:, None]),
    )
