"""Training checkpoints through Orbax.

A checkpoint is the list of the leaves of a pytree, in `jax.tree` order: it does not depend on the names of
classes. Model folders are written by `models/t5_weights.py`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from spec_jax.models.zarr_folder import shortly


def open_manager(directory: str | os.PathLike, keep: int = 2) -> ocp.CheckpointManager:
    """A manager of the numbered checkpoints in `directory`, which is created; the last `keep` are kept.

    It saves synchronously, so that a full disk raises an error in the step that saves.

    Raises:
      OSError: the folder cannot be written.
    """
    path = pathlib.Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=False, enable_async_checkpointing=False, enable_background_delete=False
    )
    return _manager(path, options)


def open_to_read(directory: str | os.PathLike) -> ocp.CheckpointManager:
    """A read-only manager, for use even while another process writes there.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    path = pathlib.Path(directory).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f'{directory}: expected a folder of checkpoints, found none; check --workdir')
    return _manager(path, ocp.CheckpointManagerOptions(read_only=True))


def save(manager: ocp.CheckpointManager, step: int, state: Any) -> None:
    """Saves a pytree under `step`, unless there is a checkpoint of that number.

    Orbax renames a finished checkpoint into place, so an incomplete one is never read, and older ones stay until
    then.

    Raises:
      OSError: it could not be written.
    """
    if step in manager.all_steps():
        return
    try:
        manager.save(step, args=ocp.args.StandardSave(jax.tree.leaves(state)))
    except Exception as error:  # Orbax and TensorStore raise many kinds
        # Files that are still being written are removed at the next start.
        _remove_unfinished(pathlib.Path(manager.directory))
        raise OSError(
            f'{manager.directory}: expected to save step {step}, got {shortly(error)}; '
            'make room or choose another --workdir, then start again: older checkpoints are intact'
        ) from error


def restore_latest(manager: ocp.CheckpointManager, like: Any) -> Any:
    """The newest checkpoint in the form of the pytree `like`, or None where there is none.

    Args:
      like: arrays, or their shapes as of `jax.eval_shape`; these are put on the first device.

    Raises:
      ValueError: the checkpoint is damaged, or holds other arrays than `like`.
    """
    step = manager.latest_step()
    if step is None:
        return None
    where = f'{manager.directory}/{step}'
    leaves, treedef = jax.tree.flatten(like)
    try:
        stored = manager.item_metadata(step)
        actual = [(tuple(leaf.shape), leaf.dtype) for leaf in stored]
    except Exception as error:  # Orbax raises many kinds
        raise ValueError(_damaged(where, error)) from error
    expected = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if actual != expected:
        raise ValueError(f'{where}: {_difference(like, expected, actual)}')
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)
        for leaf in leaves
    ]
    try:
        restored = manager.restore(step, args=ocp.args.StandardRestore(abstract))
    except Exception as error:
        raise ValueError(_damaged(where, error)) from error
    return jax.tree.unflatten(treedef, restored)


def _manager(path: pathlib.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    # With the handler given here, a checkpoint's metadata can be read before it is restored.
    return ocp.CheckpointManager(path, options=options, item_handlers=ocp.StandardCheckpointHandler())


def _remove_unfinished(directory: pathlib.Path) -> None:
    for path in directory.glob('*orbax-checkpoint-tmp*'):
        shutil.rmtree(path, ignore_errors=True)


def _difference(like: Any, expected: list, actual: list) -> str:
    """The first leaf in which a checkpoint differs from the state of the configuration."""
    advice = 'use the old configuration and tokenizer, or another --workdir'
    if len(actual) != len(expected):
        return f'expected {len(expected)} arrays of this configuration, got {len(actual)}; {advice}'
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
    n = next(n for n in range(len(actual)) if actual[n] != expected[n])
    (shape, dtype), (actual_shape, actual_dtype) = expected[n], actual[n]
    return f'expected {names[n]} as {dtype}{list(shape)}, got {actual_dtype}{list(actual_shape)}; {advice}'


def _damaged(where: str, error: Exception) -> str:
    return (
        f'{where}: expected a whole checkpoint, got {shortly(error)}; '
        'remove this folder to go on from the checkpoint before it'
    )
