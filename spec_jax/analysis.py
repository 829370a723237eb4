"""The paper's equations in the paper's symbols, and figures from counts.

alpha is the mean acceptance probability, gamma the draft length, c the time of a draft step over the time
of a plain step of the target, c_hat the same ratio in arithmetic operations. Functions take numbers or
NumPy arrays that broadcast.

Source: Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spec_jax.state import Stats

_COUNTS = ('rounds', 'accepted', 'overlap', 'emitted')  # of Stats, besides those by place


def expected_tokens(alpha, gamma):
    """Tokens per target call, (1 - alpha^(gamma + 1)) / (1 - alpha) (Equation 1); gamma + 1 at alpha = 1."""
    alpha, gamma = np.asarray(alpha, float), np.asarray(gamma)
    below = np.where(alpha < 1, alpha, 0.0)
    return np.where(alpha < 1, (1 - below ** (gamma + 1)) / (1 - below), gamma + 1.0)


def walltime_improvement(alpha, gamma, c):
    """Expected speed-up, Equation 1 over (gamma c + 1) (Theorem 3.8).

    It takes a target call over gamma + 1 rows to cost as much as over one; see `attainable_speedup`.
    """
    return expected_tokens(alpha, gamma) / (gamma * np.asarray(c, float) + 1)


def guaranteed_improvement(alpha, c):
    """(1 + alpha) / (1 + c): with alpha > c, some gamma gains at least this much (Corollary 3.9)."""
    return (1 + np.asarray(alpha, float)) / (1 + np.asarray(c, float))


def operations_factor(alpha, gamma, c_hat):
    """Growth of arithmetic operations, (gamma c_hat + gamma + 1) over Equation 1 (Theorem 3.11)."""
    gamma = np.asarray(gamma)
    return (gamma * np.asarray(c_hat, float) + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, max_gamma: int = 16) -> int:
    """The gamma from 0 to `max_gamma` that is best by Theorem 3.8; 0 where no draft length gains."""
    gammas = np.arange(max_gamma + 1)
    return int(np.argmax(walltime_improvement(alpha, gammas, c)))


def attainable_speedup(tokens_per_call, gamma, c, cost_of_rows):
    """Speed-up with nothing spent outside the two models: tokens_per_call / (gamma c + cost_of_rows).

    Args:
      tokens_per_call: measured.
      gamma: draft length.
      c: draft step over plain step.
      cost_of_rows: target call over gamma + 1 positions over plain step; Theorem 3.8 takes it as 1.
    """
    return np.asarray(tokens_per_call, float) / (gamma * np.asarray(c, float) + cost_of_rows)


def add_stats(parts: list[Stats]) -> Stats:
    """Sums counts over the rows of all parts, none included: scalars, tested_at [G], two of [G + 1]; NumPy."""
    sums = {name: sum(np.asarray(getattr(part, name)).sum() for part in parts) for name in _COUNTS}
    for name, size in (('tested_at', 0), ('histogram', 1), ('calls', 1)):
        sums[name] = sum([np.asarray(getattr(part, name)).sum(0) for part in parts] or [np.zeros(size, int)])
    return Stats(**sums)


def acceptance_figures(stats: Stats) -> dict[str, Any]:
    """Figures of a speculative run.

    Args:
      stats: of any number of rows, or already summed by `add_stats`.

    Returns:
      tokens, rounds, tokens_per_call, alpha (mean sum of min(p, q) over tested positions), acceptance_rate
      (accepted over tested positions) and accepted_histogram (rounds by number of accepted tokens). A ratio
      without a denominator is None.
    """
    total = {name: np.asarray(getattr(stats, name)).sum() for name in (*_COUNTS, 'tested')}

    def ratio(over, under):
        return float(total[over] / total[under]) if total[under] else None

    histogram = np.asarray(stats.histogram)
    return dict(
        tokens=int(total['emitted']),
        rounds=int(total['rounds']),
        tokens_per_call=ratio('emitted', 'rounds'),
        alpha=ratio('overlap', 'tested'),
        acceptance_rate=ratio('accepted', 'tested'),
        accepted_histogram=histogram.reshape(-1, histogram.shape[-1]).sum(0).tolist(),
    )
