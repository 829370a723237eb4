"""Encoded pairs in padded batches to train on, in NumPy.

Axes: `B` rows of a batch, `S` source tokens, `T` target tokens, `E` edges of widths.

Widths are chosen so that a program is compiled only a few times and as few tokens as possible are padding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spec_jax.text.batches import pad_rows, padded_row_ids
from spec_jax.text.data import Pairs


class TrainingBatch(NamedTuple):
    """Pairs for teacher forcing. Filler rows have row id -1, a source of one token and no label."""

    rows: np.ndarray  # [B] int32, index into the pairs
    source: np.ndarray  # [B, S] int32
    source_mask: np.ndarray  # [B, S] bool
    decoder_input: np.ndarray  # [B, T] int32, the labels shifted right after the start token
    labels: np.ndarray  # [B, T] int32
    label_mask: np.ndarray  # [B, T] bool, EOS included


class Bucket(NamedTuple):
    """Pairs that are trained on in one shape, [batch_size, width] for source and target."""

    width: int
    batch_size: int
    rows: np.ndarray  # [N] int, index into the pairs

    @property
    def num_batches(self) -> int:
        return -(-len(self.rows) // self.batch_size)


def training_widths(lengths: np.ndarray, num_widths: int = 8) -> list[int]:
    """The widths, multiples of 4, with the least padding, by dynamic programming; at most `num_widths`.

    Most sentences are short and a few are long: of everyday sentences mixed with manuals, 41% of the tokens
    are padding with the widths 16, 24, 32, 48, ... and 24% with these.
    """
    edges = np.arange(0, max(lengths) + 4, 4)  # [E]
    # tokens[i, j]: tokens, padding included, of a bucket of width edges[j] when the next narrower is edges[i].
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
    """Number of batches of `training_batches` in an epoch."""
    return sum(bucket.num_batches for bucket in training_buckets(pairs, tokens_per_batch, num_widths))


def training_batches(
    pairs: Pairs,
    tokens_per_batch: int,
    seed: int,
    *,
    pad_id: int,
    start_id: int,
    start_step: int = 0,
    num_epochs: int | None = None,
    num_widths: int = 8,
) -> Iterator[TrainingBatch]:
    """Batches for teacher forcing, every pair once per epoch, in an order given by (seed, epoch).

    Started at step N, it continues as an uninterrupted run would from its batch N.

    Args:
      pairs: from `encode_pairs`.
      tokens_per_batch: rows times width of a batch, source and target each; a batch has at least one row.
      seed: of the order.
      pad_id: the model's; fills rows after their end.
      start_id: the model's; precedes the labels in the decoder's input.
      start_step: batches at the beginning to skip, without building them.
      num_epochs: epochs of the whole run; None for no end.
      num_widths: the most shapes [B, width] that a program is compiled for.

    Raises:
      ValueError: `tokens_per_batch` or `num_widths` is below 1, or `start_step` below 0.
    """
    if start_step < 0:
        raise ValueError(f'expected start_step of 0 or more; got {start_step}: count the batches seen')
    buckets = training_buckets(pairs, tokens_per_batch, num_widths)
    ids = dict(pad_id=pad_id, start_id=start_id)
    return _training_batches(pairs, buckets, seed, start_step, num_epochs, ids)


def _training_batches(pairs, buckets, seed, start_step, num_epochs, ids) -> Iterator[TrainingBatch]:
    epoch, skipped = divmod(start_step, sum(bucket.num_batches for bucket in buckets))
    while num_epochs is None or epoch < num_epochs:
        for bucket, rows in _shuffled_epoch(buckets, seed, epoch)[skipped:]:
            yield _training_batch(pairs, rows, bucket, **ids)
        epoch, skipped = epoch + 1, 0


def _shuffled_epoch(buckets: list[Bucket], seed: int, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
    """The batches of one epoch, in order. Those of a bucket have equally many rows, to within one."""
    random = np.random.default_rng((seed, epoch))
    batches = []
    for bucket in buckets:
        shuffled = random.permutation(bucket.rows)
        batches += [(bucket, rows) for rows in np.array_split(shuffled, bucket.num_batches)]
    return [batches[n] for n in random.permutation(len(batches))]


def _training_batch(
    pairs: Pairs, rows: np.ndarray, bucket: Bucket, *, pad_id: int, start_id: int
) -> TrainingBatch:
    filler = pairs.sources[rows[0]][-1:]  # EOS alone: with no token to attend to, attention is NaN
    shape = bucket.batch_size, bucket.width
    sources, targets = ([side[row] for row in rows] for side in (pairs.sources, pairs.targets))
    source, source_mask = pad_rows(sources, *shape, filler=filler, pad_id=pad_id)
    labels, label_mask = pad_rows(targets, *shape, pad_id=pad_id)
    decoder_input = np.roll(labels, 1, axis=1)
    decoder_input[:, 0] = start_id
    row_ids = padded_row_ids(rows, bucket.batch_size)
    return TrainingBatch(row_ids, source, source_mask, decoder_input, labels, label_mask)
