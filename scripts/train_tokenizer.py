"""Trains a SentencePiece vocabulary on both columns of some files.

python scripts/train_tokenizer.py --input=data/train.tsv --vocab_size=8000 --output=DIR
"""

import sys

from absl import app, flags

from spec_jax.text.data import read_examples
from spec_jax.training.tokenizer import train_tokenizer

INPUT = flags.DEFINE_list(
    'input', None, 'Text files: .txt, .tsv (both columns), .jsonl, or .gz.', required=True
)
VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 8000, 'Number of pieces, the three special ones included.')
OUTPUT = flags.DEFINE_string('output', None, 'Folder to write to.', required=True)


def main(_) -> None:
    try:
        examples = [example for path in INPUT.value for example in read_examples(path)]
        texts = [text for example in examples for text in (example.source, example.target) if text]
        tokenizer = train_tokenizer(texts, VOCAB_SIZE.value, OUTPUT.value)
    except (ValueError, OSError) as error:
        sys.exit(f'error: {error}')
    print(f'{len(tokenizer):,} pieces from {len(texts):,} texts: {OUTPUT.value}')


if __name__ == '__main__':
    app.run(main)
