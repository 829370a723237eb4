"""Whole texts: `generate` in one compiled program, `stream` round by round, and what either refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.decoding import DecodeConfig, speculative_loop, speculative_step, start, unfinished
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.failures import raise_on_failure
from spec_jax.models.base import Model
from spec_jax.runtime import backend
from spec_jax.sampling import row_keys
from spec_jax.state import Output, SpecState
from spec_jax.types import Inputs


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
    Rows without new tokens have empty arrays. The state is donated from step to step.
    """
    drafter, config, keys, limits = _checked(drafter, inputs, key, config, limits, on_failure)
    if rounds < 1:
        raise ValueError(f'rounds: expected an integer >= 1, got {rounds}')
    return _stream(target, drafter, inputs, keys, limits, config, rounds, on_failure)


def _stream(target, drafter, inputs, keys, limits, config, rounds, on_failure):
    state = _start(target, drafter, inputs, keys, limits, config=config)
    end, done = np.array(state.context.length), np.asarray(state.done).all()
    while not done:
        state = _advance(target, drafter, state, config=config, rounds=rounds)
        begin, end, done = end, np.array(state.context.length), np.asarray(state.done).all()
        if on_failure == 'raise':
            raise_on_failure(state)
        tokens = np.array(state.context.tokens)
        yield [row[slice(*ends)] for row, *ends in zip(tokens, begin, end, strict=True)]


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
