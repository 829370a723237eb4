"""T5 against transformers (golden arrays, and live where torch is), and its cache against teacher forcing."""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import make_golden
import numpy as np
import pytest

from spec_jax.models.blocks import draft_block
from spec_jax.models.t5 import T5, T5Config, dropout, relative_bucket
from spec_jax.models.t5_weights import load_t5
from spec_jax.types import Block, Context, Draft, Inputs

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FAMILIES = ['v1_0', 'v1_1']
JUNK = 1e4  # large, so that a stale slot that leaks is seen

forward = jax.jit(T5.forward)


@partial(jax.jit, static_argnums=2)
def encode(model, inputs, num_tokens):
    """The cache after the source, with room for so many tokens."""
    return model.prefill(inputs, num_tokens).cache


@jax.jit
def decode(model, tokens, positions, cache):
    """Logits [B, T, V] of tokens at `positions`, and the cache with all up to the last kept."""
    cache = model.keep(cache, None, positions[:, 0])
    hidden, _, cache = model.decode(Block(tokens, positions), cache)
    return model.logits(hidden), model.keep(cache, None, positions[:, -1] + 1)


@pytest.fixture(scope='module')
def models():
    return {family: load_t5(GOLDEN / family) for family in FAMILIES}


def golden_example(family):
    """Inputs, decoder input [3, 24] and transformers' log-probabilities [3, 24, 32]."""
    arrays = np.load(GOLDEN / family / 'expected.npz')
    inputs = Inputs(jnp.asarray(arrays['source']), jnp.asarray(arrays['mask']))
    return inputs, jnp.asarray(arrays['decoder_input']), arrays['log_probs']


def log_probs(logits):
    assert logits.dtype == jnp.float32
    return jax.nn.log_softmax(logits)


def poison(cache):
    """Fills the filler's slot and every stale one with junk."""
    attention, slot = cache.self_attention, jnp.arange(cache.self_attention.num_slots)
    stale = (slot == 0) | (slot > attention.length[:, None])  # [B, L]
    fill = lambda stale, array: jnp.where(stale, JUNK, array)  # noqa: E731
    return cache.replace(
        self_attention=attention.replace(
            keys=tuple(fill(stale[:, None, None, :], array) for array in attention.keys),
            values=tuple(fill(stale[:, None, :, None], array) for array in attention.values),
        )
    )


# Against transformers.


