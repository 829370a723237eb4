"""The programs of a pair, compiled from shapes alone for a TPU that is not attached.

Each is compiled in a separate process, so that a program on which the compiler hangs can be abandoned. Before JAX
is imported, the environment needs JAX_PLATFORMS=cpu, TPU_SKIP_MDS_QUERY=1 (no search for a TPU) and
ALLOW_MULTIPLE_LIBTPU_LOAD=1. On several chips the weights are split over `model`, as in `sharding`.

Axes: B rows, G draft depth, S source length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from spec_jax import decoding
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import Drafter, Round
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.models.base import Model
from spec_jax.models.shape import ModelShape
from spec_jax.runtime import backend, sharding
from spec_jax.sampling import SamplingConfig
from spec_jax.tpu import chips
from spec_jax.tpu.hlo import Program
from spec_jax.types import Draft, Inputs

PROGRAMS = ('plain_step', 'target_call', 'draft', 'prefill', 'loop')
_HLO_TYPE = dict(bfloat16='bf16', float32='f32')
SCOPES = ('draw', 'draft', 'target', 'verify', 'update')


@dataclasses.dataclass(frozen=True)
class Setup:
    """A pair and how it decodes.

    Attributes:
      target: its shape.
      draft: likewise.
      topology: as of `chips.named`.
      gamma: G.
      max_new_tokens: most tokens of an output.
      source_length: S.
      sampling: how logits become a distribution.
      batch_size: B.
      dtype: of weights, activations and caches.
    """

    target: ModelShape
    draft: ModelShape
    topology: str
    gamma: int
    max_new_tokens: int
    source_length: int
    sampling: SamplingConfig
    batch_size: int = 1
    dtype: str = 'bfloat16'


def compile_apart(setup: Setup, name: str, limit: float) -> dict[str, Any]:
    """Figures of one of `PROGRAMS`, compiled in a separate process.

    Args:
      limit: seconds, after which it is abandoned.

    Returns:
      As of `compile_here`; where it was abandoned or failed, `error` alone.
    """
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, setup, name), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            return dict(error=f'the compiler was given up after {limit:.0f} s')
        return ours.recv()
    except EOFError:
        child.join()
        return dict(error=f'the compiler ended with exit code {child.exitcode}')
    finally:
        if child.is_alive():
            child.kill()
            child.join()


def _child(pipe, setup: Setup, name: str) -> None:
    # libtpu prints messages about missing chips between our lines.
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        pipe.send(compile_here(setup, name))
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        pipe.send(dict(error=' '.join(str(error).split())[:300]))


def compile_here(setup: Setup, name: str) -> dict[str, Any]:
    """Compiles one of `PROGRAMS` and reads the compiler's estimates.

    Returns:
      compile_seconds; memory (bytes of arguments, outputs, those that share memory, temporaries); milliseconds of
      one run (for `loop` of one round, `prefill_milliseconds` of what precedes it); draft_milliseconds of one
      draft step and scopes of `loop`; copies (number and bytes of large ones in loops); collectives.
    """
    chip, number = chips.named(setup.topology)
    devices = chips.devices(setup.topology)
    with backend.tracing_for('tpu'):
        function, arguments, donated = _BUILDERS[name](setup)
        with _mesh(devices) as mesh:  # nothing may run within: these devices do not exist
            arguments = _placed(mesh, devices[0], arguments)
            begin = time.perf_counter()
            compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
            seconds = time.perf_counter() - begin
    figures = dict(compile_seconds=seconds, memory=_memory(compiled), chips=number)
    return figures | _read(Program(compiled.as_text()), name, chip, _HLO_TYPE[setup.dtype], _smallest(setup))


@contextlib.contextmanager
def _mesh(devices):
    """A mesh of 1 x chips in use; nothing for one chip."""
    if len(devices) == 1:
        yield None
        return
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((1, len(devices)), (sharding.DATA, sharding.MODEL), kinds, devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


def _placed(mesh, device, arguments):
    """Shapes with their shardings: a model's weights by its rules, keys and values by head, all else whole."""

    def place(node):
        rules = getattr(node, 'partition_rules', None)  # None for an array outside any model
        return jax.tree.map_with_path(partial(_placed_leaf, mesh, device, rules), node)

    return jax.tree.map(place, arguments, is_leaf=lambda node: hasattr(node, 'partition_rules'))


def _placed_leaf(mesh, device, rules: sharding.Rules | None, path: tuple, leaf):
    if mesh is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
    spec, size = PartitionSpec(), mesh.shape[sharding.MODEL]
    if rules is not None:
        names = [getattr(step, 'name', getattr(step, 'key', getattr(step, 'idx', None))) for step in path]
        inner = names[names.index('params') + 1 : -1]  # the last step is nnx.Param's own
        spec = sharding.partition_spec(rules, tuple(inner), leaf.shape, size)
    elif leaf.ndim == 4 and leaf.shape[1] % size == 0 and leaf.shape[1] > 1:
        spec = PartitionSpec(None, sharding.MODEL)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _read(program: Program, name: str, chip: chips.Chip, dtype: str, smallest: int) -> dict[str, Any]:
    """Times and copies of a compiled program."""
    milliseconds = lambda cycles: cycles / chip.clock * 1e3  # noqa: E731
    where, figures = program.entry, {}
    if name == 'loop':
        (main,) = program.loops(program.entry)
        prefill = sum(one.cycles for one in program.operations(program.entry))
        figures['prefill_milliseconds'], where = milliseconds(prefill), main.called['body']
        scopes = program.by_scope(where, SCOPES)
        figures['scopes'] = {scope: milliseconds(cycles) for scope, cycles in scopes.items()}
    figures['milliseconds'] = milliseconds(program.cycles(where))
    drafts = [loop for loop in program.loops(where) if '/draft/' in f'{loop.scope}/' or name == 'draft']
    if drafts:
        figures['draft_milliseconds'] = milliseconds(program.cycles(drafts[0].called['body']))
        figures['draft_step_operations'] = sum(
            one.cycles > 0 for one in program.operations(drafts[0].called['body'])
        )
    if name == 'draft' and drafts:
        where = drafts[0].called['body']
    copies = program.copies(where, dtype, smallest)
    figures['copies'] = dict(number=len(copies), bytes=sum(copy.bytes for copy in copies))
    return figures | dict(collectives=program.collectives(where))


