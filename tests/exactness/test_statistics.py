"""The tests against literal tables, and their power against simulation."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spec_jax.exactness.statistics import (
    FAILS_BELOW,
    _cells,
    balance,
    detectable,
    two_sample,
    uniform,
)
from spec_jax.measure.scoring import cumulative_place


def test_places_run_from_the_likeliest_token_and_ties_by_id():
    probs = jnp.broadcast_to(jnp.array([0.125, 0.375, 0.375, 0.125, 0.0]), (5, 5))
    below, mass = cumulative_place(probs, jnp.arange(5))
    np.testing.assert_array_equal(below, [0.75, 0, 0.375, 0.875, 1])
    np.testing.assert_array_equal(mass, [0.125, 0.375, 0.375, 0.125, 0])


def test_what_one_degree_of_freedom_detects_is_known_from_the_normal_distribution():
    z = scipy.stats.norm.isf(FAILS_BELOW / 2) + scipy.stats.norm.isf(0.1)
    assert detectable(400, 1) == pytest.approx(z / 20 / 2, rel=1e-6)
    assert detectable(400, 0) == np.inf


def test_a_shift_of_the_stated_size_is_found_nine_times_in_ten_and_none_never():
    random = np.random.default_rng(0)
    samples, trials = 2000, 400
    shift = uniform(np.zeros(samples), np.ones(samples), 0).detectable
    likely = (
        random.random((trials, samples)) < 0.5 + shift
    )  # which moves `shift` from the upper half to the lower
    places = random.random((trials, samples)) / 2 + np.where(likely, 0, 0.5)
    detected = sum(not uniform(row, np.zeros(samples), 0).passed for row in places)
    assert 0.85 * trials < detected < 0.95 * trials
    fair = random.random((trials, samples))
    assert all(uniform(row, np.zeros(samples), 0).passed for row in fair)


def test_tokens_of_many_contexts_follow_their_distributions_or_those_of_another_temperature():
    random = np.random.default_rng(1)
    logits = 2 * random.normal(size=(8000, 6)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    tokens = (random.random((8000, 1)) > probs.cumsum(1)).sum(1)
    assert uniform(*map(np.asarray, cumulative_place(jnp.asarray(probs), tokens)), 0).passed
    flat = np.sqrt(probs) / np.sqrt(probs).sum(1, keepdims=True)
    assert not uniform(*map(np.asarray, cumulative_place(jnp.asarray(flat), tokens)), 0).passed


def test_two_samples_by_hand():
    first, second = (
        np.repeat([[1, 2], [3, 4]], [60, 40], axis=0),
        np.repeat([[1, 2], [3, 4]], [110, 90], axis=0),
    )
    result = two_sample([(first, second)])
    expected = scipy.stats.chi2_contingency([[60, 40], [110, 90]], correction=False)
    assert (result.samples, result.cells) == (100, 2)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    both = two_sample([(first, second)] * 2)
    assert both.p_value == pytest.approx(scipy.stats.chi2.sf(2 * expected.statistic, 2), rel=1e-9)
    assert both.detectable == pytest.approx(detectable(2 * 100 * 200 / 300, 2))
    assert two_sample([(first, first[:1].repeat(100, 0))]).p_value < 1e-9
    alike = two_sample([(first[:60], first[:60])])
    assert alike.p_value == 1 and alike.detectable == np.inf


def test_rare_texts_are_taken_together_by_their_beginnings():
    texts = np.array([[0, 0]] * 20 + [[1, i] for i in range(20)] + [[i, 9] for i in range(2, 22)])
    counts = _cells(texts[::2], texts[1::2])  # 20 are needed in both together
    np.testing.assert_array_equal(counts.sum(0), [20, 20, 20])


def test_acceptances_against_their_sum_by_hand():
    assert balance(600, 500.0, 1000).p_value == pytest.approx(
        2 * scipy.stats.norm.sf(100 / 250**0.5), rel=1e-6
    )
    assert balance(510, 500.0, 1000).passed and not balance(600, 500.0, 1000).passed
