"""The integral of the rule against NumPy, and the keys that it is taken with.

Axes: V vocabulary.
"""

import jax
import numpy as np
import pytest

from spec_jax.exactness import rule
from spec_jax.lenience import LenientRule
from spec_jax.sampling import GREEDY, SamplingConfig, split_rows
from spec_jax.testing import joint

pytestmark = pytest.mark.usefixtures('optimised')

SAMPLINGS = [SamplingConfig(), SamplingConfig(top_k=3), SamplingConfig(temperature=0.5, top_p=0.7), GREEDY]


def test_a_key_draws_the_first_of_the_coordinates_that_it_owns():
    keys = rule._point_keys(np.arange(1, 9)[None] * 2**19)
    accept, residual = split_rows(keys, 2)
    tests = split_rows(accept, 3)[:, 0]
    drawn = [float(jax.random.uniform(key)) for key in (keys[0], residual[0], *tests)]
    np.testing.assert_array_equal(drawn, np.array([1, 2, 1, 3, 5]) / 16)


@pytest.mark.parametrize('with_probs', [True, False])
def test_the_exact_rule_emits_the_targets_distribution(with_probs):
    chains = [rule.random_chain(seed, 2, sampling) for seed, sampling in enumerate(SAMPLINGS)]
    if not with_probs:
        chains = [rule.deterministic(chain) for chain in chains]
    errors = rule.integrate(chains, with_probs)
    assert errors.rules == 4 * 3 * 25
    assert max(errors.emitted, errors.enumerated, errors.accepted) < 5e-7
    assert errors.ends == errors.others == 0


def test_the_deviation_of_the_lenient_rule_is_that_of_its_definition():
    """One draft token: it passes with min(1, p / (l q)), and is replaced from norm(max(0, p - q))."""
    chains = [rule.random_chain(seed, 1, SamplingConfig()) for seed in range(4)]
    expected = []
    for chain in chains:
        (p, bonus), (q,) = [part.astype(float) for part in chain.p], [part.astype(float) for part in chain.q]
        passes = np.minimum(1, p / (0.5 * q))
        residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
        first = q * passes + (q * (1 - passes)).sum() * residual
        expected.append(np.abs(first[:, None] * bonus - joint(chain.p)).max())
    errors = rule.integrate(chains, True, LenientRule(0.5))
    assert errors.emitted == pytest.approx(max(expected), abs=1e-6) and errors.emitted > 0.01
    assert errors.ends == errors.others == 0 and errors.enumerated < 1e-6


def test_the_parts_of_a_sum_are_the_worst_of_each():
    one, other = rule.Integral(1, 0.1, 0.4, 0.5, 2, 3), rule.Integral(10, 0.2, 0.3, 0.6, 20, 30)
    assert one + other == rule.Integral(11, 0.2, 0.4, 0.6, 22, 33)
