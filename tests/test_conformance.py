"""Every shipped draft passes the suite, and each kind of fault fails the check designed for it.

A fault of a draft wraps a sound one; a fault of the loop is a function in place of its rule, emission or count.

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
from spec_jax.drafters.base import Drafter, DraftShape
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.testing import TableModel
from spec_jax.training.ngram import count_ngrams
from spec_jax.verification import TokenRule, verify_chain, verify_greedy


def blurred(target):
    """A model that is often right."""
    size = target.vocab_size
    noise = TableModel.random(jax.random.key(1), size, order=2, num_tables=size)
    return ModelDrafter(target.replace(table=target.table + noise.table))


def same(target):
    return ModelDrafter(target)


def trigrams(target):
    """Counted from 200 texts that the target's tables happen to generate."""
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
    return Thrifty(trigrams(target), ngram.NgramDrafter.confidence, rows_cost)


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
      change: draft -> what the loop gets.
      keep: state -> what `update` returns.
      name: of a fault that is planted elsewhere, so that it gets a program of its own.
    """

    drafter: Drafter
    see: Callable = flax.struct.field(pytree_node=False, default=lambda context, keys, full: (context, keys))
    change: Callable = flax.struct.field(pytree_node=False, default=lambda draft: draft)
    keep: Callable = flax.struct.field(pytree_node=False, default=lambda state: state)
    name: str = flax.struct.field(pytree_node=False, default='')

    def shape(self, gamma) -> DraftShape:
        return self.drafter.shape(gamma)

    def init(self, target, prefill, inputs, num_slots) -> tuple[Any, jax.Array]:
        inner = self.drafter.init(target, prefill, inputs, num_slots)
        return inner, jnp.zeros(inputs.tokens.shape[0], bool)

    def propose(self, state, round):
        inner, full = state
        context, keys = self.see(round.context, round.keys, full)
        draft, inner = self.drafter.propose(inner, round.replace(context=context, keys=keys))
        return self.change(draft), (inner, full)

    def update(self, state, outcome):
        verification = outcome.verification
        inner = self.drafter.update(state[0], outcome)
        return self.keep((inner, verification.num_accepted == verification.tokens.shape[1] - 1))


def reported(change):
    """A `change` of the q that the loop gets; a greedy draft has none."""
    return lambda draft: draft if draft.probs is None else draft.replace(probs=change(draft.probs))


def without_last_draft_token(context, keys, full):
    """After full acceptance the last draft token is missing: the one before it stands there twice."""
    rows = jnp.arange(full.shape[0])
    here, before = (jnp.maximum(context.length - back, 0) for back in (2, 3))
    tokens = context.tokens
    kept = jnp.where(full, tokens[rows, before], tokens[rows, here])
    return context.replace(tokens=tokens.at[rows, here].set(kept)), keys


def selecting(draft):
    """Breaks the law of `Draft.length`: a draft whose token 1 was drawn is withheld from that token on."""
    one = jnp.where(draft.tokens == 1, jnp.arange(draft.tokens.shape[1]), draft.tokens.shape[1]).min(1)
    return draft.replace(length=jnp.minimum(draft.length, one).astype(draft.length.dtype))


SQUARED = reported(lambda q: q**2 / (q**2).sum(-1, keepdims=True))
FAULTY_DRAFTS = {
    'the q of another token': (
        'tokens_follow_q',
        dict(change=reported(lambda q: jnp.roll(q, 1, -1))),
        'expected Draft.probs to be',
    ),
    'q at half the temperature': ('tokens_follow_q', dict(change=SQUARED), 'do not follow'),
    'and the texts are wrong': ('joint_distribution', dict(change=SQUARED), 'not distributed as'),
    'a length that depends on a withheld token': ('tokens_follow_q', dict(change=selecting), 'do not follow'),
    'and its texts are wrong': ('joint_distribution', dict(change=selecting), 'not distributed as'),
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
        dict(change=lambda draft: draft.replace(tokens=draft.tokens + 4)),
        'expected tokens of the vocabulary, 0 to 7, got 8, 9',
    ),
    'probabilities that sum to 0.9': (
        'shapes',
        dict(change=reported(lambda q: 0.9 * q)),
        'expected probabilities that sum to 1, got sums of 0.9',
    ),
    'and a round emits too little': (
        'closed_form',
        dict(change=reported(lambda q: 0.9 * q)),
        'q is no distribution',
    ),
    'too few tokens': (
        'shapes',
        dict(change=lambda draft: draft.replace(tokens=draft.tokens[:, 1:])),
        r'Draft.tokens: expected integer numbers of shape \[8, 1\], got int32 of shape \[8, 0\]',
    ),
    'a q of another width': (
        'shapes',
        dict(change=reported(lambda q: q[..., 1:])),
        r'Draft.probs: expected floating numbers of shape \[8, 1, 8\], got float32 of shape \[8, 1, 7\]',
    ),
    'a length above gamma': (
        'shapes',
        dict(change=lambda draft: draft.replace(length=draft.length + 1)),
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
def test_a_faulty_draft_fails_the_check_designed_for_it(fault, request):
    name, parts, message = FAULTY_DRAFTS[fault]
    use_optimised(request, name)
    sound = same if name == 'acceptance_of_1' else blurred
    result = run(name, lambda target: Faulty(sound(target), **parts))
    assert not result.passed, result.detail
    assert_detail(result, message)


def assert_detail(result, message):
    assert '\n' not in result.detail
    assert re.search(message, result.detail), result.detail


def test_a_draft_that_is_no_pytree_is_refused():
    class Bare:
        def init(self, inputs, num_slots):
            return ()

    assert_detail(
        conformance.CHECKS['shapes'](lambda target: Bare()), 'expected a pytree of arrays.* got a Bare'
    )


# --- faults of the loop -------------------------------------------------------------------------------------

EMIT, COUNT, EXACT = decoding.emit, decoding.count_round, TokenRule.__call__


def batch_minimum(self, scores, draft, keys):
    verified = EXACT(self, scores, draft, keys)
    least = jnp.broadcast_to(verified.num_accepted.min(), verified.num_accepted.shape)
    return verified.replace(num_accepted=least)


def accept_all(self, scores, draft, keys):
    return verify_greedy(jnp.concatenate([draft.tokens, scores.best[:, -1:]], axis=1), draft)


def residual_of_p(self, scores, draft, keys):
    """What replaces a rejected token comes from p, as a token after full acceptance does."""
    p = scores.p
    verified = verify_chain(p, draft, keys)
    instead = verify_chain(p, draft.replace(length=verified.num_accepted), keys, jnp.full_like(p, 2.0))
    return verified.replace(tokens=instead.tokens)


def past_eos(tokens, count, room, ends):
    """Only the last token of a block is looked at."""
    index = jnp.arange(tokens.shape[1])
    return EMIT(jnp.where(index == count[:, None] - 1, tokens, -1), count, room, ends)


def past_limit(tokens, count, room, ends):
    emitted, _ = EMIT(tokens, count, room + tokens.shape[1], ends)
    return emitted, emitted >= room


def all_tested(stats, draft, verification, emitted, called):
    counted = COUNT(stats, draft, verification, emitted, called)
    valid = jnp.arange(draft.tokens.shape[1]) < jnp.where(emitted > 0, draft.length, 0)[:, None]
    return counted.replace(tested_at=stats.tested_at + valid)


AT_ONCE = ('batch minimum', 'no residual')  # `-m slow` runs the others
FAULTY_LOOPS = {
    'batch minimum': ('uneven_batches', TokenRule, '__call__', batch_minimum, 'alone and .* in the batch'),
    'all accepted': (
        'greedy_identity',
        TokenRule,
        '__call__',
        accept_all,
        "expected the target's own output",
    ),
    'no residual': ('joint_distribution', TokenRule, '__call__', residual_of_p, 'not distributed as'),
    'past an EOS': ('eos_in_every_place', decoding, 'emit', past_eos, 'up to the first 1'),
    'past the limit': ('length_limits', decoding, 'emit', past_limit, 'limit 1: expected 1 tokens'),
    'all tested': ('honest_counts', decoding, 'count_round', all_tested, 'expected tested'),
}


@pytest.mark.parametrize(
    'fault',
    [pytest.param(fault, marks=() if fault in AT_ONCE else pytest.mark.slow) for fault in FAULTY_LOOPS],
)
def test_a_faulty_loop_fails_the_check_designed_for_it(fault, monkeypatch, request):
    name, holder, part, planted, message = FAULTY_LOOPS[fault]
    use_optimised(request, name)
    monkeypatch.setattr(holder, part, planted)
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


def test_a_check_is_described_by_its_function():
    @checked
    def sound(make):
        return '3 samples'

    assert str(sound(None)) == 'pass  sound: 3 samples'
