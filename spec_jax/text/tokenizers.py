"""Tokenizers of Hugging Face folders and hub ids, through transformers; code in a folder is never executed."""

from __future__ import annotations

import os
import pathlib
import shutil

TOKENIZER_FILES = ('spiece.model', '*token*.json')  # tokenizer.json, tokenizer_config.json and others


def load_tokenizer(source: str | os.PathLike):
    """The tokenizer of a folder or a hub id.

    Raises:
      FileNotFoundError: no such folder, and no such hub id that can be reached.
      ValueError: the folder has no tokenizer, or one that cannot be read.
    """
    source = os.fspath(source)
    if not os.path.isdir(source) and (
        os.path.isabs(source) or source.startswith('.') or source.count('/') > 1
    ):
        raise FileNotFoundError(f'{source}: expected a folder with a tokenizer; there is no such folder')
    from transformers import AutoTokenizer  # slow to import; loading a model does not need it

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers and tokenizers raise many kinds, with long messages
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(
            f'{source}: expected a tokenizer (tokenizer.json or spiece.model); {reason}: '
            'copy the tokenizer files of the pair there'
        ) from error


def pieces(tokenizer) -> list[str]:
    """The pieces in the order of their ids."""
    return tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))


def tokenizer_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The tokenizer's files in a folder."""
    return sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})


def copy_tokenizer(source: str | os.PathLike, tokenizer, folder: pathlib.Path) -> None:
    """Puts a tokenizer's files into a folder, which is created.

    Where `source` is a folder they are copied, since transformers 4 cannot read what transformers 5 writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not pathlib.Path(source).expanduser().is_dir():
        tokenizer.save_pretrained(folder)
        return
    for path in tokenizer_files(pathlib.Path(source).expanduser()):
        shutil.copyfile(path, folder / path.name)
