"""Counts the n-grams of texts, for `drafters.ngram`: a recipe of `scripts/train.py`.

The texts are like the target's output: the right-hand column of pairs, which in the file of scripts/distill.py is
its output. Each text is its pieces and EOS, after as many start tokens as the longest context has places. The start
token is the tokenizer's padding token, as T5's is.
The keys of a configuration:

recipe                 'ngram'
tokenizer              folder or hub id, the target's
data.train             files, separated by commas: pairs, of which the target side counts, or one text per line
data.valid             such files, or none, whose cross-entropy is measured
order                  tokens of the longest n-gram; one file serves this and every lower order
min_counts             by order, how often an n-gram must occur to be kept
max_successors         K, the most successors that a context keeps, the most frequent first

Axes: N tokens of all texts, V vocabulary, C contexts, E successors of all contexts.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from spec_jax.drafters.ngram import (
    FILE_NAME,
    LevelCounts,
    NgramCounts,
    NgramDrafter,
    fingerprint,
    make_drafter,
    save_ngram,
)
from spec_jax.run.report import make_workdir, write_text
from spec_jax.text import data
from spec_jax.text.tokenizers import load_tokenizer, pieces
from spec_jax.training.recipe import files

_KEYS = {'recipe', 'tokenizer', 'data', 'order', 'min_counts', 'max_successors'}
_TEXTS = 4096  # encoded at a time, between two updates of the progress bar
_SCORED = 2**16  # tokens scored at a time


def train_ngram(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Counts, measures, and writes export/ (ngram.npz, config.json) and report.json in `workdir`.

    Returns:
      The report: texts, tokens, and by order contexts, successors and cross_entropy (nats per token, by file).

    Raises:
      FileNotFoundError: something that the configuration names is missing.
      OSError: the workdir cannot be written.
      ValueError: the configuration has a bad value, or a file no text.
    """
    _check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    start_id = _start_id(tokenizer, config.tokenizer)
    read = {name: read_texts(files(config.data[name])) for name in ('train', 'valid')}
    export = make_workdir(pathlib.Path(workdir) / 'export')
    train = _encode(tokenizer, [text for texts in read['train'].values() for text in texts], 'counting')
    counts = count_ngrams(
        train,
        config.order,
        len(tokenizer),
        config.min_counts,
        config.max_successors,
        fingerprint(pieces(tokenizer)),
        start_id,
    )
    save_ngram(export / FILE_NAME, counts)
    counted = dict(texts=len(train), tokens=sum(map(len, train)))
    about = counted | dict(
        kind='ngram', order=config.order, vocab_size=len(tokenizer), smoothing='Witten-Bell, interpolated',
        start_id=start_id, tokenizer=config.tokenizer, counted_from=list(read['train']),
        min_counts=list(config.min_counts), max_successors=config.max_successors,
    )  # fmt: skip
    _write_json(export / 'config.json', about)
    scores = [dict() for _ in counts.levels]
    for name, texts in read['valid'].items():
        valid = _encode(tokenizer, texts, f'measuring {pathlib.Path(name).name}')
        for k in range(config.order):
            scores[k][name] = cross_entropy(make_drafter(counts, k + 1), valid, start_id)
    report = counted | dict(
        orders=[
            dict(
                order=k + 1,
                contexts=len(level.lengths),
                successors=len(level.counts),
                cross_entropy=scores[k],
            )
            for k, level in enumerate(counts.levels)
        ],
        bytes=(export / FILE_NAME).stat().st_size,
        config=config.to_dict(),
    )
    _write_json(pathlib.Path(workdir) / 'report.json', report)
    return report


def describe(report: dict) -> str:
    """The report of `train_ngram`, a line for each order."""
    lines = [f'{report["tokens"]:,} tokens of {report["texts"]:,} texts, {report["bytes"]:,} bytes']
    for row in report['orders']:
        scores = ''.join(
            f'   {value:.3f} {pathlib.Path(name).name}' for name, value in row['cross_entropy'].items()
        )
        lines.append(
            f'order {row["order"]}: {row["contexts"]:,} contexts, {row["successors"]:,} successors{scores}'
        )
    return '\n'.join(lines)