@pytest.mark.parametrize('family', FAMILIES)
def test_log_probs_equal_the_golden_ones(models, family):
    inputs, decoder_input, expected = golden_example(family)
    ours = log_probs(forward(models[family], inputs, decoder_input))
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize('family', FAMILIES)
def test_laid_out_for_decoding_it_is_the_same_model(models, family):
    inputs, decoder_input, expected = golden_example(family)
    model = models[family].for_decoding()
    assert model.for_decoding() is model and models[family].config.fused is None
    np.testing.assert_allclose(log_probs(forward(model, inputs, decoder_input)), expected, atol=1e-4, rtol=0)
    positions = jnp.tile(jnp.arange(24), (3, 1))
    logits, _ = decode(model, decoder_input, positions, encode(model, inputs, 24))
    np.testing.assert_allclose(log_probs(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize('config, untied', [(make_golden.V1_0, False), (make_golden.V1_1, True)])
def test_log_probs_equal_live_transformers(tmp_path, config, untied):
    pytest.importorskip('torch')
    config = dict(config, vocab_size=53, d_model=24, d_kv=8, d_ff=40, num_heads=4, num_decoder_layers=1)
    make_golden.write_folder(tmp_path, config, make_golden.hf_tensors(config, 5, untied))
    source, mask, decoder_input = make_golden.example(config, 6, (150, 33, 2, 9), decoder_length=140)
    expected = make_golden.reference_log_probs(tmp_path, source, mask, decoder_input)

    model, inputs = load_t5(tmp_path), Inputs(jnp.asarray(source), jnp.asarray(mask))
    ours = log_probs(forward(model, inputs, jnp.asarray(decoder_input)))
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    logits, _ = decode(model, decoder_input, jnp.tile(jnp.arange(140), (4, 1)), encode(model, inputs, 140))
    np.testing.assert_allclose(log_probs(logits), expected, atol=1e-4, rtol=0)


# Relative positions.


# The least distance of each bucket, computed by transformers' T5Attention._relative_position_bucket.
CAUSAL_STARTS = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
BACK_STARTS = [*range(9), 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize('compiled', [False, True])
def test_relative_buckets_of_t5(compiled):
    def bucket(distance, bidirectional):
        return relative_bucket(distance, bidirectional=bidirectional, num_buckets=32, max_distance=128)

    bucket = jax.jit(bucket, static_argnums=1) if compiled else bucket
    distance = jnp.arange(-300, 301)
    steps = np.abs(distance)
    causal = np.where(distance < 0, np.searchsorted(CAUSAL_STARTS, steps, side='right') - 1, 0)
    np.testing.assert_array_equal(bucket(distance, False), causal)
    either = np.searchsorted(BACK_STARTS, steps, side='right') - 1 + np.where(distance > 0, 16, 0)
    np.testing.assert_array_equal(bucket(distance, True), either)


@pytest.mark.parametrize('num_buckets, max_distance', [(32, 128), (32, 256), (8, 20), (64, 1000)])
def test_relative_buckets_equal_live_transformers(num_buckets, max_distance):
    torch = pytest.importorskip('torch')
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-1500, 1501, dtype=np.int32)
    for bidirectional in (True, False):
        sizes = dict(bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
        expected = T5Attention._relative_position_bucket(torch.tensor(distance), **sizes).numpy()
        np.testing.assert_array_equal(relative_bucket(jnp.asarray(distance), **sizes), expected)


# The cache (fault 13).


# 3 rows, and 18: `cache.write` has a form for few rows and one for many.
@pytest.mark.parametrize('family, copies', [('v1_0', 1), ('v1_1', 6)])
def test_blocks_at_uneven_offsets_equal_teacher_forcing(models, family, copies):
    model = models[family]
    inputs, decoder_input, _ = golden_example(family)
    inputs = jax.tree.map(lambda array: jnp.tile(array, (copies, 1)), inputs)
    tokens = jnp.tile(decoder_input, (copies, 1))  # [B, 24]
    expected = forward(model, inputs, tokens)
    # Each round appends 5 tokens, of which a row keeps some, and the rest are wrong.
    kept = np.array([[0, 2, 5], [1, 5, 0], [5, 0, 5], [2, 3, 0], [5, 4, 5]] * 2)
    rows = np.arange(3 * copies)[:, None]

    cache = encode(model, inputs, 24 + 5)
    length = np.zeros(3 * copies, np.int32)
    for keep in np.minimum(np.tile(kept, (1, copies)), 5):
        keep = np.minimum(keep, 24 - length)
        positions = length[:, None] + np.arange(5)  # [B, 5]
        right = np.arange(5) < keep[:, None]
        block = np.where(right, tokens[rows, np.minimum(positions, 23)], 31 - np.arange(5))
        logits, cache = decode(model, block, positions, cache)
        np.testing.assert_allclose(
            np.where(right[..., None], logits, 0),
            np.where(right[..., None], expected[rows, np.minimum(positions, 23)], 0),
            atol=1e-5,
            rtol=1e-5,
        )
        length = length + keep
        cache = poison(model.keep(cache, None, length))
        np.testing.assert_array_equal(cache.self_attention.length, length)
    assert length.min() >= 19  # positions whose bucket is no longer their distance


def test_one_token_at_a_time_equals_teacher_forcing(models):
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    expected = forward(model, inputs, tokens)
    cache = encode(model, inputs, 24)
    for i in range(24):
        logits, cache = decode(model, tokens[:, i : i + 1], jnp.full((3, 1), i), cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, i], atol=1e-5, rtol=1e-5)


def test_a_window_of_two_that_rewrites_one_slot_equals_teacher_forcing(models):
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    expected = forward(model, inputs, tokens)
    _, cache = decode(model, tokens[:, :1], jnp.zeros((3, 1), jnp.int32), encode(model, inputs, 24))
    for i in range(1, 12):
        logits, cache = decode(
            model, tokens[:, i - 1 : i + 1], jnp.tile(jnp.array([i - 1, i]), (3, 1)), cache
        )
        np.testing.assert_allclose(logits, expected[:, i - 1 : i + 1], atol=1e-5, rtol=1e-5)


def test_a_filler_at_position_minus_one_is_never_seen(models):
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    expected = forward(model, inputs, tokens)
    for filler in (0, 17):  # any token will do, the slot is position + 1
        block = jnp.concatenate([jnp.full((3, 1), filler), tokens[:, :4]], axis=1)
        positions = jnp.tile(jnp.arange(-1, 4), (3, 1))
        logits, cache = decode(model, block, positions, encode(model, inputs, 10))
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[:, 1:], expected[:, :4], atol=1e-5, rtol=1e-5)

        cache = poison(model.keep(cache, None, jnp.array([1, 4, 3])))
        positions = cache.self_attention.length[:, None] + jnp.arange(5)
        logits, _ = decode(model, jnp.take_along_axis(tokens, positions, 1), positions, cache)
        later = np.take_along_axis(np.asarray(expected), np.asarray(positions)[..., None], 1)
        np.testing.assert_allclose(logits, later, atol=1e-5, rtol=1e-5)


def test_features_are_the_outputs_of_the_layers_asked_for(models):
    """That of the last layer, normed, is the hidden state; without a request there are none."""
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    asked = model.replace(feature_layers=(0, 1))
    assert asked.spec.feature_layers == (0, 1) and model.spec.feature_layers == ()
    block = Block(tokens[:, :5], jnp.tile(jnp.arange(5), (3, 1)))
    hidden, features, _ = asked.decode(block, encode(asked, inputs, 9))
    assert features.shape == (3, 5, 2 * 16) and model.decode(block, encode(model, inputs, 9))[1] is None
    np.testing.assert_allclose(model.module.decoder_norm(features[:, :, 16:]), hidden, atol=1e-6)
    assert np.abs(features[:, :, :16] - features[:, :, 16:]).min(axis=(0, 1)).max() > 1e-3


def test_a_tree_in_a_block_gives_each_path_what_it_gives_alone(models):
    """Two branches after two tokens; then the second branch is kept, and its next token read."""
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    _, cache = decode(model, tokens[:, :2], jnp.tile(jnp.arange(2), (3, 1)), encode(model, inputs, 20))
    branches = np.array([[7, 9, 4], [11, 3, 5]])
    draft = Draft(
        jnp.tile(jnp.asarray(branches.T.ravel()), (3, 1)), None, jnp.full(3, 6), parents=(-1, -1, 0, 1, 2, 3)
    )
    context = Context(jnp.pad(tokens[:, :3], ((0, 0), (0, 9))), jnp.ones(3, jnp.int32), jnp.full(3, 3))
    hidden, _, read = model.decode(draft_block(context, draft), cache)
    logits = model.logits(hidden)
    for branch in (0, 1):
        text = jnp.concatenate([tokens[:, :3], jnp.tile(jnp.asarray(branches[branch]), (3, 1))], axis=1)
        expected = forward(model, inputs, text)[:, 2:]
        path = np.array([0, 1 + branch, 3 + branch, 5 + branch])
        np.testing.assert_allclose(logits[:, path], expected, atol=1e-5, rtol=1e-5)
    kept = poison(model.keep(read, jnp.tile(jnp.array([2, 4, 6, 0]), (3, 1)), jnp.full(3, 6)))
    following, _ = decode(model, jnp.full((3, 1), 8), jnp.full((3, 1), 6), kept)
    text = jnp.concatenate([text, jnp.full((3, 1), 8)], axis=1)
    np.testing.assert_allclose(following[:, 0], forward(model, inputs, text)[:, -1], atol=1e-5, rtol=1e-5)


def test_cross_attention_is_projected_once(models):
    model = models['v1_0']
    inputs, tokens, _ = golden_example('v1_0')
    cache = encode(model, inputs, 24)
    assert [keys.shape for keys in cache.cross_keys] == 2 * [(3, 3, 4, 20)]  # [B, H, K, S]
    _, later = decode(model, tokens[:, :5], jnp.tile(jnp.arange(5), (3, 1)), cache)
    for name in ('cross_keys', 'cross_values', 'cross_bias'):
        jax.tree.map(np.testing.assert_array_equal, getattr(later, name), getattr(cache, name))
    # Decoding never reads the encoder or the projections of the source.
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * jnp.nan if _belongs_to_source(path) else leaf, model.params
    )
    broken = model.replace(params=params)
    logits, _ = decode(broken, tokens[:, :5], jnp.tile(jnp.arange(5), (3, 1)), cache)
    np.testing.assert_allclose(logits, forward(model, inputs, tokens)[:, :5], atol=1e-5, rtol=1e-5)


