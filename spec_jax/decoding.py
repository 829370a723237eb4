"""Speculative decoding as one compiled program; plain decoding is the same program with an empty draft.

    generate = start, then a while_loop of speculative_step, then finish

    speculative_step    propose -> target_call -> rule -> emit -> advance

Invariants, at the start of every round:

  * The target's cache holds all but the newest token; the newest token is the first query of the call.
  * Rows advance by what each accepted. There is no batch minimum.
  * A cache is rolled back by its length; stale slots are hidden, and overwritten by the next write.
  * Buffers have room for a full block after the last token that can be emitted, since
    `dynamic_update_slice` clamps without a word.
  * A finished row stays as it is; the loop ends when all rows are done.
  * A row's keys come from its own key and its own count of rounds, so its output depends neither on its
    neighbours nor on when it was admitted.

Axes: B rows, G draft depth, N nodes of a draft, P width of the token buffer, V vocabulary, D model width,
F feature width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.drafters.base import Drafter, NoDrafter, Outcome, Round
from spec_jax.failures import check_draft, failures, raise_on_failure
from spec_jax.models.base import Model, draft_block
from spec_jax.runtime import backend
from spec_jax.runtime.rows import call_over_fewest
from spec_jax.runtime.updates import write
from spec_jax.sampling import SamplingConfig, row_keys, split_rows
from spec_jax.stats import Stats, count_round
from spec_jax.types import Cache, Context, Draft, Inputs, Output, SpecState, Verification
from spec_jax.verification import Rule, Scores, TokenRule

MAX_GAMMA = 16


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How to decode; hashable, a static argument of the compiled loop.

    Attributes:
      gamma: G, draft depth, 0 .. 16; 0 decodes plainly.
      max_new_tokens: most tokens of an output, EOS included.
      sampling: how logits become a distribution.
      rule: which draft tokens stay.
      stop: ids that end an output beside the model's own `eos_ids`.

    Raises:
      ValueError: for a value out of range.
    """

    gamma: int
    max_new_tokens: int
    sampling: SamplingConfig = SamplingConfig()
    rule: Rule = TokenRule()
    stop: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f'gamma: expected an integer from 0 to {MAX_GAMMA}, got {self.gamma}')
        if self.max_new_tokens < 1:
            raise ValueError(f'max_new_tokens: expected an integer >= 1, got {self.max_new_tokens}')


# --- whole texts --------------------------------------------------------------------------------------------


def generate(
    target: Model,
    drafter: Drafter | None,
    inputs: Inputs,
    key: Array,
    config: DecodeConfig,
    *,
    limits: Array | None = None,
    on_failure: str = 'raise',
) -> Output:
    """Decodes a batch speculatively; the output is distributed as the target's own.

    Compiled once per shape of `inputs` and `config`. Within a program of your own use `speculative_loop`.

    Args:
      target: the model whose text is wanted.
      drafter: guesses tokens; with None or a gamma of 0 the text is decoded plainly.
      inputs: prompts; a row whose mask is empty is finished from the start.
      key: scalar PRNG key, or [B] keys, one a row (`sampling.row_keys`).
      config: how.
      limits: [B] int, most tokens of each row, where some are to be shorter than `config.max_new_tokens`.
      on_failure: 'return' gives rows that failed as they are, with bits of `failures.Failure` in `Output.failed`.

    Raises:
      ValueError: for an argument out of range, or a draft of wrong shapes.
      FloatingPointError: where the target gave NaN, or the draft probabilities or tokens that are none, after a
        row's EOS or limit within the same call, too; unless on_failure is 'return'.
    """
    drafter, config, keys, limits = _checked(drafter, inputs, key, config, limits, on_failure)
    output = _generate(target, drafter, inputs, keys, limits, config=config)
    return raise_on_failure(output) if on_failure == 'raise' else output


