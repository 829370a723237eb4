"""T5 (Raffel et al. 2020): v1.0 with ReLU and a tied head, v1.1 and Flan with gated GELU and an untied head.

One decoder path serves training and decoding: a layer is given the keys and values it attends to.
Relative biases are computed from positions, so a call can have any number of tokens at any offset.

Axes: B rows, T tokens of one call, L cache slots, S source length, V vocabulary, D model width,
H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from spec_jax import cache as kv
from spec_jax.models.base import ModelSpec
from spec_jax.models.layers import MLP, Attention, RMSNorm
from spec_jax.runtime.backend import most_fused
from spec_jax.runtime.products import einsum, lay_out, project
from spec_jax.runtime.sharding import MODEL, Rules
from spec_jax.types import Block, Context, Inputs, Params, Prefill

ACTIVATIONS = {'relu': jax.nn.relu, 'gelu': partial(jax.nn.gelu, approximate=True)}  # GELU's tanh form
_MASKED = -1e9  # added to the score of a hidden slot; finite, so that a fully masked row is not NaN


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and switches of a T5; the defaults are v1.1's.

    With `tied_head` the head is the embedding; with `scale_head_input` its input is multiplied by d_model^-0.5.
    v1.0 has both, v1.1 neither. `fused` names the blocks of the decoder's layers in which `T5.for_decoding` joined
    the weights that read the same activations into one array: query, key and value in 'self_attention', gate and up
    in 'mlp'; None where the model was not laid out for decoding.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_heads: int = 6
    num_encoder_layers: int = 8
    num_decoder_layers: int = 8
    activation: str = 'gelu'
    gated: bool = True
    tied_head: bool = False
    scale_head_input: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    epsilon: float = 1e-6
    dropout: float = 0.1
    fused: tuple[str, ...] | None = None
    start_id: int = 0
    eos_id: int = 1
    pad_id: int = 0


@flax.struct.dataclass
class T5Cache:
    """Decoder cache: that of self-attention grows, that of cross-attention is projected once from the source.

    Attributes:
      self_attention: KVCache of self-attention.
      cross_keys: one [B, H, K, S] per layer.
      cross_values: one [B, H, S, K] per layer.
      cross_bias: [B, 1, 1, S] float32, hides source padding.
    """

    self_attention: kv.KVCache
    cross_keys: tuple[Array, ...]
    cross_values: tuple[Array, ...]
    cross_bias: Array


def relative_bucket(distance: Array, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Array:
    """Bucket of a relative position (T5, section 2.1; Shaw et al. 2018, made logarithmic).

    Args:
      distance: int32 of any shape, key position minus query position.

    Returns:
      int32 in [0, num_buckets), of the same shape: half of the buckets (per direction) for exact
      distances, the rest growing logarithmically up to max_distance.
    """
    offset = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)  # the future shares bucket 0; the mask hides it
    exact = num_buckets // 2
    bounds = _bucket_bounds(exact, num_buckets, max_distance)
    far = exact - 1 + (distance[..., None] >= bounds).sum(-1)
    return offset + jnp.where(distance < exact, distance, far)


@functools.cache
def _bucket_bounds(exact: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """Distances at which each of the logarithmic buckets begins, computed on the host.

    16, 32 and 64 are borders, where another device's logarithm may round to the bucket below.
    """
    distance = np.arange(exact, max_distance + 1)
    growth = np.log(distance / exact) / np.log(max_distance / exact) * (num_buckets - exact)
    bucket = np.minimum(np.floor(growth + 1e-9), num_buckets - exact - 1)
    return distance[np.searchsorted(bucket, np.arange(num_buckets - exact))]


def _hide(mask: Array) -> Array:
    """0 where mask is True, a large negative number elsewhere."""
    return jnp.where(mask, 0.0, _MASKED)


class RelativeBias(nnx.Module):
    """One table per stack, added to the scores of every self-attention in it."""

    def __init__(self, config: T5Config, *, bidirectional: bool, rngs: nnx.Rngs):
        shape = (config.num_buckets, config.num_heads)
        self.table = nnx.Param(config.d_model**-0.5 * jax.random.normal(rngs.params(), shape))
        self.bucket = partial(
            relative_bucket,
            bidirectional=bidirectional,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
        )

    def __call__(self, query_positions: Array, key_positions: Array) -> Array:
        """[B or 1, T] and [B or 1, L] int32 -> [B or 1, H, T, L] float32."""
        buckets = self.bucket(key_positions[:, None, :] - query_positions[:, :, None])  # [B, T, L]
        return self.table[...].astype(jnp.float32).T[:, buckets].transpose(1, 0, 2, 3)


class EncoderLayer(nnx.Module):
    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.epsilon)
        self.attention = Attention(config.d_model, config.num_heads, config.d_kv, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.epsilon)
        self.mlp = _mlp(config, rngs)

    def __call__(self, x: Array, bias: Array, drop) -> Array:
        x = x + drop(self.attention.attend(*self.attention.project(self.attention_norm(x)), bias))
        return x + drop(self.mlp(self.mlp_norm(x)))


class DecoderLayer(nnx.Module):
    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        sizes, fused = (config.d_model, config.num_heads, config.d_kv), config.fused or ()
        self.self_norm = RMSNorm(config.d_model, config.epsilon)
        self.self_attention = Attention(*sizes, fused='self_attention' in fused, rngs=rngs)
        self.cross_norm = RMSNorm(config.d_model, config.epsilon)
        self.cross_attention = Attention(*sizes, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.epsilon)
        self.mlp = _mlp(config, rngs, 'mlp' in fused)

    def __call__(
        self, x: Array, store, bias: Array, cross: tuple[Array, Array], cross_bias: Array, drop
    ) -> Array:
        """`store` takes the new tokens' keys and values and returns all that they may attend to."""
        query, key, value = self.self_attention.project(self.self_norm(x))
        x = x + drop(self.self_attention.attend(query, *store(key, value), bias))
        query = self.cross_attention.queries(self.cross_norm(x))
        x = x + drop(self.cross_attention.attend(query, *cross, cross_bias))
        return x + drop(self.mlp(self.mlp_norm(x)))


