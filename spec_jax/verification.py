"""Rules: how many tokens of a draft stay, and which token follows them.

The exact rule is that of Leviathan, Kalman and Matias 2023, algorithm 1, vectorised over a batch. Nothing in it
divides by q or adds an epsilon: what comes out is distributed as p to the last bit that float32 sums allow.

Axes: B rows, G draft depth (here that of a chain), V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from spec_jax.sampling import SamplingConfig, likeliest, logits_to_probs, sample, split_rows
from spec_jax.types import Draft, Verification


@flax.struct.dataclass
class Scores:
    """The target's logits [B, N + 1, V] after the newest token and each node, and what a rule makes of them."""

    logits: Array
    sampling: SamplingConfig = flax.struct.field(pytree_node=False)

    @property
    def greedy(self) -> bool:
        """Whether p is one-hot."""
        return self.sampling.temperature == 0

    @property
    def p(self) -> Array:
        """[B, N + 1, V] float32, the distributions that tokens are drawn from."""
        return logits_to_probs(self.logits, self.sampling)

    @property
    def best(self) -> Array:
        """[B, N + 1] int32, where greedy the tokens that have all of p; -1 where there is none."""
        return likeliest(self.logits, self.sampling)

    @property
    def invalid(self) -> Array:
        """[B] bool, rows with a distribution that is none."""
        none = self.best < 0 if self.greedy else jnp.isnan(self.p[..., 0])  # one with a NaN is NaN throughout
        return none.any(-1)


class Rule(Protocol):
    """Accepts or rejects the tokens of a draft; hashable, a static part of `DecodeConfig`."""

    name: str  # for reports
    lossy: bool  # whether the output can be distributed otherwise than the target's own

    def __call__(self, scores: Scores, draft: Draft, keys: Array) -> Verification:
        """The verdict on a draft, by scores of the newest token and of each node, with [B] PRNG keys.

        A draft may come cut to the longest `length` in the batch, down to no node; no verdict may depend on that.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Token by token, exact: a token stays with probability min(1, p / q), given that those before it did."""

    name = 'token by token'
    lossy = False

    def __call__(self, scores: Scores, draft: Draft, keys: Array) -> Verification:
        if scores.greedy:
            return verify_greedy(scores.best, draft)
        return verify_chain(scores.p, draft, keys)


def acceptance_probability(p: Array, q: Array) -> Array:
    """beta, the sum [...] of min(p, q) of p, q [..., V]: how likely a token drawn from q stays (Theorem 3.5)."""
    return jnp.minimum(p, q).sum(-1)


def residual_distribution(p: Array, q: Array) -> Array:
    """norm(max(0, p - q)) of p, q [..., V], for a rejected token (section 2.3); p where p <= q throughout."""
    excess = jnp.maximum(p - q, 0.0)
    total = excess.sum(-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1.0), p)


def overlap(bound: Array, draft: Draft) -> Array:
    """beta [B, G] at each place of a chain; bound [B, G, V] is p, or what stands for it in a lossy test."""
    if draft.probs is None:
        return jnp.minimum(at_token(bound, draft.tokens), 1.0)
    return acceptance_probability(bound, draft.probs)


def at_token(probs: Array, tokens: Array) -> Array:
    """probs [..., V] at tokens [...]; a masked sum, which reads the array once where a gather may not."""
    return jnp.where(jnp.arange(probs.shape[-1]) == tokens[..., None], probs, 0.0).sum(-1)


def verify_chain(p: Array, draft: Draft, keys: Array, bound: Array | None = None) -> Verification:
    """Accepts the longest prefix that passes, then draws one more token (algorithm 1).

    A token x passes where u q(x) < p(x) with u uniform in [0, 1). The token after the prefix comes from
    the residual where a test failed, and from p where all `draft.length` tokens passed.

    Args:
      p: [B, G + 1, V] float32; p[:, i] is the target's distribution of the token after i draft tokens.
      draft: a chain.
      keys: [B] PRNG keys.
      bound: what takes p's place in the test; LOSSY. None for the exact rule.
    """
    accept_keys, residual_keys = split_rows(keys, 2)
    bound = p if bound is None else bound
    passed = _passes(bound, draft, accept_keys) & _tested(draft)
    num_accepted = jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1)  # [B]
    following = sample(residual_keys, _next_distribution(p, draft, num_accepted))
    return chain_verification(draft, num_accepted, following[:, None], overlap(bound[:, :-1], draft))


def verify_greedy(best: Array, draft: Draft) -> Verification:
    """What `verify_chain` makes of one-hot p, at best [B, G + 1]: a token passes where it is the target's."""
    same = draft.tokens == best[:, :-1]
    num_accepted = jnp.cumprod((same & _tested(draft)).astype(jnp.int32), axis=1).sum(1)
    beta = same.astype(jnp.float32) if draft.probs is None else at_token(draft.probs, best[:, :-1])
    return Verification(num_accepted, best, _chain_nodes(best), beta)


def chain_verification(draft: Draft, num_accepted: Array, following: Array, beta: Array) -> Verification:
    """The verdict that keeps the first num_accepted [B] tokens of a chain, with `following` [B, 1] after them."""
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(drafted.shape[1]) < num_accepted[:, None], drafted, following)
    return Verification(num_accepted, tokens, _chain_nodes(tokens), beta)


def _chain_nodes(tokens: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(1, tokens.shape[1] + 1), tokens.shape)


def _tested(draft: Draft) -> Array:
    return jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]  # [B, G]


def _passes(bound: Array, draft: Draft, keys: Array) -> Array:
    """[B, G] bool, the test of each token by itself; one random number for each."""
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(split_rows(keys, draft.tokens.shape[1]).T)
    q = 1.0 if draft.probs is None else at_token(draft.probs, draft.tokens)
    return uniform * q < at_token(bound[:, :-1], draft.tokens)


def _next_distribution(p: Array, draft: Draft, num_accepted: Array) -> Array:
    """[B, V]: the residual at the rejected position, or p where no test failed."""

    def row(array, index):  # [B, N, V], [B] -> [B, V]
        return jnp.take_along_axis(array, index[:, None, None], axis=1)[:, 0]

    if draft.tokens.shape[1] == 0:
        return p[:, 0]
    p_next = row(p, num_accepted)
    rejected = num_accepted < draft.length
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    if draft.probs is None:
        token = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)
        q_next = (jnp.arange(p.shape[-1]) == token).astype(jnp.float32)
    else:
        q_next = row(draft.probs, index)
    return jnp.where(rejected[:, None], residual_distribution(p_next, q_next), p_next)
