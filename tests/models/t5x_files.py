"""T5X checkpoints for tests, written as T5X writes them: from tensors under Hugging Face's names."""

import pathlib
import re

import numpy as np
import tensorstore as ts

_PARTS = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}
_BLOCKS = {'SelfAttention': 'self_attention', 'EncDecAttention': 'encoder_decoder_attention'}
_NORMS = {
    'encoder': ('pre_attention_layer_norm', 'pre_mlp_layer_norm'),
    'decoder': ('pre_self_attention_layer_norm', 'pre_cross_attention_layer_norm', 'pre_mlp_layer_norm'),
}


def t5x_array(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """T5X's path and values of a tensor of Hugging Face's."""
    if name == 'shared.weight':
        return 'token_embedder/embedding', array
    if name == 'lm_head.weight':
        return 'decoder/logits_dense/kernel', array.T
    stack, rest = name.removesuffix('.weight').split('.', 1)
    if rest == 'final_layer_norm':
        return f'{stack}/{stack}_norm/scale', array
    if rest.endswith('relative_attention_bias'):
        return f'{stack}/relpos_bias/rel_embedding', array.T
    block, layer, what = re.fullmatch(r'block\.(\d+)\.layer\.(\d+)\.(.*)', rest).groups()
    where = f'{stack}/layers_{block}'
    if what == 'layer_norm':
        return f'{where}/{_NORMS[stack][int(layer)]}/scale', array
    kind, part = what.split('.')
    if kind == 'DenseReluDense':
        return f'{where}/mlp/{part}/kernel', array.T
    kind = 'attention' if stack == 'encoder' else _BLOCKS[kind]
    return f'{where}/{kind}/{_PARTS[part]}/kernel', array.T


def write_t5x(folder: pathlib.Path, tensors: dict[str, np.ndarray], num_heads: int | None = None):
    """Writes a T5X checkpoint, and returns its folder.

    Args:
      num_heads: where given, attention kernels have three axes, heads and head width apart.
    """
    folder.mkdir(parents=True)
    (folder / 'checkpoint').write_bytes(b'\x82\xa7version\x03')
    for name, tensor in tensors.items():
        path, array = t5x_array(name, tensor)
        if num_heads and path.endswith('/out/kernel'):
            array = array.reshape(num_heads, -1, array.shape[1])
        elif num_heads and 'attention' in path and path.endswith('kernel'):
            array = array.reshape(array.shape[0], num_heads, -1)
        write_array(folder, f'target/{path}', array)
    write_array(folder, 'state/param_states/token_embedder/embedding/v_row', np.ones(3, np.float32))
    return folder


def write_array(folder: pathlib.Path, path: str, array: np.ndarray) -> None:
    """One array in chunks of half its first axis, as partitioned over two hosts."""
    spec = {
        'driver': 'zarr',
        'dtype': array.dtype.name,
        'kvstore': {'driver': 'file', 'path': str(folder / path.replace('/', '.'))},
        'metadata': {
            'compressor': {'id': 'gzip'},
            'shape': array.shape,
            'chunks': [-(-array.shape[0] // 2), *array.shape[1:]],
        },
    }
    ts.open(spec, create=True, delete_existing=True).result().write(np.ascontiguousarray(array)).result()
