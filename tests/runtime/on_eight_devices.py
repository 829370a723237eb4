"""A T5 pair on meshes of eight virtual CPU devices; `test_sharding.py` runs this in a process that has them.

Sums over `model` are added up in another order than on one device, and round otherwise. A greedy id could differ
where two logits are nearly alike: here no two best are within 1e-4, which is tested. A sampled one could where a
random number falls next to a border; among so few draws that is unlikely, and with these seeds it does not happen.

Axes: B rows, S source length, V vocabulary, D model width, H heads, K head width, F feed-forward width, L slots.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spec_jax.decoding import DecodeConfig, speculative_loop
from spec_jax.drafters.model import ModelDrafter
from spec_jax.generation import _generate, generate
from spec_jax.measure import runs, setup
from spec_jax.models.load import load_model
from spec_jax.models.t5 import PARTITION_RULES, T5, T5Config
from spec_jax.models.t5_weights import load_t5, save_t5
from spec_jax.runtime import sharding
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.testing import TableModel, prompts
from spec_jax.types import Block

CONFIG = T5Config(
    vocab_size=64,
    d_model=48,
    d_kv=8,
    d_ff=96,
    num_heads=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
    tied_head=True,
    eos_id=-1,  # texts go on to the limit
)
NUCLEUS = SamplingConfig(temperature=1.0, top_p=0.9)
NEW_TOKENS = 16
SETTINGS = setup.Settings(DecodeConfig(2, NEW_TOKENS, GREEDY), batch_size=8, max_source_length=16)


@pytest.fixture(autouse=True)
def one_device_again():
    yield
    sharding.use_mesh()


@functools.cache
def weights():
    """Parameters in the host's memory: a target whose logits are far apart, a draft that is often right."""
    target = jax.tree.map(
        lambda x: 2 * np.asarray(x), jax.jit(T5.create, static_argnums=0)(CONFIG, jax.random.key(0)).params
    )
    random = np.random.default_rng(1)
    draft = jax.tree.map(
        lambda x: (x + 0.04 * x.std() * random.normal(size=x.shape)).astype(np.float32), target
    )
    return target, draft


def pair():
    """Target and drafter on the mesh in use."""
    models = (T5(jax.tree.map(jnp.asarray, params), CONFIG) for params in weights())
    target, draft = (sharding.shard(model.for_decoding()) for model in models)
    return target, ModelDrafter(draft)


@functools.cache
def sources():
    random = np.random.default_rng(0)
    return [np.append(random.integers(2, 64, size), 1).astype(np.int32) for size in (5, 2, 9, 4, 7, 12, 3)]


def decoded(sampling, batch_size, data=1, model=1):
    sharding.use_mesh(data, model)
    settings = dataclasses.replace(SETTINGS.decoding(sampling=sampling), batch_size=batch_size)
    return runs.decode_lines(sources(), settings, runs.speculative_program(*pair(), settings))


@functools.cache
def on_one_device(sampling):
    return decoded(sampling, batch_size=8)


