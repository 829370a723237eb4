"""Teacher forcing with Optax: state in, state out.

Whatever a step needs besides the state follows from its number: the data order, the dropout masks and
the learning rate. A run that is stopped and started again therefore continues as if nothing had happened.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from spec_jax.data import TrainingBatch
from spec_jax.models.t5 import T5
from spec_jax.training.losses import cross_entropy
from spec_jax.types import Inputs


@flax.struct.dataclass
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      step: scalar int32, steps taken.
      model: the T5, float32 parameters.
      opt_state: the optimizer's.
    """

    step: Array
    model: T5
    opt_state: optax.OptState

    @classmethod
    def create(cls, model: T5, optimizer: optax.GradientTransformation) -> TrainState:
        return cls(jnp.zeros((), jnp.int32), model, optimizer.init(model.params))


def learning_rate(peak: float, steps: int, warmup: int, decay_fraction: float) -> optax.Schedule:
    """Linear warm-up, a plateau, and a linear decay to zero over the last `decay_fraction` of the run.

    The plateau leaves the length of a run open: stopped on it, a run can be given a nearer or a farther end.
    """
    decay = max(1, round(steps * decay_fraction))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        boundaries=[warmup, max(warmup, steps - decay)],
    )


def make_optimizer(
    name: str, schedule: optax.Schedule, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW or Adafactor under a schedule, with gradients clipped to a global norm.

    Raises:
      ValueError: for any other name.
    """
    if name == 'adamw':
        rule = optax.adamw(schedule, b2=0.98, eps=1e-9, weight_decay=weight_decay)
    elif name == 'adafactor':
        rule = optax.adafactor(schedule, multiply_by_parameter_scale=True, weight_decay_rate=weight_decay or None)
    else:
        raise ValueError(f"optimizer: expected 'adamw' or 'adafactor', got {name!r}")
    return optax.chain(optax.clip_by_global_norm(clip), rule)


def batch_loss(
    model: T5, batch: TrainingBatch, key: Array | None = None, smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Summed cross-entropy of a batch and the number of its labels; dropout where a key is given."""
    logits = model.forward(Inputs(batch.source, batch.source_mask), batch.decoder_input, key)
    return cross_entropy(logits, batch.labels, batch.label_mask, smoothing)


@partial(jax.jit, static_argnames=('optimizer', 'smoothing'), donate_argnames='state')
def train_step(
    state: TrainState,
    batch: TrainingBatch,
    key: Array,
    *,
    optimizer: optax.GradientTransformation,
    smoothing: float = 0.0,
) -> tuple[TrainState, Array]:
    """One update.

    Args:
      state: donated.
      batch: arrays of one bucket; each width compiles once.
      key: of the run; the step's own is folded from it.

    Returns:
      The next state and the mean loss per label, in nats.
    """

    def mean_loss(model):
        total, count = batch_loss(model, batch, jax.random.fold_in(key, state.step), smoothing)
        return total / jnp.maximum(count, 1.0)

    loss, grads = jax.value_and_grad(mean_loss)(state.model)
    updates, opt_state = optimizer.update(grads.params, state.opt_state, state.model.params)
    model = state.model.replace(params=optax.apply_updates(state.model.params, updates))
    return TrainState(state.step + 1, model, opt_state), loss


evaluate_batch = jax.jit(batch_loss)


def validation_loss(model: T5, batches) -> float:
    """Mean cross-entropy per label over batches, in nats, without dropout."""
    total = count = 0.0
    for batch in batches:
        batch_total, batch_count = evaluate_batch(model, batch)
        total, count = total + float(batch_total), count + float(batch_count)
    return total / max(count, 1.0)
