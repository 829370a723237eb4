"""The speculative loop and its parts; plain decoding is the same loop with an empty draft.

    speculative_loop    start, then a while_loop of speculative_step, then finish
    speculative_step    propose -> verified_call (target_call, rule) -> emit -> advance

Each can be traced within a program of your own. Invariants, at the start of every round:

  * The target's cache holds all but the newest token; the newest token is the first query of the call.
  * Rows advance by what each accepted. There is no batch minimum.
  * A cache is rolled back by its length; stale slots are hidden, and overwritten by the next write.
  * Buffers have room for a full block after the last token that can be emitted, since
    `dynamic_update_slice` clamps without a word.
  * A finished row stays as it is; the loop ends when all rows are done.
  * A row's keys come from its own key and its own count of rounds, so its output depends neither on its
    neighbours nor on when it was admitted.

Axes: B rows, N nodes of a draft, T tokens of one call, V vocabulary, D model width, F feature width.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spec_jax.drafters.base import Drafter, Outcome, Round
from spec_jax.failures import check_draft, failures
from spec_jax.models.base import Model
from spec_jax.models.blocks import draft_block
from spec_jax.runtime import backend
from spec_jax.runtime.rows import call_over_fewest
from spec_jax.runtime.sharding import varying_as
from spec_jax.runtime.updates import write
from spec_jax.sampling import SamplingConfig, split_rows
from spec_jax.state import Output, SpecState, Stats, count_round
from spec_jax.types import Cache, Context, Draft, Inputs, Verification
from spec_jax.verification import Rule, Scores, TokenRule

MAX_GAMMA = 16


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How to decode; hashable, a static argument of the compiled loop. ValueError for a value out of range.

    Attributes:
      gamma: G, draft depth, 0 .. 16; 0 decodes plainly.
      max_new_tokens: most tokens of an output, EOS included.
      sampling: how logits become a distribution.
      rule: which draft tokens stay.
      stop: ids that end an output beside the model's own `eos_ids`.
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


def speculative_loop(
    target: Model, drafter: Drafter, inputs: Inputs, keys: Array, limits: Array | None = None, *, config
) -> Output:
    """The program behind `generate`; arguments as of `start`."""
    state = start(target, drafter, inputs, keys, limits, config=config)
    step = partial(speculative_step, target, drafter, config=config)
    return finish(target, lax.while_loop(unfinished, step, state), config=config)


def start(
    target: Model, drafter: Drafter, inputs: Inputs, keys: Array, limits: Array | None = None, *, config
) -> SpecState:
    """Reads the prompts of B rows and lays out the buffers; without a draft, for `NoDrafter()`, as well.

    Args are a model, its draft and prompts, [B] PRNG keys, and [B] int32 limits of new tokens, each at most the
    config's `max_new_tokens`, which is what None stands for; `config` is a `DecodeConfig`, static.
    """
    batch, shape = inputs.tokens.shape[0], drafter.shape(config.gamma)
    num_slots = config.max_new_tokens + shape.nodes + 1
    if limits is None:
        limits = jnp.full((batch,), config.max_new_tokens, jnp.int32)
    with jax.named_scope('prefill'):
        prefill = target.prefill(inputs, num_slots)
        state = SpecState(
            context=prefill.context,
            done=~inputs.mask.any(-1) | (limits < 1),
            failed=jnp.zeros((batch,), jnp.int32),
            limit=limits,
            keys=keys,
            target_cache=prefill.cache,
            draft_state=drafter.init(target, prefill, inputs, num_slots),
            stats=Stats.zero(batch, shape.depth, shape.nodes),
        )
        return varying_as(state, inputs.mask)


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
    lengths = lengths if draft.parents is None else lengths[-1:]  # a tree is not cut
    needed, arguments = draft.length.max(), (state.context, draft, rule_keys)
    verified, cache = call_over_fewest(call, lengths, needed, state.target_cache, arguments)

    with jax.named_scope('verify'):
        verification, failed = verified.verification, jnp.where(state.done, 0, verified.failed)
        room, ends = state.limit - state.context.emitted, (*target.spec.eos_ids, *config.stop)
        emitted, ended = emit(verification.tokens, verification.num_accepted + 1, room, ends)
        emitted = jnp.where(state.done | (failed > 0), 0, emitted)
        state = state.replace(
            done=state.done | ended | (failed > 0),
            failed=state.failed | failed,
            target_cache=cache,
            draft_state=draft_state,
            stats=count_round(state.stats, draft, verification, emitted, verified.called),
        )
    return advance(target, drafter, state, draft, verified, emitted)


def round_keys(state: SpecState) -> Array:
    """[2, B] PRNG keys of this round, for the draft and for the rule."""
    return split_rows(jax.vmap(jax.random.fold_in)(state.keys, state.stats.rounds), 2)


def propose(target: Model, drafter: Drafter, state: SpecState, keys: Array, *, config: DecodeConfig):
    """The drafter's proposal, of checked shapes, and its state."""
    vocab_size, shape = target.spec.vocab_size, drafter.shape(config.gamma)
    round = Round(state.context, keys, config.gamma, config.sampling, vocab_size)
    draft, draft_state = drafter.propose(state.draft_state, round)
    sampled = config.sampling.temperature > 0 and not shape.deterministic
    check_draft(draft, len(state.done), shape.nodes, vocab_size, sampled)
    return draft, draft_state


