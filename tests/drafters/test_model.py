"""A model as the draft: its tokens, its q and its cache.

Axes: B rows, G draft length, V vocabulary.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig, speculative_loop
from spec_jax.drafters import model
from spec_jax.drafters.base import Round
from spec_jax.drafters.draw import fit_vocabulary
from spec_jax.drafters.model import ModelDrafter, check_vocabularies
from spec_jax.runtime import backend
from spec_jax.sampling import GREEDY, SamplingConfig, logits_to_probs, row_keys
from spec_jax.testing import ModelWrapper, TableModel, chi_square, histogram, prompts
from spec_jax.types import Context

V, GAMMA, ROWS = 6, 4, 4
SAMPLED = SamplingConfig(top_k=5)
MODEL = TableModel.random(jax.random.key(0), V, order=2, num_tables=ROWS)
ALL = prompts(range(ROWS))


@flax.struct.dataclass
class Measured(ModelWrapper):
    """Notes the widths of its calls."""

    widths: set = flax.struct.field(pytree_node=False)

    def decode(self, block, cache):
        self.widths.add(block.tokens.shape[1])
        return self.model.decode(block, cache)

    def __hash__(self):
        return id(self.widths)


def propose_now(drafter, state, context, keys, gamma=GAMMA, sampling=SAMPLED, vocab_size=V):
    return drafter.propose(state, Round(context, keys, gamma, sampling, vocab_size))


propose = jax.jit(propose_now, static_argnames=('gamma', 'sampling', 'vocab_size'))


def start(rows=ROWS, size=20):
    one = jnp.ones(rows, jnp.int32)
    return Context(jnp.zeros((rows, size), jnp.int32), one, one)


def begin(drafter, inputs, size):
    return drafter.init(None, None, inputs, size)


def extend(context, tokens, counts):
    """Adds the first counts[b] of row b's tokens [B, N]."""
    written = np.array(context.tokens)
    for row, (at, count) in enumerate(zip(np.asarray(context.length), counts, strict=True)):
        written[row, at : at + count] = tokens[row][:count]
    return context.replace(tokens=jnp.asarray(written), length=context.length + jnp.asarray(counts))


def q_by_hand(context, drafted):
    """[B, G, V]: row b's table at the last two tokens before each of `drafted` [B, G]."""
    expected = []
    for row, length in enumerate(np.asarray(context.length)):
        text = [0, *np.asarray(context.tokens)[row, :length], *drafted[row]]
        expected.append(
            [MODEL.table[row, text[length + i - 1], text[length + i]] for i in range(drafted.shape[1])]
        )
    return logits_to_probs(jnp.asarray(expected), SAMPLED)


@pytest.mark.parametrize('window', [1, 2])
def test_q_is_the_distribution_after_each_prefix_after_any_acceptance(window, monkeypatch):
    """All, some and none of a draft accepted, by turns, each row in its own way."""
    # A batch has windows of one token everywhere, so two are asked for here.
    monkeypatch.setattr(model, 'fewest_rows', lambda batch: window)
    drafter = ModelDrafter(Measured(MODEL, set()))
    context, state = start(), begin(drafter, ALL, 40)
    propose = jax.jit(propose_now, static_argnames=('gamma', 'sampling', 'vocab_size'))  # traced anew
    random = np.random.default_rng(0)
    for number, accepted in enumerate([[4, 0, 2, 4], [4, 4, 0, 1], [0, 4, 4, 3]]):
        keys = row_keys(jax.random.key(number), range(ROWS))
        draft, state = propose(drafter, state, context, keys)
        tokens = np.asarray(draft.tokens)
        np.testing.assert_allclose(draft.probs, q_by_hand(context, tokens), atol=1e-6)
        np.testing.assert_array_equal(draft.length, GAMMA)
        assert (np.take_along_axis(np.asarray(draft.probs), tokens[..., None], -1) > 0).all()
        context = extend(context, tokens, accepted)
        context = extend(context, random.integers(0, V, (ROWS, 1)), [1] * ROWS)
        state = drafter.update(state, None)
    assert drafter.model.widths == {window, 2}