def _memory(compiled) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return dict(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        shared=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


def _smallest(setup: Setup) -> int:
    """Bytes of the smallest array whose copy counts: one layer's keys in the draft, on one of the chips."""
    keys = setup.draft.layer_keys_bytes(setup.dtype, setup.max_new_tokens)
    return keys // chips.named(setup.topology)[1]


# --- what is compiled: function, arguments, which of them it may overwrite -----------------------------------


def _pair(setup: Setup) -> tuple[Model, ModelDrafter]:
    target, draft = (shape.abstract(setup.dtype) for shape in (setup.target, setup.draft))
    return target, ModelDrafter(draft)


def _prompts(setup: Setup) -> tuple[Inputs, Any]:
    size = setup.batch_size, setup.source_length
    inputs = Inputs(jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, jnp.bool_))
    return inputs, jax.eval_shape(partial(jax.random.split, num=setup.batch_size), jax.random.key(0))


def _config(setup: Setup) -> DecodeConfig:
    return DecodeConfig(setup.gamma, setup.max_new_tokens, setup.sampling)


def _state(setup: Setup, target: Model, drafter: Drafter):
    return jax.eval_shape(partial(decoding.start, config=_config(setup)), target, drafter, *_prompts(setup))


def _plain_step(setup: Setup):
    def step(target, state):
        return decoding.speculative_step(target, NoDrafter(), state, config=_config(setup))

    target, _ = _pair(setup)
    return step, (target, _state(setup, target, NoDrafter())), (1,)


def _target_call(setup: Setup):
    def call(target, cache, context, tokens):
        draft = Draft(tokens, None, jnp.full_like(context.length, setup.gamma))
        logits, _, _, cache = decoding.target_call(target, cache, context, draft)
        return logits, cache

    target, drafter = _pair(setup)
    state = _state(setup, target, drafter)
    tokens = jax.ShapeDtypeStruct((setup.batch_size, setup.gamma), jnp.int32)
    return call, (target, state.target_cache, state.context, tokens), (1,)


def _draft(setup: Setup):
    def propose(drafter, state, context, keys):
        round = Round(context, keys, setup.gamma, setup.sampling, setup.target.vocab_size)
        return drafter.propose(state, round)

    target, drafter = _pair(setup)
    state = _state(setup, target, drafter)
    return propose, (drafter, state.draft_state, state.context, state.keys), (1,)


def _prefill(setup: Setup):
    return partial(decoding.start, config=_config(setup)), (*_pair(setup), *_prompts(setup)), ()


def _loop(setup: Setup):
    return partial(decoding.speculative_loop, config=_config(setup)), (*_pair(setup), *_prompts(setup)), ()


_BUILDERS = dict(plain_step=_plain_step, target_call=_target_call, draft=_draft, prefill=_prefill, loop=_loop)


# --- what must be read ---------------------------------------------------------------------------------------


def weight_bytes(shape: ModelShape, dtype: str, devices: int = 1) -> int:
    """Bytes of all weights on one of the chips that they are split over."""
    return _weights(shape, dtype, devices, lambda path: True)


def read_bytes(
    shape: ModelShape, dtype: str, slots: int, source_length: int, batch_size: int = 1, devices: int = 1
) -> int:
    """Bytes that a call of the decoder must read on one chip: the weights it multiplies by, and the caches.

    Arguments are those of `ModelShape.cache_bytes`.
    """
    weights = _weights(shape, dtype, devices, shape.is_read_by_decode)
    return weights + shape.cache_bytes(dtype, slots, source_length, batch_size, devices)


def _weights(shape: ModelShape, dtype: str, devices: int, wanted: Callable[[tuple], bool]) -> int:
    rules, weights = _laid_out(shape, dtype)
    total = 0
    for path, size in weights:
        if wanted(path):
            split = devices > 1 and any(sharding.partition_spec(rules, path, size, devices))
            total += math.prod(size) * jnp.dtype(dtype).itemsize // (devices if split else 1)
    return total


@functools.cache  # tracing T5-XXL's takes seconds
def _laid_out(shape: ModelShape, dtype: str) -> tuple[sharding.Rules, list[tuple[tuple, tuple[int, ...]]]]:
    """A model's partition rules, and path and shape of every weight."""
    with backend.tracing_for('tpu'):
        model = shape.abstract(dtype)
    return model.partition_rules, [(path, leaf.shape) for path, leaf in nnx.to_flat_state(model.params)]
