"""Axes: B rows, V vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling import GREEDY, SamplingConfig, logits_to_probs, row_keys, sample, split_rows
from spec_jax.testing import chi_square, histogram

HALVES = np.log([0.5, 0.25, 0.125, 0.125])  # sums of these are exact in float32
CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.5),
    SamplingConfig(top_k=3),
    SamplingConfig(top_p=0.7),
    SamplingConfig(temperature=1.7, top_k=9, top_p=0.8, vocab_limit=25),
    SamplingConfig(temperature=0.3, top_p=0.99, vocab_limit=30),
    GREEDY,
]


def by_sorting(logits, config):
    """One row, the plain way: temperature, then top-k, then top-p, in float64."""
    logits = np.array(logits, np.float64)
    logits[config.vocab_limit or len(logits) :] = -np.inf
    if config.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    probs = np.exp((logits - logits.max()) / config.temperature)
    if config.top_k:
        threshold = np.sort(probs)[::-1][min(config.top_k, len(probs)) - 1]
        probs = np.where(probs >= threshold, probs, 0)
    probs = probs / probs.sum()
    if config.top_p < 1:
        descending = np.sort(probs)[::-1]
        threshold = descending[np.argmax(np.cumsum(descending) >= config.top_p)]
        probs = np.where(probs >= threshold, probs, 0)
    return probs / probs.sum()


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_probabilities_equal_a_sort_based_reference(config):
    random = np.random.default_rng(0)
    smooth = random.normal(scale=2, size=(200, 32))
    tied = random.integers(-3, 3, size=(200, 32))
    holes = np.where(random.random((200, 32)) < 0.3, -np.inf, smooth)
    holes[:, 7] = 0
    logits = np.stack([smooth, tied, holes]).astype(np.float32)  # [3, 200, V]
    probs = np.asarray(logits_to_probs(jnp.asarray(logits), config))
    expected = np.apply_along_axis(by_sorting, -1, logits, config)
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, atol=1e-6)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        (dict(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (dict(top_k=3), [0.5, 0.25, 0.125, 0.125]),  # the fourth ties with the third
        (dict(top_k=4), [0.5, 0.25, 0.125, 0.125]),
        (dict(top_k=100), [0.5, 0.25, 0.125, 0.125]),
        (dict(top_p=0.5), [1, 0, 0, 0]),
        (dict(top_p=0.51), [2 / 3, 1 / 3, 0, 0]),
        (dict(top_p=0.75), [2 / 3, 1 / 3, 0, 0]),
        (dict(top_p=0.76), [0.5, 0.25, 0.125, 0.125]),  # a tie is kept whole
        (dict(top_p=1e-6), [1, 0, 0, 0]),
        (dict(top_k=2, top_p=0.6), [1, 0, 0, 0]),  # top-p first would keep two
        (dict(temperature=0.5, top_p=0.7), [1, 0, 0, 0]),  # top-p before the temperature would keep two
        (dict(temperature=0.5), [8 / 11, 2 / 11, 1 / 22, 1 / 22]),
        (dict(vocab_limit=2), [2 / 3, 1 / 3, 0, 0]),
        (dict(vocab_limit=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),  # 6/7 of what is allowed
        (dict(vocab_limit=9), [0.5, 0.25, 0.125, 0.125]),
        (dict(temperature=0), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_probabilities_by_hand(config, expected):
    probs = logits_to_probs(jnp.asarray(HALVES), SamplingConfig(**config))
    np.testing.assert_allclose(probs, expected, atol=1e-7)


def test_greedy_is_one_hot_at_the_first_of_equals():
    logits = jnp.array([[1.0, 3.0, 3.0], [-5.0, -jnp.inf, -7.0]])
    np.testing.assert_array_equal(logits_to_probs(logits, GREEDY), [[0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_head_rows_without_a_token_get_no_mass_and_their_nan_changes_nothing(temperature):
    logits = jnp.array([[1.0, 2.0, 0.0, 50.0, jnp.nan], [1.0, 2.0, 0.0, jnp.inf, 9.0]])
    probs = logits_to_probs(logits, SamplingConfig(temperature, vocab_limit=3))
    np.testing.assert_array_equal(probs[:, 3:], 0)
    np.testing.assert_array_equal(probs[:, :3], logits_to_probs(logits[:, :3], SamplingConfig(temperature)))


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_one_nan_makes_its_whole_row_nan_and_no_other(config):
    logits = jnp.zeros((3, 32)).at[1, 4].set(jnp.nan).at[:, 2].set(1.0)
    broken = np.isnan(logits_to_probs(logits, config))
    np.testing.assert_array_equal(broken.all(-1), [False, True, False])
    np.testing.assert_array_equal(broken.any(-1), [False, True, False])


@pytest.mark.parametrize('temperature', [0.0, 1e-30, 0.01, 1.0, 1e30])
def test_extreme_logits_still_sum_to_1(temperature):
    top = np.float32(3e38)
    logits = jnp.array([[top, 0.0, -top, -jnp.inf], [1e-38, 0.0, -1e-38, -1.0], [-top, -jnp.inf, -top, -top]])
    for config in SamplingConfig(temperature), SamplingConfig(temperature, top_k=2, top_p=0.9):
        probs = np.asarray(logits_to_probs(logits, config))
        assert np.isfinite(probs).all()
        np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(logits_to_probs(logits, SamplingConfig(temperature))[2, 1], 0)


def test_bfloat16_logits_give_float32_probabilities():
    logits = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
    probs = logits_to_probs(logits, SamplingConfig())
    assert probs.dtype == jnp.float32
    np.testing.assert_array_equal(probs, logits_to_probs(logits.astype(jnp.float32), SamplingConfig()))


@pytest.mark.parametrize(
    'bad',
    [
        dict(temperature=-0.1),
        dict(temperature=float('nan')),
        dict(temperature=float('inf')),
        dict(top_k=-1),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(top_p=float('nan')),
        dict(vocab_limit=0),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f'{name}: expected .* got '):
        SamplingConfig(**bad)


@jax.jit
def _draws(keys, weights):
    return jax.lax.map(lambda key: sample(key[None], weights[None])[0], keys, batch_size=500)


def draws(weights, num, seed=0):
    """`num` draws from weights [V]."""
    return np.asarray(
        _draws(row_keys(jax.random.key(seed), np.arange(num)), jnp.asarray(weights, jnp.float32))
    )


@pytest.mark.parametrize('token', [0, 16_000, 32_127])
def test_a_one_hot_residual_never_leaks_onto_another_token(token):
    np.testing.assert_array_equal(draws(jax.nn.one_hot(token, 32_128), 20_000, seed=token), token)


def test_tokens_of_weight_0_never_come_out_however_the_sums_round():
    random = np.random.default_rng(1)
    weights = random.exponential(size=32_128) * (random.random(32_128) < 0.1)
    weights[:50] = weights[-50:] = 0
    assert (weights[draws(weights, 20_000)] > 0).all()


@pytest.mark.parametrize('uniform', [0.0, 1 - 2.0**-23, 1.0])
def test_the_ends_of_the_unit_interval_give_tokens_of_positive_weight(uniform, monkeypatch):
    monkeypatch.setattr(jax.random, 'uniform', lambda key: jnp.float32(uniform))
    weights = jnp.array([[0, 0, 0.3, 0, 0.6, 0.1, 0]])
    token = int(sample(row_keys(jax.random.key(0), [0]), weights)[0])
    assert token == 2 if uniform == 0 else token in (4, 5)


@pytest.mark.parametrize('scale', [1.0, 1e-3, 7e5])
def test_frequencies_equal_the_weights_whatever_their_sum(scale):
    probs = np.array([0, 0.01, 0.2, 0, 0.5, 0.05, 0.24, 0])
    tokens = draws(scale * probs, 100_000)
    assert chi_square(histogram(tokens[:, None], 8), probs) > 0.001


def test_frequencies_equal_the_weights_across_blocks_of_tokens():
    """Most of the vocabulary has no mass, nor has a whole stretch in its middle."""
    tokens = [0, 1, 126, 127, 128, 129, 255, 640, 767, 768, 998, 999]
    weights = np.zeros(1000)
    weights[tokens] = np.arange(1, 13)
    assert chi_square(histogram(draws(weights, 100_000)[:, None], 1000), weights / 78) > 0.001


def test_successive_draws_of_one_row_are_independent():
    probs = np.array([0.1, 0.2, 0.7])
    first, second = split_rows(row_keys(jax.random.key(3), np.arange(50_000)), 2)
    rows = jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (50_000, 3))
    pairs = np.stack([sample(first, rows), sample(second, rows)], axis=1)
    assert chi_square(histogram(pairs, 3), np.outer(probs, probs)) > 0.001


def test_a_rows_key_depends_on_its_own_number_only():
    data = lambda keys: np.asarray(jax.random.key_data(keys))  # noqa: E731
    key = jax.random.key(5)
    keys = data(row_keys(key, [4, 9, 2]))
    np.testing.assert_array_equal(data(row_keys(key, [9])), keys[1:2])
    np.testing.assert_array_equal(data(row_keys(key, [2, 4, 9])), keys[[2, 0, 1]])
    assert len(np.unique(data(row_keys(key, np.arange(1000))), axis=0)) == 1000
    split = data(split_rows(row_keys(key, [4, 9, 2]), 4))  # [num, B, ...]
    np.testing.assert_array_equal(data(split_rows(row_keys(key, [9]), 4)), split[:, 1:2])
    assert len(np.unique(split.reshape(12, -1), axis=0)) == 12
