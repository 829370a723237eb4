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

    The choice is made by one while_loop per length, of which one runs, once: XLA's CPU backend copies a cache that
    passes through a conditional, and updates one in place that passes through a loop.

    Args:
      call: the axes of its results may differ in size between lengths.
      lengths: static, ascending; the last one is used where none is enough.
      needed: scalar int32.
      cache: a pytree; its shapes are the same for every length.
      arguments: the call's other arguments, a tuple of pytrees.

    Returns:
      The result, with its axes zero-padded to the sizes of the last length; and the cache.
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
        else jnp.pad(
            array, [(0, size - actual) for size, actual in zip(like.shape, array.shape, strict=True)]
        )
    )


def _held_back(arguments, done: Array):
    """The arguments unchanged, made to depend on `done`, which is False whenever the loop runs.

    Otherwise XLA would hoist what depends on the arguments alone, such as the first layer's projections, out of the
    loop, and compute it also in rounds that do not enter the loop.
    """

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.where(done, jnp.zeros_like(x), x)

    return jax.tree.map(one, arguments)
