"""From lines of text to decoded lines and a report: what the scripts and notebooks share.

Axes: B rows of a batch, S source length.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from spec_jax import analysis
from spec_jax.decoding import MAX_GAMMA, generate, plain_generate
from spec_jax.drafters.base import Drafter
from spec_jax.measure import timing
from spec_jax.models.base import Model
from spec_jax.models.load import load_model
from spec_jax.run.journal import Journal
from spec_jax.runtime import processes, sharding
from spec_jax.sampling import SamplingConfig, row_keys
from spec_jax.text import data, hub_data
from spec_jax.text.tokenizers import load_tokenizer
from spec_jax.types import Inputs, Output, Stats

AUTO = 'auto'  # in place of a gamma: `auto_gamma` chooses it
NEAR_TIE = 1e-5  # nats
TIMER_SAMPLES = 15
STATS = [field.name for field in dataclasses.fields(Stats)]  # of each line, in a journal


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to decode.

    Attributes:
      gamma: draft length; 0 is plain decoding.
      lenience: below 1, LOSSY (`verification.lenient_bound`).
      max_new_tokens: most tokens of an output, EOS included.
      sampling: how logits become a distribution.
      batch_size: rows of a batch.
      max_source_length: widest source, EOS included.
      narrowest: narrowest batch that sources are padded to; the wider, the fewer programs are compiled.
      seed: of the run; each line's key is folded from it and the line's number.
    """

    gamma: int
    max_new_tokens: int
    sampling: SamplingConfig
    batch_size: int = 1
    max_source_length: int = 128
    narrowest: int = 16
    seed: int = 0
    lenience: float = 1.0


