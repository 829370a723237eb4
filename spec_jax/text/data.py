"""Text from files to padded batches, in NumPy.

Axes: `B` rows of a batch, `S` source tokens, `T` target tokens.

One line of a file is one example, in every format, so that line n of an output belongs to line n of an input.
Lengths are rounded up to a few widths, so that a jitted program is compiled a few times and no more.
"""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMATS = ('text', 'tsv', 'jsonl')
PAD_ID = 0  # T5's padding, which is also the decoder's start token
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


class Batch(NamedTuple):
    """Sources to decode. The last rows of a batch that is not full are filler: one token, row id -1."""

    rows: np.ndarray  # [B] int32, index into the input
    tokens: np.ndarray  # [B, S] int32
    mask: np.ndarray  # [B, S] bool
    num_real: int


class TrainingBatch(NamedTuple):
    """Pairs for teacher forcing. Filler rows have row id -1, a source of one token and no label."""

    rows: np.ndarray  # [B] int32, index into the pairs
    source: np.ndarray  # [B, S] int32
    source_mask: np.ndarray  # [B, S] bool
    decoder_input: np.ndarray  # [B, T] int32, the labels shifted right behind the start token
    labels: np.ndarray  # [B, T] int32
    label_mask: np.ndarray  # [B, T] bool, EOS included


