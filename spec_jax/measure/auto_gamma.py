"""`--config.gamma=auto`: the best draft length for alpha, c and the cost of rows, measured on a few prompts.

Theorem 3.8 assumes that a target call over gamma + 1 rows costs as much as over one. Where it does not, as on a CPU
or in a large batch, its drafts are too long; hence the gamma is chosen that has the highest

    tokens per call / (gamma c + cost of gamma + 1 rows)

which is the theorem's quotient where rows cost nothing. Both choices are reported.

Source: Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2, Equation 1 and Theorem 3.8.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.decoding import MAX_GAMMA
from spec_jax.drafters.base import Drafter
from spec_jax.measure import runs, setup
from spec_jax.models.base import Model
from spec_jax.run.journal import Journal

PROBE = 4  # draft length at which alpha and c are measured
_MORE_ROWS = (
    1,
    8,
)  # other draft lengths at which a target call is timed; costs between them are interpolated
_BATCHES = 8
_SAMPLES = 7


def measure(
    target: Model, drafter: Drafter, sources: Sequence[np.ndarray], settings: setup.Settings
) -> dict[str, Any]:
    """Decodes a few prompts and times the calls.

    Args:
      target: the model.
      drafter: the draft.
      sources: int32 [S] each; up to `_BATCHES` batches of them, spread over the lengths, are decoded.
      settings: gamma is not used.

    Returns:
      In JSON types: `alpha`, `tokens_per_call` and `c` at a gamma of `PROBE`; `tested`, draft tokens that alpha
      is the mean over; `cost_of_rows`, [rows, plain steps] by number of rows, from one row on.

    Raises:
      ValueError: no line has text.
      FloatingPointError: a model gave NaN.
    """
    probe = settings.decoding(gamma=PROBE)
    some = _spread([ids for ids in sources if len(ids) > 1], probe.batch_size * _BATCHES)
    probe = setup.one_width(probe, some)
    decoded = runs.decode_lines(some, probe, runs.speculative_program(target, drafter, probe))
    figures = analysis.acceptance_figures(decoded.stats)
    timers = {
        gamma: runs.step_timer(target, one, some, probe.decoding(gamma=gamma))
        for gamma, one in {PROBE: drafter, **dict.fromkeys(_MORE_ROWS)}.items()
    }
    for _ in range(_SAMPLES):
        for timer in timers.values():
            timer.measure()
    times = {gamma: timer.medians() for gamma, timer in timers.items()}
    plain = float(np.median([one['plain_step'] for one in times.values()]))
    cost = {gamma + 1: one['target_call'] / plain for gamma, one in times.items()}
    return dict(
        alpha=figures['alpha'],
        tokens_per_call=figures['tokens_per_call'],
        tested=int(decoded.stats.tested),
        c=times[PROBE]['draft_step'] / plain,
        cost_of_rows=[[1, 1.0], *([rows, cost[rows]] for rows in sorted(cost))],
    )


def settle(
    job: setup.Job, drafter: Drafter, kept: pathlib.Path, run: dict[str, Any]
) -> tuple[int, str, dict[str, Any]]:
    """Measures and chooses, or reads what the same run measured before it was stopped.

    Args:
      job: target, sources and settings.
      drafter: the draft.
      kept: path of the journal of measurements.
      run: the settings that they depend on.

    Returns:
      gamma, 0 where none gains; a message for the user; the measurements, with `choose`'s keys, for the report.

    Raises:
      ValueError: no line has text, or `kept` belongs to another run.
    """
    journal = Journal.open(kept, run)
    if not journal.records:
        journal.add([0], [measure(job.target, drafter, job.sources, job.settings)])
    measured = journal.records[0]
    choice = choose(measured)
    message = f'{table(choice)}\n{sentence(measured, choice, job.settings.batch_size)}'
    return choice['gamma'], message, measured | choice


def _spread(sources: list[np.ndarray], size: int) -> list[np.ndarray]:
    """At most `size` of them, evenly over the lengths."""
    ordered = sorted(sources, key=len)
    places = np.unique(np.linspace(0, len(ordered) - 1, min(size, len(ordered))).round().astype(int))
    return [ordered[place] for place in places] if ordered else []


def choose(measured: dict[str, Any], max_gamma: int = MAX_GAMMA) -> dict[str, Any]:
    """The draft length for these measurements.

    Tokens per call at other gammas follow Equation 1 from the alpha that gives those of the probe: a draft that
    does not always propose yields fewer of them than its measured alpha would.

    Args:
      measured: as of `measure`.
      max_gamma: longest draft.

    Returns:
      `gamma`, 0 where none gains; `theorem_gamma`, the choice by Theorem 3.8; and `rows`, by gamma from 1 on a dict
      with `gamma`, `tokens_per_call`, `predicted` (Theorem 3.8) and `attainable`.
    """
    gammas = np.arange(1, max_gamma + 1)
    alpha = effective_alpha(measured['tokens_per_call'], PROBE)
    tokens = analysis.expected_tokens(alpha, gammas)
    cost = _interpolate(gammas + 1, *np.array(measured['cost_of_rows']).T)
    columns = dict(
        gamma=gammas,
        tokens_per_call=tokens,
        predicted=analysis.walltime_improvement(alpha, gammas, measured['c']),
        attainable=analysis.attainable_speedup(tokens, gammas, measured['c'], cost),
    )
    rows = [
        dict(zip(columns, row, strict=True))
        for row in zip(*(v.tolist() for v in columns.values()), strict=True)
    ]
    best = max(rows, key=lambda row: row['attainable'])
    return dict(
        gamma=best['gamma'] if best['attainable'] > 1 else 0,
        theorem_gamma=analysis.best_gamma(alpha, measured['c'], max_gamma),
        rows=rows,
    )


def effective_alpha(tokens_per_call: float | None, gamma: int) -> float:
    """The alpha at which Equation 1 gives `tokens_per_call`, in [0, 1]; 0 where nothing was decoded."""
    if tokens_per_call is None or tokens_per_call <= 1:
        return 0.0
    if tokens_per_call >= gamma + 1:
        return 1.0
    return brentq(lambda alpha: analysis.expected_tokens(alpha, gamma) - tokens_per_call, 0.0, 1.0)


def _interpolate(x: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Linear interpolation between known points, and linear extrapolation beyond the last."""
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return np.where(x <= known[-1], np.interp(x, known, values), values[-1] + slope * (x - known[-1]))