def plain_generate(target: Model, inputs: Inputs, key: Array, config: DecodeConfig, **options) -> Output:
    """Decodes a batch one token a call. Arguments, errors and result as of `generate`."""
    return generate(target, None, inputs, key, config, **options)


def stream(
    target: Model,
    drafter: Drafter | None,
    inputs: Inputs,
    key: Array,
    config: DecodeConfig,
    *,
    rounds: int = 1,
    limits: Array | None = None,
    on_failure: str = 'raise',
) -> Iterator[list[np.ndarray]]:
    """Yields the tokens that are new in each row, int32 arrays, after every so many rounds.

    Joined, a row's are those of `generate`, whose arguments and errors these are; an error comes where it occurs.
    """
    drafter, config, keys, limits = _checked(drafter, inputs, key, config, limits, on_failure)
    if rounds < 1:
        raise ValueError(f'rounds: expected an integer >= 1, got {rounds}')
    state = _start(target, drafter, inputs, keys, limits, config=config)
    end = np.asarray(state.context.start)
    while not np.asarray(state.done).all():
        state = _advance(target, drafter, state, config=config, rounds=rounds)
        if on_failure == 'raise':
            raise_on_failure(state)
        begin, end, tokens = end, np.asarray(state.context.length), np.asarray(state.context.tokens)
        yield [row[slice(*ends)] for row, *ends in zip(tokens, begin, end, strict=True)]


def speculative_loop(
    target: Model, drafter: Drafter, inputs: Inputs, keys: Array, limits: Array | None = None, *, config
) -> Output:
    """The program behind `generate`, to be traced; arguments as of `start`."""
    state = start(target, drafter, inputs, keys, limits, config=config)
    step = partial(speculative_step, target, drafter, config=config)
    return finish(target, lax.while_loop(unfinished, step, state), config=config)


# --- the parts, each of which can be traced within a program of your own ------------------------------------


def start(
    target: Model,
    drafter: Drafter,
    inputs: Inputs,
    keys: Array,
    limits: Array | None = None,
    *,
    config: DecodeConfig,
) -> SpecState:
    """Reads the prompts and lays out the buffers.

    Args:
      target: the model.
      drafter: the draft; `NoDrafter()` for plain decoding.
      inputs: prompts of B rows.
      keys: [B] PRNG keys.
      limits: [B] int32, at most `config.max_new_tokens`, which is what None stands for.
      config: how, static.
    """
    batch, shape = inputs.tokens.shape[0], drafter.shape(config.gamma)
    num_slots = config.max_new_tokens + shape.nodes + 1
    if limits is None:
        limits = jnp.full((batch,), config.max_new_tokens, jnp.int32)
    with jax.named_scope('prefill'):
        prefill = target.prefill(inputs, num_slots)
        return SpecState(
            context=prefill.context,
            done=~inputs.mask.any(-1) | (limits < 1),
            failed=jnp.zeros((batch,), jnp.int32),
            limit=limits,
            keys=keys,
            target_cache=prefill.cache,
            draft_state=drafter.init(target, prefill, inputs, num_slots),
            stats=Stats.zero(batch, shape.depth, shape.nodes),
        )


def unfinished(state: SpecState) -> Array:
    """True while there is a row that is not done."""
    return ~state.done.all()


def speculative_step(target: Model, drafter: Drafter, state: SpecState, *, config: DecodeConfig) -> SpecState:
    """One round (algorithm 1): draft G tokens, score N + 1 positions in one target call, keep what passes."""
    draft_keys, rule_keys = round_keys(state)
    with jax.named_scope('draft'):
        draft, draft_state = propose(target, drafter, state, draft_keys, config=config)
    call = partial(verified_call, target, config)
    lengths = call_lengths(drafter, len(state.done), config.gamma)
    needed, arguments = draft.length.max(), (state.context, draft, rule_keys)
    verified, cache = call_over_fewest(call, lengths, needed, state.target_cache, arguments)

    with jax.named_scope('verify'):
        verification = verified.verification
        failed = jnp.where(state.done, 0, verified.failed)
        room, ends = state.limit - state.context.emitted, (*target.spec.eos_ids, *config.stop)
        emitted, ended = emit(verification.tokens, verification.num_accepted + 1, room, ends)
        emitted = jnp.where(state.done | (failed > 0), 0, emitted)
        stats = count_round(
            state.stats,
            proposed=depth(draft),
            accepted=verification.num_accepted,
            emitted=emitted,
            beta=verification.beta,
            called=verified.called,
        )
        state = state.replace(
            done=state.done | ended | (failed > 0), failed=state.failed | failed, stats=stats
        )
    state = state.replace(target_cache=cache, draft_state=draft_state)
    return advance(target, drafter, state, draft, verified, emitted)


