"""Conversion between the three forms of T5 files: bit for bit, and in one piece or not at all."""

import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from safetensors.numpy import load_file

sys.path.append(str(tiny.ROOT / 'tests' / 'models'))
from t5x_files import write_t5x  # noqa: E402

from spec_jax.models import convert, t5_orbax, t5x  # noqa: E402
from spec_jax.models.t5_weights import load_t5, open_t5  # noqa: E402

GOLDEN = tiny.ROOT / 'tests' / 'models' / 'golden'
WEIGHTS = 'model.safetensors'
# After a failure Orbax leaves coroutines and threads running, which raise warnings when they end later.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


@pytest.fixture(params=['v1_0', 'v1_1'])
def family(request):
    return request.param


@pytest.fixture
def orbax(tmp_path):
    """An Orbax folder that a test may spoil."""
    convert.convert(GOLDEN / 'v1_1', tmp_path / 'orbax', 'orbax')
    return tmp_path / 'orbax'


def make_t5x(tmp_path, family='v1_1') -> pathlib.Path:
    return write_t5x(tmp_path / 't5x', load_file(GOLDEN / family / WEIGHTS))


def assert_equal_params(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_same_files(folder, golden):
    """The tensors of all of a folder's shards equal those of `golden`, names and bits."""
    shards = sorted(folder.glob('*.safetensors'))
    tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    expected = load_file(golden / WEIGHTS)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(tensors[name], tensor)


def assert_one_line(caught):
    message = str(caught.value)
    assert '\n' not in message and len(message) < 450, message


# Values.


def test_there_and_back_bit_for_bit(tmp_path, family):
    source, golden = make_t5x(tmp_path, family), GOLDEN / family
    convert.convert(source, tmp_path / 'hf', 'hf')
    convert.convert(tmp_path / 'hf', tmp_path / 'orbax', 'orbax')
    convert.convert(tmp_path / 'orbax', tmp_path / 'back', 'hf', max_shard_size=5000)
    assert len(list((tmp_path / 'back').glob('model-*.safetensors'))) > 2
    for name in ('hf', 'back'):
        assert_same_files(tmp_path / name, golden)
    config = dataclasses.replace(load_t5(golden).config, max_distance=128)
    for name in ('hf', 'orbax', 'back'):
        model = load_t5(tmp_path / name)
        assert model.config == config
        assert_equal_params(model.params, load_t5(golden).params)


def test_a_configuration_goes_through_orbax(tmp_path):
    model = tiny.make_model(0)
    config = dataclasses.replace(
        tiny.CONFIG, max_distance=20, epsilon=1e-5, dropout=0.0, start_id=3, pad_id=2
    )
    model = model.replace(config=config)
    t5_orbax.save_t5_orbax(model, tmp_path / 'orbax')
    loaded = load_t5(tmp_path / 'orbax')
    assert loaded.config == config and loaded.dtype == jnp.float32
    assert_equal_params(loaded.params, model.params)


def test_a_dtype_may_be_asked_for(tmp_path):
    source = make_t5x(tmp_path, 'v1_0')
    assert open_t5(source).dtype == jnp.float32
    expected = load_t5(GOLDEN / 'v1_0', jnp.bfloat16).params
    for form in convert.FORMATS:
        _, dtype = convert.convert(source, tmp_path / form, form, dtype='bfloat16')
        assert dtype == open_t5(tmp_path / form).dtype == jnp.bfloat16
        assert_equal_params(load_t5(tmp_path / form, jnp.bfloat16).params, expected)


def test_orbax_itself_restores_what_is_written(tmp_path):
    convert.convert(GOLDEN / 'v1_1', tmp_path / 'orbax', 'orbax')
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(tmp_path / 'orbax' / 'params')
    query = load_file(GOLDEN / 'v1_1' / WEIGHTS)['decoder.block.1.layer.1.EncDecAttention.q.weight']
    np.testing.assert_array_equal(arrays['decoder.1.cross_attention.query'], query.T.reshape(16, 3, 4))
    assert len(arrays) == len(load_file(GOLDEN / 'v1_1' / WEIGHTS))


def test_what_orbax_itself_writes_is_read(tmp_path, orbax):
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(orbax / 'params')
        shutil.rmtree(orbax / 'params')
        checkpointer.save(orbax / 'params', arrays)
    assert (orbax / 'params' / 'manifest.ocdbt').exists()
    assert_equal_params(load_t5(orbax).params, load_t5(GOLDEN / 'v1_1').params)
    (orbax / 'params' / 'manifest.ocdbt').write_bytes(b'no manifest')
    refused(orbax, 'params: expected a whole checkpoint, got .*; copy it again')


SHARDED = """
import sys, jax, numpy as np
jax.config.update('jax_num_cpu_devices', 4)
from jax.sharding import NamedSharding, PartitionSpec
from spec_jax.models.t5_orbax import restore_t5
from spec_jax.models.t5_weights import load_t5

mesh = jax.make_mesh((4,), ('model',))
paths = set()

def sharding(path, shape):
    axes = [size % 4 == 0 for size in shape]
    first = axes.index(True) if any(axes) else len(shape)
    return NamedSharding(mesh, PartitionSpec(*[None] * first, *['model'] * any(axes)))

def place(path, array):
    assert isinstance(array, np.ndarray) and array.flags.c_contiguous
    paths.add(path)
    return jax.device_put(array, sharding(path, array.shape))

hf, orbax = sys.argv[1:]
plain = load_t5(hf, 'bfloat16')
for model in (restore_t5(orbax, sharding, 'bfloat16'), load_t5(orbax, 'bfloat16', place=place)):
    assert jax.tree.structure(model) == jax.tree.structure(plain)
    for leaf, expected in zip(jax.tree.leaves(model), jax.tree.leaves(plain), strict=True):
        assert leaf.dtype == expected.dtype and len(leaf.sharding.device_set) == 4
        np.testing.assert_array_equal(leaf, expected)
    embedding = model.params['embedding'][...]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(8, 16)}
    gate = model.params['decoder'][1]['mlp']['down'][...]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(5, 16)}
assert ('decoder', 1, 'cross_attention', 'out') in paths and len(paths) == len(jax.tree.leaves(plain))
print('equal')
"""


def test_straight_into_shards(tmp_path):
    convert.convert(GOLDEN / 'v1_1', tmp_path / 'orbax', 'orbax')
    command = [sys.executable, '-c', SHARDED, GOLDEN / 'v1_1', tmp_path / 'orbax']
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == 'equal\n', done.stderr


# One piece or nothing.


@pytest.mark.parametrize('form', convert.FORMATS)
def test_a_failure_leaves_no_folder(tmp_path, form, monkeypatch):
    source = make_t5x(tmp_path)
    read = t5x.T5X.read

    def failing(self, name):
        if name == 'decoder_norm.scale':
            raise ValueError('the source is damaged')
        return read(self, name)

    monkeypatch.setattr(t5x.T5X, 'read', failing)
    with pytest.raises(ValueError, match='^the source is damaged$'):
        convert.convert(source, tmp_path / 'out', form)
    assert [path.name for path in tmp_path.iterdir()] == ['t5x']


@pytest.mark.parametrize('form', convert.FORMATS)
def test_a_full_disk(tmp_path, form, monkeypatch):
    shutil.copytree(GOLDEN / 'v1_0', tmp_path / 'out')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match='out: expected a folder to write .*File too large') as caught:
            convert.convert(GOLDEN / 'v1_1', tmp_path / 'out', form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_one_line(caught)
    assert_equal_params(load_t5(tmp_path / 'out').params, load_t5(GOLDEN / 'v1_0').params)
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
        'config.json',
        'expected.npz',
        WEIGHTS,
    ]
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(OSError, match='new: expected 0.0 GB free, got 0.0 GB; make room'):
        convert.convert(GOLDEN / 'v1_1', tmp_path / 'new', form)
    assert [path.name for path in tmp_path.iterdir()] == ['out']


