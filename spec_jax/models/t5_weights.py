"""T5 checkpoints as Hugging Face stores them, read and written: config.json beside safetensors files.

    folder or hub id  --fetch-->  folder  --load_t5-->  T5  --save_t5-->  folder

Files are parsed, never executed: no pickle, no torch. Tensors pass one at a time, so that host memory
holds little more than the weights.

Axes: V vocabulary, D model width, H heads, K head width, F feed-forward width.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.models.t5 import T5, T5Config, T5Module
from spec_jax.types import Params

_CONFIG, _WEIGHTS, _INDEX = 'config.json', 'model.safetensors', 'model.safetensors.index.json'
_TOKENIZER = ('spiece.model', 'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json')
_HUB_ID = re.compile(r'\w[\w.-]*(/\w[\w.-]*)?')

# Our path, Hugging Face's name, and how many of our leading axes are the product's input. Hugging Face
# stores [out, in]: 0 means as it is, 1 that ours is [D, ...] (query, key, value, feed-forward), 2 that it is
# [H, K, D] (attention's output). One table for both directions.
_TABLE = (
    (r'embedding', r'shared.weight', 0),
    (r'head', r'lm_head.weight', 0),
    (r'(\w+)_bias\.table', r'\1.block.0.layer.0.SelfAttention.relative_attention_bias.weight', 0),
    (r'(\w+)_norm\.scale', r'\1.final_layer_norm.weight', 0),
    (r'encoder\.(\d+)\.attention_norm\.scale', r'encoder.block.\1.layer.0.layer_norm.weight', 0),
    (r'encoder\.(\d+)\.attention\.(q|k|v)(?:uery|ey|alue)', r'encoder.block.\1.layer.0.SelfAttention.\2.weight', 1),
    (r'encoder\.(\d+)\.attention\.out', r'encoder.block.\1.layer.0.SelfAttention.o.weight', 2),
    (r'encoder\.(\d+)\.mlp_norm\.scale', r'encoder.block.\1.layer.1.layer_norm.weight', 0),
    (r'encoder\.(\d+)\.mlp\.(\w+)', r'encoder.block.\1.layer.1.DenseReluDense.{\2}.weight', 1),
    (r'decoder\.(\d+)\.self_norm\.scale', r'decoder.block.\1.layer.0.layer_norm.weight', 0),
    (r'decoder\.(\d+)\.self_attention\.(q|k|v)(?:uery|ey|alue)', r'decoder.block.\1.layer.0.SelfAttention.\2.weight', 1),
    (r'decoder\.(\d+)\.self_attention\.out', r'decoder.block.\1.layer.0.SelfAttention.o.weight', 2),
    (r'decoder\.(\d+)\.cross_norm\.scale', r'decoder.block.\1.layer.1.layer_norm.weight', 0),
    (r'decoder\.(\d+)\.cross_attention\.(q|k|v)(?:uery|ey|alue)', r'decoder.block.\1.layer.1.EncDecAttention.\2.weight', 1),
    (r'decoder\.(\d+)\.cross_attention\.out', r'decoder.block.\1.layer.1.EncDecAttention.o.weight', 2),
    (r'decoder\.(\d+)\.mlp_norm\.scale', r'decoder.block.\1.layer.2.layer_norm.weight', 0),
    (r'decoder\.(\d+)\.mlp\.(\w+)', r'decoder.block.\1.layer.2.DenseReluDense.{\2}.weight', 1),
)
_PLAIN_MLP = {'up': 'wi', 'down': 'wo'}
_GATED_MLP = {'gate': 'wi_0', 'up': 'wi_1', 'down': 'wo'}

_EMBEDDINGS = ('shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')  # one, stored up to thrice
_HEAD = 'lm_head.weight'
_UNUSED = {'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'}  # in old files; nothing reads it

# Our field and Hugging Face's key, and what the key means where the file is silent.
_SIZES = {
    'vocab_size': 'vocab_size',
    'd_model': 'd_model',
    'd_kv': 'd_kv',
    'd_ff': 'd_ff',
    'num_heads': 'num_heads',
    'num_encoder_layers': 'num_layers',
    'num_decoder_layers': 'num_decoder_layers',
    'num_buckets': 'relative_attention_num_buckets',
    'max_distance': 'relative_attention_max_distance',
}
_DEFAULTS = {
    'vocab_size': 32128,
    'd_model': 512,
    'd_kv': 64,
    'd_ff': 2048,
    'num_heads': 8,
    'num_layers': 6,
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
}  # num_decoder_layers: as many as num_layers
_FEED_FORWARD = {'relu': ('relu', False), 'gated-gelu': ('gelu', True)}  # v1.0's; v1.1's and Flan's


@dataclasses.dataclass(frozen=True)
class _Weight:
    """One leaf of the parameters and its place in a file."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # ours
    input_axes: int  # see _TABLE

    @property
    def file_shape(self) -> tuple[int, ...]:
        if self.input_axes == 0:
            return self.shape
        return math.prod(self.shape[self.input_axes :]), math.prod(self.shape[: self.input_axes])

    def from_file(self, array: np.ndarray) -> np.ndarray:
        return array if self.input_axes == 0 else array.T.reshape(self.shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        return array if self.input_axes == 0 else array.reshape(self.file_shape[::-1]).T


def load_t5(source: str | os.PathLike, dtype=jnp.float32, revision: str | None = None) -> T5:
    """Reads a T5 from a folder, or from the hub where no such folder exists.

    Args:
      source: a folder with config.json and model.safetensors (or its index and shards), or a hub id.
      dtype: float32 or bfloat16, of the parameters and of the activations; files of any float type will do.
      revision: branch, tag or commit, for a hub id.

    Raises:
      FileNotFoundError: a file or the repository is missing.
      ValueError: the files are damaged, are no T5 of ours, or do not fit each other; or dtype is refused.
    """
    dtype = _checked_dtype(dtype)
    folder = fetch(source, revision)
    raw = _read_config(folder / _CONFIG)
    checkpoint = _Checkpoint(folder)
    config = _from_hf_config(raw, folder / _CONFIG, tied_head=_settle_embeddings(checkpoint))
    weights, treedef = _weights(_abstract_params(config), config)
    checkpoint.expect({weight.name for weight in weights})

    def leaf(weight: _Weight) -> jax.Array:
        array = weight.from_file(checkpoint.read(weight.name, weight.file_shape))
        return jnp.asarray(np.asarray(array, dtype, order='C'))

    return T5(jax.tree.unflatten(treedef, map(leaf, weights)), config, dtype)


def save_t5(model: T5, folder: str | os.PathLike, dtype=None, max_shard_size: int = 5 * 10**9) -> pathlib.Path:
    """Writes a folder that transformers loads as a T5ForConditionalGeneration.

    All is written beside the folder first and then renamed. In a folder that exists the old model is
    replaced and other files, such as a tokenizer, stay; it has no config.json until the last moment.

    Args:
      model: the T5.
      folder: created, with its parents, where it does not exist.
      dtype: of the stored weights, float32 or bfloat16; the parameters' own by default.
      max_shard_size: bytes beyond which the weights are split over several files.

    Returns:
      The folder.

    Raises:
      OSError: the folder cannot be written.
      ValueError: dtype is refused, or Hugging Face's format cannot express the configuration.
    """
    folder = pathlib.Path(folder).expanduser()
    leaves = jax.tree.leaves(model.params)
    dtype = _checked_dtype(leaves[0].dtype if dtype is None else dtype)
    hf_config = json.dumps(_to_hf_config(model.config, dtype), indent=2) + '\n'
    staging = folder.with_name(f'.{folder.name}.tmp{os.getpid()}')
    try:
        staging.mkdir(parents=True)
        try:
            weights, _ = _weights(model.params, model.config)
            _write_weights(staging, list(zip(weights, leaves, strict=True)), dtype, max_shard_size)
            (staging / _CONFIG).write_text(hf_config)
            _publish(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OSError(f'{folder}: expected a folder that can be written, got {error}; name another or free it') from error
    return folder


def fetch(source: str | os.PathLike, revision: str | None = None) -> pathlib.Path:
    """The folder that holds a checkpoint and its tokenizer: `source`, or where the hub's files were put.

    Raises:
      FileNotFoundError: neither a folder nor a repository that can be had.
      ValueError: `source` is a file.
    """
    folder = pathlib.Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f'{source}: expected a folder with {_CONFIG} and {_WEIGHTS}, got a file; name its folder')
    if not _HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f'{source}: expected a folder with {_CONFIG} and {_WEIGHTS}, found none; check the path')

    import huggingface_hub  # slow to import, and most runs have their models at hand
    from huggingface_hub import errors

    patterns = [_CONFIG, '*.safetensors', '*.index.json', *_TOKENIZER]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except errors.RepositoryNotFoundError as error:
        what = 'the hub has no such repository, or not without a login; check the name or run `hf auth login`'
        raise FileNotFoundError(f'{source}: no such folder here, and {what}') from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f'{source}: expected revision {revision!r}, the hub has none of that name') from error
    except Exception as error:  # the hub's client raises whatever its transport does
        what = f'the hub could not be reached ({type(error).__name__}); check the path, or the network'
        raise FileNotFoundError(f'{source}: no such folder here, and {what}') from error


