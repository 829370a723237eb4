"""The loop with table models, greedy for the most part: what comes out is known token by token.

Nearly all of it has one shape (8 rows, order 2, 16 tokens), so that few programs are compiled.

Axes: B rows, G draft length, R tables, V vocabulary.
"""

import dataclasses
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spec_jax import decoding
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import DraftShape
from spec_jax.drafters.model import ModelDrafter
from spec_jax.generation import generate, plain_generate
from spec_jax.lenience import lenient
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.testing import NanAt, ScriptedDrafter, TableModel, TraceCounter, Traced, prompts
from spec_jax.types import Draft

V, EOS, ROWS = 16, 1, 8
KEY = jax.random.key(0)
SAMPLED = SamplingConfig()
ALL = prompts(range(ROWS))  # row r reads table r
LIMIT = 200  # tokens: 50 rounds with gamma = 3


def random_model(seed, ends=True, scale=1.5):
    """Eight tables of order 2."""
    model = TableModel.random(jax.random.key(seed), V, order=2, num_tables=ROWS, scale=scale, eos_id=EOS)
    return model if ends else model.replace(table=model.table.at[..., EOS].set(-jnp.inf))


def blurred(model, seed=1, noise=1.0):
    """A draft that is often right."""
    return ModelDrafter(model.replace(table=model.table + random_model(seed, scale=noise).table))


def writer(texts):
    """Order 2 in shape only, so that it shares its program with the others; short lists are repeated."""
    model = TableModel.from_texts([texts[row % len(texts)] for row in range(ROWS)], V, eos_id=EOS)
    return model.replace(table=jnp.broadcast_to(model.table[:, None], (ROWS, V, V, V)))


def speculate(target, drafter, inputs=ALL, key=KEY, gamma=3, max_new_tokens=LIMIT, sampling=GREEDY):
    return generate(target, drafter, inputs, key, DecodeConfig(gamma, max_new_tokens, sampling))


def plain(target, inputs=ALL, key=KEY, max_new_tokens=300, sampling=GREEDY):
    return plain_generate(target, inputs, key, DecodeConfig(0, max_new_tokens, sampling))


def assert_same_text(output, expected):
    """Equal ids up to the shorter of two limits."""
    limit = min(output.tokens.shape[1], expected.tokens.shape[1])
    np.testing.assert_array_equal(output.tokens[:, :limit], expected.tokens[:, :limit])
    np.testing.assert_array_equal(np.minimum(output.length, limit), np.minimum(expected.length, limit))


def assert_counts(stats, **expected):
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(stats, name), value, atol=1e-5, err_msg=name)


# --- greedy output is the target's ----------------------------------------------------------------------------


@pytest.mark.parametrize('gamma', [1, 2, 3, 4, 5, 16])
def test_greedy_ids_equal_plain_decodings(gamma):
    limit = 50 * (gamma + 1) if gamma <= 5 else 10  # 16 is longer than the text
    for seed, ends in (0, True), (1, True), (2, False):
        target = random_model(seed, ends)
        expected = plain(target)
        for drafter in (
            blurred(target, seed + 10),
            ModelDrafter(random_model(seed + 20)),
            ModelDrafter(target),
        ):
            output = speculate(target, drafter, gamma=gamma, max_new_tokens=limit)
            assert_same_text(output, expected)
            assert_counts(output.stats, emitted=output.length)


@pytest.mark.parametrize('gamma', [1, 2, 3, 4, 5])
def test_acceptance_does_not_decay_when_the_draft_is_the_target(gamma):
    """A draft's cache that is off by one after full acceptance would show: the tables have order 2."""
    target = random_model(3, ends=False)
    output = speculate(target, ModelDrafter(target), gamma=gamma, max_new_tokens=50 * (gamma + 1))
    histogram = np.zeros((ROWS, gamma + 1))
    histogram[:, gamma] = 50
    assert_counts(output.stats, rounds=50, tested=50 * gamma, accepted=50 * gamma, histogram=histogram)
    assert_counts(output.stats, overlap=50 * gamma, emitted=50 * (gamma + 1))


