"""The cost of speculation without the draft's work, and the acceptance from which it gains.

An oracle proposes the target's plain output with each token wrong at a given rate. It looks its tokens up, so that
c is close to 0, and its acceptance is as configured: what remains is the target's call over gamma + 1 positions,
the accept test and the loop. Real drafts of low cost are measured on the same lines.

Axes: B rows, G draft length, R sources, S source length, N length of a script, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure
from tabulate import tabulate

from spec_jax.drafters.base import Drafter, DraftShape, Outcome, Round
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.measure import agreement, runs, setup
from spec_jax.models.base import Model
from spec_jax.runtime.backend import row_cost
from spec_jax.testing import ScriptedDrafter
from spec_jax.types import Draft, Inputs, Prefill

RIGHT = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)  # shares of the oracle's tokens that are right
RIGHT_THRIFTY = (0.0, 0.1, 0.2, 0.3, 0.5, 0.9)  # the same of an oracle that is `thrifty.Thrifty`
NEVER_RIGHT_LIMIT = 1.25  # times plain decoding per token, for a draft that is never right
GAINING_ALPHA = 0.2  # from which a draft that costs nothing should gain

# --- the oracle ---------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Oracle:
    """Proposes a scripted output for each source.

    Attributes:
      sources: [R, S] int32, padded; a row's script is found by comparing its source with these. A source that is
        not among them gets the first script.
      script: tokens [R, N], in the order of `sources`.
      pad_id: padding of sources.
    """

    sources: Array
    script: ScriptedDrafter
    pad_id: int = flax.struct.field(pytree_node=False)

    def shape(self, gamma: int) -> DraftShape:
        return self.script.shape(gamma)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Array:
        width = min(inputs.tokens.shape[1], self.sources.shape[1])
        same = (inputs.tokens[:, None, :width] == self.sources[:, :width]).all(-1)  # [B, R]
        ends = (self.sources[:, width:] == self.pad_id).all(-1)
        return jnp.argmax(same & ends, axis=1)

    def propose(self, state: Array, round: Round) -> tuple[Draft, Array]:
        return self.script.propose(state, round)

    def update(self, state: Array, outcome: Outcome) -> Array:
        return state


def make_oracle(
    sources: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    right: float,
    *,
    vocab_size: int,
    length: int,
    pad_id: int,
    seed: int = 0,
) -> Oracle:
    """An oracle whose tokens are each right with probability `right`, and another token otherwise.

    A place that is right at one rate is right at every higher one.

    Args:
      sources: int32 [S] each.
      outputs: int32 each, the target's plain output, of at most `length` tokens.
      right: in [0, 1].
      vocab_size: V, at least 2; wrong tokens are below it.
      length: N.
      pad_id: padding of sources, as in the batches that are decoded.
      seed: of the places and of the wrong tokens.
    """
    random = np.random.default_rng(seed)
    shape = len(outputs), length
    tokens = np.zeros(shape, np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        row[: len(output)] = output
    spoilt = random.random(shape) >= right
    tokens = np.where(spoilt, (tokens + random.integers(1, vocab_size, shape)) % vocab_size, tokens)
    padded = np.full((len(sources), max(map(len, sources))), pad_id, np.int32)
    for row, source in zip(padded, sources, strict=True):
        row[: len(source)] = source
    return Oracle(jnp.asarray(padded), ScriptedDrafter(jnp.asarray(tokens, jnp.int32)), pad_id)


# --- measuring ----------------------------------------------------------------------------------------------


def check(settings: setup.Settings) -> None:
    """Raises ValueError for settings that an oracle cannot follow."""
    if settings.decode.gamma < 1:
        raise ValueError('overhead: expected a draft and gamma >= 1, got plain decoding; set gamma')
    if (temperature := settings.decode.sampling.temperature) > 0:
        raise ValueError(f'temperature: expected 0, got {temperature:g}; the oracle has greedy output only')
    if settings.decode.rule.lossy:
        raise ValueError(
            f'rule: expected an exact one, got {settings.decode.rule.name}; the cost of the exact rule is measured'
        )


class _Timers:
    """Several step timers that sample together."""

    def __init__(self, timers):
        self.timers = timers

    def measure(self) -> None:
        for timer in self.timers.values():
            timer.measure()


def measure(
    target: Model,
    drafters: dict[str, Drafter],
    sources: list[np.ndarray],
    settings: setup.Settings,
    *,
    repeats: int = 3,
    progress=iter,
) -> list[dict[str, Any]]:
    """Decodes all lines plainly, with an oracle of each rate and with each draft, by turns.

    Where a backend's rows cost time, drafts of low cost are built as `thrifty.Thrifty`, and so are oracles of the
    rates in `RIGHT_THRIFTY`; those of the rates in `RIGHT` always propose.

    Args:
      target: the model.
      drafters: by name.
      sources: int32 [S] each, ending in EOS.
      settings: greedy, exact, gamma at least 1.
      repeats: timed runs of a batch, of which the median counts.
      progress: wraps the list of batches.

    Returns:
      For each oracle and draft `runs.comparison_figures`, with `draft` (its name), `right` (the oracle's rate,
      else None), `thrifty`, `time_per_token` (over that of plain decoding) and `greedy_match`.

    Raises:
      ValueError: settings that an oracle cannot follow, or no line with text.
    """
    check(settings)
    plain = runs.plain_program(target, settings)
    outputs = runs.decode_lines(sources, settings, plain).ids
    decode = settings.decode
    vocab_size = decode.sampling.vocab_limit or target.spec.vocab_size
    widths = dict(vocab_size=vocab_size, length=decode.max_new_tokens, pad_id=settings.pad_id)
    make = partial(make_oracle, sources, outputs, **widths)
    rates, oracles = _make_oracles(make)
    everyone = oracles | drafters

    programs = {name: runs.speculative_program(target, one, settings) for name, one in everyone.items()}
    timed = {'oracle': oracles[next(iter(oracles))]} | drafters  # one oracle takes as long as another
    timers = {name: runs.step_timer(target, one, sources, settings) for name, one in timed.items()}
    results = runs.compare(
        sources,
        settings,
        dict(plain=plain) | programs,
        repeats=repeats,
        progress=progress,
        timer=_Timers(timers),
    )
    rows = []
    for name in everyone:
        pair = dict(plain=results['plain'], speculative=results[name])
        times = timers['oracle' if name in rates else name].medians()
        figures = runs.comparison_figures(pair, times, settings)
        figures |= agreement.agreement(target, sources, results['plain'].ids, results[name].ids)
        figures |= dict(time_per_token=1 / figures['speedup'])
        thrifty = isinstance(everyone[name], Thrifty)
        rows.append(dict(draft=name, right=rates.get(name), thrifty=thrifty) | figures)
    return rows


def _make_oracles(make: Callable[[float], Oracle]) -> tuple[dict[str, float], dict[str, Drafter]]:
    """The rate and the draft of each oracle, by its name."""
    rates = {f'oracle, {right:g} right': right for right in RIGHT}
    oracles = {name: make(right) for name, right in rates.items()}
    if row_cost(2):
        thrifty = {f'thrifty oracle, {right:g} right': right for right in RIGHT_THRIFTY}
        oracles |= {name: Thrifty(make(right)) for name, right in thrifty.items()}
        rates |= thrifty
    return rates, oracles


def conclusions(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Figures from the oracles; from the thrifty ones where drafts of low cost are built so.

    Returns:
      never_right: time per token over plain decoding's at alpha = 0;
      break_even_alpha: where the speed-up passes 1 for the last time, by linear interpolation between two rates; 0
        where it is above 1 throughout, None where it ends below;
      speedup_at_gaining_alpha: the speed-up at alpha = `GAINING_ALPHA`, by linear interpolation;
      and each again with `_always_guessing` after its name, of oracles that propose gamma tokens in every round.
    """
    always_guessing = _oracles(rows)
    shipped = _conclude(_oracles(rows, thrifty=True) or always_guessing)
    return shipped | {
        f'{name}_always_guessing': figure for name, figure in _conclude(always_guessing).items()
    }


