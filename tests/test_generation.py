"""The loop as a building block: under jit and vmap, streamed; and what each row has for itself.

Axes: B rows, V vocabulary.
"""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import GREEDY, DecodeConfig, Failure, SamplingConfig, generate, speculative_loop, stream
from spec_jax.decoding import finish, speculative_step, start, unfinished
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.sampling import row_keys
from spec_jax.testing import TableModel, prompts

V, EOS, ROWS, LIMIT = 12, 1, 6, 30
KEY, KEYS = jax.random.key(4), row_keys(jax.random.key(4), range(ROWS))
TARGET = TableModel.random(jax.random.key(0), V, order=2, num_tables=ROWS, eos_id=EOS)
DRAFT = ModelDrafter(
    TARGET.replace(
        table=TARGET.table + TableModel.random(jax.random.key(1), V, order=2, num_tables=ROWS).table
    )
)
ALL = prompts(range(ROWS))
SAMPLINGS = {'greedy': GREEDY, 'sampled': SamplingConfig()}
DRAFTERS = {
    'model': DRAFT,
    'thrifty': Thrifty(PromptLookup(), cost=lambda rows: 0.1 * (rows - 1)),
    'none': NoDrafter(),
}


def config_of(sampling, gamma=3, limit=LIMIT):
    return DecodeConfig(gamma, limit, SAMPLINGS[sampling])


def rows_of(output):
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


# --- traced within a program of one's own -----------------------------------------------------------------------


@pytest.mark.parametrize('drafter', DRAFTERS)
@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_within_jit_it_is_generates_output(sampling, drafter):
    config, drafter = config_of(sampling), DRAFTERS[drafter]
    expected = generate(TARGET, drafter, ALL, KEY, config)

    @jax.jit
    def program(inputs, key):
        output = speculative_loop(TARGET, drafter, inputs, row_keys(key, jnp.arange(ROWS)), config=config)
        return output.replace(tokens=output.tokens + 0)  # and whatever else a user's program does

    jax.tree.map(np.testing.assert_array_equal, program(ALL, KEY), expected)


@pytest.mark.parametrize('rows', [1, ROWS])
@pytest.mark.parametrize('drafter', DRAFTERS)
def test_under_vmap_over_keys_each_output_is_generates(drafter, rows):
    config, drafter, inputs = config_of('sampled', limit=9), DRAFTERS[drafter], prompts(range(rows))
    keys = jax.random.split(KEY, 3)

    @jax.jit
    @jax.vmap
    def program(key):
        return speculative_loop(TARGET, drafter, inputs, row_keys(key, jnp.arange(rows)), config=config)

    outputs = program(keys)
    for number, key in enumerate(keys):
        expected = generate(TARGET, drafter, inputs, key, config)
        np.testing.assert_array_equal(outputs.tokens[number], expected.tokens)
        np.testing.assert_array_equal(outputs.stats.rounds[number], expected.stats.rounds)
    assert len({row.tobytes() for row in np.asarray(outputs.tokens)}) == 3


def test_its_parts_called_one_by_one_are_the_loop():
    config = config_of('sampled')
    state = start(TARGET, DRAFT, ALL, KEYS, config=config)
    step, rounds = jax.jit(partial(speculative_step, TARGET, DRAFT, config=config)), 0
    while unfinished(state):
        state, rounds = step(state), rounds + 1
    assert rounds == int(state.stats.rounds.max())
    output = finish(TARGET, state, config=config)
    jax.tree.map(np.testing.assert_array_equal, output, generate(TARGET, DRAFT, ALL, KEY, config))


