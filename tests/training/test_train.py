import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.models.t5_weights import load_t5
from spec_jax.text.batches import pad_rows
from spec_jax.text.tokenizers import load_tokenizer
from spec_jax.training import evaluation, loop, losses, train
from spec_jax.training.batches import TrainingBatch, training_batches
from spec_jax.training.history import History
from spec_jax.types import Inputs


class StopAfter:
    """Called once a step and once a validation batch; True (stop) from the n-th call on."""

    def __init__(self, times):
        self.times = times

    def __call__(self):
        self.times -= 1
        return self.times <= 0


def assert_same(tree, other):
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def final_state(config, workdir):
    manager = loop.checkpoints.open_to_read(workdir / 'checkpoints')
    return loop.Setup.create(config).newest_state(manager)


# Losses and schedule.


def test_the_schedule_warms_up_stays_and_decays():
    schedule = train.learning_rate(peak=2.0, steps=100, warmup=10, decay_fraction=0.2)
    rates = [float(schedule(step)) for step in (0, 5, 10, 50, 80, 90, 100, 110)]
    np.testing.assert_allclose(rates, [0.0, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0], atol=1e-6)


def test_cross_entropy_of_known_distributions():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 1.0, 1.0]]]))  # [1, 3, 3]
    labels, mask = jnp.array([[1, 2, 0]]), jnp.array([[True, True, False]])
    total, count = losses.cross_entropy(logits, labels, mask)
    assert count == 2
    np.testing.assert_allclose(total, -math.log(0.25) - math.log(0.7), rtol=1e-6)


def test_smoothing_moves_mass_to_the_uniform_distribution():
    probs = np.array([0.5, 0.25, 0.25])
    one = jnp.log(jnp.array(probs))[None, None]
    total, _ = losses.cross_entropy(one + 3.0, jnp.array([[0]]), jnp.array([[True]]), smoothing=0.3)
    expected = -0.7 * math.log(0.5) - 0.3 * np.log(probs).mean()
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_distillation_is_cross_entropy_under_the_teacher():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    both = jnp.log(jnp.array([[q, q]])) - 1.0, jnp.log(jnp.array([[p, q]])) + 2.0  # [1, 2, 3]
    labels = jnp.zeros((1, 2), jnp.int32)
    total, count = losses.distillation(*both, labels, jnp.array([[True, False]]))
    assert count == 1
    np.testing.assert_allclose(total, -(p * np.log(q)).sum(), rtol=1e-6)
    every = jnp.array([[True, True]])
    gradient = jax.grad(lambda logits: losses.distillation(logits, both[1], labels, every)[0])
    np.testing.assert_allclose(gradient(both[0])[0, 0], q - p, atol=1e-6)
    np.testing.assert_allclose(gradient(both[0])[0, 1], 0, atol=1e-6)


def test_a_distilled_loss_is_part_labels_and_part_teacher():
    student, teacher = jax.random.normal(jax.random.key(0), (2, 1, 2, 3))  # [B, T, V] each
    student, teacher = (SimpleNamespace(forward=lambda *_, out=out: out) for out in (student, teacher))
    labels, mask = jnp.array([[2, 0]]), jnp.array([[True, True]])
    batch = TrainingBatch(None, None, None, None, labels, mask)
    total, count = train.distilled_loss(student, teacher, batch, None, smoothing=0.1, weight=0.25)
    hard, _ = losses.cross_entropy(student.forward(), labels, mask, 0.1)
    soft, _ = losses.distillation(student.forward(), teacher.forward(), labels, mask)
    assert count == 2
    np.testing.assert_allclose(total, 0.75 * hard + 0.25 * soft, rtol=1e-6)


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="expected 'adamw', 'adafactor' or 'scaled_adam', got 'sgd'"):
        train.make_optimizer('sgd', optax.constant_schedule(1.0), 0.0, 1.0)


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'scaled_adam'])
def test_optimizers_go_downhill_with_clipped_gradients(name):
    optimizer = train.make_optimizer(name, optax.constant_schedule(0.1), 0.0, 1e-3)
    params = {'w': jnp.ones((2, 3))}
    updates, _ = jax.jit(optimizer.update)({'w': jnp.full((2, 3), 1e6)}, optimizer.init(params), params)
    assert (updates['w'] < 0).all() and (updates['w'] > -1).all()


# Evaluation.


