"""Data sets of the Hugging Face hub as examples, through the library `datasets`, which is optional.

    hf:wmt/wmt14/de-en:test             OWNER/NAME/CONFIG:SPLIT
    hf:abisee/cnn_dailymail/3.0.0:test
    hf:FOLDER:test                      on this machine: parquet, jsonl or csv files, or a folder of `save_to_disk`

A name of two parts is NAME/CONFIG, for the old names without an owner: wmt14/de-en. Rows are streamed: only the
files of the split are fetched, as far as `limit` rows need, and nothing is cached.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from spec_jax.text.data import Example, example_from

PREFIX = 'hf:'
_OLDEST = 4  # major version: older ones execute Python code from the data set
_FORM = f'{PREFIX}NAME/CONFIG:SPLIT, {PREFIX}OWNER/NAME/CONFIG:SPLIT or {PREFIX}FOLDER:SPLIT'


def is_named(path: str) -> bool:
    """Whether a path names a data set, not a file."""
    return path.startswith(PREFIX)


def read_dataset(
    path: str, *, source_key: str = 'source', target_key: str = 'target', limit: int | None = None
) -> list[Example]:
    """Reads the first rows of a split of a data set.

    Args:
      path: see the module. CONFIG is `default` where the data set has no other.
      source_key: the column of the sources; a dot selects a nested key, as in 'translation.en'.
      target_key: that of the targets; a row without it is a source alone.
      limit: rows to read; None for all.

    Raises:
      ValueError: the path or a row is invalid, there are no rows, or `datasets` is missing or too old.
      OSError: the data set cannot be fetched.
    """
    name, config, split = _parse(path)
    try:
        rows = _rows(name, config, split, limit)
    except ImportError as error:
        raise ValueError(
            f'{path}: expected the library datasets, version {_OLDEST} or newer; got {_shortly(error)}: '
            f"pip install 'datasets>={_OLDEST}'"
        ) from error
    except Exception as error:  # the library, its transports and its parsers raise many kinds
        raise OSError(
            f'{path}: expected a data set that can be fetched; got {_shortly(error)}: check its name ({_FORM}) and '
            'the network, or save it as jsonl and name the file'
        ) from error
    if not rows:
        raise ValueError(f'{path}: expected at least one row; got an empty split: name another')
    return [example_from(row, f'{path}, row {n}', source_key, target_key) for n, row in enumerate(rows, 1)]


def _parse(path: str) -> tuple[str, str | None, str]:
    """Name or folder, configuration and split."""
    name, _, split = path.removeprefix(PREFIX).rpartition(':')
    parts = name.split('/')
    folder = os.path.isdir(os.path.expanduser(name))
    if not split or split.endswith(']') or not (folder or (all(parts) and len(parts) <= 3)):
        raise ValueError(f'data.path: expected {_FORM}; got {path!r} (data.limit takes the first rows)')
    if folder:
        return os.path.expanduser(name), None, split
    if len(parts) == 1:
        return name, None, split
    return '/'.join(parts[:-1]), parts[-1], split


def _rows(name: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    # Imported here: slow to import, and optional.
    import datasets

    if int(datasets.__version__.partition('.')[0]) < _OLDEST:
        raise ImportError(f'datasets {datasets.__version__}')
    if os.path.isfile(os.path.join(name, 'dataset_dict.json')):  # a DatasetDict of save_to_disk
        rows = datasets.load_from_disk(name)[split]
    else:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    return list(itertools.islice(rows, limit))


def _shortly(error: Exception) -> str:
    """The error's type and the first 160 characters of its text."""
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text[:160]}' if text else type(error).__name__
