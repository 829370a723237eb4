"""The draft length chosen from figures written down, and measured on a target whose acceptance is known."""

import jax
import numpy as np
import pytest

from spec_jax import analysis
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.measure import auto_gamma, setup
from spec_jax.measure.auto_gamma import PROBE
from spec_jax.models.t5 import T5, T5Config
from spec_jax.sampling import SamplingConfig

FREE_ROWS = [[1, 1.0], [2, 1.0], [5, 1.0], [9, 1.0]]


def measured(alpha, c, cost_of_rows=FREE_ROWS, **changes):
    tokens = float(analysis.expected_tokens(alpha, PROBE))
    return dict(alpha=alpha, tokens_per_call=tokens, tested=100, c=c, cost_of_rows=cost_of_rows) | changes


@pytest.mark.parametrize(
    ('alpha', 'c', 'gamma'), [(0.8, 0.05, 8), (0.9, 0.02, 16), (0.5, 0.1, 2), (0.3, 0.2, 1), (0.75, 0.02, 9)]
)
def test_where_rows_cost_nothing_the_choice_is_theorem_3_8s(alpha, c, gamma):
    choice = auto_gamma.choose(measured(alpha, c))
    assert choice['gamma'] == choice['theorem_gamma'] == analysis.best_gamma(alpha, c) == gamma
    for row in choice['rows']:
        theorem = analysis.walltime_improvement(alpha, row['gamma'], c)
        assert row['predicted'] == pytest.approx(row['attainable']) == pytest.approx(theorem)


def test_dear_rows_shorten_the_draft():
    """Row r costs 1 + (r - 1) / 4; quotients by hand: 1.5 / 1.25, 1.75 / 1.5, ..."""
    choice = auto_gamma.choose(measured(0.5, 0.0, [[1, 1.0], [2, 1.25], [5, 2.0], [9, 3.0]]))
    assert [row['attainable'] for row in choice['rows'][:3]] == pytest.approx([1.2, 1.75 / 1.5, 1.875 / 1.75])
    assert choice['rows'][15]['attainable'] == pytest.approx((2 - 0.5**16) / 5)  # 17 rows, beyond those timed
    assert choice['gamma'] == 1 and choice['theorem_gamma'] == 16
    assert 'gamma = 1: alpha = 0.50' in auto_gamma.sentence(measured(0.5, 0.0), choice, 1)


def test_a_draft_that_does_not_always_guess_is_measured_by_its_tokens_per_call():
    seldom = measured(0.9, 0.0, [[1, 1.0], [2, 1.1], [5, 1.25], [9, 1.5]], tokens_per_call=1.2)
    alpha = auto_gamma.effective_alpha(1.2, PROBE)
    assert analysis.expected_tokens(alpha, PROBE) == pytest.approx(1.2) and alpha < 0.2
    assert auto_gamma.choose(seldom)['gamma'] == 1
    assert auto_gamma.effective_alpha(None, 4) == auto_gamma.effective_alpha(1.0, 4) == 0
    assert auto_gamma.effective_alpha(5.0, 4) == 1


@pytest.mark.parametrize(
    ('figures', 'words'),
    [
        (measured(0.1, 0.3), 'alpha is not above c'),
        (measured(0.6, 0.05, [[1, 1.0], [2, 1.9], [5, 4.6], [9, 8.2]]), 'use a smaller batch'),
        (measured(0.15, 0.1, tokens_per_call=1.05), 'too few guesses pass'),
    ],
)
def test_where_nothing_gains_the_reason_is_given(figures, words):
    choice = auto_gamma.choose(figures)
    assert choice['gamma'] == 0
    message = auto_gamma.sentence(figures, choice, 8)
    assert message.startswith('WARNING: no gamma gains') and words in message and 'batch size 8' in message


def test_measured_and_kept(tmp_path):
    """A target that drafts for itself; what is kept is not measured again, another run's is refused."""
    sizes = dict(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_heads=2)
    target = T5.create(T5Config(**sizes, num_encoder_layers=1, num_decoder_layers=1), jax.random.key(0))
    sources = [np.arange(2, 2 + size, dtype=np.int32) for size in (5, 7, 0, 3)]
    sources[2] = np.ones(1, np.int32)  # an empty line
    settings = setup.Settings(DecodeConfig(4, 10, SamplingConfig(0.0)), max_source_length=16)
    job = setup.Job([], sources, 0, None, target, settings)
    path = tmp_path / 'gamma.jsonl'
    gamma, message, figures = auto_gamma.settle(job, ModelDrafter(target), path, dict(a=1))
    assert figures['alpha'] == pytest.approx(1, abs=1e-6) and figures['tested'] > 0
    assert [rows for rows, _ in figures['cost_of_rows']] == [1, 2, 5, 9]
    assert min(cost for _, cost in figures['cost_of_rows']) > 0 and figures['c'] >= 0
    assert figures['gamma'] == gamma and message.count('\n') == 2 + 16
    again = auto_gamma.settle(job, None, path, dict(a=1))  # without a drafter nothing could be measured
    assert again == (gamma, message, figures)
    with pytest.raises(ValueError, match='another a'):
        auto_gamma.settle(job, None, path, dict(a=2))