def test_acceptance_does_not_decay_when_sampling_either():
    target = random_model(3, ends=False)
    output = speculate(target, ModelDrafter(target), sampling=SAMPLED)
    assert_counts(output.stats, rounds=50, tested=150, accepted=150, emitted=200)


def test_greedy_ids_of_a_single_row_equal_those_of_the_batch():
    target = random_model(4)
    expected = plain(target)
    for row in range(ROWS):
        assert_same_text(speculate(target, blurred(target), prompts([row])), take(expected, [row]))
        assert_same_text(plain(target, prompts([row])), take(expected, [row]))


@pytest.mark.parametrize('max_new_tokens', [1, 2, 3, 4])
def test_the_limit_is_met_exactly_and_never_overrun(max_new_tokens):
    """1 .. 2 gamma + 2; row 0 accepts all, row 1 nothing, row 2 by turns, so finished rows wait for others."""
    text = list(range(2, 12))
    target, drafter = writer([text]), ModelDrafter(writer([text, text[::-1], [2, 15, 3, 4]]))
    output = speculate(target, drafter, prompts([0, 1, 2]), gamma=1, max_new_tokens=max_new_tokens)
    np.testing.assert_array_equal(output.tokens, [text[:max_new_tokens]] * 3)
    assert_counts(output, length=[max_new_tokens] * 3)
    assert_counts(output.stats, emitted=[max_new_tokens] * 3)
    assert output.stats.rounds[0] == -(-max_new_tokens // 2)
    assert output.stats.rounds[1] == max_new_tokens


# --- EOS and counts -------------------------------------------------------------------------------------------


def test_the_text_ends_at_an_eos_in_every_place_of_a_block():
    """Row r's EOS is token r: first, middle, last and bonus place of the first two blocks; more would follow."""
    texts = [[*range(2, 2 + place), EOS, *range(2 + place, 15)] for place in range(ROWS)]
    target = writer(texts)
    expected = np.zeros((ROWS, LIMIT), int)
    for row, text in enumerate(texts):
        expected[row, : row + 1] = text[: row + 1]
    output = speculate(target, ModelDrafter(target))
    np.testing.assert_array_equal(output.tokens, expected)
    np.testing.assert_array_equal(output.length, np.arange(1, 9))
    assert_same_text(plain(target), output)
    assert_counts(
        output.stats,
        rounds=[1, 1, 1, 1, 2, 2, 2, 2],
        tested=[1, 2, 3, 3, 4, 5, 6, 6],
        accepted=[1, 2, 3, 3, 4, 5, 6, 6],
        emitted=np.arange(1, 9),
        histogram=[[0, *row] for row in np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]] * 2)]
        + np.array([[0, 0, 0, 0]] * 4 + [[0, 0, 0, 1]] * 4),
    )


LONG = list(range(2, 12))
# target's text, the draft's guesses for its places (9 and 15 are wrong where they stand), lengths of the proposals
TRACE = [
    ([2, 3, EOS, 4, 5], [2, 3, EOS, 4, 5], 4),  # [a, b, EOS, d, e] fully matched: 3 emitted
    (LONG, [2, 3, 15, *LONG[3:]], 4),  # 2 accepted; 4 accepted; 2 of the limit's last 2
    (
        LONG,
        LONG,
        [0, 2, 0, 0, 4, 0, 0, 0, 0, 4],
    ),  # proposals of 0, 2, 4 and 4 tokens, the last cut by the limit
    ([2, 3, EOS], [EOS, 3, 9], 4),  # an EOS that is rejected, and one that replaces a rejected token
    ([2, 3, 4, 5, EOS], [2, 3, 4, 5, EOS], 4),  # EOS in the bonus place
    ([2, 3, 4, EOS, 5], [2, 3, 4, EOS, 5], 4),  # EOS in the last place of the draft
    (LONG, [15], 4),  # never right
    (LONG, LONG, 0),  # never proposes anything
]
COUNTS = dict(
    emitted=[3, 10, 10, 3, 5, 4, 10, 10],
    rounds=[1, 3, 4, 2, 1, 1, 10, 10],
    tested=[3, 9, 7, 3, 4, 4, 10, 0],
    accepted=[3, 8, 7, 1, 4, 4, 0, 0],
    histogram=[
        [0, 0, 0, 1, 0],
        [0, 0, 2, 0, 1],
        [1, 1, 1, 0, 1],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1],
        [10, 0, 0, 0, 0],
        [10, 0, 0, 0, 0],
    ],
)


