"""Tests of whether two ways of decoding have one distribution, each with the deviation that it would detect.

A test of n samples over cells detects, 9 times in 10, any deviation that moves at least `detectable` of the
probability from some cells to others: moving d makes Pearson's statistic larger by n (2 d)^2 or more.

Axes: V vocabulary, N tokens of a text, K texts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.special

FAILS_BELOW = 1e-5  # p-value; a correct program falls below it once in 100,000 tests
POWER = 0.9
_LEAST_EXPECTED = 10  # texts in a cell of each sample
_PLACE_CELLS = 20


@dataclasses.dataclass(frozen=True)
class Significance:
    """The result of a test.

    Attributes:
      p_value: probability of a deviation as large as the one observed, if both distributions are equal.
      samples: how many were compared.
      cells: how many kinds of samples were distinguished.
      detectable: the share of the probability, 0 .. 1, whose move between cells would be detected; inf for none.
    """

    p_value: float
    samples: int
    cells: int
    detectable: float

    @property
    def passed(self) -> bool:
        return self.p_value >= FAILS_BELOW


def detectable(effective_samples: float, degrees: int) -> float:
    """Total variation distance that a chi-square test at `FAILS_BELOW` detects with probability `POWER`."""
    if degrees < 1 or effective_samples <= 0:
        return math.inf
    critical = scipy.special.chdtri(degrees, FAILS_BELOW)
    shift = scipy.special.chndtrinc(critical, degrees, 1 - POWER)  # noncentrality
    return float(np.sqrt(shift / effective_samples) / 2)


def uniform(below: np.ndarray, mass: np.ndarray, seed: int) -> Significance:
    """Whether tokens follow the distributions that they are reported to be drawn from.

    The randomised probability integral transform: tokens of different contexts become one uniform sample.

    Args:
      below, mass: [K], of `scoring.cumulative_place`.
      seed: of the place within each token's interval.
    """
    place = below + np.random.default_rng(seed).random(below.shape) * mass
    cells = int(np.clip(len(place) // (2 * _LEAST_EXPECTED), 2, _PLACE_CELLS))
    counts = np.bincount(np.clip(place * cells, 0, cells - 1).astype(int), minlength=cells)
    expected = max(len(place), 1) / cells
    statistic = ((counts - expected) ** 2 / expected).sum() if len(place) else 0.0
    p_value = float(scipy.special.chdtrc(cells - 1, statistic))
    return Significance(p_value, len(place), cells, detectable(len(place), cells - 1))


def two_sample(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Significance:
    """Whether two samples of texts have one distribution, over all prompts at once.

    The cells of a prompt are the texts that are frequent enough in both samples together; rarer ones are pooled by
    their longest common beginning that is frequent enough.

    Args:
      pairs: for each prompt the samples, [K, N] and [K', N] int.
    """
    statistic, degrees, effective, cells = 0.0, 0, 0.0, 0
    for first, second in pairs:
        counts = _cells(first, second)  # [2, cells]
        sizes = counts.sum(1, keepdims=True)
        expected = sizes * counts.sum(0) / sizes.sum()
        statistic += ((counts - expected) ** 2 / expected).sum()
        degrees += counts.shape[1] - 1
        effective += sizes.prod() / sizes.sum()
        cells += counts.shape[1]
    p_value = float(scipy.special.chdtrc(degrees, statistic)) if degrees else 1.0
    return Significance(p_value, sum(len(first) for first, _ in pairs), cells, detectable(effective, degrees))


def _cells(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Counts [2, cells]; the cells depend on both samples together only, as a permutation test requires."""
    texts = np.concatenate([first, second])
    sample = np.repeat([0, 1], [len(first), len(second)])
    enough = _LEAST_EXPECTED * len(texts) / min(len(first), len(second))
    columns = []
    for length in range(texts.shape[1], -1, -1):
        _, cell = np.unique(texts[:, :length], axis=0, return_inverse=True)
        cell = cell.ravel()
        counts = np.stack([np.bincount(cell[sample == i], minlength=cell.max(initial=0) + 1) for i in (0, 1)])
        kept = (counts.sum(0) >= enough) | (length == 0)
        columns.append(counts[:, kept])
        rest = ~kept[cell]
        texts, sample = texts[rest], sample[rest]
        if not len(texts):
            break
    counts = np.concatenate(columns, axis=1).astype(float)
    if (
        counts.shape[1] > 1 and counts[:, -1].sum() < enough
    ):  # a last cell of too few is merged with its neighbour
        counts = np.concatenate([counts[:, :-2], counts[:, -2:].sum(1, keepdims=True)], axis=1)
    return counts


def balance(accepted: int, expected: float, tested: int) -> Significance:
    """Whether the number of accepted tokens matches sum of min(p, q) over the tested positions (Theorem 3.5).

    Each test's outcome minus its probability has mean 0 given what came before, and a variance of at most 1/4.

    Args:
      accepted: draft tokens that passed.
      expected: the sum.
      tested: draft tokens tested.
    """
    deviation = math.sqrt(max(tested, 1)) / 2
    p_value = math.erfc(abs(accepted - expected) / deviation / math.sqrt(2))
    quantiles = scipy.special.ndtri(1 - FAILS_BELOW / 2) + scipy.special.ndtri(POWER)
    return Significance(p_value, tested, 2, float(quantiles * deviation / tested) if tested else math.inf)