def test_looking_at_one_or_two_tokens_gives_the_same_drafts_and_the_same_output():
    target = TableModel.random(jax.random.key(1), V, order=2, num_tables=ROWS)
    config = DecodeConfig(GAMMA, 60, SAMPLED)
    for one in MODEL, target.replace(table=target.table.at[:2].set(MODEL.table[:2])):
        for row in 0, 3:
            row_key = jax.random.fold_in(jax.random.key(2), row)[None]
            outputs = []
            for platform in 'cpu', 'gpu':
                with backend.tracing_for(platform):  # traced anew, so without `generate`'s cache
                    loop = jax.jit(partial(speculative_loop, config=config))
                    outputs.append(loop(one, ModelDrafter(MODEL), prompts([row]), row_key))
            jax.tree.map(np.testing.assert_array_equal, *outputs)
            rate = float(outputs[0].stats.accepted[0] / outputs[0].stats.tested[0])
            assert (rate == 1) == (row == 0 or one is MODEL)


def test_drafts_are_sampled_from_q():
    rows = 20_000
    drafter = ModelDrafter(MODEL)
    keys = row_keys(jax.random.key(3), np.arange(rows))
    draft, _ = propose(drafter, begin(drafter, prompts([1] * rows), 20), start(rows, 4), keys, gamma=2)
    first = np.asarray(draft.probs[0, 0], np.float64)
    second = np.asarray(logits_to_probs(MODEL.table[1, 0], SAMPLED), np.float64)  # [V, V]
    assert chi_square(histogram(draft.tokens, V), first[:, None] * second) > 0.001


def test_a_greedy_draft_is_the_argmax_and_needs_no_q():
    drafter = ModelDrafter(MODEL)
    keys = row_keys(jax.random.key(4), range(ROWS))
    draft, _ = propose(drafter, begin(drafter, ALL, 20), start(), keys, gamma=1, sampling=GREEDY)
    np.testing.assert_array_equal(draft.tokens[:, 0], MODEL.table[:, 0, 0].argmax(-1))
    assert draft.probs is None


@pytest.mark.parametrize('vocab_size', [4, 9])
def test_q_has_the_width_of_the_targets_vocabulary_and_sums_to_1(vocab_size):
    drafter = ModelDrafter(MODEL)
    keys = row_keys(jax.random.key(5), range(ROWS))
    draft, _ = propose(drafter, begin(drafter, ALL, 20), start(), keys, gamma=1, vocab_size=vocab_size)
    assert draft.probs.shape == (ROWS, 1, vocab_size)
    assert draft.tokens.max() < min(V, vocab_size)
    np.testing.assert_allclose(draft.probs.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(draft.probs[..., V:], 0)


def test_logits_are_cut_or_padded_with_ids_that_are_never_drawn():
    logits = jnp.arange(3.0)[None]
    np.testing.assert_array_equal(fit_vocabulary(logits, 2), [[0, 1]])
    np.testing.assert_array_equal(fit_vocabulary(logits, 3), logits)
    np.testing.assert_array_equal(fit_vocabulary(logits, 5), [[0, 1, 2, -np.inf, -np.inf]])


PIECES = ['<pad>', '</s>', '<unk>', '▁the', '▁a']


def test_equal_vocabularies_pass():
    check_vocabularies(PIECES, list(PIECES))


@pytest.mark.parametrize(
    ('draft', 'message'),
    [
        (['<pad>', '</s>', '<unk>', '▁a', '▁the'], "id 3 is '▁the' in the target and '▁a' in the draft"),
        ([*PIECES, '▁of', '▁to'], r"target has 5 pieces and the draft 7; id 5, '▁of', is in the draft only"),
        (PIECES[:3], r"target has 5 pieces and the draft 3; id 3, '▁the', is in the target only"),
        ([], r"the draft 0; id 0, '<pad>', is in the target only"),
    ],
    ids=['permuted', 'longer', 'shorter', 'empty'],
)
def test_vocabularies_that_differ_are_refused_by_the_first_difference(draft, message):
    with pytest.raises(ValueError, match=message):
        check_vocabularies(PIECES, draft)
