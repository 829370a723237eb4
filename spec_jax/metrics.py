"""How good outputs are, beside references."""

from __future__ import annotations

from collections.abc import Sequence

import sacrebleu

from spec_jax.data import Example


def bleu(texts: Sequence[str], examples: Sequence[Example]) -> float | None:
    """Corpus BLEU, sacrebleu's default, over the lines that have a reference; None where none has."""
    pairs = [(text, one.target) for text, one in zip(texts, examples, strict=True) if one.target]
    if not pairs:
        return None
    outputs, references = zip(*pairs, strict=True)
    return sacrebleu.corpus_bleu(list(outputs), [list(references)]).score
