"""What a pair needs is what its arrays take, and the table shows which chips have room."""

import jax
import jax.numpy as jnp
import pytest

from spec_jax.decoding import DecodeConfig, start
from spec_jax.drafters.model import ModelDrafter
from spec_jax.models.load import describe
from spec_jax.models.t5 import T5, T5Config
from spec_jax.models.t5_shape import T5Shape
from spec_jax.runtime.backend import tracing_for
from spec_jax.sampling import row_keys
from spec_jax.tpu import memory
from spec_jax.types import Inputs

GIB = 2**30
SMALL = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_encoder_layers=1)
TARGET = T5Config(**SMALL, num_heads=4, num_decoder_layers=3)
DRAFT = T5Config(**SMALL, num_heads=2, num_decoder_layers=1, tied_head=True)


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_the_need_is_what_the_arrays_of_a_pair_take():
    with tracing_for('tpu'):  # on CPU weights get columns more
        target, draft = (T5.create(config, jax.random.key(0)).for_decoding() for config in (TARGET, DRAFT))
    inputs = Inputs(jnp.ones((2, 12), jnp.int32), jnp.ones((2, 12), bool))
    keys, sizes = row_keys(jax.random.key(0), range(2)), dict(gamma=3, max_new_tokens=9)
    state = start(target, ModelDrafter(draft), inputs, keys, config=DecodeConfig(**sizes))
    need = memory.need(
        T5Shape(TARGET), T5Shape(DRAFT), **sizes, source_length=12, batch_size=2, dtype='float32'
    )
    assert need.weights == num_bytes((target, draft))
    assert need.caches == num_bytes((state.target_cache, state.draft_state))
    half = memory.need(T5Shape(TARGET), T5Shape(DRAFT), **sizes, source_length=12, batch_size=2)
    assert 2 * half.weights == need.weights and need.caches / 2 <= half.caches < 0.6 * need.caches


def test_a_fifth_is_left_over():
    assert memory.Need(7 * GIB, 1 * GIB).fits(10 * GIB)
    assert not memory.Need(7 * GIB, 1 * GIB + 1).fits(10 * GIB)


def test_the_table_shows_which_chip_holds_t5():
    """By hand: XL has 2.85 billion parameters, XXL 11.1; two bytes each, and the draft's .15 GB."""
    options = dict(gamma=7, max_new_tokens=128, source_length=512)
    draft = describe('google/t5-v1_1-small')
    needs = {
        size: memory.need(describe(f'google/t5-v1_1-{size}'), draft, **options) for size in ('xl', 'xxl')
    }
    assert needs['xl'].weights / 2 == pytest.approx(2.85e9 + 0.077e9, rel=0.01)
    assert needs['xxl'].weights / 2 == pytest.approx(11.135e9 + 0.077e9, rel=0.01)
    head, _, xl, xxl = memory.table(needs).splitlines()
    assert [cell.strip() for cell in head.split('|')[4:-1]] == [
        'v2, a core: 8',
        'v3, a core: 16',
        'v5e: 16',
        'v4: 32',
        'v6e: 32',
        'v5p: 95',
    ]
    assert xl.count('yes') == 6
    assert [cell.strip() for cell in xxl.split('|')[4:-1]] == ['', '', '', 'yes', 'yes', 'yes']