def _checked_dtype(dtype) -> np.dtype:
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f'expected dtype float32 or bfloat16, got {dtype!r}') from None
    if dtype == jnp.float16:
        raise ValueError('expected dtype float32 or bfloat16, got float16, in which T5 overflows; use bfloat16')
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f'expected dtype float32 or bfloat16, got {dtype}')
    return dtype


# Names.


def _hf_name(path: str, config: T5Config) -> tuple[str, int]:
    """Hugging Face's name of our path, and the number of input axes."""
    for ours, theirs, input_axes in _TABLE:
        if match := re.fullmatch(ours, path):
            name = match.expand(theirs)
            return name.format(**(_GATED_MLP if config.gated else _PLAIN_MLP)), input_axes
    raise KeyError(path)


def _weights(params: Params, config: T5Config) -> tuple[list[_Weight], jax.tree_util.PyTreeDef]:
    """Every leaf's place in a file, in the tree's order, and the tree's structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    weights = []
    for path, leaf in leaves:
        ours = jax.tree_util.keystr(path[:-1], simple=True, separator='.')  # the last step is nnx.Param's own
        name, input_axes = _hf_name(ours, config)
        weights.append(_Weight(name, leaf.shape, input_axes))
    return weights, treedef


def _abstract_params(config: T5Config) -> Params:
    """Shapes of the parameters, none of them allocated."""
    return nnx.state(nnx.eval_shape(lambda: T5Module(config, rngs=nnx.Rngs(0))), nnx.Param)


# Reading.


class _Checkpoint:
    """The tensors of a folder's safetensors files, read when asked for."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._stored = {}  # name -> (path, open file, name in it)
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework='np')
            except (SafetensorError, OSError) as error:
                raise ValueError(_damaged(path, error)) from error
            self._stored.update((name, (path, file, name)) for name in file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def drop(self, name: str) -> None:
        """Leaves a tensor out of account."""
        del self._stored[name]

    def rename(self, old: str, new: str) -> None:
        self._stored[new] = self._stored.pop(old)

    def expect(self, names: set[str]) -> None:
        """Raises ValueError unless these tensors are there and no others."""
        expected = f'{self.folder}: expected the {len(names)} tensors that its {_CONFIG} asks for'
        if missing := names - self._stored.keys():
            raise ValueError(f'{expected}, {_listed(missing)} missing; complete the files, or use the right {_CONFIG}')
        if extra := self._stored.keys() - names - _UNUSED:
            raise ValueError(f'{expected}, got {_listed(extra)} besides; use a plain T5, or the right {_CONFIG}')

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor as it is stored, [out, in]; ValueError where it has another shape or is no float."""
        path, file, stored_name = self._stored[name]
        try:
            header = file.get_slice(stored_name)
            came, kind = tuple(header.get_shape()), header.get_dtype()
            if shape is not None and came != shape:
                raise ValueError(f'{path}: expected {name} of shape {shape}, got {came}; use the right {_CONFIG}')
            if kind not in ('F64', 'F32', 'F16', 'BF16'):
                raise ValueError(f'{path}: expected {name} in float32, float16 or bfloat16, got {kind}; dequantize it')
            return file.get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise ValueError(_damaged(path, error)) from error


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder's safetensors files: the one, or the shards of its index."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        what = f'{folder}: expected {_WEIGHTS} or {_INDEX}'
        if pickles := sorted(path.name for path in folder.glob('*.bin')):
            raise FileNotFoundError(f'{what}, got {pickles[0]}, a pickle, which we never load; convert it to safetensors')
        raise FileNotFoundError(f'{what}, found neither; complete the download, or convert the weights to safetensors')
    weight_map = _read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f'{index}: expected a weight_map of tensor names to files, got none; download it again')
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if pathlib.PurePath(shard).name != shard:
            raise ValueError(f'{index}: expected shards in its own folder, got {shard!r}; download it again')
        if not (folder / shard).is_file():
            raise FileNotFoundError(f'{folder}: expected the shard {shard} of its index, found none; complete the download')
    return [folder / shard for shard in shards]


def _settle_embeddings(checkpoint: _Checkpoint) -> bool:
    """Leaves one embedding, and a head where the file has one of its own; says whether the head is tied.

    Whether it is follows from the file, as in transformers 5, and not from the configuration.
    """
    names = [name for name in _EMBEDDINGS if name in checkpoint]
    if not names:
        return False  # `expect` will name what is missing
    embedding = checkpoint.read(names[0])
    for name in names[1:]:
        if not np.array_equal(checkpoint.read(name), embedding):
            raise ValueError(f'{checkpoint.folder}: expected one embedding, got {name} unlike {names[0]}; use a plain T5')
        checkpoint.drop(name)
    checkpoint.rename(names[0], _EMBEDDINGS[0])
    if _HEAD not in checkpoint:
        return True
    tied = np.array_equal(checkpoint.read(_HEAD), embedding)
    if tied:
        checkpoint.drop(_HEAD)
    return tied


def _read_json(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, OSError) as error:
        raise ValueError(f'{path}: expected JSON, got {error}; download it again') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path}: expected a JSON object, got a {type(content).__name__}; download it again')
    return content


def _damaged(path: pathlib.Path, error: Exception) -> str:
    with open(path, 'rb') as file:
        if file.read(24) == b'version https://git-lfs.':
            return f'{path}: expected a safetensors file, got a Git LFS pointer to one; run `git lfs pull`'
    return f'{path}: expected a safetensors file, got a damaged one ({error}); download it again'


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')


# Configurations.


def _read_config(path: pathlib.Path) -> dict:
    """A T5's config.json, as it stands."""
    if not path.is_file():
        raise FileNotFoundError(f'{path.parent}: expected {_CONFIG} and {_WEIGHTS}, found no {_CONFIG}; name a T5\'s folder')
    raw = _read_json(path)
    if (kind := raw.get('model_type')) != 't5':
        raise ValueError(f'{path}: expected a T5 (model_type "t5"), got model_type {kind!r}; name a T5\'s folder')
    return raw


def _from_hf_config(raw: dict, path: pathlib.Path, tied_head: bool) -> T5Config:
    """Our configuration from config.json's content; `path` is for messages only."""

    def number(key: str, default, least=1):
        value = default if raw.get(key) is None else raw[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ValueError(f'{path}: expected a number of at least {least} as {key}, got {value!r}; correct it')
        return type(default)(value)

    defaults = dict(_DEFAULTS, num_decoder_layers=number('num_layers', _DEFAULTS['num_layers']))
    sizes = {ours: number(theirs, defaults[theirs]) for ours, theirs in _SIZES.items()}
    feed_forward = raw.get('feed_forward_proj', 'relu')
    if feed_forward not in _FEED_FORWARD:
        raise ValueError(f'{path}: expected feed_forward_proj relu or gated-gelu, got {feed_forward!r}; use another T5')
    activation, gated = _FEED_FORWARD[feed_forward]
    pad_id = number('pad_token_id', 0, least=0)
    eos = raw.get('eos_token_id')
    if isinstance(eos, list):
        if len(eos) != 1:
            raise ValueError(f'{path}: expected one eos_token_id, got {eos}; leave the one that ends an output')
        raw = dict(raw, eos_token_id=eos[0])
    # transformers 5 states the scaling; before, an untied head meant none.
    scale = raw.get('scale_decoder_outputs')
    return T5Config(
        **sizes,
        activation=activation,
        gated=gated,
        tied_head=tied_head,
        scale_head_input=raw.get('tie_word_embeddings') is not False if scale is None else bool(scale),
        epsilon=number('layer_norm_epsilon', 1e-6, least=0),
        dropout=number('dropout_rate', 0.1, least=0),
        start_id=number('decoder_start_token_id', pad_id, least=0),
        eos_id=number('eos_token_id', 1, least=0),
        pad_id=pad_id,
    )


def _to_hf_config(config: T5Config, dtype: np.dtype) -> dict:
    """config.json's content."""
    kinds = {ours: theirs for theirs, ours in _FEED_FORWARD.items()}
    if (kind := (config.activation, config.gated)) not in kinds:
        raise ValueError(f'expected ReLU, or gated GELU, got activation {kind[0]!r} with gated={kind[1]}')
    return {
        'architectures': ['T5ForConditionalGeneration'],
        'model_type': 't5',
        'is_encoder_decoder': True,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        'feed_forward_proj': kinds[kind],
        'tie_word_embeddings': config.tied_head,
        'scale_decoder_outputs': config.scale_head_input,
        'layer_norm_epsilon': config.epsilon,
        'dropout_rate': config.dropout,
        'decoder_start_token_id': config.start_id,
        'eos_token_id': config.eos_id,
        'pad_token_id': config.pad_id,
        'dtype': dtype.name,
    }


# Writing.


def _write_weights(folder: pathlib.Path, weights: list[tuple[_Weight, jax.Array]], dtype: np.dtype, limit: int) -> None:
    """Writes model.safetensors, or shards of at most `limit` bytes and their index."""
    shards = list(_sharded(weights, dtype, limit))
    weight_map = {}
    for i, shard in enumerate(shards):
        name = _WEIGHTS if len(shards) == 1 else f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
        # safetensors writes the bytes in memory, whatever the strides: hence `order`
        tensors = {weight.name: np.asarray(weight.to_file(np.asarray(leaf)), dtype, order='C') for weight, leaf in shard}
        save_file(tensors, folder / name, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(math.prod(weight.shape) for weight, _ in weights) * dtype.itemsize
        index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + '\n')


def _sharded(weights: list[tuple[_Weight, jax.Array]], dtype: np.dtype, limit: int) -> Iterator[list]:
    """Splits the weights into runs of at most `limit` bytes (a larger weight stands alone)."""
    shard, size = [], 0
    for weight, leaf in weights:
        weight_size = math.prod(weight.shape) * dtype.itemsize
        if shard and size + weight_size > limit:
            yield shard
            shard, size = [], 0
        shard.append((weight, leaf))
        size += weight_size
    yield shard


def _publish(staging: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts the finished files of `staging` into `folder`'s place."""
    for path in staging.glob('*.safetensors'):
        shutil.copymode(staging / _CONFIG, path)  # safetensors makes files for the owner alone
    if not folder.exists():
        staging.rename(folder)
        return
    # Without config.json nobody takes the folder for a model while old and new files are mixed in it.
    for old in (_CONFIG, _INDEX, 'model*.safetensors'):
        for path in folder.glob(old):
            path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: path.name == _CONFIG):
        path.replace(folder / path.name)
