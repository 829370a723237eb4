"""Validation of a model in training: its loss on held-out text, and BLEU of its translations.

Axes: B rows, S source length.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from spec_jax.decoding import DecodeConfig
from spec_jax.generation import plain_generate
from spec_jax.models.t5 import T5
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.text import data, metrics
from spec_jax.text.batches import Batch, bucket_batches
from spec_jax.training.batches import TrainingBatch, training_batches
from spec_jax.training.recipe import files
from spec_jax.training.train import batch_loss
from spec_jax.types import Inputs

_evaluate_batch = jax.jit(batch_loss)


def never() -> bool:
    """The `stop` of a run that is not stopped."""
    return False


@dataclasses.dataclass(frozen=True)
class Translation:
    """One output.

    Attributes:
      text: without special tokens.
      num_tokens: EOS included.
      ended: whether an EOS ended it, rather than the limit of its length.
    """

    text: str
    num_tokens: int
    ended: bool


@dataclasses.dataclass(frozen=True)
class Validation:
    """The validation files of a run, read once.

    Attributes:
      config: as `recipe.py` describes it.
      tokenizer: of the model.
      pairs: by file.
      examples: by file, its first sentences, to be translated.
    """

    config: ConfigDict
    tokenizer: Any
    pairs: dict[str, data.Pairs]
    examples: dict[str, list[data.Example]]

    @classmethod
    def create(cls, config: ConfigDict, tokenizer) -> Validation:
        names = files(config.data.valid)
        pairs = {name: read_pairs(config, tokenizer, [name]) for name in names}
        examples = {name: data.read_examples(name)[: config.eval_bleu_sentences] for name in names}
        return cls(config, tokenizer, pairs, examples)

    def is_due(self, step: int) -> bool:
        on_time = step % self.config.eval_every == 0 or step == self.config.steps
        return bool(self.pairs) and step > 0 and on_time

    def __call__(self, model: T5, stop: Callable[[], bool] = never) -> dict | None:
        """{file: {'loss': nats per label, 'bleu': 0 .. 100}}; None where `stop` ended it early."""
        scores = {}
        for name, pairs in self.pairs.items():
            batches = training_batches(
                pairs,
                self.config.tokens_per_batch,
                0,
                pad_id=model.spec.pad_id,
                start_id=model.config.start_id,
                num_epochs=1,
            )
            scores[name] = {'loss': validation_loss(model, batches, stop)}
            if self.examples[name]:
                scores[name]['bleu'] = bleu(
                    model,
                    self.tokenizer,
                    self.examples[name],
                    prefix=self.config.data.prefix,
                    batch_size=self.config.eval_batch_size,
                    max_source_length=self.config.data.max_source_length,
                    stop=stop,
                )
            if None in scores[name].values():
                return None
        return scores


def describe_scores(step: int, scores: dict) -> str:
    """The scores on one line, for the screen."""
    parts = [
        f'{pathlib.Path(name).stem} ' + ' '.join(f'{kind} {value:.3f}' for kind, value in values.items())
        for name, values in scores.items()
    ]
    return ' | '.join([f'step {step}', *parts])


def read_pairs(config: ConfigDict, tokenizer, names: Sequence[str]) -> data.Pairs:
    """The encoded pairs of some files, one after the other.

    Raises:
      FileNotFoundError, ValueError: a file is missing, empty, or has a line that is not a pair.
    """
    limits = config.data.max_source_length, config.data.max_target_length
    parts = []
    for name in names:
        try:
            examples = data.read_examples(name)
            parts.append(data.encode_pairs(tokenizer, examples, *limits, prefix=config.data.prefix))
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith(name) else f'{name}: {message}') from error
    return data.Pairs(
        [source for part in parts for source in part.sources],
        [target for part in parts for target in part.targets],
        sum(part.num_dropped for part in parts),
    )


def validation_loss(
    model: T5, batches: Iterable[TrainingBatch], stop: Callable[[], bool] = never
) -> float | None:
    """Mean cross-entropy per label in nats, without dropout; None where `stop` ended it early."""
    total = count = 0.0
    for batch in batches:
        if stop():
            return None
        batch_total, batch_count = _evaluate_batch(model, batch)
        total, count = total + float(batch_total), count + float(batch_count)
    return total / max(count, 1.0)


def length_limit(source_length: int) -> int:
    """The most tokens of a translation, EOS included, for a source of this length; longer output is degenerate."""
    return 2 * source_length + 8


def translate(model: T5, tokenizer, batch: Batch, sampling: SamplingConfig, key) -> list[Translation]:
    """Decodes a batch plainly, up to `length_limit` of its width.

    Args:
      batch: B rows, of which the first `num_real` are real.
      sampling: how logits become a distribution; the vocabulary is cut to the tokenizer's.
      key: of the run; a row's key is folded from it and the row's number.

    Returns:
      One translation for each real row, in the order of `batch.rows`.
    """
    sampling = dataclasses.replace(sampling, vocab_limit=min(len(tokenizer), model.spec.vocab_size))
    mask = batch.mask & (batch.rows >= 0)[:, None]  # a row whose mask is empty is finished from the start
    limit = length_limit(batch.tokens.shape[1])
    config = DecodeConfig(gamma=0, max_new_tokens=limit, sampling=sampling)
    output = plain_generate(model, Inputs(batch.tokens, mask), row_keys(key, batch.rows), config)
    tokens, lengths = np.asarray(output.tokens), np.asarray(output.length)
    translations = []
    for row, length in zip(tokens[: batch.num_real], lengths, strict=False):
        text = tokenizer.decode(row[:length], skip_special_tokens=True)
        translations.append(Translation(text, int(length), bool(row[length - 1] in model.spec.eos_ids)))
    return translations


def translate_all(
    model: T5,
    tokenizer,
    sequences: Sequence[np.ndarray],
    *,
    batch_size: int,
    max_source_length: int,
    sampling: SamplingConfig = GREEDY,
    stop: Callable[[], bool] = never,
) -> Iterator[tuple[int, Translation]]:
    """Translates encoded sources, each [S], in batches of similar length; yields row and translation."""
    key = jax.random.key(0)
    for batch in bucket_batches(sequences, batch_size, max_source_length, pad_id=model.spec.pad_id):
        if stop():
            return
        yield from zip(batch.rows.tolist(), translate(model, tokenizer, batch, sampling, key), strict=False)


def bleu(
    model: T5,
    tokenizer,
    examples: Sequence[data.Example],
    *,
    prefix: str,
    batch_size: int,
    max_source_length: int,
    stop: Callable[[], bool] = never,
) -> float | None:
    """sacrebleu's corpus BLEU of greedy translations, one reference each; None where `stop` ended it early."""
    sources = [example.source for example in examples]
    sequences, _ = data.encode_sources(tokenizer, sources, prefix=prefix, max_source_length=max_source_length)
    translated = dict(
        translate_all(
            model,
            tokenizer,
            sequences,
            batch_size=batch_size,
            max_source_length=max_source_length,
            stop=stop,
        )
    )
    if len(translated) < len(examples):
        return None
    return metrics.bleu([translated[row].text for row in range(len(examples))], examples)
