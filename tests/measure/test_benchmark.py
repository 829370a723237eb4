"""The sweep: its cells, what it keeps, each figure by hand, and their report."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.measure import benchmark, benchmark_report, runs, setup
from spec_jax.measure.benchmark import Cell
from spec_jax.models.t5 import T5, T5Config
from spec_jax.run.journal import Journal
from spec_jax.sampling import GREEDY
from spec_jax.state import Stats
from spec_jax.text.data import Example

BASE = Cell('model', 0.0, 4, 1)
LISTS = ['model', 'bigram'], [0.0, 1.0], [2, 4], [1, 8]


def test_one_axis_at_a_time():
    assert benchmark.one_axis_at_a_time(BASE, *LISTS) == [
        Cell('model', 0, 4, 1),
        Cell('model', 0, 2, 1),
        Cell('model', 1, 2, 1),
        Cell('model', 1, 4, 1),
        Cell('bigram', 0, 4, 1),
        Cell('bigram', 1, 4, 1),
        Cell('model', 0, 4, 8),
    ]


def test_every_combination():
    cells = benchmark.every_combination(BASE, *LISTS)
    assert len(cells) == len(set(cells)) == 16 and cells[0] == BASE
    assert Cell('bigram', 1.0, 2, 8) in cells
    assert len(benchmark.every_combination(dataclasses.replace(BASE, gamma=3), *LISTS)) == 17


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(draft='none'), "'none'"),
        (dict(gamma=0), 'gammas from 1 to 16, got 0'),
        (dict(gamma=17), 'got 17'),
        (dict(batch_size=0), 'batch sizes of 1 or more'),
        (dict(temperature=-1.0), 'temperature'),
    ],
)
def test_a_cell_out_of_range_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_a_sweep_that_was_stopped_goes_on_and_gives_the_same(tmp_path):
    cells = benchmark.one_axis_at_a_time(BASE, *LISTS)

    def figures(cell):
        return dict(speedup=1 / 3 + cell.gamma, none=None, bounds=dict(at_least=[0.1, None]))

    whole = benchmark.sweep(cells, figures, Journal.open(tmp_path / 'whole', dict(a=1)))
    assert whole[1] == dict(draft='model', temperature=0.0, gamma=2, batch_size=1) | figures(cells[1])

    def stopped(cell):
        if cell == cells[3]:
            raise KeyboardInterrupt
        return figures(cell)

    path = tmp_path / 'stopped'
    with pytest.raises(KeyboardInterrupt):
        benchmark.sweep(cells, stopped, Journal.open(path, dict(a=1)))
    journal = Journal.open(path, dict(a=1))
    assert benchmark.missing(cells, journal) == cells[3:]
    seen = []
    assert benchmark.sweep(cells, lambda cell: seen.append(cell) or figures(cell), journal) == whole
    assert seen == cells[3:]

    # Another cell is measured alone; what a cell depends on makes it another cell; another run is refused.
    more = Cell('model', 0.0, 9, 1)
    journal = Journal.open(path, dict(a=1))
    assert benchmark.missing([*cells, more], journal) == [more]
    assert benchmark.missing(cells, journal, identity=lambda cell: f'{cell} of other weights') == cells
    with pytest.raises(ValueError, match='another a'):
        Journal.open(path, dict(a=2))


def stats(rounds, tested_at, histogram, emitted=None, overlap=None):
    rows, histogram = np.array(rounds), np.array(histogram)
    accepted = (histogram * np.arange(histogram.shape[1])).sum(1)
    return Stats(
        rounds=rows,
        tested_at=np.array(tested_at),
        accepted=accepted,
        histogram=histogram,
        overlap=np.array(accepted if overlap is None else overlap, float),
        emitted=rows if emitted is None else np.array(emitted),
        calls=histogram,
    )


def test_acceptance_by_place_is_over_the_rounds_that_tested_it():
    # Drafts of 2: rejected at once; rejected after one; ended after one; both accepted, twice.
    rows = stats([5], [[5, 3]], [[1, 2, 2]])
    assert benchmark.position_acceptance(rows) == [4 / 5, 2 / 3]


def test_acceptance_by_place_adds_prompts_up():
    rows = stats([2, 3], [[2, 0], [3, 1]], [[1, 1, 0], [2, 0, 1]])
    assert benchmark.position_acceptance(rows) == [2 / 5, 1.0]


def test_acceptance_by_place_that_no_round_came_to():
    assert benchmark.position_acceptance(stats([3], [[3, 0]], [[3, 0, 0]])) == [0.0, None]


def decoded(seconds, tokens):
    parts = [stats([1, 0], [[1], [0]], [[1, 0], [0, 0]], emitted=[count, 0]) for count in tokens]
    return runs.Decoded([], None, sum(seconds), 0.0, 0.0, list(seconds), parts)


def test_speedup_interval_draws_both_times_of_a_batch_together():
    seconds, tokens = np.array([1.0, 2, 4, 8, 100]), [3, 5, 11, 2, 70]
    plain, twice = decoded(seconds, tokens), decoded(seconds / 2, tokens)
    assert benchmark.speedup_interval(plain, twice) == pytest.approx((2, 2))
    assert benchmark.speedup_interval(plain, decoded(seconds, 3 * np.array(tokens))) == pytest.approx((3, 3))
    low, high = benchmark.speedup_interval(plain, decoded(seconds / [1, 2, 3, 2, 2], tokens))
    assert 1 <= low < 2 < high <= 3
    assert benchmark.speedup_interval(decoded(seconds[:4], tokens[:4]), decoded(seconds[:4], tokens[:4])) == (
        None,
        None,
    )


def test_fillers_and_prompts_without_a_draft_are_left_out():
    parts = [
        stats([2, 0], [[2], [0]], [[1, 1], [0, 0]]),
        stats([3, 5], [[4], [0]], [[1, 2], [5, 0]]),
    ]
    rows = benchmark.rows_of(runs.Decoded([], None, batch_stats=parts))
    assert rows.rounds.tolist() == [2, 3, 5] and rows.histogram.tolist() == [[1, 1], [1, 2], [5, 0]]
    assert benchmark.alpha_interval(rows) == pytest.approx((0.5, 0.5))
    assert benchmark.alpha_interval(stats([1], [[0]], [[1, 0]])) == (None, None)


# --- a whole cell -------------------------------------------------------------------------------------------

CONFIG = T5Config(
    vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
)
SMALLER = dataclasses.replace(CONFIG, d_ff=16)


class Tokenizer:
    def __len__(self):
        return 40

    def batch_decode(self, lines, skip_special_tokens):
        return [' '.join(map(str, ids)) for ids in lines]


@pytest.fixture(scope='module')
def job():
    rng = np.random.default_rng(0)
    sources = [
        np.append(rng.integers(2, 40, size), 1).astype(np.int32) for size in (5, 2, 0, 9, 4, 3, 7, 2, 6, 8)
    ]
    examples = [Example('a', 'b') for _ in sources]
    settings = setup.Settings(DecodeConfig(1, 9, GREEDY), max_source_length=16)
    return setup.Job(examples, sources, 0, Tokenizer(), T5.create(CONFIG, jax.random.key(0)), settings)


def test_a_target_that_drafts_for_itself_is_always_accepted(job):
    figures = benchmark.measure(Cell('x', 0.0, 2, 2), job, ModelDrafter(job.target), repeats=1)
    assert json.loads(json.dumps(figures)) == figures  # so that a kept cell equals one just measured
    assert figures['alpha'] == figures['acceptance_rate'] == figures['greedy_match'] == 1
    assert figures['alpha_low'] == figures['alpha_high'] == 1
    assert figures['position_acceptance'] == [1, 1]
    assert figures['batches'] == 5 and figures['speedup_low'] <= figures['speedup_high']
    assert figures['c_hat'] == 1
    assert figures['operations_factor'] == pytest.approx(5 / 3)  # (gamma + gamma + 1) / (gamma + 1)
    assert figures['quality']['plain'] == figures['quality']['speculative']
    assert set(figures['compile_seconds']) == {'plain', 'speculative'}


@pytest.mark.slow
def test_a_sampled_cell_with_a_smaller_draft(job):
    drafter = ModelDrafter(T5.create(SMALLER, jax.random.key(1)))
    figures = benchmark.measure(Cell('x', 1.0, 2, 5), job, drafter, repeats=1)
    assert figures['greedy_match'] is None and figures['mismatches'] is None
    assert figures['batches'] == 2 and figures['speedup_low'] is None
    assert 0 < figures['alpha_low'] <= figures['alpha'] <= figures['alpha_high'] < 1
    read = 6 * 16 * 16 + 40 * 16
    assert figures['c_hat'] == (read + 3 * 16 * 16) / (read + 3 * 16 * 32)


def test_operations_are_those_of_models_that_count_them(job):
    draft = ModelDrafter(T5.create(SMALLER, jax.random.key(1)))
    figures = benchmark.operations(job.target, draft, None, 2)
    read = 6 * 16 * 16 + 40 * 16
    assert figures == dict(c_hat=(read + 3 * 16 * 16) / (read + 3 * 16 * 32), operations_factor=None)
    none = dict(c_hat=None, operations_factor=None)
    assert benchmark.operations(job.target, PromptLookup(), 0.5, 2) == none
    assert benchmark.operations(object(), draft, 0.5, 2) == none


def test_counts_by_batch_add_up_to_those_of_all_and_to_the_ids(job):
    settings = Cell('x', 0.0, 2, 2).settings(job.settings)  # 9 prompts and a filler
    programs = dict(
        plain=runs.plain_program(job.target, settings),
        speculative=runs.speculative_program(job.target, ModelDrafter(job.target), settings),
    )
    for result in runs.compare(job.sources, settings, programs, repeats=1).values():
        assert len(result.batch_seconds) == len(result.batch_stats) == 5
        assert sum(result.batch_seconds) == pytest.approx(result.seconds)
        emitted = np.concatenate([part.emitted for part in result.batch_stats])
        assert sorted(emitted) == sorted([0, *(len(ids) for ids in result.ids if len(ids))])
        assert emitted.sum() == result.stats.emitted and result.compile_seconds >= 0


# --- the report ---------------------------------------------------------------------------------------------


def row(cell=BASE, speedup=1.5, **changes):
    figures = dict(
        alpha=0.75,
        alpha_low=0.7,
        alpha_high=0.8,
        acceptance_rate=0.75,
        tokens_per_call=2.5,
        accepted_histogram=[2] * (cell.gamma + 1),
        position_acceptance=[0.5] * cell.gamma,
        c=0.1,
        cost_of_rows=1.25,
        predicted_speedup=1.75,
        attainable_speedup=1.6,
        guessed=1.0,
        speedup=speedup,
        speedup_low=speedup - 0.25,
        speedup_high=speedup + 0.25,
        plain_tokens_per_s=100.0,
        tokens_per_s=100 * speedup,
        operations_factor=1.5,
        quality=dict(plain=dict(bleu=30.0), speculative=dict(bleu=30.0)),
        greedy_match=1.0 if cell.temperature == 0 else None,
        near_ties=[] if cell.temperature == 0 else None,
    )
    return dataclasses.asdict(cell) | figures | changes


def by_batch(*speedups):
    return [row(dataclasses.replace(BASE, batch_size=2**n), speedup) for n, speedup in enumerate(speedups)]


@pytest.mark.parametrize(
    ('speedups', 'expected'),
    [
        ((1.5, 1.3, 0.7), 'up to batch size 2 (1.30 times plain decoding) and no longer at 4 (0.70)'),
        ((0.5, 1.3, 0.7, 0.6), 'up to batch size 2 (1.30 times plain decoding) and no longer at 4 (0.70)'),
        ((1.5, 1.3), 'up to the largest batch size tried, 2 (1.30'),
        ((0.6, 0.7), 'at no batch size tried with model, T = 0, gamma = 4: at best 0.70 times plain'),
    ],
    ids=['stops', 'gains late', 'never stops', 'never gains'],
)
def test_where_in_batch_size_speculation_stops_paying(speedups, expected):
    sentence = benchmark_report.batch_sentence(by_batch(*speedups)[::-1])
    assert expected in sentence and 'holds 1' not in sentence


def test_an_interval_that_holds_one_is_reported():
    assert 'The 95% interval holds 1 at 2.' in benchmark_report.batch_sentence(by_batch(1.5, 1.1, 0.7))
    assert 'holds 1 at 1 and 2.' in benchmark_report.batch_sentence(by_batch(1.1, 0.9))
    unknown = [one | dict(speedup_low=None, speedup_high=None) for one in by_batch(1.1, 0.9)]
    assert 'holds 1' not in benchmark_report.batch_sentence(unknown)


def test_sentences():
    rows = [row(), row(dataclasses.replace(BASE, gamma=2), 1.75), row(Cell('bigram', 1.0, 4, 1), 0.5)]
    assert benchmark_report.sentences(rows, BASE) == [
        'Fastest: model, T = 0, gamma = 2, batch size 1, 1.75 times plain decoding (95%: 1.50 to 2.00); 1.75 '
        'predicted.',
        'Greedy output is equal to plain decoding in all 2 cells at T = 0, token for token.',
    ]
    rows[1] |= dict(greedy_match=0.875)
    assert (
        'WARNING: greedy output differs from plain decoding in 1 of 2 cells'
        in (benchmark_report.sentences(rows, BASE)[-1])
    )


def cells_of(table):
    return [[text.strip() for text in line.strip('|').split('|')] for line in table.splitlines()]


def test_table_2_has_the_papers_figures_beside_ours():
    rows = [row(), row(Cell('model=other', 1.0, 4, 1)), row(Cell('bigram', 0.0, 4, 1), alpha=None)]
    header, _, *lines = cells_of(benchmark_report.table_2(rows, 'EnDe'))
    by_column = [dict(zip(header, line, strict=True)) for line in lines]
    assert (
        by_column[0] | dict(draft='model', T='0', α='0.750', c='0.100', expected='1.75', measured='1.50')
        == by_column[0]
    )
    assert (
        by_column[0]['paper α'] == '0.75 / 0.8 / 0.82' and by_column[0]['paper measured'] == '3.4 / 2.8 / 1.7'
    )
    assert by_column[1]['paper γ'] == '7 / 5 / 3' and by_column[1]['paper expected'] == '2.3 / 2.4 / 2'
    assert (
        by_column[2]['paper α'] == '0.2'
        and by_column[2]['paper measured'] == '-'
        and by_column[2]['α'] == '-'
    )
    header, _, line = cells_of(benchmark_report.table_2(rows[:1], 'CNN/DM'))
    assert dict(zip(header, line, strict=True))['paper c'] == '0.02 / 0.04 / 0.11'


def test_position_table_has_a_column_for_each_place_of_the_longest_draft():
    rows = [
        row(dataclasses.replace(BASE, gamma=3)),
        row(dataclasses.replace(BASE, gamma=2), position_acceptance=[0.625, None]),
    ]
    _, _, *lines = cells_of(benchmark_report.position_table(rows))
    assert lines[0][4:] == ['0.50'] * 3
    assert lines[1][4:] == ['0.62', '-', '']


def test_pictures_and_tables_of_a_sweep_of_one_cell_and_of_many():
    one = [row(alpha=None, predicted_speedup=None, speedup_low=None)]
    assert set(benchmark_report.pictures(one, BASE, 'title')) == {'gamma.png', 'accepted.png'}
    assert 'Batch size' not in benchmark_report.markdown(one, BASE, 'EnDe', 'weights', dict(data='d'))
    rows = [row(cell) for cell in benchmark.one_axis_at_a_time(BASE, *LISTS)]
    pictures = benchmark_report.pictures(rows, BASE, 'title')
    assert set(pictures) == {'gamma.png', 'accepted.png', 'batch_size.png', 'alpha.png'}
    text = benchmark_report.markdown(rows, BASE, 'EnDe', 'these weights, that device', dict(data='d'))
    assert text.count('\n\nthese weights, that device\n\n') == 1 and '* data: d' in text
    for name in pictures:
        assert f'({name})' in text


def test_alpha_of_a_draft_with_empty_rounds_is_marked_and_has_no_figure_of_the_paper():
    rows = [row(Cell('bigram', 0.0, BASE.gamma, 1), guessed=guessed) for guessed in (1.0, 0.75)]
    for one, label, marks in zip(rows, ('bigram', 'bigram\nwhere it guesses'), (2, 0), strict=True):
        axes = benchmark_report.pictures([row(), one], BASE, 'title')['alpha.png'].axes[0]
        assert [tick.get_text() for tick in axes.get_yticklabels()] == ['model', label]
        places = [line.get_ydata() for line in axes.lines if line.get_markerfacecolor() == 'white']
        assert sum(len(y) == 1 and y[0] > 0.5 for y in places) == marks
