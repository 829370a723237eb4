"""Tables, sentences and plots of a sweep, with the paper's figures.

A row is one of `benchmark.sweep`: a cell's values and its figures.

Source of the paper's figures: Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2, Tables 2, 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.measure import acceptance_report
from spec_jax.measure.acceptance_report import kind_of
from spec_jax.measure.benchmark import FEWEST_BATCHES, Cell

Row = dict[str, Any]

# Tables 2 and 4, target T5-XXL, batch size 1 on a TPU-v4: (size, T): gamma, alpha, c, expected, measured speed-up.
PAPER = {
    'EnDe': {
        ('small', 0): (7, 0.75, 0.02, 3.2, 3.4),
        ('base', 0): (7, 0.80, 0.04, 3.3, 2.8),
        ('large', 0): (7, 0.82, 0.11, 2.5, 1.7),
        ('small', 1): (7, 0.62, 0.02, 2.3, 2.6),
        ('base', 1): (5, 0.68, 0.04, 2.4, 2.4),
        ('large', 1): (3, 0.71, 0.11, 2.0, 1.4),
    },
    'CNN/DM': {
        ('small', 0): (5, 0.65, 0.02, 2.4, 3.1),
        ('base', 0): (5, 0.73, 0.04, 2.6, 3.0),
        ('large', 0): (3, 0.74, 0.11, 2.0, 2.2),
        ('small', 1): (5, 0.53, 0.02, 1.9, 2.3),
        ('base', 1): (3, 0.55, 0.04, 1.8, 2.2),
        ('large', 1): (3, 0.56, 0.11, 1.6, 1.7),
    },
}

# --- tables -------------------------------------------------------------------------------------------------

_SPEED = {
    'c': ('c', '.3f'),
    'cost of rows': ('cost_of_rows', '.2f'),
    'predicted': ('predicted_speedup', '.2f'),
    'attainable': ('attainable_speedup', '.2f'),
    'speed-up': ('speedup', '.2f'),
    '95% interval': (lambda row: _interval(row, 'speedup'), ''),
    'tokens/s plain': ('plain_tokens_per_s', '.0f'),
    'tokens/s spec.': ('tokens_per_s', '.0f'),
}
_EVERY = {
    'draft': (lambda row: _cell(row['draft']), ''),
    'T': ('temperature', 'g'),
    'γ': ('gamma', 'd'),
    'batch': ('batch_size', 'd'),
    'α': ('alpha', '.3f'),
    'accepted': ('acceptance_rate', '.3f'),
    'tokens/call': ('tokens_per_call', '.2f'),
    **_SPEED,
    'operations': ('operations_factor', '.2f'),
    'quality plain': (lambda row: _quality(row['quality']['plain']), ''),
    'quality spec.': (lambda row: _quality(row['quality']['speculative']), ''),
    'equal to plain': ('greedy_match', '.3f'),
}
_BATCHES = {'batch': _EVERY['batch'], 'tokens/call': _EVERY['tokens/call'], **_SPEED}
_SCREEN = {name: _EVERY[name] for name in ('draft', 'T', 'γ', 'batch', 'α', 'tokens/call')} | {
    name: _SPEED[name]
    for name in ('c', 'cost of rows', 'predicted', 'attainable', 'speed-up', '95% interval')
}
_TABLE_2 = {
    **{name: _EVERY[name] for name in ('draft', 'T', 'γ', 'α', 'c')},
    'expected': _SPEED['predicted'],
    'measured': _SPEED['speed-up'],
    '95% interval': _SPEED['95% interval'],
}


def screen_table(rows: Sequence[Row]) -> str:
    """The columns that fit on a screen, one line per cell."""
    return _table(rows, _SCREEN)


def every_cell(rows: Sequence[Row]) -> str:
    """All columns, one line per cell."""
    return _table(rows, _EVERY)


def table_2(rows: Sequence[Row], task: str) -> str:
    """As the paper's Table 2: alpha, c, expected and measured by draft and temperature, with the paper's figures.

    Args:
      rows: those at the draft length and batch size to show.
      task: a key of `PAPER`.
    """
    columns = dict(_TABLE_2)
    for index, name in enumerate(('γ', 'α', 'c', 'expected', 'measured')):
        columns[f'paper {name}'] = (lambda row, index=index: _paper(row, task, index), '')
    return _table(rows, columns)


def batch_table(rows: Sequence[Row]) -> str:
    """One line per batch size, smallest first."""
    return _table(sorted(rows, key=lambda row: row['batch_size']), _BATCHES)


def position_table(rows: Sequence[Row]) -> str:
    """Acceptance at each place of a draft."""
    most = max(row['gamma'] for row in rows)
    place = {f'{number + 1}': (partial(_at_place, number=number), '.2f') for number in range(most)}
    return _table(rows, {name: _EVERY[name] for name in ('draft', 'T', 'γ', 'batch')} | place)


def _table(rows: Sequence[Row], columns: dict[str, tuple[str | Callable, str]]) -> str:
    def text(row, source, spec):
        value = source(row) if callable(source) else row[source]
        return '-' if value is None else value if isinstance(value, str) else format(value, spec)

    lines = [[text(row, *column) for column in columns.values()] for row in rows]
    align = ['left' if name == 'draft' else 'right' for name in columns]
    return tabulate(lines, list(columns), tablefmt='github', disable_numparse=True, colalign=align)


def _interval(row: Row, name: str) -> str | None:
    low, high = row[f'{name}_low'], row[f'{name}_high']
    return None if low is None else f'{low:.2f} to {high:.2f}'


def _quality(scores: dict[str, float]) -> str:
    return ' / '.join(f'{score:.1f}' for score in scores.values()) or '-'


def _paper(row: Row, task: str, index: int) -> str:
    """By size of the draft, at the row's temperature; for n-grams the paper has alpha alone (Table 3)."""
    if kind_of(row['draft']) == 'model':
        column = [figures[index] for (_, T), figures in PAPER[task].items() if T == row['temperature']]
        return ' / '.join(f'{figure:g}' for figure in column) or '-'
    sizes = acceptance_report.PAPER_ALPHA[task].get(kind_of(row['draft']), {})
    alphas = [by_temperature.get(row['temperature']) for by_temperature in sizes.values()]
    return f'{alphas[0]:g}' if index == 1 and alphas and alphas[0] is not None else '-'


