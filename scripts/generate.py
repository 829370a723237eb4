"""Decodes a file of texts with a T5 pair, speculatively, plainly, or both ways to compare.

    python scripts/generate.py --config=configs/demo_ende.py --config.data.path=my.txt --workdir=W

Writes W/output.txt, a line for each line of the input, and W/report.json. Stopped at any time and started again
with the same command, it resumes.

--config.mesh.data=2 --config.mesh.model=4 splits the rows of a batch and the weights over eight devices. Where
these belong to several machines, start the same command on each with

    --coordinator=HOST:PORT --num_processes=2 --process_id=0    (1 on the other; HOST is the first one)

or, on a TPU pod or under Slurm, with --coordinator=auto. The first process writes and prints.
"""

import time
from functools import partial

from absl import flags
from tqdm import tqdm

from spec_jax import analysis
from spec_jax.drafters.build import build_drafter
from spec_jax.measure import agreement, auto_gamma, runs, setup
from spec_jax.run import cli, report
from spec_jax.run.journal import Journal
from spec_jax.runtime import processes
from spec_jax.text import metrics

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for output.txt and report.json.', required=True)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of the first of several processes; auto on a TPU pod or under Slurm.'
)
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'How many there are.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Number of this one, from 0.')
_SHOWN = 5  # lines printed as a sample


def main(_):
    processes.start(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    config, workdir = _CONFIG.value, report.make_workdir(_WORKDIR.value)
    job = setup.load(config, setup.settings_from(config, auto=auto_gamma.PROBE))
    drafter = build_drafter(config.draft, job.target, job.tokenizer, config.dtype)
    if cut := job.truncation():
        print(cut)
    gamma, chosen = job.settings.decode.gamma, {}
    if config.gamma == setup.AUTO and gamma:
        gamma, chosen = _choose_gamma(job, drafter, config, workdir / 'gamma.jsonl')
    settings = job.settings.decoding(gamma=gamma)

    run = _compare if config.compare else partial(_decode, unfinished=workdir / 'unfinished.jsonl')
    outputs, figures = run(job.target, drafter, job.sources, settings, config)
    texts = {name: job.tokenizer.batch_decode(ids, skip_special_tokens=True) for name, ids in outputs.items()}
    final = texts['speculative' if settings.decode.gamma else 'plain']
    figures |= chosen | dict(
        lines=len(final), truncated=job.num_truncated, bleu=metrics.bleu(final, job.examples)
    )
    if settings.decode.rule.lossy:
        figures['lossy'] = settings.decode.rule.name
    output = workdir / ('output.LOSSY.txt' if settings.decode.rule.lossy else 'output.txt')
    report.write_text(output, ''.join(f'{text}\n' for text in final))
    figures = report.write_report(workdir, figures, config)
    if processes.is_first():
        for name in ('unfinished.jsonl', 'gamma.jsonl'):
            (workdir / name).unlink(missing_ok=True)
    _show(job.examples, texts, figures)
    print(f'\nall {len(final)} lines: {output}   figures: {workdir / "report.json"}')


def _progress(batches, desc):
    return tqdm(batches, desc=desc, unit='batch', dynamic_ncols=True, disable=not processes.is_first())


def _choose_gamma(job, drafter, config, kept):
    """The chosen gamma, at least 1 where both decoders are to be compared, and its measurements for the report."""
    print('gamma = auto: measuring on a few prompts', flush=True)
    run = dict(config=config.to_dict(), sources=setup.checksum(job.sources))
    gamma, message, measured = auto_gamma.settle(job, drafter, kept, run)
    gamma = processes.from_first(lambda: gamma)  # each process measures different times
    print(message)
    if not gamma:
        print('comparing at gamma = 1 all the same' if config.compare else 'decoding plainly')
    return gamma or int(config.compare), dict(gamma_choice=measured)


def _decode(target, drafter, sources, settings, config, unfinished):
    """Decodes once; the rate includes prefill and compilation. Returns ids by decoder, and figures."""
    name, rate = ('speculative', 'tokens_per_s') if settings.decode.gamma else ('plain', 'plain_tokens_per_s')
    if settings.decode.gamma:
        program = runs.speculative_program(target, drafter, settings)
    else:
        program = runs.plain_program(target, settings)
    run = dict(config=config.to_dict(), sources=setup.checksum(sources), counts=runs.STATS)
    journal = Journal.open(unfinished, run)
    known = sum(len(record['ids']) for record in journal.records.values())
    if known:
        print(f'{len(journal.records)} lines were decoded before; going on')
    start = time.perf_counter()
    decoded = runs.decode_lines(sources, settings, program, partial(_progress, desc='decoding'), journal)
    seconds = time.perf_counter() - start
    figures = analysis.acceptance_figures(decoded.stats)
    return {name: decoded.ids}, figures | {rate: (figures['tokens'] - known) / seconds}


def _compare(target, drafter, sources, settings, config):
    """Decodes both ways in turn, measures, and compares greedy outputs."""
    if not settings.decode.gamma:
        raise ValueError('compare: expected a draft and gamma >= 1 to compare with plain decoding; got none')
    programs = dict(
        plain=runs.plain_program(target, settings),
        speculative=runs.speculative_program(target, drafter, settings),
    )
    timer = runs.step_timer(target, drafter, sources, settings)
    results = runs.compare(
        sources,
        settings,
        programs,
        repeats=config.repeats,
        progress=partial(_progress, desc='comparing'),
        timer=timer,
    )
    figures = runs.comparison_figures(results, timer.medians(), settings)
    if config.temperature == 0:
        figures |= agreement.agreement(target, sources, results['plain'].ids, results['speculative'].ids)
    return {name: result.ids for name, result in results.items()}, figures


def _show(examples, texts, figures):
    """A sample of the outputs, then the figures."""
    for line in range(min(_SHOWN, len(examples))):
        print(f'\n{"source":>12}  {examples[line].source}')
        for name, outputs in texts.items():
            print(f'{name:>12}  {outputs[line]}')
    print('\n' + report.summary(figures))


if __name__ == '__main__':
    cli.run(main)
