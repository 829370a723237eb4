"""Axes: `B` rows, `S` source tokens, `T` target tokens."""

import gzip
import io
import itertools
import json
import sys

import numpy as np
import pytest

from spec_jax.text import data
from spec_jax.text.data import Example, Pairs

EOS = 1


class WordTokenizer:
    """A word of n letters has the id 10 + n; EOS is appended, as T5's does, or left to the caller."""

    eos_token_id = EOS

    def __init__(self, adds_eos=True):
        self.tail = [EOS] if adds_eos else []

    def __call__(self, texts, verbose):
        return {'input_ids': [[10 + len(word) for word in text.split()] + self.tail for text in texts]}


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


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Reading


@pytest.mark.parametrize('zipped', [False, True])
@pytest.mark.parametrize(
    'name, content, expected',
    [
        ('a.txt', 'Hi.\n\nGo on.\n', [Example('Hi.'), Example(''), Example('Go on.')]),
        ('a.en', 'a\tb', [Example('a\tb')]),
        ('windows.txt', '\ufeffa\r\nb\r\n', [Example('a'), Example('b')]),
        ('separators.txt', 'a\u2028b\x0cc\n', [Example('a\u2028b\x0cc')]),
        ('only_empty_lines.txt', '\n\n', [Example(''), Example('')]),
        ('a.tsv', 'Hi.\tHallo!\nGo.\n\n', [Example('Hi.', 'Hallo!'), Example('Go.'), Example('')]),
        (
            'a.jsonl',
            '{"source": "Hi.", "target": "Grüß Gott!"}\n\n{"source": "Go.", "target": null, "id": 3}\n',
            [Example('Hi.', 'Grüß Gott!'), Example(''), Example('Go.')],
        ),
    ],
)
def test_one_line_is_one_example(tmp_path, name, content, expected, zipped):
    path = tmp_path / name
    if zipped:
        path = write(tmp_path / f'{name}.gz', gzip.compress(content.encode()))
    else:
        write(path, content)
    assert data.read_examples(path) == expected


def test_the_format_and_the_keys_can_be_given(tmp_path):
    lines = json.dumps({'article': 'long', 'highlights': 'short'})
    path = write(tmp_path / 'articles', lines)
    examples = data.read_examples(path, 'jsonl', source_key='article', target_key='highlights')
    assert examples == [Example('long', 'short')]


def test_keys_lead_inwards(tmp_path):
    rows = [
        {'translation': {'en': 'Hi.', 'de': 'Hallo.'}},
        {'translation': {'en': 'Go.'}, 'translation.de': 'x'},
    ]
    path = write(tmp_path / 'a.jsonl', '\n'.join(map(json.dumps, rows)))
    examples = data.read_examples(path, source_key='translation.en', target_key='translation.de')
    assert examples == [Example('Hi.', 'Hallo.'), Example('Go.', 'x')]  # a key that has a dot comes first
    with pytest.raises(ValueError, match="expected the key 'en'; got 'translation.en', 'translation.de'"):
        data.read_examples(path, source_key='en')
    with pytest.raises(ValueError, match="line 1: expected text for 'translation'; got {'en': 'Hi.'"):
        data.read_examples(path, source_key='translation')


@pytest.mark.parametrize('zipped', [False, True])
def test_parallel_text(tmp_path, zipped):
    content = b'Eins.\r\n\nDrei\tund mehr.\n'
    path = write(tmp_path / ('a.de.gz' if zipped else 'a.de'), gzip.compress(content) if zipped else content)
    sources = [Example('One.'), Example(''), Example('Three.')]
    assert data.add_targets(sources, path, 'a.en') == [
        Example('One.', 'Eins.'),
        Example('', ''),
        Example('Three.', 'Drei\tund mehr.'),
    ]
    message = 'expected 2 lines, one for each of a.en; got 3: check that the two belong together'
    with pytest.raises(ValueError, match=f'{path}: {message}'):
        data.add_targets(sources[:2], path, 'a.en')
    with pytest.raises(ValueError, match='a.tsv: expected sources alone beside .*; got targets too'):
        data.add_targets([Example('One.', 'Uno.')], path, 'a.tsv')
    with pytest.raises(FileNotFoundError, match='none.de, which does not exist'):
        data.add_targets(sources, tmp_path / 'none.de', 'a.en')


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO('Hi.\tGrüß Gott!\n'.encode())))
    assert data.read_examples('-', 'tsv') == [Example('Hi.', 'Grüß Gott!')]
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'')))
    with pytest.raises(ValueError, match='^standard input: expected at least one line; got an empty file: '):
        data.read_examples('-')


