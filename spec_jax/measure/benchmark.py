"""A sweep over drafts, temperatures, draft lengths and batch sizes on one set of lines, cell by cell.

In each cell all lines are decoded plainly and speculatively by turns (`runs.compare`), and the figures are compared
with the theory's. A cell that is in the journal is not measured again.

Source of the theory: Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2.

Axes: R prompts, G draft length.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from spec_jax import analysis
from spec_jax.decoding import MAX_GAMMA
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter
from spec_jax.measure import acceptance, agreement, runs, setup
from spec_jax.models.base import Model
from spec_jax.run.journal import Journal
from spec_jax.sampling import SamplingConfig
from spec_jax.state import Stats
from spec_jax.text import metrics

FEWEST_BATCHES = 5  # an interval from fewer would be too narrow
_RESAMPLES = 2000

# --- cells --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting of the sweep.

    Attributes:
      draft: an entry of `drafters.build.build_named`.
      temperature: 0 is greedy.
      gamma: draft length, at least 1.
      batch_size: rows of a batch.

    Raises:
      ValueError: for a value out of range.
    """

    draft: str
    temperature: float
    gamma: int
    batch_size: int

    def __post_init__(self):
        if self.draft in ('', 'none'):
            raise ValueError(f'benchmark: expected drafts, got {self.draft!r} among them, which is not one')
        if not 1 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f'benchmark: expected gammas from 1 to {MAX_GAMMA}, got {self.gamma}')
        if self.batch_size < 1:
            raise ValueError(f'benchmark: expected batch sizes of 1 or more, got {self.batch_size}')
        SamplingConfig(self.temperature)

    def __str__(self) -> str:
        return f'{self.draft}, T = {self.temperature:g}, gamma = {self.gamma}, batch size {self.batch_size}'

    def settings(self, settings: setup.Settings) -> setup.Settings:
        """`settings` with this cell's values."""
        settings = settings.decoding(gamma=self.gamma).sampled(temperature=self.temperature)
        return dataclasses.replace(settings, batch_size=self.batch_size)


def one_axis_at_a_time(
    base: Cell,
    drafts: Sequence[str],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    batch_sizes: Sequence[int],
) -> list[Cell]:
    """The cells around `base`, each once: draft lengths and drafts at every temperature, batch sizes at its own."""
    vary = partial(dataclasses.replace, base)
    cells = [base]
    cells += [vary(temperature=T, gamma=gamma) for T in temperatures for gamma in gammas]
    cells += [vary(draft=draft, temperature=T) for draft in drafts for T in temperatures]
    cells += [vary(batch_size=batch_size) for batch_size in batch_sizes]
    return list(dict.fromkeys(cells))


def every_combination(
    base: Cell,
    drafts: Sequence[str],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    batch_sizes: Sequence[int],
) -> list[Cell]:
    """`base`, then drafts x temperatures x gammas x batch sizes, each once."""
    product = itertools.product(drafts, temperatures, gammas, batch_sizes)
    return list(dict.fromkeys([base, *itertools.starmap(Cell, product)]))


def missing(cells: Sequence[Cell], journal: Journal, identity: Callable[[Cell], str] = str) -> list[Cell]:
    """The cells that `sweep` has yet to measure."""
    return [cell for cell in cells if _number(cell, identity) not in journal.records]


def _number(cell: Cell, identity: Callable[[Cell], str]) -> int:
    return zlib.crc32(identity(cell).encode())


def sweep(
    cells: Sequence[Cell],
    measure_cell: Callable[[Cell], dict[str, Any]],
    journal: Journal,
    identity: Callable[[Cell], str] = str,
) -> list[dict[str, Any]]:
    """Measures the cells that the journal lacks.

    Args:
      cells: each once.
      measure_cell: gives a cell's figures, as JSON has them.
      journal: of this run; keeps each cell as soon as it is done.
      identity: a text for each cell, of all that its figures depend on besides the journal's run.

    Returns:
      By cell its values and figures, in the order of `cells`.
    """
    rows = []
    for cell in cells:
        number = _number(cell, identity)
        if number not in journal.records:
            journal.add([number], [measure_cell(cell)])
        rows.append(dataclasses.asdict(cell) | journal.records[number])
    return rows


# --- a cell's figures ---------------------------------------------------------------------------------------


