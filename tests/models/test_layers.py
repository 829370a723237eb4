"""The shared layers against NumPy, and einsum's own gradient against the automatic one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spec_jax.models.layers import MLP, Attention, RMSNorm
from spec_jax.runtime import products
from spec_jax.runtime.products import einsum

# Every spec that the models use, with sizes by letter.
SPECS = [
    'btd,dhk->bthk',
    'bhtk,bhkl->bhtl',
    'bhtl,bhlk->bhtk',
    'bhtk,hkd->btd',
    'btd,df->btf',
    'btf,fd->btd',
    'btd,vd->btv',
    'btd,dv->btv',
    'btd,dc->btc',
    'pbtd,pdc->pbtc',
]
SIZES = dict(b=2, l=5, t=3, d=6, h=2, k=4, f=7, v=9, c=8, p=3)


def operands(spec, seed=0):
    """Random x and y of the spec's shapes, and a cotangent of its result's."""
    shapes = [[SIZES[axis] for axis in axes] for axes in spec.replace('->', ',').split(',')]
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize('spec', SPECS)
def test_einsum_and_its_gradient_equal_jnp_einsum(spec):
    x, y, cotangent = operands(spec)

    @partial(jax.jit, static_argnums=0)
    def result_and_gradient(product, x, y, cotangent):
        result, backward = jax.vjp(product, x, y)
        return result, *backward(cotangent)

    ours = result_and_gradient(lambda x, y: einsum(spec, x, y), x, y, cotangent)
    expected = result_and_gradient(lambda x, y: jnp.einsum(spec, x, y), x, y, cotangent)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_einsum_in_bfloat16_keeps_the_types_and_stays_close():
    spec = 'btd,df->btf'
    x, y, cotangent = operands(spec)
    low = x.astype(jnp.bfloat16)  # activations in bfloat16, the weight in float32, as in training
    result, backward = jax.vjp(lambda x, y: einsum(spec, x, y), low, y)
    x_grad, y_grad = backward(cotangent.astype(jnp.bfloat16))
    assert (result.dtype, x_grad.dtype, y_grad.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert einsum(spec, low, y, jnp.float32).dtype == jnp.float32
    _, expected = jax.vjp(lambda x, y: jnp.einsum(spec, x, y), x, y)
    for grad, reference in zip((x_grad, y_grad), expected(cotangent), strict=True):
        np.testing.assert_allclose(grad.astype(jnp.float32), reference, rtol=0.05, atol=0.05)


def test_einsum_accumulates_in_float32():
    x = jnp.ones((1, 1, 4096), jnp.bfloat16)  # a bfloat16 sum of ones would stop at 256
    assert einsum('btd,df->btf', x, jnp.ones((4096, 1)), jnp.float32) == 4096


def test_rms_norm_has_no_mean_and_adds_epsilon_inside_the_root():
    norm = RMSNorm(2, epsilon=1.0)
    norm.scale[...] = jnp.array([1.0, 10.0])
    x = jnp.array([[3.0, 4.0]])  # mean of squares 12.5
    np.testing.assert_allclose(norm(x), [[3 / 13.5**0.5, 40 / 13.5**0.5]], rtol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.full((1, 256), 200.0, jnp.bfloat16)
    out = RMSNorm(256, epsilon=1e-6)(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


@pytest.mark.parametrize('gated', [True, False])
def test_mlp(gated):
    mlp = MLP(3, 5, gated=gated, activation=jax.nn.relu, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    up, down = np.asarray(mlp.up[...]), np.asarray(mlp.down[...])
    if gated:  # the activation falls on the gate
        hidden = np.maximum(x @ np.asarray(mlp.gate[...]), 0) * (x @ up)
    else:
        assert mlp.gate is None
        hidden = np.maximum(x @ up, 0)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down, rtol=1e-5, atol=1e-5)


def test_attention_is_unscaled_and_adds_the_bias():
    layer = Attention(6, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, memory = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 5, 6))
    bias = rng.normal(size=(2, 2, 3, 5))
    key, value = layer.keys_values(jnp.asarray(memory, jnp.float32))
    assert key.shape == (2, 2, 4, 5) and value.shape == (2, 2, 5, 4)

    weights = {name: np.asarray(getattr(layer, name)[...]) for name in ('query', 'key', 'value', 'out')}
    expected = np.zeros((2, 3, 6))
    for head in range(2):
        scores = (x @ weights['query'][:, head]) @ (memory @ weights['key'][:, head]).transpose(0, 2, 1)
        shares = np.exp(scores + bias[:, head])
        shares /= shares.sum(-1, keepdims=True)
        expected += shares @ (memory @ weights['value'][:, head]) @ weights['out'][head]
    query = layer.queries(jnp.asarray(x, jnp.float32))
    ours = layer.attend(query, key, value, jnp.asarray(bias, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_one_product_for_query_key_and_value_gives_what_three_give():
    apart = Attention(6, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    fused = Attention(6, num_heads=2, head_dim=4, fused=True, rngs=nnx.Rngs(1))
    fused.fused[...] = jnp.stack([apart.query[...], apart.key[...], apart.value[...]], axis=1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)
    for ours, expected in zip(fused.project(x), apart.project(x), strict=True):
        assert sorted(ours.shape) == [2, 2, 3, 4]
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('number, columns', [(1, 24), (1, 31), (2, 12), (3, 9)])
def test_a_weight_in_panels_projects_as_it_did(monkeypatch, number, columns):
    monkeypatch.setattr(products, 'panels', lambda *_: (number, columns))
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 3, 2, 4))
    laid_out = products.to_panels(jnp.asarray(weight, jnp.float32))
    assert laid_out.shape == (number, 5, columns)
    expected = np.einsum('btd,dchk->btchk', x, weight)
    for form in jnp.asarray(weight, jnp.float32), laid_out:
        ours = products.project('btd,dchk->btchk', jnp.asarray(x, jnp.float32), form, (3, 2, 4))
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('batch, rows', [(1, 1), (1, 2), (1, 4), (1, 5), (2, 3)])
def test_attention_is_the_same_row_by_row_and_all_at_once(monkeypatch, batch, rows):
    layer = Attention(6, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    shapes = (batch, 2, rows, 4), (batch, 2, 4, 7), (batch, 2, 7, 4), (batch, 2, rows, 7)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    outputs = []
    for row_by_row in False, True:
        monkeypatch.setattr(products, 'better_row_by_row', lambda _, answer=row_by_row: answer)
        outputs.append(layer.attend(*given))
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    traced = str(jax.make_jaxpr(layer.attend)(*given))
    assert traced.count('dot_general') == (2 * rows if batch == 1 else 2) + 1


@pytest.mark.parametrize('batch', [1, 2])
def test_rows_that_fill_up_the_feed_forward_block_do_not_come_out(monkeypatch, batch):
    layer = MLP(6, 10, gated=True, activation=jax.nn.gelu, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(batch, 4, 6)), jnp.float32)
    expected = layer(x)
    monkeypatch.setattr(products, 'filled_rows', lambda rows, size: rows + 3)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert layer(x).shape == x.shape
    assert ('f32[1,7,10]' in str(jax.make_jaxpr(layer)(x))) == (batch == 1)
