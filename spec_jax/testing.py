"""Models and drafts whose distributions are given by a table, and exact enumeration.

For tests of this library and of user-written drafts: the correct output distribution is known in closed form.

    target = TableModel.random(jax.random.key(0), vocab_size=5, order=2)
    drafter = ModelDrafter(TableModel.random(jax.random.key(1), vocab_size=5))
    inputs = prompts([0] * 10_000)
    output = generate(target, drafter, inputs, key, DecodeConfig(gamma=3, max_new_tokens=4, sampling=sampling))

    p = next_distributions(target, prompts([0]), 4, sampling)  # p[i] is [V] * (i + 1)
    chi_square(histogram(output.tokens, 5), joint(p))  # a p-value

Axes: B rows, G draft length, T tokens of one call, L cache slots, R tables or scripts, N places of a text,
V vocabulary, D model width (here V).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import Array

from spec_jax import cache as kv
from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.models.base import Model, ModelSpec
from spec_jax.models.blocks import draft_block
from spec_jax.sampling import SamplingConfig, logits_to_probs
from spec_jax.types import Block, Cache, Context, Draft, Inputs, Prefill
from spec_jax.verification import residual_distribution

# --- models -------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class TableCache:
    """Cache of a `TableModel`.

    Attributes:
      self_attention: a `KVCache` whose single layer of values, [B, 1, L, 1] int32, holds the tokens; no keys.
      table: [B] int32, which table a row reads.
    """

    self_attention: kv.KVCache
    table: Array


@flax.struct.dataclass
class TableModel:
    """Next-token logits looked up by the last `order` tokens; text before the start token is start tokens.

    The tokens are read back from a `KVCache`, through its mask and positions as attention would read them, so that
    a wrong cache changes the output: a stale token gives another row of the table, and a query that does not see
    exactly one slot for each position up to its own gets NaN. As an encoder-decoder it begins with a start token,
    and the prompt selects the table; `PromptedTable` continues the prompt itself.

    Attributes:
      table: [R, V, ..., V] float32 logits, with one axis for each of the last `order` tokens, oldest first,
        then one for the next token. The first token of a row's prompt, modulo R, selects its table.
      start_id: the token that every output starts from (not part of the output).
      eos_id: the token that ends an output; -1 for texts that never end.
      pad_id: see `models.base.ModelSpec`.
      feature_layers: each gives the hidden state, V numbers, as a feature; the layer numbers are not used.
    """

    table: Array
    start_id: int = flax.struct.field(pytree_node=False, default=0)
    eos_id: int = flax.struct.field(pytree_node=False, default=-1)
    pad_id: int = flax.struct.field(pytree_node=False, default=0)
    feature_layers: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())

    @classmethod
    def random(cls, key: Array, vocab_size: int, *, order=1, num_tables=1, scale=1.5, **ids) -> TableModel:
        """Normally distributed logits; the larger `scale`, the more peaked the distributions."""
        shape = (num_tables,) + (vocab_size,) * (order + 1)
        return cls(scale * jax.random.normal(key, shape), **ids)

    @classmethod
    def from_probs(cls, probs, **ids) -> TableModel:
        """From probabilities [R, V, ..., V] instead of logits; 0 is allowed."""
        with np.errstate(divide='ignore'):
            return cls(jnp.asarray(np.log(np.asarray(probs, np.float32))), **ids)

    @classmethod
    def from_texts(cls, texts: Sequence[Sequence[int]], vocab_size: int, *, sure=10.0, **ids) -> TableModel:
        """Table r's greedy output is `texts[r]`, whose tokens are all different and not `start_id`; a token
        that is followed by nothing is followed by the smallest id. `sure` is the logit of the correct token
        among zeros."""
        table = np.zeros((len(texts), vocab_size, vocab_size), np.float32)
        for row, text in zip(table, texts, strict=True):
            row[[ids.get('start_id', 0), *text[:-1]], text] = sure
        return cls(jnp.asarray(table), **ids)

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    @property
    def order(self) -> int:
        return self.table.ndim - 2

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(self.vocab_size, (self.eos_id,), self.pad_id, self.feature_layers)

    def prefill(self, inputs: Inputs, num_slots: int) -> Prefill:
        batch = inputs.tokens.shape[0]
        tokens = jnp.full((batch, 1 + num_slots), self.start_id, jnp.int32)
        one = jnp.ones((batch,), jnp.int32)
        return Prefill(Context(tokens, start=one, length=one), self.empty_cache(inputs, 1 + num_slots))

    def empty_cache(self, inputs: Inputs, num_tokens: int) -> TableCache:
        slots = kv.init(1, inputs.tokens.shape[0], 1, num_tokens, 1, jnp.int32)
        return TableCache(slots, inputs.tokens[:, 0] % self.table.shape[0])

    def decode(self, block: Block, cache: TableCache) -> tuple[Array, Array | None, TableCache]:
        tokens, positions = block.tokens, block.positions
        stored = kv.store(cache.self_attention, 0, tokens[:, None, None], tokens[:, None, :, None])
        seen = kv.visible(stored, block)  # [B, T, L]
        slots = kv.slot_positions(stored, block)[:, None]

        index = [jnp.broadcast_to(cache.table[:, None], tokens.shape)]  # [B, T] for each axis of the table
        sound = seen.sum(-1) == positions + 1
        for back in reversed(range(self.order)):
            match = seen & (slots == (positions - back)[:, :, None])
            token = jnp.where(match, stored.values[0][:, :, :, 0], 0).sum(-1)
            before_start = positions < back
            index.append(jnp.where(before_start, self.start_id, token))
            sound &= before_start | (match.sum(-1) == 1)
        sound |= positions < 0  # the output at a filler is not used
        hidden = self.table.at[tuple(index)].get(mode='clip')  # an id outside the table reads its last row
        hidden = jnp.where(sound[:, :, None], hidden, jnp.nan)
        features = jnp.tile(hidden, len(self.feature_layers)) if self.feature_layers else None
        return hidden, features, cache.replace(self_attention=stored)

    def logits(self, hidden: Array) -> Array:
        return hidden

    def embed(self, tokens: Array) -> Array:
        return jax.nn.one_hot(tokens, self.vocab_size)

    def keep(self, cache: TableCache, nodes: Array | None, length: Array) -> TableCache:
        return cache.replace(self_attention=kv.keep(cache.self_attention, nodes, length))


@flax.struct.dataclass
class PromptedTable(TableModel):
    """A `TableModel` as a decoder-only model: the text is the prompt, then the output."""

    def prefill(self, inputs: Inputs, num_slots: int) -> Prefill:
        tokens = jnp.pad(inputs.tokens, ((0, 0), (0, num_slots)), constant_values=self.start_id)
        length = jnp.maximum(inputs.mask.sum(-1, dtype=jnp.int32), 1)
        cache, size = self.empty_cache(inputs, tokens.shape[1]), inputs.tokens.shape[1] - 1
        features = None
        if size:
            positions = jnp.broadcast_to(jnp.arange(size), (len(tokens), size))
            _, features, cache = self.decode(Block(tokens[:, :size], positions), cache)
        cache = self.keep(cache, None, length - 1)
        return Prefill(Context(tokens, start=length, length=length), cache, features)


@flax.struct.dataclass
class ModelWrapper:
    """Passes every call on to `model`; subclasses change one method."""

    model: Model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def prefill(self, inputs: Inputs, num_slots: int) -> Prefill:
        return self.model.prefill(inputs, num_slots)

    def decode(self, block: Block, cache: Cache) -> tuple[Array, Array | None, Cache]:
        return self.model.decode(block, cache)

    def logits(self, hidden: Array) -> Array:
        return self.model.logits(hidden)

    def embed(self, tokens: Array) -> Array:
        return self.model.embed(tokens)

    def keep(self, cache: Cache, nodes: Array | None, length: Array) -> Cache:
        return self.model.keep(cache, nodes, length)


@flax.struct.dataclass
class NanAt(ModelWrapper):
    """Its hidden states are NaN for the token at `position`, [B] or scalar int32."""

    position: Array

    def decode(self, block: Block, cache: Cache) -> tuple[Array, Array | None, Cache]:
        hidden, features, cache = self.model.decode(block, cache)
        struck = block.positions == jnp.reshape(self.position, (-1, 1))  # [B, T]
        return jnp.where(struck[:, :, None], jnp.nan, hidden), features, cache


class TraceCounter:
    """Counts the traces of the models that it is given to."""

    def __init__(self):
        self.count = 0


@flax.struct.dataclass
class Traced(ModelWrapper):
    """Counts the runs of the Python code of `decode`: inside `jax.jit`, one or more for each compilation."""

    counter: TraceCounter = flax.struct.field(pytree_node=False)

    def decode(self, block: Block, cache: Cache) -> tuple[Array, Array | None, Cache]:
        self.counter.count += 1
        return self.model.decode(block, cache)


# --- drafts -------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class ScriptedDrafter:
    """Proposes the tokens of a script, whatever the text so far.

    Attributes:
      tokens: [R, N] int32, the proposal for each place of the output; the first token of a row's prompt,
        modulo R, selects its script. After the end of a script its last column is repeated.
      probs: [R, N, V] float32, reported as the q of each token, correct or not; None for q one-hot.
      lengths: [R, N] int32, how many tokens are valid in a proposal that begins at a place; None for all.
    """

    tokens: Array
    probs: Array | None = None
    lengths: Array | None = None

    def shape(self, gamma: int) -> DraftShape:
        return DraftShape(nodes=gamma, depth=gamma, deterministic=self.probs is None)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Array:
        return inputs.tokens[:, 0] % self.tokens.shape[0]  # [B], which script

    def propose(self, state: Array, round: Round) -> tuple[Draft, Array]:
        place = round.context.emitted[:, None] + jnp.arange(round.gamma)  # [B, G]
        place = jnp.minimum(place, self.tokens.shape[1] - 1)
        script = state[:, None]
        length = jnp.full_like(state, round.gamma)
        if self.lengths is not None:
            length = jnp.minimum(self.lengths[state, place[:, 0]], round.gamma)
        probs = None if self.probs is None else self.probs[script, place]
        return Draft(self.tokens[script, place], probs, length), state

    def update(self, state: Array, outcome: Outcome) -> Array:
        return state


# --- exact enumeration --------------------------------------------------------------------------------------


def prompts(first: Sequence[int]) -> Inputs:
    """One prompt of a single token for each row [B]; -1 makes a filler row, whose mask is empty."""
    tokens = jnp.asarray(first, jnp.int32)[:, None]
    return Inputs(jnp.maximum(tokens, 0), tokens >= 0)


def next_distributions(
    model: Model, prompt: Inputs, length: int, sampling: SamplingConfig
) -> list[np.ndarray]:
    """A model's distributions over texts of `length` tokens, by running it on every text of that length.

    Args:
      model: with a V so small that V ** length texts can be enumerated.
      prompt: of one row.

    Returns:
      `length` arrays; the i-th, [V] * (i + 1) float32, is the distribution of the token after i given
      tokens. Texts continue after an EOS; see `joint`.
    """
    vocab_size = model.spec.vocab_size
    tokens = np.array(list(itertools.product(range(vocab_size), repeat=length - 1)), np.int32)
    tokens = tokens.reshape(-1, length - 1)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, len(tokens), axis=0), prompt)
    probs = np.asarray(_score(model, repeated, tokens, sampling=sampling))  # [V ** (length - 1), length, V]
    probs = probs.reshape((vocab_size,) * (length - 1) + (length, vocab_size))
    return [probs[(slice(None),) * i + (0,) * (length - 1 - i) + (i,)] for i in range(length)]


@partial(jax.jit, static_argnames='sampling')
def _score(model, inputs, tokens, *, sampling):
    """p [B, length, V] of the tokens [B, length - 1] and of the one after them."""
    prefill = model.prefill(inputs, tokens.shape[1] + 1)
    block = draft_block(prefill.context, Draft(tokens, None, jnp.full(len(tokens), tokens.shape[1])))
    hidden, _, _ = model.decode(block, prefill.cache)
    return logits_to_probs(model.logits(hidden), sampling)


def enumerate_round(p: Sequence[np.ndarray], q: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The exact distribution of what one round emits, by algorithm 1 of Leviathan, Kalman and Matias (2023).

    Every draft x is weighted with its probability under q and with that of passing its tests,
    q(x) min(1, p(x) / q(x)) a token; a rejected token is replaced from `residual_distribution`.

    Args:
      p: G + 1 arrays of the target's, as `next_distributions` returns: the i-th is [V] * (i + 1).
      q: G arrays of the draft's, one-hot for a draft that does not sample.

    Returns:
      G + 1 arrays; the i-th, [V] * (i + 1) float64, is the probability that i draft tokens are accepted
      and these i + 1 tokens emitted. All together sum to 1; `complete` compares them with the target.
    """
    emitted = []
    reach = np.ones(())  # [V] * i: these i tokens were drafted, and all passed
    for p_i, q_i in zip(p[:-1], q, strict=True):
        passed = np.minimum(p_i, q_i).astype(np.float64)
        rejected = (q_i - passed).sum(-1)
        residual = np.asarray(residual_distribution(jnp.asarray(p_i), jnp.asarray(q_i)), np.float64)
        emitted.append((reach * rejected)[..., None] * residual)
        reach = reach[..., None] * passed
    return [*emitted, reach[..., None] * p[-1]]


