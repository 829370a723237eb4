"""scripts/benchmark.py as its user sees it, on a tiny pair of random weights."""

import json

import pytest
from tiny import LINES, PAIR, assert_refused, runner, save_models

from spec_jax.run.report import KEYS


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('benchmark')
    save_models(root, 'target', 'draft')
    (root / 'lines.tsv').write_text(''.join(f'{line}\t{line}\n' for line in LINES))
    return root


@pytest.fixture(scope='module')
def run(world):
    few = [
        '--config.data.path={w}/lines.tsv',
        '--config.benchmark.drafts=model,prompt_lookup',
        '--config.benchmark.gammas=2',
        '--config.benchmark.batch_sizes=2',
        '--config.max_new_tokens=8',
        '--config.gamma=2',
        '--config.repeats=1',
    ]
    return runner('benchmark.py', world, *PAIR, *few)


@pytest.fixture(scope='module')
def swept(run, world):
    """The folder that a sweep leaves, and what it prints."""
    ((code, out, err),) = run([f'--workdir={world / "done"}'])
    assert code == 0, err
    return world / 'done', out


def test_a_sweep(swept, world):
    folder, out = swept
    report = json.loads((folder / 'report.json').read_text())
    assert list(report)[: len(KEYS)] == list(KEYS)
    cells = [
        tuple(cell[key] for key in ('draft', 'temperature', 'gamma', 'batch_size'))
        for cell in report['cells']
    ]
    assert cells == [
        ('model', 0, 2, 1),
        ('model', 1, 2, 1),
        ('prompt_lookup', 0, 2, 1),
        ('prompt_lookup', 1, 2, 1),
        ('model', 0, 2, 2),
    ]
    assert report['base'] == dict(draft='model', temperature=0, gamma=2, batch_size=1)
    assert report['alpha'] == report['cells'][0]['alpha'] and report['greedy_match'] == 1.0
    greedy = [cell for cell in report['cells'] if cell['temperature'] == 0]
    assert len({cell['tokens'] for cell in greedy}) == 1
    for cell in greedy:
        assert cell['greedy_match'] == 1.0 and cell['quality']['plain'] == cell['quality']['speculative']
        cost, guessed = cell['cost_of_calls'], cell['guessed']
        assert cost == pytest.approx(cell['cost_of_rows']) or (guessed < 1 and cell['batch_size'] == 1)
        assert cell['attainable_speedup'] == pytest.approx(cell['tokens_per_call'] / (2 * cell['c'] + cost))
        assert guessed == 1 or cell['draft'] == 'prompt_lookup'
    assert report['cells'][0]['c_hat'] == 1 and report['cells'][2]['c_hat'] is None
    assert set(report['paper']) == {'EnDe'}

    pictures = ['accepted.png', 'alpha.png', 'batch_size.png', 'gamma.png']
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*pictures, 'cells.jsonl', 'report.json', 'report.md']
    )
    assert all((folder / name).read_bytes().startswith(b'\x89PNG') for name in pictures)
    text = (folder / 'report.md').read_text()
    for statement in (report['measured_on']['weights'], *report['conclusions']):
        assert statement in text and statement in out
    assert 'On this machine speculation pays' in out and str(world / 'target') in out
    assert "As the paper's Table 2" in text and '0.75 / 0.8 / 0.82' in text


def test_a_sweep_goes_on_where_it_was(swept, run, world):
    """The same again measures nothing; cut short, the missing cell; with a longer list, the new cells."""
    folder, _ = swept
    here, first = f'--workdir={folder}', (folder / 'report.json').read_text()
    report = json.loads(first)
    cut = world / 'cut'
    cut.mkdir()
    lines = (folder / 'cells.jsonl').read_text().splitlines(keepends=True)
    (cut / 'cells.jsonl').write_text(''.join(lines[:-1]) + lines[-1][:40])
    more = '--config.benchmark.gammas=2,3'
    same, rest, grown = run([here], [f'--workdir={cut}'], [f'--workdir={cut}', more])
    assert same[0] == rest[0] == grown[0] == 0, (same, rest, grown)
    assert '5 cells, 5 of them measured before' in same[1] and (folder / 'report.json').read_text() == first
    assert '5 cells, 4 of them measured before' in rest[1] and '1/1 model, T = 0, gamma = 2, batch' in rest[2]
    assert '7 cells, 5 of them measured before' in grown[1]
    after = json.loads((cut / 'report.json').read_text())['cells']
    kept = {(cell['temperature'], cell['gamma'], cell['draft'], cell['batch_size']): cell for cell in after}
    for cell in report['cells'][:-1]:
        assert kept[cell['temperature'], cell['gamma'], cell['draft'], cell['batch_size']] == cell
    assert [cell['gamma'] for cell in after].count(3) == 2

    # Figures of other lines do not mix with these.
    ((code, _, err),) = run([here, '--config.data.limit=2'])
    assert code == 1 and 'another data, sources' in err


BAD = {
    'no number': (['--config.benchmark.gammas=2,x'], 'benchmark.gammas: expected integers'),
    'gamma': (['--config.benchmark.gammas=2,40'], 'gammas from 1 to 16, got 40'),
    'plain decoding': (['--config.gamma=0'], 'gammas from 1 to 16, got 0'),
    'batch size': (['--config.benchmark.batch_sizes=0'], 'batch sizes of 1 or more'),
    'temperature': (['--config.benchmark.temperatures=-1'], 'temperature'),
    'no draft among drafts': (['--config.benchmark.drafts=model,none'], "got 'none'"),
    'unknown draft': (['--config.benchmark.drafts=magic'], "got 'magic'"),
    'lenience': (['--config.lenience=0.5'], 'lenience: expected 1, got 0.5'),
    'metric': (['--config.benchmark.metric=meteor'], "got 'meteor'"),
    'task': (['--config.benchmark.task=EnFr'], "got 'EnFr'"),
    'lines': (['--config.benchmark.lines=0'], 'benchmark.lines: expected an integer >= 1'),
    'missing input': (['--config.data.path={w}/none.txt'], 'none.txt'),
}


def test_bad_input_gets_one_line_and_leaves_nothing(run, world):
    assert_refused(run, world, BAD)
