"""A thrifty draft speaks while it gains; what it says or keeps to itself changes no output."""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import decoding, generate, plain_generate
from spec_jax.drafters import thrifty
from spec_jax.drafters.thrifty import Thrifty, outspoken
from spec_jax.sampling import GREEDY, row_keys
from spec_jax.testing import ModelWrapper, ScriptedDrafter, TableModel, prompts
from spec_jax.types import Context, Verification

V, LIMIT = 6, 40
TARGET = TableModel.random(jax.random.key(0), V, eos_id=V + 1)  # an EOS that is never said
HOW = dict(max_new_tokens=LIMIT, sampling=GREEDY)


def text(first=0):
    return np.asarray(plain_generate(TARGET, prompts([first]), jax.random.key(0), **HOW).tokens)[0]


def spoken(accepted, toll=0.35, rounds=30, gamma=3):
    """In which rounds a draft speaks of whose guesses `accepted` tokens pass each time."""
    draft = Thrifty(ScriptedDrafter(jnp.zeros((1, LIMIT), jnp.int32)), toll)
    state, found = draft.init(prompts([0]), LIMIT), []
    context = Context(jnp.zeros((1, LIMIT), jnp.int32), jnp.ones((1,), jnp.int32))
    for number in range(rounds):
        proposed, state = draft.propose(state, context, None, gamma, GREEDY, V)
        found += [number] if int(proposed.length[0]) else []
        passed = jnp.minimum(proposed.length, accepted)
        state = draft.update(state, context, Verification(passed, jnp.zeros((1, gamma + 1), jnp.int32)), None)
    return found


def test_a_draft_that_is_never_right_is_asked_every_ninth_round():
    """Its gain is .8^n after n guesses: .41 after four, .33 after five."""
    assert spoken(0) == [0, 1, 2, 3, 4, 13, 22]


@pytest.mark.parametrize(('accepted', 'toll'), [(1, 0.35), (1, 1.0), (0, 0.0), (3, 2.9)])
def test_a_draft_that_gains_more_than_its_toll_always_speaks(accepted, toll):
    found = spoken(accepted, toll)
    assert found == list(range(30)) if accepted < 3 else found[0] == 8  # 3 is above 2.9, but it begins at 1


def test_a_longer_draft_has_more_rows_to_pay_for(monkeypatch):
    monkeypatch.setattr(thrifty, 'rows_toll', lambda rows: {3: 0.9, 4: 1.1}[rows])
    assert spoken(1, None, gamma=2) == list(range(30)) and spoken(1, None, gamma=3) == [8, 17, 26]


def test_a_row_alone_is_decoded_as_by_the_plain_program_where_nothing_was_guessed(monkeypatch):
    monkeypatch.setattr(thrifty, '_PATIENCE', 10**6)
    wrong = ScriptedDrafter(jnp.asarray((text() + 1) % V)[None])
    output = generate(TARGET, Thrifty(wrong, 0.9), prompts([0]), jax.random.key(0), gamma=3, **HOW)
    np.testing.assert_array_equal(output.tokens[0], text())
    assert output.stats.tested_at.tolist() == [[1, 0, 0]] and output.stats.rounds.tolist() == [LIMIT]


def by_the_rule(right, toll=0.35, gamma=3):
    """Rounds of a text, and in how many of them there is a guess; `right` [LIMIT] says which tokens would pass."""
    place = rounds = guesses = silent = 0
    gain = 1.0
    while place < LIMIT:
        passed = 0
        if gain >= toll or silent == 8:
            passed = int(np.cumprod(right[place : place + gamma]).sum())
            gain, silent, guesses = 0.8 * gain + 0.2 * passed, 0, guesses + 1
        else:
            silent += 1
        place, rounds = place + passed + 1, rounds + 1
    return rounds, guesses


@pytest.mark.parametrize(('share', 'spoken_of'), [(0.0, 0.2), (0.3, 0.38), (1.0, 1.0)])
def test_a_row_speaks_alike_alone_and_among_others(share, spoken_of):
    """`share` of its guesses would pass; it speaks in `spoken_of` its rounds."""
    chance = np.random.default_rng(0)
    texts = np.stack([text(first) for first in range(3)])
    script = np.where(chance.random(texts.shape) < share, texts, (texts + 1) % V)
    draft = Thrifty(ScriptedDrafter(jnp.asarray(script, jnp.int32)), 0.35)
    together = generate(TARGET, draft, prompts([0, 1, 2]), jax.random.key(0), gamma=3, **HOW)
    np.testing.assert_array_equal(together.tokens, texts)
    for row in range(3):
        alone = generate(TARGET, draft, prompts([row]), jax.random.key(0), gamma=3, **HOW)
        np.testing.assert_array_equal(alone.tokens[0], texts[row])
        for name in ('rounds', 'tested_at', 'accepted'):
            ours, theirs = (getattr(output.stats, name) for output in (alone, together))
            np.testing.assert_array_equal(ours[0], theirs[row], err_msg=name)
    rounds, guessed = np.asarray(together.stats.rounds), np.asarray(together.stats.tested_at)[:, 0]
    assert [*zip(rounds, guessed, strict=True)] == [*map(by_the_rule, script == texts)]
    assert guessed.sum() / rounds.sum() == pytest.approx(spoken_of, abs=0.01)


@flax.struct.dataclass
class Measured(ModelWrapper):
    """Notes the widths of its calls."""

    widths: set = flax.struct.field(pytree_node=False)

    def decode(self, tokens, positions, cache):
        self.widths.add(tokens.shape[1])
        return self.model.decode(tokens, positions, cache)


@pytest.mark.parametrize(
    ('toll', 'batch', 'always', 'expected'),
    [(0.3, 1, False, {1, 3}), (0.3, 1, True, {3}), (0.3, 2, False, {3}), (0.0, 1, False, {3})],
    ids=['rows cost time', 'a draft that always guesses', 'a batch', 'rows cost nothing'],
)
def test_a_call_over_one_row_is_made_where_it_saves_something(toll, batch, always, expected, monkeypatch):
    monkeypatch.setattr(decoding, 'rows_toll', lambda rows: toll)
    target, keys = Measured(TARGET, set()), row_keys(jax.random.key(0), range(batch))
    draft = ScriptedDrafter(jnp.zeros((1, LIMIT), jnp.int32))
    if always:
        monkeypatch.setattr(ScriptedDrafter, 'always_guesses', True, raising=False)
    state = decoding.prefill(target, draft, prompts([0] * batch), keys, gamma=2, max_new_tokens=LIMIT)
    jax.eval_shape(partial(decoding.speculative_step, target, draft, gamma=2, **HOW), state)
    assert target.widths == expected


def test_outspoken_is_the_draft_itself():
    draft = ScriptedDrafter(jnp.zeros((1, 1), jnp.int32))
    assert outspoken(Thrifty(draft, 0.3)) is draft and outspoken(draft) is draft and outspoken(None) is None
