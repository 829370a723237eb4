"""Measures the gain of a draft of no cost at each alpha, down to 0.

    python scripts/benchmark_overhead.py --config=configs/demo_ende.py --workdir=W

Decodes greedily by turns: plainly, with an oracle that is right at a given rate, and with drafts that cost little:
those of --drafts, each a kind of config.draft, KIND=PATH or FILE.py:NAME. Decodes the first 30 lines unless
data.limit is set, and writes W/report.json, W/report.md and W/overhead.png.
"""

import pathlib
import time
from functools import partial

from absl import flags
from tqdm import tqdm

from spec_jax.drafters.build import build_named
from spec_jax.measure import overhead, setup
from spec_jax.run import cli, report

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for report.json, report.md, overhead.png.', required=True
)
_DRAFTS = flags.DEFINE_list(
    'drafts', None, 'By default prompt_lookup, and unigram and bigram where draft.counts is a file or folder.'
)
_LINES = 30  # where data.limit is 0


def main(_):
    config, workdir, start = _CONFIG.value, report.make_workdir(_WORKDIR.value), time.perf_counter()
    settings = setup.settings_from(config)
    overhead.check(settings)
    job = setup.load(config, settings, default_limit=_LINES)
    drafters = {entry: _build(entry, config, job) for entry in _entries(config)}
    settings = setup.one_width(job.settings, job.sources)
    print(f'{len(job.sources)} lines, {len(drafters)} drafts; compiling takes a minute or two', flush=True)
    progress = partial(tqdm, unit='batch', dynamic_ncols=True, desc='measuring')
    rows = overhead.measure(
        job.target, drafters, job.sources, settings, repeats=config.repeats, progress=progress
    )

    facts = {
        'target': config.target,
        'data': f'{config.data.path}, {len(job.sources)} lines, {job.num_truncated} of them cut to '
        f'{config.max_source_length} tokens; {rows[0]["tokens"]} tokens of output',
        'gamma': f'{settings.decode.gamma}, batch size {settings.batch_size}, {config.repeats} runs of each batch',
        'device': f'{report.device()}, {config.dtype}',
        'seconds': f'{time.perf_counter() - start:.0f}, compilation included',
    }
    _write(workdir, rows, facts, settings, config)


def _write(workdir, rows, facts, settings, config):
    report.write_text(workdir / 'report.md', overhead.markdown(rows, settings.decode.gamma, facts))
    title = f'Drafts that cost nothing, gamma = {settings.decode.gamma}, batch size {settings.batch_size}'
    overhead.plot(rows, title).savefig(workdir / 'overhead.png', dpi=150)
    conclusions = overhead.conclusions(rows)
    shared = {key: rows[0][key] for key in ('tokens', 'plain_tokens_per_s', 'cost_of_rows')}
    shared |= dict(greedy_match=min(row['greedy_match'] for row in rows))
    report.write_report(workdir, shared | conclusions | dict(drafts=rows, measured_on=facts), config)
    print('\n' + overhead.table(rows) + '\n')
    print('\n'.join(overhead.sentences(conclusions, settings.decode.gamma)))
    print(
        f'\ntable: {workdir / "report.md"}   figures: {workdir / "report.json"}   plot: {workdir / "overhead.png"}'
    )


def _entries(config):
    """Names of the drafts, each once."""
    if _DRAFTS.value is not None:
        return list(dict.fromkeys(_DRAFTS.value))
    counted = bool(config.draft.counts) and pathlib.Path(config.draft.counts).exists()
    return ['prompt_lookup', 'unigram', 'bigram'] if counted else ['prompt_lookup']


def _build(entry, config, job):
    if (drafter := build_named(entry, config.draft, job.target, job.tokenizer, config.dtype)) is None:
        raise ValueError(f'--drafts: expected drafts, separated by commas; got {entry!r}, which is not one')
    return drafter


if __name__ == '__main__':
    cli.run(main)
