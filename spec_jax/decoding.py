"""Speculative decoding and plain decoding, each one compiled program.

    generate        prefill, then a while_loop of  propose -> target call -> verify -> update
    plain_generate  prefill, then a while_loop of  target call -> sample

Invariants of the loop, at the start of every round:

  * The target's cache holds all but the newest token; the newest token is the first query of the call.
  * Rows advance by what each accepted. There is no batch minimum.
  * A cache is rolled back by its length; stale slots are hidden, and overwritten by the next write.
  * Buffers have room for a full block behind the last token that can be emitted, since
    `dynamic_update_slice` clamps without a word.
  * A finished row stays as it is; the loop ends when all rows are done.
  * A row's keys come from its own key and the number of the round, so its output does not depend on its
    neighbours.

Axes: B rows, G draft length, N buffer length, V vocabulary, D model width.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax import cache as kv
from spec_jax.drafters.base import Drafter
from spec_jax.models.base import Model, last_tokens, read_block, read_window
from spec_jax.runtime import backend, processes
from spec_jax.runtime.backend import fewest_rows, jit
from spec_jax.sampling import SamplingConfig, likeliest, logits_to_probs, next_token, row_keys, split_rows
from spec_jax.types import Cache, Context, Draft, Failure, Inputs, Output, SpecState, Stats, Verification
from spec_jax.verification import (
    draw_next,
    greedy_overlap,
    lenient_bound,
    overlap,
    verify_chain,
    verify_greedy,
)

MAX_GAMMA = 16
_SUM_TOLERANCE = 1e-3  # of a draft's probabilities: far above rounding, far below what a pass would hide


def generate(
    target: Model,
    drafter: Drafter | None,
    inputs: Inputs,
    key: Array,
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    lenience: float = 1.0,
) -> Output:
    """Decodes a batch speculatively; the output is distributed as the target's own.

    Compiled once per shape of `inputs`, gamma, max_new_tokens, sampling and lenience.

    Args:
      target: the model whose text is wanted.
      drafter: guesses tokens; not looked at when gamma is 0.
      inputs: prompts; a row whose mask is empty is finished from the start.
      key: scalar PRNG key, or [B] keys, one a row (`sampling.row_keys`).
      gamma: G, draft tokens a round, 0 .. 16; 0 runs the plain program.
      max_new_tokens: most tokens of an output, EOS included.
      sampling: how logits become a distribution.
      lenience: below 1, LOSSY: draft tokens pass more easily than they should (`verification.lenient_bound`).

    Raises:
      ValueError: for an argument out of range, or a draft of wrong shapes.
      FloatingPointError: where the target gave NaN, or the draft probabilities or tokens that are none; behind
        a row's EOS or limit within the same call, too.
    """
    if not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(f'gamma: expected an integer from 0 to {MAX_GAMMA}, got {gamma}')
    if not 0 < lenience <= 1:
        raise ValueError(f'lenience: expected a number in (0, 1], got {lenience}; 1 is exact')
    if gamma == 0:
        return plain_generate(target, inputs, key, max_new_tokens=max_new_tokens, sampling=sampling)
    keys = _check(inputs, key, max_new_tokens)
    how = dict(gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling, lenience=lenience)
    return raise_on_failure(_generate(target, drafter, inputs, keys, **how))


def plain_generate(
    target: Model, inputs: Inputs, key: Array, *, max_new_tokens: int, sampling: SamplingConfig
) -> Output:
    """Decodes a batch one token a call. Arguments, errors and result as of `generate`."""
    keys = _check(inputs, key, max_new_tokens)
    return raise_on_failure(
        _plain_generate(target, inputs, keys, max_new_tokens=max_new_tokens, sampling=sampling)
    )


def speculative_loop(
    target: Model, drafter: Drafter, inputs: Inputs, keys: Array, *, gamma, max_new_tokens, sampling, lenience
) -> Output:
    """The program behind `generate`, to be traced: keys [B], one a row; the last four are static."""
    sizes = dict(gamma=gamma, max_new_tokens=max_new_tokens)
    state = prefill(target, drafter, inputs, keys, **sizes)
    body_fn = partial(speculative_step, target, drafter, **sizes, sampling=sampling, lenience=lenience)
    state = lax.while_loop(cond_fn, body_fn, state)
    return finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)


_generate = jit(speculative_loop, static_argnames=('gamma', 'max_new_tokens', 'sampling', 'lenience'))


def prefill(
    target: Model, drafter: Drafter | None, inputs: Inputs, keys: Array, *, gamma: int, max_new_tokens: int
) -> SpecState:
    """Encodes the prompts for both models and lays out the buffers."""
    batch = inputs.tokens.shape[0]
    num_slots = max_new_tokens + gamma + 1
    with jax.named_scope('prefill'):
        return SpecState(
            context=_start(target, batch, num_slots + 1),
            done=~inputs.mask.any(-1),
            failed=jnp.zeros((batch,), jnp.int32),
            round=jnp.zeros((), jnp.int32),
            keys=keys,
            target_cache=target.encode(inputs, num_slots),
            draft_state=None if drafter is None else drafter.init(inputs, num_slots),
            stats=_no_stats(batch, gamma),
        )


def cond_fn(state: SpecState) -> Array:
    """True while a row is unfinished."""
    return ~state.done.all()


def speculative_step(
    target: Model,
    drafter: Drafter,
    state: SpecState,
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    lenience: float = 1.0,
) -> SpecState:
    """One round (algorithm 1): draft G tokens, score G + 1 positions in one target call, keep what passes."""
    context = state.context
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.round))(state.keys)
    draft_keys, verify_keys = split_rows(keys, 2)

    with jax.named_scope('draft'):
        draft, draft_state = drafter.propose(
            state.draft_state, context, draft_keys, gamma, sampling, target.vocab_size
        )
        check_draft(draft, state.done.shape[0], gamma, target.vocab_size)
    judge = partial(_judge, target, sampling=sampling, lenience=lenience)
    lengths = call_lengths(drafter, state.done.shape[0], gamma)
    if len(lengths) > 1:
        judge = partial(_judge_over, lengths, judge)
    found, target_cache = judge(state.target_cache, context, draft, verify_keys)
    with jax.named_scope('verify'):
        verified, failed = found.verified, jnp.where(state.done, 0, found.failed)
        room = max_new_tokens + 1 - context.length
        emitted, ended = _emit(verified.tokens, verified.num_accepted + 1, room, target.eos_id)
        emitted = jnp.where(state.done | (failed > 0), 0, emitted)
        context = Context(
            tokens=kv.write(context.tokens, verified.tokens, context.length, axis=1),
            length=context.length + emitted,
        )
        stats = _count(state.stats, found, draft, emitted)
    with jax.named_scope('update'):
        return SpecState(
            context=context,
            done=state.done | ended | (failed > 0),
            failed=state.failed | failed,
            round=state.round + 1,
            keys=state.keys,
            target_cache=target.rollback(target_cache, context.length - 1),
            draft_state=drafter.update(draft_state, context, verified, found.hidden),
            stats=stats,
        )


def call_lengths(drafter: Drafter, batch: int, gamma: int) -> tuple[int, ...]:
    """The lengths of drafts for which there is a target call, ascending, G last; a shorter draft takes the next.

    G alone in a batch, where all rows would have to keep short, and a row's output must not depend on the others.
    """
    if batch > 1 or getattr(drafter, 'always_guesses', False):
        return (gamma,)
    return backend.call_lengths(gamma)


@flax.struct.dataclass
class _Judged:
    """What the target's call made of a draft.

    Attributes:
      verified: the verdict.
      failed: [B] int32, bits of `Failure`.
      overlap: [B, G] float32, sum of min(p, q) at the place of each draft token.
      hidden: [B, G + 1, D].
      called: scalar int32, the draft tokens that the call was over.
    """

    verified: Verification
    failed: Array
    overlap: Array
    hidden: Array
    called: Array


def _judge(
    target: Model, cache: Cache, context: Context, draft: Draft, keys: Array, *, sampling, lenience
) -> tuple[_Judged, Cache]:
    """One target call over G + 1 rows, G >= 0, and the accept/resample rule."""
    with jax.named_scope('target'):
        hidden, cache = read_block(target, cache, context, draft.tokens)
        logits = target.logits(hidden)  # [B, G + 1, V]
    num_draft = draft.tokens.shape[1]
    with jax.named_scope('verify'):
        if num_draft == 0:
            verified = draw_next(logits[:, 0], keys, sampling)
            alike, broken = jnp.zeros(draft.tokens.shape, jnp.float32), verified.tokens < 0
        elif sampling.temperature == 0 and lenience == 1:
            best = likeliest(logits, sampling)
            verified, alike = verify_greedy(best, draft), greedy_overlap(best[:, :-1], draft)
            broken = best < 0
        else:
            p = logits_to_probs(logits, sampling)
            bound = p if lenience == 1 else lenient_bound(p, logits, sampling, lenience)
            verified, alike = verify_chain(p, draft, keys, bound), overlap(bound[:, :-1], draft)
            broken = jnp.isnan(p[..., 0])  # a distribution with a NaN is NaN throughout
        failed = failures(broken.any(-1), draft, logits.shape[-1])
        return _Judged(verified, failed, alike, hidden, jnp.int32(num_draft)), cache


def _judge_over(
    lengths: tuple[int, ...], judge, cache: Cache, context: Context, draft: Draft, keys: Array
) -> tuple[_Judged, Cache]:
    """`judge` of the draft cut to the first of `lengths` that holds what is meant of it, with zeros behind.

    The choice is made by loops of which one runs, once: XLA's CPU backend copies a cache that passes through a
    conditional, and keeps one in place that passes through a loop.
    """
    arguments = context, draft, keys
    shapes, _ = jax.eval_shape(judge, cache, *arguments)
    carry = (jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes), cache), False
    num_draft, needed = draft.tokens.shape[1], draft.length.max()

    def judge_over(length, carry):
        (_, cache), done = carry
        context, draft, keys = _held_back(arguments, done)
        found, cache = judge(cache, context, _cut(draft, length), keys)
        return (_pad(found, num_draft - length), cache), True

    for length in lengths:
        due = (needed <= length) | (length == num_draft)
        carry = lax.while_loop(lambda carry, due=due: due & ~carry[1], partial(judge_over, length), carry)
    return carry[0]


def _cut(draft: Draft, length: int) -> Draft:
    """The first `length` places of a draft."""
    probs = None if draft.probs is None else draft.probs[:, :length]
    return Draft(draft.tokens[:, :length], probs, jnp.minimum(draft.length, length))


def _pad(judged: _Judged, places: int) -> _Judged:
    """With so many more places, which have no meaning."""

    def one(x):
        return jnp.pad(x, ((0, 0), (0, places), *((0, 0),) * (x.ndim - 2)))

    verified = judged.verified.replace(tokens=one(judged.verified.tokens))
    return judged.replace(verified=verified, overlap=one(judged.overlap), hidden=one(judged.hidden))


def _held_back(arguments, done: Array):
    """The arguments as they are, since a loop that carries `done` is left once it is True.

    XLA does not know that. What depends on the arguments alone, the first layer's projections among it, it would
    otherwise do before the loop, and so in rounds that do not enter it.
    """

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.where(done, jnp.zeros_like(x), x)

    return jax.tree.map(one, arguments)


@jit(static_argnames=('max_new_tokens', 'sampling'))
def _plain_generate(target, inputs, keys, *, max_new_tokens, sampling) -> Output:
    state = start_plain(target, inputs, keys, max_new_tokens=max_new_tokens)
    body_fn = partial(plain_step, target, max_new_tokens=max_new_tokens, sampling=sampling)
    state = lax.while_loop(cond_fn, body_fn, state)
    return finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)


def start_plain(target: Model, inputs: Inputs, keys: Array, *, max_new_tokens: int) -> SpecState:
    """`prefill` without a draft, with the room that `read_window` needs."""
    state = prefill(target, None, inputs, keys, gamma=1, max_new_tokens=max_new_tokens)
    return state.replace(stats=_no_stats(inputs.tokens.shape[0], 0))


def plain_step(
    target: Model, state: SpecState, *, max_new_tokens: int, sampling: SamplingConfig
) -> SpecState:
    """One token a row.

    At batch 1 each call reads the last two tokens where a product with two rows is faster than one with a single
    row (`backend.fewest_rows`).
    """
    context = state.context
    window = fewest_rows() if context.length.shape[0] == 1 else 1
    with jax.named_scope('target'):
        logits, target_cache = read_window(
            target, state.target_cache, last_tokens(context, window), context.length - 1
        )
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.round))(state.keys)
    token = next_token(keys, logits, sampling)[:, None]

    failed = jnp.where((token[:, 0] < 0) & ~state.done, Failure.TARGET.value, 0)
    room = max_new_tokens + 1 - context.length
    emitted, ended = _emit(token, jnp.ones_like(room), room, target.eos_id)
    emitted = jnp.where(state.done | (failed > 0), 0, emitted)
    active = emitted > 0
    context = Context(kv.write(context.tokens, token, context.length, axis=1), context.length + emitted)
    return state.replace(
        context=context,
        done=state.done | ended | (failed > 0),
        failed=state.failed | failed,
        round=state.round + 1,
        target_cache=target_cache,
        stats=state.stats.replace(
            rounds=state.stats.rounds + active,
            histogram=state.stats.histogram + active[:, None],
            emitted=state.stats.emitted + emitted,
            calls=state.stats.calls + active[:, None],
        ),
    )


def finish(context: Context, failed: Array, stats: Stats, max_new_tokens: int, pad_id: int) -> Output:
    """Drops the start token and pads behind each row's end."""
    tokens = context.tokens[:, 1 : max_new_tokens + 1]
    length = context.length - 1
    tokens = jnp.where(jnp.arange(max_new_tokens) < length[:, None], tokens, pad_id)
    return Output(tokens, length, failed, stats)


