"""T5 in Hugging Face's form: tensor names, axis order, configuration.

Axes: V vocabulary, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable

import numpy as np

from spec_jax.models import hf_folder
from spec_jax.models.t5 import T5Config
from spec_jax.models.t5_stored import leaf_shapes

# Our path (a pattern in which a dot is a literal dot), Hugging Face's name, and how many of our leading axes a
# product sums over. Hugging Face stores [out, in], so 1 means that ours is [D, H, K], [D, F], [F, D] or [D, V], 2
# that it is [H, K, D], and 0 that the two are the same. Loading and saving both use it.
_TABLE = (
    (r'embedding', r'shared.weight', 0),  # [V, D]
    (r'head', r'lm_head.weight', 1),  # [D, V]
    (r'(\w+)_bias.table', r'\1.block.0.layer.0.SelfAttention.relative_attention_bias.weight', 0),
    (r'(\w+)_norm.scale', r'\1.final_layer_norm.weight', 0),
    (r'encoder.(\d+).attention_norm.scale', r'encoder.block.\1.layer.0.layer_norm.weight', 0),
    (r'encoder.(\d+).attention.([qkv])\w+', r'encoder.block.\1.layer.0.SelfAttention.\2.weight', 1),
    (r'encoder.(\d+).attention.out', r'encoder.block.\1.layer.0.SelfAttention.o.weight', 2),
    (r'encoder.(\d+).mlp_norm.scale', r'encoder.block.\1.layer.1.layer_norm.weight', 0),
    (r'encoder.(\d+).mlp.(\w+)', r'encoder.block.\1.layer.1.DenseReluDense.{\2}.weight', 1),
    (r'decoder.(\d+).self_norm.scale', r'decoder.block.\1.layer.0.layer_norm.weight', 0),
    (r'decoder.(\d+).self_attention.([qkv])\w+', r'decoder.block.\1.layer.0.SelfAttention.\2.weight', 1),
    (r'decoder.(\d+).self_attention.out', r'decoder.block.\1.layer.0.SelfAttention.o.weight', 2),
    (r'decoder.(\d+).cross_norm.scale', r'decoder.block.\1.layer.1.layer_norm.weight', 0),
    (r'decoder.(\d+).cross_attention.([qkv])\w+', r'decoder.block.\1.layer.1.EncDecAttention.\2.weight', 1),
    (r'decoder.(\d+).cross_attention.out', r'decoder.block.\1.layer.1.EncDecAttention.o.weight', 2),
    (r'decoder.(\d+).mlp_norm.scale', r'decoder.block.\1.layer.2.layer_norm.weight', 0),
    (r'decoder.(\d+).mlp.(\w+)', r'decoder.block.\1.layer.2.DenseReluDense.{\2}.weight', 1),
)
_PLAIN_MLP = {'up': 'wi', 'down': 'wo'}
_GATED_MLP = {'gate': 'wi_0', 'up': 'wi_1', 'down': 'wo'}

_EMBEDDING, _HEAD = 'shared.weight', 'lm_head.weight'
_COPIES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')  # of the embedding, in some files
_UNUSED = {'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'}  # in some old files

# Our field, Hugging Face's key, and the default where the key is absent.
_SIZES = (
    ('vocab_size', 'vocab_size', 32128),
    ('d_model', 'd_model', 512),
    ('d_kv', 'd_kv', 64),
    ('d_ff', 'd_ff', 2048),
    ('num_heads', 'num_heads', 8),
    ('num_encoder_layers', 'num_layers', 6),
    ('num_decoder_layers', 'num_decoder_layers', 6),  # num_layers, where only that is given
    ('num_buckets', 'relative_attention_num_buckets', 32),
    ('max_distance', 'relative_attention_max_distance', 128),
)
# feed_forward_proj: our activation and `gated`, and the same activation's name under `dense_act_fn` in some files.
_FEED_FORWARD = {'relu': ('relu', False, 'relu'), 'gated-gelu': ('gelu', True, 'gelu_new')}


class HuggingFaceT5:
    """A T5 folder of Hugging Face's form, as `t5_stored.StoredT5` describes.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the files are damaged, do not hold a supported T5, or contradict each other.
    """

    def __init__(self, folder: pathlib.Path):
        raw = hf_folder.read_config(folder)
        where = folder / hf_folder.CONFIG
        if (kind := raw.get('model_type')) != 't5':
            raise ValueError(
                f'{where}: expected model_type "t5", got {kind!r}; name a folder that holds a T5'
            )
        self._checkpoint = hf_folder.Checkpoint(folder)
        self.config = config_from_hf(raw, where, tied_head=_settle_embeddings(self._checkpoint))
        self._weights = _weights(self.config)
        names = {weight.name for weight in self._weights.values()}
        self._checkpoint.expect(names, ignore=_UNUSED)
        low = {self._checkpoint.kind(name) for name in names} == {'BF16'}
        self.dtype = np.dtype('bfloat16' if low else 'float32')

    def read(self, name: str) -> np.ndarray:
        weight = self._weights[name]
        return weight.from_file(self._checkpoint.read(weight.name, weight.file_shape))


def write(
    folder: pathlib.Path,
    config: T5Config,
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    max_shard_size: int,
) -> None:
    """Writes a folder that transformers loads as T5ForConditionalGeneration.

    Args:
      folder: an empty one.
      config: sizes.
      dtype: of the stored weights.
      read: gives a parameter by our name, in our shape; called once for each.
      max_shard_size: bytes beyond which the weights are split over several files.
    """
    ours = {weight.name: (name, weight) for name, weight in _weights(config).items()}

    def tensor(theirs: str) -> np.ndarray:
        name, weight = ours[theirs]
        return weight.to_file(np.asarray(read(name), dtype))

    shapes = {theirs: weight.file_shape for theirs, (_, weight) in ours.items()}
    hf_folder.write_tensors(folder, shapes, dtype, tensor, max_shard_size)
    hf_folder.write_config(folder, config_to_hf(config, dtype))


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A parameter's place in a file."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # ours
    input_axes: int  # as in _TABLE

    @property
    def file_shape(self) -> tuple[int, ...]:
        if self.input_axes == 0:
            return self.shape
        inputs, outputs = self.shape[: self.input_axes], self.shape[self.input_axes :]
        return math.prod(outputs), math.prod(inputs)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        return array if self.input_axes == 0 else _transposed(array).reshape(self.shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        return array if self.input_axes == 0 else _transposed(array.reshape(self.file_shape[::-1]))


def _transposed(array: np.ndarray) -> np.ndarray:
    """[M, N] -> [N, M] in memory, 32 rows at a time: all at once NumPy takes twice as long or more."""
    out = np.empty(array.shape[::-1], array.dtype)
    for i in range(0, len(array), 32):
        out[:, i : i + 32] = array[i : i + 32].T
    return out


def _weights(config: T5Config) -> dict[str, _Weight]:
    """Each parameter's place in the files, by our name."""
    weights = {}
    for path, shape in leaf_shapes(config).items():
        name, input_axes = _hf_name(path, config)
        weights[path] = _Weight(name, shape, input_axes)
    return weights


