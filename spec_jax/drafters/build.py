"""Drafters by the name that a config gives them, and drafters from a user's file."""

from __future__ import annotations

import importlib.util
import pathlib
import zlib
from collections.abc import Callable
from functools import partial

import jax
from ml_collections import ConfigDict

from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter, check_vocabularies
from spec_jax.drafters.ngram import NgramDrafter, load_ngram
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.models.base import Model
from spec_jax.models.load import load_model
from spec_jax.runtime.backend import row_cost
from spec_jax.text.tokenizers import load_tokenizer, pieces

_MEMBERS = 'shape', 'init', 'propose', 'update'
_FILES = dict(model='path', unigram='counts', bigram='counts', ngram='counts')  # PATH of KIND=PATH


def build_drafter(config: ConfigDict, target: Model, tokenizer, dtype) -> Drafter | None:
    """The drafter that a config's `draft` section describes; None for kind 'none'.

    Args:
      config: `kind`, one of `KINDS` or FILE.py:NAME, and what that kind needs:
        'model' the `path` of a folder or a hub id;
        'unigram', 'bigram' and 'ngram' the `counts` of `scripts/train.py`, 'ngram' the `order` as well;
        'prompt_lookup' `max_ngram` and `min_ngram`;
        'none' nothing;
        FILE.py:NAME a function (config, target, tokenizer) -> Drafter in that file, which is executed.
      target: the model whose tokens are drafted.
      tokenizer: the target's.
      dtype: of the parameters and activations of a draft that is a model.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: for an unknown kind, a draft whose vocabulary is not the target's, or a file without a drafter.
    """
    if ':' in config.kind:
        return _build_from_file(config, target, tokenizer)
    if config.kind not in _BUILDERS:
        known = ', '.join(_BUILDERS)
        raise ValueError(f'draft.kind: expected one of {known}, or FILE.py:NAME; got {config.kind!r}')
    return _BUILDERS[config.kind](config, target, tokenizer, dtype)


def build_named(entry: str, config: ConfigDict, target: Model, tokenizer, dtype) -> Drafter | None:
    """The drafter of an entry in a list of drafts: a kind, KIND=PATH, or FILE.py:NAME.

    Args:
      entry: PATH is the one file or folder that the kind needs.
      config: the `draft` section, for all other settings; see `build_drafter` for the other arguments and errors.
    """
    kind, given, path = entry.partition('=')
    overrides = dict(kind=kind)
    if given:
        if kind not in _FILES:
            raise ValueError(
                f'drafts: expected =PATH after one of {", ".join(_FILES)}; got {entry!r}: leave it out'
            )
        overrides[_FILES[kind]] = path
    return build_drafter(ConfigDict(config.to_dict() | overrides), target, tokenizer, dtype)


def _none(config, target, tokenizer, dtype) -> None:
    return None


def _model(config, target, tokenizer, dtype) -> ModelDrafter:
    check_vocabularies(pieces(tokenizer), pieces(load_tokenizer(config.path)))
    return ModelDrafter(load_model(config.path, dtype))


def _ngram(order: int | None, config, target, tokenizer, dtype) -> Drafter:
    order = config.order if order is None else order
    drafter = load_ngram(config.counts, order, target.spec.vocab_size, pieces(tokenizer))
    return Thrifty(drafter, NgramDrafter.confidence) if row_cost(2) else drafter


def _prompt_lookup(config, target, tokenizer, dtype) -> Drafter:
    drafter = PromptLookup(config.max_ngram, config.min_ngram)
    return Thrifty(drafter) if row_cost(2) else drafter


_BUILDERS: dict[str, Callable[..., Drafter | None]] = {
    'model': _model,
    'unigram': partial(_ngram, 1),
    'bigram': partial(_ngram, 2),
    'ngram': partial(_ngram, None),
    'prompt_lookup': _prompt_lookup,
    'none': _none,
}
KINDS = tuple(_BUILDERS)


def file_checksum(entry: str) -> int:
    """CRC-32 of the file in an entry FILE.py:NAME, which changes with an edit of it; 0 for other entries."""
    if ':' not in entry.partition('=')[0]:
        return 0
    return zlib.crc32(pathlib.Path(entry.rpartition(':')[0]).read_bytes())


def _build_from_file(config, target, tokenizer) -> Drafter:
    """The drafter of FILE.py:NAME."""
    file, _, name = config.kind.rpartition(':')
    path = pathlib.Path(file)
    if path.suffix != '.py' or not path.is_file():
        raise FileNotFoundError(
            f'draft.kind: expected FILE.py:NAME with a Python file, got {file!r}, which is not one'
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file can raise anything; the message names the file
        raise ValueError(f'{file}: {type(error).__name__} as the file was run: {error}') from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f'draft.kind: expected a function {name!r} in {file}, found none')
    drafter = make(config, target, tokenizer)
    if missing := [member for member in _MEMBERS if not callable(getattr(drafter, member, None))]:
        raise ValueError(
            f'{config.kind}: expected a drafter with {", ".join(_MEMBERS)}; got {type(drafter).__name__} '
            f'without {missing[0]!r}'
        )
    if strange := [leaf for leaf in jax.tree.leaves(drafter) if not hasattr(leaf, 'dtype')]:
        raise ValueError(
            f'{config.kind}: expected a drafter that is a pytree of arrays, got {type(strange[0]).__name__} within '
            'it; make its class a flax.struct.dataclass, and what is no array a field with pytree_node=False'
        )
    return drafter