def _conclude(oracles: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    alphas, speedups = np.array(sorted((row['alpha'], row['speedup']) for row in oracles)).T
    return dict(
        never_right=float(1 / speedups[0]),
        break_even_alpha=_last_crossing(alphas, speedups),
        speedup_at_gaining_alpha=float(np.interp(GAINING_ALPHA, alphas, speedups)),
    )


def _oracles(rows: Sequence[dict[str, Any]], thrifty: bool = False) -> list[dict[str, Any]]:
    return [row for row in rows if row['right'] is not None and row['thrifty'] == thrifty]


def _last_crossing(x: np.ndarray, y: np.ndarray) -> float | None:
    """The x at which y, interpolated linearly, rises above 1 for the last time."""
    below = np.flatnonzero(y <= 1)
    if not below.size:
        return 0.0
    at = below[-1]
    if at == len(y) - 1:
        return None
    return float(x[at] + (1 - y[at]) / (y[at + 1] - y[at]) * (x[at + 1] - x[at]))


# --- showing ------------------------------------------------------------------------------------------------

_COLUMNS = {
    'alpha': ('alpha', '.3f'),
    'tokens/call': ('tokens_per_call', '.2f'),
    'c': ('c', '.4f'),
    'cost of rows': ('cost_of_rows', '.2f'),
    'cost of calls': ('cost_of_calls', '.2f'),
    'time/token, plain = 1': ('time_per_token', '.2f'),
    'speed-up': ('speedup', '.2f'),
    'attainable': ('attainable_speedup', '.2f'),
    'equal to plain': ('greedy_match', '.3f'),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per draft."""
    lines = [
        [row['draft'].replace('|', r'\|')]
        + ['-' if row[key] is None else format(row[key], spec) for key, spec in _COLUMNS.values()]
        for row in rows
    ]
    headers = ['draft', *_COLUMNS]
    align = ['left', *['right'] * len(_COLUMNS)]
    return tabulate(lines, headers, tablefmt='github', disable_numparse=True, colalign=align)


def sentences(figures: dict[str, float | None], gamma: int) -> list[str]:
    """`conclusions` in words, each with its goal."""
    always = {
        name.removesuffix('_always_guessing'): one
        for name, one in figures.items()
        if name.endswith('_always_guessing')
    }
    return [
        f'A draft that is never right takes {figures["never_right"]:.2f} times plain decoding per token at gamma = '
        f'{gamma} (the aim at gamma = 3: at most {NEVER_RIGHT_LIMIT}); {always["never_right"]:.2f} times if it '
        f'guesses {gamma} tokens all the same.',
        f'A draft that costs nothing is faster than plain decoding {_gains(figures)} (the aim: from '
        f'{GAINING_ALPHA}); at alpha = {GAINING_ALPHA} it is {figures["speedup_at_gaining_alpha"]:.2f} times as '
        f'fast. One that guesses {gamma} tokens in every round: {_gains(always)}; '
        f'{always["speedup_at_gaining_alpha"]:.2f} times.',
    ]


def _gains(figures: dict[str, float | None]) -> str:
    crossing = figures['break_even_alpha']
    return 'at no alpha' if crossing is None else f'from alpha = {crossing:.2f} on'


def markdown(rows: Sequence[dict[str, Any]], gamma: int, facts: dict[str, Any]) -> str:
    """report.md: the conclusions, the table, the meaning of its columns, and the setup."""
    parts = [
        '# What speculation costs, and when it gains',
        *sentences(conclusions(rows), gamma),
        table(rows),
        "The oracle proposes the target's own output with each token right at the rate given. alpha is the share "
        "accepted of those tested, c the draft step over a plain step, cost of rows the target's call over gamma + "
        '1 positions over a plain step, cost of calls that of the calls that were made, and attainable is '
        'tokens/call / (gamma c + cost of calls). A thrifty draft guesses no more than pays for its rows. Times '
        'are of decoding proper, without prefill and compilation, medians of runs taken by turns with plain '
        'decoding. A draft that does not always guess has fewer tokens/call than an oracle of the same alpha.',
        '## Measured on',
        '\n'.join(f'* {name}: {value}' for name, value in facts.items()),
    ]
    return '\n\n'.join(parts) + '\n'


def plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Speed-up over alpha: the oracle measured and attainable, each draft, and plain decoding's 1.

    A draft is drawn at the alpha at which an oracle has as many tokens per call, since it may not always propose.
    """
    figure = Figure(figsize=(7, 5), layout='constrained')
    axes = figure.subplots()
    oracles = sorted(_oracles(rows), key=lambda row: row['tokens_per_call'])
    column = lambda name: [row[name] for row in oracles]  # noqa: E731
    axes.axhline(1, color='black', linewidth=1)
    axes.text(1, 1, 'plain decoding', ha='right', va='bottom', fontsize=8)
    attainable = 'oracle, attainable: tokens per call / (γ c + cost of calls)'
    axes.plot(column('alpha'), column('attainable_speedup'), '--', color='C0', label=attainable)
    axes.plot(column('alpha'), column('speedup'), 'o-', color='C0', label='oracle, measured')
    if thrifty := _oracles(rows, thrifty=True):
        rates, speedups = ([row[name] for row in thrifty] for name in ('right', 'speedup'))
        axes.plot(rates, speedups, 's', color='C7', label='thrifty oracle, by the share that is right')
    for number, row in enumerate(row for row in rows if row['right'] is None):
        alpha = np.interp(row['tokens_per_call'], column('tokens_per_call'), column('alpha'))
        label = (
            f'{_short_name(row["draft"])}: {row["tokens_per_call"]:.2f} tokens per call, c = {row["c"]:.3f}'
        )
        axes.plot(alpha, row['speedup'], 'D', color=f'C{number + 1}', markersize=7, label=label)
    axes.axvline(GAINING_ALPHA, color='grey', linewidth=0.8, linestyle=':')
    axes.axhline(1 / NEVER_RIGHT_LIMIT, color='grey', linewidth=0.8, linestyle=':')
    limit = f'1 / {NEVER_RIGHT_LIMIT:g}'
    axes.text(1, 1 / NEVER_RIGHT_LIMIT, limit, ha='right', va='top', fontsize=8, color='grey')
    axes.set(xlim=(-0.02, 1.02), ylim=(0, None), title=title, ylabel='speed-up over plain decoding')
    axes.set_xlabel('α, share of the tested tokens that is accepted (drafts: by tokens per call)')
    axes.legend(fontsize=8, loc='upper left')
    axes.grid(alpha=0.3)
    return figure


def _short_name(draft: str) -> str:
    """A name cut to its end: drafts differ in the end of their paths."""
    return draft if len(draft) <= 32 else '...' + draft[-29:]