def _at_place(row: Row, number: int) -> float | str | None:
    shares = row['position_acceptance']
    return shares[number] if number < len(shares) else ''


# --- selected rows, and conclusions -------------------------------------------------------------------------


def around(rows: Sequence[Row], base: Cell, *free: str) -> list[Row]:
    """The rows that equal `base` in all fields but those named."""
    fixed = [name for name in ('draft', 'temperature', 'gamma', 'batch_size') if name not in free]
    return [row for row in rows if all(row[name] == getattr(base, name) for name in fixed)]


def sentences(rows: Sequence[Row], base: Cell) -> list[str]:
    """The fastest cell, the batch size at which speculation stops gaining, and whether greedy output is equal."""
    best = max(rows, key=lambda row: row['speedup'])
    interval, predicted = _interval(best, 'speedup'), best['predicted_speedup']
    fastest = f'Fastest: {_named(best)}, {best["speedup"]:.2f} times plain decoding'
    fastest += f' (95%: {interval})' if interval else ''
    lines = [fastest + (f'; {predicted:.2f} predicted.' if predicted else '.')]
    batches = around(rows, base, 'batch_size')
    if len(batches) > 1:
        lines.append(batch_sentence(batches))
    greedy = [row for row in rows if row['greedy_match'] is not None]
    if unequal := [row for row in greedy if row['greedy_match'] < 1]:
        lines.append(
            f'WARNING: greedy output differs from plain decoding in {len(unequal)} of {len(greedy)} cells, first '
            f'in {_named(unequal[0])}: {1 - unequal[0]["greedy_match"]:.1%} of lines; see scripts/verify.py.'
        )
    elif greedy:
        ties = sum(len(row['near_ties']) for row in greedy)
        lines.append(
            f'Greedy output is equal to plain decoding in all {len(greedy)} cells at T = 0'
            + (f', {ties} lines with near-ties of the target aside.' if ties else ', token for token.')
        )
    return lines


