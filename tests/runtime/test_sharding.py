"""Rules of a mesh that need no devices; and `on_eight_devices.py`, run where there are eight."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spec_jax.models.t5 import PARTITION_RULES
from spec_jax.runtime import sharding

HERE = pathlib.Path(__file__).parent
EIGHT = '--xla_force_host_platform_device_count=8'


def run_on_eight_devices(*args, timeout=1800):
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *args]
    return subprocess.run(
        [*command, HERE / 'on_eight_devices.py'],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        timeout=timeout,
        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {EIGHT}'},
    )


def test_on_eight_devices():
    done = run_on_eight_devices()
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_on_eight_devices_at_length():
    done = run_on_eight_devices('-m', 'slow')
    assert done.returncode == 0, done.stdout[-4000:]


LAYER = 'decoder', 11
RULES = {
    ('embedding',): ((32128, 512), P('model')),
    ('head',): ((512, 32128), P(None, 'model')),
    (*LAYER, 'self_attention', 'query'): ((512, 8, 64), P(None, 'model')),
    (*LAYER, 'self_attention', 'key'): ((512, 8, 64), P(None, 'model')),
    (*LAYER, 'self_attention', 'fused'): ((512, 3, 8, 64), P(None, None, 'model')),
    (*LAYER, 'cross_attention', 'value'): ((512, 8, 64), P(None, 'model')),
    ('encoder', 0, 'attention', 'out'): ((8, 64, 512), P('model')),
    ('encoder', 0, 'mlp', 'gate'): ((512, 1024), P(None, 'model')),
    (*LAYER, 'mlp', 'up'): ((512, 1024), P(None, 'model')),
    (*LAYER, 'mlp', 'fused'): ((512, 2, 1024), P(None, None, 'model')),
    (*LAYER, 'mlp', 'down'): ((1024, 512), P('model')),
    (*LAYER, 'mlp_norm', 'scale'): ((512,), P()),
    ('encoder_norm', 'scale'): ((512,), P()),
    ('decoder_bias', 'table'): ((32, 8), P()),
}


@pytest.mark.parametrize('path', RULES)
def test_how_a_parameter_is_split(path):
    shape, expected = RULES[path]
    assert sharding.partition_spec(PARTITION_RULES, path, shape, 8) == expected


def test_a_vocabulary_that_does_not_divide_is_split_by_width():
    assert sharding.partition_spec(PARTITION_RULES, ('embedding',), (32100, 512), 8) == P(None, 'model')
    assert sharding.partition_spec(PARTITION_RULES, ('head',), (512, 32100), 8) == P('model')


def test_heads_that_do_not_divide_are_whole_and_a_line_says_so_once(capsys):
    for name in ('query', 'key', 'query'):
        assert (
            sharding.partition_spec(PARTITION_RULES, (*LAYER, 'self_attention', name), (512, 5, 64), 7) == P()
        )
    assert capsys.readouterr().err == (
        'WARNING: mesh.model = 7 does not divide 5: decoder.self_attention is whole on every device\n'
    )


def test_rules_are_the_models_and_the_first_that_matches_counts(capsys):
    rules = (('w.*', P(None, 'model'), P('model')), ('wide', P('model')))
    assert sharding.partition_spec(rules, ('wide',), (8, 8), 2) == P(None, 'model')
    assert sharding.partition_spec(rules, ('wide',), (8, 3), 2) == P('model')
    assert sharding.partition_spec(rules, ('wide',), (3, 5), 2) == P()
    assert 'mesh.model = 2 does not divide 5: wide is whole on every device' in capsys.readouterr().err
    with pytest.raises(ValueError, match='expected a rule for the weight layers.0.narrow, got none; add one'):
        sharding.partition_spec(rules, ('layers', 0, 'narrow'), (8,), 2)


def test_sizes_of_a_recipe():
    assert sharding.mesh_sizes(None) == sharding.mesh_sizes({}) == (1, 1)
    assert sharding.mesh_sizes(dict(data=2, model=4)) == (2, 4)
    for size in (0, -1, 1.5, '2', True):
        with pytest.raises(ValueError, match='mesh.model: expected an integer >= 1, got'):
            sharding.mesh_sizes(dict(model=size))


def test_without_a_mesh_nothing_is_done():
    model = object()
    assert sharding.shard(model) is model and sharding.placer(PARTITION_RULES) is None
    rows = sharding.by_row(np.arange(3))
    assert rows.sharding == jnp.arange(3).sharding and not sharding.rows_are_apart()
    assert sharding.whole_distributions(rows) is rows
