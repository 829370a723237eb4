"""The interface between the decoding loop and a model.

A model is a pytree: its parameters are leaves, so that they enter `jax.jit` as arguments, and all
else is static. Any class with these members can be used; it need not inherit from `Model`.

Axes: B rows, T tokens of one call, G draft depth, V vocabulary, D model width, F feature width.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jax import Array

from spec_jax.types import Block, Cache, Inputs, Prefill


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What is static in a model.

    Attributes:
      vocab_size: V, rows of the head.
      eos_ids: the tokens that end an output; chat models have several.
      pad_id: the token that fills up a row after its end.
      feature_layers: the layers whose outputs `decode` and `prefill` return as features; empty for no features.
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
          inputs: of B rows; a row with an empty mask still gets a context of length 1.
          num_slots: tokens that may follow the prompt, drafts included: room for them in context and cache.
        """
        ...

    def decode(self, block: Block, cache: Cache) -> tuple[Array, Array | None, Cache]:
        """Reads a block after the tokens in the cache; `keep` then sets how many of them stay.

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
