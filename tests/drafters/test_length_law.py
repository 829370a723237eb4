"""The law of `Draft.length`: it depends on no token that is withheld. Each shipped drafter, and one that breaks it.

Axes: B rows, R rounds, G draft length, V vocabulary.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import DecodeConfig, SamplingConfig, generate
from spec_jax.conformance.driven import drive
from spec_jax.drafters import ngram
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.sampling import row_keys
from spec_jax.testing import ScriptedDrafter, TableModel, chi_square, prompts
from spec_jax.training.ngram import count_ngrams
from spec_jax.types import Draft, Inputs

V, ROWS, ROUNDS = 8, 256, 12
TARGET = TableModel.random(jax.random.key(0), V, order=2, num_tables=V)
TEXTS = [np.array(text) for text in ([2, 3, 4, 2, 3, 5, 1], [4, 4, 2, 3, 1], [5, 2, 3, 4, 4, 1])]
TRIGRAMS = ngram.on_device(ngram.make_drafter(count_ngrams(TEXTS, 3, V, (1, 1, 1), V)))


def cost(rows):
    return 0.1 * (rows - 1)


SHIPPED = {
    'model': ModelDrafter(TARGET),
    'trigrams': TRIGRAMS,
    'prompt lookup': PromptLookup(),
    'thrifty trigrams': Thrifty(TRIGRAMS, ngram.NgramDrafter.confidence, cost),
    'thrifty prompt lookup': Thrifty(PromptLookup(), cost=cost),
    'thrifty model': Thrifty(ModelDrafter(TARGET), cost=cost),
    'scripted': ScriptedDrafter(jnp.arange(30)[None] % V, lengths=jnp.arange(30)[None] % 4),
}


@flax.struct.dataclass
class Selecting:
    """A sampled draft of one token from q = (.9, .1), of length 0 when token 1 was drawn: it breaks the law."""

    cut_at: int = flax.struct.field(pytree_node=False, default=1)

    def shape(self, gamma):
        return ModelDrafter(TARGET).shape(gamma)

    def init(self, target, prefill, inputs, num_slots):
        return ()

    def propose(self, state, round):
        q = jnp.broadcast_to(jnp.array([0.9, 0.1]), (len(round.keys), round.gamma, 2))
        tokens = (jax.vmap(jax.random.uniform)(round.keys) < 0.1).astype(jnp.int32)[:, None]
        return Draft(tokens, q, jnp.where(tokens[:, 0] == self.cut_at, 0, 1)), state

    def update(self, state, outcome):
        return state


def lengths(drafter):
    """[R, B], of rows with one text and one state that differ in their keys alone, and so in the tokens drawn."""
    row = np.arange(ROWS)
    source = np.tile(np.array([2, 3, 4, 2, 3, 5, 4, 1]), (ROWS, 1))
    inputs = Inputs(jnp.asarray(source), jnp.ones(source.shape, bool))
    extra = np.tile(np.array([2, 3, 4, 2, 3, 5, 4, 4, 2, 3, 2, 3])[:, None], (1, ROWS))
    accept = np.zeros_like(extra)  # so that nothing drawn becomes text, nor differs in the state
    drafts = drive(TARGET, drafter, inputs, row_keys(jax.random.key(1), row), accept, extra)
    return np.stack([draft.length for draft in drafts]), np.stack([draft.tokens for draft in drafts])


@pytest.mark.parametrize('name', SHIPPED)
def test_lengths_do_not_depend_on_what_is_drawn(name):
    length, tokens = lengths(SHIPPED[name])
    np.testing.assert_array_equal(length, np.broadcast_to(length[:, :1], length.shape))
    if name in ('model', 'trigrams', 'thrifty trigrams', 'thrifty model'):
        drawn = tokens[length.max(1) > 0]
        assert (drawn != drawn[:, :1]).any()  # else nothing was tested
    if 'thrifty' in name or name == 'scripted':
        assert len(np.unique(length)) > 1


@pytest.mark.parametrize(('cut_at', 'expected'), [(1, 0.55), (0, 0.45)])
def test_a_length_that_depends_on_a_withheld_token_selects(cut_at, expected):
    """p = (.5, .5): with "length 0 when the drafted token is 1" token 0 comes out with .55, with 0 it is .45."""
    rows = 100_000
    even = TableModel(jnp.zeros((1, 2, 2)))
    config = DecodeConfig(1, 1, SamplingConfig())
    output = generate(even, Selecting(cut_at), prompts([0] * rows), jax.random.key(0), config)
    counts = np.bincount(output.tokens[:, 0], minlength=2)
    assert chi_square(counts, np.array([expected, 1 - expected])) > 1e-3
    assert chi_square(counts, np.array([0.5, 0.5])) < 1e-9