def complete(emitted: Sequence[np.ndarray], p: Sequence[np.ndarray]) -> np.ndarray:
    """The joint distribution of G + 1 tokens when the target continues what a round emitted.

    Speculative decoding is exact when this equals `joint(p)`.

    Args:
      emitted: from `enumerate_round`.
      p: as given to it.

    Returns:
      [V] * (G + 1) float64.
    """
    total = np.zeros(())
    for emitted_i, p_i in zip(emitted, p, strict=True):
        total = total[..., None] * p_i + emitted_i
    return total


def joint(p: Sequence[np.ndarray], eos_id: int = -1, pad_id: int = 0) -> np.ndarray:
    """The joint distribution of an output of len(p) tokens.

    Args:
      p: as `next_distributions` returns.
      eos_id: only `pad_id` follows it; -1 for texts that never end.

    Returns:
      [V] * len(p) float64.
    """
    vocab = np.arange(p[0].shape[-1])
    total, ended = np.ones(()), np.zeros((), bool)
    for p_i in p:
        total = total[..., None] * np.where(ended[..., None], vocab == pad_id, p_i.astype(np.float64))
        ended = ended[..., None] | (vocab == eos_id)
    return total


def histogram(tokens: Array, vocab_size: int) -> np.ndarray:
    """How often each text occurs: tokens [B, N] -> [V] * N counts."""
    tokens = np.asarray(tokens)
    shape = (vocab_size,) * tokens.shape[1]
    return np.bincount(np.ravel_multi_index(tokens.T, shape), minlength=np.prod(shape)).reshape(shape)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's test of counts against probabilities, both of the same shape.

    Returns:
      The p-value; 0 where a cell of probability 0 has a count. The rarest cells are pooled, so that at least 5
      are expected in each.
    """
    counts, probs = np.ravel(counts).astype(np.float64), np.ravel(probs).astype(np.float64)
    if counts[probs == 0].any():
        return 0.0
    order = np.argsort(-probs)
    counts, expected = counts[order], counts.sum() * probs[order] / probs.sum()
    rarer = np.append(expected[:0:-1].cumsum()[::-1], 0)  # expected in all cells after each
    kept = (expected >= 5) & ((rarer >= 5) | (rarer == 0))
    counts = np.append(counts[kept], counts[~kept].sum())
    expected = np.append(expected[kept], expected[~kept].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return 1.0
    return float(scipy.special.chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()))