@pytest.mark.parametrize('spread', [False, True], ids=['q one-hot', 'q uniform'])
def test_counts_equal_those_of_a_trace_by_hand(spread):
    guesses = np.array([np.pad(guess, (0, 10 - len(guess)), mode='edge') for _, guess, _ in TRACE])
    lengths = np.array([np.broadcast_to(length, 10) for *_, length in TRACE])
    probs = jnp.full((ROWS, 10, V), 1 / V) if spread else None  # p is one-hot: q(x) < 1 changes no verdict
    drafter = ScriptedDrafter(jnp.asarray(guesses), probs, jnp.asarray(lengths))
    output = speculate(writer([text for text, *_ in TRACE]), drafter, gamma=4, max_new_tokens=10)
    for row, (text, *_) in enumerate(TRACE):
        emitted = COUNTS['emitted'][row]
        np.testing.assert_array_equal(output.tokens[row, :emitted], text[:emitted])
    assert_counts(output.stats, **COUNTS)
    # sum of min(p, q): 1/V at each tested place, or with q one-hot 1 where the guess is right
    overlap = np.array(COUNTS['tested']) / V if spread else COUNTS['accepted']
    assert_counts(output.stats, overlap=overlap)


@pytest.mark.parametrize('spread', [False, True], ids=['q one-hot', 'q uniform'])
@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
def test_a_row_alone_has_calls_that_are_no_wider_than_its_drafts_and_the_same_text(sampling, spread):
    """Drafts of 0 to 4 tokens, of which half are right; tokens after a draft's length are right, too."""
    chance, target = np.random.default_rng(0), random_model(5)
    texts = np.asarray(plain(target, max_new_tokens=LIMIT, sampling=sampling).tokens)
    guesses = np.where(chance.random(texts.shape) < 0.5, texts, (texts + 1) % V)
    probs = jnp.full((*texts.shape, V), 1 / V) if spread else None
    lengths = chance.integers(0, 5, texts.shape)
    drafter = ScriptedDrafter(jnp.asarray(guesses), probs, jnp.asarray(lengths))
    keys = row_keys(KEY, np.arange(ROWS))
    together = speculate(target, drafter, key=keys, gamma=4, sampling=sampling)
    choices = np.array(decoding.call_lengths(drafter, 1, 4))
    for row in range(ROWS):
        alone = speculate(target, drafter, prompts([row]), keys[row : row + 1], gamma=4, sampling=sampling)
        calls, theirs = alone.stats.calls[0], together.stats.calls[row]
        unlike = alone.replace(stats=alone.stats.replace(calls=together.stats.calls[row : row + 1]))
        jax.tree.map(np.testing.assert_array_equal, unlike, take(together, [row]))
        assert theirs.tolist() == [0, 0, 0, 0, int(alone.stats.rounds[0])] and calls.sum() == theirs.sum()
        assert set(np.flatnonzero(calls)) <= set(choices)
        if alone.stats.rounds[0] > 20:
            assert set(np.flatnonzero(calls)) == set(choices)


def test_calls_of_a_trace_by_hand():
    """Row 2 of the trace proposes 0, 2, 4 and 4 tokens, the last row none in ten rounds."""
    (text, guess, lengths), (_, _, none) = TRACE[2], TRACE[-1]
    script = jnp.broadcast_to(jnp.asarray(guess), (ROWS, 10))
    for row, length, due in ((2, lengths, [0, 2, 4, 4]), (7, [none] * 10, [0] * 10)):
        drafter = ScriptedDrafter(script, lengths=jnp.broadcast_to(jnp.asarray(length), (ROWS, 10)))
        output = speculate(writer([text]), drafter, prompts([row]), gamma=4, max_new_tokens=10)
        choices = np.array(decoding.call_lengths(drafter, 1, 4))
        expected = np.bincount([choices[choices >= one][0] for one in due], minlength=5)
        np.testing.assert_array_equal(output.stats.calls[0], expected)


