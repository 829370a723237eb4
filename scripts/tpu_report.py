"""Compiles a pair's programs for TPUs that are not attached: memory and estimated times. No weights are needed.

    pip install -r requirements-tpu-report.txt
    python scripts/tpu_report.py --config=configs/t5_v1_1_xxl_wmt_ende.py --topology=v4,v5e:8

Prints the tables; writes report.json, report.md and tpu_report.png in --workdir. Sizes come from the config.json of
the config's folders, or from names such as google/t5-v1_1-xxl. Every time is the compiler's estimate.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'  # before JAX is imported: no search for a TPU
os.environ['TPU_SKIP_MDS_QUERY'] = '1'
os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'  # none is used, so none is locked

import importlib.util  # noqa: E402
from functools import partial  # noqa: E402

from absl import flags  # noqa: E402
from tqdm import tqdm  # noqa: E402

from spec_jax.measure import setup  # noqa: E402
from spec_jax.models.load import describe  # noqa: E402
from spec_jax.run import cli  # noqa: E402
from spec_jax.run import report as files  # noqa: E402
from spec_jax.tpu import chips, programs, report  # noqa: E402

_CONFIG = cli.define_config()
_TOPOLOGY = flags.DEFINE_list('topology', ['v4'], f'Of {", ".join(chips.CHIPS)}, each NAME or NAME:CHIPS.')
_WORKDIR = flags.DEFINE_string('workdir', 'tpu_report', 'Folder for report.json, report.md and the plot.')
_LIMIT = flags.DEFINE_integer('limit', 600, 'Seconds that a program may take to compile.')


def main(_):
    config, topologies = _CONFIG.value, _TOPOLOGY.value
    for topology in topologies:
        chips.named(topology)
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError(
            'expected libtpu to be installed, found none: pip install -r requirements-tpu-report.txt'
        )
    settings = setup.settings_from(config, auto=1)
    if config.draft.kind != 'model' or not settings.decode.gamma:
        raise ValueError(
            f'draft.kind: expected a model and a gamma of 1 or more, got {config.draft.kind} and {config.gamma}'
        )
    target, draft = describe(config.target), describe(config.draft.path)
    workdir, reports = files.make_workdir(_WORKDIR.value), []
    for topology in topologies:
        pair = programs.Setup(
            target,
            draft,
            topology,
            settings.decode.gamma,
            settings.decode.max_new_tokens,
            settings.max_source_length,
            settings.decode.sampling,
            settings.batch_size,
        )
        reports.append(report.figures(pair, _LIMIT.value, partial(tqdm, desc=topology, dynamic_ncols=True)))
        _write(workdir, reports, config)
    print(f'\n{report.table(reports)}\n\n{report.predicted_table(reports)}\n\n{report.LABEL}')
    print(f'figures: {workdir / "report.json"}   {workdir / "report.md"}   {workdir / "tpu_report.png"}')


def _write(workdir, reports, config):
    title = f'{config.target} with {config.draft.path}, γ = {config.gamma}, batch size {config.batch_size}'
    files.write_report(workdir, dict(device=None, topologies=reports), config)
    files.write_text(workdir / 'report.md', report.markdown(reports, title))
    report.plot(reports).savefig(workdir / 'tpu_report.png', dpi=150)


if __name__ == '__main__':
    cli.run(main)
