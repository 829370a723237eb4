"""Teacher forcing with Optax: state in, state out.

All inputs of a step besides the state follow from its number: the data order, the dropout masks and the learning
rate. A run that is stopped and started again therefore continues as an uninterrupted one.
"""

from __future__ import annotations

from functools import cache, partial

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from spec_jax.models.t5 import T5
from spec_jax.training.batches import TrainingBatch
from spec_jax.training.losses import cross_entropy, distillation
from spec_jax.types import Inputs


@flax.struct.dataclass
class TrainState:
    """The state that a run carries from step to step.

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


@cache  # the same object for the same arguments, and so for `make_optimizer`
def learning_rate(peak: float, steps: int, warmup: int, decay_fraction: float) -> optax.Schedule:
    """Linear warm-up, a plateau, and a linear decay to zero over the last `decay_fraction` of the run.

    A run that is stopped on the plateau can be resumed with a smaller or larger number of steps.
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


@cache  # the same object for the same arguments: `train_step` is compiled once for it
def make_optimizer(
    name: str, schedule: optax.Schedule, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW, Adafactor or scaled Adam under a schedule, with gradients clipped to a global norm.

    Scaled Adam takes steps in proportion to each parameter's RMS, as Adafactor does. From T5's initialisation,
    whose standard deviations go from 0.006 (queries) to 1 (embeddings), no single absolute rate learns well.

    Raises:
      ValueError: for any other name.
    """
    if name == 'adamw':
        rule = optax.adamw(schedule, b2=0.98, eps=1e-9, weight_decay=weight_decay)
    elif name == 'adafactor':
        rule = optax.adafactor(
            schedule, multiply_by_parameter_scale=True, weight_decay_rate=weight_decay or None
        )
    elif name == 'scaled_adam':
        rule = optax.chain(
            optax.scale_by_adam(b2=0.98),
            optax.scale_by_param_block_rms(),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
    else:
        raise ValueError(f"optimizer: expected 'adamw', 'adafactor' or 'scaled_adam', got {name!r}")
    return optax.chain(optax.clip_by_global_norm(clip), rule)


def batch_loss(
    model: T5, batch: TrainingBatch, key: Array | None = None, smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Summed cross-entropy of a batch and the number of its labels; dropout where a key is given."""
    logits = model.forward(Inputs(batch.source, batch.source_mask), batch.decoder_input, key)
    return cross_entropy(logits, batch.labels, batch.label_mask, smoothing)


def distilled_loss(
    model: T5, teacher: T5, batch: TrainingBatch, key: Array, smoothing: float, weight: float
) -> tuple[Array, Array]:
    """As `batch_loss`, with the share `weight` measured against the teacher's distribution, not the label."""
    inputs = Inputs(batch.source, batch.source_mask)
    logits = model.forward(inputs, batch.decoder_input, key)
    teacher_logits = teacher.forward(inputs, batch.decoder_input)
    return distillation(logits, teacher_logits, batch.labels, batch.label_mask, weight, smoothing)


@partial(jax.jit, static_argnames=('optimizer', 'smoothing', 'distill_weight'), donate_argnames='state')
def train_step(
    state: TrainState,
    batch: TrainingBatch,
    key: Array,
    teacher: T5 | None = None,
    *,
    optimizer: optax.GradientTransformation,
    smoothing: float = 0.0,
    distill_weight: float = 0.0,
) -> tuple[TrainState, Array]:
    """One update.

    Args:
      state: donated.
      batch: arrays of one bucket; each width compiles once.
      key: of the run; the step's key is folded from it.
      teacher: where given, `distill_weight` of the loss is measured against its distribution.

    Returns:
      The next state and the mean loss per label, in nats.
    """
    step_key = jax.random.fold_in(key, state.step)

    def mean_loss(model):
        if teacher is None:
            total, count = batch_loss(model, batch, step_key, smoothing)
        else:
            total, count = distilled_loss(model, teacher, batch, step_key, smoothing, distill_weight)
        return total / jnp.maximum(count, 1.0)

    loss, grads = jax.value_and_grad(mean_loss)(state.model)
    updates, opt_state = optimizer.update(grads.params, state.opt_state, state.model.params)
    model = state.model.replace(params=optax.apply_updates(state.model.params, updates))
    return TrainState(state.step + 1, model, opt_state), loss
