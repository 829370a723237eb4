"""Choices per platform: compiler options of the decoding programs, and the form and the rows of their products."""

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
# 2.8 times as long for 2 to 8 rows as the kernels it replaced (equally long for one). An empty list of fusion
# kinds brings the older kernels back.
_YNNPACK = 'xla_cpu_experimental_ynn_fusion_type'

_CACHE_LINE = 64  # bytes
_WIDE = 6000  # columns
_THIRD_LESS = 0.65

_traced_platform: str | None = None  # in place of this machine's


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Within it programs are traced for `platform`, such as 'tpu', whatever this machine has.

    For compiling without running (`tpu/programs.py`); not for `jit` below, whose options are this machine's.
    """
    global _traced_platform
    before, _traced_platform = _traced_platform, platform
    try:
        yield
    finally:
        _traced_platform = before


def platform() -> str:
    """'cpu', 'tpu' or 'gpu': the platform that programs are traced for."""
    return _traced_platform or jax.default_backend()


def jit(function: Callable | None = None, **options) -> Callable:
    """`jax.jit` for programs that decode: on CPU with the kernels that are fast for few rows.

    It decorates at import time and reads the backend at the first call. Like every jit with compiler options, the
    result cannot be called while another one is traced. Options that XLA_FLAGS sets are left unchanged.

    Args:
      function: as of `jax.jit`.
      options: as of `jax.jit`, such as static_argnames and donate_argnames.
    """
    if function is None:
        return functools.partial(jit, **options)

    @functools.cache
    def compiled() -> Callable:
        return jax.jit(function, compiler_options=_options(), **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return compiled()(*args, **kwargs)

    call.lower = lambda *args, **kwargs: compiled().lower(*args, **kwargs)
    return call


def fewest_rows(batch: int = 1) -> int:
    """The fewest rows that each text of a batch should have in a call.

    On a TPU a single row is not computed by the matrix unit and costs twice as much as two; on CPU it has a
    separate kernel, the fastest.
    """
    return 1 if platform() == 'cpu' or batch > 1 else 2


def filled_rows(rows: int, size: int) -> int:
    """Rows that the last product of a feed-forward block should have at batch 1; those after `rows` are filler.

    On CPU a product of medium size takes longer over two or four rows than over one more; the cause is not known.
    With a weight of 1024 x 384: 138 us over three rows and 149 over five, 177 and 199 over two and four (AVX2, two
    cores). Much smaller or larger weights do not show this.

    Args:
      rows: of the product, at least 1.
      size: elements of the weight.
    """
    return {2: 3, 4: 5}.get(rows, rows) if platform() == 'cpu' and 2**18 < size < 2**19 else rows


def better_row_by_row(rows: int) -> bool:
    """Whether attention over `rows` queries at batch 1 is faster one row at a time.

    On CPU up to four rows: the product of one row and a matrix has one kernel for all heads, several rows take one
    call per head. Over three rows 8 us in place of 17 with six heads of 64 x 64, 15 in place of 20 with 64 x 128
    (AVX2, two cores).
    """
    return platform() == 'cpu' and 1 < rows <= 4


def row_cost(rows: int) -> float:
    """Extra time of a target call over `rows` positions at batch 1, relative to a call over one row.

    On CPU a tenth for two rows, a quarter for four, a third for six (the demo pair, AVX2, two cores); 0 on other
    platforms, where reading the weights takes nearly all of the time.
    """
    if rows == 1 or platform() != 'cpu':
        return 0.0
    return {2: 0.1, 3: 0.15, 4: 0.25}.get(rows, 0.35 if rows <= 6 else 0.7)


def compiled_lengths(gamma: int, cost: Callable[[int], float] = row_cost) -> tuple[int, ...]:
    """The draft lengths for which a loop at batch 1 compiles a separate target call, ascending, gamma last.

    Each is the longest whose row cost is at least a third below that of the next, down to 0: on CPU 0, 2 and 5 for
    gamma = 5, and gamma alone where rows cost nothing. More lengths would gain little, and each call adds some 3 s
    of compilation (the demo pair, two cores).
    """
    lengths = [gamma]
    while (most := cost(lengths[0] + 1)) > 0:
        shorter = (length for length in range(lengths[0]) if cost(length + 1) < _THIRD_LESS * most)
        lengths.insert(0, max(shorter))
    return tuple(lengths)


def panels(columns: int, itemsize: int) -> tuple[int, int]:
    """The number of panels, and the columns of each, in which a decoder weight is multiplied fastest.

    (1, columns) leaves the weight unchanged. On CPU a call over a few rows first copies the weight into blocks a
    few columns wide. Where rows are a multiple of a large power of two apart in memory, these columns share a few
    sets of the cache; an odd number of cache lines per row spreads them over all sets. With a weight of 384 x 2048
    one row takes 181 us, three rows 255 us unpadded and 193 with 16 columns more, five rows 272 and 229; with
    1024 x 3072 it is 782, 1052 and 789, 1106 and 806. As many columns as a vocabulary has are faster as two panels:
    with 384 x 8000 three rows take 1012 us in one and 798 in two, five rows 1114 and 875 (all AVX2, two cores).

    Args:
      columns: of the weight.
      itemsize: bytes of an element.

    Returns:
      P and C, P * C >= columns.
    """
    if platform() != 'cpu':
        return 1, columns
    line = _CACHE_LINE // itemsize
    number = 2 if columns > _WIDE else 1
    lines = -(-columns // (number * line))
    return number, (lines + 1 - lines % 2) * line


def apart(projected: jax.Array) -> jax.Array:
    """Prevents XLA from fusing a projection into the product that uses it; not on CPU.

    On TPU the query's projection, fused into the scores, reads its weight at half the speed: the compiler estimates
    the target call of T5-XXL over 8 rows at 10.86 ms fused, and at 10.25 ms with the two apart (v4).
    """
    return projected if platform() == 'cpu' else lax.optimization_barrier(projected)


def most_fused() -> float:
    """Bytes up to which weights that read the same activations are faster as one array.

    On CPU one product of three times the size takes a third less time at every size. On a TPU it is faster as long
    as the compiler can fetch the array while the product before it runs. Its estimates for a v4: a target call of
    T5-XXL, with arrays of 100 and 168 MB, 10.56 ms fused and 10.25 ms apart; T5-small's draft step .18 and .24 ms.
    """
    return math.inf if platform() == 'cpu' else 64e6


@functools.cache
def _options() -> dict[str, str] | None:
    if jax.default_backend() != 'cpu' or _YNNPACK in os.environ.get('XLA_FLAGS', ''):
        return None
    options = {_YNNPACK: ''}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:  # an XLA without the option
        return None
    return options
