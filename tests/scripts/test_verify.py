"""scripts/verify.py on a tiny pair: what is exact passes, and each planted fault fails its row."""

import json
import re

import pytest
from tiny import HERE, assert_refused, runner, save_models

from spec_jax.run.report import KEYS

RULE = ['--config.verify.greedy_prompts=0', '--config.verify.samples=0']
LOOP = ['--config.verify.rule=False']
GREEDY = [*LOOP, '--config.verify.samples=0']
SAMPLED = [*LOOP, '--config.verify.greedy_prompts=0']

# For each fault what is run, and a row that must fail.
CAUGHT = {
    'epsilon in the residual': (RULE, 'what a round emits; draft that samples'),
    'accepts at equality': (RULE, 'p = 0 never passes'),
    'accepts too easily': (RULE, 'what a round emits; draft that samples'),
    'one number for all tests': (RULE, 'each random number decides one thing'),
    'bonus from the last residual': (RULE, 'what a round emits; q one-hot'),
    'stale slot in the target cache': (GREEDY, 'greedy tokens re-scored'),
    'greedy, any token passes': (GREEDY, 'greedy tokens re-scored'),
    'tokens after EOS': (SAMPLED, 'ends at EOS'),
    'a length that depends on a withheld token': (SAMPLED, 'draft tokens against the q'),
    'q of other logits': (SAMPLED, 'draft tokens against the q'),
    'q at another temperature': (SAMPLED, 'draft tokens against the q'),
    'q does not sum to 1': (SAMPLED, 'q sums to 1'),
    'draft off the cache by one': (SAMPLED, 'alpha where the draft is the target'),
    'batch minimum': (SAMPLED, 'alone and among other neighbours'),
    'keys shared between rows': (SAMPLED, 'jointly, speculative against plain'),
    'counts what was not tested': (SAMPLED, 'counts as traced'),
}

# One of each tier; `-m slow` runs the others.
AT_ONCE = [
    'epsilon in the residual',
    'stale slot in the target cache',
    'a length that depends on a withheld token',
]

DRAFT = '''
import dataclasses
import flax.struct, jax, jax.numpy as jnp
from spec_jax import Draft, DraftShape

@flax.struct.dataclass
class Fixed:
    """Proposes one token for any text; with `outside` one that is not in the vocabulary."""
    token: jax.Array

    def shape(self, gamma):
        return DraftShape(gamma, gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        return ()

    def propose(self, state, round):
        length = jnp.full_like(round.context.length, round.gamma)
        return Draft(jnp.broadcast_to(self.token, (len(length), round.gamma)), None, length), state

    def update(self, state, outcome):
        return state

def fixed(config, target, tokenizer):
    return Fixed(jnp.int32(5))

def outside(config, target, tokenizer):
    return Fixed(jnp.int32(99))
'''

TINY = """
from configs import demo_ende

def get_config():
    config = demo_ende.get_config()
    config.target, config.draft.path, config.data.path = '{w}/target', '{w}/draft', '{w}/lines.txt'
    config.max_new_tokens, config.gamma = 8, 2
    config.verify = dict(rule=True, greedy_prompts=4, sampled_prompts=2, samples=768, tokens=6, rows=64)
    return config
"""


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('verify')
    save_models(root, 'target', 'draft')
    (root / 'lines.txt').write_text('a b c\nd\n\ne f g h i j\nb b b b b b b b\n')
    (root / 'blank.txt').write_text('\n\n')
    (root / 'own.py').write_text(DRAFT)
    (root / 'tiny.py').write_text(TINY.format(w=root))
    (root / 'other.py').write_text(TINY.format(w=root).replace('config.verify = ', 'del config.verify; '))
    (root / 'file').write_text('')
    return root


@pytest.fixture(scope='module')
def run(world):
    return runner(HERE / 'planted.py', world, '--config={w}/tiny.py')


def report_of(folder):
    return json.loads((folder / 'report.json').read_text())


def failed(folder):
    return [check['tested'] for check in report_of(folder)['checks'] if check['passed'] is False]


