"""Axis legend, and the records that pass between the parts.

Axes, the same letters everywhere:

    B  rows of a batch                     V  vocabulary
    G  draft depth gamma                   D  model width
    N  nodes of a draft (G for a chain)    F  feature width
    T  query tokens of one call            H  query heads, J  key/value heads
    L  cache slots                         K  head width
    S  source or prompt length             P  width of the token buffer

p is the target's distribution and q the draft's. Arrays with a row axis have it first.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

Params = Any  # a pytree of arrays
Cache = Any  # a model's own; the loop hands it back untouched


@flax.struct.dataclass
class Inputs:
    """A batch of prompts: tokens [B, S] int32, padded on the right, and mask [B, S] bool, True at real tokens."""

    tokens: Array
    mask: Array


@flax.struct.dataclass
class Context:
    """The text so far.

    Attributes:
      tokens: [B, P] int32, a prompt (or a decoder's start token), then the output; not valid from `length` on.
      start: [B] int32, index of the first output token.
      length: [B] int32, at least 1; the newest token is at length - 1, which is also its position.
    """

    tokens: Array
    start: Array
    length: Array

    @property
    def emitted(self) -> Array:
        """[B] int32, tokens of the output."""
        return self.length - self.start

    def last(self, width: int) -> Array:
        """The last `width` tokens [B, width] of the text; the first one again where there are fewer."""
        index = self.length[:, None] - width + jnp.arange(width)
        return jnp.take_along_axis(self.tokens, jnp.maximum(index, 0), axis=1)


@flax.struct.dataclass
class Prefill:
    """A model's state after its prompts."""

    context: Context  # the prompts, with room for the output
    cache: Cache  # of all tokens of the context but the newest
    features: Array | None = None  # [B, S - 1, F] of the tokens read, where the model gives any


@flax.struct.dataclass
class Block:
    """Tokens of one call, in consecutive slots from that of the first position on.

    Attributes:
      tokens: [B, T] int32.
      positions: [B, T] int32, the first the lowest; -1 marks a filler that no later token looks at.
      mask: [B or 1, T, T] bool, which tokens of the block each may look at; None for itself and those before it.
    """

    tokens: Array
    positions: Array
    mask: Array | None = None


@flax.struct.dataclass
class Draft:
    """What a drafter proposes for one round.

    The law of `length`: it may depend on the text, on the drafter's state, on q, and on tokens earlier in the same
    draft. It must not depend on a token that it withholds, nor on a later one: that token was already drawn from q,
    and to withhold it selects. With p = (.5, .5), q = (.9, .1) and "length 0 when the drafted token is 1", token 0
    comes out with probability .55 instead of .5.

    Attributes:
      tokens: [B, N] int32; a valid one outside the vocabulary is a failure of its row.
      probs: [B, N, V] float32, the very array that each token was sampled from; None where the tokens were chosen
        deterministically (q is one-hot).
      length: [B] int32, how many of a row's tokens are valid; those at and after it are not tested.
      parents: N static integers, the node that each node follows, -1 for the newest token of the text, parents
        before children; None for a chain.
    """

    tokens: Array
    probs: Array | None
    length: Array
    parents: tuple[int, ...] | None = flax.struct.field(pytree_node=False, default=None)

    def first(self, nodes: int) -> Draft:
        """The draft cut to its first `nodes` nodes."""
        probs = None if self.probs is None else self.probs[:, :nodes]
        parents = None if self.parents is None else self.parents[:nodes]
        return Draft(self.tokens[:, :nodes], probs, jnp.minimum(self.length, nodes), parents)


@flax.struct.dataclass
class Verification:
    """What a rule made of a draft; values after index num_accepted are not valid.

    Attributes:
      num_accepted: [B] int32, tokens accepted, 0 .. G.
      tokens: [B, G + 1] int32, the accepted tokens, then one more from the residual or from p.
      nodes: [B, G + 1] int32, where each accepted token stood in the block (node n at n + 1).
      beta: [B, G] float32, the probability that a draft token is accepted at each depth (Definition 3.1).
    """

    num_accepted: Array
    tokens: Array
    nodes: Array
    beta: Array