KILLED = """
import sys, time
from spec_jax.models import convert, t5x
read = t5x.T5X.read

def slow(self, name):
    if name == 'encoder.0.mlp.up':  # all but the last few arrays are written by now
        print('now', flush=True)
        time.sleep(600)
    return read(self, name)

t5x.T5X.read = slow
convert.convert(*sys.argv[1:])
"""


@pytest.mark.parametrize('form', convert.FORMATS)
def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(tmp_path, form):
    source, output = make_t5x(tmp_path), tmp_path / 'out'
    command = [sys.executable, '-c', KILLED, source, output, form]
    with subprocess.Popen(command, cwd=tiny.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.readline() == b'now\n'
        child.kill()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f'.out.tmp{child.pid}', 't5x']
    with pytest.raises((FileNotFoundError, ValueError)) as caught:
        load_t5(tmp_path / left[0])
    assert_one_line(caught)
    convert.convert(source, output, form)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['out', 't5x']
    assert_equal_params(load_t5(output).params, load_t5(source).params)


def test_one_form_takes_anothers_place_and_leaves_the_rest(tmp_path):
    output = tmp_path / 'out'
    shutil.copytree(GOLDEN / 'v1_1', output, ignore=shutil.ignore_patterns('*.npz'))
    for form, files in (
        ('orbax', ['config.json', 'params']),
        ('orbax', ['config.json', 'params']),
        ('hf', ['config.json', WEIGHTS]),
    ):
        convert.convert(GOLDEN / 'v1_0', output, form)
        (output / 'tokenizer.json').write_text('{}')
        assert sorted(path.name for path in output.iterdir()) == [*files, 'tokenizer.json']
        assert_equal_params(load_t5(output).params, load_t5(GOLDEN / 'v1_0').params)


