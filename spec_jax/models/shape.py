"""A model's shape, known before its weights are read; for reports on devices that are not attached."""

from __future__ import annotations

from typing import Protocol

from spec_jax.models.base import Model


class ModelShape(Protocol):
    """The sizes of a model: hashable, and small enough to be pickled to another process.

    Attributes:
      size: the name of a public size, such as 'small'; None for any other size.
      vocab_size: V, rows of the head.
    """

    size: str | None
    vocab_size: int

    def abstract(self, dtype: str) -> Model:
        """The model laid out for decoding, with `jax.ShapeDtypeStruct` in place of its weights.

        It has `params` and `partition_rules`. Call it within `backend.tracing_for`.
        """
        ...

    def is_read_by_decode(self, path: tuple) -> bool:
        """Whether a call of `decode` and `logits` multiplies by the weight at this path of `params`."""
        ...

    def cache_bytes(
        self, dtype: str, slots: int, source_length: int, batch_size: int = 1, devices: int = 1
    ) -> int:
        """Bytes of all keys and values on one of the devices that they are sharded over.

        Args:
          dtype: of the cache.
          slots: L of the self-attention cache.
          source_length: S.
          batch_size: B.
          devices: along the mesh's axis `model`.
        """
        ...

    def layer_keys_bytes(self, dtype: str, slots: int) -> int:
        """Bytes of the keys of one layer and row, not sharded."""
        ...
