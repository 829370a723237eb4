"""T5 checkpoints of T5X: a folder of zarr arrays, one directory each, named by paths with dots for slashes.

    target.decoder.layers_0.self_attention.query.kernel/.zarray, 0.0, ...

T5X stores no configuration beside them, so sizes and switches are inferred from shapes and names. Its optimizer's
arrays (`state.*`) and the msgpack file `checkpoint` are ignored.

Axes: V vocabulary, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import math
import pathlib
import re

import numpy as np

from spec_jax.models.t5 import T5Config
from spec_jax.models.t5_stored import leaf_shapes
from spec_jax.models.zarr_folder import Arrays

# Our name (a pattern in which a dot is a literal dot) and T5X's. Both store [in, out]; T5X has heads and head
# width as one axis.
_TABLE = (
    (r'embedding', r'token_embedder.embedding'),  # [V, D]
    (r'head', r'decoder.logits_dense.kernel'),  # [D, V]
    (r'(\w+)_bias.table', r'\1.relpos_bias.rel_embedding'),  # ours [buckets, H], T5X's [H, buckets]
    (r'(\w+)_norm.scale', r'\1.\1_norm.scale'),
    (r'encoder.(\d+).attention.(\w+)', r'encoder.layers_\1.attention.\2.kernel'),
    (r'encoder.(\d+).attention_norm.scale', r'encoder.layers_\1.pre_attention_layer_norm.scale'),
    (r'decoder.(\d+).self_attention.(\w+)', r'decoder.layers_\1.self_attention.\2.kernel'),
    (r'decoder.(\d+).self_norm.scale', r'decoder.layers_\1.pre_self_attention_layer_norm.scale'),
    (r'decoder.(\d+).cross_attention.(\w+)', r'decoder.layers_\1.encoder_decoder_attention.\2.kernel'),
    (r'decoder.(\d+).cross_norm.scale', r'decoder.layers_\1.pre_cross_attention_layer_norm.scale'),
    (r'(\w+).(\d+).mlp.(\w+)', r'\1.layers_\2.mlp.{\3}.kernel'),
    (r'(\w+).(\d+).mlp_norm.scale', r'\1.layers_\2.pre_mlp_layer_norm.scale'),
)
_PLAIN_MLP = {'up': 'wi', 'down': 'wo'}
_GATED_MLP = {'gate': 'wi_0', 'up': 'wi_1', 'down': 'wo'}
_TARGET = 'target.'  # prefix of the model's arrays
_SCANNED = re.compile(r'target\.(encoder|decoder)\.(encoder|decoder|layers)\.')


def is_t5x(folder: pathlib.Path) -> bool:
    """Whether a folder holds T5X's arrays, a directory `target.*` for each."""
    return any(path.is_dir() for path in folder.glob(f'{_TARGET}*'))


class T5X:
    """A T5 in T5X's files, as `t5_stored.StoredT5` describes.

    Args:
      folder: the one that holds `target.*`.
      d_kv: expected head width; None takes that of the arrays.

    Raises:
      ValueError: arrays are missing, damaged, or of shapes that contradict each other.
    """

    def __init__(self, folder: pathlib.Path, d_kv: int | None = None):
        names = [path.name for path in folder.glob(f'{_TARGET}*') if path.is_dir()]
        self._arrays = Arrays(folder, names, lambda name: {'driver': 'file', 'path': f'{folder / name}/'})
        self.config = _config(self._arrays, d_kv)
        self._shapes = leaf_shapes(self.config)
        self._names = {ours: _TARGET + t5x_name(ours, self.config) for ours in self._shapes}
        self._arrays.expect(set(self._names.values()), 'a T5 of such layers')
        for ours, name in self._names.items():
            self._check_shape(ours, name)
        low = all(self._arrays.dtype(name) == 'bfloat16' for name in names)
        self.dtype = np.dtype('bfloat16' if low else 'float32')

    def read(self, name: str) -> np.ndarray:
        array = self._arrays.read(self._names[name])
        return array.T if name.endswith('_bias.table') else array.reshape(self._shapes[name])

    def _check_shape(self, ours: str, name: str) -> None:
        shape, actual = self._shapes[ours], self._arrays.shape(name)
        if ours.endswith('_bias.table'):
            allowed = [shape[::-1]]
        elif ours.endswith('attention.out'):
            allowed = [(math.prod(shape[:2]), shape[2]), shape]  # [H * K, D] or [H, K, D]
        else:
            allowed = [(shape[0], math.prod(shape[1:])), shape] if len(shape) == 3 else [shape]
        if actual not in allowed:
            expected = f'{self._arrays.folder}: expected {name} of shape {allowed[0]}'
            raise ValueError(f'{expected}, as other arrays suggest, got {actual}; copy the checkpoint again')


def t5x_name(ours: str, config: T5Config) -> str:
    """T5X's name of our parameter, `target.` left out."""
    for pattern, theirs in _TABLE:
        if match := re.fullmatch(pattern, ours):
            return match.expand(theirs).format(**(_GATED_MLP if config.gated else _PLAIN_MLP))
    raise KeyError(ours)


def _config(arrays: Arrays, d_kv: int | None) -> T5Config:
    """Sizes and switches, from the first layers' shapes and names."""
    names = arrays.names
    if scanned := sorted(filter(_SCANNED.match, names)):
        what = f'got {scanned[0]} of all layers in one array; export it with scan_layers=False'
        raise ValueError(f'{arrays.folder}: expected arrays of single layers, {what}')
    gated = f'{_TARGET}encoder.layers_0.mlp.wi_0.kernel' in names
    tied = f'{_TARGET}decoder.logits_dense.kernel' not in names

    def shape(name: str, *numbers_of_axes: int) -> tuple[int, ...]:
        name = _TARGET + name
        if name not in names:
            raise ValueError(
                f'{arrays.folder}: expected the arrays of a T5, got no {name}; complete the copy'
            )
        if len(actual := arrays.shape(name)) not in numbers_of_axes:
            expected = f'expected {name} with {numbers_of_axes[0]} axes'
            raise ValueError(f'{arrays.folder}: {expected}, got {actual}; use a plain T5')
        return actual

    vocab_size, d_model = shape('token_embedder.embedding', 2)
    num_heads, num_buckets = shape('encoder.relpos_bias.rel_embedding', 2)
    query = shape('encoder.layers_0.attention.query.kernel', 2, 3)
    _, d_ff = shape(f'encoder.layers_0.mlp.{"wi_0" if gated else "wi"}.kernel', 2)
    width, rest = divmod(math.prod(query), d_model * num_heads)
    if rest or (d_kv is not None and d_kv != width):
        expected = f'{num_heads} heads of ' + (f'width {d_kv}' if d_kv else 'one width')
        raise ValueError(
            f"{arrays.folder}: expected {expected}, got a query's kernel of shape {query}; "
            'correct d_kv, or copy the checkpoint again'
        )
    return T5Config(
        vocab_size=vocab_size,
        d_model=d_model,
        d_kv=width,
        d_ff=d_ff,
        num_heads=num_heads,
        num_encoder_layers=_num_layers('encoder', names),
        num_decoder_layers=_num_layers('decoder', names),
        activation='gelu' if gated else 'relu',
        gated=gated,
        tied_head=tied,
        scale_head_input=tied,  # as T5X's `logits_via_embedding` does
        num_buckets=num_buckets,
    )


def _num_layers(stack: str, names: frozenset[str]) -> int:
    matches = [re.match(rf'target\.{stack}\.layers_(\d+)\.', name) for name in names]
    return max((int(match[1]) + 1 for match in matches if match), default=1)
