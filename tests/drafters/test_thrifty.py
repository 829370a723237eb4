"""A thrifty draft guesses while it gains; its guesses and its pauses do not change the output."""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import DecodeConfig, decoding, generate, plain_generate
from spec_jax.drafters import thrifty
from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.drafters.thrifty import Thrifty, best_length, without_thrift
from spec_jax.runtime import backend
from spec_jax.runtime.backend import compiled_lengths
from spec_jax.sampling import GREEDY, row_keys
from spec_jax.testing import ModelWrapper, ScriptedDrafter, TableModel, prompts
from spec_jax.types import Context, Verification

V, LIMIT = 6, 40
TARGET = TableModel.random(jax.random.key(0), V, eos_id=V + 1)  # an EOS that is never generated
CONFIG = DecodeConfig(3, LIMIT, GREEDY)


def text(first=0):
    return np.asarray(plain_generate(TARGET, prompts([first]), jax.random.key(0), CONFIG).tokens)[0]


def rows_cost(each):
    """A cost of `each` for every row but the first."""
    return lambda rows: each * (rows - 1)


def all_or_none(cost):
    """A cost that a guess of any length has to pay."""
    return lambda rows: cost * (rows > 1)


def lengths(accepted, cost, rounds=30, gamma=3):
    """How long the drafts of a row are of which `accepted` tokens would pass each time."""
    draft = Thrifty(ScriptedDrafter(jnp.zeros((1, LIMIT), jnp.int32)), cost=cost)
    state, proposed_lengths = draft.init(None, None, prompts([0]), LIMIT), []
    one = jnp.ones((1,), jnp.int32)
    round = Round(Context(jnp.zeros((1, LIMIT), jnp.int32), one, one), None, gamma, GREEDY, V)
    for _ in range(rounds):
        proposed, state = draft.propose(state, round)
        proposed_lengths.append(int(proposed.length[0]))
        passed = jnp.minimum(proposed.length, accepted)
        state = draft.update(state, Outcome(None, Verification(passed, None, None, None), None))
    return proposed_lengths


def by_the_rule(passing, cost, choices):
    """The same in Python, for a text; `passing` maps a place to how many tokens from it on would pass."""
    place, rounds_skipped, first, later, wanted_lengths = 0, 0, 0.35, 0.5, []
    while place < LIMIT:
        speed = {0: 1.0}
        for length in choices:
            speed[length] = (1 + sum(first * later**i for i in range(length))) / (1 + cost(length + 1))
        wanted = max(speed, key=speed.get)
        if not wanted and rounds_skipped >= 8:
            wanted = choices[0]
        passed = min(wanted, passing(place))
        for number in range(min(passed + 1, wanted)):
            hit = number < passed
            if number == 0:
                first = 0.85 * first + 0.15 * hit
            else:
                later = 0.85 * later + 0.15 * hit
        rounds_skipped = 0 if wanted else rounds_skipped + 1
        place += passed + 1
        wanted_lengths.append(wanted)
    return wanted_lengths


def test_the_best_length_is_that_of_most_tokens_by_the_time_of_a_call():
    """By 1 + c + c d + c d^2 tokens: none, one, two and three of them are the best of a row each."""
    first, later = jnp.array([0.1, 0.3, 0.5, 0.9, 0.0]), jnp.array([0.9, 0.1, 0.6, 0.9, 0.0])
    costs = [0.2, 0.35, 0.6]
    best = best_length(first, later, [1, 2, 3], costs)
    speeds = [[1.1 / 1.2, 1.19 / 1.35, 1.271 / 1.6], [1.3 / 1.2, 1.33 / 1.35, 1.333 / 1.6]]
    speeds += [[1.5 / 1.2, 1.8 / 1.35, 1.98 / 1.6], [1.9 / 1.2, 2.71 / 1.35, 3.439 / 1.6], [0, 0, 0]]
    assert best.tolist() == [int(np.argmax([1, *one])) for one in speeds] == [0, 1, 2, 3, 0]
    assert best_length(first, later, [3], costs[2:]).tolist() == [0, 0, 3, 3, 0]


def test_a_draft_that_is_never_right_guesses_less_and_less_often():
    """It begins at .35, and .35 x .85^n pays for a token at .1 up to n = 7; then it is tried every ninth round."""
    by_round = lengths(0, rows_cost(0.1))
    assert [number for number, length in enumerate(by_round) if length] == [*range(8), 16, 25]
    assert set(by_round[8:]) == {0, 1} and sorted(by_round[:8], reverse=True) == by_round[:8]


@pytest.mark.parametrize('accepted', [0, 1, 2, 3])
@pytest.mark.parametrize(
    'cost', [rows_cost(0.1), rows_cost(0.3), all_or_none(0.35)], ids=['.1', '.3', 'one cost']
)
def test_lengths_are_those_of_the_rule(accepted, cost):
    choices = [length for length in compiled_lengths(3, cost) if length]
    expected = by_the_rule(lambda place: accepted, cost, choices)
    assert lengths(accepted, cost, len(expected)) == expected