def table(choice: dict[str, Any]) -> str:
    """A line for each gamma; the chosen one is marked."""
    lines = [(*row.values(), '<-' if row['gamma'] == choice['gamma'] else '') for row in choice['rows']]
    headers = ('gamma', 'tokens per call', 'Theorem 3.8', 'attainable', '')
    return tabulate(lines, headers, tablefmt='github', floatfmt='.2f')


def sentence(measured: dict[str, Any], choice: dict[str, Any], batch_size: int) -> str:
    """The chosen gamma and the reason; where none gains, a warning with the cause."""
    alpha, c = measured['alpha'] or 0.0, measured['c']
    rows, cost = measured['cost_of_rows'][-1]
    seen = (
        f'alpha = {alpha:.2f} over {measured["tested"]} draft tokens, c = {c:.3f}, a target call over {rows} rows '
        f'costs {cost:.2f} plain steps at batch size {batch_size}'
    )
    if gamma := choice['gamma']:
        best = choice['rows'][gamma - 1]
        return (
            f'gamma = {gamma}: {seen}; {best["tokens_per_call"]:.2f} tokens per call should make decoding '
            f'{best["attainable"]:.2f} times as fast (Theorem 3.8, by which rows cost nothing, would take '
            f'gamma = {choice["theorem_gamma"]}).'
        )
    if alpha <= c:
        why = 'alpha is not above c, so that no draft length gains (Theorem 3.8): use a likelier or a cheaper draft'
    elif choice['theorem_gamma']:
        why = 'the rows of a target call cost more than drafts save: use a smaller batch, or a likelier draft'
    else:
        why = 'too few guesses pass to pay for the draft: use a likelier draft'
    return f'WARNING: no gamma gains, {why} ({seen}).'