def test_label_padding_and_filler_rows_do_not_count(finished, config):
    model = load_t5(finished / 'export')
    pairs = evaluation.read_pairs(config, load_tokenizer(config.tokenizer), [config.data.train])
    (narrow,) = training_batches(pairs, 64, 0, pad_id=0, start_id=0, num_epochs=1)
    source, source_mask = pad_rows([pairs.sources[row] for row in narrow.rows], 10, 11, filler=[1], pad_id=0)
    labels, label_mask = pad_rows([pairs.targets[row] for row in narrow.rows], 10, 9, pad_id=0)
    decoder_input = np.roll(labels, 1, axis=1)
    decoder_input[:, 0] = 0
    wide = TrainingBatch(narrow.rows, source, source_mask, decoder_input, labels, label_mask)
    loss = evaluation.validation_loss(model, [narrow])
    np.testing.assert_allclose(evaluation.validation_loss(model, [wide]), loss, rtol=1e-4)
    np.testing.assert_allclose(evaluation.validation_loss(model, [wide, narrow]), loss, rtol=1e-4)


def test_validation_loss_is_the_mean_log_probability_of_the_labels(finished, config):
    model = load_t5(finished / 'export')
    pairs = evaluation.read_pairs(config, load_tokenizer(config.tokenizer), [config.data.train])
    batches = list(training_batches(pairs, 24, 0, pad_id=0, start_id=0, num_epochs=1))
    assert [batch.source.shape for batch in batches] == [(3, 8)] * 3
    sources, targets = np.array(pairs.sources), np.array(pairs.targets)  # five tokens each
    shifted = np.concatenate([np.zeros((8, 1), np.int32), targets[:, :-1]], axis=1)
    logits = jax.jit(type(model).forward)(model, Inputs(sources, np.ones((8, 5), bool)), shifted)
    exponentials = np.exp(np.asarray(logits, np.float64))
    probs = exponentials / exponentials.sum(-1, keepdims=True)
    expected = -np.mean([np.log(probs[b, t, targets[b, t]]) for b in range(8) for t in range(5)])
    np.testing.assert_allclose(evaluation.validation_loss(model, batches), expected, rtol=1e-4)


def test_several_files_are_read_one_after_the_other(config, tmp_path):
    more = tmp_path / 'more.tsv'
    more.write_text('a b\tA B\na a a a a a a a a\tA\n')
    tokenizer = load_tokenizer(config.tokenizer)
    pairs = evaluation.read_pairs(config, tokenizer, [config.data.train, str(more), str(more)])
    assert len(pairs) == 10 and pairs.num_dropped == 2
    np.testing.assert_array_equal(pairs.targets[8], [11, 12, 1])
    np.testing.assert_array_equal(pairs.targets[9], [11, 12, 1])


# The run.


def test_a_tiny_model_learns_eight_pairs_by_heart(finished, config):
    report = json.loads((finished / 'report.json').read_text())
    (scores,) = report['valid'][-1]['scores'].values()
    assert scores['loss'] < 0.05
    assert scores['bleu'] == pytest.approx(100)
    assert report['train'][0]['loss'] > 0.5 > report['train'][-1]['loss']
    assert sum(row['steps'] for row in report['train']) == config.steps == report['step']
    assert [row['step'] for row in report['valid']] == [200, 300]
    assert (report['pairs'], report['pairs_left_out']) == (8, 0)


def test_the_export_loads_here_and_has_its_tokenizer(finished, config):
    model = load_t5(finished / 'export')
    assert_same(model.params, final_state(config, finished).model.params)
    assert len(load_tokenizer(str(finished / 'export'))) == model.spec.vocab_size == 19


def test_export_of_the_newest_checkpoint_alone(finished, config, tmp_path):
    (tmp_path / 'checkpoints').symlink_to(finished / 'checkpoints')
    config.export_dtype = 'bfloat16'
    folder = loop.export_latest(config, tmp_path)
    exported, trained = load_t5(folder).params, final_state(config, finished).model.params
    assert_same(exported, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), trained))


@pytest.mark.parametrize('stops', [[7, 100], [201]], ids=['in training', 'in a validation'])
def test_a_stopped_run_ends_as_one_that_was_not(finished, config, tmp_path, stops):
    steps = [loop.train_model(config, tmp_path, StopAfter(times)) for times in stops]
    assert steps == ([7, 107] if len(stops) == 2 else [200])
    assert not (tmp_path / 'export').exists()
    assert loop.train_model(config, tmp_path) == config.steps
    assert_same(final_state(config, tmp_path), final_state(config, finished))
    stopped, whole = [json.loads((path / 'report.json').read_text()) for path in (tmp_path, finished)]
    assert stopped['valid'] == whole['valid']
    assert sum(row['steps'] for row in stopped['train']) == config.steps
    means = [sum(row['steps'] * row['loss'] for row in one['train']) for one in (stopped, whole)]
    np.testing.assert_allclose(*means, atol=1e-3)


def test_what_a_killed_run_wrote_after_its_checkpoint_is_discarded(tmp_path):
    path = tmp_path / 'report.json'
    history = History.open(path, 0)
    history.add_losses(50, [jnp.float32(3.0), jnp.float32(1.0)])
    history.add_losses(100, [jnp.float32(1.0)])
    history.add_scores(100, {'valid.tsv': {'loss': 1.5}})
    history.write()
    history = History.open(path, 99)
    assert history.content['train'] == [{'step': 50, 'steps': 2, 'loss': 2.0}]
    assert not history.has_scores(100)


