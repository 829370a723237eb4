"""alpha of any draft along texts that the target generated: the paper's Table 3, without a speculative run.

At every place of such a text, the drafter proposes one token after the text so far, one target call over
[newest, proposed] gives p, and the text continues with the target's token, whatever was proposed:

    text so far    Ich habe ein          the target's next token: Messer
    q              Buch .5  Messer .3  Haus .2
    p              Buch .2  Messer .7  Haus .1          sum min(p, q) = .2 + .3 + .1

    alpha = the mean of sum_x min(p(x), q(x)) over the places of all texts

A speculative run tests only some of these places, and none after a rejection, so its `Stats` give a figure close to
this one but not equal.

Source: Leviathan, Kalman and Matias 2023, arXiv 2211.17192v2, sections 3.1 and 4.2, appendix A.5.

Axes: B rows, N places of a text, Z leniences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax import analysis
from spec_jax.decoding import DecodeConfig, propose, round_keys, start, target_call, unfinished
from spec_jax.drafters.base import Drafter
from spec_jax.failures import failures, raise_on_failure
from spec_jax.lenience import LenientRule
from spec_jax.measure import runs
from spec_jax.measure.scoring import advance_by
from spec_jax.measure.setup import Settings
from spec_jax.models.base import Model
from spec_jax.run.journal import Journal
from spec_jax.runtime.backend import jit
from spec_jax.sampling import SamplingConfig
from spec_jax.state import SpecState
from spec_jax.types import Inputs
from spec_jax.verification import Scores, overlap

LENIENCES = (1.0, 0.5, 0.3, 0.1)  # Table 5; 1 is exact, the others are LOSSY
GAMMAS = (3, 5, 7)  # of Table 2
_RESAMPLES = 2000
_BATCHES_AT_ONCE = 16  # batches decoded at a time, until there are enough tokens


@flax.struct.dataclass
class Overlaps:
    """Counts along the texts, per row.

    Attributes:
      tokens: [B] int32, places measured: the tokens of the text, EOS included.
      proposed: [B] int32, places at which the drafter proposed a token.
      overlap: [B, Z] float32, the sum over the places of sum_x min(p(x) / l, q(x)), for each lenience l;
        a place without a proposal adds 0.
      failed: [B] int32, bits of `Failure`; 0 for none.
    """

    tokens: Array
    proposed: Array
    overlap: Array
    failed: Array


def measure(
    target: Model,
    drafter: Drafter,
    inputs: Inputs,
    texts: Array,
    length: Array,
    keys: Array,
    *,
    sampling: SamplingConfig,
    leniences: Sequence[float] = (1.0,),
) -> Overlaps:
    """The overlap of draft and target along given texts; one compiled loop, one token per round.

    Compiled once per shape of `inputs` and `texts`, sampling and leniences.

    Args:
      target: the model that generated the texts.
      drafter: any drafter; it proposes with gamma = 1, and each proposal is reported to it as rejected.
      inputs: the prompts of the texts.
      texts: [B, N] int32, the target's output, as `Output.tokens`.
      length: [B] int32, valid tokens of each row, 0 .. N.
      keys: [B] PRNG keys, for drafters that sample.
      sampling: how logits become p and q; the one that the texts were generated with.
      leniences: each in (0, 1]; 1 is exact, all others LOSSY (`verification.LenientRule`).

    Raises:
      ValueError: for texts or lengths of wrong shapes, a lenience out of range, or a draft of wrong shapes.
      FloatingPointError: the target gave NaN, or the draft invalid probabilities or tokens.
    """
    batch, size = inputs.tokens.shape[0], texts.shape[-1]
    if texts.shape != (batch, size) or length.shape != (batch,) or np.max(length, initial=0) > size:
        raise ValueError(
            f'texts: expected {batch} rows with lengths up to their width, got texts {texts.shape} and lengths '
            f'{length.shape} up to {np.max(length, initial=0)}; give both as plain_generate returned them'
        )
    for lenience in leniences:
        if not 0 < lenience <= 1:
            raise ValueError(f'leniences: expected numbers in (0, 1], got {lenience}; 1 is exact')
    config = DecodeConfig(gamma=1, max_new_tokens=size, sampling=sampling)
    overlaps = _measure(
        target, drafter, inputs, texts, length, keys, config=config, leniences=tuple(leniences)
    )
    return raise_on_failure(overlaps)


@jit(static_argnames=('config', 'leniences'))
def _measure(target, drafter, inputs, texts, length, keys, *, config, leniences) -> Overlaps:
    state = start(target, drafter, inputs, keys, config=config)
    state = state.replace(done=state.done | (length == 0))
    zero = jnp.zeros_like(length)
    sums = Overlaps(zero, zero, jnp.zeros((len(length), len(leniences))), zero)

    def body_fn(walk):
        state, sums = walk
        place = state.context.emitted[:, None]
        token = jnp.take_along_axis(texts, place, axis=1, mode='clip')[:, 0]
        return _step(target, drafter, state, sums, token, length, config, leniences)

    return lax.while_loop(lambda walk: unfinished(walk[0]), body_fn, (state, sums))[1]


def _step(target, drafter, state, sums, token, length, config, leniences) -> tuple[SpecState, Overlaps]:
    """One place: propose, score the proposal in one target call, add up, continue with the text's token [B].

    The context is written token by token, so a drafter never sees later tokens of the text.
    """
    draft, draft_state = propose(target, drafter, state, round_keys(state)[0], config=config)
    logits, hidden, features, cache = target_call(target, state.target_cache, state.context, draft)
    scores = Scores(logits, config.sampling)

    failed = jnp.where(state.done, 0, failures(scores.invalid, draft, logits.shape[-1]))
    active = ~state.done & (failed == 0)
    proposed = active & (draft.length > 0)
    betas = [overlap(_bound(scores, lenience)[:, :1], draft) for lenience in leniences]  # [B, 1] each
    sums = Overlaps(
        tokens=sums.tokens + active,
        proposed=sums.proposed + proposed,
        overlap=sums.overlap + jnp.where(proposed[:, None], jnp.concatenate(betas, axis=1), 0.0),
        failed=sums.failed | failed,
    )
    stats = state.stats.replace(rounds=state.stats.rounds + active)
    state = state.replace(target_cache=cache, draft_state=draft_state, stats=stats)
    state = advance_by(target, drafter, state, draft, token, active.astype(jnp.int32), hidden, features)
    return state.replace(done=~active | (state.context.emitted >= length)), sums


def _bound(scores: Scores, lenience: float) -> Array:
    """The bound of a draft token's test, p / lenience [B, 2, V] where sampled (appendix A.5)."""
    return scores.p if lenience == 1 else LenientRule(lenience).bound(scores)