def measure(
    cell: Cell, job: setup.Job, drafter: Drafter, *, metric: str = 'bleu', repeats: int = 3, progress=iter
) -> dict[str, Any]:
    """Decodes all lines plainly and speculatively by turns.

    Args:
      cell: the setting.
      job: lines, target, and the settings that cells share.
      drafter: of the cell's draft.
      metric: see `metrics.quality`.
      repeats: timed runs of a batch, of which the median counts.
      progress: wraps the list of batches.

    Returns:
      `runs.comparison_figures` and, in JSON types: `alpha_low`, `alpha_high`, `speedup_low` and `speedup_high`,
      ends of 95% intervals or None; `batches`; `position_acceptance`; `c_hat` and `operations_factor` (Theorem
      3.11), None where operations are not known; `quality` of both decoders; `greedy_match`, `near_ties` and
      `mismatches` at temperature 0, None at others; `compile_seconds` of both, and `seconds` of the whole cell.

    Raises:
      ValueError: no line has text.
      FloatingPointError: a model gave NaN.
    """
    start, settings = time.perf_counter(), cell.settings(job.settings)
    programs = dict(
        plain=runs.plain_program(job.target, settings),
        speculative=runs.speculative_program(job.target, drafter, settings),
    )
    timer = runs.step_timer(job.target, drafter, job.sources, settings)
    results = runs.compare(job.sources, settings, programs, repeats=repeats, progress=progress, timer=timer)
    figures = runs.comparison_figures(results, timer.medians(), settings)
    plain, speculative = results['plain'], results['speculative']
    rows = rows_of(speculative)
    figures |= dict(
        zip(('alpha_low', 'alpha_high'), alpha_interval(rows, settings.seed), strict=True),
        batches=len(plain.batch_seconds),
        position_acceptance=position_acceptance(rows),
    )
    figures |= zip(
        ('speedup_low', 'speedup_high'), speedup_interval(plain, speculative, settings.seed), strict=True
    )
    figures |= operations(job.target, drafter, figures['alpha'], settings.decode.gamma)
    if settings.decode.sampling.temperature == 0:
        figures |= agreement.agreement(job.target, job.sources, plain.ids, speculative.ids)
    else:
        figures |= dict(greedy_match=None, near_ties=None, mismatches=None)
    texts = {
        name: job.tokenizer.batch_decode(result.ids, skip_special_tokens=True)
        for name, result in results.items()
    }
    return figures | dict(
        quality={name: metrics.quality(metric, lines, job.examples) for name, lines in texts.items()},
        compile_seconds={name: result.compile_seconds for name, result in results.items()},
        seconds=time.perf_counter() - start,
    )


def rows_of(decoded: runs.Decoded) -> Stats:
    """`runs.compare`'s counts by prompt, arrays [R], [R, G] or [R, G + 1]; fillers are left out."""
    columns = {
        field.name: np.concatenate([getattr(stats, field.name) for stats in decoded.batch_stats])
        for field in dataclasses.fields(Stats)
    }
    real = columns['rounds'] > 0
    return Stats(**{name: column[real] for name, column in columns.items()})


def alpha_interval(rows: Stats, seed: int = 0) -> tuple[float | None, float | None]:
    """The 95% bootstrap interval of alpha over prompts; None and None with a draft in fewer than two of them."""
    tested = rows.tested > 0
    return acceptance.bootstrap_interval(rows.overlap[tested], rows.tested[tested], seed)


def speedup_interval(
    plain: runs.Decoded, speculative: runs.Decoded, seed: int = 0, level: float = 0.95
) -> tuple[float | None, float | None]:
    """Bootstrap interval of the speed-up over batches of prompts (percentiles).

    A batch is drawn with both its times, since those of long prompts are long with either decoder. The interval
    includes a machine's drift as far as it differs between batches.

    Returns:
      Its ends; None and None for fewer than `FEWEST_BATCHES` batches.
    """
    size = len(plain.batch_seconds)
    if size < FEWEST_BATCHES:
        return None, None
    drawn = np.random.default_rng(seed).integers(size, size=(_RESAMPLES, size))

    def rates(decoded):
        tokens = np.array([np.sum(stats.emitted) for stats in decoded.batch_stats])
        return tokens[drawn].sum(1) / np.array(decoded.batch_seconds)[drawn].sum(1)

    ends = np.quantile(rates(speculative) / rates(plain), [(1 - level) / 2, (1 + level) / 2])
    return float(ends[0]), float(ends[1])


def position_acceptance(rows: Stats) -> list[float | None]:
    """At each of the G places of a draft, the share of its tested tokens that passed.

    A place is tested when all before it passed, unless the text or the draft ended there; None where never tested.
    """
    at_least = np.asarray(rows.histogram).sum(0)[::-1].cumsum()[::-1]  # rounds with so many accepted or more
    passed = at_least[1:]
    tested = np.asarray(rows.tested_at).sum(0)
    return [float(a / b) if b else None for a, b in zip(passed, tested, strict=True)]


# --- arithmetic operations ----------------------------------------------------------------------------------


def operations(target: Model, drafter: Drafter, alpha: float | None, gamma: int) -> dict[str, float | None]:
    """c_hat, the draft's operations per token over the target's, and the growth of their total (Theorem 3.11).

    An operation is counted for each of a model's `parameters_read`. Both are None where target and draft are not
    models that have it, and the factor where no draft token was tested.
    """
    draft = drafter.model if isinstance(drafter, ModelDrafter) else None
    read, of_draft = (getattr(model, 'parameters_read', None) for model in (target, draft))
    if read is None or of_draft is None:
        return dict(c_hat=None, operations_factor=None)
    c_hat = of_draft / read
    factor = None if alpha is None else float(analysis.operations_factor(alpha, gamma, c_hat))
    return dict(c_hat=c_hat, operations_factor=factor)
