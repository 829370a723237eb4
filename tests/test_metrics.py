"""BLEU of outputs beside references, where there are any."""

import pytest

from spec_jax.data import Example
from spec_jax.metrics import bleu


def test_bleu_counts_lines_with_a_reference():
    examples = [Example('a', 'das ist ein kleiner Test'), Example('b', None)]
    assert bleu(['das ist ein kleiner Test', 'anything'], examples) == pytest.approx(100)
    assert bleu(['x'], [Example('a', None)]) is None
