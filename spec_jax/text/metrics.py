"""Metrics of outputs against references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sacrebleu

from spec_jax.text.data import Example

METRICS = ('bleu', 'rouge')


def bleu(texts: Sequence[str], examples: Sequence[Example]) -> float | None:
    """Corpus BLEU, sacrebleu's default, over the lines that have a reference; None where none has."""
    pairs = [(text, one.target) for text, one in zip(texts, examples, strict=True) if one.target]
    if not pairs:
        return None
    outputs, references = zip(*pairs, strict=True)
    return sacrebleu.corpus_bleu(list(outputs), [list(references)]).score


def check(metric: str) -> None:
    """Raises ValueError for an unknown metric, or one whose package is not installed."""
    if metric not in METRICS:
        raise ValueError(f'metric: expected one of {", ".join(METRICS)}; got {metric!r}')
    if metric == 'rouge':
        _rouge_scorer()


def quality(metric: str, texts: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Scores from 0 to 100 of outputs against references, over the lines that have one; empty where none has.

    Args:
      metric: 'bleu' gives `bleu` (sacrebleu's default); 'rouge' gives `rouge1`, `rouge2` and `rougeL`, means over
        the lines of the F measure with stemmed words.
      texts: one output per line.
      examples: the lines, with their references.
    """
    if metric == 'bleu':
        score = bleu(texts, examples)
        return {} if score is None else dict(bleu=score)
    pairs = [(one.target, text) for text, one in zip(texts, examples, strict=True) if one.target]
    scorer = _rouge_scorer()
    scores = [scorer.score(reference, text) for reference, text in pairs]
    return (
        {name: 100 * float(np.mean([score[name].fmeasure for score in scores])) for name in scores[0]}
        if scores
        else {}
    )


def _rouge_scorer():
    try:
        from rouge_score.rouge_scorer import RougeScorer  # takes a second to import; BLEU does not need it
    except ImportError as error:
        raise ValueError(
            'metric: expected the package rouge-score for rouge, found none; pip install rouge-score'
        ) from error
    return RougeScorer(['rouge1', 'rouge2', 'rougeL'], use_stemmer=True)