def _emit(tokens: Array, count: Array, room: Array, eos_id: int) -> tuple[Array, Array]:
    """How many of the first `count` [B] tokens [B, T] are emitted: up to an EOS, and no more than `room` [B].

    Returns:
      The number [B], and whether the row has ended with them [B].
    """
    index = jnp.arange(tokens.shape[1])
    first_eos = jnp.where(tokens == eos_id, index, tokens.shape[1]).min(-1)
    emitted = jnp.minimum(jnp.minimum(count, first_eos + 1), room)
    return emitted, (first_eos < emitted) | (emitted == room)


def failures(broken: Array, draft: Draft, vocab_size: int) -> Array:
    """[B] int32, bits of `Failure`; broken [B] says where the target gave NaN."""
    meant = jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]
    outside = (draft.tokens < 0) | (draft.tokens >= vocab_size)
    found = {
        Failure.TARGET: broken,
        Failure.DRAFT_TOKEN: (outside & meant).any(-1),
    }
    if draft.probs is not None:
        sound = jnp.abs(draft.probs.sum(-1) - 1) < _SUM_TOLERANCE  # so NaN is not
        found[Failure.DRAFT_PROBS] = (~sound & meant).any(-1)
    return sum(jnp.where(rows, kind.value, 0) for kind, rows in found.items())


