"""Selects tokens of a vocabulary without sorts, argmax pairs and long cumulative sums, which are slow on backends.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_BLOCK = 128  # tokens of a block in `invert_cumulative`


def first(mask: Array) -> Array:
    """Index [...] of the first True in mask [..., V]; V where there is none.

    A minimum, which vectorises; an argmax carries pairs and takes several times as long on CPU.
    """
    size = mask.shape[-1]
    return jnp.where(mask, jnp.arange(size), size).min(-1)


def keep_highest(probs: Array, enough: Callable[[Array], Array]) -> Array:
    """Keeps the tokens at or above the highest threshold that keeps enough, and renormalises.

    The threshold is built bit by bit: floats >= 0 are ordered as their bit patterns are, so 31 passes
    find it exactly, without a sort of V numbers, which is slow on accelerators.

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
    of weight 0 is never chosen, however the sums round.
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
    possible = weights > 0
    index = jnp.arange(weights.shape[1])
    last = jnp.where(possible, index, 0).max(-1)  # used where rounding leaves no sum above `wanted`
    chosen = jnp.minimum(first((cumulative > wanted) & possible), last)
    return chosen, jnp.where(index < chosen[:, None], weights, 0.0).sum(-1)
