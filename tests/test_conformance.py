"""Every shipped draft passes the suite, and each kind of fault fails the check that is meant for it.

A fault of a draft wraps a sound one; a fault of the loop is planted in `decoding` for one program.

Axes: B rows, G draft length, V vocabulary.
"""

import re
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import conformance, decoding
from spec_jax.conformance.results import checked
from spec_jax.drafters import ngram
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.testing import TableModel
from spec_jax.training.ngram import count_ngrams
from spec_jax.types import Verification


def blurred(target):
    """A model that is often right."""
    size = target.vocab_size
    noise = TableModel.random(jax.random.key(1), size, order=2, num_tables=size)
    return ModelDrafter(target.replace(table=target.table + noise.table))


def same(target):
    return ModelDrafter(target)


def trigrams(target):
    """Counted from 200 texts that the target's tables say by chance."""
    random, size = np.random.default_rng(0), target.vocab_size
    probs = np.asarray(jax.nn.softmax(target.table), np.float64)
    texts = []
    for number in range(200):
        text = [0, 0]
        while len(text) < 12 and (len(text) == 2 or text[-1] != target.eos_id):
            p = probs[number % size, text[-2], text[-1]]
            text.append(random.choice(size, p=p / p.sum()))
        texts.append(np.array(text[2:]))
    counts = count_ngrams(texts, 3, size, min_counts=(1, 1, 1), max_successors=size)
    return ngram.on_device(ngram.make_drafter(counts))


def rows_cost(rows):
    return 0.1 * (rows - 1)


def thrifty(target):
    return Thrifty(trigrams(target), rows_cost)


def use_optimised(request, name):
    if name in ('tokens_follow_q', 'joint_distribution'):  # tens of thousands of texts
        request.getfixturevalue('optimised')


SHIPPED = dict(model=blurred, trigrams=thrifty, prompt_lookup=lambda target: PromptLookup())


@pytest.mark.parametrize('name', conformance.CHECKS)
@pytest.mark.parametrize(
    'draft', [pytest.param(draft, marks=pytest.mark.slow if draft == 'model' else ()) for draft in SHIPPED]
)
def test_a_shipped_draft_passes(draft, name, request):
    use_optimised(request, name)
    result = conformance.CHECKS[name](SHIPPED[draft])
    assert result.name == name
    assert result.passed, result.detail


def test_the_target_as_its_own_draft_is_always_accepted():
    result = conformance.acceptance_of_1(same)
    assert result.passed, result.detail


# --- faults of a draft --------------------------------------------------------------------------------------


@flax.struct.dataclass
class Faulty:
    """A draft that is sound but for one thing.

    Attributes:
      drafter: the sound one.
      see: (context, keys, full) -> what the sound one is shown; full [B] bool, whether all G passed last time.
      say: draft -> what the loop is told.
      keep: state -> what `update` returns.
      name: of a fault that is planted elsewhere, so that it gets a program of its own.
    """

    drafter: Drafter
    see: Callable = flax.struct.field(pytree_node=False, default=lambda context, keys, full: (context, keys))
    say: Callable = flax.struct.field(pytree_node=False, default=lambda draft: draft)
    keep: Callable = flax.struct.field(pytree_node=False, default=lambda state: state)
    name: str = flax.struct.field(pytree_node=False, default='')

    def init(self, inputs, num_slots) -> tuple[Any, jax.Array]:
        return self.drafter.init(inputs, num_slots), jnp.zeros(inputs.tokens.shape[0], bool)

    def propose(self, state, context, keys, gamma, sampling, vocab_size):
        own, full = state
        shown = self.see(context, keys, full)
        draft, own = self.drafter.propose(own, *shown, gamma, sampling, vocab_size)
        return self.say(draft), (own, full)

    def update(self, state, context, verified, hidden):
        own = self.drafter.update(state[0], context, verified, hidden)
        return self.keep((own, verified.num_accepted == verified.tokens.shape[1] - 1))


