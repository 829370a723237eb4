"""Speculative decoding and plain decoding, each one compiled program.

    generate        prefill, then a while_loop of  propose -> target call -> verify -> update
    plain_generate  prefill, then a while_loop of  target call -> sample

Invariants of the loop, at the start of every round:

  * The target's cache holds all but the newest token; the newest token is the first query of the call.
  * Rows advance by what each accepted. There is no batch minimum.
  * A cache is rolled back by its length; stale slots are hidden, and overwritten by the next write.
  * Buffers have room for a full draft behind the last token that can be emitted, since
    `dynamic_update_slice` clamps without a word.
  * A finished row stays as it is; the loop ends when all rows are done.
  * A row's keys come from its own key and the number of the round, so its output does not depend on its
    neighbours.

Axes: B rows, G draft length, N buffer length, V vocabulary, D model width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax import cache as kv
from spec_jax.drafters.base import Drafter
from spec_jax.models.base import Model, last_tokens, read_window
from spec_jax.sampling import SamplingConfig, logits_to_probs, row_keys, sample, split_rows
from spec_jax.types import Context, Draft, Inputs, Output, SpecState, Stats
from spec_jax.verification import acceptance_probability, at_token, verify_chain

MAX_GAMMA = 16


def generate(
    target: Model,
    drafter: Drafter | None,
    inputs: Inputs,
    key: Array,
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Output:
    """Decodes a batch speculatively; the output is distributed as the target's own.

    Compiled once per shape of `inputs`, gamma, max_new_tokens and sampling.

    Args:
      target: the model whose text is wanted.
      drafter: guesses tokens; not looked at when gamma is 0.
      inputs: prompts; a row whose mask is empty is finished from the start.
      key: scalar PRNG key, or [B] keys, one a row (`sampling.row_keys`).
      gamma: G, draft tokens a round, 0 .. 16; 0 runs the plain program.
      max_new_tokens: most tokens of an output, EOS included.
      sampling: how logits become a distribution.

    Raises:
      ValueError: for gamma or max_new_tokens out of range.
      FloatingPointError: where the target or the draft gave NaN.
    """
    if not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(f'gamma: expected an integer from 0 to {MAX_GAMMA}, got {gamma}')
    if gamma == 0:
        return plain_generate(target, inputs, key, max_new_tokens=max_new_tokens, sampling=sampling)
    keys = _check(inputs, key, max_new_tokens)
    output = _generate(
        target, drafter, inputs, keys, gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling
    )
    return _raise_on_nan(output)


def plain_generate(
    target: Model, inputs: Inputs, key: Array, *, max_new_tokens: int, sampling: SamplingConfig
) -> Output:
    """Decodes a batch one token a call. Arguments, errors and result as of `generate`."""
    keys = _check(inputs, key, max_new_tokens)
    return _raise_on_nan(
        _plain_generate(target, inputs, keys, max_new_tokens=max_new_tokens, sampling=sampling)
    )


@partial(jax.jit, static_argnames=('gamma', 'max_new_tokens', 'sampling'))
def _generate(target, drafter, inputs, keys, *, gamma, max_new_tokens, sampling) -> Output:
    state = prefill(target, drafter, inputs, keys, gamma=gamma, max_new_tokens=max_new_tokens)
    body_fn = partial(
        speculative_step, target, drafter, gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling
    )
    state = lax.while_loop(cond_fn, body_fn, state)
    return finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)


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
            failed=jnp.zeros((batch,), bool),
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
) -> SpecState:
    """One round (algorithm 1): draft G tokens, score G + 1 positions in one target call, keep what passes."""
    context = state.context
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.round))(state.keys)
    draft_keys, verify_keys = split_rows(keys, 2)

    with jax.named_scope('draft'):
        draft, draft_state = drafter.propose(
            state.draft_state, context, draft_keys, gamma, sampling, target.vocab_size
        )
    with jax.named_scope('target'):
        newest = context.length[:, None] - 1
        block = jnp.concatenate([jnp.take_along_axis(context.tokens, newest, axis=1), draft.tokens], axis=1)
        positions = newest + jnp.arange(gamma + 1)
        hidden, target_cache = target.decode(block, positions, state.target_cache)
        p = logits_to_probs(target.logits(hidden), sampling)  # [B, G + 1, V]
    with jax.named_scope('verify'):
        verified = verify_chain(p, draft, verify_keys)
        broken = _has_nan(p, draft) & ~state.done
        room = max_new_tokens + 1 - context.length
        emitted, ended = _emit(verified.tokens, verified.num_accepted + 1, room, target.eos_id)
        emitted = jnp.where(state.done | broken, 0, emitted)
        context = Context(
            tokens=kv.write(context.tokens, verified.tokens, context.length, axis=1),
            length=context.length + emitted,
        )
        stats = _count(state.stats, p, draft, verified.num_accepted, emitted)
    with jax.named_scope('update'):
        return SpecState(
            context=context,
            done=state.done | ended | broken,
            failed=state.failed | broken,
            round=state.round + 1,
            keys=state.keys,
            target_cache=target.rollback(target_cache, context.length - 1),
            draft_state=drafter.update(draft_state, context, verified, hidden),
            stats=stats,
        )


@partial(jax.jit, static_argnames=('max_new_tokens', 'sampling'))
def _plain_generate(target, inputs, keys, *, max_new_tokens, sampling) -> Output:
    state = start_plain(target, inputs, keys, max_new_tokens=max_new_tokens)
    body_fn = partial(plain_step, target, max_new_tokens=max_new_tokens, sampling=sampling)
    state = lax.while_loop(cond_fn, body_fn, state)
    return finish(state.context, state.failed, state.stats, max_new_tokens, target.pad_id)


def start_plain(target: Model, inputs: Inputs, keys: Array, *, max_new_tokens: int) -> SpecState:
    """`prefill` without a draft, with the room that `read_window` needs."""
    return prefill(target, None, inputs, keys, gamma=1, max_new_tokens=max_new_tokens)


def plain_step(
    target: Model, state: SpecState, *, max_new_tokens: int, sampling: SamplingConfig
) -> SpecState:
    """One token a row.

    At batch 1 each call reads the last two tokens: a product with a single row is slower than one with two on
    TPU (it leaves the matrix unit) and on CPU alike.
    """
    context = state.context
    window = 2 if context.length.shape[0] == 1 else 1
    logits, target_cache = read_window(
        target, state.target_cache, last_tokens(context, window), context.length - 1
    )
    p = logits_to_probs(logits, sampling)  # [B, V]
    token = sample(jax.vmap(lambda key: jax.random.fold_in(key, state.round))(state.keys), p)[:, None]

    broken = jnp.isnan(p[:, 0]) & ~state.done
    room = max_new_tokens + 1 - context.length
    emitted, ended = _emit(token, jnp.ones_like(room), room, target.eos_id)
    emitted = jnp.where(state.done | broken, 0, emitted)
    context = Context(kv.write(context.tokens, token, context.length, axis=1), context.length + emitted)
    return state.replace(
        context=context,
        done=state.done | ended | broken,
        failed=state.failed | broken,
        round=state.round + 1,
        target_cache=target_cache,
        stats=state.stats.replace(
            rounds=state.stats.rounds + (emitted > 0), emitted=state.stats.emitted + emitted
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


def _has_nan(p: Array, draft: Draft) -> Array:
    """[B]; a distribution with a NaN is NaN throughout, so one entry tells."""
    broken = jnp.isnan(p[..., 0]).any(-1)
    return broken if draft.probs is None else broken | jnp.isnan(draft.probs[..., 0]).any(-1)


def _count(stats: Stats, p: Array, draft: Draft, num_accepted: Array, emitted: Array) -> Stats:
    """Adds one round; what stands behind an EOS or the limit was not tested and is not counted."""
    active = emitted > 0
    tested = jnp.minimum(emitted, draft.length)
    accepted = jnp.minimum(emitted, num_accepted)
    if draft.probs is None:
        overlap = at_token(p[:, :-1], draft.tokens)
    else:
        overlap = acceptance_probability(p[:, :-1], draft.probs)
    counted = jnp.arange(draft.tokens.shape[1]) < tested[:, None]
    bins = jnp.arange(stats.histogram.shape[1]) == accepted[:, None]
    return Stats(
        rounds=stats.rounds + active,
        tested=stats.tested + tested,
        accepted=stats.accepted + accepted,
        histogram=stats.histogram + (bins & active[:, None]),
        overlap=stats.overlap + jnp.where(counted, overlap, 0.0).sum(-1),
        emitted=stats.emitted + emitted,
    )


def _start(target: Model, batch: int, size: int) -> Context:
    tokens = jnp.full((batch, size), target.pad_id, jnp.int32).at[:, 0].set(target.start_id)
    return Context(tokens, jnp.ones((batch,), jnp.int32))


def _no_stats(batch: int, gamma: int) -> Stats:
    zero = jnp.zeros((batch,), jnp.int32)
    return Stats(
        rounds=zero,
        tested=zero,
        accepted=zero,
        histogram=jnp.zeros((batch, gamma + 1), jnp.int32),
        overlap=jnp.zeros((batch,), jnp.float32),
        emitted=zero,
    )


def _check(inputs: Inputs, key: Array, max_new_tokens: int) -> Array:
    if max_new_tokens < 1:
        raise ValueError(f'max_new_tokens: expected an integer >= 1, got {max_new_tokens}')
    batch = inputs.tokens.shape[0]
    if key.ndim == 0:
        return row_keys(key, np.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f'key: expected a scalar key or one for each of {batch} rows, got shape {key.shape}')
    return key


def _raise_on_nan(output: Output) -> Output:
    rows = np.flatnonzero(np.asarray(output.failed))
    if rows.size:
        raise FloatingPointError(
            f'rows {rows.tolist()[:8]}: expected finite logits, got NaN from the target or the draft; '
            'check the weights (a T5 overflows in float16; use bfloat16 or float32)'
        )
    return output
