"""The paper's equations against the paper's own figures, and figures from counts against a trace by hand."""

import numpy as np
import pytest

from spec_jax import analysis
from spec_jax.state import Stats

# alpha, gamma, operations factor, speed factor at c = c_hat = 0 (Table 1)
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

# gamma, alpha, c, tokens per call (Equation 1), speed-up (Theorem 3.8): Table 2's rows
TABLE_2 = [
    (7, 0.75, 0.02, 3.60, 3.16),
    (7, 0.80, 0.04, 4.16, 3.25),
    (7, 0.82, 0.11, 4.42, 2.50),
    (7, 0.62, 0.02, 2.57, 2.26),
    (5, 0.68, 0.04, 2.82, 2.35),
    (3, 0.71, 0.11, 2.57, 1.93),
    (5, 0.65, 0.02, 2.64, 2.40),
    (5, 0.73, 0.04, 3.14, 2.62),
    (3, 0.74, 0.11, 2.69, 2.03),
    (5, 0.53, 0.02, 2.08, 1.89),
    (3, 0.55, 0.04, 2.02, 1.80),
    (3, 0.56, 0.11, 2.05, 1.54),
]


@pytest.mark.parametrize('alpha, gamma, operations, speed', TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert analysis.operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.006)
    assert analysis.walltime_improvement(alpha, gamma, 0) == pytest.approx(speed, abs=0.006)


@pytest.mark.parametrize('gamma, alpha, c, tokens, speed', TABLE_2)
def test_table_2(gamma, alpha, c, tokens, speed):
    assert analysis.expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=0.006)
    assert analysis.walltime_improvement(alpha, gamma, c) == pytest.approx(speed, abs=0.006)


def test_limits():
    assert analysis.expected_tokens(1.0, 7) == 8
    assert analysis.expected_tokens(0.0, 7) == 1
    assert analysis.walltime_improvement(1.0, 4, 0.1) == pytest.approx(5 / 1.4)
    assert analysis.walltime_improvement(0.0, 4, 0.1) == pytest.approx(1 / 1.4)
    assert analysis.walltime_improvement(0.75, 1000, 0.0) == pytest.approx(4)


def test_expected_tokens_is_the_mean_of_a_capped_geometric():
    alpha, gamma = 0.63, 4
    lengths = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
    assert analysis.expected_tokens(alpha, gamma) == pytest.approx(
        sum(p * (n + 1) for n, p in enumerate(lengths))
    )


@pytest.mark.parametrize('alpha, c', [(0.3, 0.2), (0.7, 0.1), (0.9, 0.02)])
def test_corollary_3_9_some_gamma_gains_at_least_this(alpha, c):
    best = analysis.best_gamma(alpha, c)
    assert best >= 1
    assert analysis.walltime_improvement(alpha, best, c) >= analysis.guaranteed_improvement(alpha, c)


def test_no_gamma_helps_where_alpha_is_at_most_c():
    assert analysis.best_gamma(0.1, 0.1) == 0
    assert analysis.best_gamma(0.05, 0.3) == 0


def test_best_gamma_by_hand():
    # alpha .5, c .25: gamma 1 gives 1.5 / 1.25 = 1.2, gamma 2 1.75 / 1.5 = 1.167
    assert analysis.best_gamma(0.5, 0.25) == 1


def test_attainable_is_theorem_3_8_when_rows_are_free():
    tokens = analysis.expected_tokens(0.8, 5)
    theorem = analysis.walltime_improvement(0.8, 5, 0.1)
    assert analysis.attainable_speedup(tokens, 5, 0.1, 1.0) == pytest.approx(theorem)
    assert analysis.attainable_speedup(tokens, 5, 0.1, 1.5) == pytest.approx(tokens / 2.0)


def _stats(rounds, tested_at, accepted, histogram, overlap, emitted):
    arrays = (rounds, tested_at, accepted, histogram, overlap, emitted, np.zeros_like(histogram))
    return Stats(**dict(zip(Stats.__dataclass_fields__, map(np.array, arrays), strict=True)))


def test_figures_that_cannot_be_compared():
    """gamma 3; row 0: accepts 3, then 0 of 1 tested; row 1: accepts 1 of 2 tested."""
    stats = _stats([2, 1], [[2, 1, 1], [1, 1, 0]], [3, 1], [[1, 0, 0, 1], [0, 1, 0, 0]], [3.2, 1.0], [5, 2])
    figures = analysis.acceptance_figures(stats)
    assert figures == dict(
        tokens=7,
        rounds=3,
        tokens_per_call=pytest.approx(7 / 3),
        alpha=pytest.approx(4.2 / 6),
        acceptance_rate=pytest.approx(4 / 6),
        accepted_histogram=[1, 1, 0, 1],
    )
    whole = analysis.add_stats([stats, stats])
    assert analysis.acceptance_figures(whole)['tokens'] == 14
    assert analysis.acceptance_figures(whole)['accepted_histogram'] == [2, 2, 0, 2]
    assert whole.tested_at.tolist() == [6, 4, 2] and whole.tested == 12


def test_nothing_decoded_gives_no_ratio():
    figures = analysis.acceptance_figures(_stats([0], [[0]], [0], [[0, 0]], [0.0], [0]))
    assert figures['alpha'] is None and figures['tokens_per_call'] is None