def round_keys(state: SpecState) -> Array:
    """[2, B] PRNG keys of this round, for the draft and for the rule."""
    return split_rows(jax.vmap(jax.random.fold_in)(state.keys, state.stats.rounds), 2)


def propose(target: Model, drafter: Drafter, state: SpecState, keys: Array, *, config: DecodeConfig):
    """The drafter's proposal, of checked shapes, and its state."""
    shape, vocab_size = drafter.shape(config.gamma), target.spec.vocab_size
    round = Round(state.context, keys, config.gamma, config.sampling, vocab_size)
    draft, draft_state = drafter.propose(state.draft_state, round)
    check_draft(draft, len(state.done), shape.nodes, vocab_size)
    return draft, draft_state


def call_lengths(drafter: Drafter, batch: int, gamma: int) -> tuple[int, ...]:
    """The lengths of drafts for which a round has a target call, ascending; a shorter draft takes the next."""
    shape = drafter.shape(gamma)
    return backend.call_lengths(shape.nodes) if batch == 1 and shape.may_be_empty else (shape.nodes,)


def target_call(
    target: Model, cache: Cache, context: Context, draft: Draft
) -> tuple[Array, Array, Array | None, Cache]:
    """Reads the newest token and a draft: logits [B, N + 1, V], hidden [B, N + 1, D], features, and the cache."""
    with jax.named_scope('target'):
        rows = draft.tokens.shape[1] + 1
        block = draft_block(context, draft, width=max(1, 1 + backend.fewest_rows(len(context.length)) - rows))
        if block.tokens.shape[1] > rows:
            cache = target.keep(cache, None, block.positions[:, 0])
        hidden, features, cache = target.decode(block, cache)
        logits = target.logits(hidden)
        return *jax.tree.map(lambda x: x[:, -rows:], (logits, hidden, features)), cache


@flax.struct.dataclass
class Verified:
    """What a target call made of a draft.

    Attributes:
      verification: the rule's verdict.
      failed: [B] int32, bits of `Failure`.
      hidden: [B, N + 1, D].
      features: [B, N + 1, F] or None.
      called: scalar int32, the draft tokens that the call was over.
    """

    verification: Verification
    failed: Array
    hidden: Array
    features: Array | None
    called: Array


def verified_call(
    target: Model, config: DecodeConfig, nodes: int, cache: Cache, context: Context, draft: Draft, keys: Array
) -> tuple[Verified, Cache]:
    """A target call over the first `nodes` tokens of a draft, and the rule's verdict; and the cache."""
    draft = draft.first(nodes)
    logits, hidden, features, cache = target_call(target, cache, context, draft)
    with jax.named_scope('verify'):
        scores = Scores(logits, config.sampling)
        verification = config.rule(scores, draft, keys)
        failed = failures(scores.invalid, draft, logits.shape[-1])
        return Verified(verification, failed, hidden, features, jnp.int32(nodes)), cache


