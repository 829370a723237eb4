"""Pairs of random T5s of real shapes: a large one that contains a small one, for timing without trained weights.

The small model's features, heads and layers come first in the large one; all other weights are random. What those
write into the residual stream is multiplied by `writes`. At 0 both models have the same logits; the larger
`writes`, the less often their most probable tokens agree. The time of a dense product depends on its shape only,
not on its values.

Axes: V vocabulary, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from flax import nnx

from spec_jax.models.t5 import T5, T5Config, T5Module

# T5 v1.0's shapes, but with an untied head: with a tied head, random weights repeat one token.
SMALL = T5Config(
    vocab_size=32128,
    d_model=512,
    d_kv=64,
    d_ff=2048,
    num_heads=8,
    num_encoder_layers=6,
    num_decoder_layers=6,
    activation='relu',
    gated=False,
)
BASE = dataclasses.replace(
    SMALL, d_model=768, d_ff=3072, num_heads=12, num_encoder_layers=12, num_decoder_layers=12
)
LARGE = dataclasses.replace(
    SMALL, d_model=1024, d_ff=4096, num_heads=16, num_encoder_layers=24, num_decoder_layers=24
)
# The sizes to compare at, and `writes` for each; a report gives the share of draft tokens accepted.
SHAPES = {'base': (BASE, 0.15), 'large': (LARGE, 0.12)}

_WIDENED = ('d_model', 'd_ff', 'num_heads', 'num_encoder_layers', 'num_decoder_layers')
_WRITERS = ('embedding', 'out', 'down')  # leaves that write into the residual stream
_EMBEDDING = 3.0  # relative to what the layers add; with a smaller one the text soon repeats itself
_HEAD = 8.0  # the most probable token has a probability of about .6, as with trained weights


def endless_t5(config: T5Config, seed: int) -> T5:
    """A T5 of random weights, as NumPy arrays, whose greedy text varies and never ends.

    Args:
      config: with an untied head.
      seed: of the weights.
    """
    leaves = {path: _random(path, shape, draw) for path, shape, draw in _leaves(config, seed)}
    return _model(config, leaves)


def widen(draft: T5, config: T5Config, writes: float, seed: int) -> T5:
    """A T5 of `config`, as NumPy arrays, that contains `draft`; the smaller `writes`, the more often both agree.

    Args:
      draft: not laid out by `for_decoding`.
      config: no narrower and no shallower than the draft's, and otherwise alike.
      writes: factor on what the other weights write into the residual stream; 0 gives the draft's logits.
      seed: of the other weights.

    Raises:
      ValueError: the draft does not fit in.
    """
    _check(draft.config, config)
    held = {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(draft.params)}
    # The added features are 0 and lower the mean square that a norm divides by.
    shrink = np.float32(math.sqrt(draft.config.d_model / config.d_model))
    leaves = {}
    for path, shape, draw in _leaves(config, seed):
        leaf = leaves[path] = _random(path, shape, draw)
        if path[-1] in _WRITERS:
            leaf *= np.float32(writes)
        if path in held:
            leaf[tuple(map(slice, held[path].shape))] = held[path]
        if path[-1] == 'scale':
            leaf *= shrink
    return _model(config, leaves)


def _leaves(config, seed):
    """Path, shape and a separate generator for each leaf."""
    shapes = nnx.state(nnx.eval_shape(lambda: T5Module(config, rngs=nnx.Rngs(0))), nnx.Param)
    for number, (path, leaf) in enumerate(nnx.to_flat_state(shapes)):
        yield path, leaf.shape, np.random.default_rng((seed, number))


def _random(path, shape, draw) -> np.ndarray:
    kind = path[-1]
    if kind == 'scale':
        return np.ones(shape, np.float32)
    std = dict(
        embedding=_EMBEDDING,
        head=_HEAD * shape[0] ** -0.5,
        table=1.0,
        query=(shape[0] * shape[-1]) ** -0.5,
        out=(shape[0] * shape[1]) ** -0.5,
    ).get(kind, shape[0] ** -0.5)
    return draw.standard_normal(shape, np.float32) * np.float32(std)


def _model(config: T5Config, leaves: dict[tuple, np.ndarray]) -> T5:
    leaves['head',][:, [config.eos_id, config.pad_id]] = 0  # far below the highest logit: no text ends
    return T5(nnx.from_flat_state({path: nnx.Param(leaf) for path, leaf in leaves.items()}), config)


def _check(small: T5Config, large: T5Config) -> None:
    sizes = {name: (getattr(small, name), getattr(large, name)) for name in _WIDENED}
    for name, (held, room) in sizes.items():
        if held > room:
            raise ValueError(
                f"{name}: expected at least the draft's {held}, got {room}; choose a larger target"
            )
    alike = dataclasses.replace(large, **{name: held for name, (held, _) in sizes.items()})
    if alike != small:
        raise ValueError(
            f'expected a target like its draft but for {", ".join(_WIDENED)}; got {large} and {small}'
        )