def batch_sentence(rows: Sequence[Row]) -> str:
    """The batch size at which speculation stops gaining: the first after the last that beats plain decoding.

    Args:
      rows: two or more that differ in `batch_size` alone.
    """
    rows = sorted(rows, key=lambda row: row['batch_size'])
    paying = [number for number, row in enumerate(rows) if row['speedup'] > 1]
    which = f'{rows[0]["draft"]}, T = {rows[0]["temperature"]:g}, gamma = {rows[0]["gamma"]}'
    if not paying:
        best = max(rows, key=lambda row: row['speedup'])
        return (
            f'On this machine speculation pays at no batch size tried with {which}: at best {best["speedup"]:.2f} '
            f'times plain decoding, at {best["batch_size"]}.'
        )
    last = rows[paying[-1]]
    if last is rows[-1]:
        return (
            f'On this machine speculation pays up to the largest batch size tried, {last["batch_size"]} '
            f'({last["speedup"]:.2f} times plain decoding), with {which}.'
        )
    stop = rows[paying[-1] + 1]
    unsure = [
        row['batch_size']
        for row in (last, stop)
        if (row['speedup_low'] or 1) < 1 < (row['speedup_high'] or 1)
    ]
    doubt = f' The 95% interval holds 1 at {" and ".join(map(str, unsure))}.' if unsure else ''
    return (
        f'On this machine speculation pays up to batch size {last["batch_size"]} ({last["speedup"]:.2f} times '
        f'plain decoding) and no longer at {stop["batch_size"]} ({stop["speedup"]:.2f}) with {which}: there a '
        f'target call over gamma + 1 positions takes {stop["cost_of_rows"]:.2f} plain steps and gives '
        f'{stop["tokens_per_call"]:.2f} tokens.{doubt}'
    )


def _named(row: Row) -> str:
    return str(Cell(row['draft'], row['temperature'], row['gamma'], row['batch_size']))


def markdown(rows: Sequence[Row], base: Cell, task: str, weights: str, facts: dict[str, Any]) -> str:
    """report.md.

    Args:
      rows: all.
      base: the cell at the centre of the sweep.
      task: a key of `PAPER`.
      weights: a line with the weights and the device of the figures.
      facts: further facts, by name.
    """
    kinds = list(rows[0]['quality']['plain'])
    parts = [
        '# Speculative decoding, measured',
        weights,
        *sentences(rows, base),
        "## As the paper's Table 2",
        table_2(around(rows, base, 'draft', 'temperature'), task),
        f'Ours at batch size {base.batch_size}. The paper (Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2, '
        f'Tables 2, 3 and 4) has T5-XXL on {task} on one TPU-v4, with drafts small / base / large where three '
        'figures stand: not the same models. Expected is Theorem 3.8.',
    ]
    batches = around(rows, base, 'batch_size')
    if len(batches) > 1:
        parts += ['## Batch size', batch_table(batches), '![speed-up over batch size](batch_size.png)']
    parts += ['## Draft length', '![speed-up over draft length](gamma.png)']
    parts += ['## Accepted lengths', '![rounds by accepted tokens](accepted.png)']
    if any(row['alpha'] is not None for row in around(rows, base, 'draft', 'temperature')):
        parts += ['## α by draft', '![alpha by draft](alpha.png)']
    parts += [
        '## All cells',
        every_cell(rows),
        _LEGEND.format(kinds=', '.join(kinds) or 'none without references'),
    ]
    parts += ['## Acceptance by place in the draft', position_table(rows), _PLACES]
    parts += ['## Measured on', '\n'.join(f'* {name}: {value}' for name, value in facts.items())]
    return '\n\n'.join(parts) + '\n'