def _hf_name(path: str, config: T5Config) -> tuple[str, int]:
    """Hugging Face's name of our path, and the number of input axes."""
    for ours, theirs, input_axes in _TABLE:
        if match := re.fullmatch(ours, path):
            name = match.expand(theirs).format(**(_GATED_MLP if config.gated else _PLAIN_MLP))
            return name, input_axes
    raise KeyError(path)


def _settle_embeddings(checkpoint: hf_folder.Checkpoint) -> bool:
    """Drops copies of the embedding, and a head equal to it; returns whether the head is tied.

    That follows from the tensors, as in transformers 5, and not from the configuration.
    """
    names = [name for name in (_EMBEDDING, *_COPIES) if name in checkpoint]
    if not names:
        return True  # `expect` reports the missing embedding
    first = names[0]
    embedding = checkpoint.read(first)
    for copy in names[1:]:
        if not np.array_equal(checkpoint.read(copy), embedding):
            what = f'got {copy} unlike {first}; use a T5 with one embedding'
            raise ValueError(f'{checkpoint.folder}: expected one embedding for encoder and decoder, {what}')
        checkpoint.drop(copy)
    checkpoint.rename(first, _EMBEDDING)
    if _HEAD not in checkpoint:
        return True
    tied = np.array_equal(checkpoint.read(_HEAD), embedding)
    if tied:
        checkpoint.drop(_HEAD)
    return tied


