"""Counts of n-grams as the draft: unigrams, bigrams, and higher orders that back off to them.

q is smoothed by Witten and Bell's method in its interpolated form (Witten and Bell 1991, method C; Chen and
Goodman 1998, who compare it with other methods). After a context h, with h' the same without its oldest token,

    q(w | h) = c(h w) / (c(h) + T(h)) + backoff(h) q(w | h')

where c counts, and T(h) is how many different tokens were seen after h. The unigrams back off to the uniform
distribution over the tokenizer's pieces, so that each of them has q > 0, and any other id q = 0.
Without pruning backoff(h) = T(h) / (c(h) + T(h)); the share of a pruned successor goes to the back-off, so q
still sums to 1. A context that was never seen, or lost all its successors, has backoff(h) = 1.

Only the unigrams have a table of width V: any other context keeps at most K successors, and all successors stand
in one array. With C contexts of k tokens, E successors in all and at most 4 C buckets, on the device:

    order 1      4 V bytes                           V = 32128: 129 kB
    order k + 1  (4 k + 32) C + 8 E bytes, at most   V = 32128: 9.4 MB for k = 1, every token a context of K = 32
                                                     (V x V floats would be 4.1 GB); 40 C + 8 E for k = 2, which
                                                     is 11 MB for 100,000 contexts of 900,000 successors

A context is looked up by its hash and compared token for token, so a collision cannot return another context.

Axes: B rows, G draft depth, V vocabulary (here the tokenizer's pieces), C contexts, E successors of all
contexts, K most successors of one, P most contexts of one bucket, N n-grams looked up.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.drafters.draw import draw, fit_vocabulary
from spec_jax.models.base import Model
from spec_jax.sampling import split_rows
from spec_jax.types import Context, Draft, Inputs, Prefill

FILE_NAME = 'ngram.npz'
_STATIC = dict(pytree_node=False)

# --- the draft ----------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Level:
    """The contexts of k tokens, k >= 1. The last row, C, is for every context that is not in the table.

    Attributes:
      contexts: [C + 1, k] int32, oldest token first, bucket by bucket; -1 in the last row.
      buckets: [2 ** m] int32, the first row of the contexts with each hash.
      offsets: [C + 2] int32, where each row's successors begin.
      successors: [E + 1] int32; the last entry belongs to no row.
      probs: [E + 1] float32, c(h w) / (c(h) + T(h)).
      backoff: [C + 1] float32, 1 in the last row.
      best: [C + 1] int32, the most probable token after each context; -1 in the last row.
      best_prob: [C + 1] float32, its q.
      depth: P, the most contexts of a bucket.
      width: K, the most successors of a context.
    """

    contexts: Array
    buckets: Array
    offsets: Array
    successors: Array
    probs: Array
    backoff: Array
    best: Array
    best_prob: Array
    depth: int = flax.struct.field(**_STATIC)
    width: int = flax.struct.field(**_STATIC)

    @property
    def length(self) -> int:
        """k, the tokens of a context."""
        return self.contexts.shape[1]

    def find(self, context: Array) -> Array:
        """The rows [B] of contexts [B, k], NumPy or JAX arrays."""
        xp = context.__array_namespace__()
        missing = self.contexts.shape[0] - 1
        start = self.buckets[_hash(context, self.buckets.shape[0])]  # [B]
        index = xp.minimum(start[:, None] + xp.arange(self.depth), missing)  # [B, P]
        match = (self.contexts[index] == context[:, None]).all(-1)
        return xp.where(match, index, missing).min(-1)

    def following(self, row: Array) -> tuple[Array, Array]:
        """The successors of rows [B] and their probs, [B, K] each; of probability 0 where a row has fewer."""
        xp = row.__array_namespace__()
        index = self.offsets[row][:, None] + xp.arange(self.width)
        inside = index < self.offsets[row + 1][:, None]
        index = xp.where(inside, index, self.successors.shape[0] - 1)
        return self.successors[index], xp.where(inside, self.probs[index], 0.0)

    def prob_of(self, row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The probs [N] of tokens [N] as successors of rows [N], 0 where a token is not a successor; in NumPy."""
        rows = np.repeat(np.arange(len(self.backoff)), np.diff(self.offsets))
        base = 1 + max(tokens.max(initial=0), self.successors.max())
        keys = np.append(rows, len(self.backoff)) * base + self.successors  # [E + 1]
        order = np.argsort(keys)
        wanted = row * base + tokens  # each is below the last key
        index = order[np.searchsorted(keys, wanted, sorter=order)]
        return np.where(keys[index] == wanted, self.probs[index], 0.0)


