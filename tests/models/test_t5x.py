"""T5X checkpoints: read bit for bit, and refused in one line."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import make_golden
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from t5x_files import write_array, write_t5x

from spec_jax.models.t5 import T5Config
from spec_jax.models.t5_weights import load_t5, open_t5
from spec_jax.models.t5x import t5x_name

GOLDEN = pathlib.Path(__file__).parent / 'golden'


def assert_equal_params(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def folder(tmp_path):
    """A T5X checkpoint of v1.1 that a test may spoil."""
    return write_t5x(tmp_path / 't5x', load_file(GOLDEN / 'v1_1' / 'model.safetensors'))


# Reading.


@pytest.mark.parametrize('num_heads', [None, 3])
@pytest.mark.parametrize('family', ['v1_0', 'v1_1'])
def test_parameters_equal_those_of_the_hugging_face_form(tmp_path, family, num_heads):
    expected = load_t5(GOLDEN / family)
    write_t5x(tmp_path / 't5x', load_file(GOLDEN / family / 'model.safetensors'), num_heads)
    model = load_t5(tmp_path / 't5x')
    assert_equal_params(model.params, expected.params)
    # T5X's files do not contain the greatest distance; all public T5s have 128.
    assert model.config == dataclasses.replace(expected.config, max_distance=128)


def test_sizes_and_switches_follow_from_the_arrays(tmp_path, folder):
    v1_1 = T5Config(32, 16, 4, 20, 3, 1, 2, 'gelu', True, False, False, num_buckets=8)
    assert load_t5(folder).config == v1_1
    write_t5x(tmp_path / 'v1_0', load_file(GOLDEN / 'v1_0' / 'model.safetensors'))
    v1_0 = dict(activation='relu', gated=False, tied_head=True, scale_head_input=True, num_buckets=32)
    assert load_t5(tmp_path / 'v1_0').config == dataclasses.replace(v1_1, **v1_0)


@pytest.mark.parametrize('stored', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_either_float_type_is_read_into_either(tmp_path, stored, dtype):
    tensors = make_golden.hf_tensors(make_golden.V1_0, 0, untied_head=False)
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    write_t5x(tmp_path / 't5x', tensors)
    make_golden.write_folder(tmp_path / 'hf', make_golden.V1_0, tensors)
    model = load_t5(tmp_path / 't5x', dtype)
    assert_equal_params(model.params, load_t5(tmp_path / 'hf', dtype).params)
    assert model.dtype == dtype and open_t5(tmp_path / 't5x').dtype == stored


@pytest.mark.parametrize(
    'ours, theirs',
    [
        ('embedding', 'token_embedder.embedding'),
        ('head', 'decoder.logits_dense.kernel'),
        ('encoder_bias.table', 'encoder.relpos_bias.rel_embedding'),
        ('decoder_norm.scale', 'decoder.decoder_norm.scale'),
        ('encoder.11.attention.query', 'encoder.layers_11.attention.query.kernel'),
        ('encoder.0.attention_norm.scale', 'encoder.layers_0.pre_attention_layer_norm.scale'),
        ('encoder.0.mlp_norm.scale', 'encoder.layers_0.pre_mlp_layer_norm.scale'),
        ('decoder.2.self_attention.out', 'decoder.layers_2.self_attention.out.kernel'),
        ('decoder.2.self_norm.scale', 'decoder.layers_2.pre_self_attention_layer_norm.scale'),
        ('decoder.2.cross_attention.key', 'decoder.layers_2.encoder_decoder_attention.key.kernel'),
        ('decoder.2.cross_norm.scale', 'decoder.layers_2.pre_cross_attention_layer_norm.scale'),
        ('decoder.2.mlp.gate', 'decoder.layers_2.mlp.wi_0.kernel'),
        ('decoder.2.mlp.up', 'decoder.layers_2.mlp.wi_1.kernel'),
        ('decoder.2.mlp.down', 'decoder.layers_2.mlp.wo.kernel'),
    ],
)
def test_names(ours, theirs):
    assert t5x_name(ours, T5Config()) == theirs


def test_a_head_width_may_be_asked_for(folder):
    assert open_t5(folder, d_kv=4).config.d_kv == 4
    with pytest.raises(
        ValueError, match=r'expected 3 heads of width 64, got a query.*\(16, 12\); correct d_kv'
    ):
        open_t5(folder, d_kv=64)


# Errors.


def refused(folder, pattern, kind=ValueError):
    with pytest.raises(kind, match=pattern) as caught:
        load_t5(folder)
    message = str(caught.value)
    assert '\n' not in message and len(message) < 450, message


def remove(folder, name):
    for path in (folder / f'target.{name}').iterdir():
        path.unlink()
    (folder / f'target.{name}').rmdir()


@pytest.mark.parametrize(
    'name',
    [
        'token_embedder.embedding',
        'encoder.relpos_bias.rel_embedding',
        'decoder.relpos_bias.rel_embedding',
        'encoder.layers_0.attention.query.kernel',
        'decoder.layers_0.mlp.wi_1.kernel',
        'decoder.layers_1.pre_cross_attention_layer_norm.scale',
    ],
)
def test_an_array_that_is_missing(folder, name):
    remove(folder, name)
    refused(folder, f'got no target.{name}; complete the copy')


def test_arrays_that_are_no_t5s(folder):
    write_array(folder, 'target/decoder/adapter/kernel', np.ones((2, 2), np.float32))
    refused(folder, 'got target.decoder.adapter.kernel besides')


@pytest.mark.parametrize(
    'name, shape, pattern',
    [
        ('decoder/layers_1/mlp/wo/kernel', (20, 15), r'wo.kernel of shape \(20, 16\).* got \(20, 15\)'),
        (
            'encoder/layers_0/attention/out/kernel',
            (16, 12),
            r'out.kernel of shape \(12, 16\).*got \(16, 12\)',
        ),
        ('decoder/layers_0/self_attention/key/kernel', (16, 4, 3), r'\(16, 12\).*got \(16, 4, 3\)'),
        ('decoder/relpos_bias/rel_embedding', (8, 3), r'rel_embedding of shape \(3, 8\).*got \(8, 3\)'),
        (
            'encoder/layers_0/attention/query/kernel',
            (16, 13),
            r'expected 3 heads of one width, got .*\(16, 13\)',
        ),
        ('token_embedder/embedding', (32, 4, 4), r'embedding with 2 axes, got \(32, 4, 4\)'),
        ('decoder/decoder_norm/scale', (17,), r'decoder_norm.scale of shape \(16,\).*got \(17,\)'),
    ],
)
def test_an_array_of_another_shape(folder, name, shape, pattern):
    write_array(folder, f'target/{name}', np.ones(shape, np.float32))
    refused(folder, pattern)


def test_an_array_of_integers(folder):
    write_array(folder, 'target/decoder/decoder_norm/scale', np.ones(16, np.int32))
    refused(folder, 'floats in target.decoder.decoder_norm.scale, got int32')


@pytest.mark.parametrize('file', ['.zarray', '0.0', '1.0'])
@pytest.mark.parametrize('damage', ['missing', 'truncated', 'empty'])
def test_a_damaged_array(folder, file, damage):
    path = folder / 'target.decoder.layers_1.encoder_decoder_attention.key.kernel' / file
    if damage == 'missing':
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 40 if damage == 'truncated' else 0])
    refused(folder, r'expected target.decoder.layers_1.*key.kernel whole, got .*copy the checkpoint again')


def test_scanned_layers(tmp_path):
    array = np.ones((16, 2, 12), np.float32)
    write_array(tmp_path, 'target/decoder/decoder/self_attention/query/kernel', array)
    refused(tmp_path, 'expected arrays of single layers, got target.decoder.decoder.*scan_layers=False')


def test_the_folder_above_the_checkpoints(tmp_path, folder):
    folder.rename(tmp_path / 'checkpoint_1000')
    refused(tmp_path, 'got checkpoints of a T5X run.*such as checkpoint_1000', FileNotFoundError)