def read_examples(
    path: str | Path,
    format: str | None = None,
    *,
    source_key: str = 'source',
    target_key: str = 'target',
) -> list[Example]:
    """Reads a file of UTF-8 text, gzipped or not; `-` is the standard input.

    Args:
      path: `.tsv` is source, tab, target (or source alone); `.jsonl` one object a line; anything else one
        source a line. A further `.gz` is unpacked. Empty lines are kept, as empty sources.
      format: 'text', 'tsv' or 'jsonl', where the suffix does not say it.
      source_key: the key of the source in a jsonl object; dots lead inwards, as in 'translation.en'.
      target_key: the key of the target, as well; an object without it is a source alone.

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
      sources: the file that the examples came from, for the error's sake.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `examples` have targets, the files differ in length, or this one is none (`read_examples`).
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
    """The lines of a file, split at line feeds alone: `splitlines` would split at U+2028 and its like too."""
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
    """The example in an object of keys; a target that is missing or null is none.

    Args:
      record: of a line or a row, parsed.
      where: what an error begins with.
      source_key, target_key: as for `read_examples`.

    Raises:
      ValueError: it has no source, or one or a target that is not text.
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
    """The value of a key, or of 'outer.inner' within; `_MISSING` where there is none."""
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
      tokenizer: a transformers tokenizer, or what acts like one: it has `eos_token_id`, and returns
        `input_ids` when called with a list of texts.
      texts: the sources.
      prefix: put before each text, as T5 wants it: 'translate English to German: '.
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
    """Encodes training pairs, without those over a limit: half a sentence would teach to stop early.

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
    # verbose=False: transformers would warn of its own length limit, which is not ours.
    encoded = tokenizer(list(texts), verbose=False)['input_ids']
    return [np.array(ids if ids and ids[-1] == eos else [*ids, eos], np.int32) for ids in encoded]


def bucket_lengths(max_length: int, smallest: int = 16) -> list[int]:
    """Widths that lengths are rounded up to: 16, 24, 32, 48, 64, ... and `max_length` last.

    One step between powers of two wastes a third of a row at most and keeps the compilations few.
    """
    if max_length < 1 or smallest < 2:
        raise ValueError(f'expected max_length >= 1, smallest >= 2; got {max_length}, {smallest}: raise them')
    widths, power = [], smallest
    while power < max_length:
        widths += [power, power + power // 2]
        power *= 2
    return [width for width in widths if width < max_length] + [max_length]


def bucket_batches(
    sequences: Sequence[np.ndarray],
    batch_size: int,
    max_length: int,
    *,
    smallest: int = 16,
    pad_id: int = PAD_ID,
) -> Iterator[Batch]:
    """Batches of similar length, shortest first, each [batch_size, one of `bucket_lengths`].

    Rows are sorted by length and cut into batches; only the first, the cheapest, may have filler rows:

        batch_size 2, lengths 3 30 5 9 20  ->  [3, filler]  [5, 9]  [20, 30], of widths 16, 16, 32

    Args:
      sequences: int32 [S] each, of 1 to `max_length` tokens, the last of them EOS.
      batch_size: rows of every batch.
      max_length: the widest batch.
      smallest: the narrowest batch.
      pad_id: fills up rows.

    Raises:
      ValueError: a sequence is empty or longer than `max_length`, or `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f'expected batch_size of 1 or more; got {batch_size}: raise it')
    lengths = np.array([len(sequence) for sequence in sequences], int)
    unfit = np.flatnonzero((lengths < 1) | (lengths > max_length))
    if len(unfit):
        where = f'{lengths[unfit[0]]} in row {unfit[0]}'
        raise ValueError(f'expected sequences of 1 to {max_length} tokens; got {where}: cut them')
    return _bucket_batches(sequences, lengths, batch_size, bucket_lengths(max_length, smallest), pad_id)


def _bucket_batches(sequences, lengths, batch_size, widths, pad_id) -> Iterator[Batch]:
    order = np.argsort(lengths, kind='stable')
    # The first batch lacks rows where the number does not divide: it is the narrowest.
    missing = -len(order) % batch_size
    for start in range(-missing, len(order), batch_size):
        chosen = order[max(start, 0) : start + batch_size]
        width = widths[np.searchsorted(widths, lengths[chosen[-1]])]
        eos = sequences[chosen[0]][-1:]
        real = [sequences[row] for row in chosen]
        tokens, mask = pad_rows(real, batch_size, width, filler=eos, pad_id=pad_id)
        yield Batch(_row_ids(chosen, batch_size), tokens, mask, len(chosen))


def pad_rows(
    sequences: Sequence[np.ndarray],
    num_rows: int,
    width: int,
    *,
    filler: Sequence[int] = (),
    pad_id: int = PAD_ID,
) -> tuple[np.ndarray, np.ndarray]:
    """Pads sequences to one array; rows beyond them hold `filler`.

    Returns tokens [B, S] int32 and mask [B, S] bool.
    """
    tokens = np.full((num_rows, width), pad_id, np.int32)
    mask = np.zeros((num_rows, width), bool)
    for row in range(num_rows):
        sequence = sequences[row] if row < len(sequences) else filler
        tokens[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return tokens, mask


def _row_ids(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Row ids [B] int32, -1 for filler rows."""
    ids = np.full(num_rows, -1, np.int32)
    ids[: len(rows)] = rows
    return ids


class Bucket(NamedTuple):
    """Pairs that are trained on in one shape, [batch_size, width] for source and target."""

    width: int
    batch_size: int
    rows: np.ndarray  # [N] int, index into the pairs

    @property
    def num_batches(self) -> int:
        return -(-len(self.rows) // self.batch_size)


def training_widths(lengths: np.ndarray, num_widths: int = 8) -> list[int]:
    """The widths, multiples of 4, that pad these lengths least, by dynamic programming; at most `num_widths`.

    Most sentences are short and a few are long: of everyday sentences mixed with manuals, 41% of the tokens
    are padding with the widths 16, 24, 32, 48, ... and 24% with these.
    """
    edges = np.arange(0, max(lengths) + 4, 4)  # [E]
    # tokens[i, j] is what a bucket of width edges[j] costs when the next narrower one is edges[i].
    fitting = np.searchsorted(np.sort(lengths), edges, side='right')
    tokens = (fitting[None, :] - fitting[:, None]) * edges.astype(float)  # [E, E]
    tokens[np.tril_indices(len(edges), -1)] = np.inf
    least, choices = tokens[0], []
    for _ in range(num_widths - 1):
        total = least[:, None] + tokens
        least, choices = total.min(axis=0), [total.argmin(axis=0), *choices]
    chosen = [len(edges) - 1]
    for previous in choices:
        chosen.append(previous[chosen[-1]])
    return sorted({int(edges[edge]) for edge in chosen if edge > 0})


def training_buckets(pairs: Pairs, tokens_per_batch: int, num_widths: int = 8) -> list[Bucket]:
    """Sorts pairs into at most `num_widths` buckets by the longer of their sides, narrowest first."""
    if tokens_per_batch < 1 or num_widths < 1:
        raise ValueError(
            f'expected tokens_per_batch, num_widths >= 1; got {tokens_per_batch}, {num_widths}: raise them'
        )
    both = zip(pairs.sources, pairs.targets, strict=True)
    lengths = np.array([max(len(source), len(target)) for source, target in both])
    widths = training_widths(lengths, num_widths)
    bucket_of = np.searchsorted(widths, lengths)
    return [
        Bucket(widths[n], max(1, tokens_per_batch // widths[n]), np.flatnonzero(bucket_of == n))
        for n in np.unique(bucket_of)
    ]


def steps_per_epoch(pairs: Pairs, tokens_per_batch: int, num_widths: int = 8) -> int:
    """Number of batches in which `training_batches` shows every pair once."""
    return sum(bucket.num_batches for bucket in training_buckets(pairs, tokens_per_batch, num_widths))


def training_batches(
    pairs: Pairs,
    tokens_per_batch: int,
    seed: int,
    *,
    start_step: int = 0,
    num_epochs: int | None = None,
    num_widths: int = 8,
) -> Iterator[TrainingBatch]:
    """Batches for teacher forcing, every pair once an epoch, in an order given by (seed, epoch).

    Started at step N, it goes on as an uninterrupted run would from its batch N.

    Args:
      pairs: from `encode_pairs`.
      tokens_per_batch: rows times width of a batch, source and target each; a batch has one row at least.
      seed: chooses the order.
      start_step: batches of the whole run to leave out; they cost nothing.
      num_epochs: epochs of the whole run; None goes on for ever.
      num_widths: the most shapes [B, width] that a program is compiled for.

    Raises:
      ValueError: `tokens_per_batch` or `num_widths` is below 1, or `start_step` below 0.
    """
    if start_step < 0:
        raise ValueError(f'expected start_step of 0 or more; got {start_step}: count the batches seen')
    buckets = training_buckets(pairs, tokens_per_batch, num_widths)
    return _training_batches(pairs, buckets, seed, start_step, num_epochs)


def _training_batches(pairs, buckets, seed, start_step, num_epochs) -> Iterator[TrainingBatch]:
    epoch, skipped = divmod(start_step, sum(bucket.num_batches for bucket in buckets))
    while num_epochs is None or epoch < num_epochs:
        for bucket, rows in _shuffled_epoch(buckets, seed, epoch)[skipped:]:
            yield _training_batch(pairs, rows, bucket)
        epoch, skipped = epoch + 1, 0


def _shuffled_epoch(buckets: list[Bucket], seed: int, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
    """The batches of one epoch, in order. Those of a bucket are equally full: none holds a mere handful."""
    random = np.random.default_rng((seed, epoch))
    batches = []
    for bucket in buckets:
        shuffled = random.permutation(bucket.rows)
        batches += [(bucket, rows) for rows in np.array_split(shuffled, bucket.num_batches)]
    return [batches[n] for n in random.permutation(len(batches))]


def _training_batch(pairs: Pairs, rows: np.ndarray, bucket: Bucket) -> TrainingBatch:
    filler = pairs.sources[rows[0]][-1:]  # EOS alone: attention to nothing at all is NaN
    shape = bucket.batch_size, bucket.width
    source, source_mask = pad_rows([pairs.sources[row] for row in rows], *shape, filler=filler)
    labels, label_mask = pad_rows([pairs.targets[row] for row in rows], *shape)
    decoder_input = np.roll(labels, 1, axis=1)
    decoder_input[:, 0] = PAD_ID
    row_ids = _row_ids(rows, bucket.batch_size)
    return TrainingBatch(row_ids, source, source_mask, decoder_input, labels, label_mask)
