"""Speed, acceptance and quality over drafts, temperatures, draft lengths and batch sizes, with theory and paper.

    python scripts/benchmark.py --config=configs/demo_ende.py --workdir=W \
        --config.benchmark.drafts=model,bigram,my_draft.py:build --config.benchmark.gammas=2,4,8

One axis at a time is varied around the first draft at the config's temperature, gamma and batch size; see the
section `benchmark` of the config. Writes W/report.json, W/report.md, W/gamma.png, W/accepted.png,
W/batch_size.png, W/alpha.png and W/cells.jsonl, which keeps the measured cells: stopped and started again, or with
entries added to the lists, it measures only the missing ones. Remove that file to measure all of them again.
"""

import dataclasses
import pathlib
import zlib
from functools import partial

import jax
from absl import flags
from tqdm import tqdm

from spec_jax.drafters.build import build_named, file_checksum
from spec_jax.measure import auto_gamma, benchmark, benchmark_report, setup
from spec_jax.run import cli, report
from spec_jax.run.journal import Journal
from spec_jax.text import metrics

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for the report, its tables, its plots and the cells measured.', required=True
)
_RECORD_VERSION = 2  # raised when the figures of a cell change their names or meanings
_ELSEWHERE = ('draft', 'gamma', 'temperature', 'batch_size', 'compare', 'alpha', 'verify', 'benchmark')


def main(_):
    config, workdir = _CONFIG.value, report.make_workdir(_WORKDIR.value)
    settings = _settings(config)
    automatic = config.gamma == setup.AUTO
    base, cells = _cells(config, auto_gamma.PROBE if automatic else config.gamma)
    settings = base.settings(settings)
    job = setup.load(config, settings, default_limit=config.benchmark.lines)
    drafters = {
        draft: build_named(draft, config.draft, job.target, job.tokenizer, config.dtype)
        for draft in dict.fromkeys(cell.draft for cell in cells)
    }
    if cut := job.truncation():
        print(cut)
    job = dataclasses.replace(job, settings=setup.one_width(job.settings, job.sources))

    run = _run(config, job)
    if automatic:
        kept = workdir / f'gamma.{zlib.crc32(_identity(config, base).encode()):08x}.jsonl'
        gamma, message, _ = auto_gamma.settle(job, drafters[base.draft], kept, run)
        print(message)
        base, cells = _cells(config, gamma or 1)

    journal = Journal.open(workdir / 'cells.jsonl', run)
    identity = partial(_identity, config)
    due = benchmark.missing(cells, journal, identity)
    print(
        f'{len(job.sources)} lines, {len(cells)} cells, {len(cells) - len(due)} of them measured before; compiling '
        'takes the greater part of a small sweep',
        flush=True,
    )
    numbers = {cell: f'{number}/{len(due)}' for number, cell in enumerate(due, 1)}

    def measure(cell):
        progress = partial(tqdm, unit='batch', dynamic_ncols=True, desc=f'{numbers[cell]} {cell}')
        return benchmark.measure(
            cell,
            job,
            drafters[cell.draft],
            metric=config.benchmark.metric,
            repeats=config.repeats,
            progress=progress,
        )

    _write(workdir, benchmark.sweep(cells, measure, journal, identity), base, config, job)


def _write(workdir, rows, base, config, job):
    facts = _facts(config, job, rows)
    task, weights = config.benchmark.task, facts['weights']
    report.write_text(workdir / 'report.md', benchmark_report.markdown(rows, base, task, weights, facts))
    title = f'{pathlib.Path(config.target).name} on {pathlib.Path(config.data.path).name}'
    figures = benchmark_report.pictures(rows, base, title)
    for name, figure in figures.items():
        figure.savefig(workdir / name, dpi=150)
    conclusions = benchmark_report.sentences(rows, base)
    (at_base,) = benchmark_report.around(rows, base)
    shared = {key: at_base[key] for key in report.KEYS if key in at_base}
    greedy = [row['greedy_match'] for row in rows if row['greedy_match'] is not None]
    shared |= dict(greedy_match=min(greedy, default=None))
    paper = {f'{size}, T = {T}': cell for (size, T), cell in benchmark_report.PAPER[task].items()}
    figures_of_run = dict(
        base=dataclasses.asdict(base), cells=rows, conclusions=conclusions, measured_on=facts
    )
    report.write_report(workdir, shared | figures_of_run | dict(paper={task: paper}), config)
    print('\n' + benchmark_report.screen_table(rows))
    print('\n' + '\n'.join(conclusions))
    print(f'\n{weights}')
    names = ', '.join(figures)
    print(f'tables: {workdir / "report.md"}   figures: {workdir / "report.json"}   plots: {names}')


