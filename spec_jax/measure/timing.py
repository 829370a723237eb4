"""What a plain step, a call over several rows and a draft step cost, each measured inside one compiled loop.

A step is timed as the loop runs it: caches in place, the next call fed by the last, no dispatch from
Python in between. A draft is timed between target calls, which leave little of its weights in the processor's
caches: alone, it would look cheaper than it is.

Axes: B rows, G draft length.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.decoding import call_lengths, plain_step, prefill, start_plain
from spec_jax.drafters.base import Drafter
from spec_jax.models.base import Model, read_block
from spec_jax.runtime.backend import jit
from spec_jax.sampling import SamplingConfig, first, likeliest, logits_to_probs, row_keys, split_rows
from spec_jax.types import Inputs

_prefill = jit(prefill, static_argnames=('gamma', 'max_new_tokens'))
_start_plain = jit(start_plain, static_argnames='max_new_tokens')
_STEPS = 24  # calls a measurement; the caches hold about half a typical output on average


@jit(static_argnames=('sampling', 'max_new_tokens'))
def _plain_steps(target, state, *, sampling, steps, max_new_tokens):
    """`steps` plain steps that no EOS ends."""
    body = partial(plain_step, target, max_new_tokens=max_new_tokens, sampling=sampling)
    return lax.fori_loop(
        0, steps, lambda _, state: body(state).replace(done=state.done), state
    ).context.tokens


@jit(static_argnames=('shape', 'sampling'))
def _target_calls(target, cache, *, shape, sampling, steps):
    """`steps` calls over tokens of a shape, each fed with the last one's likeliest."""

    def body(i, carry):
        tokens, cache = carry
        positions = jnp.broadcast_to(i + jnp.arange(shape[1]), shape)
        hidden, cache = target.decode(tokens, positions, cache)
        tokens = _tokens(target.logits(hidden), sampling)
        return tokens, target.rollback(cache, jnp.full_like(tokens[:, 0], i + 1))

    return lax.fori_loop(0, steps, body, (jnp.zeros(shape, jnp.int32), cache))[0]


@jit(static_argnames=('gamma', 'sampling'))
def _drafts_and_calls(target, drafter, state, *, gamma, sampling, steps):
    """`steps` drafts of gamma tokens, each scored by a target call and followed by that call's first token."""

    def body(_, carry):
        context, draft_state, cache = carry
        keys = split_rows(state.keys, 1)[0]
        draft, draft_state = drafter.propose(draft_state, context, keys, gamma, sampling, target.vocab_size)
        hidden, cache = read_block(target, cache, context, draft.tokens)
        found = _tokens(target.logits(hidden), sampling)
        row = jnp.arange(context.tokens.shape[0])
        tokens = context.tokens.at[row, context.length].set(found[:, 0])
        cache = target.rollback(cache, context.length)
        return context.replace(tokens=tokens, length=context.length + 1), draft_state, cache

    carry = state.context, state.draft_state, state.target_cache
    return lax.fori_loop(0, steps, body, carry)[0].tokens


def _tokens(logits, sampling):
    """A token for each of the logits [B, G + 1, V], by way of what the rule needs of them."""
    if sampling.temperature == 0:
        return likeliest(logits, sampling)
    return first(logits_to_probs(logits, sampling) > 0)


def call_name(length: int, gamma: int) -> str:
    """What the time of a target call over a draft of some length is called."""
    return 'target_call' if length == gamma else f'target_call_{length + 1}_rows'


class StepTimer:
    """Times plain step, target calls, and target call with a draft before it in turn, as often as it is asked to.

    Asked now and then during a longer measurement, its medians and those of that measurement see the same
    machine, whose speed may drift. Ratios are more to be trusted than times.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        inputs: Inputs,
        *,
        gamma: int,
        max_new_tokens: int,
        sampling: SamplingConfig,
    ):
        """Compiles the programs.

        Args:
          target: the model.
          drafter: the draft; None leaves its step out.
          inputs: a typical batch; its size and width set those of the measurement.
          gamma: G, at least 1; the target call is over gamma + 1 positions.
          max_new_tokens: sets the size of the caches; at least 2.
          sampling: how logits become a distribution.
        """
        self.steps, self.gamma = max(1, min(_STEPS, max_new_tokens - 1)), gamma
        keys = row_keys(jax.random.key(0), range(inputs.tokens.shape[0]))
        speculative = _prefill(target, drafter, inputs, keys, gamma=gamma, max_new_tokens=max_new_tokens)
        plain = _start_plain(target, inputs, keys, max_new_tokens=max_new_tokens)
        how = dict(sampling=sampling, steps=self.steps)
        batch, cache = inputs.tokens.shape[0], speculative.target_cache
        self.programs = dict(
            plain_step=partial(_plain_steps, target, plain, max_new_tokens=max_new_tokens, **how)
        )
        for length in (gamma,) if drafter is None else call_lengths(drafter, batch, gamma):
            if length:  # a call over one row is a plain step
                self.programs[call_name(length, gamma)] = partial(
                    _target_calls, target, cache, shape=(batch, length + 1), **how
                )
        if drafter is not None:
            self.programs['draft_and_call'] = partial(
                _drafts_and_calls, target, drafter, speculative, gamma=gamma, **how
            )
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
        """Seconds of `plain_step`, `target_call`, `draft_step`, a gamma-th of what a draft adds to a call, and of
        the calls over fewer rows that the loop makes (`call_name`).
        """
        taken = dict(self.seconds)
        both = taken.pop('draft_and_call', None)
        medians = {name: median(seconds) for name, seconds in taken.items()}
        if both is not None:
            draft = median(whole - part for whole, part in zip(both, taken['target_call'], strict=True))
            medians['draft_step'] = max(draft, 0) / self.gamma
        return medians
