"""scripts/verify.py with a fault planted in its pair: --fault=NAME, one of `FAULTS`.

A fault is a function of the pair: it gives the loop another rule, another draft or another target, or the module
`decoding` another emission or another count.

Axes: B rows, G draft length, V vocabulary.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from functools import partial

import flax.struct
import jax.numpy as jnp
from absl import flags

from spec_jax import decoding
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter
from spec_jax.run import cli, report
from spec_jax.sampling import sample, split_rows
from spec_jax.testing import ModelWrapper
from spec_jax.verification import Scores, TokenRule, residual_distribution, verify_chain, verify_greedy

_FAULT = flags.DEFINE_string('fault', '', 'Name of the fault; empty for none.')
_path = pathlib.Path(__file__).parents[2] / 'scripts' / 'verify.py'
_spec = importlib.util.spec_from_file_location('verify', _path)
verify = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verify)


# --- faults of a draft ----------------------------------------------------------------------------------------


@flax.struct.dataclass
class FaultyDrafter:
    """A sound drafter, of whose drafts the loop is given something else."""

    drafter: Drafter
    change: Callable = flax.struct.field(pytree_node=False)

    def shape(self, gamma):
        return self.drafter.shape(gamma)

    def init(self, *args):
        return self.drafter.init(*args)

    def propose(self, state, round):
        draft, state = self.drafter.propose(state, round)
        return self.change(draft), state

    def update(self, state, outcome):
        return self.drafter.update(state, outcome)


def reported(change):
    """The loop gets another q than the tokens were drawn from; a greedy draft has none."""

    def changed(draft):
        return draft if draft.probs is None else draft.replace(probs=change(draft.probs))

    return lambda pair: dataclasses.replace(pair, drafter=FaultyDrafter(pair.drafter, changed))


def length_by_a_withheld_token(pair):
    """Breaks the law of `Draft.length`: a draft is cut before its first token of an odd id."""

    def cut(draft):
        odd = jnp.where(draft.tokens % 2 == 1, jnp.arange(draft.tokens.shape[1]), draft.tokens.shape[1])
        return draft.replace(length=jnp.minimum(draft.length, odd.min(1).astype(jnp.int32)))

    return dataclasses.replace(pair, drafter=FaultyDrafter(pair.drafter, cut))


class OffByOne(ModelDrafter):
    """Reads the newest token twice, in place of the last two."""

    def propose(self, state, round):
        context, row = round.context, jnp.arange(len(round.context.length))
        newest = context.tokens[row, context.length - 1]
        tokens = context.tokens.at[row, jnp.maximum(context.length - 2, 0)].set(newest)
        return super().propose(state, round.replace(context=context.replace(tokens=tokens)))


def draft_off_by_one(pair):
    return dataclasses.replace(pair, drafter=flax.struct.dataclass(OffByOne)(pair.drafter.model))


# --- faults of the rule ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FaultyRule(TokenRule):
    """The exact rule, but for sampled tokens, or for greedy ones."""

    sampled: Callable = verify_chain  # (p, draft, keys) -> Verification
    greedy: Callable = verify_greedy  # (best, draft) -> Verification

    def __call__(self, scores, draft, keys):
        if scores.greedy:
            return self.greedy(scores.best, draft)
        return self.sampled(scores.p, draft, keys)


@dataclasses.dataclass(frozen=True)
class BatchMinimum(TokenRule):
    """A row advances by no more than its neighbour accepts."""

    def __call__(self, scores, draft, keys):
        verified = super().__call__(scores, draft, keys)
        accepted = verified.num_accepted
        return verified.replace(num_accepted=jnp.minimum(accepted, jnp.roll(accepted, 1)))


@dataclasses.dataclass(frozen=True)
class SharedKeys(TokenRule):
    """All rows take the random numbers of the first."""

    def __call__(self, scores: Scores, draft, keys):
        return super().__call__(scores, draft, jnp.broadcast_to(keys[:1], keys.shape))


def by_rule(rule):
    return lambda pair: dataclasses.replace(pair, settings=pair.settings.decoding(rule=rule))


def epsilon_in_the_residual(p, draft, keys):
    return verify_chain(p + 1e-5, draft, keys, bound=p)


def accepts_at_equality(p, draft, keys):
    return verify_chain(p, draft, keys, bound=p + 1e-30)


def accepts_too_easily(p, draft, keys):
    return verify_chain(p, draft, keys, bound=1.0001 * p)


def with_acceptances(p, draft, keys, num_accepted):
    """The verdict on a draft of which so many tokens pass, by the exact rule's last random number."""
    sure = verify_chain(p, draft.replace(length=num_accepted), keys, bound=jnp.full_like(p, 2.0))
    tokens = jnp.where(num_accepted[:, None] > jnp.arange(p.shape[1]), sure.tokens, 0)
    at = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)[:, None, None]
    q = draft.probs
    if q is None:
        q = (jnp.arange(p.shape[-1]) == draft.tokens[..., None]).astype(jnp.float32)
    q = jnp.take_along_axis(q, at, axis=1)[:, 0]
    p = jnp.take_along_axis(p, num_accepted[:, None, None], axis=1)[:, 0]
    residual = jnp.where((num_accepted < draft.length)[:, None], residual_distribution(p, q), p)
    following = sample(split_rows(keys, 2)[1], residual)
    tokens = jnp.where(num_accepted[:, None] == jnp.arange(tokens.shape[1]), following[:, None], tokens)
    return sure.replace(num_accepted=num_accepted, tokens=tokens)


