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

_CACHE_LINE = 64  # bytes
_WIDE = 6000  # columns
_THIRD_LESS = 0.65

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


def jit(function: Callable | None = None, **options) -> Callable:
    """`jax.jit` for programs that decode: on CPU with the kernels that are fast for few rows.

    Decorates at import time and looks at the backend at the first call. Like every jit with options of its own, the
    result cannot be called while another one is traced. Options that XLA_FLAGS names are left as they are there.

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
    """Rows that each text of a batch should have in a call, at least.

    A single row leaves a TPU's matrix unit and costs twice as much as two; on CPU it has a kernel of its own, the
    fastest there is.
    """
    return 1 if platform() == 'cpu' or batch > 1 else 2


def filled_rows(rows: int, size: int) -> int:
    """Rows that the last product of a feed-forward block should have at batch 1, those behind `rows` fillers.

    On CPU a product of middling size takes longer over two or four rows than over one more; why was not looked
    into. By 1024 x 384, 138 us over three and 149 over five rows, 177 and 199 over two and four (AVX2, two cores);
    neither much smaller nor larger weights have this.

    Args:
      rows: of the product, at least 1.
      size: numbers in the weight.
    """
    return {2: 3, 4: 5}.get(rows, rows) if platform() == 'cpu' and 2**18 < size < 2**19 else rows


def better_row_by_row(rows: int) -> bool:
    """Whether attention over `rows` queries at batch 1 is better done one at a time.

    On CPU up to four: one row by a matrix has a kernel of its own, which all heads share, several rows are a call a
    head. Over three rows 8 us in place of 17 with six heads of 64 x 64, 15 and 20 with 64 x 128 (AVX2, two cores).
    """
    return platform() == 'cpu' and 1 < rows <= 4


def row_cost(rows: int) -> float:
    """What a target call over `rows` positions takes at batch 1 beyond one over a single row, in calls over one.

    On CPU a tenth for two rows, a quarter for four, a third for six (the demo pair, AVX2, two cores); next to
    nothing where reading the weights is all that counts.
    """
    if rows == 1 or platform() != 'cpu':
        return 0.0
    return {2: 0.1, 3: 0.15, 4: 0.25}.get(rows, 0.35 if rows <= 6 else 0.7)


def call_lengths(gamma: int, cost: Callable[[int], float] = row_cost) -> tuple[int, ...]:
    """The lengths of drafts for which a loop at batch 1 has a target call of its own, ascending, gamma last.

    Each is the longest whose rows have a cost that is a third less than that of the next, down to none at all: on
    CPU 0, 2 and 5 of gamma = 5, and where rows cost nothing gamma alone. More would gain little, and each call adds
    some 3 s of compiling (the demo pair, two cores).
    """
    found = [gamma]
    while (most := cost(found[0] + 1)) > 0:
        found.insert(0, max(length for length in range(found[0]) if cost(length + 1) < _THIRD_LESS * most))
    return tuple(found)


def panels(columns: int, itemsize: int) -> tuple[int, int]:
    """In how many panels of how many columns a wide weight of the decoder lies best; (1, columns) as it is.

    On CPU a call over a few rows first copies the weight into blocks, a few columns wide. Where one row lies a
    multiple of a power of two behind the other, these columns share a few sets of the cache; an odd number of cache
    lines a row spreads them over all. By 384 x 2048, one row 181 us, three rows take 255 and with 16 columns more
    193, five 272 and 229; by 1024 x 3072 it is 782, 1052 and 789, 1106 and 806 (AVX2, two cores). A vocabulary's
    worth of columns is better as two panels: by 384 x 8000 three rows take 1012 us and then 798, five 1114 and 875.

    Args:
      columns: of the weight.
      itemsize: bytes of each of its numbers.

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
