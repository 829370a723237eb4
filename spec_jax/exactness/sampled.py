"""Sampled decoding against the plain decoder and against the target's probabilities; and an audit of the draft.

Axes: B rows, R rounds, K texts or tokens, N tokens of a text, G draft length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spec_jax.analysis import add_stats
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter
from spec_jax.drafters.none import NoDrafter
from spec_jax.exactness import audit, statistics
from spec_jax.exactness.checks import Check, Pair, Progress, quiet, to_inputs, width, with_sampling
from spec_jax.failures import SUM_TOLERANCE, Failure
from spec_jax.measure.setup import Settings
from spec_jax.models.base import Model
from spec_jax.sampling import row_keys
from spec_jax.state import Output, SpecState, Stats
from spec_jax.types import Inputs

_SAME_MODEL = {'float32': 0.999, 'bfloat16': 0.9}  # least alpha of a draft that is the target
_SAME_ROWS = 16
_ALONE = 6  # rows
_SHIFT = 'probability moved:'
_FLIPS = 0.05  # share of rows that may differ, since rounding depends on the place in the batch


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a run of `sampled`.

    Attributes:
      samples: speculative texts, rounded up to whole batches; there are twice as many plain ones.
      tokens: N of a text; more than gamma + 1, to include rounds after a full acceptance.
      rows: B of a batch, in which the prompts alternate.
    """

    samples: int
    tokens: int
    rows: int


@dataclasses.dataclass
class Sampled:
    """The result of `sampled`: rows for the table, and the counts of all its texts."""

    checks: list[Check]
    stats: Stats


