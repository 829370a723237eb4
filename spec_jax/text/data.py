"""Text from files to token ids, in NumPy.

Axes: `S` source tokens, `T` target tokens.

One line of a file is one example, in every format, so that line n of an output belongs to line n of an input.
"""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMATS = ('text', 'tsv', 'jsonl')
_MISSING = object()


@dataclass(frozen=True)
class Example:
    """One source text and, where the file has one, its reference."""

    source: str
    target: str | None = None


@dataclass(frozen=True)
class Pairs:
    """Encoded training pairs, each sequence int32 and ending in EOS."""

    sources: list[np.ndarray]  # each [S]
    targets: list[np.ndarray]  # each [T]
    num_dropped: int  # pairs left out for their length

    def __len__(self) -> int:
        return len(self.sources)


def read_examples(
    path: str | Path,
    format: str | None = None,
    *,
    source_key: str = 'source',
    target_key: str = 'target',
) -> list[Example]:
    """Reads a file of UTF-8 text, gzipped or not; `-` is the standard input.

    Args:
      path: `.tsv` is source, tab, target (or source alone); `.jsonl` one object per line; anything else one
        source per line. A further `.gz` is unpacked. Empty lines are kept, as empty sources.
      format: 'text', 'tsv' or 'jsonl', in place of the suffix.
      source_key: the key of the source in a jsonl object; a dot selects a nested key, as in 'translation.en'.
      target_key: likewise for the target; an object without it is a source alone.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the path is a folder, or the file is empty, damaged, not UTF-8, or has an ill-formed line.
    """
    name = str(path)
    if format is None:
        suffix = Path(name.removesuffix('.gz')).suffix
        format = suffix[1:] if suffix in ('.tsv', '.jsonl') else 'text'
    if format not in FORMATS:
        raise ValueError(f'expected a format of {", ".join(FORMATS)}; got {format!r}: name one of them')
    lines = _read_lines(name)
    if format == 'text':
        return [Example(line) for line in lines]
    places = [f'{name}, line {n}' for n in range(1, len(lines) + 1)]
    if format == 'tsv':
        return [_parse_tsv(*line) for line in zip(lines, places, strict=True)]
    return [_parse_jsonl(*line, source_key, target_key) for line in zip(lines, places, strict=True)]


def add_targets(examples: Sequence[Example], path: str | Path, sources: str | Path) -> list[Example]:
    """Gives line n of a second file, UTF-8 text, gzipped or not, to source n: parallel text.

    Args:
      examples: sources alone.
      path: of the targets.
      sources: the file that the examples came from, for error messages.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `examples` have targets, the files differ in length, or as of `read_examples`.
    """
    if any(example.target is not None for example in examples):
        raise ValueError(
            f'{sources}: expected sources alone beside {path}; got targets too: name one of them'
        )
    lines = _read_lines(str(path))
    if len(lines) != len(examples):
        raise ValueError(
            f'{path}: expected {len(examples)} lines, one for each of {sources}; got {len(lines)}: check that the '
            'two belong together'
        )
    return [Example(example.source, line) for example, line in zip(examples, lines, strict=True)]


def _read_lines(name: str) -> list[str]:
    """The lines of a file, split at line feeds alone: `splitlines` would also split at U+2028 and others."""
    if name == '-':
        raw, name = sys.stdin.buffer.read(), 'standard input'
    elif Path(name).is_dir():
        raise ValueError(f'expected a file; got the folder {name}: name a file in it')
    elif not Path(name).exists():
        raise FileNotFoundError(f'expected a text file; got {name}, which does not exist: check the path')
    else:
        raw = Path(name).read_bytes()
    if name.endswith('.gz'):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f'{name}: expected gzip data; got damage ({error}): copy it again') from error
    if not raw:
        raise ValueError(f'{name}: expected at least one line; got an empty file: check where it comes from')
    try:
        text = raw.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        line = raw.count(b'\n', 0, error.start) + 1
        raise ValueError(f'{name}, line {line}: expected UTF-8; got other bytes: save it as UTF-8') from error
    return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]


def _parse_tsv(line: str, where: str) -> Example:
    columns = line.split('\t')
    if len(columns) > 2:
        raise ValueError(f'{where}: expected source, tab, target; got {len(columns)} columns: keep two')
    return Example(*columns)


def _parse_jsonl(line: str, where: str, source_key: str, target_key: str) -> Example:
    if not line.strip():
        return Example('')
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f'{where}: expected a JSON object; got no JSON ({error}): mend it') from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f'{where}: expected a JSON object; got a {kind}: write {{"{source_key}": "..."}}')
    return example_from(record, where, source_key, target_key)


