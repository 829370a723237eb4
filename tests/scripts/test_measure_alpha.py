"""scripts/measure_alpha.py as its user sees it, on a tiny pair of random weights."""

import json

import pytest
from tiny import PAIR, assert_refused, runner, save_models

from spec_jax.run.report import KEYS

LINES = ['a b c', 'd', '', 'e f g h i j', 'b b b b b b b b b b b b', 'k l', 'm a']
SAYS_A = '''
import flax.struct
import jax.numpy as jnp
from spec_jax import Draft, DraftShape

@flax.struct.dataclass
class SaysA:
    """Guesses token {token} at every second place."""

    def shape(self, gamma):
        return DraftShape(gamma, gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        return jnp.zeros(())

    def propose(self, state, round):
        length = round.context.length
        tokens = jnp.full((length.shape[0], round.gamma), {token})
        return Draft(tokens, None, round.gamma * (length % 2)), state

    def update(self, state, outcome):
        return state

def build(config, target, tokenizer):
    return SaysA()
'''


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('measure_alpha')
    save_models(root, 'target', 'draft')
    (root / 'own.py').write_text(SAYS_A.format(token=3))
    (root / 'bad.py').write_text(SAYS_A.format(token=99))
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    (root / 'blank.txt').write_text('\n\n')
    return root


@pytest.fixture(scope='module')
def run(world):
    few = '--config.max_new_tokens=6', '--config.alpha.batch_size=4', '--config.alpha.drafts=model'
    return runner('measure_alpha.py', world, *PAIR, *few)


def report_of(folder):
    report = json.loads((folder / 'report.json').read_text())
    return report, {(row['draft'], row['temperature']): row for row in report['drafts']}


def test_every_draft_gets_a_row_at_every_temperature(run, world):
    custom, same = f'{world}/own.py:build', f'model={world}/target'
    folder = world / 'whole'
    ((code, out, err),) = run(['--workdir={w}/whole', f'--config.alpha.drafts=model,{same},{custom}'])
    assert code == 0, err
    report, rows = report_of(folder)
    assert list(report)[: len(KEYS)] == list(KEYS)
    assert list(rows) == [(draft, T) for T in (0, 1) for draft in ('model', same, custom)]
    for T in (0, 1):
        assert rows[same, T]['alpha'] == pytest.approx(1, abs=1e-5)
        assert rows[same, T]['expected_tokens'] == pytest.approx({'3': 4, '5': 6, '7': 8}, abs=1e-3)
        assert 0 <= rows['model', T]['alpha'] < 1
        assert len({rows[draft, T]['tokens'] for draft in ('model', same, custom)}) == 1
        assert rows[custom, T]['texts'] == 6 and 0.4 < rows[custom, T]['coverage'] < 0.7
        assert rows[custom, T]['low'] <= rows[custom, T]['alpha'] <= rows[custom, T]['high']
        assert rows[custom, T]['alpha'] < rows[custom, T]['coverage']
    assert report['tokens'] == rows[custom, 0]['tokens'] + rows[custom, 1]['tokens']
    lossy = report['LOSSY_lenience']
    assert [(row['draft'], row['temperature']) for row in lossy] == [(d, 1) for d in ('model', same, custom)]
    alphas = list(lossy[0]['lenience'].values())
    assert alphas == sorted(alphas) and alphas[0] == rows['model', 1]['alpha'] < alphas[-1]

    text = (folder / 'report.md').read_text()
    assert 'LOSSY' in out and '## LOSSY: lenience' in text and 'l = 0.5 LOSSY' in text
    assert str(world / 'target') in text and 'lines.txt, 7 lines' in text and 'small .75, base .80' in text
    assert f'{rows["model", 1]["alpha"]:.3f}' in text and f'{rows["model", 1]["alpha"]:.3f}' in out
    assert f'{rows[custom, 0]["tokens"]} in 6 texts at T = 0' in text and 'float32' in text
    assert (folder / 'alpha.png').read_bytes().startswith(b'\x89PNG')
    assert sorted(path.name for path in folder.iterdir()) == ['alpha.png', 'report.json', 'report.md']


def test_a_stopped_run_goes_on_with_the_lines_it_had(run, world):
    """The first run ends at a draft that fails. Of the model's six lines two are then lost, and two changed, so
    that it shows whether the four are taken from the journal."""
    folder, once = world / 'stopped', '--config.alpha.temperatures=1'
    ((code, _, err),) = run(['--workdir={w}/stopped', once, '--config.alpha.drafts=model,{w}/bad.py:build'])
    assert code == 1 and 'tokens of the vocabulary from the draft' in err
    journals = [path.read_text().splitlines() for path in folder.iterdir()]
    assert sorted('draft' in json.loads(head)['run'] for head, *_ in journals) == [False, True]
    for path in folder.iterdir():
        head, *lines = path.read_text().splitlines()
        assert len(lines) == 6
        if 'draft' in json.loads(head)['run']:
            records = [json.loads(line) for line in lines]
            for record in records[:2]:
                record |= dict(proposed=0, overlap=[0.0] * 4)
            path.write_text('\n'.join([head, *map(json.dumps, records[:4])]) + '\n')
    ((code, _, err),) = run(['--workdir={w}/stopped', once])
    assert code == 0, err
    report, rows = report_of(folder)
    tokens = sum(record['tokens'] for record in records)
    expected = sum(record['overlap'][0] for record in records) / tokens
    assert report['alpha'] == rows['model', 1]['alpha'] == pytest.approx(expected, abs=1e-6)
    assert rows['model', 1]['tokens'] == tokens
    assert rows['model', 1]['coverage'] == sum(record['tokens'] for record in records[2:]) / tokens
    assert not list(folder.glob('unfinished*'))


BAD = {
    'unknown draft': (['--config.alpha.drafts=model,magic'], "got 'magic'"),
    'no draft': (
        ['--config.alpha.drafts=model,none'],
        "alpha.drafts: expected drafts, separated by commas; got 'none'",
    ),
    'empty draft': (['--config.alpha.drafts=model,'], "got ''"),
    'path of none': (['--config.alpha.drafts=prompt_lookup=x'], 'expected =PATH after one of model'),
    'missing file': (['--config.alpha.drafts={w}/none.py:build'], 'expected FILE.py:NAME with a Python file'),
    'missing model': (['--config.alpha.drafts=model={w}/nowhere'], 'nowhere'),
    'temperatures': (
        ['--config.alpha.temperatures=0,warm'],
        'alpha.temperatures: expected numbers, separated by',
    ),
    'temperature': (['--config.alpha.temperatures=0,-1'], 'temperature: expected a number >= 0, got -1'),
    'tokens': (['--config.alpha.tokens=-1'], 'alpha.tokens: expected an integer >= 0, got -1'),
    'batch size': (['--config.alpha.batch_size=0'], 'alpha.batch_size: expected an integer >= 1, got 0'),
    'lenience': (['--config.lenience=0.5'], 'lenience: expected 1, got 0.5'),
    'no text': (['--config.data.path={w}/blank.txt'], 'expected a line with text in it'),
    'missing input': (['--config.data.path={w}/none.txt'], 'none.txt'),
    'missing target': (['--config.target={w}/none'], 'no'),
}


def test_bad_input_gets_one_line_and_leaves_nothing(run, world):
    assert_refused(run, world, BAD)
