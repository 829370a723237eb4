"""Training checkpoints through Orbax."""

from __future__ import annotations

import pathlib

import jax
import orbax.checkpoint as ocp


def open_manager(directory: str | pathlib.Path, keep: int = 2) -> ocp.CheckpointManager:
    """A manager of the numbered checkpoints in `directory`, which is created; the last `keep` stay."""
    path = pathlib.Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True))


def save(manager: ocp.CheckpointManager, step: int, state) -> None:
    """Saves a pytree under `step`; Orbax renames a finished checkpoint into place, so half a one never counts."""
    manager.save(step, args=ocp.args.StandardSave(jax.tree.leaves(state)))


def restore_latest(manager: ocp.CheckpointManager, like):
    """The newest checkpoint in the form of `like`, or None where there is none.

    Raises:
      ValueError: where the checkpoint holds other arrays than `like`.
    """
    step = manager.latest_step()
    if step is None:
        return None
    leaves, treedef = jax.tree.flatten(like)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None)) for leaf in leaves]
    try:
        restored = manager.restore(step, args=ocp.args.StandardRestore(abstract))
    except Exception as error:  # orbax raises many kinds
        raise ValueError(
            f'{manager.directory}/{step}: expected a checkpoint of this configuration, '
            f'got {type(error).__name__}: {str(error).splitlines()[0][:200]}; use another --workdir or the old configuration'
        ) from error
    return jax.tree.unflatten(treedef, restored)