# --- rows do not disturb each other -----------------------------------------------------------------------------


def uneven():
    """Acceptance of 0, 2 and gamma = 3 in one batch, a draft that always guesses EOS, and chance."""
    text = list(range(2, 13))
    drafts = writer([text[::-1], text, text]).table
    drafts = drafts.at[1, :, np.array([3, 6, 9, 12]), 15].set(50.0)  # wrong at each third token
    drafts = drafts.at[3, ..., EOS].set(50.0)
    chance = random_model(5)
    target = chance.replace(table=chance.table.at[:4].set(writer([text]).table[:4]))
    return target, ModelDrafter(target.replace(table=blurred(target).model.table.at[:4].set(drafts[:4])))


def take(output, rows):
    return jax.tree.map(lambda x: x[np.asarray(rows)], output)


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
def test_a_row_is_the_same_alone_in_a_batch_and_in_another_order(sampling):
    target, drafter = uneven()
    keys = row_keys(KEY, np.arange(ROWS))
    together = speculate(target, drafter, key=keys, sampling=sampling)
    if sampling == GREEDY:
        assert_counts(take(together.stats, range(3)), accepted=[0, 134, 150], rounds=[200, 67, 50])
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    shuffled = speculate(target, drafter, prompts(order), keys[order], sampling=sampling)
    jax.tree.map(np.testing.assert_array_equal, shuffled, take(together, order))
    for row in range(ROWS):
        alone = speculate(target, drafter, prompts([row]), keys[row : row + 1], sampling=sampling)
        jax.tree.map(np.testing.assert_array_equal, alone, take(together, [row]))
    first = speculate(target, drafter, prompts([0]), KEY, sampling=sampling)  # rows are numbered from 0
    jax.tree.map(np.testing.assert_array_equal, first, take(together, [0]))


def test_plain_decoding_of_a_row_is_the_same_alone_and_in_a_batch():
    target = random_model(6)
    together = plain(target, sampling=SAMPLED)
    for row in range(ROWS):
        alone = plain(target, prompts([row]), row_keys(KEY, [row]), sampling=SAMPLED)
        jax.tree.map(np.testing.assert_array_equal, alone, take(together, [row]))


@partial(jax.jit, static_argnames='gamma')
def final_state(target, drafter, inputs, keys, *, gamma):
    config = DecodeConfig(gamma, LIMIT, GREEDY)
    state = decoding.start(target, drafter, inputs, keys, config=config)
    step = partial(decoding.speculative_step, target, drafter, config=config)
    return lax.while_loop(decoding.unfinished, step, state)


def test_filler_rows_stay_empty_and_do_not_prolong_the_loop():
    """Their tables never end; the two real rows end in the second round, or with gamma = 1 in the third."""
    short = [2, 3, 4, 5, EOS]
    target = writer([list(range(2, 15)), short])
    drafter = ModelDrafter(target)
    inputs = prompts([-1, 1, -1, -1, 1, -1, -1, -1])
    output = speculate(target, drafter, inputs)
    np.testing.assert_array_equal(output.length, [0, 5, 0, 0, 5, 0, 0, 0])
    np.testing.assert_array_equal(output.tokens[jnp.array([0, 2, 7])], 0)
    np.testing.assert_array_equal(output.tokens[4, :5], short)
    assert_counts(take(output.stats, [0, 2, 3, 5, 6, 7]), rounds=0, tested=0, histogram=0, emitted=0)
    keys = row_keys(KEY, range(ROWS))
    assert final_state(target, drafter, inputs, keys, gamma=1).stats.rounds.max() == 3
    assert final_state(target, drafter, prompts([-1] * 8), keys, gamma=1).stats.rounds.max() == 0