# Errors of an Orbax folder.


def refused(folder, pattern, kind=ValueError):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for load in (load_t5, lambda folder: t5_orbax.restore_t5(folder, lambda *_: device)):
        with pytest.raises(kind, match=pattern) as caught:
            load(folder)
        assert_one_line(caught)


def edit_config(folder, **changes):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    'changes, pattern',
    [
        (dict(d_ff=21), r'expected decoder.0.mlp.down of shape \(21, 16\), got \(20, 16\); correct '),
        (dict(num_decoder_layers=3), 'got no decoder.2.*complete the copy'),
        (dict(num_decoder_layers=1), r'got decoder.1.*besides'),
        (dict(tie_word_embeddings=True), r'got head besides'),
        (dict(model_type='bert'), 'expected model_type "t5", got \'bert\''),
    ],
)
def test_a_config_that_does_not_fit(orbax, changes, pattern):
    edit_config(orbax, **changes)
    refused(orbax, pattern)


def test_a_config_that_is_missing(orbax):
    (orbax / 'config.json').unlink()
    refused(orbax, 'found no config.json', FileNotFoundError)


@pytest.mark.parametrize('damage', ['truncated', 'missing'])
@pytest.mark.parametrize('file', ['.zarray', '0.0'])
def test_a_damaged_array(orbax, file, damage):
    path = orbax / 'params' / 'decoder.0.mlp.up' / file
    path.unlink() if damage == 'missing' else path.write_bytes(path.read_bytes()[:30])
    refused(orbax, 'params: expected (decoder.0.mlp.up whole|a whole checkpoint)|got no decoder.0.mlp.up')


# The script.


def test_the_script(tmp_path):
    source = make_t5x(tmp_path)
    (source / 'spiece.model').write_text('pieces')
    (tmp_path / 'empty').mkdir()

    def line(source, output, *flags, form='hf'):
        return [f'--source={tmp_path / source}', f'--output={tmp_path / output}', f'--format={form}', *flags]

    results = tiny.run_forked(
        tiny.ROOT / 'scripts' / 'convert.py',
        [
            line('t5x', 'hf', '--max_shard_size=0.009MB', '--d_kv=4'),
            line('t5x', 'orbax', '--dtype=float32', form='orbax'),
            line('t5x', 't5x/../t5x'),
            line('empty', 'out'),
            line('t5x', 'out', '--d_kv=64'),
            line('t5x', 'out', '--dtype=float16'),
            line('t5x', 'out', '--max_shard_size=5'),
            line('t5x', 'out', form='zip'),
            line('none', 'out'),
            line('t5x', 't5x/spiece.model'),
        ],
        tmp_path,
    )
    (code, out, err), (code_2, out_2, _) = results[:2]
    assert (code, code_2) == (0, 0), results[:2]
    assert out == f'{tmp_path}/hf: 7,952 parameters as bfloat16, 0.00 GB\n' and 'array' in err
    assert out_2 == f'{tmp_path}/orbax: 7,952 parameters as float32, 0.00 GB\n'
    for name in ('hf', 'orbax'):
        assert (tmp_path / name / 'spiece.model').read_text() == 'pieces'
    assert_same_files(tmp_path / 'hf', GOLDEN / 'v1_1')
    patterns = (
        'expected an output folder other than the source, got the source; name another folder',
        'expected a T5 (config.json with safetensors or Orbax params, or arrays target.* of T5X), found none',
        'expected 3 heads of width 64',
        'T5 overflows in it',
        "expected a size such as 5GB or 500MB, got '5'",
        'hf|orbax',
        'found none; check the path',
        'expected a folder to write a model to',
    )
    for (code, out, err), pattern in zip(results[2:], patterns, strict=True):
        last = err.rpartition('\r')[2].splitlines()
        errors = [line for line in last if line.startswith('error: ')]
        assert code == 1 and out == '' and len(errors) == 1 and pattern in errors[0], (code, out, err)
    assert not (tmp_path / 'out').exists()
