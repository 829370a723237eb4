"""Trains a T5 on pairs of texts, or a draft on its target's outputs.

    python scripts/train.py --config=configs/train_demo_target.py --workdir=W \\
        --config.tokenizer=TOKENIZER --config.data.train=train.tsv --config.data.valid=valid.tsv

Stopped at any moment and started again with the same command, it goes on where it was.
"""

import pathlib
import signal

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from ml_collections import config_flags
from tqdm import tqdm
from transformers import AutoTokenizer

from spec_jax import checkpoints, data
from spec_jax.models.t5 import T5, T5Config
from spec_jax.training import train

_CONFIG = config_flags.DEFINE_config_file('config')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of checkpoints and reports.', required=True)


def main(_):
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    limits = config.data.max_source_length, config.data.max_target_length
    pairs = data.encode_pairs(tokenizer, data.read_examples(config.data.train), *limits)
    valid = {
        name: data.encode_pairs(tokenizer, data.read_examples(name), *limits) for name in config.data.valid.split(',')
    }
    model = T5.create(
        T5Config(vocab_size=len(tokenizer), **config.model), jax.random.key(config.seed), jnp.dtype(config.dtype)
    )
    schedule = train.learning_rate(
        config.peak_learning_rate, config.steps, config.warmup_steps, config.decay_fraction
    )
    optimizer = train.make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip)
    state = train.TrainState.create(model, optimizer)
    manager = checkpoints.open_manager(workdir / 'checkpoints')
    state = checkpoints.restore_latest(manager, state) or state
    start = int(state.step)
    print(f'{sum(x.size for x in jax.tree.leaves(state.model.params)):,} parameters, starting at {start}', flush=True)

    stopping = []
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stopping.append(True))
    batches = data.training_batches(pairs, config.tokens_per_batch, config.seed, start_step=start)
    key, losses = jax.random.key(config.seed + 1), []
    for step in (bar := tqdm(range(start + 1, config.steps + 1), initial=start, total=config.steps, mininterval=20)):
        state, loss = train.train_step(
            state, next(batches), key, optimizer=optimizer, smoothing=config.label_smoothing
        )
        losses.append(loss)
        if step % 50 == 0:
            mean, losses = float(jnp.mean(jnp.stack(losses))), []
            bar.set_postfix(loss=f'{mean:.3f}')
        if step % config.eval_every == 0 or step == config.steps:
            scores = {
                name: train.validation_loss(
                    state.model, data.training_batches(one, config.tokens_per_batch, 0, num_epochs=1)
                )
                for name, one in valid.items()
            }
            print(f'step {step} train {mean:.3f} ' + ' '.join(f'{n}: {s:.3f}' for n, s in scores.items()), flush=True)
        if step % config.checkpoint_every == 0 or step == config.steps or stopping:
            checkpoints.save(manager, step, state)
        if stopping:
            break
    manager.wait_until_finished()
    manager.close()


if __name__ == '__main__':
    app.run(main)
