"""Compares greedy outputs with the plain decoder's, and scores the two tokens where they first differ.

Axes: N tokens of a text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from spec_jax.measure.scoring import score_texts
from spec_jax.models.base import Model

NEAR_TIE = 1e-5  # nats


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place at which two greedy outputs of a line differ.

    Attributes:
      line: index of the line.
      position: index of the token.
      plain, speculative: the ids there; -1 where an output had ended.
      gap: difference of their log-probabilities under the target, in nats.
    """

    line: int
    position: int
    plain: int
    speculative: int
    gap: float


def differences(
    target: Model, sources: list[np.ndarray], plain: list[np.ndarray], speculative: list[np.ndarray]
) -> list[Difference]:
    """Re-scores each line whose ids differ, with the target alone, at the first difference."""
    different = []
    for line, (ours, theirs) in enumerate(zip(plain, speculative, strict=True)):
        if np.array_equal(ours, theirs):
            continue
        size = min(len(ours), len(theirs))
        unequal = np.flatnonzero(ours[:size] != theirs[:size])
        at = int(unequal[0]) if unequal.size else size
        tokens = [int(ids[at]) if at < len(ids) else -1 for ids in (ours, theirs)]
        gap = _gap(target, sources[line], ours[:at], tokens) if min(tokens) >= 0 else float('inf')
        different.append(Difference(line, at, *tokens, gap))
    return different


def _gap(target: Model, source: np.ndarray, prefix: np.ndarray, tokens: list[int]) -> float:
    """Nats between two tokens after a prefix, under the target."""
    texts = np.stack([np.append(prefix, token) for token in tokens]).astype(np.int32)
    sources = np.broadcast_to(source, (2, len(source)))
    gaps = score_texts(target, sources, np.ones(sources.shape, bool), texts).gap[:, -1]
    return float(abs(gaps[0] - gaps[1]))


def agreement(
    target: Model,
    sources: list[np.ndarray],
    plain: list[np.ndarray],
    speculative: list[np.ndarray],
    near_tie: float = NEAR_TIE,
) -> dict[str, Any]:
    """Whether greedy outputs equal the plain decoder's.

    Returns:
      greedy_match, the share of lines that agree; near_ties, the lines counted as agreeing though their
      ids differ, since the target scores the two tokens within `near_tie` nats of each other (a call over
      several positions rounds differently from a call over one); mismatches, the other differences.
    """
    different = differences(target, sources, plain, speculative)
    faults = [dataclasses.asdict(one) for one in different if one.gap > near_tie]
    ties = [dataclasses.asdict(one) for one in different if one.gap <= near_tie]
    return dict(greedy_match=1 - len(faults) / len(sources), near_ties=ties, mismatches=faults)