def told(change):
    """A `say` that changes what the loop is told of q; a greedy draft has none."""
    return lambda draft: draft if draft.probs is None else draft.replace(probs=change(draft.probs))


def without_last_draft_token(context, keys, full):
    """After full acceptance the last draft token is missing: the one before it stands there twice."""
    rows = jnp.arange(full.shape[0])
    here, before = (jnp.maximum(context.length - back, 0) for back in (2, 3))
    tokens = context.tokens
    kept = jnp.where(full, tokens[rows, before], tokens[rows, here])
    return context.replace(tokens=tokens.at[rows, here].set(kept)), keys


SQUARED = told(lambda q: q**2 / (q**2).sum(-1, keepdims=True))
FAULTY_DRAFTS = {
    'the q of another token': (
        'tokens_follow_q',
        dict(say=told(lambda q: jnp.roll(q, 1, -1))),
        'expected Draft.probs to be',
    ),
    'q at half the temperature': ('tokens_follow_q', dict(say=SQUARED), 'do not follow'),
    'and the texts are wrong': ('joint_distribution', dict(say=SQUARED), 'not distributed as'),
    'a cache off by one after full acceptance': (
        'acceptance_of_1',
        dict(see=without_last_draft_token),
        r'acceptance of 0\.\d+',
    ),
    'a state shared between rows': (
        'uneven_batches',
        dict(see=lambda context, keys, full: without_last_draft_token(context, keys, full.any() | full)),
        'proposes in round',
    ),
    'a key shared between rows': (
        'seeds',
        dict(see=lambda context, keys, full: (context, jnp.broadcast_to(keys[:1], keys.shape))),
        'in another order',
    ),
    'tokens outside the vocabulary': (
        'shapes',
        dict(say=lambda draft: draft.replace(tokens=draft.tokens + 4)),
        'expected tokens of the vocabulary, 0 to 7, got 8, 9',
    ),
    'probabilities that sum to 0.9': (
        'shapes',
        dict(say=told(lambda q: 0.9 * q)),
        'expected probabilities that sum to 1, got sums of 0.9',
    ),
    'and a round emits too little': (
        'closed_form',
        dict(say=told(lambda q: 0.9 * q)),
        'q is no distribution',
    ),
    'too few tokens': (
        'shapes',
        dict(say=lambda draft: draft.replace(tokens=draft.tokens[:, 1:])),
        r'Draft.tokens: expected integer numbers of shape \[8, 1\], got int32 of shape \[8, 0\]',
    ),
    'a q of another width': (
        'shapes',
        dict(say=told(lambda q: q[..., 1:])),
        r'Draft.probs: expected floating numbers of shape \[8, 1, 8\], got float32 of shape \[8, 1, 7\]',
    ),
    'a length above gamma': (
        'shapes',
        dict(say=lambda draft: draft.replace(length=draft.length + 1)),
        'expected Draft.length from 0 to 3, got 4',
    ),
    'a state that changes its shape': (
        'shapes',
        dict(keep=lambda state: (state[0], state[1].astype(jnp.float32))),
        'expected update to return a state like that of init',
    ),
}


def run(name, make):
    return conformance.acceptance_of_1(make) if name == 'acceptance_of_1' else conformance.CHECKS[name](make)


@pytest.mark.parametrize('fault', FAULTY_DRAFTS)
def test_a_faulty_draft_fails_the_check_that_is_meant_for_it(fault, request):
    name, parts, message = FAULTY_DRAFTS[fault]
    use_optimised(request, name)
    sound = same if name == 'acceptance_of_1' else blurred
    result = run(name, lambda target: Faulty(sound(target), **parts))
    assert not result.passed, result.detail
    assert_detail(result, message)


def assert_detail(result, message):
    assert '\n' not in result.detail
    assert re.search(message, result.detail), result.detail


def test_a_draft_that_is_no_pytree_is_told_so():
    class Bare:
        def init(self, inputs, num_slots):
            return ()

    assert_detail(
        conformance.CHECKS['shapes'](lambda target: Bare()), 'expected a pytree of arrays.* got a Bare'
    )


