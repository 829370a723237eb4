"""Several processes that run one program over all their devices; only the first writes and prints.

processes.start('10.0.0.1:8476', number=2, index=0)   # and index=1 on the other machine
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def start(coordinator: str | None, number: int | None = None, index: int | None = None) -> None:
    """Joins the other processes, before any device is used; all but the first print nothing from here on.

    Args:
      coordinator: HOST:PORT of the first process, the same in all; 'auto' on a TPU pod or under Slurm, where the
        rest is detected; None for a single process.
      number: of processes.
      index: of this process, from 0.

    Raises:
      ValueError: for arguments that contradict each other.
      OSError: the other processes could not be joined.
    """
    if coordinator is None:
        if number is not None or index is not None:
            raise ValueError(
                'num_processes, process_id: expected --coordinator=HOST:PORT with them; got none'
            )
        return
    where = {}
    if coordinator != 'auto':
        if not re.fullmatch(r'.+:\d+', coordinator):
            raise ValueError(
                f'coordinator: expected HOST:PORT of the first process, or auto; got {coordinator!r}'
            )
        if number is None or index is None or not 0 <= index < number:
            raise ValueError(
                f'process_id: expected a number from 0 to below num_processes beside a coordinator; got {index} '
                f'of {number}'
            )
        where = dict(coordinator_address=coordinator, num_processes=number, process_id=index)
    try:
        jax.distributed.initialize(**where)
    except (RuntimeError, ValueError) as error:
        raise OSError(f'coordinator {coordinator}: could not join the other processes: {error}') from error
    if not is_first():
        sys.stdout = open(os.devnull, 'w')


def is_first() -> bool:
    """True in the process that writes and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def from_first(function: Callable[[], Any]) -> Any:
    """Runs `function` in the first process only and returns its result in all: for files and clocks.

    Args:
      function: returns a value that JSON can express.

    Raises:
      OSError, ValueError: what `function` raised, in every process, so that none is left waiting.
    """
    if not jax.distributed.is_initialized():
        return function()
    answer, raised = {}, None
    if is_first():
        try:
            answer['result'] = function()
        except (OSError, ValueError) as error:
            answer['error'], raised = str(error), error
    answer = json.loads(_broadcast(json.dumps(answer).encode()))
    if 'error' in answer:
        raise raised or ValueError(answer['error'])
    return answer['result']


def _broadcast(text: bytes) -> bytes:
    """The text of the first process."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    content = np.zeros(size, np.uint8)
    if is_first():
        content[:] = np.frombuffer(text, np.uint8)
    return multihost_utils.broadcast_one_to_all(content).tobytes()


def whole(tree: Any) -> Any:
    """The tree with whole arrays: parts on other processes are fetched. All processes must call it."""

    def fetched(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(fetched, tree)
