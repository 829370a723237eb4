"""Products of activations with weights and with each other, in the form that is fast on each backend.

Axes: B rows, T tokens, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from spec_jax.runtime.backend import apart, better_row_by_row, filled_rows, panels, platform
from spec_jax.runtime.sharding import mesh_in_use


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(spec: str, x: Array, y: Array, dtype=None) -> Array:
    """Product of activations with a weight, or with other activations, accumulated in float32.

    The only place where the form of a product is chosen. Both operands have x's dtype and the result
    is float32 before it is rounded: the form for which every backend has a fast kernel (on CPU,
    bfloat16 operands with a bfloat16 result run at a fifth of the speed). The gradient is built from
    products of the same form; automatic differentiation would multiply a float32 cotangent with a
    bfloat16 operand.

    Args:
      spec: 'a,b->c'; an axis of one operand only must not be summed.
      x: activations.
      y: of any float dtype; rounded to x's.
      dtype: of the result, x's by default.
    """
    product = jnp.einsum(spec, x, y.astype(x.dtype), preferred_element_type=jnp.float32)
    return product.astype(dtype or x.dtype)


def _einsum_forward(spec, x, y, dtype):
    return einsum(spec, x, y, dtype), (x, y)


def _einsum_backward(spec, dtype, residuals, cotangent):
    x, y = residuals
    operands, out = spec.split('->')
    left, right = operands.split(',')
    # Not fused with the operation that makes it: on CPU a gradient then takes a sixth less time.
    cotangent = lax.optimization_barrier(cotangent).astype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    x_grad = product(f'{out},{right}->{left}', cotangent, y.astype(x.dtype))
    y_grad = product(f'{left},{out}->{right}', x, cotangent)
    return x_grad.astype(x.dtype), y_grad.astype(y.dtype)


einsum.defvjp(_einsum_forward, _einsum_backward)


def lay_out(weight: Array) -> Array:
    """A weight [D, ...] in the layout in which `project` is fastest over few rows: in panels on a single CPU."""
    return to_panels(weight) if platform() == 'cpu' and mesh_in_use() is None else weight


def to_panels(weight: Array) -> Array:
    """A weight [D, ...] as panels [P, D, C] of its columns, zeros after the last one (`backend.panels`)."""
    flat = weight.reshape(len(weight), -1)
    number, columns = panels(flat.shape[1], flat.dtype.itemsize)
    flat = jnp.pad(flat, ((0, 0), (0, number * columns - flat.shape[1])))
    return flat.reshape(len(flat), number, columns).swapaxes(0, 1)


def project(spec: str, x: Array, weight: Array, shape: tuple[int, ...], dtype=None) -> Array:
    """`einsum` with a weight [D, *shape] that may be in panels.

    Args:
      spec: such as 'btd,dhk->bthk'.
      x: [B, T, D].
      weight: [D, *shape], or [P, D, C] as `to_panels` makes it.
      shape: of a token's projection.
      dtype: as of `einsum`.

    Returns:
      [B, T, *shape].
    """
    if weight.shape[1:] == shape:
        return einsum(spec, x, weight, dtype)
    if len(weight) == 1:
        product = einsum('btd,dc->btc', x, weight[0], dtype)
    else:
        product = einsum('pbtd,pdc->pbtc', jnp.broadcast_to(x, (len(weight), *x.shape)), weight, dtype)
        product = jnp.moveaxis(product, 0, 2).reshape(*x.shape[:2], -1)
    return product[:, :, : math.prod(shape)].reshape(*x.shape[:2], *shape)


def by_head(x: Array, weight: Array) -> Array:
    """x [B, T, D] by weight [D, H, K] -> [B, T, H, K].

    The small result is transposed afterwards: with 'bhtk' as the output, XLA's CPU backend transposes the weight in
    every call of the decoding loop.
    """
    return einsum('btd,dhk->bthk', x, weight)


def separate_by_head(x: Array, weight: Array) -> Array:
    """`by_head`, kept out of the product that takes its result where XLA would fuse the two (`backend.apart`)."""
    return apart(by_head(x, weight))


def few_rows_einsum(spec: str, x: Array, y: Array, dtype=None) -> Array:
    """`einsum` of x [B, H, T, .] with y [B, H, ., .] -> [B, H, T, .]; row by row where that is faster."""
    batch, _, rows, _ = x.shape
    if batch > 1 or not better_row_by_row(rows):
        return einsum(spec, x, y, dtype)
    return jnp.concatenate([einsum(spec, x[:, :, row : row + 1], y, dtype) for row in range(rows)], axis=2)


def filled_einsum(spec: str, x: Array, y: Array) -> Array:
    """`einsum` of x [B, T, .] with a weight; with filler rows where that is faster (`backend.filled_rows`)."""
    batch, rows, _ = x.shape
    fillers = filled_rows(rows, y.size) - rows if batch == 1 else 0
    return einsum(spec, jnp.pad(x, ((0, 0), (0, fillers), (0, 0))), y)[:, :rows]