@flax.struct.dataclass
class CountsRounds:
    """Counts the rounds of the loop, whether a row is finished or not."""

    drafter: ModelDrafter

    def shape(self, gamma):
        return self.drafter.shape(gamma)

    def init(self, *args):
        return self.drafter.init(*args), jnp.zeros((), jnp.int32)

    def propose(self, state, round):
        draft, inner = self.drafter.propose(state[0], round)
        return draft, (inner, state[1])

    def update(self, state, outcome):
        return self.drafter.update(state[0], outcome), state[1] + 1


def test_finished_rows_do_not_prolong_the_loop():
    target, drafter = uneven()
    state = final_state(target, CountsRounds(drafter), ALL, row_keys(KEY, range(ROWS)), gamma=1)
    assert state.draft_state[1] == state.stats.rounds.max()
    assert bool(state.done.all())


# --- errors, NaN and compilation --------------------------------------------------------------------------------


@pytest.mark.parametrize('gamma', [-1, 17])
def test_gamma_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match=f'gamma: expected an integer from 0 to 16, got {gamma}'):
        speculate(random_model(0), blurred(random_model(0)), gamma=gamma)


@pytest.mark.parametrize('gamma', [0, 3])
def test_a_limit_below_1_is_refused(gamma):
    with pytest.raises(ValueError, match='max_new_tokens: expected an integer >= 1, got 0'):
        speculate(random_model(0), blurred(random_model(0)), gamma=gamma, max_new_tokens=0)


def test_keys_for_another_number_of_rows_are_refused():
    with pytest.raises(ValueError, match='one for each of 8 rows'):
        speculate(random_model(0), blurred(random_model(0)), key=row_keys(KEY, range(7)))


def test_an_old_style_key_is_refused_even_where_its_shape_would_pass():
    with pytest.raises(ValueError, match='expected a key of jax.random.key, got an array of uint32'):
        plain(random_model(0), prompts([0, 1]), jax.random.PRNGKey(0))


def test_gamma_0_runs_the_plain_program_and_no_draft():
    target = random_model(7)
    output = speculate(target, None, gamma=0, max_new_tokens=300)
    jax.tree.map(np.testing.assert_array_equal, output, plain(target))
    assert_counts(output.stats, rounds=output.length, tested=0, accepted=0, emitted=output.length)
    assert_counts(output.stats, histogram=output.length[:, None])  # every round accepts nothing


def broken(model, row):
    return model.replace(table=model.table.at[row, :, 5].set(jnp.nan))


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
def test_nan_from_the_target_or_the_draft_is_an_error_that_names_the_row(sampling):
    """NaN after token 5, the fourth of the text; rows without a prompt are ignored."""
    text = list(range(2, 15))
    target = writer([text])
    for models in (broken(target, 2), target), (target, broken(target, 2)):
        with pytest.raises(FloatingPointError, match=r'rows \[2\]: .*NaN'):
            speculate(models[0], ModelDrafter(models[1]), sampling=sampling)
        only_others = prompts([0, 1, -1, 3, 4, 5, 6, 7])
        assert speculate(models[0], ModelDrafter(models[1]), only_others, sampling=sampling).length[2] == 0


def test_nan_in_plain_decoding_is_an_error_from_its_own_position_on():
    target = NanAt(random_model(2, ends=False), position=jnp.array([99] * 7 + [4]))
    plain(target, max_new_tokens=4)
    with pytest.raises(FloatingPointError, match=r'rows \[7\]: .*NaN'):
        plain(target, max_new_tokens=5)


@flax.struct.dataclass
class Fixed:
    """Proposes one draft, right or wrong, whatever the text."""

    draft: Draft

    def shape(self, gamma):
        return DraftShape(gamma, gamma, deterministic=self.draft.probs is None)

    def init(self, target, prefill, inputs, num_slots):
        return ()

    def propose(self, state, round):
        return self.draft, state

    def update(self, state, outcome):
        return state


