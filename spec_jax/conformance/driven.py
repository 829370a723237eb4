"""Rounds whose verdict is written down, so that a draft is in any state that a loop can put it in.

Axes: B rows, G draft length, R rounds.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax import cache as kv
from spec_jax import decoding
from spec_jax.conformance.tables import GAMMA, LIMIT, SAMPLED, V
from spec_jax.drafters.base import Drafter
from spec_jax.models.base import Model, read_block
from spec_jax.types import Context, Draft, Inputs, SpecState, Verification


@partial(jax.jit, static_argnames='gamma')
def _begin(target, drafter, inputs, keys, *, gamma) -> SpecState:
    return decoding.prefill(target, drafter, inputs, keys, gamma=gamma, max_new_tokens=LIMIT)


@partial(jax.jit, static_argnames=('gamma', 'sampling'))
def _round(target, drafter, state, accept, extra, *, gamma, sampling) -> tuple[Draft, SpecState]:
    """Of row b's draft the first accept[b] tokens are said to pass, and extra[b] to follow them."""
    context = state.context
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.round))(state.keys)
    draft, draft_state = drafter.propose(state.draft_state, context, keys, gamma, sampling, target.vocab_size)
    hidden, target_cache = read_block(target, state.target_cache, context, draft.tokens)

    accepted = jnp.minimum(accept, draft.length)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(gamma + 1) < accepted[:, None], drafted, extra[:, None])
    context = Context(kv.write(context.tokens, tokens, context.length, axis=1), context.length + accepted + 1)
    state = state.replace(
        context=context,
        round=state.round + 1,
        target_cache=target.rollback(target_cache, context.length - 1),
        draft_state=drafter.update(draft_state, context, Verification(accepted, tokens), hidden),
    )
    return draft, state


def drive(
    target: Model,
    drafter: Drafter,
    inputs: Inputs,
    keys: Array,
    accept: np.ndarray,
    extra: np.ndarray,
    *,
    gamma=GAMMA,
    sampling=SAMPLED,
) -> list[Draft]:
    """The draft of each of R rounds, in NumPy.

    Args:
      target: gives the hidden states.
      drafter: in question.
      inputs: of B rows.
      keys: [B].
      accept: [R, B] int32, how many draft tokens pass; no more than are meant do.
      extra: [R, B] int32, the token that follows them.
      gamma: G.
      sampling: handed to the draft.
    """
    state, drafts = _begin(target, drafter, inputs, keys, gamma=gamma), []
    for verdict in zip(accept, extra, strict=True):
        draft, state = _round(target, drafter, state, *verdict, gamma=gamma, sampling=sampling)
        drafts.append(jax.tree.map(np.asarray, draft))
    return drafts


def uneven_script() -> tuple[np.ndarray, np.ndarray]:
    """`accept` and `extra` of 8 rows and 6 rounds: rows 0 .. 3 always accept 0 .. 3 tokens, others by turns."""
    turn, row = np.arange(6)[:, None], np.arange(8)
    accept = np.where(row <= GAMMA, row, row + turn) % (GAMMA + 1)
    return accept.astype(np.int32), np.random.default_rng(1).integers(2, V, (6, 8)).astype(np.int32)