def test_word_level_distillation_through_the_run(finished, config, tmp_path):
    config.update(distill_from=str(finished / 'export'), distill_weight=1.0, tokenizer='')
    config.data.valid = ''
    assert loop.train_model(config, tmp_path, StopAfter(3)) == 3
    (row,) = json.loads((tmp_path / 'report.json').read_text())['train']
    assert math.isfinite(row['loss']) and row['loss'] > 1


# What users get wrong.


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('steps', 0, 'steps: expected a number of 1 or more, got 0'),
        ('optimizer', 'sgd', "optimizer: expected 'adamw', 'adafactor' or 'scaled_adam', got 'sgd'"),
        ('dtype', 'float16', "dtype: expected 'float32' or 'bfloat16', got 'float16'"),
        ('label_smoothing', 1.5, 'label_smoothing: expected a number from 0 to 1'),
        ('clip', 0.0, 'clip: expected a norm above 0'),
        ('distill_weight', 0.5, 'distill_from: expected the teacher'),
        ('tokenizer', '', 'tokenizer: expected a folder or hub id, got none'),
        ('data.train', '', 'data.train: expected files of pairs, got none'),
        ('model.activation', 'swish', 'model.activation: expected one of relu, gelu'),
        ('model.num_heads', 0, 'model.num_heads: expected 1 or more, got 0'),
        ('model.width', 7, "expected fields of T5Config, got 'width' besides"),
        ('model.vocab_size', 18, "expected the tokenizer's 19 pieces or more, got 18"),
    ],
)
def test_bad_values(config, tmp_path, key, value, message):
    with config.unlocked():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message):
        loop.train_model(config, tmp_path / 'workdir')
    assert not (tmp_path / 'workdir').exists()


def test_a_configuration_without_a_key_or_with_one_too_many(config, tmp_path):
    del config['clip']
    with pytest.raises(ValueError, match="expected the key 'clip', which is missing"):
        loop.train_model(config, tmp_path)
    config.clip, config.clipp = 1.0, 1.0
    with pytest.raises(ValueError, match="got the unknown key 'clipp'"):
        loop.train_model(config, tmp_path)


@pytest.mark.parametrize('key', ['tokenizer', 'data.train', 'data.valid', 'distill_from'])
def test_missing_files(config, tmp_path, key):
    config.update_from_flattened_dict({key: str(tmp_path / 'nowhere')})
    with pytest.raises(FileNotFoundError, match='nowhere'):
        loop.train_model(config, tmp_path / 'workdir')


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'empty file'),
        ('a b\n', 'expected a pair'),
        ('a\tb\tc\n', 'got 3 columns'),
        ('a ' * 9 + '\tb\n', 'none in 1'),
    ],
)
def test_bad_training_files(config, tmp_path, text, message):
    path = tmp_path / 'bad.tsv'
    path.write_text(text)
    config.data.train = str(path)
    with pytest.raises(ValueError, match=f'bad.tsv.*{message}'):
        loop.train_model(config, tmp_path / 'workdir')


def test_a_workdir_that_cannot_be_made(config, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(OSError, match='file'):
        loop.train_model(config, tmp_path / 'file' / 'workdir')


def test_another_models_checkpoint(finished, config):
    config.model.d_ff = 32
    with pytest.raises(
        ValueError, match=r'expected .*mlp.* as float32\[.*32.*\], got float32\[.*64.*\]; use the old'
    ):
        loop.train_model(config, finished)
    config.model.d_ff, config.model.vocab_size = 64, 24
    with pytest.raises(ValueError, match=r'embedding.* as float32\[24, 32\], got float32\[19, 32\]'):
        loop.export_latest(config, finished)


def test_fewer_steps_than_were_taken(finished, config):
    config.steps = 200
    with pytest.raises(ValueError, match='steps: expected 300 or more'):
        loop.train_model(config, finished)


def test_a_teacher_of_another_vocabulary(finished, config, tmp_path):
    config.update(distill_from=str(finished / 'export'), distill_weight=0.5)
    config.model.vocab_size = 24
    with pytest.raises(ValueError, match='vocabulary of 24 pieces, got 19'):
        loop.train_model(config, tmp_path)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    history = History.open(tmp_path / 'report.json', 0)
    with pytest.raises(FloatingPointError, match='step 2: expected a finite loss, got nan; lower'):
        history.add_losses(2, [jnp.float32(1.0), jnp.float32(jnp.nan)])


def test_a_damaged_report(finished, config, tmp_path):
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'report.json').write_text('{"train": ')
    with pytest.raises(ValueError, match='report.json: expected a report'):
        loop.train_model(config, tmp_path)