def _mlp(config: T5Config, rngs: nnx.Rngs, fused: bool = False) -> MLP:
    options = dict(gated=config.gated, activation=ACTIVATIONS[config.activation], fused=fused)
    return MLP(config.d_model, config.d_ff, **options, rngs=rngs)


class T5Module(nnx.Module):
    """The layers of a T5; the decoding loop uses them through `T5` below."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        embed = jax.random.normal(rngs.params(), (config.vocab_size, config.d_model))
        self.embedding = nnx.Param(embed)  # [V, D]
        self.encoder_bias = RelativeBias(config, bidirectional=True, rngs=rngs)
        self.encoder = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_encoder_layers)])
        self.encoder_norm = RMSNorm(config.d_model, config.epsilon)
        self.decoder_bias = RelativeBias(config, bidirectional=False, rngs=rngs)
        self.decoder = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_decoder_layers)])
        self.decoder_norm = RMSNorm(config.d_model, config.epsilon)
        head = config.d_model**-0.5 * jax.random.normal(rngs.params(), (config.vocab_size, config.d_model))
        self.head = None if config.tied_head else nnx.Param(head.T)  # [D, V]

    def encode(self, source: Array, mask: Array, dtype, drop=lambda x: x) -> Array:
        """source [B, S] int32, mask [B, S] bool -> memory [B, S, D]."""
        positions = jnp.arange(source.shape[1])[None]
        bias = self.encoder_bias(positions, positions) + _hide(mask)[:, None, None, :]  # [B, H, S, S]
        x = drop(self.embedding[...][source].astype(dtype))
        for layer in self.encoder:
            x = layer(x, bias, drop)
        return drop(self.encoder_norm(x))

    def cross(self, memory: Array) -> list[tuple[Array, Array]]:
        """Each decoder layer's cross-attention keys [B, H, K, S] and values [B, H, S, K]."""
        return [layer.cross_attention.keys_values(memory) for layer in self.decoder]

    def logits(self, hidden: Array) -> Array:
        """hidden [B, T, D] -> [B, T, V] float32."""
        if self.config.scale_head_input:
            hidden = hidden * self.config.d_model**-0.5
        if self.head is None:
            return einsum('btd,vd->btv', hidden, self.embedding[...], jnp.float32)
        return project('btd,dv->btv', hidden, self.head[...], (self.config.vocab_size,), jnp.float32)

    def forward(
        self, source: Array, source_mask: Array, decoder_input: Array, dtype, drop=lambda x: x
    ) -> Array:
        """Teacher forcing: source [B, S], decoder_input [B, T] -> logits [B, T, V] float32."""
        cross = self.cross(self.encode(source, source_mask, dtype, drop))
        positions = jnp.arange(decoder_input.shape[1])[None]
        causal = _hide(positions[:, None, None, :] <= positions[:, None, :, None])
        bias = self.decoder_bias(positions, positions) + causal  # [1, H, T, T]
        cross_bias = _hide(source_mask)[:, None, None, :]
        x = drop(self.embedding[...][decoder_input].astype(dtype))
        for layer, memory in zip(self.decoder, cross, strict=True):
            x = layer(x, lambda key, value: (key, value), bias, memory, cross_bias, drop)
        return self.logits(drop(self.decoder_norm(x)))

    def decode(
        self, block: Block, cache: T5Cache, dtype, feature_layers: tuple[int, ...] = ()
    ) -> tuple[Array, Array | None, T5Cache]:
        """As `models.base.Model.decode`; features are the outputs of `feature_layers`, from 0, concatenated."""
        slots, outputs = cache.self_attention, []
        mask = _hide(kv.visible(slots, block))[:, None]  # [B, 1, T, L]
        bias = self.decoder_bias(block.positions, kv.slot_positions(slots, block)) + mask  # [B, H, T, L]
        x = self.embedding[...][block.tokens].astype(dtype)
        for i, layer in enumerate(self.decoder):

            def store(key, value, i=i):
                nonlocal slots
                slots = kv.store(slots, i, key, value)
                return slots.keys[i], slots.values[i]

            cross = cache.cross_keys[i], cache.cross_values[i]
            x = layer(x, store, bias, cross, cache.cross_bias, lambda x: x)
            outputs.append(x)
        features = [outputs[i] for i in feature_layers]
        features = jnp.concatenate(features, axis=-1) if features else None
        return self.decoder_norm(x), features, cache.replace(self_attention=slots)


