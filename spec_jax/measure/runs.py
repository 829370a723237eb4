"""Lines decoded batch by batch, and by several programs in turn.

Axes: B rows of a batch, S source length.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import analysis
from spec_jax.drafters.base import Drafter
from spec_jax.generation import generate, plain_generate
from spec_jax.measure import timing
from spec_jax.measure.setup import Settings
from spec_jax.models.base import Model
from spec_jax.run.journal import Journal
from spec_jax.runtime import sharding
from spec_jax.sampling import row_keys
from spec_jax.state import Output, Stats
from spec_jax.text.batches import Batch, bucket_batches
from spec_jax.types import Inputs

TIMER_SAMPLES = 15
STATS = [field.name for field in dataclasses.fields(Stats)]  # of each line, in a journal


@dataclasses.dataclass
class Decoded:
    """Results by line.

    Attributes:
      ids: int32 array per line, EOS included; empty for an empty line.
      seconds: decoding time of all batches, prefill and compilation excluded; None if not measured.
      prefill_seconds: encoding time of all batches; None if not measured.
      stats: summed counts.
      compile_seconds: extra time of the first run of each shape over a later one; None if not measured. Close to 0
        for a program that was compiled before.
      batch_seconds: `seconds` by batch; empty if not measured.
      batch_stats: counts by batch, arrays by row as of `Output`; empty if not measured.
    """

    ids: list[np.ndarray]
    stats: Stats
    seconds: float | None = None
    prefill_seconds: float | None = None
    compile_seconds: float | None = None
    batch_seconds: list[float] = dataclasses.field(default_factory=list)
    batch_stats: list[Stats] = dataclasses.field(default_factory=list)


Program = Callable[[Inputs, jax.Array], Output]


def plain_program(target: Model, settings: Settings) -> Program:
    """The plain decoder under `settings`."""
    return lambda inputs, keys: plain_generate(target, inputs, keys, settings.decode)


def speculative_program(target: Model, drafter: Drafter, settings: Settings) -> Program:
    """The speculative decoder under `settings`."""
    return lambda inputs, keys: generate(target, drafter, inputs, keys, settings.decode)


def batches(sources: list[np.ndarray], settings: Settings) -> Iterable[tuple[Batch, Inputs, jax.Array]]:
    """Batches of similar length with their inputs and row keys; lines that are EOS alone are left out."""
    lines = [line for line, ids in enumerate(sources) if len(ids) > 1]
    run_key = jax.random.key(settings.seed)
    some = [sources[line] for line in lines]
    widest, narrowest = settings.max_source_length, settings.narrowest
    for batch in bucket_batches(
        some, settings.batch_size, widest, smallest=narrowest, pad_id=settings.pad_id
    ):
        rows = np.array([lines[row] if row >= 0 else -1 for row in batch.rows])
        mask = batch.mask & (rows >= 0)[:, None]  # an empty mask is a finished row
        inputs = Inputs(sharding.by_row(batch.tokens), sharding.by_row(mask))
        keys = row_keys(run_key, sharding.by_row(np.maximum(rows, 0).astype(np.uint32)))
        yield batch._replace(rows=rows), inputs, keys


def decode_lines(
    sources: list[np.ndarray],
    settings: Settings,
    program: Program,
    progress=iter,
    journal: Journal | None = None,
) -> Decoded:
    """Decodes every line once.

    Args:
      sources: int32 [S] each, ending in EOS; EOS alone gives an empty output.
      progress: wraps the list of batches, for instance tqdm.
      journal: records each finished batch; the lines in it are not decoded again.
    """
    records = {} if journal is None else journal.records
    for batch, inputs, keys in progress(list(batches(sources, settings))):
        if records.keys() >= set(batch.rows[batch.rows >= 0].tolist()):
            continue
        output = program(inputs, keys)
        ids = ids_by_line(batch, output)
        new = [
            {'ids': one.tolist()} | counts for one, counts in zip(ids.values(), _counts(output), strict=False)
        ]
        if journal is None:
            records.update(zip(ids, new, strict=True))
        else:
            journal.add(list(ids), new)
    ids = [
        np.array(records[line]['ids'] if line in records else [], np.int32) for line in range(len(sources))
    ]
    counts = [Stats(**{name: np.array([one[name]]) for name in STATS}) for one in records.values()]
    return Decoded(ids, analysis.add_stats(counts))


def ids_by_line(batch: Batch, output: Output) -> dict[int, np.ndarray]:
    """The ids of each line of a batch, EOS included, in the order of its rows; those of fillers are left out."""
    return {int(line): ids for line, ids in zip(batch.rows, row_ids(output), strict=True) if line >= 0}


def row_ids(output: Output) -> list[np.ndarray]:
    """The ids of each row, EOS included."""
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    return [row[:end] for row, end in zip(tokens, length, strict=True)]


def _counts(output: Output) -> Iterator[dict[str, Any]]:
    """The counts of each row, in JSON types."""
    columns = [np.asarray(getattr(output.stats, name)).tolist() for name in STATS]
    return (dict(zip(STATS, row, strict=True)) for row in zip(*columns, strict=True))


def compare(
    sources: list[np.ndarray],
    settings: Settings,
    programs: dict[str, Program],
    *,
    repeats: int = 3,
    progress=iter,
    timer: timing.StepTimer | None = None,
) -> dict[str, Decoded]:
    """Decodes every line by each program, batch by batch in turn, and times them.

    A batch's time is the median of `repeats` runs; each shape is compiled before it is timed. Prefill is
    timed separately, as the same program's run over a batch of finished rows, and subtracted. The timer, where
    there is one, takes `TIMER_SAMPLES` samples, spread over the run.
    """
    every = some_batches(sources, settings)
    nothing = [np.zeros(0, np.int32)] * len(sources)
    results = {name: Decoded(list(nothing), None, 0.0, 0.0, 0.0) for name in programs}
    prefill: dict[Any, float] = {}
    due = set(np.linspace(0, len(every) - 1, TIMER_SAMPLES).astype(int).tolist())
    for number, (batch, inputs, keys) in enumerate(progress(every)):
        shape = inputs.tokens.shape
        finished = Inputs(inputs.tokens, jnp.zeros_like(inputs.mask))
        first: dict[str, float] = {}
        for name, program in programs.items():
            if (name, shape) not in prefill:
                first[name] = _seconds(program, inputs, keys)[0]
                prefill[name, shape] = median(
                    _seconds(program, finished, keys)[0] for _ in range(2 * repeats + 3)
                )
        runs = {name: [] for name in programs}
        for _ in range(repeats):
            for name, program in programs.items():
                runs[name].append(_seconds(program, inputs, keys))
        for name, result in results.items():
            taken = median(seconds for seconds, _ in runs[name])
            result.compile_seconds += max(first.get(name, taken) - taken, 0.0)
            result.prefill_seconds += prefill[name, shape]
            result.batch_seconds.append(taken - prefill[name, shape])
            result.seconds += result.batch_seconds[-1]
            output = runs[name][0][1]
            result.batch_stats.append(jax.tree.map(np.asarray, output.stats))
            for line, ids in ids_by_line(batch, output).items():
                result.ids[line] = ids
        if timer is not None and number in due:
            timer.measure()
    for result in results.values():
        result.stats = analysis.add_stats(result.batch_stats)
    return results


def some_batches(sources: list[np.ndarray], settings: Settings) -> list:
    """`batches`, at least one; ValueError for lines without text."""
    if not (every := list(batches(sources, settings))):
        raise ValueError('compare: expected a line with text in it; got empty lines alone')
    return every


def _seconds(program: Program, inputs: Inputs, keys: jax.Array) -> tuple[float, Output]:
    start = time.perf_counter()
    output = jax.block_until_ready(program(inputs, keys))
    return time.perf_counter() - start, output


def step_timer(
    target: Model, drafter: Drafter | None, sources: list[np.ndarray], settings: Settings
) -> timing.StepTimer:
    """A timer on the batch in the middle of the order by length; of the target alone without a drafter."""
    every = some_batches(sources, settings)
    return timing.StepTimer(
        target,
        drafter,
        every[len(every) // 2][1],
        settings.decode,
    )


def comparison_figures(
    results: dict[str, Decoded], times: dict[str, float], settings: Settings
) -> dict[str, Any]:
    """The report's figures of speed, with the theory's.

    Args:
      results: `compare`'s, of 'plain' and 'speculative'.
      times: `StepTimer.medians`.
      settings: of the run.
    """
    plain, speculative = results['plain'], results['speculative']
    figures = analysis.acceptance_figures(speculative.stats)
    c, cost = times['draft_step'] / times['plain_step'], times['target_call'] / times['plain_step']
    tokens = [int(result.stats.emitted) for result in (plain, speculative)]
    rates = [count / result.seconds for count, result in zip(tokens, (plain, speculative), strict=True)]
    whole = [
        count / (result.seconds + result.prefill_seconds)
        for count, result in zip(tokens, (plain, speculative), strict=True)
    ]
    guessed = np.asarray(speculative.stats.tested_at)[0] / max(1, figures['rounds'])
    alpha = figures['alpha']  # None where no draft was tested
    spent = _mean_cost(speculative.stats.calls, times, settings.decode.gamma)
    predicted = (
        None if alpha is None else float(analysis.walltime_improvement(alpha, settings.decode.gamma, c))
    )
    return figures | dict(
        c=c,
        cost_of_rows=cost,
        cost_of_calls=spent,
        guessed=float(guessed),
        plain_tokens_per_s=rates[0],
        tokens_per_s=rates[1],
        speedup=rates[1] / rates[0],
        speedup_with_prefill=whole[1] / whole[0],
        predicted_speedup=predicted,
        attainable_speedup=float(
            analysis.attainable_speedup(figures['tokens_per_call'], settings.decode.gamma, c, spent)
        ),
        step_milliseconds={name: 1e3 * seconds for name, seconds in times.items()},
        prefill_milliseconds={name: 1e3 * result.prefill_seconds for name, result in results.items()},
    )


def _mean_cost(calls: np.ndarray, times: dict[str, float], gamma: int) -> float:
    """Mean cost of the calls that were made, in plain steps; `Stats.calls` [G + 1] counts them by draft length."""
    seconds = [times['plain_step']] + [
        times.get(timing.call_name(length, gamma), times['target_call']) for length in range(1, gamma + 1)
    ]
    return float(np.average(seconds, weights=calls) / times['plain_step'])
