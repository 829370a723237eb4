"""Chooses the sentences that ship with the demo pair: a number of each test set, in turn.

    python scripts/make_demo_sentences.py --inputs=W/data/test_tatoeba.tsv,W/data/test_libreoffice.tsv \\
        --output=spec_jax/demo/sentences.tsv
"""

import pathlib
import random

from absl import flags

from spec_jax.run import cli, report
from spec_jax.text import data

_INPUTS = flags.DEFINE_list('inputs', None, 'tsv files of pairs, separated by commas.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'tsv file.', required=True)
_COUNT = flags.DEFINE_integer('count', 100, 'Sentences of each file.', lower_bound=1)


def main(_):
    chosen = [random.Random(0).sample(data.read_examples(path), _COUNT.value) for path in _INPUTS.value]
    lines = [f'{one.source}\t{one.target}\n' for turn in zip(*chosen, strict=True) for one in turn]
    report.write_text(pathlib.Path(_OUTPUT.value), ''.join(lines))
    print(f'{len(lines)} pairs: {_OUTPUT.value}')


if __name__ == '__main__':
    cli.run(main)
