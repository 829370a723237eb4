"""The parts of a verification: its rows, the pair, and the prompts.

Axes: B rows of a batch, S source length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.base import Drafter
from spec_jax.exactness.statistics import Significance
from spec_jax.measure import agreement, setup
from spec_jax.models.base import Model
from spec_jax.text.batches import pad_rows
from spec_jax.types import Inputs

# Nats below the argmax that rounding can account for.
EPSILON = {'float32': agreement.NEAR_TIE, 'bfloat16': 0.1}

Progress = Callable[..., Iterable]  # wraps an iterable, as tqdm does; takes desc


def quiet(iterable, desc):
    """A `Progress` that shows nothing."""
    return iterable


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
      tier: 'rule', 'loop' or 'deployment'.
      tested: what was tested.
      samples: how many samples, of what.
      found: the result.
      finds: the size of deviation that would have been detected.
      passed: False for a deviation; None where there was nothing to test.
      p_value: of a statistical test; else None.
    """

    tier: str
    tested: str
    samples: str
    found: str
    finds: str
    passed: bool | None
    p_value: float | None = None

    @classmethod
    def of_test(cls, tested: str, samples: str, result: Significance, kind: str, seen: str = '') -> Check:
        """The row of a statistical test.

        Args:
          tested: what was tested.
          samples: how many samples, of what.
          result: of the test.
          kind: of deviation, in words, as in 'a shift of'.
          seen: further text on the result.
        """
        power = f'{kind} {100 * result.detectable:.2g} %'
        return cls(
            tier='loop',
            tested=tested,
            samples=samples,
            found=f'p = {result.p_value:.2g}' + (f'; {seen}' if seen else ''),
            finds=power if result.detectable < 1 else 'nothing: too few samples, or all alike',
            passed=result.passed,
            p_value=result.p_value,
        )


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a draft to verify.

    Attributes:
      target: the model.
      drafter: the draft.
      settings: gamma, lenience, limits, seed and sampling; at temperature 0 `sampled` takes 1.
      dtype: 'float32' or 'bfloat16', of the models' arithmetic.
    """

    target: Model
    drafter: Drafter
    settings: setup.Settings
    dtype: str


def choose(sources: list[np.ndarray], count: int) -> list[np.ndarray]:
    """`count` of the sources with more than an EOS, evenly spaced in the order of their lengths.

    Raises:
      ValueError: there is no such source.
    """
    if not (real := sorted((source for source in sources if len(source) > 1), key=len)):
        raise ValueError('data: expected a line with text in it; got empty lines alone')
    places = np.linspace(0, len(real) - 1, min(count, len(real))).round().astype(int)
    return [real[place] for place in places]


def with_sampling(pair: Pair, temperature: float) -> setup.Settings:
    """The pair's settings at another temperature."""
    return pair.settings.sampled(temperature=temperature)


def width(sources: list[np.ndarray]) -> int:
    """S of a batch of these sources: the longest of them."""
    return max(map(len, sources))


def to_inputs(rows: list[np.ndarray | None], width: int) -> Inputs:
    """Prompts of one width; None makes a filler row."""
    filler = next(row for row in rows if row is not None)[-1:]
    tokens, mask = pad_rows(
        [filler if row is None else row for row in rows], len(rows), width, pad_id=filler[0]
    )
    mask &= np.array([row is not None for row in rows])[:, None]
    return Inputs(jnp.asarray(tokens), jnp.asarray(mask))
