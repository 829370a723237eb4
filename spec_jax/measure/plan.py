"""The gain of speculation at each draft length, from alpha and c alone: no model needed.

Source: Leviathan, Kalman and Matias 2023, Equation 1, Theorems 3.8 and 3.11, Corollary 3.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tabulate import tabulate

from spec_jax import analysis

_COLUMNS = {
    'gamma': 'γ',
    'tokens_per_call': 'tokens per call',
    'speedup': 'speed-up',
    'operations': 'operations',
}


def plan(alpha: float, c: float, c_hat: float, max_gamma: int) -> dict[str, Any]:
    """Figures of each gamma from 0 (plain decoding) to `max_gamma`, and the gamma that is fastest.

    Args:
      alpha: mean acceptance probability, 0 to 1.
      c: time of a draft step over that of a plain step of the target.
      c_hat: the same of arithmetic operations.
      max_gamma: longest draft.

    Returns:
      rows, a dict for each gamma with tokens_per_call (Equation 1), speedup (Theorem 3.8) and operations (Theorem
      3.11: how many times plain decoding's); best_gamma; and guaranteed (Corollary 3.9), None where alpha <= c.

    Raises:
      ValueError: for a figure out of range.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(
            f'alpha: expected a number from 0 to 1, got {alpha:g}; scripts/measure_alpha.py measures it'
        )
    for name, value in (('c', c), ('c_hat', c_hat)):
        if not value >= 0:
            raise ValueError(f"{name}: expected the draft's cost over the target's, 0 or more, got {value:g}")
    if max_gamma < 1:
        raise ValueError(f'max_gamma: expected an integer >= 1, got {max_gamma}')
    gammas = np.arange(max_gamma + 1)
    columns = (
        gammas,
        analysis.expected_tokens(alpha, gammas),
        analysis.walltime_improvement(alpha, gammas, c),
        analysis.operations_factor(alpha, gammas, c_hat),
    )
    rows = [
        dict(zip(_COLUMNS, (int(row[0]), *map(float, row[1:])), strict=True))
        for row in zip(*columns, strict=True)
    ]
    return dict(
        rows=rows,
        best_gamma=analysis.best_gamma(alpha, c, max_gamma),
        guaranteed=float(analysis.guaranteed_improvement(alpha, c)) if alpha > c else None,
    )


def table(planned: dict[str, Any]) -> str:
    """A line for each gamma; the best one is marked."""
    lines = [
        (*(row[name] for name in _COLUMNS), 'best' if row['gamma'] == planned['best_gamma'] else '')
        for row in planned['rows']
    ]
    return tabulate(lines, [*_COLUMNS.values(), ''], tablefmt='github', floatfmt='.2f')


def sentence(planned: dict[str, Any], alpha: float, c: float) -> str:
    """The table's conclusion in words."""
    gamma = planned['best_gamma']
    if not gamma:
        why = (
            f'alpha = {alpha:g} is not above c = {c:g}'
            if alpha <= c
            else f'at alpha = {alpha:g} and c = {c:g}'
        )
        return (
            f'No draft length gains anything: {why}. Decode plainly, or find a likelier or a cheaper draft.'
        )
    best = planned['rows'][gamma]
    text = (
        f'gamma = {gamma} is best: {best["tokens_per_call"]:.2f} tokens per target call, {best["speedup"]:.2f} '
        f'times as fast as plain decoding, for {best["operations"]:.2f} times its arithmetic operations.'
    )
    if gamma == len(planned['rows']) - 1:
        text += ' A longer draft may be better still: raise --max_gamma.'
    return text


def plot(planned: dict[str, Any], alpha: float, c: float) -> Figure:
    """Speed-up, tokens per call and operations over gamma."""
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = figure.subplots()
    gammas = [row['gamma'] for row in planned['rows']]
    series = (
        ('tokens_per_call', 'tokens per target call: the speed-up of a draft that costs nothing', '--', 'C0'),
        ('speedup', f'speed-up at c = {c:g}', 'o-', 'C0'),
        ('operations', 'arithmetic operations, plain decoding = 1', 's:', 'C1'),
    )
    for name, label, style, colour in series:
        axes.plot(
            gammas, [row[name] for row in planned['rows']], style, color=colour, markersize=4, label=label
        )
    axes.axhline(1, color='black', linewidth=0.8)
    if best := planned['best_gamma']:
        axes.plot(
            best, planned['rows'][best]['speedup'], 'o', color='C3', markersize=9, label=f'best: γ = {best}'
        )
    axes.set(xlabel='γ, tokens drafted per target call', ylim=(0, None), title=f'α = {alpha:g}, c = {c:g}')
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