def dropout(key: Array, rate: float):
    """A function that zeroes features with probability `rate`, the same ones at every position of a row.

    Sharing the mask along the length, as T5X does, costs T times fewer random numbers.
    """
    keys = iter(jax.random.split(key, 256))  # more than the dropout sites of any stack

    def drop(x: Array) -> Array:
        keep = jax.random.bernoulli(next(keys), 1 - rate, (x.shape[0], 1, x.shape[2]))
        return x * (keep / (1 - rate)).astype(x.dtype)

    return drop


@functools.cache
def _graph(config: T5Config) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: T5Module(config, rngs=nnx.Rngs(0))))[0]


# How each weight is split over a mesh (`sharding.Rules`).
PARTITION_RULES = (
    (r'embedding', P(MODEL), P(None, MODEL)),  # [V, D]
    (r'head', P(None, MODEL), P(MODEL)),  # [D, V]
    (r'.*attention\.fused', P(None, None, MODEL)),  # [D, 3, H, K]
    (r'.*attention\.(query|key|value)', P(None, MODEL)),  # [D, H, K]
    (r'.*attention\.out', P(MODEL)),  # [H, K, D]
    (r'.*mlp\.fused', P(None, None, MODEL)),  # [D, 2, F]
    (r'.*mlp\.(gate|up)', P(None, MODEL)),  # [D, F]
    (r'.*mlp\.down', P(MODEL)),  # [F, D]
    (r'.*norm\.scale|.*bias\.table', P()),  # [D], [buckets, H]: small
)