def emit(tokens: Array, count: Array, room: Array, ends: tuple[int, ...]) -> tuple[Array, Array]:
    """How many of the first `count` [B] tokens [B, T] are emitted: up to one of `ends`, and no more than `room` [B].

    Returns:
      The number [B], and whether the row has ended with them [B].
    """
    is_end = sum((tokens == end for end in ends), jnp.zeros(tokens.shape, bool))
    first_end = jnp.where(is_end, jnp.arange(tokens.shape[1]), tokens.shape[1]).min(-1)
    emitted = jnp.minimum(jnp.minimum(count, first_end + 1), room)
    return emitted, (first_end < emitted) | (emitted == room)


def depth(draft: Draft) -> Array:
    """[B] int32, the greatest depth of a draft's valid nodes; in a chain their number."""
    if draft.parents is None:
        return draft.length
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent + 1] + 1)
    valid = jnp.arange(len(draft.parents)) < draft.length[:, None]
    return jnp.where(valid, jnp.array(depths[1:]), 0).max(-1, initial=0)


def advance(
    target: Model, drafter: Drafter, state: SpecState, draft: Draft, verified: Verified, emitted: Array
) -> SpecState:
    """Appends the first `emitted` [B] tokens of the verdict, keeps them in the cache, and tells the drafter."""
    context, verification = state.context, verified.verification
    with jax.named_scope('update'):
        context = append(context, verification.tokens, emitted)
        nodes = None if draft.parents is None else verification.nodes
        outcome = Outcome(context, verification, verified.hidden, verified.features)
        return state.replace(
            context=context,
            target_cache=target.keep(state.target_cache, nodes, context.length - 1),
            draft_state=drafter.update(state.draft_state, outcome),
        )


def append(context: Context, tokens: Array, count: Array) -> Context:
    """The text with the first `count` [B] of tokens [B, T] after its newest."""
    tokens = write(context.tokens, tokens, context.length, axis=1)
    return context.replace(tokens=tokens, length=context.length + count)


def finish(target: Model, state: SpecState, *, config: DecodeConfig) -> Output:
    """Takes the output out of the context, and pads after each row's end."""
    context, index = state.context, jnp.arange(config.max_new_tokens)
    tokens = jnp.take_along_axis(context.tokens, context.start[:, None] + index, axis=1)
    tokens = jnp.where(index < context.emitted[:, None], tokens, target.spec.pad_id)
    return Output(tokens, context.emitted, state.failed, state.stats)


# --- compiled -----------------------------------------------------------------------------------------------

_generate = backend.jit(speculative_loop, static_argnames='config')
_start = backend.jit(start, static_argnames='config')


@partial(backend.jit, static_argnames=('config', 'rounds'), donate_argnames='state')
def _advance(target, drafter, state, *, config, rounds) -> SpecState:
    def step(carry):
        state, number = carry
        return speculative_step(target, drafter, state, config=config), number + 1

    return lax.while_loop(lambda carry: unfinished(carry[0]) & (carry[1] < rounds), step, (state, 0))[0]


def _checked(drafter, inputs, key, config, limits, on_failure):
    """Drafter, config, keys [B] and limits [B] as the loop takes them; ValueError for what it cannot take."""
    if on_failure not in ('raise', 'return'):
        raise ValueError(f"on_failure: expected 'raise' or 'return', got {on_failure!r}")
    if drafter is None or config.gamma == 0:
        drafter, config = NoDrafter(), dataclasses.replace(config, gamma=0)
    batch = inputs.tokens.shape[0]
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f'key: expected a key of jax.random.key, got an array of {key.dtype}; '
            'jax.random.wrap_key_data makes one of an old key'
        )
    if key.ndim and key.shape != (batch,):
        raise ValueError(f'key: expected a scalar key or one for each of {batch} rows, got shape {key.shape}')
    if limits is not None:
        limits = np.asarray(limits, np.int32)
        if limits.shape != (batch,) or (limits < 0).any() or (limits > config.max_new_tokens).any():
            raise ValueError(
                f'limits: expected {batch} integers from 0 to max_new_tokens = {config.max_new_tokens}, got '
                f'{limits.tolist()}'
            )
    return drafter, config, row_keys(key, np.arange(batch)) if key.ndim == 0 else key, limits
