"""scripts/compare_transformers.py as its user sees it, on tiny random weights, and the parts below it."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import LINES, PAIR, ROOT, runner, write_tokenizer

from spec_jax.measure import comparison
from spec_jax.measure.comparison import Answer, Prompt
from spec_jax.models import t5_widen
from spec_jax.models.t5 import T5
from spec_jax.models.t5_weights import save_t5
from spec_jax.run.report import KEYS
from spec_jax.types import Inputs

SCRIPT = ROOT / 'scripts/compare_transformers.py'
SMALL = dataclasses.replace(
    t5_widen.SMALL,
    vocab_size=40,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=2,
)
LARGE = dataclasses.replace(
    SMALL, d_model=24, d_ff=48, num_heads=3, num_encoder_layers=2, num_decoder_layers=3
)
# The script with small shapes in place of those that take gigabytes, and for one folder without PyTorch. On one
# core: PyTorch's threads wait for each other by spinning, for ever so long where other tests want the cores too.
SHRUNK = f"""
import importlib.util
import os
import sys
from absl import flags
from spec_jax.run import cli
from spec_jax.models import t5_widen
from spec_jax.models.t5 import T5Config
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
t5_widen.SMALL = {SMALL!r}
t5_widen.SHAPES['base'] = ({LARGE!r}, 0.1)
spec = importlib.util.spec_from_file_location('script', {str(SCRIPT)!r})
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
def main(argv):
    if flags.FLAGS.workdir.endswith('no_torch'):
        sys.modules['torch'] = None
    script.main(argv)
"""
BAD = {
    'size': (['--size=huge'], 'size'),
    'batch': (['--config.batch_size=2'], 'batch_size: expected 1, got 2'),
    'sampling': (['--config.temperature=1.0'], 'temperature: expected 0, got 1'),
    'lenience': (['--config.lenience=0.5'], 'lenience: expected 1, got 0.5'),
    'bigram': (
        ['--config.draft.kind=bigram'],
        "draft.kind: expected model, which both sides can have; got 'bigram'",
    ),
    'gamma': (['--config.gamma=0'], 'gamma: expected a draft of 1 token or more, got 0'),
    'no_torch': (
        [],
        'expected PyTorch for the side of transformers, found none; pip install -r requirements-dev',
    ),
}
RUNS = {
    'pair': [],
    'base': ['--size=base', '--config.data.limit=2', '--config.max_new_tokens=12'],
    **{name: extra for name, (extra, _) in BAD.items()},
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Of a pair whose texts end, some of them, and of the lines to decode."""
    root = tmp_path_factory.mktemp('compare')
    draft = t5_widen.endless_t5(dataclasses.replace(SMALL, vocab_size=20), 0)
    target = t5_widen.widen(draft, dataclasses.replace(LARGE, vocab_size=20), 0.1, 1)
    for name, model in (('target', target), ('draft', draft)):
        save_t5(model.replace(config=dataclasses.replace(model.config, eos_id=4)), root / name)
        write_tokenizer(root / name)
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    (root / 'shrunk.py').write_text(SHRUNK)
    return root


@pytest.fixture(scope='module')
def ran(folder):
    """[exit code, stdout, stderr] of all `RUNS`; importing takes longer than most of them."""
    few = '--config.max_new_tokens=10', '--config.gamma=2', '--config.repeats=1'
    run = runner(folder / 'shrunk.py', folder, *PAIR, *few)
    return dict(
        zip(RUNS, run(*(['--workdir={w}/' + name, *extra] for name, extra in RUNS.items())), strict=True)
    )


def check(folder, out):
    """What holds of any run; returns the report."""
    report = json.loads((folder / 'report.json').read_text())
    assert list(report)[: len(KEYS)] == list(KEYS)
    decoders = {row['decoder']: row for row in report['decoders']}
    assert list(decoders) == list(comparison.NAMES)
    assert {row['tokens'] for row in decoders.values()} == {report['tokens']}
    for row in decoders.values():
        assert row['tokens_per_s'] == pytest.approx(row['tokens'] / row['seconds'])
        assert row['tokens_per_call'] == pytest.approx(row['tokens'] / row['calls'])
    assert decoders['plain']['calls'] == decoders['generate']['calls'] == report['tokens']
    assert decoders['speculative']['calls'] == report['rounds'] <= report['tokens']
    for row in report['ratios']:
        over = decoders[row['over']]['tokens_per_s']
        assert row['ratio'] == pytest.approx(decoders[row['decoder']]['tokens_per_s'] / over)
        assert row['low'] <= row['high']
        assert row['near_ties'] == row['mismatches'] == []
    assert report['greedy_match'] == 1.0
    text = (folder / 'report.md').read_text()
    tables = comparison.decoder_table(report['decoders']), comparison.ratio_table(report['ratios'])
    assert all(table in text and table in out for table in tables)
    assert report['weights'] in text and report['weights'] in out
    assert sorted(path.name for path in folder.iterdir()) == ['report.json', 'report.md']
    return report


