"""scripts/generate.py over two processes, on a tiny pair: the same files as on one device."""

import json
import os
import socket
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from tiny import LINES, PAIR, ROOT, assert_refused, runner, save_models

from spec_jax.measure import runs, setup
from spec_jax.run.journal import Journal


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    """A pair of random weights, so alike at temperature 1 that about half of the guesses pass."""
    root = tmp_path_factory.mktemp('distributed')
    save_models(root, 'target', 'draft')
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    return root


def free_port():
    with socket.socket() as one:
        one.bind(('127.0.0.1', 0))
        return one.getsockname()[1]


SHARED = '--config.max_new_tokens=6', '--config.gamma=2', '--config.temperature=1.0'


def run_together(world, workdir, *extra, number=2, devices=1, timeout=900):
    """(exit code, stdout, stderr) of each of `number` processes with so many virtual devices each."""
    command = [
        sys.executable,
        ROOT / 'scripts/generate.py',
        f'--config={ROOT / "configs/demo_ende.py"}',
        f'--config.target={world / "target"}',
        f'--config.draft.path={world / "draft"}',
        f'--config.data.path={world / "lines.txt"}',
        f'--workdir={workdir}',
        *SHARED,
        *extra,
        f'--coordinator=127.0.0.1:{free_port()}',
        f'--num_processes={number}',
    ]
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
    processes = [
        subprocess.Popen(
            [*command, f'--process_id={index}'],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags},
        )
        for index in range(number)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]


def without_timings(workdir):
    report = json.loads((workdir / 'report.json').read_text())
    return {name: report[name] for name in ('tokens', 'rounds', 'accepted_histogram', 'alpha', 'lines')}


@pytest.fixture(scope='module')
def alone(world):
    run = runner('generate.py', world, *PAIR, *SHARED)
    ((code, _, err),) = run([f'--workdir={world / "alone"}', '--config.batch_size=4'])
    assert code == 0, err
    figures = without_timings(world / 'alone')
    assert 0 < figures['accepted_histogram'][0] < figures['rounds']  # some guesses pass, some do not
    return figures, (world / 'alone' / 'output.txt').read_text()


def assert_as_alone(alone, workdir):
    figures, text = alone
    assert (workdir / 'output.txt').read_text() == text
    together = without_timings(workdir)
    assert together.pop('alpha') == pytest.approx(
        figures['alpha'], abs=1e-5
    )  # sums are added up in another order
    assert together == {name: value for name, value in figures.items() if name != 'alpha'}
    assert sorted(path.name for path in workdir.iterdir()) == ['output.txt', 'report.json']


MESH = '--config.mesh.data=2', '--config.mesh.model=2'


def test_two_processes_of_two_devices_write_what_one_does(world, alone):
    """Rows of a batch lie in different processes here, and parts of each weight on different devices of one."""
    first, second = run_together(world, world / 'two', *MESH, '--config.batch_size=3', devices=2)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert_as_alone(alone, world / 'two')
    assert f'all {len(LINES)} lines' in first[1] and 'batch/s' in first[2]
    assert 'lines' not in second[1] and 'batch/s' not in second[2]  # except Gloo's own messages
    assert json.loads((world / 'two' / 'report.json').read_text())['device'] == 'cpu: cpu x 4'


@pytest.mark.slow
def test_weights_over_processes_and_a_run_that_was_stopped(world, alone):
    """A line of the journal, which the first process reads, is believed by both and not decoded again."""
    workdir = world / 'resumed'
    flags = '--config.mesh.model=2', '--config.batch_size=1'
    for code, _, err in run_together(world, workdir, *flags):
        assert code == 0, err
    assert_as_alone(alone, workdir)

    config = json.loads((workdir / 'report.json').read_text())['config']
    one_device = ConfigDict(config | dict(mesh=dict(data=1, model=1)))
    job = setup.load(one_device, setup.settings_from(one_device))
    counts = dict(
        rounds=1, tested_at=[1, 1], accepted=2, histogram=[0, 0, 1], overlap=2.0, emitted=3, calls=[0, 0, 1]
    )
    run = dict(config=config, sources=setup.checksum(job.sources), counts=runs.STATS)
    Journal.open(workdir / 'unfinished.jsonl', run).add([1], [dict(ids=[3, 4, 5], **counts)])
    first, second = run_together(world, workdir, *flags)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert '1 lines were decoded before; going on' in first[1]
    lines, expected = (workdir / 'output.txt').read_text().splitlines(), alone[1].splitlines()
    assert lines == [expected[0], 'a b c', *expected[2:]] and expected[1] != 'a b c'


@pytest.mark.slow
@pytest.mark.parametrize('extra', [['--config.gamma=auto'], ['--config.compare=True', '--config.repeats=1']])
def test_what_is_timed_leads_all_processes_the_same_way(world, extra):
    workdir = world / f'timed{len(extra)}'
    flags = '--config.mesh.data=2', '--config.temperature=0.0', *extra
    for code, _, err in run_together(world, workdir, *flags):
        assert code == 0, err
    report = json.loads((workdir / 'report.json').read_text())
    assert report['lines'] == len(LINES) and report['greedy_match'] in (None, 1.0)


@pytest.mark.slow
def test_what_fails_in_the_first_process_ends_all(world):
    (world / 'file').write_text('')
    results = run_together(world, world / 'file' / 'inside', '--config.mesh.data=2')
    assert [code for code, _, _ in results] == [1, 1]
    assert all('error: ' in err and 'file' in err for _, _, err in results)


BAD = {
    'other devices': (
        ['--config.mesh.data=3'],
        'data x model to divide 1, the number of devices; got 3 x 1 = 3',
    ),
    'no mesh': (['--config.mesh.model=0'], 'mesh.model: expected an integer >= 1, got 0'),
    'no port': (['--coordinator=here'], "expected HOST:PORT of the first process, or auto; got 'here'"),
    'no number': (
        ['--coordinator=127.0.0.1:1'],
        'process_id: expected a number from 0 to below num_processes',
    ),
    'no coordinator': (['--num_processes=2'], 'expected --coordinator=HOST:PORT with them; got none'),
}


def test_bad_meshes_and_processes_get_one_line(world):
    assert_refused(runner('generate.py', world, *PAIR), world, BAD)
