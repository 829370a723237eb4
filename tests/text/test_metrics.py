"""BLEU and ROUGE of outputs beside references, where there are any."""

import pytest

from spec_jax.text import metrics
from spec_jax.text.data import Example
from spec_jax.text.metrics import bleu


def test_bleu_counts_lines_with_a_reference():
    examples = [Example('a', 'das ist ein kleiner Test'), Example('b', None)]
    assert bleu(['das ist ein kleiner Test', 'anything'], examples) == pytest.approx(100)
    assert bleu(['x'], [Example('a', None)]) is None


def test_quality():
    examples = [Example('a', 'das ist ein kleiner Test'), Example('b', None)]
    texts = ['das ist ein kleiner Test', 'anything']
    assert metrics.quality('bleu', texts, examples) == pytest.approx(dict(bleu=100))
    assert metrics.quality('bleu', texts[1:], examples[1:]) == {}
    with pytest.raises(ValueError, match="one of bleu, rouge; got 'meteor'"):
        metrics.check('meteor')


def test_rouge():
    pytest.importorskip('rouge_score')
    metrics.check('rouge')
    examples = [Example('a', 'the cat sat down'), Example('b', 'x y'), Example('c', None)]
    # One line in full; the other with one word of two (F = .5 for single words, 0 for pairs).
    scores = metrics.quality('rouge', ['the cat sat down', 'y z', 'w'], examples)
    assert scores == pytest.approx(dict(rouge1=75, rouge2=50, rougeL=75))
    assert metrics.quality('rouge', ['w'], examples[2:]) == {}
