"""Scores of given texts under a target: the loop's round, with the text's next token in place of the rule's.

Axes: B rows, N tokens of a text, S source length, G draft depth, V vocabulary.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.decoding import DecodeConfig, Verified, advance, propose, start, target_call
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.models.base import Model
from spec_jax.runtime.backend import jit
from spec_jax.sampling import SamplingConfig, logits_to_probs, row_keys
from spec_jax.state import SpecState
from spec_jax.types import Draft, Inputs, Verification
from spec_jax.verification import at_token

_UNTEMPERED = SamplingConfig()


@flax.struct.dataclass
class TextScores:
    """A target's scores of each token of given texts, given those before it.

    Attributes:
      below, mass: [B, N] float32, of `cumulative_place`.
      gap: [B, N] float32, nats between the token and the most probable one.
    """

    below: Array
    mass: Array
    gap: Array


def score_texts(
    target: Model, sources: Array, mask: Array, texts: Array, sampling: SamplingConfig = _UNTEMPERED
) -> TextScores:
    """Scores texts by calls over one token, as those of the plain decoder.

    Args:
      target: the model.
      sources: [B, S] int32, and their mask [B, S] bool.
      mask: True at real tokens.
      texts: [B, N] int32, the outputs; padding after a text's end is scored too.
      sampling: how the logits become a distribution.
    """
    config = DecodeConfig(gamma=0, max_new_tokens=texts.shape[1], sampling=sampling)
    return _score_texts(target, Inputs(jnp.asarray(sources), jnp.asarray(mask)), texts, config=config)


@jit(static_argnames='config')
def _score_texts(target, inputs, texts, *, config) -> TextScores:
    keys = row_keys(jax.random.key(0), np.arange(inputs.tokens.shape[0]))
    state = start(target, NoDrafter(), inputs, keys, config=config)
    return score_from(target, state, texts, config=config)


def score_from(target: Model, state: SpecState, texts: Array, *, config: DecodeConfig) -> TextScores:
    """`score_texts` from a plain decoder's `start`; can be traced."""
    drafter, sampling = NoDrafter(), config.sampling

    def step(state, token):
        draft, _ = propose(target, drafter, state, state.keys, config=config)
        logits, hidden, features, cache = target_call(target, state.target_cache, state.context, draft)
        state = state.replace(target_cache=cache)
        state = advance_by(target, drafter, state, draft, token, jnp.ones_like(token), hidden, features)
        allowed = logits[:, 0]
        if sampling.vocab_limit is not None:
            allowed = jnp.where(jnp.arange(allowed.shape[-1]) < sampling.vocab_limit, allowed, -jnp.inf)
        gap = allowed.max(-1) - jnp.take_along_axis(allowed, token[:, None], axis=1)[:, 0]
        return state, TextScores(*cumulative_place(logits_to_probs(allowed, sampling), token), gap)

    scores = lax.scan(step, state, texts.T)[1]
    return jax.tree.map(jnp.transpose, scores)


def advance_by(
    target: Model,
    drafter: Drafter,
    state: SpecState,
    draft: Draft,
    token: Array,
    count: Array,
    hidden: Array,
    features: Array | None,
) -> SpecState:
    """`decoding.advance` with token [B] where count [B] is 1, as if the draft had been rejected at once."""
    batch, nodes = draft.tokens.shape
    rejected = Verification(
        num_accepted=jnp.zeros((batch,), jnp.int32),
        tokens=jnp.pad(token[:, None], ((0, 0), (0, nodes))),
        nodes=jnp.broadcast_to(jnp.arange(1, nodes + 2), (batch, nodes + 1)),
        beta=jnp.zeros((batch, nodes), jnp.float32),
    )
    verified = Verified(rejected, jnp.zeros((batch,), jnp.int32), hidden, features, jnp.int32(nodes))
    return advance(target, drafter, state, draft, verified, count)


def cumulative_place(probs: Array, tokens: Array) -> tuple[Array, Array]:
    """A token's interval [below, below + mass) of [0, 1), with the tokens in the order of falling probability.

    For a token drawn from `probs`, a place drawn uniformly from its interval is uniform in [0, 1).

    Args:
      probs: [..., V].
      tokens: [...] int.

    Returns:
      below [...] and mass [...].
    """
    mass = at_token(probs, tokens)
    index = jnp.arange(probs.shape[-1])
    before = (probs > mass[..., None]) | ((probs == mass[..., None]) & (index < tokens[..., None]))
    return jnp.where(before, probs, 0.0).sum(-1), mass
