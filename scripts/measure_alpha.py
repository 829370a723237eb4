"""Measures alpha of each draft along texts that the target generates: the paper's Table 3 for any pair.

    python scripts/measure_alpha.py --config=configs/demo_ende.py --workdir=W \
        --config.alpha.drafts=unigram,model,my_draft.py:build --config.data.path=my.txt

Writes W/report.json, W/report.md and W/alpha.png. A draft is a kind of config.draft, KIND=PATH for one with
another model or other counts (model=small,model=base), or FILE.py:NAME. Stopped at any time and started again
with the same command, it resumes.
"""

import dataclasses
import pathlib
import time
import zlib
from functools import partial

from absl import flags
from tqdm import tqdm

from spec_jax.drafters.build import build_named, file_checksum
from spec_jax.drafters.thrifty import without_thrift
from spec_jax.measure import acceptance, acceptance_report, setup
from spec_jax.run import cli, report
from spec_jax.run.journal import Journal
from spec_jax.sampling import SamplingConfig

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for the report, its table and its plot.', required=True
)


def main(_):
    config, workdir = _CONFIG.value, report.make_workdir(_WORKDIR.value)
    entries, temperatures = _entries(config), _temperatures(config)
    job = setup.load(config, _settings(config))
    drafters = {
        entry: without_thrift(build_named(entry, config.draft, job.target, job.tokenizer, config.dtype))
        for entry in entries
    }
    if cut := job.truncation():
        print(cut)
    settings = setup.one_width(job.settings, job.sources)

    start = time.perf_counter()
    rows = []
    for temperature in temperatures:
        rows += _measure(
            job.target,
            drafters,
            job.sources,
            settings.sampled(temperature=temperature),
            config,
            workdir,
        )
    facts = _facts(config, rows, len(job.sources), job.num_truncated, time.perf_counter() - start)
    _write(workdir, rows, facts, config)
    print(
        f'\ntables: {workdir / "report.md"}   figures: {workdir / "report.json"}   plot: {workdir / "alpha.png"}'
    )


def _measure(target, drafters, sources, settings, config, workdir):
    """A row of figures for each draft at one temperature, all along the same texts."""
    temperature = settings.decode.sampling.temperature
    run = config.to_dict() | dict(temperature=temperature)
    run |= dict(sources=setup.checksum(sources))
    for section in ('alpha', 'draft'):
        del run[section]
    texts = acceptance.target_texts(
        target,
        sources,
        settings,
        config.alpha.tokens,
        _progress(f'T={temperature:g} texts of the target'),
        _journal(workdir, run),
    )
    if not texts:
        raise ValueError(f'{config.data.path}: expected a line with text in it; got empty lines alone')
    leniences = acceptance.LENIENCES if temperature > 0 else (1.0,)
    rows = []
    for entry, drafter in drafters.items():
        journal = _journal(
            workdir, run | dict(draft=entry, settings=config.draft.to_dict(), file=file_checksum(entry))
        )
        progress = _progress(f'T={temperature:g} {entry}')
        records = acceptance.measure_lines(
            target, drafter, sources, texts, settings, leniences, progress, journal
        )
        figures = acceptance.figures(records, leniences, seed=config.seed)
        rows.append(dict(draft=entry, temperature=temperature) | figures)
    return rows


def _progress(what):
    return partial(tqdm, unit='batch', dynamic_ncols=True, desc=what)


def _journal(workdir, run):
    """The journal of a part of the run; adding a draft to the list leaves those of the others valid."""
    name = zlib.crc32(repr([run['temperature'], run.get('draft')]).encode())
    return Journal.open(workdir / f'unfinished.{name:08x}.jsonl', run)


def _write(workdir, rows, facts, config):
    report.write_text(workdir / 'report.md', acceptance_report.markdown(rows, facts))
    title = f'{pathlib.Path(config.target).name} on {pathlib.Path(config.data.path).name}'
    figure = acceptance_report.plot(rows, title)
    figure.savefig(workdir / 'alpha.png', dpi=150)
    exact = [{key: value for key, value in row.items() if key != 'lenience'} for row in rows]
    lossy = [
        {key: row[key] for key in ('draft', 'temperature', 'lenience')}
        for row in rows
        if len(row['lenience']) > 1
    ]
    figures = dict(
        tokens=sum({row['temperature']: row['tokens'] for row in rows}.values()),
        alpha=rows[0]['alpha'] if len(rows) == 1 else None,
        drafts=exact,
        LOSSY_lenience=lossy,
        measured_on=facts,
        paper=dict(table_3=acceptance_report.PAPER_ALPHA, LOSSY_table_5=acceptance_report.PAPER_LENIENCE),
    )
    report.write_report(workdir, figures, config)
    for path in workdir.glob('unfinished.*.jsonl'):
        path.unlink()
    print('\n' + acceptance_report.alpha_table(rows))
    if lossy:
        print('\n' + acceptance_report.lenience_table(rows))


def _facts(config, rows, num_lines, num_truncated, seconds):
    """The setup of the run, for readers of the table."""
    per_temperature = {f'T = {row["temperature"]:g}': row for row in rows}
    return {
        'target': config.target,
        'drafts': ', '.join(dict.fromkeys(row['draft'] for row in rows))
        + f' (draft: {config.draft.to_dict()})',
        'data': f'{config.data.path}, {num_lines} lines, prefix {config.data.prefix!r}, '
        f'{num_truncated} sources cut to {config.max_source_length} tokens',
        'tokens': ', '.join(
            f'{row["tokens"]} in {row["texts"]} texts at {name}' for name, row in per_temperature.items()
        )
        + f', each of at most {config.max_new_tokens}',
        'sampling': f'top_k {config.top_k}, top_p {config.top_p:g}, seed {config.seed}',
        'device': f'{report.device()}, {config.dtype}',
        'seconds': f'{seconds:.0f}, compilation included',
    }


def _settings(config):
    settings = setup.settings_from(config)
    if settings.decode.rule.lossy:
        raise ValueError(
            f'lenience: expected 1, got {config.lenience:g}; alpha by lenience, LOSSY, is measured without it'
        )
    for name, lowest in (('batch_size', 1), ('tokens', 0)):
        if config.alpha[name] < lowest:
            raise ValueError(f'alpha.{name}: expected an integer >= {lowest}, got {config.alpha[name]}')
    return dataclasses.replace(settings, batch_size=config.alpha.batch_size)


def _entries(config):
    entries = list(dict.fromkeys(entry.strip() for entry in config.alpha.drafts.split(',')))
    if unfit := [entry for entry in entries if entry in ('', 'none')]:
        raise ValueError(f'alpha.drafts: expected drafts, separated by commas; got {unfit[0]!r} among them')
    return entries


def _temperatures(config):
    try:
        temperatures = [float(text) for text in config.alpha.temperatures.split(',')]
    except ValueError as error:
        raise ValueError(
            f'alpha.temperatures: expected numbers, separated by commas; got {config.alpha.temperatures!r}'
        ) from error
    return [SamplingConfig(temperature).temperature for temperature in dict.fromkeys(temperatures)]


if __name__ == '__main__':
    cli.run(main)