def test_what_is_exact_passes(run, world):
    ways = {
        'model': LOOP,
        'own': ['--config.draft.kind={w}/own.py:fixed', '--config.temperature=0.7', *SAMPLED],
    }
    results = run(*(['--workdir={w}/' + name, *extra] for name, extra in ways.items()))
    results += run(['--workdir={w}/none', '--config.draft.kind=none'], optimised=True)
    for name, (code, out, err) in zip([*ways, 'none'], results, strict=True):
        assert code == 0, (name, out, err)
        report = report_of(world / name)
        assert list(report)[: len(KEYS)] == list(KEYS)
        assert report['exact'] and not failed(world / name) and 'exact, as far as can be seen' in out
    checks = report_of(world / 'model')['checks']
    assert len(checks) == 12 and all(check['passed'] and check['finds'] for check in checks)
    assert report_of(world / 'model')['greedy_match'] == 1
    assert 'the loop was not run' in results[2][1] and len(report_of(world / 'none')['checks']) == 4
    by_subject = {check['tested']: check for check in report_of(world / 'own')['checks']}
    assert by_subject['draft tokens against the q that the draft reports']['passed'] is None


def test_each_planted_fault_has_a_row():
    faults = re.search(r'^FAULTS = \{.*?^\}', (HERE / 'planted.py').read_text(), re.M | re.S)[0]
    assert set(re.findall(r"^    '(.*?)':", faults, re.M)) == CAUGHT.keys()


@pytest.mark.parametrize(
    'names', [AT_ONCE, pytest.param([name for name in CAUGHT if name not in AT_ONCE], marks=pytest.mark.slow)]
)
def test_each_planted_fault_is_caught_by_its_row(names, run, world):
    for name in names:
        extra, row = CAUGHT[name]
        line = [f'--workdir={world / name}', f'--fault={name}', *extra]
        ((code, out, err),) = run(line, optimised=extra is RULE)  # which is millions of draws
        assert code == 1, (name, out, err)
        assert any(row in tested for tested in failed(world / name)), (name, failed(world / name))
        assert 'NOT EXACT' in out and 'FAIL' in out and not report_of(world / name)['exact'], name


@pytest.mark.slow
def test_lenience_is_shown_to_deviate(run, world):
    ((code, out, _),) = run(['--workdir={w}/lossy', '--config.lenience=0.5', *RULE], optimised=True)
    assert code == 1 and out.startswith('LOSSY (lenience 0.5)') and 'NOT EXACT' in out
    assert report_of(world / 'lossy')['lossy'] == 'lenience 0.5'
    assert any('what a round emits' in tested for tested in failed(world / 'lossy'))


BAD = {
    'no text': (['--config.data.path={w}/blank.txt'], 'expected a line with text in it'),
    'no file': (['--config.data.path={w}/none.txt'], 'none.txt'),
    'gamma 0': (['--config.gamma=0'], 'gamma: expected 1 or more to verify a draft, got 0'),
    'rows': (['--config.verify.rows=1'], 'verify.rows: expected an integer >= 2, got 1'),
    'few rows': (['--config.verify.sampled_prompts=99'], 'verify.rows: expected at least'),
    'samples': (['--config.verify.samples=-1'], 'verify.samples: expected an integer >= 0, got -1'),
    'dtype': (['--config.dtype=float16'], "dtype: expected float32 or bfloat16, got 'float16'"),
    'nothing': ([*SAMPLED, '--config.verify.samples=0'], 'all of them are left out'),
    'other config': (['--config={w}/other.py'], 'section `verify`'),
    'unknown draft': (['--config.draft.kind=magic'], "got 'magic'"),
    'token outside': (
        ['--config.draft.kind={w}/own.py:outside', *GREEDY],
        'expected tokens of the vocabulary',
    ),
    'unwritable': (['--workdir={w}/file/inside'], 'file'),
}


def test_bad_input_gets_one_line(run, world):
    assert_refused(run, world, BAD)