def example_from(record: dict, where: str, source_key: str, target_key: str) -> Example:
    """The example in a parsed record; a missing or null target gives None.

    Args:
      record: of a line or a row, parsed.
      where: the beginning of an error message.
      source_key, target_key: as for `read_examples`.

    Raises:
      ValueError: it has no source, or a source or target that is not text.
    """
    source, target = _look_up(record, source_key), _look_up(record, target_key)
    if source is _MISSING:
        keys = ', '.join(map(repr, _all_keys(record))) or 'none'
        raise ValueError(f'{where}: expected the key {source_key!r}; got {keys}: choose one by source_key')
    target = None if target is _MISSING else target
    for key, value in ((source_key, source), (target_key, '' if target is None else target)):
        if not isinstance(value, str):
            raise ValueError(f'{where}: expected text for {key!r}; got {value!r:.40}: write a string')
    return Example(source, target)


def _look_up(record: dict, key: str):
    """The value of a key, or of a nested 'outer.inner'; `_MISSING` where there is none."""
    if key in record:
        return record[key]
    outer, _, inner = key.partition('.')
    return _look_up(record[outer], inner) if inner and isinstance(record.get(outer), dict) else _MISSING


def _all_keys(record: dict, outer: str = '') -> Iterator[str]:
    """Keys as `_look_up` takes them."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _all_keys(value, f'{outer}{key}.')
        else:
            yield f'{outer}{key}'


def encode_sources(
    tokenizer,
    texts: Sequence[str],
    *,
    prefix: str = '',
    max_source_length: int,
    on_long: str = 'truncate',
) -> tuple[list[np.ndarray], int]:
    """Encodes sources, each ending in EOS; an empty text becomes EOS alone, without the prefix.

    Args:
      tokenizer: a transformers tokenizer, or any object that has `eos_token_id` and returns `input_ids` when called
        with a list of texts.
      texts: the sources.
      prefix: put before each text, as T5 needs it: 'translate English to German: '.
      max_source_length: the most tokens of a source, prefix and EOS included.
      on_long: 'truncate' cuts longer sources and ends them in EOS, 'refuse' raises.

    Returns:
      One int32 array [S] for each text, and how many were truncated.

    Raises:
      ValueError: `on_long` is neither, the limit is below 2, or a source is longer and `on_long` is 'refuse'.
    """
    if on_long not in ('truncate', 'refuse'):
        raise ValueError(f"expected on_long 'truncate' or 'refuse'; got {on_long!r}: name one of them")
    if max_source_length < 2:
        raise ValueError(f'expected max_source_length of 2 or more; got {max_source_length}: raise it')
    eos = tokenizer.eos_token_id
    sequences = _encode(tokenizer, [prefix + text if text.strip() else '' for text in texts])
    long = [row for row, sequence in enumerate(sequences) if len(sequence) > max_source_length]
    if long and on_long == 'refuse':
        raise ValueError(
            f'expected sources of at most {max_source_length} tokens; got {len(long)} longer, first in line '
            f'{long[0] + 1} with {len(sequences[long[0]])}: raise max_source_length or truncate them'
        )
    for row in long:
        sequences[row] = np.append(sequences[row][: max_source_length - 1], np.int32(eos))
    return sequences, len(long)


def encode_pairs(
    tokenizer, examples: Sequence[Example], max_source: int, max_target: int, *, prefix: str = ''
) -> Pairs:
    """Encodes training pairs and drops those over a limit: cut sentences would teach the model to stop early.

    Args:
      tokenizer: as for `encode_sources`.
      examples: pairs of texts.
      max_source: the most tokens of a source, prefix and EOS included.
      max_target: the most tokens of a target, EOS included.
      prefix: put before each source.

    Raises:
      ValueError: an example has no target, or no pair is left.
    """
    for n, example in enumerate(examples, 1):
        if example.target is None:
            raise ValueError(f'example {n}: expected a pair; got a source alone: add its target')
    sources = _encode(tokenizer, [prefix + example.source for example in examples])
    targets = _encode(tokenizer, [example.target for example in examples])
    pairs = zip(sources, targets, strict=True)
    kept = [pair for pair in pairs if len(pair[0]) <= max_source and len(pair[1]) <= max_target]
    if not kept:
        raise ValueError(
            f'expected pairs of at most {max_source} and {max_target} tokens; got none in {len(examples)}: '
            'raise the limits or check the file'
        )
    sources, targets = zip(*kept, strict=True)
    return Pairs(list(sources), list(targets), num_dropped=len(examples) - len(kept))


def _encode(tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text, int32, ending in EOS whether or not the tokenizer adds it."""
    if not texts:
        return []
    eos = tokenizer.eos_token_id
    # verbose=False: transformers would warn of its own length limit, which does not apply here.
    encoded = tokenizer(list(texts), verbose=False)['input_ids']
    return [np.array(ids if ids and ids[-1] == eos else [*ids, eos], np.int32) for ids in encoded]