# --- faults of the loop -------------------------------------------------------------------------------------

VERIFY, VERIFY_GREEDY = decoding.verify_chain, decoding.verify_greedy
EMIT, COUNT = decoding._emit, decoding._count


def batch_minimum(*args):
    verified = VERIFY(*args)
    return Verification(
        jnp.broadcast_to(verified.num_accepted.min(), verified.num_accepted.shape), verified.tokens
    )


def accept_all(best, draft):
    return VERIFY_GREEDY(jnp.concatenate([draft.tokens, best[:, -1:]], axis=1), draft)


def residual_of_p(p, draft, keys, bound):
    """What replaces a rejected token comes from p, as a token behind full acceptance does."""
    verified = VERIFY(p, draft, keys, bound)
    instead = VERIFY(p, draft.replace(length=verified.num_accepted), keys, jnp.full_like(p, 2.0))
    return verified.replace(tokens=instead.tokens)


def past_eos(tokens, count, room, eos_id):
    """Only the last token of a block is looked at."""
    index = jnp.arange(tokens.shape[1])
    return EMIT(jnp.where(index == count[:, None] - 1, tokens, -1), count, room, eos_id)


def past_limit(tokens, count, room, eos_id):
    emitted, _ = EMIT(tokens, count, room + tokens.shape[1], eos_id)
    return emitted, emitted >= room


def all_tested(stats, bound, draft, num_accepted, emitted):
    counted = COUNT(stats, bound, draft, num_accepted, emitted)
    meant = jnp.arange(draft.tokens.shape[1]) < jnp.where(emitted > 0, draft.length, 0)[:, None]
    return counted.replace(tested_at=stats.tested_at + meant)


AT_ONCE = ('batch minimum', 'no residual')  # `-m slow` runs the others
FAULTY_LOOPS = {
    'batch minimum': ('uneven_batches', 'verify_chain', batch_minimum, 'alone and .* in the batch'),
    'all accepted': ('greedy_identity', 'verify_greedy', accept_all, "expected the target's own output"),
    'no residual': ('joint_distribution', 'verify_chain', residual_of_p, 'not distributed as'),
    'past an EOS': ('eos_in_every_place', '_emit', past_eos, 'up to the first 1'),
    'past the limit': ('length_limits', '_emit', past_limit, 'limit 1: expected 1 tokens'),
    'all tested': ('honest_counts', '_count', all_tested, 'expected tested'),
}


@pytest.mark.parametrize(
    'fault',
    [pytest.param(fault, marks=() if fault in AT_ONCE else pytest.mark.slow) for fault in FAULTY_LOOPS],
)
def test_a_faulty_loop_fails_the_check_that_is_meant_for_it(fault, monkeypatch, request):
    name, part, planted, message = FAULTY_LOOPS[fault]
    use_optimised(request, name)
    monkeypatch.setattr(decoding, part, planted)
    result = run(name, lambda target: Faulty(blurred(target), name=fault))
    assert not result.passed, result.detail
    assert_detail(result, message)


# --- the suite itself ---------------------------------------------------------------------------------------


def test_results_come_in_order_and_no_draft_can_stop_the_suite():
    """A maker that raises fails every check, in one line each."""

    def make(target):
        raise KeyError('no such\ndraft')

    seen = []
    results = conformance.check(make, make, progress=lambda checks: seen.extend(checks) or checks)
    assert [result.name for result in results] == [*conformance.CHECKS, 'acceptance_of_1']
    assert len(seen) == len(results)
    assert [str(result) for result in results][0] == r"FAIL  shapes: KeyError: 'no such\ndraft'"
    assert len(conformance.check(make)) == len(conformance.CHECKS)


def test_a_check_is_what_its_function_says():
    @checked
    def sound(make):
        return '3 samples'

    assert str(sound(None)) == 'pass  sound: 3 samples'
