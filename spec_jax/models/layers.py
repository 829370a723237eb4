"""Layers that model families share.

Axes: B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from spec_jax.runtime.products import (
    by_head,
    einsum,
    few_rows_einsum,
    filled_einsum,
    project,
    separate_by_head,
)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 (no mean, no bias)."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,)))  # [D]
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse).astype(x.dtype) * self.scale[...].astype(x.dtype)


def _keys(projected: Array) -> Array:
    """[B, T, H, K] -> [B, H, K, T]."""
    return projected.transpose(0, 2, 3, 1)


class Attention(nnx.Module):
    """Multi-head attention; the caller passes keys, values and an additive bias.

    Scores are not divided by sqrt(K): T5 folds that into the initialisation. Weights are stored by head, so that no
    call has to transpose them. The weights of query, key and value are three arrays for training, or one where
    `fused`, for decoding: one product of three times the size takes a third less time.
    """

    def __init__(self, width: int, num_heads: int, head_dim: int, *, fused: bool = False, rngs: nnx.Rngs):
        def weight(shape, std):
            return nnx.Param(std * jax.random.normal(rngs.params(), shape))

        if fused:
            self.fused = weight((width, 3, num_heads, head_dim), width**-0.5)  # [D, 3, H, K]
        else:
            self.fused = None
            self.query = weight((width, num_heads, head_dim), (width * head_dim) ** -0.5)  # [D, H, K]
            self.key = weight((width, num_heads, head_dim), width**-0.5)  # [D, H, K]
            self.value = weight((width, num_heads, head_dim), width**-0.5)  # [D, H, K]
        self.out = weight((num_heads, head_dim, width), (num_heads * head_dim) ** -0.5)  # [H, K, D]

    def queries(self, x: Array) -> Array:
        """Projects x [B, T, D] to queries [B, H, T, K]."""
        return separate_by_head(x, self.query[...]).swapaxes(1, 2)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Projects x [B, L, D] to keys [B, H, K, L] and values [B, H, L, K]."""
        return _keys(by_head(x, self.key[...])), by_head(x, self.value[...]).swapaxes(1, 2)

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """Projects x [B, T, D] to queries [B, H, T, K], keys [B, H, K, T] and values [B, H, T, K]."""
        if self.fused is None:
            return self.queries(x), *self.keys_values(x)
        shape = 3, *self.out.shape[:2]
        query, key, value = jnp.moveaxis(project('btd,dchk->btchk', x, self.fused[...], shape), 2, 0)
        return query.swapaxes(1, 2), _keys(key), value.swapaxes(1, 2)

    def attend(self, query: Array, key: Array, value: Array, bias: Array) -> Array:
        """Attention, then the output projection.

        Args:
          query: [B, H, T, K].
          key: [B, H, K, L].
          value: [B, H, L, K].
          bias: [B or 1, H or 1, T, L] float32.

        Returns:
          [B, T, D].
        """
        scores = few_rows_einsum('bhtk,bhkl->bhtl', query, key, jnp.float32)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(query.dtype)
        context = few_rows_einsum('bhtl,bhlk->bhtk', weights, value)
        return einsum('bhtk,hkd->btd', context, self.out[...])


class MLP(nnx.Module):
    """Feed-forward block: act(x W) W_out, or act(x W_gate) * (x W) W_out when gated.

    W_gate and W are two arrays for training, or one where `fused`, for decoding.
    """

    def __init__(
        self, width: int, hidden: int, *, gated: bool, activation, fused: bool = False, rngs: nnx.Rngs
    ):
        def weight(shape):
            return nnx.Param(shape[0] ** -0.5 * jax.random.normal(rngs.params(), shape))

        self.fused = weight((width, 2, hidden)) if gated and fused else None  # [D, 2, F], gate and up
        self.gate = weight((width, hidden)) if gated and not fused else None  # [D, F]
        self.up = weight((width, hidden)) if self.fused is None else None  # [D, F]
        self.down = weight((hidden, width))  # [F, D]
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        if self.fused is not None:
            both = project('btd,dcf->btcf', x, self.fused[...], (2, len(self.down)), jnp.float32)
            hidden = self.activation(both[:, :, 0]) * both[:, :, 1]
        else:
            hidden = einsum('btd,df->btf', x, self.up[...], jnp.float32)
            if self.gate is None:
                hidden = self.activation(hidden)
            else:
                hidden = self.activation(einsum('btd,df->btf', x, self.gate[...], jnp.float32)) * hidden
        return filled_einsum('btf,fd->btd', hidden.astype(x.dtype), self.down[...])
