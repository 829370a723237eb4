"""Batches to decode. Axes: `B` rows, `S` source tokens."""

import numpy as np
import pytest

from spec_jax.text.batches import bucket_batches, bucket_lengths

EOS = 1


def sequences(*lengths):
    """One array for each length: 50, 51, ... and EOS last."""
    return [np.append(np.arange(50, 49 + length), EOS).astype(np.int32) for length in lengths]


@pytest.mark.parametrize(
    'max_length, smallest, expected',
    [
        (128, 16, [16, 24, 32, 48, 64, 96, 128]),
        (100, 16, [16, 24, 32, 48, 64, 96, 100]),
        (24, 16, [16, 24]),
        (16, 16, [16]),
        (5, 16, [5]),
        (12, 4, [4, 6, 8, 12]),
    ],
)
def test_bucket_lengths(max_length, smallest, expected):
    assert bucket_lengths(max_length, smallest) == expected


def test_bucket_lengths_refuses():
    with pytest.raises(ValueError, match='expected max_length >= 1, smallest >= 2; got 0, 16'):
        bucket_lengths(0)


def test_batches_are_sorted_padded_and_the_first_is_filled_up():
    batches = list(bucket_batches(sequences(3, 6, 2, 4, 5), 2, 6, smallest=4, pad_id=9))
    assert [batch.rows.tolist() for batch in batches] == [[2, -1], [0, 3], [4, 1]]
    assert [batch.num_real for batch in batches] == [1, 2, 2]
    assert [batch.tokens.tolist() for batch in batches] == [
        [[50, EOS, 9, 9], [EOS, 9, 9, 9]],
        [[50, 51, EOS, 9], [50, 51, 52, EOS]],
        [[50, 51, 52, 53, EOS, 9], [50, 51, 52, 53, 54, EOS]],
    ]
    assert [batch.mask.sum(axis=1).tolist() for batch in batches] == [[2, 1], [3, 4], [5, 6]]
    assert all(batch.mask[:, 0].all() for batch in batches)
    assert batches[0].tokens.dtype == np.int32 and batches[0].mask.dtype == bool


@pytest.mark.parametrize('batch_size', [1, 3, 8, 64])
def test_every_row_is_in_one_batch_and_shapes_are_few(batch_size):
    inputs = sequences(*np.random.default_rng(0).integers(1, 129, 50))
    batches = list(bucket_batches(inputs, batch_size, 128, pad_id=0))
    rows = np.concatenate([batch.rows for batch in batches])
    assert sorted(rows[rows >= 0]) == list(range(50))
    assert (rows < 0).sum() == -50 % batch_size
    assert {batch.tokens.shape for batch in batches} <= {(batch_size, w) for w in bucket_lengths(128)}
    for batch in batches:
        for row, tokens, mask in zip(batch.rows, batch.tokens, batch.mask, strict=True):
            np.testing.assert_array_equal(tokens[mask], inputs[row] if row >= 0 else [EOS])


def test_bucket_batches_refuses_at_once_and_takes_nothing():
    assert list(bucket_batches([], 2, 8, pad_id=0)) == []
    with pytest.raises(ValueError, match='expected batch_size of 1 or more; got 0'):
        bucket_batches(sequences(2), 0, 8, pad_id=0)
    with pytest.raises(ValueError, match='expected sequences of 1 to 8 tokens; got 9 in row 1'):
        bucket_batches(sequences(2, 9), 2, 8, pad_id=0)
    with pytest.raises(ValueError, match='expected sequences of 1 to 8 tokens; got 0 in row 0'):
        bucket_batches([np.zeros(0, np.int32)], 2, 8, pad_id=0)