def _facts(config, job, rows):
    """The setup of the run, for readers of the tables."""
    drafts = ', '.join(dict.fromkeys(row['draft'] for row in rows))
    seconds = {name: sum(row['compile_seconds'][name] for row in rows) for name in ('plain', 'speculative')}
    return {
        'weights': f'Target {config.target}, drafts {drafts} (draft: {config.draft.to_dict()}), '
        f'on {report.device()}, {config.dtype}.',
        'data': f'{config.data.path}, {len(job.sources)} lines, prefix {config.data.prefix!r}, '
        f'{job.num_truncated} sources cut to {config.max_source_length} tokens; all padded to '
        f'{job.settings.max_source_length}',
        'decoding': f'at most {config.max_new_tokens} tokens, top_k {config.top_k}, top_p {config.top_p:g}, seed '
        f'{config.seed}, {config.repeats} runs of each batch, of which the median counts',
        'software': f'jax {jax.__version__}',
        'seconds': f'{sum(row["seconds"] for row in rows):.0f} for {len(rows)} cells; of these, compiling took '
        f'{seconds["plain"]:.0f} for the plain decoder and {seconds["speculative"]:.0f} for the speculative one',
    }


def _run(config, job):
    """The settings that all cells depend on."""
    run = {name: value for name, value in config.to_dict().items() if name not in _ELSEWHERE}
    return run | dict(
        sources=setup.checksum(job.sources),
        device=report.device(),
        metric=config.benchmark.metric,
        version=_RECORD_VERSION,
    )


def _identity(config, cell):
    """Identifies a cell: its values, the draft settings, and the checksum of a user's drafter file."""
    settings = {name: value for name, value in config.draft.to_dict().items() if name != 'kind'}
    return repr([dataclasses.astuple(cell), sorted(settings.items()), file_checksum(cell.draft)])


def _settings(config):
    settings = setup.settings_from(config, auto=auto_gamma.PROBE)
    if settings.decode.rule.lossy:
        raise ValueError(
            f'lenience: expected 1, got {config.lenience:g}; only exact decoding is compared with the theory'
        )
    return settings


def _cells(config, gamma):
    """The cell at the centre, and all cells."""
    if 'benchmark' not in config:
        raise ValueError('config: expected a section `benchmark`, as in configs/demo_ende.py; got none')
    sweep = config.benchmark
    if sweep.lines < 1:
        raise ValueError(f'benchmark.lines: expected an integer >= 1, got {sweep.lines}')
    if sweep.task not in benchmark_report.PAPER:
        raise ValueError(
            f'benchmark.task: expected one of {", ".join(benchmark_report.PAPER)}; got {sweep.task!r}'
        )
    metrics.check(sweep.metric)
    drafts = [entry.strip() for entry in sweep.drafts.split(',')]
    axes = _numbers(sweep, 'temperatures', float), _numbers(sweep, 'gammas', int)
    axes += (_numbers(sweep, 'batch_sizes', int),)
    base = benchmark.Cell(drafts[0], float(config.temperature), gamma, config.batch_size)
    choose = benchmark.every_combination if sweep.every_combination else benchmark.one_axis_at_a_time
    return base, choose(base, drafts, *axes)


def _numbers(sweep, name, kind):
    try:
        return [kind(text) for text in str(sweep[name]).split(',')]
    except ValueError as error:
        what = 'integers' if kind is int else 'numbers'
        raise ValueError(
            f'benchmark.{name}: expected {what}, separated by commas; got {sweep[name]!r}'
        ) from error


if __name__ == '__main__':
    cli.run(main)
