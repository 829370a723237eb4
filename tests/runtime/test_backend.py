"""backend.jit is jax.jit but for the options; and the compiled decoders copy no cache and no weight."""

import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.thrifty import Thrifty
from spec_jax.generation import _generate
from spec_jax.models.t5 import T5, T5Config
from spec_jax.runtime import backend
from spec_jax.sampling import GREEDY, row_keys
from spec_jax.types import Inputs

# Options that undo what conftest.py does to compile quickly.
AS_USERS = dict(xla_backend_optimization_level=3)
if 'fusion_emitters' in os.environ.get('XLA_FLAGS', ''):
    AS_USERS |= dict(xla_cpu_use_fusion_emitters=True)
on_cpu = pytest.mark.skipif(jax.default_backend() != 'cpu', reason="these are the CPU backend's ways")


def test_jit_compiles_once_a_shape_and_keeps_static_arguments():
    traced = []

    @backend.jit(static_argnames='power')
    def raised(x, *, power):
        traced.append(power)
        return x**power

    for power in (2, 3, 2):
        np.testing.assert_array_equal(raised(jnp.arange(3.0), power=power), np.arange(3.0) ** power)
    assert traced == [2, 3] and raised.__name__ == 'raised'


@on_cpu
def test_products_are_left_to_the_kernels_that_are_fast_for_few_rows(monkeypatch):
    product = lambda x, y: x @ y  # noqa: E731
    shapes = jnp.ones((4, 64)), jnp.ones((64, 256))
    assert 'ynn' not in backend.jit(product).lower(*shapes).compile(AS_USERS).as_text()
    monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT')
    backend._options.cache_clear()
    assert backend._options() is None  # the user's word stands
    monkeypatch.undo()
    backend._options.cache_clear()


@on_cpu
@pytest.mark.parametrize(
    'columns, itemsize, expected',
    [
        (2048, 4, (1, 2064)),  # 128 cache lines a row, then 129
        (1152, 4, (1, 1168)),
        (2064, 4, (1, 2064)),
        (7, 4, (1, 16)),
        (2048, 2, (1, 2080)),
        (8000, 4, (2, 4016)),
        (32128, 4, (2, 16080)),
        (32100, 2, (2, 16096)),
    ],
)
def test_rows_of_a_panel_are_an_odd_number_of_cache_lines(columns, itemsize, expected):
    assert backend.panels(columns, itemsize) == expected
    with backend.tracing_for('tpu'):
        assert backend.panels(columns, itemsize) == (1, columns)


@pytest.mark.parametrize(
    ('gamma', 'expected'), [(1, (0, 1)), (2, (0, 2)), (3, (0, 2, 3)), (4, (0, 2, 4)), (7, (0, 2, 5, 7))]
)
def test_calls_have_lengths_of_which_each_costs_a_third_less_than_the_next(gamma, expected):
    """Of costs of .1, .15, .25, .35, .35, .7, .7 for two rows and more."""
    cost = dict(enumerate((0, 0.1, 0.15, 0.25, 0.35, 0.35, 0.7, 0.7), start=1)).get
    assert backend.compiled_lengths(gamma, cost) == expected
    assert backend.compiled_lengths(gamma, lambda rows: 0.0) == (gamma,)
    with backend.tracing_for('tpu'):
        assert backend.compiled_lengths(gamma) == (gamma,)


@on_cpu
def test_rows_are_filled_up_for_weights_of_middling_size():
    of_the_pair = [backend.filled_rows(rows, 1024 * 384) for rows in range(1, 9)]
    assert of_the_pair == [1, 3, 3, 5, 5, 6, 7, 8]
    assert [backend.filled_rows(rows, 1024 * 512) for rows in (2, 4)] == [2, 4]
    assert [backend.filled_rows(rows, 1024 * 256) for rows in (2, 4)] == [2, 4]
    with backend.tracing_for('tpu'):
        assert backend.filled_rows(4, 1024 * 384) == 4 and not backend.better_row_by_row(3)


@pytest.fixture(scope='module')
def example():
    """A target, a draft and a prompt in which no weight, cache or activation is of another's size."""
    sizes = dict(vocab_size=6007, d_model=96, d_kv=32, d_ff=160, num_heads=3)
    config = T5Config(**sizes, num_encoder_layers=1, num_decoder_layers=2, tied_head=True)
    target = T5.create(config, jax.random.key(0)).for_decoding()
    drafter = ModelDrafter(T5.create(config, jax.random.key(1)).for_decoding())
    inputs = Inputs(jnp.ones((1, 8), jnp.int32), jnp.ones((1, 8), bool))
    return target, drafter, inputs, row_keys(jax.random.key(0), [0])


def loop_copies(text: str) -> list[str]:
    """Shapes of the large arrays that are copied, or transposed, within a loop of the compiled program."""
    shapes, where = [], ''
    for line in text.splitlines():
        if match := re.match(r'(?:ENTRY )?%?([\w.\-]+) .*\{$', line):
            where = match[1]
        made = re.match(r'\s+(?:ROOT )?%[\w.\-]+ = \w+\[([\d,]+)\]\S* (?:copy|transpose)\(', line)
        if made and 'region' in where and math.prod(map(int, made[1].split(','))) >= 96 * 96:
            shapes.append(made[1])
    return shapes


@on_cpu
@pytest.mark.parametrize('gamma', [1, 4])
def test_no_cache_and_no_weight_is_copied_in_the_loop(example, gamma):
    target, drafter, inputs, keys = example
    config = DecodeConfig(gamma, 120, GREEDY)
    plain = _generate.lower(target, NoDrafter(), inputs, keys, config=config)
    speculative = _generate.lower(target, drafter, inputs, keys, config=config)
    assert loop_copies(plain.compile(AS_USERS).as_text()) == []
    assert loop_copies(speculative.compile(AS_USERS).as_text()) == []


def products(text: str) -> dict[str, int]:
    """How many products each computation of the compiled program has, those that it calls left out."""
    counts, where = {}, ''
    for line in text.splitlines():
        if match := re.match(r'(?:ENTRY )?%?([\w.\-]+) .*\{$', line):
            where = match[1]
            counts[where] = 0
        elif ' dot(' in line:
            counts[where] += 1
    return counts


@on_cpu
def test_nor_where_a_round_without_a_guess_is_a_call_over_one_row(example):
    """And such a round has nothing of the other kind's: XLA hoists out of a loop what is the same in each pass."""
    target, _, inputs, keys = example
    drafter = Thrifty(PromptLookup())
    compiled = (
        _generate.lower(target, drafter, inputs, keys, config=DecodeConfig(4, 120, GREEDY))
        .compile(AS_USERS)
        .as_text()
    )
    assert loop_copies(compiled) == []
    entry = re.search(r'^ENTRY .*?^\}', compiled, re.M | re.S)[0]
    (outer,) = re.findall(r' while\(.*body=%?([\w.\-]+)', entry)
    inner = re.findall(r' while\(.*body=%?([\w.\-]+)', compiled)
    layer = 10  # four of self-attention (queries, keys and values are one), four of cross-attention, two of the MLP
    assert products(compiled)[outer] == 0
    calls = len(backend.compiled_lengths(4))
    assert sum(products(compiled)[body] > 2 * layer for body in inner) == calls == 3