def _count(stats: Stats, found: _Judged, draft: Draft, emitted: Array) -> Stats:
    """Adds one round; what stands behind an EOS or the limit was not tested and is not counted."""
    active = emitted > 0
    tested = jnp.minimum(emitted, draft.length)
    accepted = jnp.minimum(emitted, found.verified.num_accepted)
    counted = jnp.arange(draft.tokens.shape[1]) < tested[:, None]
    bins = jnp.arange(stats.histogram.shape[1])
    return Stats(
        rounds=stats.rounds + active,
        tested_at=stats.tested_at + counted,
        accepted=stats.accepted + accepted,
        histogram=stats.histogram + ((bins == accepted[:, None]) & active[:, None]),
        overlap=stats.overlap + jnp.where(counted, found.overlap, 0.0).sum(-1),
        emitted=stats.emitted + emitted,
        calls=stats.calls + ((bins == found.called) & active[:, None]),
    )


def _start(target: Model, batch: int, size: int) -> Context:
    tokens = jnp.full((batch, size), target.pad_id, jnp.int32).at[:, 0].set(target.start_id)
    return Context(tokens, jnp.ones((batch,), jnp.int32))


def _no_stats(batch: int, gamma: int) -> Stats:
    zero = jnp.zeros((batch,), jnp.int32)
    return Stats(
        rounds=zero,
        tested_at=jnp.zeros((batch, gamma), jnp.int32),
        accepted=zero,
        histogram=jnp.zeros((batch, gamma + 1), jnp.int32),
        overlap=jnp.zeros((batch,), jnp.float32),
        emitted=zero,
        calls=jnp.zeros((batch, gamma + 1), jnp.int32),
    )