@flax.struct.dataclass
class NgramDrafter:
    """Drafts from the last `order` - 1 tokens of the text; before its beginning the first token is repeated.

    Greedy, a step looks up the best token after the context and makes no array of width V, unless
    `SamplingConfig.vocab_limit` cuts off some of the tokenizer's pieces.

    Attributes:
      unigram: [V] float32, q without a context.
      best: [] int32, the most probable unigram.
      best_prob: [] float32, its q.
      levels: of contexts of 1, 2, ... tokens; `order` - 1 of them.
    """

    unigram: Array
    best: Array
    best_prob: Array
    levels: tuple[Level, ...] = ()

    @property
    def order(self) -> int:
        """The tokens of the longest n-gram; 1 for unigrams alone."""
        return len(self.levels) + 1

    def shape(self, gamma: int) -> DraftShape:
        return DraftShape(nodes=gamma, depth=gamma)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> tuple:
        return ()

    def propose(self, state: tuple, round: Round) -> tuple[Draft, tuple]:
        context, sampling, vocab_size = round.context, round.sampling, round.vocab_size
        window = context.last(self.order - 1)  # [B, order - 1]
        limit = vocab_size if sampling.vocab_limit is None else min(vocab_size, sampling.vocab_limit)
        looked_up = sampling.temperature == 0 and limit >= self.unigram.shape[0]

        def step(window, key):
            if looked_up:
                token, probs = self.best_after(window)[0], None
            else:
                logits = fit_vocabulary(jnp.log(self.probs_after(window)), vocab_size)
                token, probs = draw(key, logits, sampling)
            return jnp.concatenate([window, token[:, None]], axis=1)[:, 1:], (token, probs)

        step_keys = None if looked_up else split_rows(round.keys, round.gamma)  # [G, B]
        _, drawn = lax.scan(step, window, step_keys, length=round.gamma)
        tokens, probs = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        return Draft(tokens, probs, jnp.full_like(context.length, round.gamma)), state

    def confidence(self, state: tuple, context: Context) -> Array:
        """The highest q [B] of the next token; see `thrifty.Thrifty`."""
        return self.best_after(context.last(self.order - 1))[1]

    def update(self, state: tuple, outcome: Outcome) -> tuple:
        return state

    def best_after(self, context: Array) -> tuple[Array, Array]:
        """The most probable tokens [B] after contexts [B, order - 1], the smallest id of a tie, and their q [B]."""
        xp = context.__array_namespace__()
        token, prob = (xp.broadcast_to(one, context.shape[:1]) for one in (self.best, self.best_prob))
        for level in self.levels:
            row = level.find(context[:, -level.length :])
            known = level.best[row] >= 0
            token, prob = xp.where(known, level.best[row], token), xp.where(known, level.best_prob[row], prob)
        return token, prob

    def probs_after(self, context: Array) -> Array:
        """q [B, V] float32 after contexts [B, order - 1] int32."""
        weight, terms = jnp.ones(context.shape[0]), []  # weight: product of the longer contexts' backoff
        for level in reversed(self.levels):
            row = level.find(context[:, -level.length :])
            successors, probs = level.following(row)
            terms.append((successors, weight[:, None] * probs))
            weight = weight * level.backoff[row]
        q = weight[:, None] * self.unigram
        rows = jnp.arange(context.shape[0])[:, None]
        for successors, probs in terms:
            q = q.at[rows, successors].add(probs)
        return q

    def prob_of(self, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """q [N] of single tokens [N] after contexts [N, order - 1], in NumPy."""
        q = self.unigram[tokens]
        for level in self.levels:
            row = level.find(context[:, -level.length :])
            q = level.prob_of(row, tokens) + level.backoff[row] * q
        return q


def _hash(context: Array, num_buckets: int) -> Array:
    """Multiplicative hashes [B] of contexts [B, k], below a power of two; the low 8 bits mix least and are cut."""
    mixed = context[:, 0].astype(np.uint32)
    for token in context.T[1:]:
        mixed = (mixed * np.uint32(0x85EBCA6B) ^ (mixed >> np.uint32(15))) + token.astype(np.uint32)
    mixed = mixed * np.uint32(0x9E3779B1)  # 2 ** 32 over the golden ratio
    return ((mixed >> np.uint32(8)) % np.uint32(num_buckets)).astype(np.int32)


# --- the counts ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LevelCounts:
    """Counts of the tokens after the contexts of k tokens, in NumPy; `training.ngram` makes them.

    Attributes:
      contexts: [C, k] int, each once; a single empty one for the unigrams, where k is 0.
      denominators: [C] int, c(h) + T(h), pruned successors included.
      lengths: [C] int, how many successors each context kept, 1 or more.
      successors: [E] int, those of the first context, then those of the second, ...
      counts: [E] int, c(h w).
    """

    contexts: np.ndarray
    denominators: np.ndarray
    lengths: np.ndarray
    successors: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class NgramCounts:
    """The counts that a draft is made from, and that `save_ngram` writes.

    Attributes:
      levels: of contexts of 0, 1, ..., order - 1 tokens.
      vocab_size: V, pieces of the tokenizer.
      fingerprint: of the tokenizer's pieces (`fingerprint`); 0 where it is not known.
    """

    levels: tuple[LevelCounts, ...]
    vocab_size: int
    fingerprint: int = 0


def fingerprint(pieces: Sequence[str]) -> int:
    """CRC-32 of a tokenizer's pieces in the order of their ids."""
    return zlib.crc32('\n'.join(pieces).encode())


def make_drafter(counts: NgramCounts, order: int | None = None) -> NgramDrafter:
    """The drafter of n-grams of at most `order` tokens (None for all), in NumPy and float64.

    `load_ngram` puts it on the device. In NumPy `prob_of` and `best_after` serve for inspection.
    """
    unigrams = counts.levels[0]
    share = unigrams.counts / unigrams.denominators[0]
    unigram = np.full(counts.vocab_size, (1 - share.sum()) / counts.vocab_size)
    unigram[unigrams.successors] += share
    drafter = NgramDrafter(unigram, np.asarray(unigram.argmax(), np.int32), np.asarray(unigram.max()))
    for level in counts.levels[1:order]:
        drafter = drafter.replace(levels=(*drafter.levels, _make_level(level, drafter)))
    return drafter


def _make_level(counts: LevelCounts, shorter: NgramDrafter) -> Level:
    """A level from its counts and the drafter of the contexts that are one token shorter."""
    size = max(1, len(counts.contexts))
    num_buckets = 2 ** int(np.ceil(np.log2(size)) + 1)  # two to four per context: few collide
    hashes = _hash(counts.contexts, num_buckets)
    order = np.argsort(hashes, kind='stable')
    rows = np.repeat(np.arange(len(counts.contexts)), counts.lengths)
    probs = counts.counts / counts.denominators[rows]
    backoff = 1 - np.bincount(rows, probs, minlength=len(counts.contexts))
    lengths = counts.lengths[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    moved = np.cumsum(counts.lengths)[order] - offsets[1:]  # how far each context's successors move
    entries = np.arange(len(rows)) + np.repeat(moved, lengths)
    level = Level(
        contexts=np.pad(counts.contexts[order], ((0, 1), (0, 0)), constant_values=-1),
        buckets=np.searchsorted(hashes[order], np.arange(num_buckets)),
        offsets=np.append(offsets, offsets[-1]),
        successors=np.append(counts.successors[entries], 0),
        probs=np.append(probs[entries], 0.0),
        backoff=np.append(backoff[order], 1.0),
        best=np.full(len(counts.contexts) + 1, -1),
        best_prob=np.zeros(len(counts.contexts) + 1),
        depth=int(max(1, np.bincount(hashes, minlength=1).max())),
        width=int(max(1, counts.lengths.max(initial=1))),
    )
    best, best_prob = _best(level, shorter)
    return level.replace(best=best, best_prob=best_prob)


def _best(level: Level, shorter: NgramDrafter) -> tuple[np.ndarray, np.ndarray]:
    """The most probable token [C + 1] after each context, and its q.

    It is one of the successors or the best token of the back-off, which has the highest q of all other tokens.
    """
    missing = level.contexts.shape[0] - 1
    rows = np.repeat(np.arange(missing), np.diff(level.offsets)[:missing])
    tokens = np.concatenate(
        [level.successors[: len(rows)], shorter.best_after(level.contexts[:missing, 1:])[0]]
    )
    direct = np.concatenate([level.probs[: len(rows)], np.zeros(missing)])  # without the back-off's part
    rows = np.concatenate([rows, np.arange(missing)])
    q = direct + level.backoff[rows] * shorter.prob_of(level.contexts[rows, 1:], tokens)
    order = np.lexsort((tokens, -q, rows))
    first = np.flatnonzero(np.diff(rows[order], prepend=-1))
    chosen = order[first]
    return np.append(tokens[chosen], -1), np.append(q[chosen], 0.0)


# --- the file -----------------------------------------------------------------------------------------------

# The arrays of a level of contexts of k tokens; each is stored as NAME_k.
_ARRAYS = tuple(field.name for field in dataclasses.fields(LevelCounts))


def load_ngram(
    path: str | os.PathLike, order: int, vocab_size: int, pieces: Sequence[str] | None = None
) -> NgramDrafter:
    """A drafter from a file of counts.

    Args:
      path: the file, or the folder that `scripts/train.py` exports.
      order: of the longest n-grams to use, at most that of the counts; 1 for unigrams, 2 for bigrams.
      vocab_size: V of the target.
      pieces: those of the target's tokenizer, in the order of their ids; None leaves them unchecked.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or not a file of counts, has fewer orders or more ids than the target, or was
        counted with another tokenizer.
    """
    counts = read_ngram(path)
    if not 1 <= order <= len(counts.levels):
        raise ValueError(
            f'order: expected 1 to {len(counts.levels)}, the highest order in {path}, got {order}; '
            'count again with a higher --config.order for more'
        )
    if counts.vocab_size > vocab_size:
        raise ValueError(
            f"{path}: expected ids below {vocab_size}, the target's, got counts of {counts.vocab_size} pieces; "
            "count again with the target's tokenizer"
        )
    if pieces is not None and counts.fingerprint not in (0, fingerprint(pieces)):
        raise ValueError(
            f"{path}: expected counts of the target's tokenizer, got those of another of {counts.vocab_size} "
            "pieces; count again with the target's"
        )
    return on_device(make_drafter(counts, order))


def on_device(drafter: NgramDrafter) -> NgramDrafter:
    """The same drafter with JAX arrays, int32 and float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype.kind == 'f' else jnp.int32), drafter)


def save_ngram(path: str | os.PathLike, counts: NgramCounts) -> None:
    """Writes a compressed npz, a few bytes per successor, through a temporary file: it is never left half-written.

    Raises:
      OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    arrays = {'vocab_size': counts.vocab_size, 'fingerprint': counts.fingerprint}
    for k, level in enumerate(counts.levels):
        # Stored by columns: the first tokens of sorted contexts form long runs, which compress well.
        columns = dataclasses.replace(level, contexts=level.contexts.T)
        arrays |= {f'{name}_{k}': getattr(columns, name) for name in _ARRAYS}
    partial = path.with_name(path.name + '.partial')
    try:
        with open(partial, 'wb') as file:
            np.savez_compressed(file, **{name: _narrowed(array) for name, array in arrays.items()})
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_ngram(path: str | os.PathLike) -> NgramCounts:
    """Reads what `save_ngram` wrote; errors as of `load_ngram`. Pickles are refused."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f'{path}: expected a file of n-gram counts, found none; scripts/train.py with '
            'configs/train_ngram_demo.py makes one'
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        counts = _from_arrays(arrays)
    # zipfile, zlib and NumPy raise any of these, depending on where the damage is
    except (
        ValueError, TypeError, AttributeError, KeyError, IndexError, EOFError, OSError, NotImplementedError,
        MemoryError, SyntaxError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        reason = ' '.join(str(error).split())[:120] or type(error).__name__
        raise ValueError(
            f'{path}: expected counts of n-grams, got a damaged or other file ({reason}); count again'
        ) from error
    return counts


def _narrowed(array: np.ndarray) -> np.ndarray:
    """The array in the smallest unsigned type that holds it."""
    array = np.asarray(array)
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _from_arrays(arrays: dict[str, np.ndarray]) -> NgramCounts:
    """The counts in arrays of `save_ngram`; raises ValueError, KeyError or TypeError for any other arrays."""
    order = sum(name.startswith('contexts_') for name in arrays)
    if not order:
        raise ValueError('no contexts_0 in it')
    for name, array in arrays.items():
        if array.dtype.kind != 'u':
            raise ValueError(f'{name} is of {array.dtype}')
    vocab_size, mark = int(arrays['vocab_size']), int(arrays['fingerprint'])
    levels = []
    for k in range(order):
        level = LevelCounts(**{name: arrays[f'{name}_{k}'].astype(np.int64) for name in _ARRAYS})
        level = dataclasses.replace(level, contexts=level.contexts.T)
        _check_level(level, k, vocab_size)
        levels.append(level)
    return NgramCounts(tuple(levels), vocab_size, mark)


def _check_level(level: LevelCounts, k: int, vocab_size: int) -> None:
    """Raises ValueError unless the level gives a distribution after every context."""
    size, num = level.lengths.size, level.successors.size
    shapes = dict(contexts=(size, k), denominators=(size,), lengths=(size,), successors=(num,), counts=(num,))
    for name, shape in shapes.items():
        if (actual := getattr(level, name).shape) != shape:
            raise ValueError(f'{name}_{k} has shape {actual}, not {shape}')
    if k == 0 and size != 1:
        raise ValueError(f'there are {size} empty contexts')
    if level.lengths.sum() != num or level.lengths.min(initial=1) < 1 or level.counts.min(initial=1) < 1:
        raise ValueError(f'lengths_{k} or counts_{k} do not match the successors')
    if max(level.contexts.max(initial=0), level.successors.max(initial=0)) >= vocab_size:
        raise ValueError(f'an id of level {k} is not below vocab_size {vocab_size}')
    rows = np.repeat(np.arange(size), level.lengths)
    if len(np.unique(rows * vocab_size + level.successors)) != num or (
        len(np.unique(level.contexts, axis=0)) != size
    ):
        raise ValueError(f'a context or successor of level {k} comes twice')
    if (np.bincount(rows, level.counts, minlength=size) >= level.denominators).any():
        raise ValueError(f'counts_{k} leave nothing to the back-off')
