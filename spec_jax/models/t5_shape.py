"""T5's `shape.ModelShape`."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from spec_jax.models.t5 import T5, T5Config
from spec_jax.models.t5_sizes import size_of

_DECODER = ('decoder', 'decoder_norm', 'decoder_bias', 'head')  # the embedding is read by row


@dataclasses.dataclass(frozen=True)
class T5Shape:
    """The sizes of a T5, as `shape.ModelShape` describes."""

    config: T5Config

    @property
    def size(self) -> str | None:
        return size_of(self.config)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def abstract(self, dtype: str) -> T5:
        module = jax.eval_shape(partial(T5.create, self.config, dtype=dtype), jax.random.key(0))
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), module)
        return jax.eval_shape(T5.for_decoding, weights)

    def is_read_by_decode(self, path: tuple) -> bool:
        """Cross-attention's keys and values are in the cache, so its key and value weights are not read."""
        return path[0] in _DECODER and not ('cross_attention' in path and path[-1] in ('key', 'value'))

    def cache_bytes(
        self, dtype: str, slots: int, source_length: int, batch_size: int = 1, devices: int = 1
    ) -> int:
        """Bytes of self-attention's cache, `slots` long, and cross-attention's, as long as the source."""
        layer = 2 * self.layer_keys_bytes(dtype, slots + source_length)
        share = devices if self.config.num_heads % devices == 0 else 1
        return self.config.num_decoder_layers * layer * batch_size // share

    def layer_keys_bytes(self, dtype: str, slots: int) -> int:
        return self.config.num_heads * self.config.d_kv * slots * jnp.dtype(dtype).itemsize
