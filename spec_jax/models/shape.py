"""What is known of a model before its weights are read, for reports on devices that are not there."""

from __future__ import annotations

from typing import Protocol

from spec_jax.models.base import Model


class ModelShape(Protocol):
    """A model by its sizes: hashable, and small enough to be pickled to another process.

    Attributes:
      size: the name of a public size, such as 'small'; None for another.
      vocab_size: V, rows of the head.
    """

    size: str | None
    vocab_size: int

    def abstract(self, dtype: str) -> Model:
        """The model laid out for decoding, with `jax.ShapeDtypeStruct` in place of its weights.

        It has `params` and `partition_rules`. To be called within `backend.tracing_for`.
        """
        ...

    def is_read_by_decode(self, path: tuple) -> bool:
        """Whether a call of `decode` and `logits` multiplies by the weight at this path of `params`."""
        ...

    def cache_bytes(
        self, dtype: str, slots: int, source_length: int, batch_size: int = 1, devices: int = 1
    ) -> int:
        """Of keys and values, on one of the devices that share them.

        Args:
          dtype: of the cache.
          slots: of the cache that grows.
          source_length: S.
          batch_size: B.
          devices: along the mesh's axis `model`.
        """
        ...

    def layer_keys_bytes(self, dtype: str, slots: int) -> int:
        """Of the keys of one layer and row, whole."""
        ...