def test_a_pair_and_transformers_agree(ran, folder):
    pytest.importorskip('torch')
    code, out, err = ran['pair']
    assert code == 0 and 'transformers]' not in err, err  # no warnings of the library's
    report = check(folder / 'pair', out)
    assert [row['equal'] for row in report['ratios']] == [len(LINES) - 1] * len(report['ratios'])
    assert report['tokens'] < 10 * (len(LINES) - 1)  # a text has ended before its limit
    aims = {(row['decoder'], row['over']): row['aim'] for row in report['ratios'] if row['aim']}
    assert aims == {('plain', 'generate'): 1.5, ('speculative', 'assisted'): 3.0}


def test_a_shape_has_weights_made_for_it_that_agree(ran, folder):
    pytest.importorskip('torch')
    code, out, err = ran['base']
    assert code == 0 and 'transformers]' not in err, err
    report = check(folder / 'base', out)
    assert report['tokens'] == 2 * 12 and report['size'] == 'base'
    calls = {row['decoder']: row['calls'] for row in report['decoders']}
    assert calls['speculative'] < 24
    assert (
        abs(calls['assisted'] - calls['speculative']) <= 2
    )  # the same drafts; theirs stop one short of the limit
    assert 'Agreement is made' in report['weights'] and 'multiplied by 0.1.' in report['weights']


@pytest.mark.parametrize('name', BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(ran, folder, name):
    code, _, err = ran[name]
    shown = err.strip().splitlines()
    assert code == 1 and len(shown) == 1 and shown[0].startswith('error: '), err
    assert BAD[name][1] in shown[0]
    assert not (folder / name).exists() or not list((folder / name).iterdir())


# Shapes that agree.


@partial(jax.jit, static_argnames='config')
def _logits(params, config, inputs, tokens):
    return T5(params, config).forward(inputs, tokens)


def logits(model):
    """[2, 9, V], on a batch with padding."""
    draw = np.random.default_rng(3)
    inputs = Inputs(draw.integers(2, 40, (2, 7)), np.arange(7) < np.array([[7], [4]]))
    return np.asarray(_logits(model.params, model.config, inputs, draw.integers(2, 40, (2, 9))))


def test_a_wider_and_deeper_target_has_the_draft_s_logits_where_the_rest_writes_nothing():
    draft = t5_widen.endless_t5(SMALL, 0)
    expected = logits(draft)
    np.testing.assert_allclose(logits(t5_widen.widen(draft, LARGE, 0.0, 1)), expected, atol=1e-4, rtol=0)
    apart = [np.abs(logits(t5_widen.widen(draft, LARGE, s, 1)) - expected).max() for s in (0.01, 0.1, 1.0)]
    assert 1e-2 < apart[0] < apart[1] < apart[2]


def test_no_weight_of_the_target_but_two_columns_of_the_head_is_zero():
    target = t5_widen.widen(t5_widen.endless_t5(SMALL, 0), LARGE, 0.1, 1)
    zeros = {path: int((leaf[...] == 0).sum()) for path, leaf in nnx.to_flat_state(target.params)}
    assert {path: count for path, count in zeros.items() if count} == {('head',): 2 * LARGE.d_model}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(d_model=8), "d_model: expected at least the draft's 16, got 8"),
        (dict(num_decoder_layers=1), "num_decoder_layers: expected at least the draft's 2, got 1"),
        (dict(vocab_size=41), 'expected a target like its draft but for'),
        (dict(d_kv=4), 'expected a target like its draft but for'),
    ],
)
def test_a_draft_that_does_not_fit_in_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        t5_widen.widen(t5_widen.endless_t5(SMALL, 0), dataclasses.replace(LARGE, **change), 0.1, 1)


# The clock.


def test_decoders_take_turns_in_alternating_order_and_the_median_counts(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(comparison.time, 'perf_counter', lambda: clock[0])
    monkeypatch.setattr(comparison.time, 'sleep', lambda _: None)
    costs = {'plain': iter([50, 1, 2, 9, 4, 3, 8]), 'generate': iter([9, 10, 10, 10, 10, 10, 10])}

    def decoder(name):
        def decode(prompt):
            order.append((name, len(prompt.ids)))
            clock[0] += next(costs[name])
            return Answer(prompt.ids[:3], 1)

        return decode

    prompts = [
        Prompt(np.arange(size), Inputs(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool)), None)
        for size in (4, 2)
    ]
    results = comparison.measure({name: decoder(name) for name in costs}, prompts, repeats=3)
    forwards, backwards = ['plain', 'generate'], ['generate', 'plain']
    turns = [order[start : start + 2] for start in range(0, len(order), 2)]  # the first is not timed
    names = [forwards, forwards, backwards, backwards, forwards, forwards, backwards]
    assert [[name for name, _ in turn] for turn in turns] == names
    assert [{size for _, size in turn} for turn in turns] == [{2}, {4}, {2}, {4}, {2}, {4}, {2}]
    assert results['plain'].seconds == [3, 4] and results['generate'].seconds == [10, 10]
    assert results['plain'].compile_seconds == 46 and results['generate'].compile_seconds == 0
    plain, generate = comparison.decoder_rows(results)
    assert plain['tokens'] == 5 and plain['tokens_per_s'] == pytest.approx(5 / 7)
    assert generate['tokens_per_call'] == 2.5 and generate['tokens_per_s'] == pytest.approx(5 / 20)
