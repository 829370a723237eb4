"""The targets of the suite, its prompts, and the sizes that its programs share.

Axes: B rows, G draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import Drafter
from spec_jax.generation import generate
from spec_jax.models.base import Model, ModelSpec
from spec_jax.sampling import SamplingConfig, logits_to_probs, row_keys
from spec_jax.state import Output
from spec_jax.testing import ModelWrapper, TableModel
from spec_jax.types import Inputs

V, EOS, ROWS, GAMMA, LIMIT = 8, 1, 128, 3, 24  # for checks of each row
SMALL_V, SMALL_GAMMA, SAMPLES = 5, 2, 20_000  # for checks that count texts: a batch has many of each
SAMPLED = SamplingConfig()
CONFIG = DecodeConfig(GAMMA, LIMIT, SAMPLED)


@flax.struct.dataclass
class Ending(ModelWrapper):
    """Ends texts at `eos`, scalar int32: an argument, so that one program serves texts with an end and without."""

    eos: Array

    @property
    def spec(self) -> ModelSpec:
        return dataclasses.replace(self.model.spec, eos_ids=(self.eos,))


def table_target(vocab_size: int) -> TableModel:
    """A target with a table for each token; its EOS has a raised probability."""
    model = TableModel.random(jax.random.key(7), vocab_size, order=2, num_tables=vocab_size, eos_id=EOS)
    return model.replace(table=model.table.at[..., EOS].add(0.5))


def ending(target: TableModel, eos: int = EOS) -> Ending:
    """The target with another EOS; -1 for texts that go on to the limit."""
    return Ending(target, jnp.int32(eos))


def endless(target: Model) -> Ending:
    """The target with texts that go on to the limit."""
    return Ending(target, jnp.int32(-1))


def table_probs(target: TableModel, sampling: SamplingConfig) -> np.ndarray:
    """[tables, V, V, V] float32: the target's next token by the last two."""
    return np.asarray(logits_to_probs(target.table, sampling))


def prompts(first: np.ndarray, vocab_size: int) -> Inputs:
    """A prompt of 1 .. 6 tokens for each of `first` [B] int, its first token; equal for equal first tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, (vocab_size, 6)).astype(np.int32)[first]
    tokens[:, 0] = first
    length = random.permutation(np.resize(np.arange(1, 7), vocab_size))[first]
    return Inputs(jnp.asarray(tokens), jnp.arange(6) < length[:, None])


def rows(num: int = ROWS) -> tuple[Inputs, Array]:
    """The prompts and keys of the checked rows."""
    return prompts(np.arange(num) % V, V), row_keys(jax.random.key(0), np.arange(num))


def take(tree, index):
    """Some rows of everything in a tree."""
    return jax.tree.map(lambda array: array[np.asarray(index)], tree)


def decode(target: Ending, drafter: Drafter, inputs: Inputs, keys: Array, sampling=SAMPLED) -> Output:
    """`generate` at the shared sizes; NumPy arrays."""
    output = generate(target, drafter, inputs, keys, dataclasses.replace(CONFIG, sampling=sampling))
    return jax.tree.map(np.asarray, output)


def acceptances(stats) -> str:
    """The accepted lengths, for a detail."""
    return f'rounds by number of accepted tokens: {np.asarray(stats.histogram).sum(0).tolist()}'
