"""What a backend wants: how the decoding programs are compiled, and the form and the rows of their products."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

# XLA's CPU backend hands a product, or a whole feed-forward block, to YNNPACK, which with AVX2 takes 1.4 to
# 2.8 times as long for 2 to 8 rows as the kernels it replaced (equally long for one). No kind of fusion: those.
_YNNPACK = 'xla_cpu_experimental_ynn_fusion_type'

_elsewhere: str | None = None


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Within it programs are traced as `platform` wants them, such as 'tpu', whatever this machine has.

    For compiling without running (`tpu/programs.py`); not for `jit` below, whose options are this machine's.
    """
    global _elsewhere
    before, _elsewhere = _elsewhere, platform
    try:
        yield
    finally:
        _elsewhere = before


def platform() -> str:
    """'cpu', 'tpu' or 'gpu': what programs are traced for."""
    return _elsewhere or jax.default_backend()


def jit(function: Callable | None = None, *, static_argnames: str | tuple[str, ...] = ()) -> Callable:
    """`jax.jit` for programs that decode: on CPU with the kernels that are fast for few rows.

    Decorates at import time and looks at the backend at the first call. Like every jit with options of its own, the
    result cannot be called while another one is traced. Options that XLA_FLAGS names are left as they are there.

    Args:
      function: as of `jax.jit`.
      static_argnames: as of `jax.jit`.
    """
    if function is None:
        return functools.partial(jit, static_argnames=static_argnames)

    @functools.cache
    def compiled() -> Callable:
        return jax.jit(function, static_argnames=static_argnames, compiler_options=_options())

    @functools.wraps(function)
    def call(*args, **kwargs):
        return compiled()(*args, **kwargs)

    call.lower = lambda *args, **kwargs: compiled().lower(*args, **kwargs)
    return call


def fewest_rows() -> int:
    """Rows that the last product of a call should have at batch 1.

    A single row leaves a TPU's matrix unit and costs twice as much as two; on CPU it has a kernel of its own, the
    fastest there is.
    """
    return 1 if platform() == 'cpu' else 2


def block_rows(rows: int) -> int:
    """Rows that a target call over `rows` positions should have at batch 1, the last ones fillers.

    On CPU a product over two or four rows takes up to a third longer than one over a row more: by 1024 x 384, 146,
    109, 156 and 118 us over two to five (AVX2, two cores).
    """
    return {2: 3, 4: 5}.get(rows, rows) if platform() == 'cpu' else rows


def rows_toll(rows: int) -> float:
    """What a target call over `rows` positions takes at batch 1 beyond one over a single row, in calls over one.

    On CPU a quarter for up to three rows and a third for up to six (the demo pair, AVX2, two cores); next to
    nothing where reading the weights is all that counts.
    """
    if rows == 1 or platform() != 'cpu':
        return 0.0
    return 0.25 if rows <= 3 else 0.35 if rows <= 6 else 0.7


def apart(projected: jax.Array) -> jax.Array:
    """Keeps a projection out of the product that takes it, where XLA would make one operation of the two.

    On TPU the query's projection, fused into the scores, reads its weight at half the speed: the target call of
    T5-XXL over 8 rows is estimated at 10.86 ms so, and at 10.25 ms with the two apart (v4).
    """
    return projected if platform() == 'cpu' else lax.optimization_barrier(projected)


def most_fused() -> float:
    """Bytes up to which weights that read the same activations are better one array.

    On CPU one product of three times the size takes a third less time at every size. A TPU is helped as long as the
    compiler can fetch the array while the product before it runs: of T5-XXL's, of 100 and 168 MB, a target call is
    estimated at 10.56 ms with them and 10.25 ms without on a v4; T5-small's draft step at .18 and .24 ms.
    """
    return math.inf if platform() == 'cpu' else 64e6


@functools.cache
def _options() -> dict[str, str] | None:
    if jax.default_backend() != 'cpu' or _YNNPACK in os.environ.get('XLA_FLAGS', ''):
        return None
    options = {_YNNPACK: ''}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:  # an XLA that does not know the option
        return None
    return options