def _belongs_to_source(path):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    return name.startswith('encoder') or '.cross_attention.key.' in name or '.cross_attention.value.' in name


# Rows and padding.


def test_a_row_alone_equals_the_row_in_a_batch(models):
    model = models['v1_0']
    inputs, tokens, _ = golden_example('v1_0')
    together = forward(model, inputs, tokens)
    for row, length in ((0, 20), (1, 20), (2, 20), (2, 3)):  # and with less padding
        alone = Inputs(inputs.tokens[row : row + 1, :length], inputs.mask[row : row + 1, :length])
        logits = forward(model, alone, tokens[row : row + 1])
        np.testing.assert_allclose(logits[0], together[row], atol=1e-5, rtol=1e-5)


def test_what_stands_under_the_mask_does_not_matter(models):
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    other = inputs.replace(tokens=jnp.where(inputs.mask, inputs.tokens, 29))
    np.testing.assert_array_equal(forward(model, other, tokens), forward(model, inputs, tokens))


def test_an_empty_source_gives_finite_logits(models):
    inputs, tokens, _ = golden_example('v1_1')
    empty = inputs.replace(mask=jnp.zeros_like(inputs.mask))
    assert np.isfinite(forward(models['v1_1'], empty, tokens)).all()


# Dropout and bfloat16.