# --- streaming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('drafter', [*DRAFTERS, None])
@pytest.mark.parametrize('rounds', [1, 2, 100])
@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_what_is_streamed_is_generates_text(sampling, rounds, drafter):
    config, drafter = config_of(sampling), DRAFTERS.get(drafter)
    expected = generate(TARGET, drafter, ALL, KEY, config)
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # such as of a donated buffer that could not be used
        pieces = list(stream(TARGET, drafter, ALL, KEY, config, rounds=rounds))
    assert all(len(piece) == ROWS and piece[0].dtype == np.int32 for piece in pieces)
    assert [np.concatenate(parts).tolist() for parts in zip(*pieces, strict=True)] == rows_of(expected)
    assert len(pieces) == -(-int(expected.stats.rounds.max()) // rounds)
    assert all(any(len(row) for row in piece) for piece in pieces)


def test_a_batch_of_finished_rows_streams_nothing():
    assert list(stream(TARGET, DRAFT, prompts([-1, -1]), KEY, config_of('greedy'))) == []


def test_what_cannot_be_streamed_is_refused_before_the_first_token():
    with pytest.raises(ValueError, match='rounds: expected an integer >= 1, got 0'):
        stream(TARGET, DRAFT, ALL, KEY, config_of('greedy'), rounds=0)


# --- a limit, a failure and an admission of each row -------------------------------------------------------------


@pytest.mark.parametrize('drafter', DRAFTERS)
@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_each_row_has_a_limit_of_its_own_and_is_the_beginning_of_the_longer_text(sampling, drafter):
    endless, config = TARGET.replace(eos_id=-1), config_of(sampling)
    whole = generate(endless, DRAFTERS[drafter], ALL, KEY, config)
    limits = np.array([0, 1, 2, 5, LIMIT - 1, LIMIT])
    output = generate(endless, DRAFTERS[drafter], ALL, KEY, config, limits=limits)
    np.testing.assert_array_equal(output.length, limits)
    np.testing.assert_array_equal(output.stats.emitted, limits)
    for row, limit in enumerate(limits):
        expected = np.where(np.arange(LIMIT) < limit, whole.tokens[row], 0)
        np.testing.assert_array_equal(output.tokens[row], expected)


@pytest.mark.parametrize('limits', [[1] * 5, [1, 2, 3, 4, 5, -1], [1, 2, 3, 4, 5, LIMIT + 1]])
def test_limits_that_do_not_fit_are_refused(limits):
    with pytest.raises(ValueError, match=f'limits: expected 6 integers from 0 to max_new_tokens = {LIMIT}'):
        generate(TARGET, DRAFT, ALL, KEY, config_of('greedy'), limits=limits)


@pytest.mark.parametrize('which', ['target', 'draft'])
@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_a_row_that_fails_leaves_the_others_alone(sampling, which):
    """Row 2 gives NaN after the fourth token of its text, wherever that comes."""
    config, target, draft = config_of(sampling), TARGET.replace(eos_id=-1), DRAFT
    sound = generate(target, draft, ALL, KEY, config)
    fourth = int(sound.tokens[2, 3])
    if which == 'target':
        target = target.replace(table=target.table.at[2, :, fourth].set(jnp.nan))
    else:
        draft = ModelDrafter(draft.model.replace(table=draft.model.table.at[2, :, fourth].set(jnp.nan)))
    output = generate(target, draft, ALL, KEY, config, on_failure='return')
    failed = np.asarray(output.failed)
    assert failed[2] and not failed[[0, 1, 3, 4, 5]].any()
    if which == 'target':
        assert failed[2] == Failure.TARGET
    for row in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(output.tokens[row], sound.tokens[row])
    length = int(output.length[2])
    assert length < LIMIT
    np.testing.assert_array_equal(output.tokens[2, :length], sound.tokens[2, :length])
    with pytest.raises(FloatingPointError, match=r'rows \[2\]'):
        generate(target, draft, ALL, KEY, config)
    with pytest.raises(FloatingPointError, match=r'rows \[2\]'):
        list(stream(target, draft, ALL, KEY, config))
    pieces = stream(target, draft, ALL, KEY, config, on_failure='return')
    assert np.concatenate([piece[2] for piece in pieces]).tolist() == output.tokens[2, :length].tolist()


def test_another_way_to_fail_is_refused():
    with pytest.raises(ValueError, match="on_failure: expected 'raise' or 'return', got 'ignore'"):
        generate(TARGET, DRAFT, ALL, KEY, config_of('greedy'), on_failure='ignore')


@pytest.mark.parametrize('drafter', DRAFTERS)
def test_a_row_admitted_to_a_running_batch_is_the_row_from_the_start(drafter):
    """After three rounds row 1 is taken by another prompt with another key: its text is the one it has alone."""
    config, drafter = config_of('sampled'), DRAFTERS[drafter]
    state = start(TARGET, drafter, ALL, KEYS, config=config)
    step = jax.jit(partial(speculative_step, TARGET, drafter, config=config))
    for _ in range(3):
        state = step(state)
    inputs = prompts([0, 4, 2, 3, 4, 5])
    keys = KEYS.at[1].set(jax.random.key(77))
    fresh = start(TARGET, drafter, inputs, keys, config=config)
    state = jax.tree.map(lambda running, new: running.at[1].set(new[1]), state, fresh)
    while unfinished(state):
        state = step(state)
    admitted = finish(TARGET, state, config=config)
    others = generate(TARGET, drafter, ALL, KEYS, config)
    alone = generate(TARGET, drafter, prompts([4]), jax.random.key(77)[None], config)
    np.testing.assert_array_equal(admitted.tokens[1], alone.tokens[0])
    for row in (0, 2, 3, 4, 5):
        np.testing.assert_array_equal(admitted.tokens[row], others.tokens[row])


def test_plain_decoding_is_the_loop_without_a_draft():
    config = config_of('sampled')
    output = generate(TARGET, None, ALL, KEY, config)
    explicit = generate(TARGET, NoDrafter(), ALL, KEY, dataclasses.replace(config, gamma=0))
    jax.tree.map(np.testing.assert_array_equal, output, explicit)
    np.testing.assert_array_equal(output.stats.rounds, output.length)
    assert output.stats.tested_at.shape == (ROWS, 0) and output.stats.calls.shape == (ROWS, 1)