def sampled(pair: Pair, sources: list[np.ndarray], size: Size, progress: Progress = quiet) -> Sampled:
    """Sampled texts against plain ones and against the target's probabilities, and an audit of the draft.

    Args:
      sources: the prompts, int32 [S] each, one or more tokens and an EOS.

    Raises:
      FloatingPointError: the target gave NaN.
    """
    sampler = _Sampler.of(pair, sources, size)
    batches = [sampler.batch(n) for n in progress(range(-(-size.samples // size.rows)), desc='sampling')]
    joined = {
        name: np.concatenate([getattr(batch, name) for batch in batches])
        for name in ('speculative', 'plain', 'token_places', 'draft_places')
    }
    by_prompt = [
        tuple(_of_prompt(joined[name], prompt, len(sources), size.rows) for name in ('speculative', 'plain'))
        for prompt in range(len(sources))
    ]
    stats = add_stats([batch.output.stats for batch in batches])
    joint, tokens, passing = (
        statistics.two_sample(by_prompt),
        statistics.uniform(*joined['token_places'].T, pair.settings.seed),
        statistics.balance(int(stats.accepted), float(stats.overlap), int(stats.tested)),
    )
    checks = [
        Check.of_test(
            f'first {size.tokens} tokens jointly, speculative against plain',
            f'{joint.samples} texts against {len(joined["plain"])}, {len(sources)} prompts',
            joint,
            _SHIFT,
            f'{joint.cells} kinds of texts',
        ),
        Check.of_test(
            "each token against the target's own probabilities", f'{tokens.samples} tokens', tokens, _SHIFT
        ),
        Check.of_test(
            'drafts accepted against sum of min(p, q)',
            f'{passing.samples} draft tokens',
            passing,
            'a rate off by',
            f'{stats.accepted} against {stats.overlap:.1f}',
        ),
        _follows_q(joined['draft_places'], pair.settings.seed),
        _sound(batches),
        _independent(sampler, batches[0]),
        _honest(batches, pair.target),
    ]
    if isinstance(pair.drafter, ModelDrafter):
        checks.append(_same_model(pair, sampler))
    return Sampled(checks, stats)


def _of_prompt(texts: np.ndarray, prompt: int, num_prompts: int, rows: int) -> np.ndarray:
    """The texts of one prompt, out of those of whole batches in which the prompts alternate."""
    return texts[np.arange(len(texts)) % rows % num_prompts == prompt]


@dataclasses.dataclass(frozen=True)
class _Batch:
    """One batch: texts [K, N], the speculative run, and places [K, 2] of its tokens (below, mass)."""

    output: Output
    trace: audit.Trace
    plain: np.ndarray
    token_places: np.ndarray
    draft_places: np.ndarray

    @property
    def speculative(self) -> np.ndarray:
        return np.asarray(self.output.tokens)


@dataclasses.dataclass(frozen=True)
class _Sampler:
    """Prefilled once; each batch has different keys."""

    target: Model
    drafter: audit.Audited
    settings: Settings
    inputs: Inputs
    state: SpecState
    plain_state: SpecState

    @classmethod
    def of(cls, pair: Pair, sources: list[np.ndarray], size: Size) -> _Sampler:
        settings = with_sampling(pair, temperature=pair.settings.decode.sampling.temperature or 1.0)
        settings = settings.decoding(max_new_tokens=size.tokens)
        inputs = to_inputs([sources[row % len(sources)] for row in range(size.rows)], width(sources))
        drafter = audit.Audited(pair.drafter, settings.decode.gamma, size.tokens)
        keys = row_keys(jax.random.key(0), np.arange(size.rows))
        return cls(
            target=pair.target,
            drafter=drafter,
            settings=settings,
            inputs=inputs,
            state=audit.start(pair.target, drafter, inputs, keys, config=settings.decode),
            plain_state=audit.start(pair.target, NoDrafter(), inputs, keys, config=settings.decode),
        )

    def keys(self, number: int) -> Array:
        """[B] keys of stream `number`."""
        run = jax.random.fold_in(jax.random.key(self.settings.seed), number)
        return row_keys(run, np.arange(len(self.inputs.tokens)))

    def start(self, inputs: Inputs, keys: Array) -> SpecState:
        """The state for other prompts."""
        return audit.start(self.target, self.drafter, inputs, keys, config=self.settings.decode)

    def decode(self, drafter: Drafter, state: SpecState) -> tuple[Output, Any]:
        output, draft_state = audit.decode(self.target, drafter, state, config=self.settings.decode)
        if (np.asarray(output.failed) & Failure.TARGET).any():
            raise FloatingPointError(
                'expected finite logits from the target, got NaN or inf; check the weights'
            )
        return output, draft_state

    def batch(self, number: int) -> _Batch:
        """One speculative and two plain texts per row."""
        config, streams = self.settings.decode, 3 * number + np.arange(3)
        output, (_, trace, _) = self.decode(self.drafter, self.state.replace(keys=self.keys(streams[0])))
        plain = [
            self.decode(NoDrafter(), self.plain_state.replace(keys=self.keys(stream)))[0].tokens
            for stream in streams[1:]
        ]
        scores = audit.rescore(self.target, self.plain_state, output.tokens, config=config)
        valid = np.arange(config.max_new_tokens) < np.asarray(output.length)[:, None]
        drafted = audit.proposed(trace, output.stats)
        token_places, draft_places = (
            np.stack([np.asarray(part)[kept] for part in (places.below, places.mass)], axis=1)
            for places, kept in ((scores, valid), (trace, drafted))
        )
        return _Batch(output, trace, np.concatenate(plain), token_places, draft_places)


def _follows_q(places: np.ndarray, seed: int) -> Check:
    tested = 'draft tokens against the q that the draft reports'
    if (places[:, 1] == 1).all():
        nothing = 'q one-hot: exact whatever the tokens'
        return Check('loop', tested, f'{len(places)} draft tokens', nothing, '-', None)
    result = statistics.uniform(*places.T, seed + 1)
    return Check.of_test(tested, f'{result.samples} draft tokens', result, _SHIFT)


def _sound(batches: list[_Batch]) -> Check:
    """Sums and tokens of the drafts; their shapes are checked when the loop is traced."""
    error, outside, total = 0.0, 0, 0
    for batch in batches:
        # A row that fails stops before its round is counted; its proposal is counted here.
        failed = (np.asarray(batch.output.failed) > 0) & (np.asarray(batch.trace.end) >= 0)  # [R, B]
        drafted = audit.proposed(batch.trace, batch.output.stats) | failed[:, :, None]
        error = max(error, np.abs(np.asarray(batch.trace.total) - 1)[drafted].max(initial=0))
        outside += int(np.asarray(batch.trace.outside)[drafted].sum())
        total += int(drafted.sum())
    return Check(
        tier='loop',
        tested='drafts: q sums to 1, tokens of the vocabulary',
        samples=f'{total} draft tokens',
        found=f'{outside} outside; sums off by {error:.1g}',
        finds=f'any outside; a sum off by {SUM_TOLERANCE:g}',
        passed=bool(error < SUM_TOLERANCE and not outside),
    )


def _independent(sampler: _Sampler, batch: _Batch) -> Check:
    """Decodes every second row again, in reverse order, the others finished from the start; and some alone."""
    size = len(sampler.inputs.tokens)
    order, kept = np.arange(size)[::-1], np.arange(0, size, 2)
    inputs = jax.tree.map(lambda x: x[order], sampler.inputs)
    inputs = inputs.replace(mask=inputs.mask & (order % 2 == 0)[:, None])
    output, _ = sampler.decode(sampler.drafter, sampler.start(inputs, sampler.keys(0)[order]))
    differ = int(_unlike(batch.output, jax.tree.map(lambda x: x[order], output))[kept].sum())
    alone = np.arange(min(_ALONE, size))
    for row in alone:
        state = sampler.state.replace(keys=sampler.keys(0), done=jnp.arange(size) != row)
        output, _ = sampler.decode(sampler.drafter, state)
        differ += int(_unlike(batch.output, output)[row])
    allowed = int(_FLIPS * (len(kept) + len(alone)))
    return Check(
        tier='loop',
        tested="a row's text and acceptances, alone and among other neighbours",
        samples=f'{len(kept)} rows, {len(alone)} alone',
        found=f'{differ} differ',
        finds=f'more than {allowed} of them' if allowed else 'any',
        passed=differ <= allowed,
    )


def _unlike(ours: Output, theirs: Output) -> np.ndarray:
    """[B] bool, rows whose tokens or accepted lengths differ."""
    differ = np.asarray(ours.tokens != theirs.tokens).any(1)
    return differ | np.asarray(ours.stats.histogram != theirs.stats.histogram).any(1)


def _honest(batches: list[_Batch], target: Model) -> Check:
    wrong = rows = 0
    for batch in batches:
        faulty = audit.miscounted(batch.output, target.spec)
        faulty |= audit.recounted(batch.trace, batch.output.stats)
        wrong, rows = wrong + int(faulty.sum()), rows + len(faulty)
    tested = 'ends at EOS, padding, counts as traced'
    return Check('loop', tested, f'{rows} rows', f'{wrong} wrong', 'any', wrong == 0)


def _same_model(pair: Pair, sampler: _Sampler) -> Check:
    """The target as its own draft: every token should pass; fewer means a cache fault, slow but still exact."""
    size = 3 * (pair.settings.decode.gamma + 1)
    drafter = dataclasses.replace(pair.drafter, model=pair.target)
    rows = slice(0, min(_SAME_ROWS, len(sampler.inputs.tokens)))
    inputs = jax.tree.map(lambda x: x[rows], sampler.inputs)
    sampler = dataclasses.replace(
        sampler, drafter=drafter, settings=sampler.settings.decoding(max_new_tokens=size)
    )
    state = sampler.start(inputs, sampler.keys(0)[rows])
    stats = add_stats([sampler.decode(drafter, state)[0].stats])
    alpha, least = float(stats.overlap / stats.tested), _SAME_MODEL[pair.dtype]
    return Check(
        tier='loop',
        tested='alpha where the draft is the target itself',
        samples=f'{stats.tested} draft tokens',
        found=f'{alpha:.6f}',
        finds=f'below {least:g}',
        passed=alpha >= least,
    )
