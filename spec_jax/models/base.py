"""What the decoding loop asks of a model, and the one-token call that plain decoding and drafts share.

A model is a pytree: its parameters are leaves, so that they enter `jax.jit` as arguments, and all
else is static. Any class with these members will do; nothing has to inherit from `Model`.

Axes: B rows, T tokens of one call, L cache slots, S source length, V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jax import Array

from spec_jax.runtime.backend import fewest_rows
from spec_jax.types import Cache, Context, Inputs


class Model(Protocol):
    """A language model that can score several tokens in one call.

    Attributes:
      vocab_size: V, rows of the head.
      start_id: the token that every output starts from (not part of the output).
      eos_id: the token that ends an output.
      pad_id: the token that fills up a row behind its end.
    """

    vocab_size: int
    start_id: int
    eos_id: int
    pad_id: int

    def encode(self, inputs: Inputs, num_slots: int) -> Cache:
        """Does everything that is done once a prompt.

        Returns:
          A cache of length 0 with room for `num_slots` tokens a row.
        """
        ...

    def decode(self, tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        """Appends T >= 1 tokens to the cache and looks at all that stands before each.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32; -1 marks a filler that later tokens never look at.
          cache: with room for T more slots.

        Returns:
          hidden [B, T, D] and the cache, T slots longer.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """Next-token scores [B, T, V] float32 of hidden states [B, T, D]."""
        ...

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """Keeps the first `length` [B] slots of each row."""
        ...


def read_block(model: Model, cache: Cache, context: Context, drafted: Array) -> tuple[Array, Cache]:
    """Reads the newest token, which the cache lacks, and the draft behind it in one call.

    Args:
      cache: with room for G + 1 more slots.
      drafted: [B, G] int32.

    Returns:
      hidden [B, G + 1, D], of the newest token and of each draft token, and the cache.
    """
    newest = context.length[:, None] - 1
    block = jnp.concatenate([jnp.take_along_axis(context.tokens, newest, axis=1), drafted], axis=1)
    return model.decode(block, newest + jnp.arange(block.shape[1]), cache)


def read_window(model: Model, cache: Cache, tokens: Array, newest: Array) -> tuple[Array, Cache]:
    """Reads the last W tokens of the text, of which W - 1 may have been read before.

    The cache keeps position i in slot i + 1, and slot 0 for a filler at position -1, which nobody looks at;
    so the window fits when the text is the start token alone. A slot read before is written again:

        slots        -1  a  b  c  .        text a b c d, newest = 3
        W = 2                 [c  d]       c's slot is rewritten, d's is new

    Args:
      tokens: [B, W] int32, the last at position `newest`.
      newest: [B] int32.

    Returns:
      The scores [B, V] float32 of the token after the newest one, and the cache.
    """
    width = tokens.shape[1]
    positions = newest[:, None] - width + 1 + jnp.arange(width)
    cache = model.rollback(cache, positions[:, 0] + 1)
    hidden, cache = model.decode(tokens, positions, cache)
    rows = min(width, fewest_rows() if tokens.shape[0] == 1 else 1)
    return model.logits(hidden[:, -rows:])[:, -1], cache


def last_tokens(context: Context, width: int) -> Array:
    """The last `width` tokens [B, W] of the text; the first one again where there are fewer."""
    index = context.length[:, None] - width + jnp.arange(width)
    return jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)
