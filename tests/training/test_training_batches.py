"""Batches to train on. Axes: `B` rows, `S` source tokens, `T` target tokens."""

import itertools
from functools import partial

import numpy as np
import pytest

from spec_jax.text.data import Pairs
from spec_jax.training import batches as module
from spec_jax.training.batches import steps_per_epoch, training_widths

EOS = 1
training_batches = partial(module.training_batches, pad_id=0, start_id=0)


def sequences(*lengths):
    """One array for each length: 50, 51, ... and EOS last."""
    return [np.append(np.arange(50, 49 + length), EOS).astype(np.int32) for length in lengths]


def pairs(number, seed=0, longest=40):
    """Pairs of random lengths whose first source token names the row, so that no two are alike."""
    random = np.random.default_rng(seed)
    sources, targets = (sequences(*random.integers(2, longest + 1, number)) for _ in range(2))
    for row in range(number):
        sources[row][0] = targets[row][0] = 1000 + row
    return Pairs(sources, targets, num_dropped=0)


def padded(lengths, widths):
    return np.array(widths)[np.searchsorted(widths, lengths)].sum()


def test_training_widths_of_a_few_lengths():
    lengths = np.array([3] * 100 + [9] * 10 + [17, 30])
    assert training_widths(lengths, 1) == [32]
    assert training_widths(lengths, 2) == [4, 32]  # 100 * 4 + 12 * 32 is less than 110 * 12 + 2 * 32
    assert training_widths(lengths, 3) == [4, 12, 32]
    assert training_widths(lengths, 4) == [4, 12, 20, 32]


@pytest.mark.parametrize('num_widths', [1, 2, 3, 4, 8])
def test_training_widths_pad_as_little_as_any(num_widths):
    lengths = np.random.default_rng(num_widths).geometric(0.1, 200).clip(1, 36)
    narrower = range(4, 36, 4)
    every = [c for n in range(num_widths) for c in itertools.combinations(narrower, n)]
    widths = training_widths(lengths, num_widths)
    assert len(widths) <= num_widths
    assert padded(lengths, widths) == min(padded(lengths, [*c, 36]) for c in every)


def test_a_training_batch_is_shifted_and_masked():
    two = Pairs(sequences(3, 2), sequences(2, 4), num_dropped=0)
    (batch,) = training_batches(two, 12, seed=0, num_epochs=1)
    order = np.argsort(batch.rows)  # the filler row, of id -1, comes first
    assert batch.rows[order].tolist() == [-1, 0, 1]
    assert batch.source[order].tolist() == [[EOS, 0, 0, 0], [50, 51, EOS, 0], [50, EOS, 0, 0]]
    assert batch.source_mask[order].sum(axis=1).tolist() == [1, 3, 2]
    assert batch.decoder_input[order].tolist() == [[0, 0, 0, 0], [0, 50, EOS, 0], [0, 50, 51, 52]]
    assert batch.labels[order].tolist() == [[0, 0, 0, 0], [50, EOS, 0, 0], [50, 51, 52, EOS]]
    assert batch.label_mask[order].tolist() == [[False] * 4, [True, True, False, False], [True] * 4]


def test_padding_and_the_first_input_are_the_models():
    two = Pairs(sequences(3, 2), sequences(2, 4), num_dropped=0)
    (batch,) = training_batches(two, 12, seed=0, num_epochs=1, pad_id=7, start_id=8)
    order = np.argsort(batch.rows)
    assert batch.source[order].tolist() == [[EOS, 7, 7, 7], [50, 51, EOS, 7], [50, EOS, 7, 7]]
    assert batch.labels[order].tolist() == [[7, 7, 7, 7], [50, EOS, 7, 7], [50, 51, 52, EOS]]
    assert batch.decoder_input[order].tolist() == [[8, 7, 7, 7], [8, 50, EOS, 7], [8, 50, 51, 52]]


def test_every_pair_is_seen_once_an_epoch_in_few_shapes():
    some = pairs(500, longest=128)
    per_epoch = steps_per_epoch(some, 300)
    batches = list(training_batches(some, 300, seed=3, num_epochs=2))
    assert len(batches) == 2 * per_epoch
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        rows = np.concatenate([batch.rows for batch in epoch])
        assert sorted(rows[rows >= 0]) == list(range(500))
    widths = [batch.labels.shape[1] for batch in batches[:per_epoch]]
    assert widths != sorted(widths)  # short and long sentences are mixed
    shapes = {batch.labels.shape for batch in batches}
    assert len(shapes) <= 8 and shapes == {batch.source.shape for batch in batches}
    assert all(rows * width <= 300 for rows, width in shapes)
    for batch in batches:
        for n, row in enumerate(batch.rows[batch.rows >= 0]):
            np.testing.assert_array_equal(batch.source[n][batch.source_mask[n]], some.sources[row])
            np.testing.assert_array_equal(batch.labels[n][batch.label_mask[n]], some.targets[row])


def test_no_batch_is_left_with_a_handful_of_pairs():
    alike = Pairs(sequences(*[8] * 41), sequences(*[8] * 41), num_dropped=0)
    batches = list(training_batches(alike, 80, seed=0, num_epochs=1))
    assert sorted((batch.rows >= 0).sum() for batch in batches) == [8, 8, 8, 8, 9]


@pytest.mark.parametrize('start_step', [1, 7, 23, 24, 25, 60])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(start_step):
    some = pairs(60)
    per_epoch = steps_per_epoch(some, 100)
    assert 20 < per_epoch < 30  # so that the steps above lie before, at and after the end of an epoch
    whole = list(training_batches(some, 100, seed=5, num_epochs=3))
    rest = list(training_batches(some, 100, seed=5, start_step=start_step, num_epochs=3))
    assert len(rest) == len(whole) - start_step
    for ours, theirs in zip(rest, whole[start_step:], strict=True):
        for array, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_seed_and_epoch_change_the_order_and_who_shares_a_batch():
    some = pairs(60)
    per_epoch = steps_per_epoch(some, 100)

    def groups(seed):
        return [tuple(sorted(batch.rows)) for batch in training_batches(some, 100, seed, num_epochs=2)]

    ours, other = groups(0), groups(1)
    first, second = ours[:per_epoch], ours[per_epoch:]
    assert first != second and set(first) != set(second)
    assert first != other[:per_epoch] and set(first) != set(other[:per_epoch])
    assert groups(0) == ours


def test_a_batch_has_one_row_where_a_pair_is_wider_than_the_budget():
    (batch,) = training_batches(pairs(1, longest=40), 1, seed=0, num_epochs=1)
    assert batch.labels.shape[0] == 1


def test_training_batches_refuses_at_once():
    with pytest.raises(ValueError, match='expected tokens_per_batch, num_widths >= 1; got 0, 8'):
        training_batches(pairs(2), 0, seed=0)
    with pytest.raises(ValueError, match='expected start_step of 0 or more; got -1'):
        training_batches(pairs(2), 100, seed=0, start_step=-1)