TOKENS, LENGTH = np.full((ROWS, 3), 4), np.full(ROWS, 3)
UNIFORM = np.full((ROWS, 3, V), 1 / V, np.float32)


@pytest.mark.parametrize(
    ('draft', 'message'),
    [
        (
            Draft(TOKENS[:, :2], None, LENGTH),
            r'Draft.tokens: expected integer numbers of shape \[8, 3\], got .*8, 2',
        ),
        (Draft(TOKENS * 1.0, None, LENGTH), 'Draft.tokens: expected integer numbers .* got float'),
        (Draft(TOKENS, None, LENGTH[:, None]), r'Draft.length: expected integer numbers of shape \[8\]'),
        (
            Draft(TOKENS, UNIFORM[:, :, 1:], LENGTH),
            r'Draft.probs: expected floating .* \[8, 3, 16\], got .*8, 3, 15',
        ),
    ],
    ids=['tokens', 'floats', 'length', 'probs'],
)
def test_a_draft_of_wrong_shapes_is_refused(draft, message):
    with pytest.raises(ValueError, match=message):
        speculate(random_model(0), Fixed(draft))


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
def test_a_draft_that_is_none_is_an_error_that_names_the_row(sampling):
    outside, twice = TOKENS.copy(), UNIFORM.copy()
    outside[5, 1], outside[6, 1], twice[2, 2] = V, -1, 2 / V
    target = random_model(0)
    with pytest.raises(FloatingPointError, match=r'rows \[5, 6\]: expected tokens of the vocabulary'):
        speculate(target, Fixed(Draft(outside, None, LENGTH)), sampling=sampling)
    with pytest.raises(FloatingPointError, match=r'rows \[2\]: expected probabilities that sum to 1'):
        speculate(target, Fixed(Draft(TOKENS, twice, LENGTH)), sampling=sampling)
    speculate(target, Fixed(Draft(outside, None, np.full(ROWS, 1))), sampling=sampling)  # not valid


def test_full_lenience_keeps_every_draft_and_strict_lenience_is_exact():
    target = random_model(2, ends=False)
    drafter = blurred(target)
    exact = speculate(target, drafter)
    config = DecodeConfig(3, LIMIT, GREEDY)
    for lenience, output in (0.5, None), (1e-9, None), (1.0, exact):
        rule = dataclasses.replace(config, rule=lenient(lenience))
        decoded = generate(target, drafter, ALL, KEY, rule)
        if output is not None:
            jax.tree.map(np.testing.assert_array_equal, decoded, output)
        if lenience == 1e-9:
            assert_counts(decoded.stats, rounds=LIMIT // 4, tested=3 * LIMIT // 4, accepted=3 * LIMIT // 4)
        if lenience == 0.5:
            assert decoded.stats.rounds.sum() < exact.stats.rounds.sum()
    for lenience in 0.0, 1.1, -1.0:
        with pytest.raises(ValueError, match='lenience: expected a number in'):
            lenient(lenience)


def test_a_row_without_a_highest_logit_is_an_error():
    for value in -jnp.inf, jnp.inf:
        target = random_model(0)
        target = target.replace(table=target.table.at[3].set(value))
        with pytest.raises(FloatingPointError, match=r'rows \[3\]: expected finite logits from the target'):
            plain(target)


def test_a_second_batch_of_the_same_shape_compiles_nothing():
    """Other prompts, other parameters and another key are arguments of the same program."""
    counters = TraceCounter(), TraceCounter()

    def run(seed):
        target = Traced(random_model(seed), counters[0])
        drafter = ModelDrafter(Traced(random_model(seed + 1), counters[1]))
        inputs = prompts(np.random.default_rng(seed).permutation(ROWS))
        speculate(target, drafter, inputs, jax.random.key(seed), gamma=1, max_new_tokens=9)
        plain(target, inputs, jax.random.key(seed), max_new_tokens=9)
        return [counter.count for counter in counters]

    first = run(0)
    assert min(first) > 0
    assert run(1) == run(2) == first
