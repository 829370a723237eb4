"""Choosing tokens of a vocabulary, without the sorts, pairs and long sums that backends are slow at.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_BLOCK = 128  # weights that `invert_cumulative` sums before it looks at any of them


def first(mask: Array) -> Array:
    """Index [...] of the first True in mask [..., V]; V where there is none.

    A minimum, which vectorises; an argmax carries pairs and takes several times as long on CPU.
    """
    size = mask.shape[-1]
    return jnp.where(mask, jnp.arange(size), size).min(-1)


def keep_highest(probs: Array, enough: Callable[[Array], Array]) -> Array:
    """Keeps the tokens at or above the highest threshold that keeps enough, and renormalises.

    The threshold is built bit by bit: floats >= 0 are ordered as their bit patterns are, so 31 passes
    find it exactly, without the sort of V numbers that accelerators are slow at.

    Args:
      probs: [..., V].
      enough: kept probs [..., V] (0 where dropped) -> bool [..., 1]; once true, true for any lower threshold.
    """

    def try_bit(i, bits):
        trial = bits | (1 << (30 - i))
        kept = jnp.where(probs >= lax.bitcast_convert_type(trial, jnp.float32), probs, 0.0)
        return jnp.where(enough(kept), trial, bits)

    bits = lax.fori_loop(0, 31, try_bit, jnp.zeros_like(probs[..., :1], jnp.int32))
    kept = jnp.where(probs < lax.bitcast_convert_type(bits, jnp.float32), 0.0, probs)  # NaN stays
    return kept / kept.sum(-1, keepdims=True)


def invert_cumulative(weights: Array, uniform: Array) -> Array:
    """The token [B] at which the cumulative sum of weights [B, V] passes uniform [B] times their total.

    The sum is inverted over blocks of tokens and then within one, which is cheaper than over all V at once. A token
    of weight 0 never comes out, however the sums round.
    """
    blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % _BLOCK)))
    blocks = blocks.reshape(weights.shape[0], -1, _BLOCK)  # [B, V / block, block]
    mass = blocks.sum(-1)
    wanted = uniform[:, None] * mass.sum(-1, keepdims=True)  # [B, 1]
    block, below = _invert(mass, wanted)
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [B, block]
    return block * _BLOCK + _invert(within, wanted - below[:, None])[0]


def _invert(weights: Array, wanted: Array) -> tuple[Array, Array]:
    """Index [B] of the first weight [B, N] whose cumulative sum exceeds `wanted` [B, 1], and the sum below it."""
    cumulative = jnp.cumsum(weights, axis=-1)
    likely = weights > 0
    index = jnp.arange(weights.shape[1])
    last = jnp.where(likely, index, 0).max(-1)  # stands in where rounding leaves none above
    chosen = jnp.minimum(first((cumulative > wanted) & likely), last)
    return chosen, jnp.where(index < chosen[:, None], weights, 0.0).sum(-1)