def call_lengths(drafter: Drafter, batch: int, gamma: int) -> tuple[int, ...]:
    """The lengths of drafts for which a round has a target call, ascending; a shorter draft takes the next."""
    shape = drafter.shape(gamma)
    return backend.compiled_lengths(shape.nodes) if batch == 1 and shape.may_be_empty else (shape.nodes,)


def target_call(target: Model, cache: Cache, context: Context, draft: Draft):
    """Reads the newest token and a draft: logits [B, N + 1, V], hidden [B, N + 1, D], features, and the cache."""
    with jax.named_scope('target'):
        rows = draft.tokens.shape[1] + 1
        block = draft_block(context, draft, width=max(1, 1 + backend.fewest_rows(len(context.length)) - rows))
        if block.tokens.shape[1] > rows:
            cache = target.keep(cache, None, block.positions[:, 0])
        hidden, features, cache = target.decode(block, cache)
        return *jax.tree.map(lambda x: x[:, -rows:], (target.logits(hidden), hidden, features)), cache


class Verified(NamedTuple):
    """What a target call made of a draft."""

    verification: Verification
    failed: Array  # [B] int32, bits of `failures.Failure`
    hidden: Array  # [B, N + 1, D]
    features: Array | None  # [B, N + 1, F]
    called: Array  # scalar int32, draft tokens that the call was over


def verified_call(
    target: Model, config: DecodeConfig, nodes: int, cache: Cache, context: Context, draft: Draft, keys: Array
) -> tuple[Verified, Cache]:
    """A target call over the first `nodes` tokens of a draft and the rule's verdict; and the cache."""
    draft = draft.first(nodes)
    logits, hidden, features, cache = target_call(target, cache, context, draft)
    with jax.named_scope('verify'):
        scores = Scores(logits, config.sampling)
        failed = failures(scores.invalid, draft, logits.shape[-1])
        return Verified(config.rule(scores, draft, keys), failed, hidden, features, jnp.int32(nodes)), cache


def emit(tokens: Array, count: Array, room: Array, ends: tuple[int, ...]) -> tuple[Array, Array]:
    """How many of the first `count` [B] of tokens [B, T] are emitted: up to one of `ends`, at most `room` [B].

    Returns the number [B], and whether the row has ended with them [B].
    """
    is_end = sum((tokens == end for end in ends), jnp.zeros(tokens.shape, bool))
    first_end = jnp.where(is_end, jnp.arange(tokens.shape[1]), tokens.shape[1]).min(-1)
    emitted = jnp.minimum(jnp.minimum(count, first_end + 1), room)
    return emitted, (first_end < emitted) | (emitted == room)


def advance(
    target: Model, drafter: Drafter, state: SpecState, draft: Draft, verified: Verified, emitted: Array
) -> SpecState:
    """Appends the first `emitted` [B] tokens of the verdict, keeps them in the cache, and tells the drafter."""
    verification = verified.verification
    with jax.named_scope('update'):
        context = append(state.context, verification.tokens, emitted)
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
