"""One function loads every form of a model, laid out for decoding; an unknown form is an error of one line."""

import json
import pathlib
import pickle

import jax
import jax.numpy as jnp
import make_golden
import numpy as np
import pytest
from safetensors.numpy import load_file
from t5x_files import write_t5x

from spec_jax.models import t5_orbax
from spec_jax.models.load import describe, load_model
from spec_jax.models.t5_weights import load_t5
from spec_jax.runtime.backend import tracing_for
from spec_jax.types import Block, Inputs

GOLDEN = pathlib.Path(__file__).parent / 'golden'


@pytest.fixture(params=['hf', 't5x', 'orbax'])
def folder(request, tmp_path):
    """T5 v1.1 in each of the three forms."""
    if request.param == 'hf':
        return GOLDEN / 'v1_1'
    if request.param == 't5x':
        return write_t5x(tmp_path / 't5x', load_file(GOLDEN / 'v1_1' / 'model.safetensors'))
    t5_orbax.save_t5_orbax(load_t5(GOLDEN / 'v1_1'), tmp_path / 'orbax')
    return tmp_path / 'orbax'


@jax.jit
def logits(model, inputs, tokens):
    """Of a few tokens after a prompt, as the decoding loop asks for them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = model.prefill(inputs, tokens.shape[1]).cache
    return model.logits(model.decode(Block(tokens, positions), cache)[0])


@pytest.mark.parametrize('dtype', ['float32', jnp.bfloat16])
def test_every_form_is_loaded_as_its_family_loads_it_laid_out_for_decoding(folder, dtype):
    model, expected = load_model(folder, dtype), load_t5(folder, dtype).for_decoding()
    assert model.config == expected.config and model.config.fused is not None
    assert model.dtype == jnp.dtype(dtype)
    assert jax.tree.structure(model.params) == jax.tree.structure(expected.params)
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected.params), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    source, mask, tokens = map(jnp.asarray, make_golden.example(make_golden.V1_1, seed=3))
    inputs = Inputs(source, mask)
    np.testing.assert_array_equal(logits(model, inputs, tokens), logits(expected, inputs, tokens))


@pytest.mark.parametrize('kind', ['mamba', None, ['t5']])
@pytest.mark.parametrize('read', [load_model, describe])
def test_a_family_that_is_not_known_is_one_line_that_names_those_that_are(tmp_path, kind, read):
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': kind}))
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f'{tmp_path}/config.json: expected model_type "t5", got {kind!r}; name a folder of such a model'
    )


def test_a_folder_with_nothing_or_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=f'{tmp_path}: expected a T5 .*, found none; check the path'):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match='none: expected a folder with config.json'):
        load_model(tmp_path / 'none')
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(ValueError, match='config.json: expected JSON'):
        load_model(tmp_path)


def test_a_revision_of_the_hub_is_asked_for(monkeypatch):
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(GOLDEN / 'v1_1')

    monkeypatch.setattr('huggingface_hub.snapshot_download', snapshot_download)
    assert load_model('google/t5-tiny', revision='v2').spec.vocab_size == 32
    assert asked == [('google/t5-tiny', 'v2')]


# Shapes.


def test_a_shape_follows_from_a_folders_config_or_from_a_name(tmp_path):
    golden, small, other = describe(GOLDEN / 'v1_1'), describe('google/t5-v1_1-small'), describe('t5-11b')
    assert (golden.size, golden.vocab_size, golden.config.d_model) == (None, 32, 16)
    assert (small.size, small.vocab_size) == ('small', 32128) and other.size == '11b'
    assert pickle.loads(pickle.dumps(small)) == small and len({small, other, describe('t5-v1_1-small')}) == 2
    with pytest.raises(ValueError, match='expected a folder with config.json, or a name that tells a size'):
        describe(tmp_path)


def test_an_abstract_model_has_the_weights_of_the_loaded_one():
    with tracing_for('tpu'):  # on CPU weights get columns more
        loaded, abstract = load_model(GOLDEN / 'v1_1'), describe(GOLDEN / 'v1_1').abstract('float32')
    assert jax.tree.structure(abstract.params) == jax.tree.structure(loaded.params)
    for ours, theirs in zip(jax.tree.leaves(abstract.params), jax.tree.leaves(loaded.params), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct) and (ours.shape, ours.dtype) == (
            theirs.shape,
            theirs.dtype,
        )
    assert abstract.partition_rules == loaded.partition_rules