@pytest.mark.parametrize(
    'name, content, message',
    [
        ('a.txt', '', 'a.txt: expected at least one line; got an empty file: check where it comes from'),
        ('a.txt', b'a\nb\nGr\xfc\xdfe\n', 'a.txt, line 3: expected UTF-8; got other bytes: save it as UTF-8'),
        (
            'a.txt.gz',
            'plain',
            "a.txt.gz: expected gzip data; got damage (Not a gzipped file (b'pl')): copy it again",
        ),
        ('a.tsv', 'a\tb\na\tb\tc\n', 'a.tsv, line 2: expected source, tab, target; got 3 columns: keep two'),
        (
            'a.jsonl',
            '{"source": "a"}\n["b"]',
            'a.jsonl, line 2: expected a JSON object; got a list: write {"source": "..."}',
        ),
        (
            'a.jsonl',
            '{"source": "a"}\n{"source"',
            "a.jsonl, line 2: expected a JSON object; got no JSON (Expecting ':' delimiter",
        ),
        (
            'a.jsonl',
            '{"text": "a", "id": 1}',
            "a.jsonl, line 1: expected the key 'source'; got 'text', 'id': choose one by source_key",
        ),
        ('a.jsonl', '{"source": 7}', "a.jsonl, line 1: expected text for 'source'; got 7: write a string"),
        (
            'a.jsonl',
            '{"source": "a", "target": []}',
            "a.jsonl, line 1: expected text for 'target'; got []: write a string",
        ),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError) as error:
        data.read_examples(path)
    assert message in str(error.value) and '\n' not in str(error.value)


def test_a_truncated_gzip_file_is_damaged(tmp_path):
    path = write(tmp_path / 'a.txt.gz', gzip.compress(b'some text\n' * 100)[:-12])
    with pytest.raises(ValueError, match='a.txt.gz: expected gzip data; got damage'):
        data.read_examples(path)


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(
        FileNotFoundError, match='expected a text file; got .*/none.txt, which does not exist'
    ):
        data.read_examples(tmp_path / 'none.txt')
    with pytest.raises(ValueError, match='expected a file; got the folder .*: name a file in it'):
        data.read_examples(tmp_path)
    with pytest.raises(ValueError, match="expected a format of text, tsv, jsonl; got 'csv'"):
        data.read_examples(tmp_path / 'a.txt', 'csv')


# Encoding


@pytest.mark.parametrize('adds_eos', [True, False])
def test_sources_end_in_eos_and_long_ones_are_cut(adds_eos):
    texts = ['a bb ccc', '', '  ', 'a bb ccc dddd eeeee', 'a bb ccc dddd']
    encoded, num_truncated = data.encode_sources(WordTokenizer(adds_eos), texts, max_source_length=4)
    assert [sequence.tolist() for sequence in encoded] == [
        [11, 12, 13, EOS],
        [EOS],
        [EOS],
        [11, 12, 13, EOS],
        [11, 12, 13, EOS],
    ]
    assert num_truncated == 2
    assert all(sequence.dtype == np.int32 for sequence in encoded)


def test_the_prefix_goes_before_every_text_but_the_empty_one():
    encoded, num_truncated = data.encode_sources(
        WordTokenizer(), ['a', ''], prefix='translate: ', max_source_length=9
    )
    assert [sequence.tolist() for sequence in encoded] == [[20, 11, EOS], [EOS]]
    assert num_truncated == 0


def test_no_texts_make_no_sequences():
    assert data.encode_sources(WordTokenizer(), [], max_source_length=9) == ([], 0)


def test_encoding_refuses():
    texts = ['a', 'a b c d', 'a b c d e']
    message = 'expected sources of at most 4 tokens; got 2 longer, first in line 2 with 5: '
    with pytest.raises(ValueError, match=message):
        data.encode_sources(WordTokenizer(), texts, max_source_length=4, on_long='refuse')
    with pytest.raises(ValueError, match="expected on_long 'truncate' or 'refuse'; got 'drop'"):
        data.encode_sources(WordTokenizer(), texts, max_source_length=4, on_long='drop')
    with pytest.raises(ValueError, match='expected max_source_length of 2 or more; got 1'):
        data.encode_sources(WordTokenizer(), texts, max_source_length=1)


def test_pairs_over_a_limit_are_left_out():
    examples = [Example('a', 'bb ccc'), Example('a b c', 'd'), Example('a', 'b c d e'), Example('', 'b')]
    encoded = data.encode_pairs(WordTokenizer(), examples, 3, 4, prefix='to: ')
    assert [source.tolist() for source in encoded.sources] == [[13, 11, EOS], [13, EOS]]
    assert [target.tolist() for target in encoded.targets] == [[12, 13, EOS], [11, EOS]]
    assert len(encoded) == 2 and encoded.num_dropped == 2


def test_pairs_are_refused_without_a_target_or_when_none_fits():
    with pytest.raises(ValueError, match='example 2: expected a pair; got a source alone'):
        data.encode_pairs(WordTokenizer(), [Example('a', 'b'), Example('a')], 9, 9)
    with pytest.raises(ValueError, match='expected pairs of at most 2 and 9 tokens; got none in 1'):
        data.encode_pairs(WordTokenizer(), [Example('a b', 'c')], 2, 9)


# Batches to decode


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
    assert data.bucket_lengths(max_length, smallest) == expected


def test_bucket_lengths_refuses():
    with pytest.raises(ValueError, match='expected max_length >= 1, smallest >= 2; got 0, 16'):
        data.bucket_lengths(0)


def test_batches_are_sorted_padded_and_the_first_is_filled_up():
    batches = list(data.bucket_batches(sequences(3, 6, 2, 4, 5), 2, 6, smallest=4, pad_id=9))
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
    batches = list(data.bucket_batches(inputs, batch_size, 128))
    rows = np.concatenate([batch.rows for batch in batches])
    assert sorted(rows[rows >= 0]) == list(range(50))
    assert (rows < 0).sum() == -50 % batch_size
    assert {batch.tokens.shape for batch in batches} <= {(batch_size, w) for w in data.bucket_lengths(128)}
    for batch in batches:
        for row, tokens, mask in zip(batch.rows, batch.tokens, batch.mask, strict=True):
            np.testing.assert_array_equal(tokens[mask], inputs[row] if row >= 0 else [EOS])


def test_bucket_batches_refuses_at_once_and_takes_nothing():
    assert list(data.bucket_batches([], 2, 8)) == []
    with pytest.raises(ValueError, match='expected batch_size of 1 or more; got 0'):
        data.bucket_batches(sequences(2), 0, 8)
    with pytest.raises(ValueError, match='expected sequences of 1 to 8 tokens; got 9 in row 1'):
        data.bucket_batches(sequences(2, 9), 2, 8)
    with pytest.raises(ValueError, match='expected sequences of 1 to 8 tokens; got 0 in row 0'):
        data.bucket_batches([np.zeros(0, np.int32)], 2, 8)


# Batches to train on


def padded(lengths, widths):
    return np.array(widths)[np.searchsorted(widths, lengths)].sum()


def test_training_widths_of_a_few_lengths():
    lengths = np.array([3] * 100 + [9] * 10 + [17, 30])
    assert data.training_widths(lengths, 1) == [32]
    assert data.training_widths(lengths, 2) == [4, 32]  # 100 * 4 + 12 * 32 is less than 110 * 12 + 2 * 32
    assert data.training_widths(lengths, 3) == [4, 12, 32]
    assert data.training_widths(lengths, 4) == [4, 12, 20, 32]


@pytest.mark.parametrize('num_widths', [1, 2, 3, 4, 8])
def test_training_widths_pad_as_little_as_any(num_widths):
    lengths = np.random.default_rng(num_widths).geometric(0.1, 200).clip(1, 36)
    narrower = range(4, 36, 4)
    every = [c for n in range(num_widths) for c in itertools.combinations(narrower, n)]
    widths = data.training_widths(lengths, num_widths)
    assert len(widths) <= num_widths
    assert padded(lengths, widths) == min(padded(lengths, [*c, 36]) for c in every)


def test_a_training_batch_is_shifted_and_masked():
    two = Pairs(sequences(3, 2), sequences(2, 4), num_dropped=0)
    (batch,) = data.training_batches(two, 12, seed=0, num_epochs=1)
    order = np.argsort(batch.rows)  # the filler row, of id -1, comes first
    assert batch.rows[order].tolist() == [-1, 0, 1]
    assert batch.source[order].tolist() == [[EOS, 0, 0, 0], [50, 51, EOS, 0], [50, EOS, 0, 0]]
    assert batch.source_mask[order].sum(axis=1).tolist() == [1, 3, 2]
    assert batch.decoder_input[order].tolist() == [[0, 0, 0, 0], [0, 50, EOS, 0], [0, 50, 51, 52]]
    assert batch.labels[order].tolist() == [[0, 0, 0, 0], [50, EOS, 0, 0], [50, 51, 52, EOS]]
    assert batch.label_mask[order].tolist() == [[False] * 4, [True, True, False, False], [True] * 4]


def test_every_pair_is_seen_once_an_epoch_in_few_shapes():
    some = pairs(500, longest=128)
    per_epoch = data.steps_per_epoch(some, 300)
    batches = list(data.training_batches(some, 300, seed=3, num_epochs=2))
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
    batches = list(data.training_batches(alike, 80, seed=0, num_epochs=1))
    assert sorted((batch.rows >= 0).sum() for batch in batches) == [8, 8, 8, 8, 9]


@pytest.mark.parametrize('start_step', [1, 7, 23, 24, 25, 60])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(start_step):
    some = pairs(60)
    per_epoch = data.steps_per_epoch(some, 100)
    assert 20 < per_epoch < 30  # so that the steps above lie before, at and behind the end of an epoch
    whole = list(data.training_batches(some, 100, seed=5, num_epochs=3))
    rest = list(data.training_batches(some, 100, seed=5, start_step=start_step, num_epochs=3))
    assert len(rest) == len(whole) - start_step
    for ours, theirs in zip(rest, whole[start_step:], strict=True):
        for array, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_seed_and_epoch_change_the_order_and_who_shares_a_batch():
    some = pairs(60)
    per_epoch = data.steps_per_epoch(some, 100)

    def groups(seed):
        return [tuple(sorted(batch.rows)) for batch in data.training_batches(some, 100, seed, num_epochs=2)]

    ours, other = groups(0), groups(1)
    first, second = ours[:per_epoch], ours[per_epoch:]
    assert first != second and set(first) != set(second)
    assert first != other[:per_epoch] and set(first) != set(other[:per_epoch])
    assert groups(0) == ours


def test_a_batch_has_one_row_where_a_pair_is_wider_than_the_budget():
    (batch,) = data.training_batches(pairs(1, longest=40), 1, seed=0, num_epochs=1)
    assert batch.labels.shape[0] == 1


def test_training_batches_refuses_at_once():
    with pytest.raises(ValueError, match='expected tokens_per_batch, num_widths >= 1; got 0, 8'):
        data.training_batches(pairs(2), 0, seed=0)
    with pytest.raises(ValueError, match='expected start_step of 0 or more; got -1'):
        data.training_batches(pairs(2), 100, seed=0, start_step=-1)
