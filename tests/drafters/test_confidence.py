"""The confidence of an n-gram in its guess, and a thrifty draft that uses it."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import ngram
from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.sampling import GREEDY
from spec_jax.testing import prompts
from spec_jax.training.ngram import count_ngrams
from spec_jax.types import Context, Draft, Verification

V = 5
COUNTS = count_ngrams([[2, 3, 2, 3, 1], [2, 4, 1], [3, 3, 3, 1]], 2, V, (1, 1), 9)
BIGRAM = ngram.on_device(ngram.make_drafter(COUNTS))


def test_an_ngrams_confidence_is_the_highest_q_of_the_next_token():
    tokens = jnp.arange(V)[:, None]
    confidence = BIGRAM.confidence((), Context(tokens, jnp.ones((V,), jnp.int32), jnp.ones((V,), jnp.int32)))
    np.testing.assert_allclose(confidence, BIGRAM.probs_after(tokens).max(-1), rtol=1e-6)
    assert len(np.unique(confidence)) > 2


ASKED = []


@flax.struct.dataclass
class Sure:
    """Has the confidence of its script, round by round; each guess is noted in `ASKED`."""

    script: jax.Array

    def shape(self, gamma):
        return DraftShape(gamma, gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        return jnp.zeros((1,), jnp.int32)

    def confidence(self, state, context):
        return self.script[state]

    def propose(self, state, round):
        jax.debug.callback(lambda: ASKED.append(True))
        return Draft(jnp.zeros((1, round.gamma), jnp.int32), None, jnp.full((1,), round.gamma)), state

    def update(self, state, outcome):
        return state + 1


def guessing_rounds_of(confidence, accepted):
    """The rounds in which it guesses, given its confidence and how many guesses would pass; each guess costs .4."""
    ASKED.clear()
    draft, guessing_rounds = (
        Thrifty(Sure(jnp.asarray(confidence)), Sure.confidence, lambda rows: 0.4 * (rows > 1)),
        [],
    )
    state, one = draft.init(None, None, prompts([0]), 9), jnp.ones((1,), jnp.int32)
    round = Round(Context(jnp.zeros((1, 9), jnp.int32), one, one), None, 3, GREEDY, V)
    for number, passing in enumerate(accepted):
        proposed, state = draft.propose(state, round)
        guessing_rounds += [number] if int(proposed.length[0]) else []
        passed = jnp.minimum(proposed.length, passing)
        state = draft.update(state, Outcome(None, Verification(passed, None, None, None), None))
    jax.effects_barrier()
    assert len(ASKED) == len(guessing_rounds)  # only in rounds with a guess
    return guessing_rounds


def test_at_first_a_draft_guesses_where_its_confidence_is_high():
    """From .3 on, where it is thought right at .37: three bring .37 (1 + .5 + .25) = .65 then, at .22 .385."""
    confidences = [0.1, 0.9, 0.2, 0.5, 0.29, 0.31, 0.7]
    assert guessing_rounds_of(confidences, [1] * 7) == [1, 3, 5, 6]


def test_each_step_of_confidence_has_its_own_counts():
    """Sure and wrong, that of .31 goes from .65 below .4 in three rounds: .65 x .85^3 = .398; .9's stays."""
    assert guessing_rounds_of([0.31] * 5 + [0.9], [0] * 5 + [2]) == [0, 1, 2, 5]
    # Tried after eight rounds without a guess, and it gains.
    assert guessing_rounds_of([0.1] * 9 + [0.1], [3] * 10) == [8, 9]