_LEGEND = (
    'α is the mean of sum min(p, q) over tested positions (of a draft that is empty in some rounds, over the '
    "others, which is not the paper's α), accepted the share of them that passed, c the draft "
    "step over a plain step, cost of rows the target's call over γ + 1 positions over a plain step. Predicted is "
    'Theorem 3.8, which takes cost of rows as 1; attainable is tokens/call / (γ c + cost of the calls made), of '
    'which some are over fewer rows where a draft is short. Speed-up is of decoding proper, without prefill and '
    'compilation, both decoders by turns, tokens counted alike. The interval is a bootstrap over batches of '
    f'prompts; none below {FEWEST_BATCHES} batches. Operations are those of Theorem 3.11, plain decoding = 1. '
    'Quality: {kinds}.'
)
_PLACES = (
    'Of the rounds in which the token at this place was tested, that is, in which all before it had passed and '
    'neither the text nor the draft had ended, the share in which it passed too.'
)

# --- plots --------------------------------------------------------------------------------------------------


def pictures(rows: Sequence[Row], base: Cell, title: str) -> dict[str, Figure]:
    """Plots by file name; see the functions below."""
    lengths = around(rows, base, 'temperature', 'gamma')
    plots = {
        'gamma.png': plot_gamma(lengths, base, title),
        'accepted.png': plot_accepted(around(rows, base, 'draft', 'temperature'), title),
    }
    batches = around(rows, base, 'batch_size')
    if len(batches) > 1:
        plots['batch_size.png'] = plot_batch_size(batches, f'{title}: {base.draft}, γ = {base.gamma}')
    shown = [row for row in around(rows, base, 'draft', 'temperature') if row['alpha'] is not None]
    if shown:
        sometimes_empty = {row['draft'] for row in shown if row['guessed'] < 1}
        alphas = [
            dict(
                draft=f'{row["draft"]}\nwhere it guesses' if row['draft'] in sometimes_empty else row['draft']
            )
            | dict(temperature=row['temperature'], alpha=row['alpha'], lenience={})
            | dict(low=row['alpha_low'], high=row['alpha_high'])
            for row in shown
        ]
        plots['alpha.png'] = acceptance_report.plot(alphas, f'{title}, γ = {base.gamma}')
    return plots


