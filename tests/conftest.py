"""How the tests compile: quickly, as XLA takes nearly all of their time; but for those that use `optimised`.

To compile everything as users do: JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS= ./scripts/test.sh
"""

import importlib.metadata
import os

import pytest

# Before JAX starts.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
if importlib.metadata.version('jax').startswith('0.10.'):  # XLA ends the program at a flag it does not know
    os.environ.setdefault('XLA_FLAGS', '--xla_cpu_use_fusion_emitters=false')


_FLAG = 'jax_disable_most_optimizations'


@pytest.fixture(autouse=True)
def compiled_quickly():
    """Whatever ran before in this process."""
    import jax

    jax.config.update(_FLAG, os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] == '1')


@pytest.fixture
def optimised(compiled_quickly):
    """For a test that computes for longer than it compiles."""
    import jax

    jax.config.update(_FLAG, False)
    yield
    jax.config.update(_FLAG, os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] == '1')
