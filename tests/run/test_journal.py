"""Finished rows survive a stop at any byte; another run's are never used."""

import pytest

from spec_jax.run.journal import Journal

ONE, TWO, THREE = ({'text': text} for text in 'ABC')


def test_rows_come_back_and_none_is_written_twice(tmp_path):
    path = tmp_path / 'journal.jsonl'
    Journal.open(path, {'seed': 1}).add([4, 2], [ONE, TWO])
    journal = Journal.open(path, {'seed': 1})
    journal.add([2, 7], [THREE, THREE])
    assert Journal.open(path, {'seed': 1}).records == {4: ONE, 2: TWO, 7: THREE} == journal.records
    assert len(path.read_text().splitlines()) == 4


def test_there_is_no_file_before_there_is_a_row(tmp_path):
    assert Journal.open(tmp_path / 'journal.jsonl', {}).records == {}
    assert not list(tmp_path.iterdir())


def test_cut_at_any_byte_it_keeps_the_whole_lines(tmp_path):
    path = tmp_path / 'journal.jsonl'
    Journal.open(path, {'seed': 1}).add([0, 1], [ONE, TWO])
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        journal = Journal.open(path, {'seed': 1})
        kept = whole[:size].count(b'\n') - 1
        assert list(journal.records) == list(range(max(kept, 0)))
        journal.add([0, 1], [ONE, TWO])
        assert path.read_bytes() == whole


def test_another_run_is_refused(tmp_path):
    path = tmp_path / 'journal.jsonl'
    Journal.open(path, {'seed': 1, 'name': 'a'}).add([0], [ONE])
    with pytest.raises(ValueError, match='got another seed; use another --workdir'):
        Journal.open(path, {'seed': 2, 'name': 'a'})


@pytest.mark.parametrize('text', ['nonsense\n', '[1]\n', '{"run": {}}\n{"text": 1}\n', '\n'])
def test_damage_is_named(tmp_path, text):
    path = tmp_path / 'journal.jsonl'
    path.write_text(text)
    with pytest.raises(ValueError, match='remove it'):
        Journal.open(path, {})