def plot_gamma(rows: Sequence[Row], base: Cell, title: str) -> Figure:
    """Speed-up over gamma by temperature: measured, attainable, and Theorem 3.8's curve.

    The curve takes alpha and c of the row whose gamma is nearest to the base's.
    """
    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = figure.subplots()
    most = max(row['gamma'] for row in rows) + 1
    gammas = np.linspace(0, most, 100)
    for number, temperature in enumerate(sorted({row['temperature'] for row in rows})):
        some = sorted(
            (row for row in rows if row['temperature'] == temperature), key=lambda row: row['gamma']
        )
        color, near = f'C{number}', min(some, key=lambda row: abs(row['gamma'] - base.gamma))
        if near['alpha'] is not None:
            curve = analysis.walltime_improvement(near['alpha'], gammas, near['c'])
            label = f'T = {temperature:g}: Theorem 3.8, α = {near["alpha"]:.2f}, c = {near["c"]:.2f}'
            axes.plot(gammas, curve, '--', color=color, label=label)
        x = [row['gamma'] for row in some]
        label = f'T = {temperature:g}: attainable, with the cost of γ + 1 rows'
        axes.plot(x, [row['attainable_speedup'] for row in some], 'x:', color=color, label=label)
        label = f'T = {temperature:g}: measured, with its 95% interval'
        _with_interval(axes, x, some, color=color, label=label)
    axes.axhline(1, color='black', linewidth=0.8)
    axes.set(xlim=(0, most), ylim=(0, None), xlabel='γ, tokens drafted per target call')
    axes.set(
        ylabel='speed-up over plain decoding', title=f'{title}: {base.draft}, batch size {base.batch_size}'
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def plot_accepted(rows: Sequence[Row], title: str) -> Figure:
    """Share of rounds by accepted tokens, a panel for each temperature and a colour for each draft.

    Marks show the shares for independent places of the same alpha.
    """
    temperatures = sorted({row['temperature'] for row in rows})
    figure = Figure(figsize=(max(6, 5 * len(temperatures)), 4.5), layout='constrained')
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    drafts = list(dict.fromkeys(row['draft'] for row in rows))
    for axes, temperature in zip(panels, temperatures, strict=True):
        some = [row for row in rows if row['temperature'] == temperature]
        width = 0.8 / len(some)
        for place, row in enumerate(some):
            counts = np.array(row['accepted_histogram'])
            x = np.arange(len(counts)) + (place - (len(some) - 1) / 2) * width
            color = f'C{drafts.index(row["draft"])}'
            label = f'{_short(row["draft"])}: {row["tokens_per_call"]:.2f} tokens per call'
            axes.bar(x, counts / max(counts.sum(), 1), width * 0.9, color=color, alpha=0.6, label=label)
            if row['alpha'] is not None:
                expected = row['alpha'] ** np.arange(len(counts))
                expected[:-1] *= 1 - row['alpha']
                axes.hlines(expected, x - 0.45 * width, x + 0.45 * width, color='black', linewidth=1.5)
        axes.plot([], [], '-', color='black', label='at its α, were places independent')
        axes.set(title=f'T = {temperature:g}', xlabel='tokens accepted in a round')
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis='y', alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel('share of rounds')
    figure.suptitle(f'{title}, γ = {rows[0]["gamma"]}')
    return figure


def plot_batch_size(rows: Sequence[Row], title: str) -> Figure:
    """Speed-up over batch size, and the tokens per second of both decoders."""
    rows = sorted(rows, key=lambda row: row['batch_size'])
    figure = Figure(figsize=(10, 4.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    x = [row['batch_size'] for row in rows]
    predicted = [np.nan if row['predicted_speedup'] is None else row['predicted_speedup'] for row in rows]
    left.plot(x, predicted, '--', color='C0', label='predicted (Theorem 3.8)')
    attainable = [row['attainable_speedup'] for row in rows]
    left.plot(x, attainable, 'x:', color='C0', label='attainable, with the cost of γ + 1 rows')
    _with_interval(left, x, rows, color='C0', label='measured, with its 95% interval')
    left.axhline(1, color='black', linewidth=0.8)
    left.fill_between([min(x) * 0.9, max(x) * 1.1], 0, 1, color='C3', alpha=0.08)
    left.text(max(x) * 1.08, 0.03, 'plain decoding is faster', ha='right', fontsize=8, color='C3')
    left.set(ylabel='speed-up over plain decoding', ylim=(0, None), xlim=(min(x) * 0.9, max(x) * 1.1))
    right.plot(x, [row['plain_tokens_per_s'] for row in rows], 'o-', color='C1', label='plain')
    right.plot(x, [row['tokens_per_s'] for row in rows], 'o-', color='C0', label='speculative')
    right.set(ylabel='tokens per second, all rows together', ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale('log', base=2)
        axes.set_xticks(x, [str(size) for size in x])
        axes.minorticks_off()
        axes.set_xlabel('batch size')
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    return figure


def _with_interval(axes, x, rows: Sequence[Row], **options) -> None:
    """A line of measured speed-ups with bars where there is an interval."""
    y = np.array([row['speedup'] for row in rows])
    ends = [
        [row['speedup'] if row[f'speedup_{end}'] is None else row[f'speedup_{end}'] for row in rows]
        for end in ('low', 'high')
    ]
    spread = np.maximum([y - ends[0], ends[1] - y], 0)
    axes.errorbar(x, y, yerr=spread, fmt='o-', capsize=3, markersize=5, **options)


def _short(draft: str) -> str:
    """A name cut to its end: drafts differ in the end of their paths."""
    return draft if len(draft) <= 24 else '...' + draft[-21:]


def _cell(text: str) -> str:
    return text.replace('|', r'\|')
