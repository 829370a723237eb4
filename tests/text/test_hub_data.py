"""Data sets of the hub: the real library on files, a stand-in where there would be a network."""

import sys
from types import SimpleNamespace

import pytest

from spec_jax.text import hub_data
from spec_jax.text.data import Example

ROWS = [
    {'translation': {'en': 'One.', 'de': 'Eins.'}, 'id': 0},
    {'translation': {'en': 'Two\nlines.', 'de': None}, 'id': 1},
    {'translation': {'en': '', 'de': 'Drei.'}, 'id': 2},
]
EXAMPLES = [Example('One.', 'Eins.'), Example('Two\nlines.'), Example('', 'Drei.')]
KEYS = dict(source_key='translation.en', target_key='translation.de')


@pytest.fixture
def asked(monkeypatch):
    """A library that notes what it is asked for and has nine rows, of which none may be read in vain."""
    asked = SimpleNamespace(calls=[], read=0)

    def rows():
        for _ in range(9):
            asked.read += 1
            yield ROWS[0]

    def load_dataset(*args, **kwargs):
        asked.calls.append((*args, kwargs))
        return rows()

    library = SimpleNamespace(__version__='5.2.0', load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, 'datasets', library)
    return asked


@pytest.mark.parametrize(
    'path, name, config, split',
    [
        ('hf:wmt/wmt14/de-en:test', 'wmt/wmt14', 'de-en', 'test'),
        ('hf:wmt14/de-en:test', 'wmt14', 'de-en', 'test'),
        ('hf:abisee/cnn_dailymail/3.0.0:validation', 'abisee/cnn_dailymail', '3.0.0', 'validation'),
        ('hf:squad:train', 'squad', None, 'train'),
    ],
)
def test_a_path_names_data_set_configuration_and_split(asked, path, name, config, split):
    assert hub_data.is_named(path) and not hub_data.is_named('hf.txt')
    assert hub_data.read_dataset(path, **KEYS, limit=2) == [EXAMPLES[0]] * 2
    assert asked.calls == [(name, config, dict(split=split, streaming=True))]
    assert asked.read == 2


@pytest.mark.parametrize('path', ['hf:wmt14', 'hf::test', 'hf:wmt14:', 'hf:a//b:test', 'hf:a/b/c/d:test'])
def test_ill_formed_paths(asked, path):
    with pytest.raises(ValueError, match=f"data.path: expected hf:NAME/CONFIG:SPLIT, .*; got '{path}'"):
        hub_data.read_dataset(path)
    assert not asked.calls


def test_slices_are_data_limits_affair(asked):
    with pytest.raises(ValueError, match=r'data.limit takes the first rows'):
        hub_data.read_dataset('hf:wmt14/de-en:test[:100]')


def test_a_wrong_key_names_those_there_are(asked):
    message = "hf:a/b:c, row 1: expected the key 'source'; got 'translation.en', 'translation.de', 'id': "
    with pytest.raises(ValueError, match=message):
        hub_data.read_dataset('hf:a/b:c', limit=3)
    with pytest.raises(ValueError, match="row 1: expected text for 'id'; got 0"):
        hub_data.read_dataset('hf:a/b:c', source_key='id', limit=3)


def test_without_the_library_or_with_one_that_would_run_code(monkeypatch):
    wanted = "hf:a/b:c: expected the library datasets, version 4 or newer; got .*: pip install 'datasets>=4'"
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ValueError, match=wanted):
        hub_data.read_dataset('hf:a/b:c')
    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(__version__='3.6.0'))
    with pytest.raises(ValueError, match=wanted.replace('.*', '.*3.6.0')):
        hub_data.read_dataset('hf:a/b:c')


@pytest.mark.parametrize('error', [ConnectionError("Couldn't reach\nthe hub " + 'x' * 300), RuntimeError()])
def test_what_cannot_be_fetched_is_one_short_line(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setitem(
        sys.modules, 'datasets', SimpleNamespace(__version__='4.0.0', load_dataset=load_dataset)
    )
    with pytest.raises(OSError, match='hf:a/b:c: expected a data set that can be fetched; got ') as caught:
        hub_data.read_dataset('hf:a/b:c')
    text = str(caught.value)
    assert type(error).__name__ in text and '\n' not in text and len(text) < 450


def test_an_empty_split(monkeypatch):
    monkeypatch.setitem(
        sys.modules, 'datasets', SimpleNamespace(__version__='4.0.0', load_dataset=lambda *a, **k: iter(()))
    )
    with pytest.raises(ValueError, match='hf:a/b:c: expected at least one row; got an empty split'):
        hub_data.read_dataset('hf:a/b:c')


# The library itself, on files


@pytest.fixture(scope='module')
def datasets():
    return pytest.importorskip('datasets')


@pytest.mark.parametrize('limit, number', [(None, 3), (2, 2), (9, 3)])
def test_a_folder_of_parquet(datasets, tmp_path, limit, number):
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / 'test-00000-of-00001.parquet')
    datasets.Dataset.from_list(ROWS[:1]).to_parquet(tmp_path / 'train-00000-of-00001.parquet')
    assert hub_data.read_dataset(f'hf:{tmp_path}:test', **KEYS, limit=limit) == EXAMPLES[:number]
    assert hub_data.read_dataset(f'hf:{tmp_path}:train', **KEYS, limit=limit) == EXAMPLES[:1]


def test_what_save_to_disk_left(datasets, tmp_path):
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / 'saved')
    assert hub_data.read_dataset(f'hf:{tmp_path}/saved:test', **KEYS, limit=2) == EXAMPLES[:2]
    with pytest.raises(
        OSError, match="saved:tset: expected a data set that can be fetched; got KeyError: 'tset'"
    ):
        hub_data.read_dataset(f'hf:{tmp_path}/saved:tset', **KEYS)


def test_a_split_or_a_file_that_is_none(datasets, tmp_path):
    (tmp_path / 'test.jsonl').write_text('{"source": "a"}\n')
    assert hub_data.read_dataset(f'hf:{tmp_path}:test') == [Example('a')]
    with pytest.raises(OSError, match=':tset: expected a data set that can be fetched; got ') as caught:
        hub_data.read_dataset(f'hf:{tmp_path}:tset')
    assert '\n' not in str(caught.value)