@flax.struct.dataclass
class T5:
    """A T5 with its parameters, as `models.base.Model` describes.

    Attributes:
      params: the leaves of `T5Module`, as `nnx.State`.
      config: sizes.
      dtype: of activations and caches; logits are float32.
      feature_layers: the decoder's layers, from 0, whose outputs are features, D numbers each.
    """

    params: Params
    config: T5Config = flax.struct.field(pytree_node=False)
    dtype: jnp.dtype = flax.struct.field(pytree_node=False, default=jnp.dtype('float32'))
    feature_layers: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())

    @classmethod
    def create(cls, config: T5Config, key: Array, dtype=jnp.float32) -> T5:
        """A T5 with random weights, initialised as in the paper."""
        module = T5Module(config, rngs=nnx.Rngs(params=key))
        return cls(nnx.state(module, nnx.Param), config, jnp.dtype(dtype))

    def for_decoding(self) -> T5:
        """The same model with its weights laid out for the decoding loop; it can no longer be trained or saved.

        A tied head becomes a copy laid out [D, V]: with the embedding's [V, D], the product over several rows
        takes up to twice as long on CPU. In the decoder, query, key and value of self-attention become one product,
        and so do gate and up, where they are small enough (`backend.most_fused`). These and the head are laid out
        for few rows (`products.lay_out`).
        """
        if self.config.fused is not None:
            return self
        leaves = dict(nnx.to_flat_state(self.params))
        if self.config.tied_head:
            leaves['head',] = nnx.Param(leaves['embedding',][...].T)
        parts = {'self_attention': ('query', 'key', 'value')} | (
            {'mlp': ('gate', 'up')} if self.config.gated else {}
        )
        fused = []
        for block, names in parts.items():
            if sum(leaves['decoder', 0, block, name][...].nbytes for name in names) > most_fused():
                continue
            fused.append(block)
            for layer in range(self.config.num_decoder_layers):
                apart = [leaves.pop(('decoder', layer, block, name))[...] for name in names]
                leaves['decoder', layer, block, 'fused'] = nnx.Param(lay_out(jnp.stack(apart, axis=1)))
        leaves['head',] = nnx.Param(lay_out(leaves['head',][...]))
        config = dataclasses.replace(self.config, tied_head=False, fused=tuple(fused))
        return self.replace(params=nnx.from_flat_state(leaves), config=config)

    @property
    def module(self) -> T5Module:
        return nnx.merge(_graph(self.config), self.params)

    @property
    def spec(self) -> ModelSpec:
        config = self.config
        return ModelSpec(config.vocab_size, (config.eos_id,), config.pad_id, self.feature_layers)

    @property
    def partition_rules(self) -> Rules:
        return PARTITION_RULES

    @property
    def parameters_read(self) -> int:
        """Parameters that a decode step multiplies by; cross-attention's key and value weights are not counted."""
        config = self.config
        attention = 6 * config.d_model * config.num_heads * config.d_kv  # self: 4 projections; cross: 2
        feed_forward = (3 if config.gated else 2) * config.d_model * config.d_ff
        return config.num_decoder_layers * (attention + feed_forward) + config.vocab_size * config.d_model

    def prefill(self, inputs: Inputs, num_slots: int) -> Prefill:
        """Runs the encoder and projects cross-attention's keys and values; the context is the start token."""
        module, config, batch = self.module, self.config, inputs.tokens.shape[0]
        cross = module.cross(module.encode(inputs.tokens, inputs.mask, self.dtype))
        layers, num_tokens = config.num_decoder_layers, 1 + num_slots
        cache = T5Cache(
            self_attention=kv.init(layers, batch, config.num_heads, num_tokens, config.d_kv, self.dtype),
            cross_keys=tuple(key for key, _ in cross),
            cross_values=tuple(value for _, value in cross),
            cross_bias=_hide(inputs.mask)[:, None, None, :],
        )
        tokens = jnp.full((batch, num_tokens), config.pad_id, jnp.int32).at[:, 0].set(config.start_id)
        one = jnp.ones((batch,), jnp.int32)
        return Prefill(Context(tokens, start=one, length=one), cache)

    def decode(self, block: Block, cache: T5Cache) -> tuple[Array, Array | None, T5Cache]:
        return self.module.decode(block, cache, self.dtype, self.feature_layers)

    def logits(self, hidden: Array) -> Array:
        return self.module.logits(hidden)

    def embed(self, tokens: Array) -> Array:
        return self.params['embedding'][...][tokens].astype(self.dtype)

    def keep(self, cache: T5Cache, nodes: Array | None, length: Array) -> T5Cache:
        return cache.replace(self_attention=kv.keep(cache.self_attention, nodes, length))

    def forward(self, inputs: Inputs, decoder_input: Array, dropout_key: Array | None = None) -> Array:
        """Teacher forcing.

        Args:
          inputs: source [B, S].
          decoder_input: [B, T] int32, the start token and all labels but the last.
          dropout_key: with it, `config.dropout` is applied.

        Returns:
          logits [B, T, V] float32.
        """
        module = self.module
        drop = (lambda x: x) if dropout_key is None else dropout(dropout_key, self.config.dropout)
        return module.forward(inputs.tokens, inputs.mask, decoder_input, self.dtype, drop)
