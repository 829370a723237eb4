"""What the loop carries, what it counts, and what comes out of it.

Axes: B rows, G draft depth, N nodes of a draft.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

from spec_jax.types import Cache, Context, Draft, Verification


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


@flax.struct.dataclass
class SpecState:
    """The carry of the loop, a pytree; its rounds so far are `stats.rounds`.

    Attributes:
      context: the text so far.
      done: [B] bool, rows that have ended.
      failed: [B] int32, bits of `failures.Failure`; 0 while all is well.
      limit: [B] int32, most tokens of each row's output.
      keys: [B] PRNG keys, one a row; a round folds the row's own count of rounds in.
      target_cache: the target's; it holds all but the newest token.
      draft_state: the drafter's own; None without one.
      stats: counts so far.
    """

    context: Context
    done: Array
    failed: Array
    limit: Array
    keys: Array
    target_cache: Cache
    draft_state: Any
    stats: Stats


@flax.struct.dataclass
class Output:
    """What a decoder returns.

    Attributes:
      tokens: [B, max_new_tokens] int32, EOS included, then padding.
      length: [B] int32, tokens before the padding.
      failed: [B] int32, bits of `failures.Failure`; 0 where all went well.
      stats: counts of the run.
    """

    tokens: Array
    length: Array
    failed: Array
    stats: Stats


def count_round(
    stats: Stats, draft: Draft, verification: Verification, emitted: Array, called: Array
) -> Stats:
    """Adds one round. A draft token after an EOS or the limit was not tested and is not counted.

    Args:
      stats: of the rounds before.
      draft: of the round.
      verification: the verdict.
      emitted: [B] int32, tokens appended; 0 for a row that is done or failed.
      called: scalar int32, draft tokens that the target call was over.
    """
    active = emitted > 0
    tested = jnp.minimum(emitted, _depth(draft))
    accepted = jnp.minimum(emitted, verification.num_accepted)
    counted = jnp.arange(verification.beta.shape[1]) < tested[:, None]
    by_number = jnp.arange(stats.histogram.shape[1]) == accepted[:, None]
    by_call = jnp.arange(stats.calls.shape[1]) == called
    return Stats(
        rounds=stats.rounds + active,
        tested_at=stats.tested_at + counted,
        accepted=stats.accepted + accepted,
        histogram=stats.histogram + (by_number & active[:, None]),
        overlap=stats.overlap + jnp.where(counted, verification.beta, 0.0).sum(-1),
        emitted=stats.emitted + emitted,
        calls=stats.calls + (by_call & active[:, None]),
    )


def _depth(draft: Draft) -> Array:
    """[B] int32, the greatest depth of a draft's valid nodes; in a chain their number."""
    if draft.parents is None:
        return draft.length
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent + 1] + 1)
    valid = jnp.arange(len(draft.parents)) < draft.length[:, None]
    return jnp.where(valid, jnp.array(depths[1:]), 0).max(-1, initial=0)
