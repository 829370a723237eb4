"""Sequence-level distillation (Kim and Rush 2016): the target translates the training sources for its draft.

    sources.tsv  --distill-->  WORKDIR/distilled.jsonl, a journal  --write_pairs-->  WORKDIR/distilled.tsv

The journal is written batch by batch. A run that is started again keeps its complete lines and continues there.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from tqdm import tqdm

from spec_jax.models.t5 import T5
from spec_jax.run.journal import Journal
from spec_jax.run.report import make_workdir, write_text
from spec_jax.sampling import SamplingConfig
from spec_jax.text import data
from spec_jax.text.batches import bucket_batches
from spec_jax.training import evaluation


def choose_sources(examples: Sequence[data.Example], limit: int, seed: int) -> list[str]:
    """Each source once, in the order of the file; `limit` of them at random where it is not 0."""
    sources = list(dict.fromkeys(example.source for example in examples if example.source.strip()))
    if 0 < limit < len(sources):
        chosen = np.random.default_rng(seed).permutation(len(sources))[:limit]
        sources = [sources[row] for row in np.sort(chosen)]
    return sources


def distill(
    target: T5,
    tokenizer,
    sources: Sequence[str],
    workdir: str | os.PathLike,
    *,
    prefix: str = '',
    batch_size: int = 128,
    max_source_length: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Callable[[], bool] = evaluation.never,
) -> dict:
    """Translates sources with the target and writes `workdir/distilled.tsv`, one source and output per line.

    Sources that are too long, and outputs that are empty or have no EOS, are left out and counted.

    Args:
      sources: texts.
      prefix: put before each source for the target; the file has the sources without it.
      batch_size: rows of a batch.
      max_source_length: most tokens of a source.
      temperature: 0 is greedy; a target that will be sampled from may be distilled at its temperature.
      seed: of the sampling.
      stop: called between batches; once it is True, the journal stays and the tsv is not written.

    Returns:
      Counts: sources, too_long, translated, unfinished, empty, pairs, tokens; and tsv, the file's path, None
      where the run was stopped.

    Raises:
      OSError: the folder cannot be written.
      ValueError: the folder has another run's journal.
    """
    workdir = make_workdir(workdir)
    # One token more than the limit distinguishes a source that is too long from one that just fits.
    sequences, _ = data.encode_sources(
        tokenizer, sources, prefix=prefix, max_source_length=max_source_length + 1
    )
    rows = [row for row, sequence in enumerate(sequences) if len(sequence) <= max_source_length]
    run = dict(prefix=prefix, batch_size=batch_size, max_source_length=max_source_length)
    run |= dict(temperature=temperature, seed=seed, dtype=np.dtype(target.dtype).name)
    run |= dict(sources=zlib.crc32('\n'.join(sources).encode()), target=_fingerprint(target))
    journal = Journal.open(workdir / 'distilled.jsonl', run)
    kept = [sequences[row] for row in rows]
    batches = bucket_batches(kept, batch_size, max_source_length, pad_id=target.spec.pad_id)
    with tqdm(total=len(rows), initial=len(journal.records), unit=' sentences', smoothing=0.05) as bar:
        sampling, key = SamplingConfig(temperature=temperature), jax.random.key(seed)
        _fill(journal, target, tokenizer, list(batches), rows, sampling, key, bar, stop)
    finished = len(journal.records) == len(rows)
    tsv = workdir / 'distilled.tsv' if finished else None
    counts = write_pairs(tsv, sources, _translations(journal))
    counts.update(sources=len(sources), too_long=len(sources) - len(rows), tsv=tsv and str(tsv))
    return counts


def _fill(journal, target, tokenizer, batches, rows, sampling, key, bar, stop) -> None:
    """Translates what the journal lacks. Rows of a batch count within `rows`."""
    # Longest first: memory runs out at once or never, and the estimate of the time left is not too low.
    for batch in reversed(batches):
        batch_rows = [rows[n] for n in batch.rows[: batch.num_real]]
        if journal.records.keys() >= set(batch_rows):
            continue
        if stop():
            return
        new = evaluation.translate(target, tokenizer, batch, sampling, key)
        journal.add(batch_rows, [dataclasses.asdict(one) for one in new])
        bar.update(len(journal.records) - bar.n)


def _translations(journal: Journal) -> dict[int, evaluation.Translation]:
    try:
        return {row: evaluation.Translation(**record) for row, record in journal.records.items()}
    except TypeError as error:
        raise ValueError(
            f'{journal.path}: expected a journal of distillation, got damage; remove it'
        ) from error


def write_pairs(
    tsv: pathlib.Path | None, sources: Sequence[str], translations: dict[int, evaluation.Translation]
) -> dict:
    """Counts the pairs that are fit for training; where `tsv` is a path, writes them in the sources' order."""
    fit = {row: one for row, one in sorted(translations.items()) if one.ended and one.text.strip()}
    if tsv is not None:
        lines = [f'{_one_line(sources[row])}\t{_one_line(one.text)}\n' for row, one in fit.items()]
        write_text(tsv, ''.join(lines))
    endless = sum(not one.ended for one in translations.values())
    return dict(
        translated=len(translations),
        pairs=len(fit),
        unfinished=endless,
        empty=len(translations) - len(fit) - endless,
        tokens=sum(one.num_tokens for one in translations.values()),
    )


def _one_line(text: str) -> str:
    """The text without tabs and line feeds, which would split it."""
    return ' '.join(text.split())


def _fingerprint(target: T5) -> int:
    """CRC-32 of the first 64 numbers of each array of weights."""
    head = [np.asarray(leaf.ravel()[:64], np.float32).tobytes() for leaf in jax.tree.leaves(target.params)]
    return zlib.crc32(b''.join(head))