def one_number_for_all_tests(p, draft, keys):
    alone = [
        verify_chain(
            p[:, i : i + 2],
            draft.replace(
                tokens=draft.tokens[:, i : i + 1],
                probs=None if draft.probs is None else draft.probs[:, i : i + 1],
                length=(draft.length > i).astype(jnp.int32),
            ),
            keys,
        ).num_accepted
        for i in range(draft.tokens.shape[1])
    ]
    return with_acceptances(p, draft, keys, jnp.cumprod(jnp.stack(alone), axis=0).sum(0))


def bonus_from_the_last_residual(p, draft, keys):
    num_accepted = verify_chain(p, draft, keys).num_accepted
    return with_acceptances(p, draft.replace(length=draft.length + 1), keys, num_accepted)


def any_token_passes(best, draft):
    tokens = jnp.concatenate([draft.tokens, best[:, -1:]], axis=1)
    return verify_greedy(tokens, draft)


# --- faults of the loop ---------------------------------------------------------------------------------------


@flax.struct.dataclass
class StaleSlot(ModelWrapper):
    """Its cache keeps one token more than it is asked to."""

    def keep(self, cache, nodes, length):
        return self.model.keep(cache, nodes, length + 1)


def stale_slot(pair):
    return dataclasses.replace(pair, target=StaleSlot(pair.target))


def in_decoding(name, change):
    """Puts `change(sound)` in the place of a function of the loop."""

    def plant(pair):
        setattr(decoding, name, change(getattr(decoding, name)))
        return pair

    return plant


def tokens_after_eos(emit, tokens, count, room, ends):
    """One token more than up to the EOS, if there is one."""
    emitted, ended = emit(tokens, count, room, ends)
    return jnp.where(ended, jnp.minimum(jnp.minimum(emitted + 1, count), room), emitted), ended


def counts_what_was_not_tested(count_round, stats, draft, verification, emitted, called):
    counted = count_round(stats, draft, verification, emitted, called)
    valid = jnp.arange(stats.tested_at.shape[1]) < jnp.where(emitted > 0, draft.length, 0)[:, None]
    return counted.replace(tested_at=stats.tested_at + valid)


FAULTS = {
    'q of other logits': reported(lambda q: q[..., ::-1]),
    'q at another temperature': reported(lambda q: q**2 / (q**2).sum(-1, keepdims=True)),
    'q does not sum to 1': reported(lambda q: 0.9 * q),
    'a length that depends on a withheld token': length_by_a_withheld_token,
    'draft off the cache by one': draft_off_by_one,
    'epsilon in the residual': by_rule(FaultyRule(sampled=epsilon_in_the_residual)),
    'accepts at equality': by_rule(FaultyRule(sampled=accepts_at_equality)),
    'accepts too easily': by_rule(FaultyRule(sampled=accepts_too_easily)),
    'one number for all tests': by_rule(FaultyRule(sampled=one_number_for_all_tests)),
    'greedy, any token passes': by_rule(FaultyRule(greedy=any_token_passes)),
    'bonus from the last residual': by_rule(FaultyRule(sampled=bonus_from_the_last_residual)),
    'batch minimum': by_rule(BatchMinimum()),
    'keys shared between rows': by_rule(SharedKeys()),
    'stale slot in the target cache': stale_slot,
    'tokens after EOS': in_decoding('emit', lambda emit: partial(tokens_after_eos, emit)),
    'counts what was not tested': in_decoding(
        'count_round', lambda count: partial(counts_what_was_not_tested, count)
    ),
}


def main(_):
    change = FAULTS.get(_FAULT.value, lambda pair: pair)
    verify.verify(verify._CONFIG.value, report.make_workdir(verify._WORKDIR.value), change)


if __name__ == '__main__':
    cli.run(main)
