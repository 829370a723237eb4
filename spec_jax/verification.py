"""The accept/resample rule (Leviathan, Kalman and Matias 2023, algorithm 1), vectorised over a batch.

Nothing here divides by q or adds an epsilon: what comes out is distributed as p to the last bit that
float32 sums allow.

Axes: B rows, G draft length, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from spec_jax.sampling import SamplingConfig, logits_to_probs, next_token, sample, split_rows
from spec_jax.types import Draft, Verification


def acceptance_probability(p: Array, q: Array) -> Array:
    """beta, the probability that a token drawn from q is accepted (Definition 3.1, Theorem 3.5).

    Args:
      p: [..., V].
      q: [..., V].

    Returns:
      [...] sum of min(p, q) over the vocabulary.
    """
    return jnp.minimum(p, q).sum(-1)


def residual_distribution(p: Array, q: Array) -> Array:
    """norm(max(0, p - q)), what a rejected token is replaced from (section 2.3).

    Args:
      p: [..., V].
      q: [..., V].

    Returns:
      [..., V]; p itself where p <= q throughout, since no draw from q is then ever rejected.
    """
    excess = jnp.maximum(p - q, 0.0)
    total = excess.sum(-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1.0), p)


def greedy_overlap(best: Array, draft: Draft) -> Array:
    """`overlap` [B, G] where p is one-hot: what q gives to the target's token, best [B, G]."""
    if draft.probs is None:
        return (draft.tokens == best).astype(jnp.float32)
    return at_token(draft.probs, best)


def overlap(bound: Array, draft: Draft) -> Array:
    """sum of min(p, q) [B, G] at the place of each draft token (Theorem 3.5).

    Args:
      bound: [B, G, V], p, or what stands for it under lenience (`lenient_bound`).
      draft: the proposal.
    """
    if draft.probs is None:
        return jnp.minimum(at_token(bound, draft.tokens), 1.0)
    return acceptance_probability(bound, draft.probs)


def at_token(probs: Array, tokens: Array) -> Array:
    """probs [..., V] at tokens [...]; a masked sum, which reads the array once where a gather may not."""
    return jnp.where(jnp.arange(probs.shape[-1]) == tokens[..., None], probs, 0.0).sum(-1)


def lenient_bound(p: Array, logits: Array, sampling: SamplingConfig, lenience: float) -> Array:
    """What draft tokens are accepted against under lenience l (appendix A.5). LOSSY: other texts come out.

    With sampling p / l, so that no token is more likely than p / l; greedy, 1 for each token whose probability
    is at least l times the highest, and 0 for the others.

    Args:
      p: [..., V], the target's distribution under `sampling`.
      logits: [..., V], what p was made of.
      sampling: how.
      lenience: l, in (0, 1]; 1 accepts as the exact rule does.

    Returns:
      [..., V] float32, no distribution.
    """
    if sampling.temperature > 0:
        return p / lenience
    probs = logits_to_probs(logits, SamplingConfig(vocab_limit=sampling.vocab_limit))
    return (probs >= lenience * probs.max(-1, keepdims=True)).astype(jnp.float32)


def verify_chain(p: Array, draft: Draft, keys: Array, bound: Array | None = None) -> Verification:
    """Accepts the longest prefix that passes, then draws one more token.

    A token x passes where u q(x) < p(x) with u uniform in [0, 1). The token behind the prefix comes from
    the residual where a test failed, and from p where all `draft.length` tokens passed.

    Args:
      p: [B, G + 1, V] float32; p[:, i] is the target's distribution of the token after i draft tokens.
      draft: the proposal, G >= 1.
      keys: [B] PRNG keys.
      bound: what takes p's place in the test, such as `lenient_bound`; LOSSY. None for the exact rule.
    """
    num_draft = draft.tokens.shape[1]
    accept_keys, residual_keys = split_rows(keys, 2)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(split_rows(accept_keys, num_draft).T)  # [B, G]

    p_token = at_token((p if bound is None else bound)[:, :-1], draft.tokens)  # [B, G]
    q_token = 1.0 if draft.probs is None else at_token(draft.probs, draft.tokens)
    tested = jnp.arange(num_draft) < draft.length[:, None]
    passed = (uniform * q_token < p_token) & tested
    num_accepted = jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1)  # [B]

    weights = _next_distribution(p, draft, num_accepted)
    following = sample(residual_keys, weights)[:, None]  # [B, 1]
    index = jnp.arange(num_draft + 1)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    return Verification(num_accepted, jnp.where(index < num_accepted[:, None], drafted, following))


def verify_greedy(best: Array, draft: Draft) -> Verification:
    """What `verify_chain` makes of one-hot p: a token passes where it is the target's, whatever q is.

    Args:
      best: [B, G + 1] int32, the token that has all of p at each place.
      draft: the proposal, G >= 1.
    """
    tested = jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]
    passed = (draft.tokens == best[:, :-1]) & tested
    return Verification(jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1), best)


def draw_next(logits: Array, keys: Array, sampling: SamplingConfig) -> Verification:
    """What `verify_chain` makes of a draft of length 0, from the one distribution that then counts.

    Args:
      logits: [B, V], what p was made of.
      keys: [B] PRNG keys.
      sampling: how.

    Returns:
      The verdict, of G = 0; its token is -1 where p is NaN.
    """
    _, residual_keys = split_rows(keys, 2)
    token = next_token(residual_keys, logits, sampling)
    return Verification(jnp.zeros_like(token), token[:, None])


def _next_distribution(p: Array, draft: Draft, num_accepted: Array) -> Array:
    """[B, V]: the residual at the rejected position, or p where no test failed."""

    def row(array, index):  # [B, N, V], [B] -> [B, V]
        return jnp.take_along_axis(array, index[:, None, None], axis=1)[:, 0]

    p_next = row(p, num_accepted)
    rejected = num_accepted < draft.length
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    if draft.probs is None:
        token = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)
        q_next = (jnp.arange(p.shape[-1]) == token).astype(jnp.float32)
    else:
        q_next = row(draft.probs, index)
    return jnp.where(rejected[:, None], residual_distribution(p_next, q_next), p_next)
