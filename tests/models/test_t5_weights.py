"""Hugging Face folders: read, written, refused. Each error is one line that names what is wrong."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import huggingface_hub.errors
import jax
import jax.numpy as jnp
import make_golden
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.models import hf_folder
from spec_jax.models.t5 import T5
from spec_jax.models.t5_weights import load_t5, save_t5
from spec_jax.types import Inputs

GOLDEN = pathlib.Path(__file__).parent / 'golden'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


@pytest.fixture
def folder(tmp_path):
    """A T5 v1.1 folder that a test may spoil."""
    return shutil.copytree(GOLDEN / 'v1_1', tmp_path / 't5', ignore=shutil.ignore_patterns('*.npz'))


def edit_config(folder, **changes):
    path = folder / 'config.json'
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder, **changes):
    """Replaces tensors, or with None deletes them; names with '__' for '.'."""
    tensors = load_file(folder / WEIGHTS)
    for name, change in changes.items():
        name = name.replace('__', '.')
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
    save_file(tensors, folder / WEIGHTS, metadata={'format': 'pt'})


def assert_equal_models(one, other):
    assert one.config == other.config
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def log_probs(model):
    """Ours for the inputs of `make_golden.example`, and these inputs."""
    example = make_golden.example(make_golden.V1_1, seed=3)
    source, mask, decoder_input = (jnp.asarray(array) for array in example)
    logits = jax.jit(T5.forward)(model, Inputs(source, mask), decoder_input)
    return jax.nn.log_softmax(logits), example


# Reading.


def test_weights_are_stored_by_head():
    model = load_t5(GOLDEN / 'v1_1')
    tensors = load_file(GOLDEN / 'v1_1' / WEIGHTS)
    attention = model.module.decoder[1].cross_attention
    heads, width, model_width = 3, 4, 16
    stored = tensors['decoder.block.1.layer.1.EncDecAttention.q.weight'].astype(np.float32)  # [H * K, D]
    out = tensors['decoder.block.1.layer.1.EncDecAttention.o.weight'].astype(np.float32)  # [D, H * K]
    for h in range(heads):
        for k in range(width):
            np.testing.assert_array_equal(attention.query[...][:, h, k], stored[h * width + k])
            np.testing.assert_array_equal(attention.out[...][h, k], out[:, h * width + k])
    assert attention.query[...].shape == (model_width, heads, width)
    mlp = model.module.encoder[0].mlp
    for ours, theirs in ((mlp.gate, 'wi_0'), (mlp.up, 'wi_1'), (mlp.down, 'wo')):
        stored = tensors[f'encoder.block.0.layer.1.DenseReluDense.{theirs}.weight']
        np.testing.assert_array_equal(ours[...], stored.astype(np.float32).T)


@pytest.mark.parametrize('stored', [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('dtype', ['float32', jnp.bfloat16])
def test_files_of_any_float_type_are_read_into_either(tmp_path, stored, dtype):
    tensors = make_golden.hf_tensors(make_golden.V1_0, 0, untied_head=False)
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    model = load_t5(make_golden.write_folder(tmp_path, make_golden.V1_0, tensors), dtype)
    assert model.dtype == jnp.dtype(dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    expected = tensors['shared.weight'].astype(dtype)
    np.testing.assert_array_equal(np.asarray(model.module.embedding[...]), expected)


def test_torch_is_not_needed(folder):
    code = (
        'import sys; sys.modules["torch"] = None\n'
        'from spec_jax.models.t5_weights import load_t5, save_t5\n'
        f'save_t5(load_t5({str(folder)!r}), {str(folder / "copy")!r})'
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, '-c', code], cwd=root, check=True, timeout=600)


@pytest.mark.parametrize(
    'tie, scale, expected',
    [
        (..., ..., True),  # as the first T5s' files
        (True, ..., True),
        (False, ..., False),  # v1.1 and Flan, as transformers 4 wrote them
        (True, False, False),  # the same, as transformers 5 writes them
        (False, True, True),
        (True, True, True),
        (None, None, True),
    ],
)
def test_the_scaling_of_the_heads_input(folder, tie, scale, expected):
    edit_config(folder, tie_word_embeddings=tie, scale_decoder_outputs=scale)
    assert load_t5(folder).config.scale_head_input is expected


def test_the_tie_of_the_head_follows_from_the_file(folder):
    embedding = load_file(folder / WEIGHTS)['shared.weight']
    assert not load_t5(folder).config.tied_head
    edit_tensors(folder, lm_head__weight=embedding)
    assert load_t5(folder).config.tied_head
    edit_tensors(folder, lm_head__weight=None)
    model = load_t5(folder)
    assert model.config.tied_head and model.module.head is None
    assert not model.config.scale_head_input  # that is the configuration's affair


def test_harmless_tensors_are_passed_over(folder):
    expected = load_t5(folder)
    embedding = load_file(folder / WEIGHTS)['shared.weight']
    edit_tensors(
        folder,
        encoder__embed_tokens__weight=embedding,
        decoder__embed_tokens__weight=embedding,
        decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight=np.ones(
            (8, 3), np.float32
        ),
    )
    assert_equal_models(load_t5(folder), expected)
    edit_tensors(folder, shared__weight=None)  # some converters keep another of the copies
    assert_equal_models(load_t5(folder), expected)


def test_defaults_of_a_config_without_these_keys(folder):
    edit_config(
        folder, num_layers=2, num_decoder_layers=..., eos_token_id=[1], relative_attention_max_distance=...
    )
    tensors = load_file(folder / WEIGHTS)
    more = {
        name.replace('block.0', 'block.1'): tensor
        for name, tensor in tensors.items()
        if name.startswith('encoder.block.0') and 'relative' not in name
    }
    edit_tensors(folder, **more)
    config = load_t5(folder).config
    assert (config.num_encoder_layers, config.num_decoder_layers) == (2, 2)
    assert (config.max_distance, config.eos_id, config.dropout, config.epsilon) == (128, 1, 0.1, 1e-6)


# Writing.


@pytest.mark.parametrize('family', ['v1_0', 'v1_1'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_what_is_written_is_read_back(tmp_path, family, dtype):
    model = load_t5(GOLDEN / family, dtype)
    save_t5(model, tmp_path / 'new' / 'copy')
    assert_equal_models(load_t5(tmp_path / 'new' / 'copy', dtype), model)
    stored = load_file(tmp_path / 'new' / 'copy' / WEIGHTS)
    golden = load_file(GOLDEN / family / WEIGHTS)
    assert stored.keys() == golden.keys()
    for name, tensor in golden.items():
        np.testing.assert_array_equal(stored[name], tensor.astype(dtype))
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['copy']


def test_a_dtype_of_the_stored_weights_may_be_asked_for(tmp_path):
    model = load_t5(GOLDEN / 'v1_1')
    save_t5(model, tmp_path / 'low', dtype='bfloat16')
    assert_equal_models(load_t5(tmp_path / 'low'), model)  # its weights were bfloat16 at first
    assert json.loads((tmp_path / 'low' / 'config.json').read_text())['dtype'] == 'bfloat16'


def test_shards(tmp_path):
    model = load_t5(GOLDEN / 'v1_0')
    save_t5(model, tmp_path / 'sharded', max_shard_size=9000)
    names = sorted(path.name for path in (tmp_path / 'sharded').iterdir())
    shards = [name for name in names if name.endswith('.safetensors')]
    assert names == ['config.json', *shards, INDEX]
    assert shards == [f'model-{i + 1:05}-of-{len(shards):05}.safetensors' for i in range(len(shards))]
    assert 3 <= len(shards) <= 5 and not (tmp_path / 'sharded' / WEIGHTS).exists()
    index = json.loads((tmp_path / 'sharded' / INDEX).read_text())
    assert index['metadata']['total_size'] == 4 * sum(leaf.size for leaf in jax.tree.leaves(model.params))
    for name, shard in index['weight_map'].items():
        assert name in load_file(tmp_path / 'sharded' / shard)
    assert_equal_models(load_t5(tmp_path / 'sharded'), model)
    save_t5(model, tmp_path / 'each_alone', max_shard_size=1)
    assert_equal_models(load_t5(tmp_path / 'each_alone'), model)


def test_a_new_model_takes_an_old_ones_place_and_leaves_the_rest(tmp_path):
    old, new = load_t5(GOLDEN / 'v1_0'), load_t5(GOLDEN / 'v1_1')
    save_t5(old, tmp_path / 't5', max_shard_size=9000)
    (tmp_path / 't5' / 'tokenizer.json').write_text('{}')
    save_t5(new, tmp_path / 't5')
    assert sorted(path.name for path in (tmp_path / 't5').iterdir()) == [
        'config.json',
        WEIGHTS,
        'tokenizer.json',
    ]
    assert_equal_models(load_t5(tmp_path / 't5'), new)
    modes = {path.stat().st_mode for path in (tmp_path / 't5').iterdir()}
    assert len(modes) == 1  # the weights can be read by whoever can read the tokenizer


def test_a_failure_leaves_the_old_model_and_nothing_else(tmp_path, monkeypatch):
    old, new = load_t5(GOLDEN / 'v1_0'), load_t5(GOLDEN / 'v1_1')
    save_t5(old, tmp_path / 't5')

    def full(path, *_):
        path.write_bytes(b'half')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(hf_folder, '_write_shard', full)
    for target in ('t5', 'fresh'):
        with pytest.raises(OSError, match=rf'{target}: expected a folder to write .*No space left') as caught:
            save_t5(new, tmp_path / target)
        assert_one_line(caught)
    assert [path.name for path in tmp_path.iterdir()] == ['t5']
    assert sorted(path.name for path in (tmp_path / 't5').iterdir()) == ['config.json', WEIGHTS]
    assert_equal_models(load_t5(tmp_path / 't5'), old)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('')
    for target in (tmp_path / 'file', tmp_path / 'file' / 'below'):
        with pytest.raises(OSError, match='expected a folder to write') as caught:
            save_t5(load_t5(GOLDEN / 'v1_0'), target)
        assert_one_line(caught)


def test_a_configuration_without_a_name_is_not_written(tmp_path):
    model = load_t5(GOLDEN / 'v1_0')
    model = model.replace(config=dataclasses.replace(model.config, activation='gelu'))
    with pytest.raises(ValueError, match='gelu with gated=False'):
        save_t5(model, tmp_path / 't5')
    assert not list(tmp_path.iterdir())


def test_a_model_laid_out_for_decoding_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match='for_decoding'):
        save_t5(load_t5(GOLDEN / 'v1_0').for_decoding(), tmp_path / 't5')
    assert not list(tmp_path.iterdir())


# With transformers.


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('scaled', [True, False])
def test_transformers_loads_what_is_written(tmp_path, tied, scaled):
    pytest.importorskip('torch')
    model = load_t5(GOLDEN / ('v1_0' if tied else 'v1_1'))
    model = model.replace(config=dataclasses.replace(model.config, scale_head_input=scaled, epsilon=1e-3))
    save_t5(model, tmp_path / 't5', max_shard_size=9000)
    ours, example = log_probs(model)
    np.testing.assert_allclose(ours, make_golden.reference_log_probs(tmp_path / 't5', *example), atol=1e-4)
    assert_equal_models(load_t5(tmp_path / 't5'), model)


def test_what_transformers_writes_is_read(tmp_path):
    torch = pytest.importorskip('torch')
    import transformers

    load = transformers.T5ForConditionalGeneration.from_pretrained
    for family in ('v1_0', 'v1_1'):
        theirs = load(GOLDEN / family, dtype=torch.bfloat16)
        theirs.save_pretrained(tmp_path / family, max_shard_size='9KB')
        assert (tmp_path / family / INDEX).exists()
        assert_equal_models(load_t5(tmp_path / family, jnp.bfloat16), load_t5(GOLDEN / family, jnp.bfloat16))


# Errors.


def assert_one_line(caught):
    message = str(caught.value)
    assert '\n' not in message and len(message) < 400, message


def refused(folder, kind, pattern, **options):
    with pytest.raises(kind, match=pattern) as caught:
        load_t5(folder, **options)
    assert_one_line(caught)


def test_float16_is_refused_with_a_hint(folder):
    refused(folder, ValueError, 'float16; T5 overflows in it, use bfloat16', dtype=jnp.float16)
    refused(folder, ValueError, 'got float64', dtype='float64')
    refused(folder, ValueError, "got 'half-wit'", dtype='half-wit')
    with pytest.raises(ValueError, match='use bfloat16'):
        save_t5(load_t5(folder), folder, dtype='float16')


def test_a_missing_folder(tmp_path):
    refused(tmp_path / 'none', FileNotFoundError, 'none: expected a folder with config.json')
    refused(GOLDEN / 'v1_1' / 'config.json', ValueError, 'got a file; name the folder')


def test_a_folder_that_is_no_t5(folder):
    edit_config(folder, model_type='bert')
    refused(folder, ValueError, 'expected model_type "t5", got \'bert\'')
    edit_config(folder, model_type=...)
    refused(folder, ValueError, 'got None')
    (folder / 'config.json').unlink()
    refused(folder, FileNotFoundError, 'found no config.json')


@pytest.mark.parametrize('content', ['{"model_type": "t5"', '["t5"]', '\xff\xfe'])
def test_a_damaged_config(folder, content):
    (folder / 'config.json').write_bytes(content.encode('latin-1'))
    refused(folder, ValueError, 'config.json: expected .*JSON')


@pytest.mark.parametrize(
    'changes, pattern',
    [
        (dict(feed_forward_proj='gated-silu'), "relu or gated-gelu, got 'gated-silu'"),
        (dict(feed_forward_proj='gelu'), "got 'gelu'"),
        (dict(dense_act_fn='gelu'), "dense_act_fn gelu_new .*got 'gelu'"),
        (dict(d_model='16'), "d_model to be an integer.*got '16'"),
        (dict(num_heads=0), 'num_heads .*got 0'),
        (dict(d_kv=4.5), 'd_kv .*got 4.5'),
        (dict(layer_norm_epsilon=float('nan')), 'layer_norm_epsilon .*got nan'),
        (dict(decoder_start_token_id=32), 'decoder_start_token_id .*below 32, got 32'),
        (dict(eos_token_id=[1, 2]), r'eos_token_id .*got \[1, 2\]'),
        (dict(d_ff=21), r'wo.weight of shape \(16, 21\), got \(16, 20\)'),
        (dict(vocab_size=40), r'shape \(40, 16\), got \(32, 16\)'),
        (dict(relative_attention_num_buckets=32), r'relative_attention_bias.weight of shape \(32, 3\)'),
        (dict(num_decoder_layers=3), r'got no decoder.block.2.* and 11 more; complete the files'),
        (dict(num_decoder_layers=1), r'got decoder.block.1.* and 11 more besides'),
        (dict(feed_forward_proj='relu'), r'got no decoder.block.0.layer.2.DenseReluDense.wi.weight'),
    ],
)
def test_a_config_that_does_not_fit(folder, changes, pattern):
    edit_config(folder, **changes)
    refused(folder, ValueError, pattern)


def test_tensors_that_do_not_fit(folder):
    good = (folder / WEIGHTS).read_bytes()
    for changes, pattern in (
        (dict(shared__weight=None), 'got no shared.weight'),
        (dict(decoder__final_layer_norm__weight=None), 'got no decoder.final_layer_norm.weight;'),
        (dict(adapter__weight=np.ones(3, np.float32)), 'got adapter.weight besides'),
        (dict(lm_head__weight=np.ones((32, 15), np.float32)), r'lm_head.weight of shape \(32, 16\)'),
        (dict(shared__weight=np.ones((32, 16), np.int8)), 'floats in shared.weight, got I8'),
        (
            dict(decoder__embed_tokens__weight=np.ones((32, 16), np.float32)),
            'one embedding .*got decoder.embed_tokens.weight unlike shared.weight',
        ),
    ):
        edit_tensors(folder, **changes)
        refused(folder, ValueError, pattern)
        (folder / WEIGHTS).write_bytes(good)
    load_t5(folder)


@pytest.mark.parametrize('size', [0, 5, 1000, -1])
def test_a_truncated_file(folder, size):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:size])
    refused(folder, ValueError, 'model.safetensors: expected a safetensors file, got a damaged one')


def test_a_pointer_in_place_of_a_file(folder):
    (folder / WEIGHTS).write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n')
    refused(folder, ValueError, 'git lfs pull')


def test_weights_that_are_missing_or_pickled(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, FileNotFoundError, 'expected model.safetensors or .*found neither')
    (folder / 'pytorch_model.bin').write_bytes(b'\x80')
    refused(folder, FileNotFoundError, 'got pytorch_model.bin, a pickle, which is never loaded here; convert')


def test_indices_that_are_wrong(folder, tmp_path):
    save_t5(load_t5(folder), tmp_path / 'sharded', max_shard_size=9000)
    folder, index = tmp_path / 'sharded', tmp_path / 'sharded' / INDEX
    good = json.loads(index.read_text())
    first = 'model-00001'
    shard = next(folder.glob(f'{first}*'))
    shard.rename(folder / 'away')
    refused(folder, FileNotFoundError, f'expected shard {first}-of-.*found none; complete')
    (folder / 'away').rename(shard)

    index.write_text(json.dumps({'weight_map': {'shared.weight': '../../etc/passwd'}}))
    refused(folder, ValueError, "in its own folder, got '../../etc/passwd'")
    index.write_text(json.dumps({'weights': {}}))
    refused(folder, ValueError, 'expected a weight_map')
    index.write_text('{')
    refused(folder, ValueError, 'index.json: expected JSON')
    rest = {name: file for name, file in good['weight_map'].items() if not file.startswith(first)}
    index.write_text(json.dumps({'weight_map': rest}))
    refused(folder, ValueError, 'got no ')


# The hub.


def test_a_hub_id_is_fetched(monkeypatch):
    calls = []

    def download(repo_id, revision, allow_patterns):
        calls.append((repo_id, revision))
        assert 'config.json' in allow_patterns and 'spiece.model' in allow_patterns
        assert not any(pattern.endswith(('.bin', '.py', '*')) for pattern in allow_patterns)
        return str(GOLDEN / 'v1_0')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    assert load_t5('google/t5-tiny', revision='v2').config.vocab_size == 32
    assert hf_folder.fetch('t5-tiny') == GOLDEN / 'v1_0'
    assert calls == [('google/t5-tiny', 'v2'), ('t5-tiny', None)]


@pytest.mark.parametrize(
    'kind, pattern',
    [
        (huggingface_hub.errors.RepositoryNotFoundError, 'no such repository'),
        (huggingface_hub.errors.GatedRepoError, 'log in'),
        (huggingface_hub.errors.RevisionNotFoundError, "no revision 'v9'"),
        (huggingface_hub.errors.LocalEntryNotFoundError, 'could not be reached'),
        (ConnectionError, r'could not be reached \(ConnectionError\)'),
    ],
)
def test_a_hub_that_has_it_not(monkeypatch, kind, pattern):
    def download(*args, **kwargs):
        raise kind.__new__(kind)  # some of them want an HTTP response to be made from

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    refused('google/t5-none', FileNotFoundError, f'google/t5-none.*{pattern}', revision='v9')
