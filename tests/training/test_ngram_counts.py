"""Counting n-grams, and the recipe from texts to an export."""

import json
import shutil

import numpy as np
import pytest
from conftest import SOURCES
from ml_collections import ConfigDict
from tiny import ROOT, run_forked

from spec_jax.drafters.ngram import load_ngram, make_drafter, read_ngram
from spec_jax.text.tokenizers import load_tokenizer, pieces
from spec_jax.training.ngram import count_ngrams, cross_entropy, describe, read_texts, train_ngram

EOS = 1
BY_HAND = [[2, 3, EOS], [2, 2, EOS]]


def as_dict(level):
    """{context: (denominator, [(successor, count), ...])}"""
    ends = np.cumsum(level.lengths)
    entries = list(zip(level.successors.tolist(), level.counts.tolist(), strict=True))
    return {
        tuple(context): (denominator, entries[end - length : end])
        for context, denominator, length, end in zip(
            level.contexts.tolist(), level.denominators.tolist(), level.lengths.tolist(), ends, strict=True
        )
    }


def test_counts_of_two_texts():
    unigrams, bigrams, trigrams = count_ngrams(BY_HAND, 3, 5, (1, 1, 1), 9).levels
    assert as_dict(unigrams) == {(): (9, [(2, 3), (1, 2), (3, 1)])}
    assert as_dict(bigrams) == {
        (0,): (3, [(2, 2)]),
        (2,): (6, [(1, 1), (2, 1), (3, 1)]),
        (3,): (2, [(1, 1)]),
    }
    assert as_dict(trigrams) == {
        (0, 0): (3, [(2, 2)]),
        (0, 2): (4, [(2, 1), (3, 1)]),
        (2, 2): (2, [(1, 1)]),
        (2, 3): (2, [(1, 1)]),
    }


def test_pruning_keeps_the_commonest_and_the_denominator_of_all():
    texts = [[2, 3], [2, 3], [2, 3], [2, 4], [2, 4], [2, 5], [3, 5]]
    assert as_dict(count_ngrams(texts, 2, 6, (1, 1), 2).levels[1]) == {
        (0,): (9, [(2, 6), (3, 1)]),
        (2,): (9, [(3, 3), (4, 2)]),
        (3,): (2, [(5, 1)]),
    }
    unigrams, bigrams = count_ngrams(texts, 2, 6, (3, 3), 9).levels
    assert as_dict(unigrams) == {
        (): (18, [(2, 6), (3, 4)])
    }  # K and the loss of all leave the empty context alone
    assert as_dict(bigrams) == {(0,): (9, [(2, 6)]), (2,): (9, [(3, 3)])}


def test_no_ngram_reaches_over_the_end_of_a_text():
    for order in 2, 3, 4:
        levels = count_ngrams([[2, EOS], [3, EOS], [4]], order, 5, (1,) * order, 9).levels
        for k, level in enumerate(levels[1:], 1):
            assert set(as_dict(level)) == {(0,) * k} | {(0,) * (k - 1) + (first,) for first in (2, 3)}


def test_a_higher_order_leaves_the_lower_ones_as_they_are():
    random = np.random.default_rng(0)
    texts = [random.integers(1, 9, random.integers(1, 12)) for _ in range(200)]
    two, four = (count_ngrams(texts, order, 9, (1, 2, 3, 3)[:order], 4).levels for order in (2, 4))
    assert [as_dict(level) for level in two] == [as_dict(level) for level in four[:2]]


def test_a_million_tokens_of_a_large_vocabulary_do_not_run_over():
    """The highest ids of 32128 at order 4: the numbers of contexts, not their tokens, are multiplied by V."""
    ids = 32127 - np.arange(6)
    levels = count_ngrams([ids], 4, 32128, (1,) * 4, 9).levels
    assert as_dict(levels[3])[tuple(ids[:3].tolist())] == (2, [(32124, 1)])
    assert len(levels[3].contexts) == 6


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        ([[], []], 'expected texts to count, got empty ones alone'),
        ([], 'expected texts to count'),
        ([[2, 5]], "expected token ids from 0 to 4, got 5; use the target's tokenizer"),
        ([[2, -1]], 'expected token ids from 0 to 4, got -1'),
    ],
)
def test_texts_that_cannot_be_counted(texts, message):
    with pytest.raises(ValueError, match=message):
        count_ngrams(texts, 2, 5, (1, 1), 9)


