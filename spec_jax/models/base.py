"""What the decoding loop asks of a model, and the blocks that it is called with.

A model is a pytree: its parameters are leaves, so that they enter `jax.jit` as arguments, and all
else is static. Any class with these members will do; nothing has to inherit from `Model`.

Axes: B rows, T tokens of one call, W last tokens of a text, N nodes of a draft, G draft depth, V vocabulary,
D model width, F feature width.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.runtime import backend
from spec_jax.types import Block, Cache, Context, Draft, Inputs, Prefill


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What is static in a model.

    Attributes:
      vocab_size: V, rows of the head.
      eos_ids: the tokens that end an output; chat models have several.
      pad_id: the token that fills up a row after its end.
      feature_layers: the layers whose outputs `decode` and `prefill` return as features; none for none.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    feature_layers: tuple[int, ...] = ()


class Model(Protocol):
    """A language model that can score several tokens in one call."""

    spec: ModelSpec

    def prefill(self, inputs: Inputs, num_slots: int) -> Prefill:
        """Reads prompts: all but the newest token of the context.

        Args:
          inputs: of B rows; one with an empty mask gets a context of length 1 all the same.
          num_slots: tokens that may follow the prompt, those of drafts included: room for them in context and cache.
        """
        ...

    def decode(self, block: Block, cache: Cache) -> tuple[Array, Array | None, Cache]:
        """Reads a block after the tokens that the cache keeps; `keep` then says how many of them stay.

        Returns:
          hidden [B, T, D], features [B, T, F] or None, and the cache.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """Next-token scores [B, T, V] float32 of hidden states [B, T, D]."""
        ...

    def embed(self, tokens: Array) -> Array:
        """Input embeddings [B, T, D] of tokens [B, T]."""
        ...

    def keep(self, cache: Cache, nodes: Array | None, length: Array) -> Cache:
        """Keeps the first `length` [B] tokens of each row (`cache.keep` has the arguments)."""
        ...


def draft_block(context: Context, draft: Draft, width: int = 1) -> Block:
    """The last `width` W tokens of the text and the draft after them, W + N tokens.

    A chain's nodes have consecutive positions; in a tree a node's position is by its depth, and it looks at the text
    and at the nodes that it follows. More than the newest token is for chains.
    """
    newest, nodes = context.length[:, None] - 1, draft.tokens.shape[1]
    tokens = jnp.concatenate([context.last(width), draft.tokens], axis=1)
    if draft.parents is None:
        return Block(tokens, newest + jnp.arange(1 - width, nodes + 1))
    ancestors = np.eye(nodes + 1, dtype=bool)
    for node, parent in enumerate(draft.parents):
        ancestors[node + 1] |= ancestors[parent + 1]
    return Block(tokens, newest + ancestors.sum(1) - 1, jnp.asarray(ancestors)[None])


def next_logits(model: Model, cache: Cache, tokens: Array, newest: Array) -> tuple[Array, Cache]:
    """Reads the last tokens [B, W] of a text, of which all but the newest may have been read before.

    Args:
      model: any model.
      cache: holds at least the tokens before these.
      tokens: the last at position `newest` [B].

    Returns:
      The scores [B, V] of the token after the newest one, and the cache.
    """
    positions = newest[:, None] + jnp.arange(1 - tokens.shape[1], 1)
    hidden, _, cache = model.decode(Block(tokens, positions), model.keep(cache, None, positions[:, 0]))
    rows = min(tokens.shape[1], backend.fewest_rows(len(tokens)))
    return model.logits(hidden[:, -rows:])[:, -1], cache
