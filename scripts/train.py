"""Trains a T5 on pairs of texts, or a draft on its target's outputs, and exports it; or counts n-grams for a draft.

    python scripts/train.py --config=configs/train_demo_target.py --workdir=W \\
        --config.tokenizer=TOKENIZER --config.data.train=train.tsv --config.data.valid=valid.tsv

writes W/export, a folder that transformers loads too, and W/report.json, the losses. Stopped at any time and
started again with the same command, it resumes. spec_jax/training/recipe.py documents the keys. With
configs/train_ngram_demo.py it counts n-grams, which takes seconds (spec_jax/training/ngram.py).
"""

import pathlib

from absl import app, flags

from spec_jax.run import cli
from spec_jax.training import loop, ngram

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of checkpoints, report and export.', required=True)
_EXPORT_ONLY = flags.DEFINE_bool('export_only', False, 'Train nothing; export the newest checkpoint.')


def main(argv):
    if argv[1:]:
        raise app.UsageError(f'unexpected {argv[1:]}')
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    recipe = config.get('recipe', 't5')
    if recipe not in _RECIPES:
        raise ValueError(f'recipe: expected one of {", ".join(_RECIPES)}, got {recipe!r}')
    _RECIPES[recipe](config, workdir)
    print(f'exported {workdir / "export"}')


def _train_t5(config, workdir):
    if _EXPORT_ONLY.value:
        loop.export_latest(config, workdir)
        return
    with cli.StopSignal() as stop:
        step = loop.train_model(config, workdir, stop)
    if step < config.steps:
        print(f'stopped at step {step} of {config.steps}; the same command goes on from there')
        stop.exit_if_set()


def _count_ngrams(config, workdir):
    if _EXPORT_ONLY.value:
        raise ValueError(
            'export_only: expected a recipe that leaves checkpoints, got ngram; leave the flag out'
        )
    print(ngram.describe(ngram.train_ngram(config, workdir)))


_RECIPES = {'t5': _train_t5, 'ngram': _count_ngrams}


if __name__ == '__main__':
    cli.run(main)