def test_cross_entropy_by_hand():
    """q(2 | start) = 4 / 5, q(EOS | 2) = 28 / 90; unigrams give 18 / 45 and 13 / 45."""
    counts = count_ngrams(BY_HAND, 2, 5, (1, 1), 9)
    texts = [np.array([2, EOS])] * 5000 + [np.array([2])] * 10_000
    expected = -(15_000 * np.log(4 / 5) + 5000 * np.log(28 / 90)) / 20_000
    assert cross_entropy(make_drafter(counts), texts) == pytest.approx(expected, rel=1e-12)
    expected = -(15_000 * np.log(18 / 45) + 5000 * np.log(13 / 45)) / 20_000
    assert cross_entropy(make_drafter(counts, 1), texts) == pytest.approx(expected, rel=1e-12)


def test_texts_begin_with_the_start_token_that_is_given():
    counts = count_ngrams(BY_HAND, 2, 5, (1, 1), 9, start_id=4)
    assert as_dict(counts.levels[1])[4,] == (3, [(2, 2)]) and (0,) not in as_dict(counts.levels[1])
    texts = [np.array([2])]
    assert cross_entropy(make_drafter(counts), texts, start_id=4) == pytest.approx(-np.log(4 / 5), rel=1e-12)
    assert cross_entropy(make_drafter(counts), texts, start_id=0) > -np.log(4 / 5)


# --- the recipe ---------------------------------------------------------------------------------------------


def recipe(tokenizer_folder, train, valid='', **changes):
    content = dict(
        recipe='ngram',
        tokenizer=str(tokenizer_folder),
        data=dict(train=str(train), valid=str(valid)),
        order=3,
        min_counts=(1, 1, 1),
        max_successors=8,
    )
    return ConfigDict(content | changes)


def test_the_target_side_of_pairs_is_counted_and_every_line_of_plain_text(tmp_path):
    (tmp_path / 'a.tsv').write_text('a b\tA B\n\nc\tC\nD\n')
    (tmp_path / 'b.txt').write_text('A\n \nB C\n')
    (tmp_path / 'c.jsonl').write_text('{"source": "a", "target": "A"}\n{"source": "B"}\n')
    names = [str(tmp_path / name) for name in ('a.tsv', 'b.txt', 'c.jsonl')]
    assert list(read_texts(names).values()) == [['A B', 'C', 'D'], ['A', 'B C'], ['A', 'B']]
    (tmp_path / 'd.txt').write_text('\n\n')
    with pytest.raises(ValueError, match='d.txt: expected texts, got empty lines alone'):
        read_texts([tmp_path / 'd.txt'])


def test_a_tokenizer_without_padding_has_no_start_token(tmp_path, tokenizer_folder, pairs_file):
    folder = shutil.copytree(tokenizer_folder, tmp_path / 'tokenizer')
    names = json.loads((folder / 'tokenizer_config.json').read_text())
    del names['pad_token']
    (folder / 'tokenizer_config.json').write_text(json.dumps(names))
    with pytest.raises(
        ValueError, match='tokenizer: expected a tokenizer with a padding token, .*; got none'
    ):
        train_ngram(recipe(folder, pairs_file), tmp_path / 'workdir')