def count_ngrams(
    texts: Sequence[np.ndarray],
    order: int,
    vocab_size: int,
    min_counts: Sequence[int],
    max_successors: int,
    fingerprint: int = 0,
    start_id: int = 0,
) -> NgramCounts:
    """Counts what follows every context of 0 to `order` - 1 tokens.

    Args:
      texts: token ids of each, EOS last where it is to be predicted too.
      order: tokens of the longest n-gram.
      vocab_size: V, pieces of the tokenizer.
      min_counts: by order, how often an n-gram must occur to be kept.
      max_successors: K, the most that a context of one token or more keeps; of equals, the smaller ids.
      fingerprint: of the pieces.
      start_id: put before each text.

    Raises:
      ValueError: there is no token, or an id is not below `vocab_size`.
    """
    start = np.full(order - 1, start_id)
    tokens = np.concatenate([start[:0], *(part for text in texts for part in (start, text))]).astype(np.int64)
    counted = np.concatenate([np.zeros(0, bool), *(np.arange(-len(start), len(text)) >= 0 for text in texts)])
    if not counted.any():
        raise ValueError('expected texts to count, got empty ones alone; check data.train')
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens.max() if tokens.min() >= 0 else tokens.min()
        raise ValueError(
            f"expected token ids from 0 to {vocab_size - 1}, got {wrong}; use the target's tokenizer"
        )
    levels = []
    context = np.zeros(len(tokens), np.int64)  # [N], the number of the k tokens before each, in sorted order
    contexts = np.zeros((1, 0), np.int64)  # [C, k], the tokens of each number
    for k in range(order):
        grams = context * vocab_size + tokens
        limit = max_successors if k else vocab_size
        levels.append(_count_level(grams[counted], contexts, vocab_size, min_counts[k], limit))
        # The next level's contexts are this level's n-grams, one place further on. Those that span the start tokens
        # and the text before get a number too, and are never counted.
        kinds, number = np.unique(grams, return_inverse=True)
        contexts = np.concatenate([contexts[kinds // vocab_size], kinds[:, None] % vocab_size], axis=1)
        context = np.roll(number, 1)
    return NgramCounts(tuple(levels), vocab_size, fingerprint)


def _count_level(grams, contexts, vocab_size, min_count, max_successors) -> LevelCounts:
    """A level from its n-grams, each `number of the context * V + token`."""
    kinds, counts = np.unique(grams, return_counts=True)
    numbers, first, row, num_kinds = np.unique(
        kinds // vocab_size, return_index=True, return_inverse=True, return_counts=True
    )
    denominators = np.bincount(row, counts).astype(np.int64) + num_kinds
    order = np.lexsort((kinds, -counts, row))  # the most frequent first within a context
    rank = np.arange(len(kinds)) - first[row]
    kept = order[(counts[order] >= min_count) & (rank < max_successors)]
    lengths = np.bincount(row[kept], minlength=len(numbers))
    some = lengths > 0
    if not contexts.shape[1]:
        some[:] = True  # the empty context stays
    return LevelCounts(
        contexts[numbers[some]], denominators[some], lengths[some], kinds[kept] % vocab_size, counts[kept]
    )


def cross_entropy(drafter: NgramDrafter, texts: Sequence[np.ndarray], start_id: int = 0) -> float:
    """Nats per token of texts, EOS included, under the q of a drafter of `make_drafter`."""
    places = drafter.order - 1
    contexts = [
        np.lib.stride_tricks.sliding_window_view(
            np.pad(text, (places, 0), constant_values=start_id), places + 1
        )
        for text in texts
    ]
    grams = np.concatenate(contexts)  # [N, order]
    parts = np.array_split(grams, -(-len(grams) // _SCORED))
    return float(
        -np.mean(np.concatenate([np.log(drafter.prob_of(part[:, :-1], part[:, -1])) for part in parts]))
    )


def read_texts(paths: Sequence[str]) -> dict[str, list[str]]:
    """The texts of each file that are not empty: the target side of pairs, the lines of plain text.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, or has no text.
    """
    read = {}
    for path in paths:
        examples = data.read_examples(path)
        texts = [one.source if one.target is None else one.target for one in examples]
        read[path] = [text for text in texts if text.strip()]
        if not read[path]:
            raise ValueError(f'{path}: expected texts, got empty lines alone; check where it comes from')
    return read


def _encode(tokenizer, texts: list[str], doing: str) -> list[np.ndarray]:
    encoded = []
    with tqdm(total=len(texts), unit=' texts', desc=doing) as bar:
        for first in range(0, len(texts), _TEXTS):
            some = texts[first : first + _TEXTS]
            encoded += data.encode_sources(tokenizer, some, max_source_length=2**31)[0]
            bar.update(len(some))
    return encoded


def _start_id(tokenizer, source: str) -> int:
    """The token that texts start from: the tokenizer's padding, as T5's decoder has it."""
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f'{source}: expected a tokenizer with a padding token, which texts start from; got none: add pad_token '
            'to its tokenizer_config.json'
        )
    return tokenizer.pad_token_id


def _check(config: ConfigDict) -> None:
    """Raises ValueError for a key that is missing or unknown, or a value out of range."""
    if wrong := sorted(_KEYS ^ set(config)):
        raise ValueError(
            f'config: expected the keys {", ".join(sorted(_KEYS))}; {wrong[0]!r} is missing or unknown'
        )
    for name in ('order', 'max_successors'):
        if config[name] < 1:
            raise ValueError(f'{name}: expected an integer >= 1, got {config[name]}')
    if len(config.min_counts) != config.order or min(config.min_counts) < 1:
        raise ValueError(
            f'min_counts: expected {config.order} integers >= 1, one an order, got {tuple(config.min_counts)}; '
            'give them by --config.min_counts="(1, 2, 3)"'
        )
    if not files(config.data.train):
        raise ValueError(
            'data.train: expected files of texts, got none; name one by --config.data.train=FILE'
        )
    if not config.tokenizer:
        raise ValueError(
            "tokenizer: expected the target's folder or hub id, got none; name it by --config.tokenizer=DIR"
        )


def _write_json(path: pathlib.Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + '\n')
