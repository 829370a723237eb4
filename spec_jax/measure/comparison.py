"""Our decoders and transformers' on the same prompts, by turns: timing, figures, tables.

Decoders are passed as functions; PyTorch is imported by `scripts/compare_transformers.py` only.

Axes: S source length.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.measure import agreement, runs, setup
from spec_jax.models.base import Model
from spec_jax.state import Stats
from spec_jax.types import Inputs

NAMES = {
    'generate': 'transformers: generate',
    'assisted': 'transformers: assisted, gamma tokens a draft',
    'assisted_default': "transformers: assisted, the library's default schedule",
    'plain': 'spec_jax: plain',
    'speculative': 'spec_jax: speculative',
}
_PAIRS = (  # decoders whose rates and ids are compared
    ('plain', 'generate'),
    ('speculative', 'assisted'),
    ('speculative', 'assisted_default'),
    ('speculative', 'plain'),
    ('assisted', 'generate'),
)
_REST = 0.005  # seconds between two decoders: a thread pool spins for a while after its work


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt in the forms that the decoders take.

    Attributes:
      ids: [S] int32, ending in EOS.
      inputs: a batch of this row, padded.
      keys: [1].
    """

    ids: np.ndarray
    inputs: Inputs
    keys: jax.Array


class Answer(NamedTuple):
    """A decoder's output for a prompt.

    Attributes:
      ids: int32, EOS included; without start token and padding.
      calls: of the target's decoder.
      stats: counts of the row; None for transformers' decoders.
    """

    ids: np.ndarray
    calls: int
    stats: Stats | None = None


Decode = Callable[[Prompt], Answer]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A decoder's outputs and times, by prompt.

    Attributes:
      answers: of its first timed run.
      seconds: of a whole call, encoder included, from the prompt to the ids on the host; median of the repeats.
      compile_seconds: extra time of first calls over later ones.
    """

    answers: list[Answer]
    seconds: list[float]
    compile_seconds: float


def prompts_of(sources: list[np.ndarray], settings: setup.Settings) -> list[Prompt]:
    """A prompt for each source with text, shortest first.

    Raises:
      ValueError: no source has text.
    """
    prompts = [
        Prompt(sources[int(batch.rows[0])], inputs, keys)
        for batch, inputs, keys in runs.batches(sources, settings)
    ]
    if not prompts:
        raise ValueError('compare: expected a line with text in it; got empty lines alone')
    return prompts


def ours(program: runs.Program) -> Decode:
    """A program of `runs` as a decoder."""

    def decode(prompt: Prompt) -> Answer:
        output = program(prompt.inputs, prompt.keys)
        (ids,) = runs.row_ids(output)
        return Answer(ids, int(output.stats.rounds[0]), output.stats)

    return decode


def measure(
    decoders: dict[str, Decode], prompts: Sequence[Prompt], *, repeats: int = 3, progress=iter
) -> dict[str, Measured]:
    """Decodes every prompt by each decoder in turn, forwards and backwards by turns.

    Args:
      decoders: by name; each has one untimed call for every width of prompts.
      prompts: one or more.
      repeats: timed runs of a prompt, at least 1.
      progress: wraps the list of runs.
    """
    first: dict[tuple, float] = {}
    for prompt in {one.inputs.tokens.shape: one for one in prompts}.values():
        for name, decode in decoders.items():
            first[name, prompt.inputs.tokens.shape] = _timed(decode, prompt)[0]
    answers = {name: [[] for _ in prompts] for name in decoders}
    every = [(number, repeat) for repeat in range(repeats) for number in range(len(prompts))]
    for number, repeat in progress(every):
        for name in list(decoders)[:: 1 if (number + repeat) % 2 == 0 else -1]:
            time.sleep(_REST)
            answers[name][number].append(_timed(decoders[name], prompts[number]))
    results = {}
    for name, by_prompt in answers.items():
        seconds = [median(taken for taken, _ in some) for some in by_prompt]
        last = {prompt.inputs.tokens.shape: taken for prompt, taken in zip(prompts, seconds, strict=True)}
        compiling = sum(max(first[name, shape] - taken, 0.0) for shape, taken in last.items())
        results[name] = Measured([some[0][1] for some in by_prompt], seconds, compiling)
    return results


def _timed(decode: Decode, prompt: Prompt) -> tuple[float, Answer]:
    start = time.perf_counter()
    answer = decode(prompt)
    return time.perf_counter() - start, answer


# --- figures ------------------------------------------------------------------------------------------------


def decoder_rows(results: dict[str, Measured]) -> list[dict[str, Any]]:
    """By decoder: tokens, calls, tokens_per_call, seconds, tokens_per_s, compile_seconds."""
    rows = []
    for name, result in results.items():
        tokens = sum(len(answer.ids) for answer in result.answers)
        calls = sum(answer.calls for answer in result.answers)
        seconds = sum(result.seconds)
        figures = dict(decoder=name, tokens=tokens, calls=calls, tokens_per_call=tokens / calls)
        figures |= dict(seconds=seconds, tokens_per_s=tokens / seconds)
        rows.append(figures | dict(compile_seconds=result.compile_seconds))
    return rows


def ratio_rows(
    results: dict[str, Measured],
    target: Model,
    prompts: Sequence[Prompt],
    near_tie: float,
    aims: dict[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """By pair of decoders: how many times as fast the first is, and whether their ids agree.

    Args:
      results: of `measure`.
      target: re-scores tokens where ids differ.
      prompts: those measured.
      near_tie: nats, see `agreement.agreement`.
      aims: the goal of the ratio, by pair.

    Returns:
      decoder, over, ratio (of tokens/s), low and high (of the middle half of the prompts), aim or None, equal
      (prompts whose ids do), near_ties and mismatches (the others).
    """
    overall = {row['decoder']: row['tokens_per_s'] for row in decoder_rows(results)}
    ids = {name: [answer.ids for answer in result.answers] for name, result in results.items()}
    rates = {name: np.array([*map(len, ids[name])]) / result.seconds for name, result in results.items()}
    sources, rows = [prompt.ids for prompt in prompts], []
    for pair in _PAIRS:
        one, other = pair
        agreed = agreement.agreement(target, sources, ids[one], ids[other], near_tie)
        ties, faults = agreed['near_ties'], agreed['mismatches']
        low, high = np.quantile(rates[one] / rates[other], [0.25, 0.75]).tolist()
        figures = dict(decoder=one, over=other, ratio=overall[one] / overall[other], low=low, high=high)
        figures |= dict(aim=aims.get(pair), equal=len(sources) - len(ties) - len(faults))
        rows.append(figures | dict(near_ties=ties, mismatches=faults))
    return rows


def shared_figures(decoders: list[dict], ratios: list[dict], results: dict[str, Measured]) -> dict[str, Any]:
    """The figures under `report.KEYS`. Rates are of whole calls, encoder included."""
    rates = {row['decoder']: row['tokens_per_s'] for row in decoders}
    (ours_over_plain,) = (row for row in ratios if (row['decoder'], row['over']) == ('speculative', 'plain'))
    stats = analysis.add_stats([answer.stats for answer in results['speculative'].answers])
    return analysis.acceptance_figures(stats) | dict(
        plain_tokens_per_s=rates['plain'],
        tokens_per_s=rates['speculative'],
        speedup=ours_over_plain['ratio'],
        greedy_match=1 - len(ours_over_plain['mismatches']) / len(results['plain'].answers),
    )


# --- tables -------------------------------------------------------------------------------------------------


def decoder_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per decoder."""
    lines = [
        [
            NAMES[row['decoder']],
            row['tokens'],
            row['calls'],
            f'{row["tokens_per_call"]:.2f}',
            f'{row["tokens_per_s"]:.1f}',
        ]
        for row in rows
    ]
    return _table(lines, ['decoder', 'tokens', 'target calls', 'tokens/call', 'tokens/s'], text_columns=1)


def ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per pair of decoders."""
    lines = [
        [
            NAMES[row['decoder']],
            NAMES[row['over']],
            f'{row["ratio"]:.2f}',
            f'{row["low"]:.2f} to {row["high"]:.2f}',
            '' if row['aim'] is None else f'{row["aim"]:g}',
            _ids(row),
        ]
        for row in rows
    ]
    headers = ['tokens/s of', 'over that of', 'ratio', 'half of the prompts', 'aim', 'equal ids']
    return _table(lines, headers, text_columns=2)


def _ids(row: dict[str, Any]) -> str:
    ties, faults = len(row['near_ties']), len(row['mismatches'])
    text = f'{row["equal"]} of {row["equal"] + ties + faults}'
    return text + (f', {ties} near-ties' if ties else '') + (f', {faults} OTHERS' if faults else '')


def _table(lines: list[list], headers: list[str], text_columns: int) -> str:
    align = ['left'] * text_columns + ['right'] * (len(headers) - text_columns)
    return tabulate(lines, headers, tablefmt='github', disable_numparse=True, colalign=align)


def markdown(
    decoders: Sequence[dict], ratios: Sequence[dict], weights: str, near_tie: float, facts: dict[str, Any]
) -> str:
    """report.md.

    Args:
      decoders: of `decoder_rows`.
      ratios: of `ratio_rows`.
      weights: which weights, and why they agree.
      near_tie: nats.
      facts: further facts, by name.
    """
    parts = [
        '# spec_jax beside transformers',
        weights,
        decoder_table(decoders),
        ratio_table(ratios),
        _LEGEND.format(near_tie=near_tie),
        '## Measured on',
        '\n'.join(f'* {name}: {value}' for name, value in facts.items()),
    ]
    return '\n\n'.join(parts) + '\n'


_LEGEND = (
    'Greedy, one prompt at a time, both libraries in one process on the same cores, the decoders by turns on each '
    'prompt in alternating order, after a call that is not timed. Tokens/s are of whole calls, from the ids of a '
    'prompt to those of its output, encoder included; the time of a prompt is the median of its runs. Tokens are '
    'counted alike from the ids: EOS included, start token and padding excluded. Of the prompts, half have a ratio '
    'between the two figures given. A near-tie is a prompt whose ids differ first where the target holds both '
    'tokens within {near_tie:g} nats of each other.'
)