# --- files of texts -----------------------------------------------------------------------------------------


def target_texts(
    target: Model,
    sources: list[np.ndarray],
    settings: Settings,
    num_tokens: int,
    progress=iter,
    journal: Journal | None = None,
) -> dict[int, np.ndarray]:
    """The target's output for the first lines, as many as give `num_tokens` tokens, or for all lines.

    Args:
      target: the model.
      sources: int32 [S] each, ending in EOS.
      settings: how to decode; gamma is not used.
      num_tokens: stop after the text that reaches this number; 0 takes all lines.
      progress: wraps a list of batches.
      journal: keeps the finished texts.

    Returns:
      int32 ids by line, EOS included; lines without an output are left out.
    """
    program = runs.plain_program(target, settings)
    texts, total, step = {}, 0, settings.batch_size * _BATCHES_AT_ONCE
    for first in range(0, len(sources), step):
        some = _only(sources, range(first, first + step))
        decoded = runs.decode_lines(some, settings, program, progress, journal)
        for line in range(first, min(first + step, len(sources))):
            if 0 < num_tokens <= total:
                return texts
            if len(decoded.ids[line]):
                texts[line] = decoded.ids[line]
                total += len(decoded.ids[line])
    return texts


def measure_lines(
    target: Model,
    drafter: Drafter,
    sources: list[np.ndarray],
    texts: dict[int, np.ndarray],
    settings: Settings,
    leniences: Sequence[float],
    progress=iter,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """`measure` for each text.

    Args:
      target: the model that wrote the texts.
      drafter: the draft.
      sources: of all lines.
      texts: from `target_texts`.
      settings: those that the texts were generated with.
      leniences: see `measure`.
      progress: wraps a list of batches.
      journal: keeps the finished lines; they are not measured again.

    Returns:
      Records in the order of `texts`: tokens, proposed, and overlap, a list by lenience.
    """
    records = {} if journal is None else journal.records
    due = _only(sources, [line for line in texts if line not in records])
    for batch, inputs, keys in progress(list(runs.batches(due, settings))):
        lines = [int(line) for line in batch.rows]
        rows = [texts.get(line, np.zeros(0, np.int32)) for line in lines]
        tokens = np.stack([np.pad(row, (0, settings.decode.max_new_tokens - len(row))) for row in rows])
        length = np.array([len(row) for row in rows], np.int32)
        sums = measure(
            target,
            drafter,
            inputs,
            jnp.asarray(tokens),
            jnp.asarray(length),
            keys,
            sampling=settings.decode.sampling,
            leniences=leniences,
        )
        new = {line: record for line, record in zip(lines, _records(sums), strict=True) if line >= 0}
        if journal is None:
            records |= new
        else:
            journal.add(list(new), list(new.values()))
    return [records[line] for line in texts]


def _only(sources: Sequence[np.ndarray], lines: Iterable[int]) -> list[np.ndarray]:
    """The sources with all other lines empty (EOS alone), so that lines keep their numbers and their keys."""
    kept = set(lines)
    return [ids if line in kept else ids[-1:] for line, ids in enumerate(sources)]


def _records(sums: Overlaps) -> list[dict[str, Any]]:
    columns = [np.asarray(column).tolist() for column in (sums.tokens, sums.proposed, sums.overlap)]
    return [
        dict(zip(('tokens', 'proposed', 'overlap'), row, strict=True)) for row in zip(*columns, strict=True)
    ]


# --- figures ------------------------------------------------------------------------------------------------


def figures(records: Sequence[dict[str, Any]], leniences: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Figures from the records of `measure_lines`.

    Args:
      records: one per text, at least one.
      leniences: those that were measured, 1 first.
      seed: of the bootstrap.

    Returns:
      alpha, with the ends `low` and `high` of its 95% interval (None for a single text); tokens and texts
      that it was measured over; coverage, the share of places with a proposal; expected_tokens, tokens per
      target call by gamma (Equation 1, which assumes independent places); lenience, LOSSY alpha by l.
    """
    tokens = np.array([record['tokens'] for record in records])
    overlap = np.array([record['overlap'] for record in records])  # [texts, Z]
    total = int(tokens.sum())
    alphas = (overlap.sum(0) / total).tolist()
    low, high = bootstrap_interval(overlap[:, 0], tokens, seed)
    return dict(
        alpha=alphas[0],
        low=low,
        high=high,
        tokens=total,
        texts=len(records),
        coverage=sum(record['proposed'] for record in records) / total,
        expected_tokens={
            str(gamma): float(analysis.expected_tokens(min(alphas[0], 1.0), gamma)) for gamma in GAMMAS
        },
        lenience={f'{lenience:g}': alpha for lenience, alpha in zip(leniences, alphas, strict=True)},
    )


def bootstrap_interval(
    sums: np.ndarray, counts: np.ndarray, seed: int = 0, level: float = 0.95
) -> tuple[float | None, float | None]:
    """Bootstrap interval of sums.sum() / counts.sum() over texts (percentiles).

    Whole texts are drawn, since the places of one text are not independent.

    Args:
      sums: [texts] float.
      counts: [texts] int.
      seed: of the draws.
      level: mass of the interval.

    Returns:
      Its ends; None and None for fewer than two texts.
    """
    if len(sums) < 2:
        return None, None
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(sums), size=(_RESAMPLES, len(sums)))
    ratios = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
