"""Calls over no more rows than they need, on a backend where each row of a product costs time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def call_over_fewest(
    call: Callable, lengths: Sequence[int], needed: Array, cache: Any, arguments: Any
) -> tuple[Any, Any]:
    """`call(length, cache, *arguments) -> (result, cache)` for the first length that is at least `needed`.

    The choice is made by loops of which one runs, once: XLA's CPU backend copies a cache that passes through a
    conditional, and keeps one in place that passes through a loop.

    Args:
      call: its results for different lengths may differ in the sizes of axes.
      lengths: static, ascending; the last one serves where none is enough.
      needed: scalar int32.
      cache: a pytree whose shapes stay.
      arguments: what else the call takes, a tuple of pytrees.

    Returns:
      The result, with zeros at the end of its axes up to the size they have for the last length; and the cache.
    """
    if len(lengths) == 1:
        return call(lengths[0], cache, *arguments)
    shapes, _ = jax.eval_shape(partial(call, lengths[-1]), cache, *arguments)
    carry = (jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes), cache), False

    def run(length, carry):
        (_, cache), done = carry
        result, cache = call(length, cache, *_held_back(arguments, done))
        return (jax.tree.map(_padded, result, shapes), cache), True

    for length in lengths:
        due = (needed <= length) | (length == lengths[-1])
        carry = lax.while_loop(lambda carry, due=due: due & ~carry[1], partial(run, length), carry)
    return carry[0]


def _padded(array: Array, like: jax.ShapeDtypeStruct) -> Array:
    return (
        array
        if array.shape == like.shape
        else jnp.pad(array, [(0, size - own) for size, own in zip(like.shape, array.shape, strict=True)])
    )


def _held_back(arguments, done: Array):
    """The arguments as they are, since a loop that carries `done` is left once it is True.

    XLA does not know that. What depends on the arguments alone, the first layer's projections among it, it would
    otherwise do before the loop, and so in rounds that do not enter it.
    """

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.where(done, jnp.zeros_like(x), x)

    return jax.tree.map(one, arguments)