def test_a_run_leaves_counts_that_load_and_a_report(tmp_path, tokenizer_folder, pairs_file):
    report = train_ngram(recipe(tokenizer_folder, pairs_file, pairs_file), tmp_path)
    assert json.loads((tmp_path / 'report.json').read_text())['orders'] == report['orders']
    assert (report['texts'], report['tokens']) == (8, 40)
    # Eight capitals and EOS; eight capitals and the start token have a successor; each text has two places.
    assert [row['contexts'] for row in report['orders']][:2] == [1, 9]
    scores = [row['cross_entropy'][str(pairs_file)] for row in report['orders']]
    assert scores[0] > scores[1] > scores[2] > 0
    assert 'order 2: 9 contexts' in describe(report) and f'{scores[1]:.3f} train.tsv' in describe(report)

    tokenizer = load_tokenizer(tokenizer_folder)
    texts = [tokenizer(source.upper())['input_ids'] + [EOS] for source in SOURCES]
    expected = count_ngrams(texts, 3, len(tokenizer), (1, 1, 1), 8).levels
    saved = read_ngram(tmp_path / 'export')
    assert [as_dict(level) for level in saved.levels] == [as_dict(level) for level in expected]
    drafter = load_ngram(tmp_path / 'export', 2, len(tokenizer), pieces(tokenizer))
    assert drafter.unigram.shape == (len(tokenizer),)
    with pytest.raises(ValueError, match='got those of another of 19 pieces'):
        load_ngram(tmp_path / 'export', 2, len(tokenizer), pieces(tokenizer)[::-1])
    about = json.loads((tmp_path / 'export' / 'config.json').read_text())
    assert (about['order'], about['vocab_size'], about['counted_from']) == (3, 19, [str(pairs_file)])


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(order=0), 'order: expected an integer >= 1, got 0'),
        (dict(max_successors=0), 'max_successors: expected an integer >= 1, got 0'),
        (dict(min_counts=(1, 2)), r'min_counts: expected 3 integers >= 1, one an order, got \(1, 2\)'),
        (dict(min_counts=(1, 0, 1)), r'min_counts: expected 3 integers >= 1, one an order, got \(1, 0, 1\)'),
        (dict(steps=3), "'steps' is missing or unknown"),
        (dict(data=dict(train='', valid='')), 'data.train: expected files of texts, got none'),
        (dict(tokenizer=''), "tokenizer: expected the target's folder or hub id, got none"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(
    tmp_path, tokenizer_folder, pairs_file, changes, message
):
    with pytest.raises(ValueError, match=message):
        train_ngram(recipe(tokenizer_folder, pairs_file, **changes), tmp_path / 'workdir')
    assert not (tmp_path / 'workdir').exists()


def test_the_script_counts_by_the_config_that_is_shipped(tmp_path, tokenizer_folder, pairs_file):
    config = '--config=configs/train_ngram_demo.py'
    files = [f'--config.tokenizer={tokenizer_folder}', f'--config.data.train={pairs_file}']
    lines = [
        [config, f'--workdir={tmp_path}/good', *files],
        [config, f'--workdir={tmp_path}/bad', *files, '--export_only'],
        [config, f'--workdir={tmp_path}/bad', *files, '--config.recipe=x'],
        [config, f'--workdir={tmp_path}/bad', *files, '--config.data.train=/nowhere.txt'],
        [config, f'--workdir={tmp_path}/bad', *files, '--config.order=2'],
    ]
    good, *bad = run_forked(ROOT / 'scripts/train.py', lines, tmp_path)
    assert good[0] == 0 and good[1].endswith(f'exported {tmp_path}/good/export\n')
    assert read_ngram(tmp_path / 'good' / 'export').vocab_size == 19
    messages = [
        'export_only: expected a recipe that leaves checkpoints, got ngram',
        "recipe: expected one of t5, ngram, got 'x'",
        'got /nowhere.txt, which does not exist',
        'min_counts: expected 2 integers >= 1, one an order, got (1, 2, 3)',
    ]
    for (code, out, err), message in zip(bad, messages, strict=True):
        assert (code, out, err.count('\n')) == (1, '', 1) and message in err, err
    assert not (tmp_path / 'bad').exists()