def _check(inputs: Inputs, key: Array, max_new_tokens: int) -> Array:
    if max_new_tokens < 1:
        raise ValueError(f'max_new_tokens: expected an integer >= 1, got {max_new_tokens}')
    batch = inputs.tokens.shape[0]
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f'key: expected a key of jax.random.key, got an array of {key.dtype}; '
            'jax.random.wrap_key_data makes one of an old key'
        )
    if key.ndim == 0:
        return row_keys(key, np.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f'key: expected a scalar key or one for each of {batch} rows, got shape {key.shape}')
    return key


def check_draft(draft: Draft, batch: int, gamma: int, vocab_size: int) -> None:
    """Raises ValueError, as the loop is traced, for a draft of wrong shapes or kinds of numbers."""
    expected = dict(tokens=(jnp.integer, (batch, gamma)), length=(jnp.integer, (batch,)))
    if draft.probs is not None:
        expected['probs'] = (jnp.floating, (batch, gamma, vocab_size))
    for name, (kind, shape) in expected.items():
        array = jnp.asarray(getattr(draft, name))
        if array.shape != shape or not jnp.issubdtype(array.dtype, kind):
            raise ValueError(
                f'Draft.{name}: expected {kind.__name__} numbers of shape {list(shape)}, got {array.dtype} of '
                f"shape {list(array.shape)}; see the drafter's propose"
            )


_FAILURES = {
    Failure.TARGET: 'expected finite logits from the target, got NaN or inf; check the weights (a T5 overflows in '
    'float16: use bfloat16 or float32)',
    Failure.DRAFT_PROBS: 'expected probabilities that sum to 1 from the draft, got others or NaN; check its '
    'weights, and that it passes its logits through logits_to_probs',
    Failure.DRAFT_TOKEN: 'expected tokens of the vocabulary from the draft, got others, or none for '
    'NaN among its logits; check its weights and what it proposes',
}


def raise_on_failure(output):
    """Gives back what has a `failed` [B] of 0 in every row, such as an `Output`; else raises FloatingPointError.

    Of several processes, each gets all rows.
    """
    output = processes.whole(output)
    failed = np.asarray(output.failed)
    for kind, message in _FAILURES.items():
        rows = np.flatnonzero(failed & kind.value)
        if rows.size:
            raise FloatingPointError(f'rows {rows.tolist()[:8]}: {message}')
    return output
