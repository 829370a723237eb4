"""Axis legend and the records that pass between the parts.

Axes, the same letters everywhere:

    B  rows of a batch              V  vocabulary
    G  draft length gamma           D  model width
    T  query tokens of one call     H  heads
    L  cache slots                  K  head width
    S  source length

p is the target's distribution and q the draft's. Arrays with a row axis come first by row.
"""

from __future__ import annotations

import enum
from typing import Any

import flax.struct
from jax import Array


class Failure(enum.IntFlag):
    """What can make a row of no use, seen inside the compiled loop."""

    TARGET = 1  # the target's logits have a NaN or +inf, or nothing above -inf
    DRAFT_PROBS = 2  # the draft's probabilities do not sum to 1
    DRAFT_TOKEN = 4  # the draft's token is none of the vocabulary, or it had none to give


Params = Any  # a pytree of arrays
Cache = Any  # a model's own; the loop hands it back untouched


@flax.struct.dataclass
class Inputs:
    """A batch of prompts.

    Attributes:
      tokens: [B, S] int32, padded on the right.
      mask: [B, S] bool, True at real tokens.
    """

    tokens: Array
    mask: Array


@flax.struct.dataclass
class Draft:
    """What a drafter proposes for one round.

    Attributes:
      tokens: [B, G] int32; an id outside the vocabulary among those that are meant ends the run with an error.
      probs: [B, G, V] float32, the very array that each token was sampled from; None where the tokens
        were chosen deterministically (q is one-hot).
      length: [B] int32, how many of a row's tokens are meant; those at and after it are not tested.
    """

    tokens: Array
    probs: Array | None
    length: Array


@flax.struct.dataclass
class Verification:
    """What the accept/resample rule made of a draft.

    Attributes:
      num_accepted: [B] int32, length of the accepted prefix, 0 .. G.
      tokens: [B, G + 1] int32, the accepted tokens, then one more from the residual or from p; what
        stands behind index num_accepted has no meaning.
    """

    num_accepted: Array
    tokens: Array


@flax.struct.dataclass
class Context:
    """The text so far.

    Attributes:
      tokens: [B, N] int32, start token, then the output; what stands at and after `length` has no meaning.
      length: [B] int32, at least 1; the newest token is at length - 1, which is also its position.
    """

    tokens: Array
    length: Array


@flax.struct.dataclass
class Stats:
    """Counts kept per row inside the loop; every figure is derived from them afterwards.

    Attributes:
      rounds: [B] int32, target calls while the row was unfinished.
      tested_at: [B, G] int32, rounds in which the draft token at that place met the accept test; none after a
        rejection, an EOS or the limit.
      accepted: [B] int32, how many tokens passed it.
      histogram: [B, G + 1] int32, rounds by number of accepted tokens.
      overlap: [B] float32, sum of min(p, q) over the tested positions.
      emitted: [B] int32, tokens of the output, EOS included, start token excluded.
      calls: [B, G + 1] int32, rounds by the draft tokens that the target's call was over, meant or not.
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


@flax.struct.dataclass
class SpecState:
    """The carry of the speculative loop.

    Attributes:
      context: the text so far.
      done: [B] bool, rows that have ended.
      failed: [B] int32, bits of `Failure`; 0 while all is well.
      round: scalar int32, target calls so far.
      keys: [B] PRNG keys, one per row; a round folds its number in.
      target_cache: the target's; it holds all but the newest token.
      draft_state: the drafter's own.
      stats: counts so far.
    """

    context: Context
    done: Array
    failed: Array
    round: Array
    keys: Array
    target_cache: Cache
    draft_state: Any
    stats: Stats


@flax.struct.dataclass
class Output:
    """What a decoder returns.

    Attributes:
      tokens: [B, N] int32, N = max_new_tokens; EOS included, padded behind it.
      length: [B] int32, tokens before the padding.
      failed: [B] int32, bits of `Failure`; 0 where all went well.
      stats: counts of the run.
    """

    tokens: Array
    length: Array
    failed: Array
    stats: Stats
