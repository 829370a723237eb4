"""Times of a plain step, a call over several rows and a draft step, each measured inside one compiled loop.

A step is timed as the loop runs it: caches updated in place, each call with the last one's tokens, no dispatch from
Python in between. A draft is timed between target calls, which evict its weights from the processor's caches: timed
alone, it would be faster than in the loop.

Axes: B rows, G draft length.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.decoding import DecodeConfig, append, call_lengths, speculative_step, start, target_call
from spec_jax.drafters.base import Drafter, Round
from spec_jax.drafters.none import NoDrafter
from spec_jax.models.base import Model
from spec_jax.runtime.backend import jit
from spec_jax.runtime.selection import first
from spec_jax.sampling import likeliest, logits_to_probs, row_keys
from spec_jax.types import Draft, Inputs

_start = jit(start, static_argnames='config')
_STEPS = 24  # calls per measurement; the caches hold about half a typical output on average


@jit(static_argnames='config')
def _plain_steps(target, state, *, config, steps):
    """`steps` plain steps that no EOS ends."""

    def body(_, stepped):
        return speculative_step(target, NoDrafter(), stepped, config=config).replace(done=state.done)

    return lax.fori_loop(0, steps, body, state).context.tokens


@jit(static_argnames=('config', 'nodes'))
def _target_calls(target, state, *, config, nodes, steps):
    """`steps` calls over the newest token and `nodes` more, each with the last one's most probable tokens."""
    drafted = jnp.zeros((len(state.done), nodes), jnp.int32)

    def body(_, carry):
        context, drafted, cache = carry
        context, tokens, cache = _call(target, cache, context, drafted, config)
        return context, tokens[:, 1:], cache

    return lax.fori_loop(0, steps, body, (state.context, drafted, state.target_cache))[0].tokens


@jit(static_argnames='config')
def _drafts_and_calls(target, drafter, state, *, config, steps):
    """`steps` drafts, each scored by a target call and followed by that call's first token."""

    def body(_, carry):
        context, draft_state, cache = carry
        round = Round(context, state.keys, config.gamma, config.sampling, target.spec.vocab_size)
        draft, draft_state = drafter.propose(draft_state, round)
        context, _, cache = _call(target, cache, context, draft.tokens, config)
        return context, draft_state, cache

    carry = state.context, state.draft_state, state.target_cache
    return lax.fori_loop(0, steps, body, carry)[0].tokens


def _call(target, cache, context, drafted, config):
    """A target call; the context with its first token, a token [B, N + 1] for each place, and the cache."""
    draft = Draft(drafted, None, jnp.full_like(context.length, drafted.shape[1]))
    logits, _, _, cache = target_call(target, cache, context, draft)
    tokens = _tokens(logits, config.sampling)
    context = append(context, tokens[:, :1], jnp.ones_like(context.length))
    return context, tokens, target.keep(cache, None, context.length - 1)


def _tokens(logits, sampling):
    """A token for each of the logits [B, G + 1, V], through the same distribution that the rule computes."""
    if sampling.temperature == 0:
        return likeliest(logits, sampling)
    return first(logits_to_probs(logits, sampling) > 0)


def call_name(length: int, gamma: int) -> str:
    """The name of the time of a target call over a draft of some length."""
    return 'target_call' if length == gamma else f'target_call_{length + 1}_rows'


class StepTimer:
    """Times plain step, target calls, and target call with a draft before it in turn, one sample per `measure`.

    Sampled throughout a longer measurement, its medians are subject to the same drift of the machine's speed as
    that measurement. Ratios are more reliable than times.
    """

    def __init__(self, target: Model, drafter: Drafter | None, inputs: Inputs, config: DecodeConfig):
        """Compiles the programs.

        Args:
          target: the model.
          drafter: the draft; None leaves its step out.
          inputs: a typical batch; its size and width set those of the measurement.
          config: gamma is at least 1, the target call is over gamma + 1 positions; max_new_tokens, at least 2,
            sets the size of the caches.
        """
        self.steps, self.gamma = max(1, min(_STEPS, config.max_new_tokens - 1)), config.gamma
        batch, timed = inputs.tokens.shape[0], dict(config=config, steps=self.steps)
        keys = row_keys(jax.random.key(0), range(batch))
        plain = _start(target, NoDrafter(), inputs, keys, config=config)
        self.programs = dict(plain_step=partial(_plain_steps, target, plain, **timed))
        if drafter is None:  # a cache with as much room as beside a draft
            lengths = (config.gamma,)
            longer = dataclasses.replace(config, max_new_tokens=config.max_new_tokens + config.gamma)
            state = _start(target, NoDrafter(), inputs, keys, config=longer)
        else:
            lengths = call_lengths(drafter, batch, config.gamma)
            state = _start(target, drafter, inputs, keys, config=config)
            self.programs['draft_and_call'] = partial(_drafts_and_calls, target, drafter, state, **timed)
        for nodes in filter(None, lengths):  # a call over one row is a plain step
            calls = partial(_target_calls, target, state.replace(draft_state=None), nodes=nodes, **timed)
            self.programs[call_name(nodes, config.gamma)] = calls
        self.seconds: dict[str, list[float]] = {name: [] for name in self.programs}
        for program in self.programs.values():
            jax.block_until_ready(program())

    def measure(self) -> None:
        """Takes one more sample of each."""
        for name, program in self.programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            self.seconds[name].append((time.perf_counter() - start) / self.steps)

    def medians(self) -> dict[str, float]:
        """Seconds of `plain_step`, `target_call`, `draft_step` (the time that a draft adds to a call, over gamma),
        and of the calls over fewer rows that the loop makes (`call_name`).
        """
        taken = dict(self.seconds)
        both = taken.pop('draft_and_call', None)
        medians = {name: median(seconds) for name, seconds in taken.items()}
        if both is not None:
            draft = median(whole - part for whole, part in zip(both, taken['target_call'], strict=True))
            medians['draft_step'] = max(draft, 0) / self.gamma
        return medians
