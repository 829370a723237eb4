"""Rounds with a scripted verdict, which bring a drafter into any state that the loop can.

Axes: B rows, G draft length, R rounds.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax import decoding
from spec_jax.conformance.tables import CONFIG, GAMMA, V, endless
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import Drafter, DraftShape, Outcome, Round
from spec_jax.models.base import Model
from spec_jax.state import SpecState
from spec_jax.types import Draft, Inputs, Prefill, Verification
from spec_jax.verification import Scores, chain_verification


@dataclasses.dataclass(frozen=True)
class WrittenRule:
    """A scripted verdict: the first accept[b] tokens of row b pass, and extra[b] follows; to be made in a trace."""

    accept: Array
    extra: Array
    name = 'written down'
    lossy = True

    def __call__(self, scores: Scores, draft: Draft, keys: Array) -> Verification:
        accepted = jnp.minimum(self.accept, draft.length)
        beta = jnp.zeros(draft.tokens.shape, jnp.float32)
        return chain_verification(draft, accepted, self.extra[:, None], beta)


@flax.struct.dataclass
class Watched:
    """Wraps a drafter, and returns each round's proposal within its state."""

    drafter: Drafter

    def shape(self, gamma: int) -> DraftShape:
        return dataclasses.replace(self.drafter.shape(gamma), may_be_empty=False)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Any:
        return self.drafter.init(target, prefill, inputs, num_slots)

    def propose(self, state: Any, round: Round) -> tuple[Draft, tuple[Any, Draft]]:
        draft, state = self.drafter.propose(state, round)
        return draft, (state, draft)

    def update(self, state: tuple[Any, Draft], outcome: Outcome) -> tuple[Any, Draft]:
        return self.drafter.update(state[0], outcome), state[1]


def watched_step(
    target: Model, drafter: Drafter, state: SpecState, *, config: DecodeConfig
) -> tuple[Draft, SpecState]:
    """`decoding.speculative_step`, with the draft that was proposed in it."""
    state = decoding.speculative_step(target, Watched(drafter), state, config=config)
    draft_state, draft = state.draft_state
    return draft, state.replace(draft_state=draft_state)


_start = partial(jax.jit, static_argnames='config')(decoding.start)


@partial(jax.jit, static_argnames='config')
def _round(target, drafter, state, accept, extra, *, config) -> tuple[Draft, SpecState]:
    config = dataclasses.replace(config, rule=WrittenRule(accept, extra))
    return watched_step(target, drafter, state, config=config)


def drive(
    target: Model,
    drafter: Drafter,
    inputs: Inputs,
    keys: Array,
    accept: np.ndarray,
    extra: np.ndarray,
    *,
    config: DecodeConfig = CONFIG,
) -> list[Draft]:
    """The draft of each of R rounds, in NumPy.

    Args:
      target: gives the hidden states; its EOS does not end a text here.
      drafter: the one to test.
      inputs: of B rows.
      keys: [B].
      accept: [R, B] int32, how many draft tokens pass, at most those that are valid.
      extra: [R, B] int32, the token that follows them.
      config: gamma, and the sampling that the drafter gets.
    """
    config = dataclasses.replace(config, max_new_tokens=len(accept) * (config.gamma + 1) + 1)
    target = endless(target)
    state, drafts = _start(target, drafter, inputs, keys, config=config), []
    for verdict in zip(accept, extra, strict=True):
        draft, state = _round(target, drafter, state, *verdict, config=config)
        drafts.append(jax.tree.map(np.asarray, draft))
    return drafts


def uneven_script() -> tuple[np.ndarray, np.ndarray]:
    """`accept` and `extra` of 8 rows and 6 rounds: rows 0 .. 3 always accept 0 .. 3 tokens, the others vary."""
    turn, row = np.arange(6)[:, None], np.arange(8)
    accept = np.where(row <= GAMMA, row, row + turn) % (GAMMA + 1)
    return accept.astype(np.int32), np.random.default_rng(1).integers(2, V, (6, 8)).astype(np.int32)
