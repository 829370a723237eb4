"""The blocks that a model is called with: the end of the text, and a draft after it.

Axes: B rows, T tokens of one call, W last tokens of a text, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.models.base import Model
from spec_jax.runtime import backend
from spec_jax.types import Block, Cache, Context, Draft


def draft_block(context: Context, draft: Draft, width: int = 1) -> Block:
    """The last `width` W tokens of the text and the draft after them, W + N tokens.

    A chain's nodes have consecutive positions; in a tree a node's position is given by its depth, and the node
    attends to the text and to its ancestors. A width above 1 is for chains only.
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
    """Reads the last tokens [B, W] of a text; all but the newest may have been read before.

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
