"""Reads and writes model folders in Hugging Face's layout: config.json beside safetensors files.

Files are parsed, never executed: no pickle, no torch. Tensors are read one at a time, so that host memory holds
little more than the weights, or in a conversion little more than one tensor. How tensors map to parameters is in
each family's file (`t5_hf.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Set

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.text.tokenizers import TOKENIZER_FILES

CONFIG, WEIGHTS, INDEX = 'config.json', 'model.safetensors', 'model.safetensors.index.json'
PARAMS = 'params'  # in place of safetensors, an Orbax checkpoint (`t5_orbax.py`)
_KINDS = {'float32': 'F32', 'bfloat16': 'BF16'}  # NumPy's names, and safetensors'
_HUB_ID = re.compile(r'\w[\w.-]*(/\w[\w.-]*)?')


def fetch(source: str | os.PathLike, revision: str | None = None) -> pathlib.Path:
    """The folder of a model and its tokenizer: `source` itself, or the hub's files in the local cache.

    Args:
      source: a folder, or a hub id (`name` or `owner/name`) where there is no such folder.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: there is no such folder, and no such repository that can be downloaded.
      ValueError: `source` is a file.
    """
    folder = pathlib.Path(source).expanduser()
    expected = f'{source}: expected a folder with {CONFIG} and {WEIGHTS}'
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f'{expected}, got a file; name the folder that holds it')
    if not _HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f'{expected}, found none; check the path')

    # Imported here: it is slow to import, and most runs have their models on disk.
    from huggingface_hub import errors, snapshot_download

    patterns = [CONFIG, '*.safetensors', INDEX, *TOKENIZER_FILES]
    try:
        return pathlib.Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except errors.RepositoryNotFoundError as error:
        what = 'the hub shows no such repository; check the name, or log in with `hf auth login`'
        raise FileNotFoundError(f'{expected} or a hub id, found no folder, and {what}') from error
    except errors.RevisionNotFoundError as error:
        what = f'the hub has no revision {revision!r} of it; name another'
        raise FileNotFoundError(f'{expected} or a hub id, found no folder, and {what}') from error
    except Exception as error:  # the client passes on any exception of its transport
        what = f'the hub could not be reached ({type(error).__name__}); check the path or the network'
        raise FileNotFoundError(f'{expected} or a hub id, found no folder, and {what}') from error


def read_config(folder: pathlib.Path) -> dict:
    """The content of config.json.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f'{folder}: expected {CONFIG} and {WEIGHTS}, found no {CONFIG}; check the path'
        )
    return _read_json(path)


class Checkpoint:
    """The tensors of a folder's safetensors files, read on demand.

    Raises:
      FileNotFoundError: no safetensors file, or a shard is missing.
      ValueError: a file is damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._stored = {}  # name -> (path, name in it, shape, type)
        for path in _weight_files(folder):
            with _reading(path) as file:
                for name in file.keys():
                    header = file.get_slice(name)
                    self._stored[name] = path, name, tuple(header.get_shape()), header.get_dtype()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def drop(self, name: str) -> None:
        """Forgets a tensor, so that `expect` does not count it."""
        del self._stored[name]

    def rename(self, old: str, new: str) -> None:
        self._stored[new] = self._stored.pop(old)

    def expect(self, names: Set[str], ignore: Set[str] = frozenset()) -> None:
        """Raises ValueError unless all these tensors are there, and no others except `ignore`."""
        expected = f'{self.folder}: expected the {len(names)} tensors that {CONFIG} asks for'
        if missing := names - self._stored.keys():
            raise ValueError(f'{expected}, got no {listed(missing)}; complete the files or correct {CONFIG}')
        if extra := self._stored.keys() - names - ignore:
            raise ValueError(
                f'{expected}, got {listed(extra)} besides; use a plain model or correct {CONFIG}'
            )

    def kind(self, name: str) -> str:
        """A tensor's type as safetensors calls it, such as F32 or BF16."""
        return self._stored[name][3]

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor in its stored float type; ValueError where it is not a float or not of this shape."""
        path, stored_name, actual, kind = self._stored[name]
        if shape is not None and actual != shape:
            raise ValueError(f'{path}: expected {name} of shape {shape}, got {actual}; correct {CONFIG}')
        if kind not in ('F64', 'F32', 'F16', 'BF16'):
            raise ValueError(
                f'{path}: expected floats in {name}, got {kind}; store it as float32 or bfloat16'
            )
        # Opened for each tensor: an open file keeps all that was read from it in memory.
        with _reading(path) as file:
            return file.get_tensor(stored_name)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[safe_open]:
    """An open safetensors file; ValueError where it is damaged."""
    try:
        with safe_open(path, framework='np') as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(path, error)) from error


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder's safetensors files: the single one, or the shards of its index."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        expected = f'{folder}: expected {WEIGHTS} or {INDEX}'
        if pickles := sorted(path.name for path in folder.glob('*.bin')):
            what = f'got {pickles[0]}, a pickle, which is never loaded here; convert it to safetensors'
            raise FileNotFoundError(f'{expected}, {what}')
        what = 'found neither; complete the download, or convert the weights to safetensors'
        raise FileNotFoundError(f'{expected}, {what}')
    weight_map = _read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f'{index}: expected a weight_map of names to files, got none; download it again')
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if pathlib.PurePath(shard).name != shard:
            raise ValueError(f'{index}: expected shards in its own folder, got {shard!r}; download it again')
        if not (folder / shard).is_file():
            raise FileNotFoundError(f'{folder}: expected shard {shard}, found none; complete the download')
    return [folder / shard for shard in shards]


@contextlib.contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A temporary folder to write a model into, which replaces `folder` when everything is written.

    In a folder that exists the old model is replaced and other files, such as a tokenizer, stay. While old and new
    files are mixed in it, it has no config.json and cannot be loaded as a model.

    Raises:
      OSError: the folder cannot be written; nothing half-written is left.
    """
    target = pathlib.Path(folder).expanduser().resolve()
    mark = f'.{target.name}.tmp{os.getpid()}'
    staging = target / mark if target.is_dir() else target.with_name(mark)
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError('a file of that name')
        _remove_abandoned(staging)
        staging.mkdir(parents=True)
        try:
            yield staging
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f'{folder}: expected a folder to write a model to, got {error}; name another'
        ) from error


