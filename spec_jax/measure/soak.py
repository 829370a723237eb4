"""A long run of mixed lengths: is each shape compiled once, and does memory stay flat?

The prompts come in passes. Each contains all widths of batches, so the first pass compiles every program, and any
compilation or growth of memory after it is a fault.

Axes: B rows of a batch, S source length.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.measure import runs
from spec_jax.measure.runs import Program
from spec_jax.measure.setup import Settings
from spec_jax.state import Stats
from spec_jax.text.batches import bucket_lengths

_COMPILED = (
    '/jax/core/compile/backend_compile_duration'  # a program read from the compilation cache counts, too
)
_FROM_CACHE = '/jax/compilation_cache/cache_hits'
_STATM = pathlib.Path('/proc/self/statm')  # in pages: all memory, then what is resident
_BATCHES = 2  # of each width in a pass
_WARM_UP = 0.25  # share of the passes whose memory is not tested: allocators are still growing


class Compilations:
    """Counts the programs that JAX compiles within a `with` block.

    Attributes:
      count: compiled, or read from the compilation cache.
      from_cache: of these, read from the cache that JAX_COMPILATION_CACHE_DIR names.
    """

    def __init__(self):
        self.count = self.from_cache = 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._timed)
        jax.monitoring.register_event_listener(self._plain)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._timed)
        jax.monitoring.unregister_event_listener(self._plain)

    def _timed(self, event: str, _: float, **__) -> None:
        self.count += event == _COMPILED

    def _plain(self, event: str, **_) -> None:
        self.from_cache += event == _FROM_CACHE


@dataclasses.dataclass(frozen=True)
class Sample:
    """The state of the process after a pass.

    Attributes:
      prompts: decoded so far.
      compilations: so far.
      resident_mb: memory of the process, in MB of 10^6 bytes.
      device_mb: memory in use on the first device; None where the backend does not report it (CPU).
      live_arrays: JAX arrays that are alive.
    """

    prompts: int
    compilations: int
    resident_mb: float
    device_mb: float | None
    live_arrays: int


def make_passes(sources: Sequence[np.ndarray], prompts: int, settings: Settings) -> list[list[np.ndarray]]:
    """Prompts of every length, cut from the concatenated sources, which are repeated as needed.

    A pass begins with an empty line and has two batches of each width (`batches.bucket_lengths`), of lengths drawn
    evenly. The last pass may be shorter.

    Args:
      sources: int32 [S] each, ending in EOS.
      prompts: how many to make, at least two passes.
      settings: the batch size, the widths, and the seed of the lengths.

    Returns:
      Passes of prompts, int32 [S] each, ending in EOS.

    Raises:
      ValueError: `prompts` is too small, or the sources have no text.
    """
    text = np.concatenate([np.zeros(0, np.int32), *(ids[:-1] for ids in sources)])
    if not len(text):
        raise ValueError('data: expected a line with text in it; got empty lines alone')
    widths = np.array(bucket_lengths(settings.max_source_length, settings.narrowest))
    size = _BATCHES * settings.batch_size * len(widths)
    if prompts < 2 * size:
        raise ValueError(
            f'prompts: expected an integer >= {2 * size}, two passes over {len(widths)} widths at batch size '
            f'{settings.batch_size}; got {prompts}'
        )
    index = np.arange(prompts)
    shortest, longest = np.array([2, *(widths[:-1] + 1)]), widths
    rng, bucket = np.random.default_rng(settings.seed), index % len(widths)
    lengths = rng.integers(shortest[bucket], longest[bucket], endpoint=True)
    lengths[index % size == 0] = 1  # EOS alone
    ends, eos = np.cumsum(lengths - 1), sources[0][-1:]
    made = [
        np.append(text.take(np.arange(end - length + 1, end), mode='wrap'), eos).astype(np.int32)
        for end, length in zip(ends, lengths, strict=True)
    ]
    return [made[start : start + size] for start in range(0, prompts, size)]


@dataclasses.dataclass(frozen=True)
class Soaked:
    """The results of a run.

    Attributes:
      samples: one before the first pass, then one after each.
      stats: counts, summed.
      from_cache: how many of the compiled programs came from the compilation cache.
      seconds: all passes together, compilation included.
    """

    samples: list[Sample]
    stats: Stats
    from_cache: int
    seconds: float


def run(
    program: Program,
    passes: Sequence[Sequence[np.ndarray]],
    settings: Settings,
    *,
    progress=iter,
    stop: Callable[[], bool] = lambda: False,
) -> Soaked:
    """Decodes the passes, each with a different seed, and samples the process after each.

    Args:
      program: as of `runs.speculative_program`.
      passes: of `make_passes`.
      settings: of the program; its seed is the first pass's, the next one's is one more.
      progress: wraps the list of passes, for instance tqdm.
      stop: called after each pass; True ends the run there.
    """
    total, start = None, time.perf_counter()
    with Compilations() as compilations:
        samples = [_sample(0, compilations)]
        for number, prompts in enumerate(progress(list(passes))):
            seeded = dataclasses.replace(settings, seed=settings.seed + number)
            for _, inputs, keys in runs.batches(prompts, seeded):
                counts = analysis.add_stats([program(inputs, keys).stats])
                total = counts if total is None else jax.tree.map(np.add, total, counts)
            samples.append(_sample(samples[-1].prompts + len(prompts), compilations))
            if stop():
                break
    return Soaked(samples, total, compilations.from_cache, time.perf_counter() - start)


def _sample(prompts: int, compilations: Compilations) -> Sample:
    gc.collect()  # garbage not yet collected is not a leak
    memory = jax.devices()[0].memory_stats()
    return Sample(
        prompts=prompts,
        compilations=compilations.count,
        resident_mb=resident_bytes() / 1e6,
        device_mb=memory['bytes_in_use'] / 1e6 if memory else None,
        live_arrays=len(jax.live_arrays()),
    )


def resident_bytes() -> int:
    """Memory of this process that is resident.

    Raises:
      OSError: not on Linux.
    """
    if not _STATM.exists():
        raise OSError(f'{_STATM}: expected Linux, where it has the memory of a process; got none')
    return int(_STATM.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def figures(soaked: Soaked, max_growth_mb: float) -> dict[str, Any]:
    """The report's figures.

    Args:
      soaked: of `run`.
      max_growth_mb: how much memory may grow after the warm-up, in MB.

    Returns:
      prompts and seconds; compilations_first_pass, compilations_later and, of both, compilations_from_cache;
      live_arrays after the first and the last pass; warm_up_prompts; for `resident` and, where it is known,
      `device` the largest (max_mb), and after the warm-up the slope (mb_per_1000_prompts) and the total growth
      (growth_mb); faults, in words; the samples.
    """
    _, first, *_ = samples = soaked.samples
    warm = _warmed(samples)
    measured = dict(
        prompts=samples[-1].prompts,
        seconds=soaked.seconds,
        compilations_first_pass=first.compilations,
        compilations_later=samples[-1].compilations - first.compilations,
        compilations_from_cache=soaked.from_cache,
        live_arrays=[first.live_arrays, samples[-1].live_arrays],
        warm_up_prompts=warm[0].prompts,
        max_growth_mb=max_growth_mb,
    )
    for where in ('resident', 'device'):
        memory = [getattr(sample, f'{where}_mb') for sample in samples]
        if memory[0] is not None:
            slope = _slope([s.prompts for s in warm], memory[-len(warm) :])
            growth = slope * (warm[-1].prompts - warm[0].prompts)
            measured[where] = dict(max_mb=max(memory), mb_per_1000_prompts=1e3 * slope, growth_mb=growth)
    return measured | dict(
        faults=_faults(measured), samples=[dataclasses.asdict(sample) for sample in samples]
    )


def _warmed(samples: list[Sample]) -> list[Sample]:
    """The samples after the warm-up, which is at least the first pass."""
    return samples[max(1, round(_WARM_UP * (len(samples) - 1))) :]


def _slope(x: list[float], y: list[float]) -> float:
    """Of the least squares line; 0 for a single point."""
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else 0.0


def _faults(measured: dict[str, Any]) -> list[str]:
    """The faults, one line each."""
    faults, (first, last) = [], measured['live_arrays']
    if later := measured['compilations_later']:
        faults.append(
            f'{later} programs were compiled after the first pass, which had every width in it; expected none: '
            'some shape or static argument is new from prompt to prompt'
        )
    if last > first:
        faults.append(
            f'{first} JAX arrays were alive after the first pass and {last} after the last; expected no more: '
            'something keeps outputs'
        )
    for where in ('resident', 'device'):
        if where in measured and (growth := measured[where]['growth_mb']) > measured['max_growth_mb']:
            faults.append(
                f'{where} memory grew by {growth:.1f} MB after the first {measured["warm_up_prompts"]} prompts; '
                f'expected at most {measured["max_growth_mb"]:g}: something is kept from prompt to prompt'
            )
    return faults


def summary(measured: dict[str, Any]) -> str:
    """The figures, one per line, then the verdict."""
    first, last = measured['live_arrays']
    compiled, cached = measured['compilations_first_pass'], measured['compilations_from_cache']
    rows = [
        ('prompts', f'{measured["prompts"]} in {measured["seconds"]:.0f} s'),
        ('programs compiled in the first pass', f'{compiled}; in the whole run {cached} came from the cache'),
        ('programs compiled later', measured['compilations_later']),
        ('JAX arrays alive, first and last pass', f'{first}, {last}'),
    ]
    for where in ('resident', 'device'):
        if where in measured:
            mb = measured[where]
            slope = f'{mb["mb_per_1000_prompts"]:+.1f} MB per 1,000 prompts after the warm-up'
            rows.append((f'{where} memory', f'{mb["max_mb"]:.0f} MB at most, {slope}'))
    verdict = [f'FAILED: {fault}' for fault in measured['faults']] or [
        'bounded: each shape once, memory flat'
    ]
    return '\n'.join([tabulate(rows, tablefmt='plain', disable_numparse=True), *verdict])


def plot(soaked: Soaked, title: str) -> Figure:
    """Memory, compiled programs and live arrays over prompts; the warm-up is shaded."""
    samples = soaked.samples
    x = [sample.prompts for sample in samples]
    figure = Figure(figsize=(8, 7), layout='constrained')
    memory, compiled, arrays = panels = figure.subplots(3, 1, sharex=True)
    memory.plot(x, [sample.resident_mb for sample in samples], '.-', label='process, resident')
    if samples[0].device_mb is not None:
        memory.plot(x, [sample.device_mb for sample in samples], '.-', label='device, in use')
    memory.legend(loc='lower right')
    memory.set(ylabel='memory, MB', title=title)
    compiled.plot(x, [sample.compilations for sample in samples], '.-', color='C2')
    compiled.set(ylabel='programs compiled')
    arrays.plot(x, [sample.live_arrays for sample in samples], '.-', color='C3')
    arrays.set(ylabel='JAX arrays alive', xlabel='prompts')
    for axes in panels:
        axes.axvspan(0, _warmed(samples)[0].prompts, color='lightgrey', alpha=0.5)
        axes.set_ylim(0, 1.1 * max(max(line.get_ydata()) for line in axes.lines))
        axes.grid(alpha=0.3)
    return figure
