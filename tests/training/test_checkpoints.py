import resource
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.training import checkpoints

# After a failure Orbax leaves coroutines and threads running, which raise warnings when they end later.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def make_state(seed=0):
    numbers = np.random.default_rng(seed).normal(size=(300, 400)).astype(np.float32)
    return {
        'big': jnp.asarray(numbers),
        'half': jnp.asarray(numbers[:2], jnp.bfloat16),
        'step': jnp.int32(seed),
    }


def assert_state(state, seed):
    expected = make_state(seed)
    assert state.keys() == expected.keys()
    for name in expected:
        assert state[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(state[name], expected[name])


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints, of which the last two stay."""
    manager = checkpoints.open_manager(tmp_path / 'new' / 'checkpoints')
    for step in (1, 2, 3):
        checkpoints.save(manager, step, make_state(step))
    manager.close()
    return tmp_path / 'new' / 'checkpoints'


def test_the_newest_checkpoint_comes_back_exactly(folder):
    manager = checkpoints.open_manager(folder)
    assert sorted(manager.all_steps()) == [2, 3]
    assert_state(checkpoints.restore_latest(manager, make_state()), 3)
    checkpoints.save(manager, 3, make_state(7))  # is there already: nothing happens
    assert_state(checkpoints.restore_latest(manager, make_state()), 3)


def test_none_where_there_is_no_checkpoint(tmp_path):
    assert checkpoints.restore_latest(checkpoints.open_manager(tmp_path), make_state()) is None
    with pytest.raises(FileNotFoundError, match='expected a folder of checkpoints'):
        checkpoints.open_to_read(tmp_path / 'nowhere')


def test_a_reader_leaves_a_writers_unfinished_files_alone(folder):
    unfinished = folder / '4.orbax-checkpoint-tmp'
    unfinished.mkdir()
    assert_state(checkpoints.restore_latest(checkpoints.open_to_read(folder), make_state()), 3)
    assert unfinished.exists()
    assert_state(checkpoints.restore_latest(checkpoints.open_manager(folder), make_state()), 3)
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ('other', 'message'),
    [
        (
            make_state() | {'big': jnp.zeros((300, 401))},
            r"\['big'\] as float32\[300, 401\], got float32\[300, 400\]",
        ),
        (make_state() | {'half': jnp.zeros((2, 400))}, r"\['half'\] as float32\[2, 400\], got bfloat16"),
        (make_state() | {'more': jnp.zeros(1)}, 'expected 4 arrays of this configuration, got 3'),
    ],
    ids=['shape', 'dtype', 'number'],
)
def test_another_configurations_checkpoint(folder, other, message):
    with pytest.raises(ValueError, match=f'3: expected {message}'.replace('expected expected', 'expected')):
        checkpoints.restore_latest(checkpoints.open_manager(folder), other)


@pytest.mark.parametrize('damage', ['truncated', 'missing'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(folder, damage):
    largest = max((folder / '3').rglob('*'), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000]) if damage == 'truncated' else largest.unlink()
    with pytest.raises(
        ValueError, match='3: expected a whole checkpoint, got .*remove this folder'
    ) as caught:
        checkpoints.restore_latest(checkpoints.open_manager(folder), make_state())
    assert len(str(caught.value).splitlines()) == 1
    shutil.rmtree(folder / '3')
    assert_state(checkpoints.restore_latest(checkpoints.open_manager(folder), make_state()), 2)


def test_a_full_disk_is_one_error_and_costs_no_older_checkpoint(folder):
    manager = checkpoints.open_manager(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match='expected to save step 4, got .*File too large') as caught:
            checkpoints.save(manager, 4, make_state(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(str(caught.value).splitlines()) == 1
    assert_state(checkpoints.restore_latest(manager, make_state()), 3)
    manager.close()
    manager = checkpoints.open_manager(folder)
    assert sorted(path.name for path in folder.iterdir()) == ['2', '3']
    checkpoints.save(manager, 4, make_state(4))
    assert_state(checkpoints.restore_latest(manager, make_state()), 4)
