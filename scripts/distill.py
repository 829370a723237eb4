"""Translates the training sources with a target, as training data for its draft.

    python scripts/distill.py --config=configs/distill_demo.py --workdir=W \\
        --config.target=TARGET --config.data.train=train.tsv

writes W/distilled.tsv (source, tab, the target's output) and W/report.json. Stopped at any time and started again
with the same command, it resumes.
"""

import json
import pathlib
import time

from absl import app, flags

from spec_jax.models.load import load_model
from spec_jax.run import cli
from spec_jax.run.report import write_text
from spec_jax.text import data
from spec_jax.text.tokenizers import load_tokenizer
from spec_jax.training import distillation
from spec_jax.training.recipe import files

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the pairs and the report.', required=True)


def main(argv):
    if argv[1:]:
        raise app.UsageError(f'unexpected {argv[1:]}')
    config, workdir, start = _CONFIG.value, pathlib.Path(_WORKDIR.value), time.time()
    if not files(config.data.train):
        raise ValueError('data.train: expected files, got none; name one by --config.data.train=FILE')
    examples = [one for path in files(config.data.train) for one in data.read_examples(path)]
    sources = distillation.choose_sources(examples, config.data.limit, config.seed)
    target = load_model(config.target, config.dtype)
    tokenizer = load_tokenizer(config.tokenizer or config.target)
    print(f'{len(sources):,} sources')
    with cli.StopSignal() as stop:
        counts = distillation.distill(
            target,
            tokenizer,
            sources,
            workdir,
            prefix=config.data.prefix,
            batch_size=config.batch_size,
            max_source_length=config.data.max_source_length,
            temperature=config.temperature,
            seed=config.seed,
            stop=stop,
        )
    counts['seconds'] = round(time.time() - start, 1)
    report = json.dumps(counts | {'config': config.to_dict()}, indent=2, ensure_ascii=False)
    write_text(workdir / 'report.json', report + '\n')
    for name, value in counts.items():
        print(f'{name:10} {value}')
    stop.exit_if_set()


if __name__ == '__main__':
    cli.run(main)