def config_from_hf(raw: dict, where: pathlib.Path, tied_head: bool | None = None) -> T5Config:
    """Our configuration from config.json's content; `where` is for messages.

    `tied_head` is what the tensors show; None takes it from config.json.
    """
    if (kind := raw.get('model_type')) != 't5':
        raise ValueError(f'{where}: expected model_type "t5", got {kind!r}; name a folder that holds a T5')

    def number(key: str, default, least=1, below=math.inf):
        value = default if raw.get(key) is None else raw[key]
        if isinstance(value, list) and len(value) == 1:
            value = value[0]  # eos_token_id may be a list
        kinds = (int, float) if isinstance(default, float) else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < below:
            expected = 'a number' if isinstance(default, float) else 'an integer'
            expected += f' from {least} to below {below}'
            raise ValueError(f'{where}: expected {key} to be {expected}, got {value!r}; correct it')
        return value

    sizes = {ours: number(theirs, default) for ours, theirs, default in _SIZES}
    sizes['num_decoder_layers'] = number('num_decoder_layers', sizes['num_encoder_layers'])
    activation, gated = _feed_forward(raw, where)
    vocab_size = sizes['vocab_size']
    pad_id = number('pad_token_id', 0, 0, vocab_size)
    tied = raw.get('tie_word_embeddings') is not False
    scale = raw.get(
        'scale_decoder_outputs'
    )  # transformers 5; before it, an untied head's input was not scaled
    return T5Config(
        **sizes,
        activation=activation,
        gated=gated,
        tied_head=tied if tied_head is None else tied_head,
        scale_head_input=tied if scale is None else bool(scale),
        epsilon=number('layer_norm_epsilon', 1e-6, 0),
        dropout=number('dropout_rate', 0.1, 0, 1),
        start_id=number('decoder_start_token_id', pad_id, 0, vocab_size),
        eos_id=number('eos_token_id', 1, 0, vocab_size),
        pad_id=pad_id,
    )


def _feed_forward(raw: dict, where: pathlib.Path) -> tuple[str, bool]:
    """The activation, and whether it is gated."""
    kind = raw.get('feed_forward_proj', 'relu')
    if kind not in _FEED_FORWARD:
        expected = ' or '.join(_FEED_FORWARD)
        raise ValueError(f'{where}: expected feed_forward_proj {expected}, got {kind!r}; use another T5')
    activation, gated, name = _FEED_FORWARD[kind]
    if raw.get('dense_act_fn', name) != name:
        what = f'expected dense_act_fn {name} with feed_forward_proj {kind}, got {raw["dense_act_fn"]!r}'
        raise ValueError(f'{where}: {what}; use another T5, or correct it')
    return activation, gated


def config_to_hf(config: T5Config, dtype: np.dtype) -> dict:
    """config.json's content."""
    kinds = {(activation, gated): kind for kind, (activation, gated, _) in _FEED_FORWARD.items()}
    if (config.activation, config.gated) not in kinds:
        actual = f'{config.activation} with gated={config.gated}'
        raise ValueError(
            f'expected a T5 with ReLU or with gated GELU, got {actual}; change the configuration'
        )
    return {
        'architectures': ['T5ForConditionalGeneration'],
        'model_type': 't5',
        'is_encoder_decoder': True,
        **{theirs: getattr(config, ours) for ours, theirs, _ in _SIZES},
        'feed_forward_proj': kinds[config.activation, config.gated],
        'tie_word_embeddings': config.tied_head,
        'scale_decoder_outputs': config.scale_head_input,
        'layer_norm_epsilon': config.epsilon,
        'dropout_rate': config.dropout,
        'decoder_start_token_id': config.start_id,
        'eos_token_id': config.eos_id,
        'pad_token_id': config.pad_id,
        'dtype': dtype.name,
    }
