"""Places weights and rows on the devices of a mesh; XLA's partitioner does the rest.

    sharding.use_mesh(data=2, model=4)
    target = load_model(folder)  # places its weights by `placer` and `shard`
    inputs = Inputs(sharding.by_row(tokens), sharding.by_row(mask))

`data` splits the rows of a batch, `model` the heads, the feed-forward width and the vocabulary. Keys, values and
their caches are split by head; a layer has one all-reduce after each attention and one after the feed-forward
block, and weights are never moved. The model's `partition_rules` give the axis on which each weight is split. On a
mesh of 1 x 1, a single device, these functions do nothing.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spec_jax.runtime import processes

DATA, MODEL = 'data', 'model'
P = PartitionSpec

# Pairs of a pattern, which must match a parameter's whole path, and the ways to split it: the first whose axes the
# mesh divides is used, and none where it divides none. The first pattern that matches is used.
Rules = Sequence[tuple[str, *tuple[PartitionSpec, ...]]]


def mesh_sizes(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """`data` and `model` of a recipe's `mesh` section; 1 and 1 where it has none.

    Raises:
      ValueError: for a size that is not an integer >= 1.
    """
    sizes = [(config or {}).get(name, 1) for name in (DATA, MODEL)]
    for name, size in zip((DATA, MODEL), sizes, strict=True):
        if type(size) is not int or size < 1:
            raise ValueError(f'mesh.{name}: expected an integer >= 1, got {size!r}')
    return tuple(sizes)


def use_mesh(data: int = 1, model: int = 1) -> None:
    """From here on weights and rows are placed on a mesh of data x model devices, and programs compiled for it.

    Raises:
      ValueError: the number of devices does not allow such a mesh.
    """
    devices, number = jax.devices(), data * model
    if jax.process_count() > 1:
        fits, expected = number == len(devices), f'be {len(devices)}, all devices of the processes'
    else:
        fits, expected = len(devices) % number == 0, f'divide {len(devices)}, the number of devices'
    if not fits:
        raise ValueError(
            f'mesh: expected data x model to {expected}; got {data} x {model} = {number}: change one'
        )
    if number > 1:
        kinds = (AxisType.Auto, AxisType.Auto)
        jax.set_mesh(jax.make_mesh((data, model), (DATA, MODEL), kinds, devices=devices[:number]))
    elif mesh_in_use() is not None:
        jax.set_mesh(None)


def mesh_in_use() -> Mesh | None:
    """The mesh of `use_mesh`, or of `jax.set_mesh` with the same two axes; None for one device."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.axis_names == (DATA, MODEL) else None


def placer(rules: Rules) -> Callable[[tuple, np.ndarray], Array] | None:
    """A function (path, weight) -> the weight on the mesh, each device and process taking only its part.

    None where no mesh is in use.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return None
    return lambda path, weight: _put(weight, _sharding(mesh, rules, path, weight.shape))


def shard(model: flax.struct.PyTreeNode) -> flax.struct.PyTreeNode:
    """The model with every weight placed by its `partition_rules`."""
    mesh = mesh_in_use()
    if mesh is None:
        return model
    rules = model.partition_rules
    leaves = {
        path: leaf.replace(jax.device_put(leaf[...], _sharding(mesh, rules, path, leaf.shape)))
        for path, leaf in nnx.to_flat_state(model.params)
    }
    return model.replace(params=nnx.from_flat_state(leaves))


def by_row(array: np.ndarray) -> Array:
    """An array [B, ...] of a batch, its rows split over `data`; whole on every device where they do not divide."""
    mesh = mesh_in_use()
    if mesh is None:
        return jnp.asarray(array)
    if array.shape[0] % mesh.shape[DATA]:
        _warn(
            f'mesh.data = {mesh.shape[DATA]} does not divide a batch of {array.shape[0]} rows: every device '
            'decodes all of them'
        )
        return _put(array, NamedSharding(mesh, P()))
    return _put(array, NamedSharding(mesh, P(DATA)))


def rows_are_apart() -> bool:
    """Whether the program being traced is for a mesh over which rows may be split."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(DATA, 1) > 1


def varying_as(tree: Any, like: Array) -> Any:
    """The tree, within a `jax.shard_map`, declared to differ between devices wherever `like` does.

    A loop needs what it carries declared alike from the first pass on, zeros included. Elsewhere nothing changes.
    """

    def axes(x) -> frozenset[str]:
        kind = getattr(jax.typeof(x), 'manual_axis_type', None)
        return kind.varying if kind else frozenset()

    def one(x):
        missing = tuple(sorted(axes(like) - axes(x)))
        return lax.pcast(x, missing, to='varying') if missing else x

    return jax.tree.map(one, tree)


def whole_distributions(x: Array) -> Array:
    """x [..., V], in the program being traced, with all of V on every device that has the row.

    One all-gather, in place of one collective for each of the many sums over V that follow.
    """
    if dict(jax.sharding.get_abstract_mesh().shape).get(MODEL, 1) == 1:
        return x
    return lax.with_sharding_constraint(x, P(*[P.UNCONSTRAINED] * (x.ndim - 1), None))


def partition_spec(rules: Rules, path: tuple, shape: tuple[int, ...], size: int) -> PartitionSpec:
    """How a parameter is split over a `model` axis of the given size.

    Args:
      rules: the model's.
      path: as of `nnx.to_flat_state`, such as ('decoder', 0, 'self_attention', 'query').
      shape: of the parameter.
      size: devices along `model`.

    Raises:
      ValueError: no rule matches the path.
    """
    name = '.'.join(map(str, path))
    specs = next((specs for pattern, *specs in rules if re.fullmatch(pattern, name)), None)
    if specs is None:
        raise ValueError(f'partition_rules: expected a rule for the weight {name}, got none; add one')
    for spec in specs:
        if all(axis is None or length % size == 0 for axis, length in zip(spec, shape, strict=False)):
            return spec
    block = '.'.join(step for step in path[:-1] if isinstance(step, str)) or name  # the same for all layers
    length = shape[len(specs[0]) - 1]
    _warn(f'mesh.model = {size} does not divide {length}: {block} is whole on every device')
    return P()


def _sharding(mesh: Mesh, rules: Rules, path: tuple, shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(rules, path, shape, mesh.shape[MODEL]))


def _put(array: np.ndarray, sharding: NamedSharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@functools.cache  # each message once
def _warn(message: str) -> None:
    if processes.is_first():
        print(f'WARNING: {message}', file=sys.stderr)