def test_a_draft_that_is_right_grows_to_gamma_and_one_whose_second_token_is_wrong_shrinks_to_one():
    assert lengths(3, rows_cost(0.1))[-1] == 3 and lengths(1, rows_cost(0.1))[-1] == 1
    assert set(lengths(3, rows_cost(0.0))) == {3}  # where rows cost nothing there is one length


def test_a_row_alone_is_decoded_as_by_the_plain_program_where_nothing_was_guessed(monkeypatch):
    monkeypatch.setattr(thrifty, '_RETRY_AFTER', 10**6)
    wrong = ScriptedDrafter(jnp.asarray((text() + 1) % V)[None])
    output = generate(TARGET, Thrifty(wrong, cost=all_or_none(0.6)), prompts([0]), jax.random.key(0), CONFIG)
    np.testing.assert_array_equal(output.tokens[0], text())
    # .35 + .175 + .0875 pass at first, .52 with .85 of that
    assert output.stats.tested_at.tolist() == [[1, 0, 0]] and output.stats.rounds.tolist() == [LIMIT]


@pytest.mark.parametrize(('share', 'guessed_share'), [(0.0, 0.3), (0.3, 0.85), (1.0, 1.0)])
def test_a_row_guesses_alike_alone_and_among_others(share, guessed_share):
    """`share` of its guesses would pass; it guesses in about `guessed_share` of its rounds."""
    chance, cost = np.random.default_rng(0), rows_cost(0.1)
    texts = np.stack([text(first) for first in range(3)])
    script = np.where(chance.random(texts.shape) < share, texts, (texts + 1) % V)
    draft = Thrifty(ScriptedDrafter(jnp.asarray(script, jnp.int32)), cost=cost)
    together = generate(TARGET, draft, prompts([0, 1, 2]), jax.random.key(0), CONFIG)
    np.testing.assert_array_equal(together.tokens, texts)
    for row in range(3):
        alone = generate(TARGET, draft, prompts([row]), jax.random.key(0), CONFIG)
        np.testing.assert_array_equal(alone.tokens[0], texts[row])
        for name in ('rounds', 'tested_at', 'accepted'):
            ours, theirs = (getattr(output.stats, name) for output in (alone, together))
            np.testing.assert_array_equal(ours[0], theirs[row], err_msg=name)
    rounds, guessed = np.asarray(together.stats.rounds), np.asarray(together.stats.tested_at)[:, 0]
    expected = [
        by_the_rule(lambda place, right=right: np.cumprod(right[place:]).sum(), cost, [1, 3])
        for right in script == texts
    ]
    assert rounds.tolist() == [*map(len, expected)]
    assert guessed.tolist() == [np.count_nonzero(lengths_of_row) for lengths_of_row in expected]
    assert guessed.sum() / rounds.sum() == pytest.approx(guessed_share, abs=0.1)


@flax.struct.dataclass
class Measured(ModelWrapper):
    """Notes the widths of its calls."""

    widths: set = flax.struct.field(pytree_node=False)

    def decode(self, block, cache):
        self.widths.add(block.tokens.shape[1])
        return self.model.decode(block, cache)


@pytest.mark.parametrize(
    ('cost', 'batch', 'always', 'expected'),
    [
        (rows_cost(0.1), 1, False, {1, 2, 3}),
        (all_or_none(0.3), 1, False, {1, 3}),
        (rows_cost(0.1), 1, True, {3}),
        (rows_cost(0.1), 2, False, {3}),
        (rows_cost(0.0), 1, False, {3}),
    ],
    ids=['each row costs time', 'one cost', 'a draft that always guesses', 'a batch', 'rows cost nothing'],
)
def test_a_call_over_fewer_rows_is_made_where_it_saves_something(cost, batch, always, expected, monkeypatch):
    monkeypatch.setattr(backend, 'compiled_lengths', partial(compiled_lengths, cost=cost))
    target, keys = Measured(TARGET, set()), row_keys(jax.random.key(0), range(batch))
    draft = ScriptedDrafter(jnp.zeros((1, LIMIT), jnp.int32))
    if always:
        monkeypatch.setattr(
            ScriptedDrafter, 'shape', lambda self, gamma: DraftShape(gamma, gamma, True, False)
        )
    config = DecodeConfig(2, LIMIT, GREEDY)
    state = decoding.start(target, draft, prompts([0] * batch), keys, config=config)
    jax.eval_shape(partial(decoding.speculative_step, target, draft, config=config), state)
    assert target.widths == expected


def test_without_thrift_there_is_the_draft_itself():
    draft = ScriptedDrafter(jnp.zeros((1, 1), jnp.int32))
    for given, expected in (Thrifty(draft), draft), (draft, draft), (None, None):
        assert without_thrift(given) is expected