def assert_as_on_one_device(sampling, batch_size, data, model):
    expected, result = on_one_device(sampling), decoded(sampling, batch_size, data, model)
    for ours, theirs in zip(expected.ids, result.ids, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ('rounds', 'tested_at', 'accepted', 'histogram', 'emitted'):
        np.testing.assert_array_equal(getattr(expected.stats, name), getattr(result.stats, name))


@pytest.mark.parametrize('sampling', [GREEDY, NUCLEUS])
def test_rounds_differ_among_rows_and_no_two_texts_are_alike(sampling):
    one = on_one_device(sampling)
    assert len({ids.tobytes() for ids in one.ids}) == 7 and all(len(ids) == NEW_TOKENS for ids in one.ids)
    assert 0.2 < one.stats.accepted / one.stats.tested < 0.95


def test_no_greedy_choice_is_a_near_tie():
    target, _ = pair()
    ((batch, inputs, _),) = runs.batches(sources(), SETTINGS)
    texts = [on_one_device(GREEDY).ids[max(line, 0)] for line in batch.rows]
    tokens = jnp.pad(jnp.asarray(np.stack(texts))[:, :-1], ((0, 0), (1, 0)), constant_values=CONFIG.start_id)
    best = jax.lax.top_k(scores(target, inputs, tokens), 2)[0]  # [B, T, 2]
    assert (best[..., 0] - best[..., 1]).min() > 1e-4


@jax.jit
def scores(target, inputs, tokens):
    positions = jnp.broadcast_to(jnp.arange(NEW_TOKENS), tokens.shape)
    cache = target.prefill(inputs, NEW_TOKENS).cache
    return target.logits(target.decode(Block(tokens, positions), cache)[0])


MESHES = [(1, 8), (2, 4), (8, 1)]


@pytest.mark.parametrize('data, model', [(1, 8), (8, 1)])
def test_sampled_ids_do_not_depend_on_the_mesh(data, model):
    assert_as_on_one_device(NUCLEUS, 8, data, model)


def test_caches_are_split_by_row_and_head_no_weight_travels_and_greedy_ids_are_the_same():
    """Every array of a cache's shape is a part, and what devices exchange is smaller than any part of a weight."""
    sharding.use_mesh(data=2, model=4)
    target, drafter = pair()
    ((batch, inputs, keys),) = runs.batches(sources(), SETTINGS)
    compiled = _generate.lower(target, drafter, inputs, keys, config=SETTINGS.decode).compile()
    slots = '(16|22)'  # of the source; of both caches
    arrays = set(re.findall(r'f32\[([\d,]+)\]', compiled.as_text()))
    caches = {one for one in arrays if re.fullmatch(rf'\d+,\d+,(8,{slots}|{slots},8)', one)}
    assert caches == {f'4,2,{form}' for n in (16, 22) for form in (f'8,{n}', f'{n},8')}
    exchanged = collectives(compiled.as_text())
    assert set(exchanged) == {'all-reduce'}
    assert exchanged['all-reduce'] == 4 * 3 * 48 < min(parts(target) | parts(drafter.model))  # [B, T, D]
    output = compiled(target, drafter, inputs, keys)
    for line, ids in runs.ids_by_line(batch, output).items():
        np.testing.assert_array_equal(ids, on_one_device(GREEDY).ids[line])


@pytest.mark.parametrize('check_vma', [True, False])
def test_within_shard_map_each_device_decodes_its_own_rows(check_vma):
    """Of a user's own mesh: every device runs a loop of its own, and a row's text is the one it has anywhere."""
    target = TableModel.random(jax.random.key(0), 12, order=2, num_tables=16, eos_id=1)
    drafter = ModelDrafter(TableModel.random(jax.random.key(1), 12, order=2, num_tables=16))
    inputs, keys, config = prompts(range(16)), row_keys(jax.random.key(2), np.arange(16)), DecodeConfig(3, 20)
    expected = generate(target, drafter, inputs, keys, config)
    mesh = jax.make_mesh((8,), ('rows',), axis_types=(AxisType.Auto,))

    def loop(target, drafter, inputs, keys):
        return speculative_loop(target, drafter, inputs, keys, config=config)

    specs = dict(in_specs=(P(), P(), P('rows'), P('rows')), out_specs=P('rows'))
    program = jax.jit(jax.shard_map(loop, mesh=mesh, check_vma=check_vma, **specs))
    output = program(target, drafter, inputs, keys)
    jax.tree.map(np.testing.assert_array_equal, output, expected)
    assert len(output.tokens.sharding.device_set) == 8


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_decoded_whole_on_every_device(capfd):
    assert_as_on_one_device(GREEDY, 7, 2, 4)
    assert 'WARNING: mesh.data = 2 does not divide a batch of 7 rows' in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('sampling', [GREEDY, NUCLEUS])
@pytest.mark.parametrize('batch_size', [1, 3, 8])
@pytest.mark.parametrize('data, model', MESHES)
def test_whatever_mesh_and_batch(data, model, batch_size, sampling):
    assert_as_on_one_device(sampling, batch_size, data, model)


@pytest.mark.slow
@pytest.mark.parametrize('data, model', MESHES)
def test_plain_decoding_neither(data, model):
    sharding.use_mesh(data, model)
    program = runs.plain_program(pair()[0], SETTINGS)
    for ours, theirs in zip(
        on_one_device(GREEDY).ids, runs.decode_lines(sources(), SETTINGS, program).ids, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def specs(model):
    return {path: leaf.sharding.spec for path, leaf in nnx.to_flat_state(model.params)}


def test_weights_lie_by_head_by_feed_forward_column_and_by_piece(tmp_path):
    config = dataclasses.replace(CONFIG, eos_id=1)
    save_t5(T5(jax.tree.map(jnp.asarray, weights()[0]), config), tmp_path)
    sharding.use_mesh(data=2, model=4)
    loaded = load_t5(tmp_path, place=sharding.placer(PARTITION_RULES))
    for model in loaded, sharding.shard(loaded.for_decoding()):
        partition = specs(model)
        assert partition['embedding',] == P('model') and partition['decoder_norm', 'scale'] == P()
        assert partition['encoder', 0, 'attention', 'query'] == P(None, 'model')
        assert partition['decoder', 0, 'self_attention', 'out'] == P('model')
        assert partition['decoder', 0, 'mlp', 'down'] == P('model')
        for path, leaf in nnx.to_flat_state(model.params):
            (part,) = {shard.data.nbytes for shard in leaf.addressable_shards}
            whole = path[-1] in ('scale', 'table')
            assert part == leaf.nbytes // (1 if whole else 4), path
    assert partition['head',] == P(None, 'model')
    expected = nnx.to_flat_state(load_t5(tmp_path).for_decoding().params)
    for (path, ours), (_, theirs) in zip(expected, nnx.to_flat_state(model.params), strict=True):
        np.testing.assert_array_equal(ours[...], theirs[...], str(path))
    at_once = load_model(tmp_path)
    assert specs(at_once) == specs(model) and at_once.config == model.config
    for ours, theirs in zip(jax.tree.leaves(at_once), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def parts(model) -> set[int]:
    """Numbers in the parts of the weights that are split."""
    leaves = [leaf[...] for _, leaf in nnx.to_flat_state(model.params)]
    return {leaf.addressable_shards[0].data.size for leaf in leaves if leaf.sharding.spec != P()}


def collectives(text: str) -> dict[str, int]:
    """Numbers in the largest result of each kind of exchange between devices in a compiled loop."""
    largest = {}
    for line in text.splitlines():
        made = re.search(r'= (\(?\w+\[.*?) (all-\w+|collective-permute|reduce-scatter)[\w-]*\(', line)
        if made and '/prefill/' not in line:
            sizes = [math.prod(map(int, dims.split(','))) for dims in re.findall(r'\[(\d[\d,]*)\]', made[1])]
            largest[made[2]] = max([largest.get(made[2], 0), *sizes])
    return largest


def test_a_head_count_that_does_not_divide_leaves_attention_whole(capfd):
    sharding.use_mesh(data=1, model=8)
    config = dataclasses.replace(CONFIG, num_heads=6, vocab_size=61)
    model = sharding.shard(jax.jit(functools.partial(T5.create, config))(jax.random.key(0)))
    partition = specs(model)
    assert (
        partition['decoder', 0, 'self_attention', 'query']
        == partition['encoder', 0, 'attention', 'out']
        == P()
    )
    assert partition['decoder', 0, 'mlp', 'up'] == P(None, 'model')
    assert partition['embedding',] == P(None, 'model')  # 61 pieces do not divide, 48 columns do
    assert sorted(capfd.readouterr().err.splitlines()) == [
        f'WARNING: mesh.model = 8 does not divide 6: {block} is whole on every device'
        for block in ('decoder.cross_attention', 'decoder.self_attention', 'encoder.attention')
    ]


@pytest.mark.parametrize('data, model', [(3, 2), (1, 16)])
def test_a_mesh_must_divide_the_devices(data, model):
    with pytest.raises(
        ValueError, match=rf'divide 8, the number of devices; got {data} x {model} = {data * model}: '
    ):
        sharding.use_mesh(data, model)


def test_a_mesh_may_leave_devices_idle():
    sharding.use_mesh(data=1, model=2)
    assert sharding.mesh_in_use().size == 2
    sharding.use_mesh()
    assert sharding.mesh_in_use() is None and sharding.placer(PARTITION_RULES) is None
