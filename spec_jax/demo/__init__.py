"""The shipped pair: English to German, a target and a draft distilled from it, and 200 sentences to try it on."""

from pathlib import Path

FOLDER = Path(__file__).parent
TARGET = FOLDER / 'target'
DRAFT = FOLDER / 'draft'
COUNTS = FOLDER / 'ngram'  # of n-grams in the target's own outputs
SENTENCES = FOLDER / 'sentences.tsv'
