"""Greedy decoding against the plain decoder's, token for token.

Axes: B rows, N tokens of a text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.analysis import add_stats
from spec_jax.drafters.none import NoDrafter
from spec_jax.exactness import audit
from spec_jax.exactness.checks import (
    EPSILON,
    Check,
    Pair,
    Progress,
    quiet,
    to_inputs,
    width,
    with_sampling,
)
from spec_jax.measure import agreement, runs
from spec_jax.models.base import Model
from spec_jax.sampling import row_keys
from spec_jax.state import Output, Stats
from spec_jax.text.batches import pad_rows


@dataclasses.dataclass
class Greedy:
    """The result of `greedy`: rows for the table, and the report's figures.

    Attributes:
      checks: rows.
      stats: counts of the run one prompt at a time, summed.
      agreement: greedy_match, near_ties, mismatches.
    """

    checks: list[Check]
    stats: Stats
    agreement: dict[str, Any]


def greedy(pair: Pair, sources: list[np.ndarray], progress: Progress = quiet) -> Greedy:
    """Greedy ids against the plain decoder's, and each token against the target's argmax.

    Args:
      sources: int32 [S] each, one or more tokens and an EOS.
    """
    settings = with_sampling(pair, temperature=0.0)
    plain = runs.plain_program(pair.target, settings)
    speculative = runs.speculative_program(pair.target, pair.drafter, settings)
    run_key = jax.random.key(settings.seed)
    plain_ids, outputs = [], []
    for line, source in enumerate(progress(sources, desc='greedy')):
        inputs, keys = to_inputs([source], width(sources)), row_keys(run_key, [line])
        plain_ids += runs.row_ids(plain(inputs, keys))
        outputs.append(speculative(inputs, keys))
    alone = [runs.row_ids(output)[0] for output in outputs]

    order = np.random.default_rng(settings.seed).permutation(len(sources)).tolist()
    order.insert(len(order) // 2, None)  # a filler row among the others
    inputs = to_inputs([None if line is None else sources[line] for line in order], width(sources))
    output = speculative(inputs, row_keys(run_key, [0 if line is None else line for line in order]))
    rows = {line: ids for line, ids in zip(order, runs.row_ids(output), strict=True)}
    together = [rows[line] for line in range(len(sources))]

    epsilon = EPSILON[pair.dtype]
    checks, agreements = [], []
    for name, ids in (('one prompt at a time', alone), (f'uneven batch of {len(order)}', together)):
        agreements.append(agreement.agreement(pair.target, sources, plain_ids, ids, epsilon))
        checks.append(_identity(f'greedy ids, {name}', ids, agreements[-1], epsilon))
    checks.append(_greedy_counts([*outputs, output], pair.target))
    checks.append(_argmax(pair, sources, settings, [alone, together], epsilon))
    return Greedy(checks, add_stats([one.stats for one in outputs]), agreements[0])


def _identity(tested: str, ids: list[np.ndarray], agreement: dict[str, Any], epsilon: float) -> Check:
    faults, ties = len(agreement['mismatches']), len(agreement['near_ties'])
    return Check(
        tier='loop',
        tested=tested,
        samples=f'{len(ids)} prompts, {sum(map(len, ids))} tokens',
        found=f'{faults} differ from plain, {ties} at a near-tie',
        finds=f'a first difference of > {epsilon:g} nats',
        passed=not faults,
    )


def _greedy_counts(outputs: list[Output], target: Model) -> Check:
    """Lengths, padding and counts; a greedy draft token must pass exactly where min(p, q) is 1."""
    wrong = sum(int(audit.miscounted(output, target.spec).sum()) for output in outputs)
    stats = [jax.tree.map(np.asarray, output.stats) for output in outputs]
    wrong += sum(int((one.accepted != one.overlap).sum()) for one in stats)
    rows = sum(len(one.rounds) for one in stats)
    tested = 'greedy: ends at EOS, padding, honest counts'
    return Check('loop', tested, f'{rows} rows', f'{wrong} wrong', 'any', wrong == 0)


def _argmax(pair: Pair, sources, settings, texts: list[list[np.ndarray]], epsilon: float) -> Check:
    """Each greedy token, re-scored by one-token calls of the target, is its argmax up to rounding."""
    size = settings.decode.max_new_tokens
    inputs = to_inputs([*sources, None], width(sources))
    keys = row_keys(jax.random.key(0), np.arange(len(sources) + 1))
    state = audit.start(pair.target, NoDrafter(), inputs, keys, config=settings.decode)
    gaps = []
    for ids in texts:
        tokens, valid = pad_rows(ids, len(ids) + 1, size, pad_id=pair.target.spec.pad_id)
        gap = audit.rescore(pair.target, state, jnp.asarray(tokens), config=settings.decode).gap
        gaps.append(np.asarray(gap)[valid])
    gaps = np.concatenate(gaps)
    beyond, ties = int((~(gaps <= epsilon)).sum()), int(((gaps > 0) & (gaps <= epsilon)).sum())
    return Check(
        tier='deployment',
        tested=f'greedy tokens re-scored one by one, {pair.dtype}',
        samples=f'{gaps.size} tokens',
        found=f'{beyond} beyond, {ties} near-ties; largest gap {gaps.max(initial=0):.1g} nats',
        finds=f'a token > {epsilon:g} nats below the argmax',
        passed=beyond == 0,
    )