def _remove_abandoned(staging: pathlib.Path) -> None:
    """Removes staging folders of processes that no longer run, or of an earlier process with this one's id."""
    mark, _, this_process = staging.name.rpartition('.tmp')
    for path in staging.parent.glob(f'{mark}.tmp*'):
        process = path.name.removeprefix(f'{mark}.tmp')
        if process == this_process or (process.isdigit() and not _is_running(int(process))):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _publish(staging: pathlib.Path, target: pathlib.Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    for old in (CONFIG, INDEX, 'model*.safetensors'):
        for path in target.glob(old):
            path.unlink()
    shutil.rmtree(target / PARAMS, ignore_errors=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG):
        path.replace(target / path.name)


def write_config(folder: pathlib.Path, content: dict) -> None:
    """Writes config.json."""
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def write_tensors(
    folder: pathlib.Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    tensor: Callable[[str], np.ndarray],
    max_shard_size: int,
) -> None:
    """Writes model.safetensors, or several shards and their index.

    Args:
      folder: an empty one.
      shapes: of each tensor by name.
      dtype: of all of them, float32 or bfloat16.
      tensor: gives a tensor by name; called once for each.
      max_shard_size: most bytes of a shard; a larger tensor has a shard to itself.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards, room = [[]], max_shard_size
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f'model-{i:05}-of-{len(shards):05}.safetensors'
        _write_shard(folder / file, {name: shapes[name] for name in names}, dtype, tensor)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n', encoding='utf-8')


def _write_shard(
    path: pathlib.Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    tensor: Callable[[str], np.ndarray],
) -> None:
    """Writes one safetensors file: the header's length, the header in JSON, then the tensors back to back.

    safetensors' `save_file` needs all of them in memory at once.
    """
    header, end = {'__metadata__': {'format': 'pt'}}, 0  # transformers requires a format
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {'dtype': _KINDS[dtype.name], 'shape': shape, 'data_offsets': (begin, end)}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # so that the tensors are aligned
    with open(path, 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for name in shapes:
            file.write(np.ascontiguousarray(tensor(name), dtype).view(np.uint8))


def _read_json(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, OSError) as error:
        raise ValueError(f'{path}: expected JSON, got something else ({error}); download it again') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path}: expected a JSON object, got {type(content).__name__}; download it again')
    return content


def _damaged(path: pathlib.Path, error: Exception) -> str:
    with open(path, 'rb') as file:
        if file.read(24) == b'version https://git-lfs.':
            return f'{path}: expected a safetensors file, got a Git LFS pointer to one; run `git lfs pull`'
    return f'{path}: expected a safetensors file, got a damaged one ({error}); download it again'


def listed(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    names = sorted(names)
    return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')
