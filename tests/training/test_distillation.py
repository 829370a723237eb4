import json

import pytest
from conftest import SOURCES

from spec_jax.models.t5_weights import load_t5
from spec_jax.text.data import Example
from spec_jax.text.tokenizers import load_tokenizer
from spec_jax.training import distillation
from spec_jax.training.evaluation import Translation

TOO_LONG = 'a b c d e f g h'  # nine tokens with EOS
LIMITS = dict(batch_size=3, max_source_length=8)


@pytest.fixture(scope='module')
def target(finished):
    return load_t5(finished / 'export'), load_tokenizer(str(finished / 'export'))


def whole_and_stopped(target, tmp_path, **options):
    """The counts and the bytes of a run, and of one that was stopped twice and lost half a line."""
    sources = [TOO_LONG, *SOURCES]
    whole = distillation.distill(*target, sources, tmp_path / 'whole', **LIMITS, **options)
    answers = iter([False, True, False, True])
    stopped = tmp_path / 'stopped'
    for _ in range(2):
        counts = distillation.distill(
            *target, sources, stopped, **LIMITS, **options, stop=lambda: next(answers)
        )
        assert counts['tsv'] is None and not (stopped / 'distilled.tsv').exists()
        with open(stopped / 'distilled.jsonl', 'a') as file:
            file.write('{"row": 1, "text": "A')
    again = distillation.distill(*target, sources, stopped, **LIMITS, **options)
    assert {**whole, 'tsv': None} == {**again, 'tsv': None}
    return whole, *((tmp_path / name / 'distilled.tsv').read_bytes() for name in ('whole', 'stopped'))


def test_a_stopped_run_ends_as_one_that_was_not_and_in_the_order_of_the_sources(target, tmp_path):
    counts, whole, stopped = whole_and_stopped(target, tmp_path)
    assert stopped == whole
    assert whole.decode() == ''.join(f'{source}\t{source.upper()}\n' for source in SOURCES)
    expected = dict(sources=9, too_long=1, translated=8, pairs=8, unfinished=0, empty=0, tokens=40)
    assert counts == expected | {'tsv': str(tmp_path / 'whole' / 'distilled.tsv')}


def test_a_journal_of_another_run_is_refused(target, tmp_path):
    distillation.distill(*target, SOURCES, tmp_path, **LIMITS)
    with pytest.raises(ValueError, match='got another prefix, sources; use another --workdir'):
        distillation.distill(*target, SOURCES[1:], tmp_path, **LIMITS, prefix='x ')


def test_a_journal_of_something_else_is_refused(target, tmp_path):
    distillation.distill(*target, SOURCES, tmp_path, **LIMITS)
    path = tmp_path / 'distilled.jsonl'
    path.write_text(path.read_text().replace('num_tokens', 'tokens'))
    with pytest.raises(ValueError, match='remove it'):
        distillation.distill(*target, SOURCES, tmp_path, **LIMITS)


def test_endless_and_empty_outputs_are_left_out_and_counted(tmp_path):
    translations = {
        2: Translation('C', 2, True),
        0: Translation('A\tA\nA', 4, True),
        1: Translation('B B B', 24, False),
        3: Translation('', 1, True),
    }
    counts = distillation.write_pairs(tmp_path / 'pairs.tsv', ['a', 'b', 'c\tc', 'd'], translations)
    assert (tmp_path / 'pairs.tsv').read_text() == 'a\tA A A\nc c\tC\n'
    assert counts == dict(translated=4, pairs=2, unfinished=1, empty=1, tokens=31)


def test_sources_are_taken_once_and_a_sample_is_always_the_same():
    examples = [Example(text) for text in ('b', 'a', '', 'b', 'c', ' ', 'd', 'a')]
    assert distillation.choose_sources(examples, 0, seed=0) == ['b', 'a', 'c', 'd']
    assert distillation.choose_sources(examples, 9, seed=0) == ['b', 'a', 'c', 'd']
    sample = distillation.choose_sources(examples, 2, seed=0)
    assert sample == distillation.choose_sources(examples, 2, seed=0)
    assert len(sample) == 2 and sample == [text for text in ('b', 'a', 'c', 'd') if text in sample]
    assert len({tuple(distillation.choose_sources(examples, 2, seed)) for seed in range(20)}) > 1


def test_the_journal_is_readable(target, tmp_path):
    distillation.distill(*target, SOURCES[:1], tmp_path, **LIMITS)
    run, line = map(json.loads, (tmp_path / 'distilled.jsonl').read_text().splitlines())
    assert run['run']['batch_size'] == 3
    assert line == {'row': 0, 'text': SOURCES[0].upper(), 'num_tokens': 5, 'ended': True}
