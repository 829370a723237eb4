"""The one way from logits to a distribution, and from a distribution to a token.

The accept test, the residual, the bonus token, the draft's own sampling and the plain decoder all come through
here, in float32. At temperature 0 the distribution is one-hot; where its token is all that counts, `likeliest`
takes that from the logits, and neither a distribution nor a random number is made.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from spec_jax.runtime import selection
from spec_jax.runtime.sharding import whole_distributions


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How logits become a distribution; hashable, a static argument of the compiled loop.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_k: keep the k most probable tokens, and all that tie with the k-th; 0 keeps all.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p, and all that tie
        with its last; applied after top_k; 1 keeps all.
      vocab_limit: ids at and above it are never drawn (rows of the head that the tokenizer does not
        have); None allows all.

    Raises:
      ValueError: for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_limit: int | None = None

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f'temperature: expected a number >= 0, got {self.temperature}; 0 is greedy')
        if self.top_k < 0:
            raise ValueError(f'top_k: expected an integer >= 0, got {self.top_k}; 0 keeps all tokens')
        if not 0 < self.top_p <= 1:
            raise ValueError(f'top_p: expected a number in (0, 1], got {self.top_p}; 1 keeps all tokens')
        if self.vocab_limit is not None and self.vocab_limit < 1:
            raise ValueError(f'vocab_limit: expected the size of the tokenizer, got {self.vocab_limit}')


GREEDY = SamplingConfig(temperature=0.0)


def logits_to_probs(logits: Array, config: SamplingConfig) -> Array:
    """The distribution [..., V] float32 that a token is drawn from, of logits [..., V]; sums to 1.

    A row is NaN throughout where its allowed logits have a NaN or +inf, or nothing above -inf.
    """
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]
    if config.temperature == 0:
        token = likeliest(logits, config)[..., None]
        return jnp.where(token >= 0, (jnp.arange(vocab_size) == token).astype(jnp.float32), jnp.nan)
    logits = _allowed(logits, config)
    scaled = (logits - logits.max(-1, keepdims=True)) / config.temperature  # this way round: no overflow
    probs = jax.nn.softmax(scaled, axis=-1)
    if config.top_k or config.top_p < 1:
        probs = whole_distributions(probs)
    if 0 < config.top_k < vocab_size:
        probs = selection.keep_highest(probs, lambda kept: (kept > 0).sum(-1, keepdims=True) >= config.top_k)
    if config.top_p < 1:
        probs = selection.keep_highest(probs, lambda kept: kept.sum(-1, keepdims=True) >= config.top_p)
    return probs


def likeliest(logits: Array, config: SamplingConfig) -> Array:
    """The token [...] int32 that has all of `logits_to_probs` at temperature 0, of logits [..., V].

    Of several with the highest logit it is the first; -1 where the distribution would be NaN.
    """
    logits = _allowed(logits.astype(jnp.float32), config)
    highest = logits.max(-1)
    return jnp.where(jnp.isfinite(highest), selection.first(logits == highest[..., None]), -1)


def _allowed(logits: Array, config: SamplingConfig) -> Array:
    """logits [..., V], -inf from the limit of the vocabulary on."""
    vocab_size = logits.shape[-1]
    if config.vocab_limit is None or config.vocab_limit >= vocab_size:
        return logits
    return jnp.where(jnp.arange(vocab_size) < config.vocab_limit, logits, -jnp.inf)


def sample(keys: Array, weights: Array) -> Array:
    """Draws one token a row [B] int32 by inverting the cumulative sum; one random number each.

    Args:
      keys: [B] PRNG keys.
      weights: [B, V] float32 >= 0, in proportion to the probabilities; a token of weight 0 never comes out.
    """
    return selection.invert_cumulative(weights, jax.vmap(jax.random.uniform)(keys))


def row_keys(key: Array, rows) -> Array:
    """[B] PRNG keys from a run's scalar key and the number of each row [B], such as a line's, and nothing else."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.asarray(rows, jnp.uint32))


def split_rows(keys: Array, num: int) -> Array:
    """[B] PRNG keys -> [num, B], `num` independent keys for each row."""
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(keys)
