"""Encoded sources in padded batches to decode, in NumPy.

Axes: `B` rows of a batch, `S` source tokens.

Lengths are rounded up to a few widths, so that a jitted program is compiled only a few times.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Sources to decode. The last rows of a batch that is not full are filler: one token, row id -1."""

    rows: np.ndarray  # [B] int32, index into the input
    tokens: np.ndarray  # [B, S] int32
    mask: np.ndarray  # [B, S] bool
    num_real: int


def bucket_lengths(max_length: int, smallest: int = 16) -> list[int]:
    """Widths that lengths are rounded up to: 16, 24, 32, 48, 64, ... and `max_length` last.

    One step between powers of two pads at most a third of a row and keeps the compilations few.
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
    pad_id: int,
) -> Iterator[Batch]:
    """Batches of similar length, shortest first, each [batch_size, one of `bucket_lengths`].

    Rows are sorted by length and cut into batches; only the first, the cheapest, may have filler rows:

        batch_size 2, lengths 3 30 5 9 20  ->  [3, filler]  [5, 9]  [20, 30], of widths 16, 16, 32

    Args:
      sequences: int32 [S] each, of 1 to `max_length` tokens, the last of them EOS.
      batch_size: rows of every batch.
      max_length: the widest batch.
      smallest: the narrowest batch.
      pad_id: the model's; fills rows after their end.

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
    # Where the number does not divide, the first batch, the narrowest, has the filler rows.
    missing = -len(order) % batch_size
    for start in range(-missing, len(order), batch_size):
        chosen = order[max(start, 0) : start + batch_size]
        width = widths[np.searchsorted(widths, lengths[chosen[-1]])]
        eos = sequences[chosen[0]][-1:]
        real = [sequences[row] for row in chosen]
        tokens, mask = pad_rows(real, batch_size, width, filler=eos, pad_id=pad_id)
        yield Batch(padded_row_ids(chosen, batch_size), tokens, mask, len(chosen))


def pad_rows(
    sequences: Sequence[np.ndarray],
    num_rows: int,
    width: int,
    *,
    filler: Sequence[int] = (),
    pad_id: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Pads sequences to one array with the model's `pad_id`; rows after the last of them hold `filler`.

    Returns tokens [B, S] int32 and mask [B, S] bool.
    """
    tokens = np.full((num_rows, width), pad_id, np.int32)
    mask = np.zeros((num_rows, width), bool)
    for row in range(num_rows):
        sequence = sequences[row] if row < len(sequences) else filler
        tokens[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return tokens, mask


def padded_row_ids(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Row ids [B] int32, -1 for filler rows."""
    ids = np.full(num_rows, -1, np.int32)
    ids[: len(rows)] = rows
    return ids