def test_forward_drops_features_only_with_a_key(models):
    model = models['v1_1']
    inputs, tokens, _ = golden_example('v1_1')
    plain = forward(model, inputs, tokens)
    one, again, other = (forward(model, inputs, tokens, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.isfinite(one).all()
    for a, b in ((plain, one), (one, other)):
        assert np.abs(a - b).max() > 0.1


def test_dropout_keeps_the_mean_and_shares_its_mask_along_a_row():
    drop = dropout(jax.random.key(0), 0.25)
    x = jnp.ones((64, 3, 256))
    dropped = drop(x)
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_array_equal(dropped[:, 0], dropped[:, 2])
    np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.02)
    assert (drop(x) != dropped).any()  # the next site has a mask of its own


def test_every_weight_of_the_forward_pass_has_a_gradient(models):
    inputs, tokens, _ = golden_example('v1_1')

    @jax.jit
    @jax.grad
    def gradient(model):
        return -log_probs(model.forward(inputs, tokens))[..., 5].mean()

    for path, grad in jax.tree_util.tree_leaves_with_path(gradient(models['v1_1']).params):
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize('family', FAMILIES)
def test_bfloat16_is_finite_and_close(models, family):
    inputs, tokens, expected = golden_example(family)
    model = load_t5(GOLDEN / family, jnp.bfloat16)
    ours = log_probs(forward(model, inputs, tokens))
    assert np.isfinite(ours).all()
    error = np.abs(ours - expected)
    assert error.mean() < 0.05 and error.max() < 0.5


def test_a_bfloat16_cache_is_bfloat16(models):
    inputs, tokens, expected = golden_example('v1_1')
    model = load_t5(GOLDEN / 'v1_1', jnp.bfloat16)
    cache = encode(model, inputs, 24)
    logits, cache = decode(model, tokens, jnp.tile(jnp.arange(24), (3, 1)), cache)
    attention = cache.self_attention
    for array in (*attention.keys, *attention.values, *cache.cross_keys, *cache.cross_values):
        assert array.dtype == jnp.bfloat16
    assert np.abs(log_probs(logits) - expected).mean() < 0.05


# Sizes.


@pytest.mark.parametrize(
    'd_model, num_heads, layers, d_ff, count',
    [
        (512, 6, 8, 1024, 76_961_152),
        (768, 12, 12, 2048, 247_577_856),
    ],
)
def test_parameters_of_the_published_sizes(d_model, num_heads, layers, d_ff, count):
    config = T5Config(
        d_model=d_model, num_heads=num_heads, num_encoder_layers=layers, num_decoder_layers=layers, d_ff=d_ff
    )
    shapes = jax.eval_shape(lambda key: T5.create(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_a_new_model_predicts_roughly_evenly():
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_heads=3, num_encoder_layers=2, num_decoder_layers=2
    )
    model = jax.jit(lambda key: T5.create(config, key))(jax.random.key(0))
    inputs = Inputs(jnp.arange(1, 9)[None], jnp.ones((1, 8), bool))
    log_prob = log_probs(forward(model, inputs, jnp.arange(8)[None]))
    assert np.abs(log_prob + np.log(64)).mean() < 1.5