def settings_from(config: ConfigDict, auto: int | None = None) -> Settings:
    """The settings that a config asks for; plain decoding (gamma 0) where it names no draft.

    The batch size is the next one that `mesh.data` divides.

    Args:
      config: a recipe.
      auto: stands for a gamma of `AUTO` until one is chosen; None refuses it.

    Raises:
      ValueError: for a value out of range.
    """
    for name, lowest in (('batch_size', 1), ('max_new_tokens', 1), ('max_source_length', 2), ('repeats', 1)):
        if config[name] < lowest:
            raise ValueError(f'{name}: expected an integer >= {lowest}, got {config[name]}')
    if config.data.limit < 0:
        raise ValueError(f'data.limit: expected an integer >= 0, got {config.data.limit}; 0 takes all lines')
    gamma = config.gamma if auto is None or config.gamma != AUTO else auto
    if type(gamma) is not int or not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(
            f'gamma: expected an integer from 0 to {MAX_GAMMA}{"" if auto is None else " or auto"}, got '
            f'{config.gamma}; 0 decodes plainly'
        )
    if not 0 < config.lenience <= 1:
        raise ValueError(f'lenience: expected a number in (0, 1], got {config.lenience}; 1 is exact')
    rows_at_once, _ = sharding.mesh_sizes(config.get('mesh'))
    return Settings(
        gamma=0 if config.draft.kind == 'none' else gamma,
        max_new_tokens=config.max_new_tokens,
        sampling=SamplingConfig(config.temperature, config.top_k, config.top_p),
        batch_size=-(-config.batch_size // rows_at_once) * rows_at_once,
        max_source_length=config.max_source_length,
        seed=config.seed,
        lenience=config.lenience,
    )


def fit_to_vocabulary(settings: Settings, target: Model, tokenizer) -> Settings:
    """Keeps ids out that the head has rows for and the tokenizer no pieces (T5: 32128 and 32100)."""
    if len(tokenizer) > target.vocab_size:
        raise ValueError(
            f"expected a tokenizer of at most {target.vocab_size} pieces, the rows of the target's head; "
            f'got {len(tokenizer)}: use the tokenizer that the target was trained with'
        )
    sampling = dataclasses.replace(settings.sampling, vocab_limit=len(tokenizer))
    return dataclasses.replace(settings, sampling=sampling)


def checksum(sources: Sequence[np.ndarray]) -> int:
    """A number that tells one set of encoded lines from another, for journals."""
    return zlib.crc32(b''.join(ids.tobytes() for ids in sources))


def one_width(settings: Settings, sources: Sequence[np.ndarray]) -> Settings:
    """Pads all batches alike, to the longest source: where one compilation a program outweighs the padding."""
    longest = max([settings.narrowest, *map(len, sources)])
    return dataclasses.replace(settings, max_source_length=longest, narrowest=longest)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a config names, loaded.

    Attributes:
      examples: lines of the data.
      sources: int32 [S] each, the same lines encoded.
      num_truncated: how many of them were cut.
      tokenizer: the target's.
      target: the model.
      settings: those asked for, fitted to the vocabulary.
    """

    examples: list[data.Example]
    sources: list[np.ndarray]
    num_truncated: int
    tokenizer: Any
    target: Model
    settings: Settings

    def truncation(self) -> str:
        """How many sources were cut, in words; empty for none."""
        if not self.num_truncated:
            return ''
        longest = self.settings.max_source_length
        return f'{self.num_truncated} of {len(self.sources)} sources cut to {longest} tokens'


def load(config: ConfigDict, settings: Settings, default_limit: int | None = None) -> Job:
    """Reads the data, the target and its tokenizer; whatever is placed from here on is placed on the config's mesh.

    Args:
      config: with `target`, `dtype`, `max_source_length`, `on_long`, `mesh` and `data`: `path` is a file
        (`data.read_examples`) or a data set (`hub_data`), `target_path` parallel text (`data.add_targets`).
      settings: of `settings_from`.
      default_limit: how many lines to take where `data.limit` is 0; None for all.

    Raises:
      OSError, ValueError: a file, a data set or a model is missing, damaged or unfit.
    """
    sharding.use_mesh(*sharding.mesh_sizes(config.get('mesh')))
    examples = _read(config.data, config.data.limit or default_limit)
    tokenizer = load_tokenizer(config.target)
    target = load_model(config.target, config.dtype)
    sources, num_truncated = data.encode_sources(
        tokenizer,
        [example.source for example in examples],
        prefix=config.data.prefix,
        max_source_length=config.max_source_length,
        on_long=config.on_long,
    )
    settings = fit_to_vocabulary(settings, target, tokenizer)
    return Job(examples, sources, num_truncated, tokenizer, target, settings)


def _read(where: ConfigDict, limit: int | None) -> list[data.Example]:
    """The lines that a config's `data` section names; old recipes lack the three keys that have defaults here."""
    keys = dict(source_key=where.get('source_key', 'source'), target_key=where.get('target_key', 'target'))
    target_path = where.get('target_path', '')
    if not hub_data.is_named(where.path):
        examples = data.read_examples(where.path, where.format or None, **keys)
        return (data.add_targets(examples, target_path, where.path) if target_path else examples)[:limit]
    if target_path:
        raise ValueError(
            f'data.target_path: expected none beside a data set; got {target_path}: use data.target_key'
        )
    return hub_data.read_dataset(where.path, **keys, limit=limit)


@dataclasses.dataclass
class Decoded:
    """Results by line.

    Attributes:
      ids: int32 array per line, EOS included; empty for an empty line.
      seconds: decoding time of all batches, prefill and compilation excluded; None if not measured.
      prefill_seconds: encoding time of all batches; None if not measured.
      stats: summed counts.
      compile_seconds: what the first run of each shape took beyond a later one; None if not measured. Next to
        nothing for a program that was compiled before.
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
    how = dict(max_new_tokens=settings.max_new_tokens, sampling=settings.sampling)
    return lambda inputs, keys: plain_generate(target, inputs, keys, **how)


def speculative_program(target: Model, drafter: Drafter, settings: Settings) -> Program:
    """The speculative decoder under `settings`."""
    how = dict(
        gamma=settings.gamma,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        lenience=settings.lenience,
    )
    return lambda inputs, keys: generate(target, drafter, inputs, keys, **how)


def batches(sources: list[np.ndarray], settings: Settings) -> Iterable[tuple[data.Batch, Inputs, jax.Array]]:
    """Batches of similar length with their inputs and row keys; lines that are EOS alone are left out."""
    lines = [line for line, ids in enumerate(sources) if len(ids) > 1]
    run_key = jax.random.key(settings.seed)
    some = [sources[line] for line in lines]
    widest, narrowest = settings.max_source_length, settings.narrowest
    for batch in data.bucket_batches(some, settings.batch_size, widest, smallest=narrowest):
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
      journal: notes each batch that is done; the lines in it are not decoded again.
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


def ids_by_line(batch: data.Batch, output: Output) -> dict[int, np.ndarray]:
    """The ids of each line of a batch, EOS included, in the order of its rows; those of fillers are left out."""
    return {int(line): ids for line, ids in zip(batch.rows, row_ids(output), strict=True) if line >= 0}


def row_ids(output: Output) -> list[np.ndarray]:
    """The ids of each row, EOS included."""
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    return [row[:end] for row, end in zip(tokens, length, strict=True)]


def _counts(output: Output) -> Iterator[dict[str, Any]]:
    """The counts of each row, as JSON has them."""
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
    timed apart, as the same program's run over a batch of finished rows, and taken off. The timer, where
    there is one, takes `TIMER_SAMPLES` samples, spread over the run.
    """
    every = _some_batches(sources, settings)
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


def _some_batches(sources: list[np.ndarray], settings: Settings) -> list:
    if not (every := list(batches(sources, settings))):
        raise ValueError('compare: expected a line with text in it; got empty lines alone')
    return every


def _seconds(program: Program, inputs: Inputs, keys: jax.Array) -> tuple[float, Output]:
    start = time.perf_counter()
    output = jax.block_until_ready(program(inputs, keys))
    return time.perf_counter() - start, output


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place at which two greedy outputs of a line differ.

    Attributes:
      line: index of the line.
      position: index of the token.
      plain, speculative: the ids there; -1 where an output had ended.
      gap: difference of their log-probabilities under the target, in nats.
    """

    line: int
    position: int
    plain: int
    speculative: int
    gap: float


def differences(
    target: Model, sources: list[np.ndarray], plain: list[np.ndarray], speculative: list[np.ndarray]
) -> list[Difference]:
    """Re-scores each line whose ids differ, with the target alone, at the first difference."""
    found = []
    for line, (ours, theirs) in enumerate(zip(plain, speculative, strict=True)):
        if np.array_equal(ours, theirs):
            continue
        size = min(len(ours), len(theirs))
        unequal = np.flatnonzero(ours[:size] != theirs[:size])
        at = int(unequal[0]) if unequal.size else size
        tokens = [int(ids[at]) if at < len(ids) else -1 for ids in (ours, theirs)]
        log_probs = _next_log_probs(target, sources[line], ours[:at])
        gap = float(abs(log_probs[tokens[0]] - log_probs[tokens[1]])) if min(tokens) >= 0 else float('inf')
        found.append(Difference(line, at, *tokens, gap))
    return found


def agreement(
    target: Model,
    sources: list[np.ndarray],
    plain: list[np.ndarray],
    speculative: list[np.ndarray],
    near_tie: float = NEAR_TIE,
) -> dict[str, Any]:
    """Whether greedy outputs are the target's own.

    Returns:
      greedy_match, the share of lines that agree; near_ties, the lines counted as agreeing though their
      ids differ, since the target itself holds the two tokens within `near_tie` nats of each other (a call over
      several positions rounds differently from a call over one); mismatches, the other differences.
    """
    found = differences(target, sources, plain, speculative)
    faults = [dataclasses.asdict(one) for one in found if one.gap > near_tie]
    ties = [dataclasses.asdict(one) for one in found if one.gap <= near_tie]
    return dict(greedy_match=1 - len(faults) / len(sources), near_ties=ties, mismatches=faults)


def _next_log_probs(target: Model, source: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """The target's log-probabilities [V] of the token after `prefix`, in one call over all of it."""
    tokens = jnp.asarray(np.concatenate([[target.start_id], prefix]).astype(np.int32))[None]
    inputs = Inputs(jnp.asarray(source)[None], jnp.ones((1, len(source)), bool))
    hidden, _ = target.decode(
        tokens, jnp.arange(tokens.shape[1])[None], target.encode(inputs, tokens.shape[1])
    )
    return np.asarray(processes.whole(jax.nn.log_softmax(target.logits(hidden)[0, -1])))


def step_timer(
    target: Model, drafter: Drafter | None, sources: list[np.ndarray], settings: Settings
) -> timing.StepTimer:
    """A timer on the batch in the middle of the order by length; of the target alone without a drafter."""
    every = _some_batches(sources, settings)
    return timing.StepTimer(
        target,
        drafter,
        every[len(every) // 2][1],
        gamma=settings.gamma,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
    )


def _mean_cost(calls: np.ndarray, times: dict[str, float], gamma: int) -> float:
    """Of the calls that were made, in plain steps; `Stats.calls` [G + 1] says over how many rows."""
    seconds = [times['plain_step']] + [
        times.get(timing.call_name(length, gamma), times['target_call']) for length in range(1, gamma + 1)
    ]
    return float(np.average(seconds, weights=calls) / times['plain_step'])


def comparison_figures(
    results: dict[str, Decoded], times: dict[str, float], settings: Settings
) -> dict[str, Any]:
    """The report's figures of speed, beside the theory.

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
    spent = _mean_cost(speculative.stats.calls, times, settings.gamma)
    predicted = None if alpha is None else float(analysis.walltime_improvement(alpha, settings.gamma, c))
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
            analysis.attainable_speedup(figures['tokens_per_call'], settings.gamma, c, spent)
        ),
        step_milliseconds={name: 1e3 * seconds for name, seconds in times.items()},
        prefill_milliseconds={name: 1e3 * result.prefill_seconds for name, result in results.items()},
    )
