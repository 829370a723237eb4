"""Decodes prompts of every length, and tests that each shape is compiled once and memory stays flat.

    python scripts/soak.py --config=configs/demo_ende.py --workdir=W --prompts=1000

Writes W/report.json and W/soak.png, and exits with 1 if programs are compiled after the first pass, JAX arrays
accumulate, or memory grows by more than --max_growth_mb. The test is of one process, so it cannot be resumed:
stopped, it reports on the finished passes.
"""

import sys
from functools import partial

from absl import flags
from tqdm import tqdm

from spec_jax import analysis
from spec_jax.drafters.build import build_drafter
from spec_jax.measure import runs, setup, soak
from spec_jax.run import cli, report

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for report.json and soak.png.', required=True)
_PROMPTS = flags.DEFINE_integer('prompts', 1000, 'How many to decode, cut from the lines of the data.')
_MAX_GROWTH = flags.DEFINE_float(
    'max_growth_mb', 16.0, 'How much memory may grow after the first quarter of the run.', lower_bound=0.0
)


def main(_):
    config, workdir = _CONFIG.value, report.make_workdir(_WORKDIR.value)
    job = setup.load(config, setup.settings_from(config))
    drafter = build_drafter(config.draft, job.target, job.tokenizer, config.dtype)
    passes = soak.make_passes(job.sources, _PROMPTS.value, job.settings)
    soak.resident_bytes()  # raises at once where it is not available
    print(f'{_PROMPTS.value} prompts in {len(passes)} passes; the first one compiles', flush=True)
    program = runs.speculative_program(job.target, drafter, job.settings)
    progress = partial(tqdm, unit='pass', dynamic_ncols=True, desc='soaking')
    with cli.StopSignal() as stop:
        soaked = soak.run(program, passes, job.settings, progress=progress, stop=stop)

    measured = soak.figures(soaked, _MAX_GROWTH.value)
    counted = analysis.acceptance_figures(soaked.stats)
    rate = dict(tokens_per_s=counted['tokens'] / soaked.seconds)
    report.write_report(workdir, counted | rate | dict(soak=measured), config)
    title = (
        f'{measured["prompts"]} prompts, batch size {config.batch_size}, {report.device()}, {config.dtype}'
    )
    soak.plot(soaked, title).savefig(workdir / 'soak.png', dpi=150)
    print(f'\n{soak.summary(measured)}\nfigures: {workdir / "report.json"}   plot: {workdir / "soak.png"}')
    stop.exit_if_set()
    if measured['faults']:
        sys.exit(1)


if __name__ == '__main__':
    cli.run(main)
