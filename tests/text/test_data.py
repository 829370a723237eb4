"""Reading files of text, and encoding them."""

import gzip
import io
import json
import sys

import numpy as np
import pytest

from spec_jax.text import data
from spec_jax.text.data import Example

EOS = 1


class WordTokenizer:
    """A word of n letters has the id 10 + n; EOS is appended, as T5's does, or left to the caller."""

    eos_token_id = EOS

    def __init__(self, adds_eos=True):
        self.tail = [EOS] if adds_eos else []

    def __call__(self, texts, verbose):
        return {'input_ids': [[10 + len(word) for word in text.split()] + self.tail for text in texts]}


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
