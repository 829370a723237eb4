"""Memory and estimated times of a pair on TPUs that were compiled for: figures, tables, a plot.

Every time is the compiler's estimate; none was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.measure.benchmark_report import PAPER
from spec_jax.tpu import chips, programs
from spec_jax.tpu.programs import PROGRAMS, Setup

LABEL = "compiler's estimate, not measured"
_GIB = 2.0**30
_OUTSIDE = ('draw', 'verify', 'update', '')  # scopes of a round that are neither model

Figures = dict[str, Any]


def figures(setup: Setup, limit: float, progress: Callable[[Iterable], Iterable] = iter) -> Figures:
    """Compiles every program and derives the figures.

    Args:
      limit: seconds a program may take to compile.
      progress: wraps the list of programs.

    Returns:
      topology, chip, estimated (`LABEL`), compiled (by program, as of `programs.compile_here`), hbm (bytes a chip,
      by part), floor_milliseconds (what reading takes at the chip's bandwidth), and, where the programs compiled,
      c, c_in_loop, cost_of_rows, call_over_floor, outside (share of a round spent in neither model),
      round_milliseconds and predicted (rows of the paper's Table 2). Ratios take the floor where an estimate is
      below it: what is brought to on-chip memory ahead of time is in no operation's cycles.
    """
    chip, number = chips.named(setup.topology)
    compiled = {name: programs.compile_apart(setup, name, limit) for name in progress(PROGRAMS)}
    report = dict(topology=setup.topology, chip=chip.name, chips=number, estimated=LABEL, compiled=compiled)
    report['hbm'] = _hbm(setup, compiled['loop'])
    floors = {name: _read_bytes(setup, name) / chip.bandwidth * 1e3 for name in ('target', 'draft')}
    report['floor_milliseconds'] = floors
    if any('error' in one for one in compiled.values()):
        return report
    loop, floor = compiled['loop'], floors['target']
    plain, call = (compiled[name]['milliseconds'] for name in ('plain_step', 'target_call'))
    round_milliseconds = loop['milliseconds'] + max(floor - call, 0)
    plain, call = max(plain, floor), max(call, floor)
    outside = sum(loop['scopes'].get(scope, 0) for scope in _OUTSIDE)
    report |= dict(
        c=compiled['draft'].get('draft_milliseconds', compiled['draft']['milliseconds']) / plain,
        c_in_loop=loop.get('draft_milliseconds', 0.0) / plain,
        cost_of_rows=call / plain,
        call_over_floor=compiled['target_call']['milliseconds'] / floor,
        round_milliseconds=round_milliseconds,
        outside=outside / round_milliseconds,
        copies=loop['copies'],
        collectives=loop['collectives'],
    )
    report['predicted'] = _predicted(setup, report, outside / plain)
    return report


def _read_bytes(setup: Setup, which: str) -> int:
    """Bytes that a call of the target, or a step of the draft, must read on one chip."""
    number, slots = chips.named(setup.topology)[1], setup.max_new_tokens + setup.gamma + 2
    shape = getattr(setup, which)
    return programs.read_bytes(shape, setup.dtype, slots, setup.source_length, setup.batch_size, number)


def _hbm(setup: Setup, loop: Figures) -> Figures:
    """Bytes on one chip by part; with those of the whole loop where it compiled."""
    chip, number = chips.named(setup.topology)
    slots, sizes = setup.max_new_tokens + setup.gamma + 2, dict(capacity=chip.hbm)
    for name in ('target', 'draft'):
        shape = getattr(setup, name)
        sizes[f'{name}_weights'] = programs.weight_bytes(shape, setup.dtype, number)
        sizes[f'{name}_caches'] = shape.cache_bytes(
            setup.dtype, slots, setup.source_length, setup.batch_size, number
        )
    if 'error' not in loop:
        memory = loop['memory']
        sizes['total'] = memory['arguments'] + memory['outputs'] - memory['shared'] + memory['temporaries']
        known = sum(size for name, size in sizes.items() if name not in ('capacity', 'total'))
        sizes['temporaries'] = max(sizes['total'] - known, 0)
        sizes['fits'] = sizes['total'] <= chip.hbm
    return sizes


def _predicted(setup: Setup, report: Figures, outside: float) -> list[Figures]:
    """Speed-ups at the paper's alpha and gamma for the draft's size: by Theorem 3.8 with our c, and by a round."""
    rows = []
    for task, cells in PAPER.items():
        for (size, temperature), (gamma, alpha, c, expected, measured) in cells.items():
            if size != setup.draft.size:
                continue
            tokens = float(analysis.expected_tokens(alpha, gamma))
            cost = gamma * (report['c_in_loop'] or report['c']) + report['cost_of_rows'] + outside
            rows.append(
                dict(
                    task=task,
                    draft=size,
                    temperature=temperature,
                    gamma=gamma,
                    alpha=alpha,
                    theorem=float(analysis.walltime_improvement(alpha, gamma, report['c'])),
                    round=tokens / cost,
                    paper_c=c,
                    paper_expected=expected,
                    paper_measured=measured,
                )
            )
    return rows


# --- tables and the plot --------------------------------------------------------------------------------------

_ROWS: dict[str, Callable[[Figures], Any]] = {
    'GiB a chip: target weights': lambda one: one['hbm']['target_weights'] / _GIB,
    'GiB: draft weights': lambda one: one['hbm']['draft_weights'] / _GIB,
    'GiB: caches': lambda one: (one['hbm']['target_caches'] + one['hbm']['draft_caches']) / _GIB,
    'GiB: temporaries': lambda one: one['hbm']['temporaries'] / _GIB,
    'GiB: total, as compiled': lambda one: one['hbm']['total'] / _GIB,
    'GiB: capacity': lambda one: one['hbm']['capacity'] / _GIB,
    'fits': lambda one: 'yes' if one['hbm']['fits'] else 'NO',
    'ms: prefill': lambda one: one['compiled']['prefill']['milliseconds'],
    'ms: plain step': lambda one: one['compiled']['plain_step']['milliseconds'],
    'ms: target call over γ+1 rows': lambda one: one['compiled']['target_call']['milliseconds'],
    'ms: its floor, all read once': lambda one: one['floor_milliseconds']['target'],
    'ms: draft step, alone': lambda one: one['compiled']['draft'].get(
        'draft_milliseconds', one['compiled']['draft']['milliseconds']
    ),
    'ms: draft step, in the loop': lambda one: one['compiled']['loop']['draft_milliseconds'],
    'ms: its floor, read once': lambda one: one['floor_milliseconds']['draft'],
    'ms: a round of the loop': lambda one: one['round_milliseconds'],
    'call over floor': lambda one: one['call_over_floor'],
    'cost of γ+1 rows over plain step': lambda one: one['cost_of_rows'],
    'c, alone': lambda one: one['c'],
    'c, in the loop': lambda one: one['c_in_loop'],
    'share of a round in neither model': lambda one: one['outside'],
    'large copies in the loop': lambda one: one['copies']['number'],
    'exchanges a round, not timed': lambda one: sum(number for number, _ in one['collectives'].values()),
    'MB exchanged a round': lambda one: sum(size for _, size in one['collectives'].values()) / 1e6,
    'compile, s': lambda one: sum(part.get('compile_seconds', 0) for part in one['compiled'].values()),
}


def table(reports: list[Figures]) -> str:
    """A column for each topology; cells of programs that did not compile are empty, with their errors below."""
    rows = [(label, *(_cell(one, read) for one in reports)) for label, read in _ROWS.items()]
    text = tabulate(
        rows, ['', *(one['topology'] for one in reports)], tablefmt='github', disable_numparse=True
    )
    for one in reports:
        for name, part in one['compiled'].items():
            if 'error' in part:
                text += f'\n\n{one["topology"]}, {name}: {part["error"]}'
    return text


def _cell(one: Figures, read: Callable[[Figures], Any]) -> str:
    try:
        value = read(one)
    except (KeyError, TypeError):
        return ''
    return value if isinstance(value, str) else f'{value:.0f}' if isinstance(value, int) else f'{value:.3g}'


def predicted_table(reports: list[Figures]) -> str:
    """Rows of the paper's Table 2 for this draft, with the speed-up from the estimates on each topology."""
    with_rows = [one for one in reports if one.get('predicted')]
    if not with_rows:
        known = any('round_milliseconds' in one for one in reports)
        return (
            'The paper has no row for a draft of this size.' if known else 'Not all programs were compiled.'
        )
    lines = []
    for index, row in enumerate(with_rows[0]['predicted']):
        ours = [
            text
            for one in with_rows
            for text in (
                f'{one["predicted"][index]["theorem"]:.2f}',
                f'{one["predicted"][index]["round"]:.2f}',
            )
        ]
        paper = (row['paper_c'], row['paper_expected'], row['paper_measured'])
        lines.append(
            (row['task'], row['draft'], row['temperature'], row['gamma'], row['alpha'], *ours, *paper)
        )
    names = [name for one in with_rows for name in (f'{one["topology"]}: Thm 3.8', 'whole round')]
    headers = ['task', 'draft', 'T', 'γ', 'α', *names, 'paper: c', 'expected', 'measured']
    return tabulate(lines, headers, tablefmt='github', disable_numparse=True)


def markdown(reports: list[Figures], title: str) -> str:
    """The whole report."""
    return f"""# {title}

Every time is the {LABEL}: the sum of `estimated_cycles` in the optimized program, at the chip's clock. The floor is
what must be read (weights that are multiplied by, and caches) at the bandwidth of the memory. The compiler has no
estimate for exchanges between chips: they are counted, and their time is in none of the figures. An estimate below
the floor leaves out the wait for weights that are fetched ahead; ratios and speed-ups then take the floor.

{table(reports)}

## At the paper's α and γ

{predicted_table(reports)}

"Thm 3.8" uses c alone; "whole round" uses the draft step as it is within the loop, the cost of γ+1 rows, and the
time in neither model. Both are relative to a plain step with the same optimizations (two rows at batch size 1).
"""


def plot(reports: list[Figures]) -> Figure:
    """Memory by part, and times beside their floors, for each topology."""
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    names = [one['topology'] for one in reports]
    parts = ('target_weights', 'draft_weights', 'target_caches', 'draft_caches', 'temporaries')
    base = [0.0] * len(reports)
    for part in parts:
        sizes = [one['hbm'].get(part, 0) / _GIB for one in reports]
        left.bar(names, sizes, bottom=base, label=part.replace('_', ' '))
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    for place, one in enumerate(reports):
        left.hlines(
            one['hbm']['capacity'] / _GIB,
            place - 0.4,
            place + 0.4,
            'black',
            label=None if place else 'capacity',
        )
    left.set(ylabel='GiB a chip', title='memory of the whole loop')
    left.set_ylim(0, 1.35 * left.get_ylim()[1])  # room for the legend
    left.legend(fontsize=8, ncols=2, loc='upper center')

    shown = ('plain step', 'plain_step'), ('target call', 'target_call'), ('round', 'loop')
    for number, (label, name) in enumerate(shown):
        times = [one['compiled'][name].get('milliseconds', 0) for one in reports]
        right.bar([place + 0.25 * (number - 1) for place in range(len(reports))], times, 0.22, label=label)
    for place, one in enumerate(reports):
        floor = one['floor_milliseconds']['target']
        right.hlines(floor, place - 0.4, place + 0.4, 'black', label=None if place else 'floor of a call')
    right.set(xticks=range(len(reports)), ylabel='ms', title=LABEL)
    right.set_xticklabels(names)
    right.set_ylim(0, 1.35 * right.get_ylim()[1])
    right.legend(fontsize=8, ncols=2, loc='upper center')
    return figure
