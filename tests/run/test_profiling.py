"""Time by part of a program, of a real trace; and the unions that it is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spec_jax.run import profiling


@pytest.mark.parametrize(
    ('spans', 'length'),
    [
        ([], 0),
        ([(2, 5)], 3),
        ([(4, 6), (0, 1)], 3),
        ([(0, 4), (1, 2), (3, 6)], 6),
        ([(0, 9), (1, 2), (8, 10), (12, 13)], 11),
    ],
    ids=['none', 'one', 'apart', 'overlapping', 'nested'],
)
def test_covered_counts_what_overlaps_once(spans, length):
    assert profiling.covered(spans) == length


def test_time_goes_to_the_part_that_took_it(tmp_path):
    @jax.jit
    def loop(x):
        def body(_, x):
            with jax.named_scope('draft'):
                x = jnp.tanh(x @ x)
            with jax.named_scope('target'):
                for _ in range(8):
                    x = jnp.tanh(x @ x)
            return x

        return lax.fori_loop(0, 10, body, x)

    @jax.jit
    def other(x):  # its operations have names that the loop's have, too
        with jax.named_scope('update'):
            return jnp.tanh(x @ x)

    x = jnp.eye(256)
    jax.block_until_ready((loop(x), other(x)))
    with profiling.trace(tmp_path / 'new' / 'folder'):
        jax.block_until_ready((loop(x), other(x)))
    seconds = profiling.seconds_by_scope(tmp_path / 'new' / 'folder', 'jit_loop')
    assert list(seconds) == ['prefill', 'draft', 'target', 'verify', 'update']
    assert seconds['prefill'] == seconds['verify'] == seconds['update'] == 0
    assert 3 < seconds['target'] / seconds['draft'] < 24  # eight products to one
    assert profiling.seconds_by_scope(tmp_path / 'new' / 'folder', 'jit_other')['update'] > 0


def test_a_folder_without_a_trace_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='expected plugins/profile/TIME/HOST.xplane.pb'):
        profiling.seconds_by_scope(tmp_path)
