"""scripts/benchmark_overhead.py as its user sees it, on a tiny target of random weights, and the parts below it."""

import json

import numpy as np
import pytest
from tiny import LINES, PAIR, assert_refused, runner, save_models

from spec_jax.measure import overhead
from spec_jax.run.report import KEYS
from spec_jax.runtime.backend import row_cost
from spec_jax.types import Inputs


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('overhead')
    save_models(root, 'target')
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    return root


@pytest.fixture(scope='module')
def run(world):
    few = '--config.max_new_tokens=12', '--config.gamma=2', '--config.repeats=1', '--drafts=prompt_lookup'
    return runner('benchmark_overhead.py', world, *PAIR, *few)


def test_oracles_are_accepted_as_often_as_asked_and_change_no_output(run, world):
    folder = world / 'done'
    ((code, out, err),) = run([f'--workdir={folder}', '--config.batch_size=2'])
    assert code == 0, err
    report = json.loads((folder / 'report.json').read_text())
    assert list(report)[: len(KEYS)] == list(KEYS)
    *oracles, real = report['drafts']
    thrifty, oracles = ([row for row in oracles if row['thrifty'] is kind] for kind in (True, False))
    assert [row['right'] for row in oracles] == list(overhead.RIGHT)
    assert [row['right'] for row in thrifty] == (list(overhead.RIGHT_THRIFTY) if row_cost(2) else [])
    assert all(row['greedy_match'] == 1.0 and row['mismatches'] == [] for row in report['drafts'])
    assert {row['tokens'] for row in report['drafts']} == {report['tokens']}
    never, always = oracles[0], oracles[-1]
    assert never['alpha'] == never['acceptance_rate'] == 0 and never['tokens_per_call'] == 1
    assert always['alpha'] == always['acceptance_rate'] == 1 and always['tokens_per_call'] > 2
    calls = [row['tokens_per_call'] for row in oracles]
    assert calls == sorted(calls) and calls[2] < calls[5]
    assert real['draft'] == 'prompt_lookup' and 1 < real['tokens_per_call'] <= 3
    for row in report['drafts']:
        assert row['time_per_token'] * row['speedup'] == pytest.approx(1)
    assert report['never_right_always_guessing'] == pytest.approx(never['time_per_token'])
    assert all(row['cost_of_calls'] == pytest.approx(row['cost_of_rows']) for row in oracles)
    assert report['never_right'] == pytest.approx((thrifty or [never])[0]['time_per_token'])

    text = (folder / 'report.md').read_text()
    assert f'{report["never_right"]:.2f} times plain decoding per token at gamma = 2' in text
    assert text.count('\n| oracle, ') == len(overhead.RIGHT) and '| prompt_lookup' in text
    assert 'time/token, plain = 1' in out and 'A draft that is never right takes' in out
    assert (folder / 'overhead.png').read_bytes().startswith(b'\x89PNG')
    assert sorted(path.name for path in folder.iterdir()) == ['overhead.png', 'report.json', 'report.md']


BAD = {
    'sampling': (['--config.temperature=1.0'], 'temperature: expected 0, got 1'),
    'plain decoding': (['--config.gamma=0'], 'gamma >= 1'),
    'lenience': (['--config.lenience=0.5'], 'rule: expected an exact one, got lenience 0.5'),
    'no draft among drafts': (['--drafts=none'], "got 'none'"),
    'unknown draft': (['--drafts=magic'], "got 'magic'"),
    'missing input': (['--config.data.path={w}/none.txt'], 'none.txt'),
}


def test_bad_input_gets_one_line_and_leaves_nothing(run, world):
    assert_refused(run, world, BAD)


SOURCES = [np.array(ids, np.int32) for ids in ([5, 6, 1], [5, 6, 7, 1], [8, 1])]


def test_an_oracle_is_right_at_the_rate_asked_and_otherwise_wrong_within_the_vocabulary():
    outputs = [np.random.default_rng(row).integers(0, 7, 900).astype(np.int32) for row in range(3)]
    right = []
    for rate in (0.0, 0.3, 0.6, 1.0):
        oracle = overhead.make_oracle(SOURCES, outputs, rate, vocab_size=7, length=1000, pad_id=0)
        tokens = np.asarray(oracle.script.tokens)
        assert tokens.shape == (3, 1000) and tokens.min() >= 0 and tokens.max() < 7
        right.append(tokens[:, :900] == np.stack(outputs))
        assert right[-1].mean() == pytest.approx(rate, abs=4 * (rate * (1 - rate) / 2700) ** 0.5)
    for fewer, more in zip(right, right[1:], strict=False):
        assert (more >= fewer).all()


@pytest.mark.parametrize('width', [3, 4, 6])
def test_an_oracle_knows_a_source_in_any_batch_of_any_width(width):
    oracle = overhead.make_oracle(SOURCES, [[1], [1], [1]], 1.0, vocab_size=7, length=2, pad_id=0)
    order = [row for row in (2, 1, 0, 2) if len(SOURCES[row]) <= width]
    tokens = np.stack([np.pad(SOURCES[row], (0, width - len(SOURCES[row]))) for row in order])
    np.testing.assert_array_equal(oracle.init(None, None, Inputs(tokens, tokens > 0), 0), order)


def rows(*points, thrifty=False):
    return [dict(right=alpha, alpha=alpha, speedup=speedup, thrifty=thrifty) for alpha, speedup in points]


@pytest.mark.parametrize(
    ('points', 'never_right', 'break_even', 'at_gaining'),
    [
        ([(0, 0.8), (0.1, 0.9), (0.3, 1.1), (1, 3)], 1.25, 0.2, 1.0),
        ([(0, 0.5), (0.2, 0.75), (0.4, 1.25), (1, 3)], 2.0, 0.3, 0.75),
        ([(0, 0.8), (0.1, 1.05), (0.3, 0.95), (0.5, 1.05), (1, 3)], 1.25, 0.4, 1.0),
        ([(0, 1.25), (1, 2.25)], 0.8, 0.0, 1.45),
        ([(0, 0.5), (1, 0.9)], 2.0, None, 0.58),
    ],
    ids=['between', 'late', 'the last of three crossings', 'always', 'never'],
)
def test_conclusions(points, never_right, break_even, at_gaining):
    real = dict(right=None, alpha=0.01, speedup=7.0, thrifty=False)  # no oracle: not looked at
    expected = dict(never_right=never_right, break_even_alpha=break_even, speedup_at_gaining_alpha=at_gaining)
    always = {f'{name}_always_guessing': one for name, one in expected.items()}
    conclusions = overhead.conclusions([real, *rows(*points)])
    assert conclusions == pytest.approx(expected | always)
    sentence = overhead.sentences(conclusions, 3)[1]
    assert sentence.count('at no alpha' if break_even is None else f'from alpha = {break_even:.2f} on') == 2

    thrifty = rows((1, 2.0), (0, 0.96), (0.1, 0.98), (0.2, 1.02), thrifty=True)
    conclusions = overhead.conclusions([*rows(*points), real, *thrifty])
    shipped = dict(never_right=1 / 0.96, break_even_alpha=0.15, speedup_at_gaining_alpha=1.02)
    assert conclusions == pytest.approx(shipped | always)
    assert 'from alpha = 0.15 on (the aim: from 0.2)' in overhead.sentences(conclusions, 3)[1]
