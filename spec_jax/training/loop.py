"""A training run, from a configuration to an exported model: `scripts/train.py` without its flags."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from tqdm import tqdm

from spec_jax.models.t5 import T5
from spec_jax.models.t5_weights import load_t5, save_t5
from spec_jax.run.report import make_workdir
from spec_jax.text.tokenizers import copy_tokenizer, load_tokenizer
from spec_jax.training import checkpoints, train
from spec_jax.training.batches import TrainingBatch, training_batches
from spec_jax.training.evaluation import Validation, describe_scores, never, read_pairs
from spec_jax.training.history import History
from spec_jax.training.recipe import check_recipe, files, model_config

LOG_EVERY = 50  # most steps in one row of the history


@dataclasses.dataclass(frozen=True)
class Setup:
    """The objects of a configuration, before any text is read.

    Attributes:
      tokenizer: transformers'.
      tokenizer_source: the folder or hub id that it comes from.
      optimizer: optax's.
      config: as given.
    """

    tokenizer: object
    tokenizer_source: str
    optimizer: optax.GradientTransformation
    config: ConfigDict

    @classmethod
    def create(cls, config: ConfigDict) -> Setup:
        check_recipe(config)
        source = config.tokenizer or config.distill_from
        tokenizer = load_tokenizer(source)
        model_config(config, len(tokenizer))  # raises for an invalid model
        schedule = train.learning_rate(
            config.peak_learning_rate, config.steps, config.warmup_steps, config.decay_fraction
        )
        optimizer = train.make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip)
        return cls(tokenizer, source, optimizer, config)

    def first_state(self) -> train.TrainState:
        """The state before the first step, placed as a restored one is, so that a step is compiled once."""
        sizes = model_config(self.config, len(self.tokenizer))
        model = T5.create(sizes, jax.random.key(self.config.seed), jnp.dtype(self.config.dtype))
        return jax.device_put(train.TrainState.create(model, self.optimizer), jax.devices()[0])

    def newest_state(self, manager) -> train.TrainState | None:
        """The state of the newest checkpoint, if there is one; errors as of `checkpoints.restore_latest`."""
        return checkpoints.restore_latest(manager, jax.eval_shape(self.first_state))


def train_model(config: ConfigDict, workdir: pathlib.Path, stop: Callable[[], bool] = never) -> int:
    """Trains, from the newest checkpoint in `workdir` where there is one, and exports the model at the end.

    Writes checkpoints/, report.json and export/ in `workdir`. However often it is stopped and started, the
    checkpoints are bit for bit those of an uninterrupted run.

    Args:
      config: as `recipe.py` describes it.
      workdir: created.
      stop: called after each step; when it is True, the run saves a checkpoint and returns.

    Returns:
      The number of steps taken, fewer than `config.steps` where it was stopped.

    Raises:
      FileNotFoundError: something that the configuration names is missing.
      OSError: the workdir cannot be written.
      ValueError: the configuration has a bad value, or the checkpoint is damaged or another model's.
      FloatingPointError: the loss is no longer finite.
    """
    setup = Setup.create(config)
    make_workdir(workdir)
    pairs = read_pairs(config, setup.tokenizer, files(config.data.train))
    validation = Validation.create(config, setup.tokenizer)
    update = _make_update(config, setup)
    with contextlib.closing(checkpoints.open_manager(workdir / 'checkpoints')) as manager:
        state = setup.newest_state(manager) or setup.first_state()
        start = int(state.step)
        if start > config.steps:
            raise ValueError(f'steps: expected {start} or more, as far as {workdir} is, got {config.steps}')
        history = History.open(workdir / 'report.json', start)
        history.describe(config, state.model, pairs)
        ids = dict(pad_id=state.model.config.pad_id, start_id=state.model.config.start_id)
        batches = training_batches(pairs, config.tokens_per_batch, config.seed, **ids, start_step=start)
        save = functools.partial(checkpoints.save, manager)
        state = _run(config, state, batches, update, validation, history, save, stop)
    if int(state.step) == config.steps:
        export(config, setup, state.model, workdir)
    return int(state.step)


def export_latest(config: ConfigDict, workdir: pathlib.Path) -> pathlib.Path:
    """Exports the newest checkpoint in `workdir`, even while a run is in progress. Errors as of `train_model`."""
    setup = Setup.create(config)
    with contextlib.closing(checkpoints.open_to_read(workdir / 'checkpoints')) as manager:
        state = setup.newest_state(manager)
    if state is None:
        raise FileNotFoundError(f'{workdir}/checkpoints: expected a checkpoint, found none; train first')
    return export(config, setup, state.model, workdir)


def export(config: ConfigDict, setup: Setup, model: T5, workdir: pathlib.Path) -> pathlib.Path:
    """Writes workdir/export, which transformers and `load_t5` read: tokenizer, weights, config.json last."""
    folder = workdir / 'export'
    copy_tokenizer(setup.tokenizer_source, setup.tokenizer, folder)
    save_t5(model, folder, config.export_dtype)
    return folder


def _make_update(config: ConfigDict, setup: Setup) -> Callable:
    """(state, batch) -> (state, loss): the train step with all arguments that are the same in every step."""
    vocab_size = model_config(config, len(setup.tokenizer)).vocab_size
    teacher = load_t5(config.distill_from, config.dtype) if config.distill_from else None
    if teacher is not None and teacher.spec.vocab_size != vocab_size:
        raise ValueError(
            f"{config.distill_from}: expected a teacher with the model's vocabulary of {vocab_size} pieces, "
            f"got {teacher.spec.vocab_size}; use the teacher's tokenizer"
        )
    key = jax.random.key(config.seed + 1)

    def update(state: train.TrainState, batch: TrainingBatch) -> tuple[train.TrainState, jax.Array]:
        return train.train_step(
            state,
            batch,
            key,
            teacher,
            optimizer=setup.optimizer,
            smoothing=config.label_smoothing,
            distill_weight=config.distill_weight,
        )

    return update


def _run(config, state, batches, update, validation, history, save, stop) -> train.TrainState:
    """Takes steps until the last one or `stop`.

    A validation comes after the checkpoint of its step: if it is interrupted, the next start repeats it.
    """
    step, losses, stopping = int(state.step), [], False
    with tqdm(initial=step, total=config.steps, unit='step', mininterval=0.5, smoothing=0.05) as bar:
        while True:
            if validation.is_due(step) and not history.has_scores(step):
                scores = validation(state.model, stop)
                if scores is None:
                    break
                history.add_scores(step, scores)
                history.write()
                bar.write(describe_scores(step, scores))
            if stopping or step == config.steps:
                break
            state, loss = update(state, next(batches))
            step += 1
            losses.append(loss)
            bar.update()
            stopping = stop()
            saving = stopping or step % config.checkpoint_every == 0 or validation.is_due(step)
            saving = saving or step == config.steps
            if saving or step % LOG_EVERY == 0:
                bar.set_postfix(loss=f'{history.add_losses(step, losses):.3f}')
                losses = []
            if saving:
                history.write()  # before the checkpoint: rows after one are dropped, missing rows are lost
                save(step, state)
    return state
