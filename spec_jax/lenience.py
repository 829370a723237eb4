"""LOSSY: a rule that draft tokens pass more easily than the exact one.

Source: Leviathan, Kalman and Matias 2023, appendix A.5.

Axes: B rows, N nodes of a draft, V vocabulary. p is the target's distribution.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from spec_jax.sampling import SamplingConfig, logits_to_probs
from spec_jax.types import Draft, Verification
from spec_jax.verification import Rule, Scores, TokenRule, verify_chain


@dataclasses.dataclass(frozen=True)
class LenientRule:
    """LOSSY: accepts tokens up to 1 / lenience times as often as the exact rule (appendix A.5).

    Greedy, it accepts tokens that are at least lenience times as likely as the best.

    Raises:
      ValueError: for a lenience out of (0, 1).
    """

    lenience: float
    lossy = True

    def __post_init__(self):
        if not 0 < self.lenience < 1:
            raise ValueError(
                f'lenience: expected a number in (0, 1), got {self.lenience}; TokenRule is exact'
            )

    @property
    def name(self) -> str:
        return f'lenience {self.lenience:g}'

    def __call__(self, scores: Scores, draft: Draft, keys: Array) -> Verification:
        return verify_chain(scores.p, draft, keys, self.bound(scores))

    def bound(self, scores: Scores) -> Array:
        """[B, N + 1, V] float32, which takes p's place in the test: p / lenience; greedy, 1 or 0."""
        if not scores.greedy:
            return scores.p / self.lenience
        probs = logits_to_probs(scores.logits, SamplingConfig(vocab_limit=scores.sampling.vocab_limit))
        return (probs >= self.lenience * probs.max(-1, keepdims=True)).astype(jnp.float32)


def lenient(lenience: float) -> Rule:
    """The rule of a lenience in (0, 1]; at 1 the exact one."""
    return TokenRule() if lenience == 1 else LenientRule(lenience)
