"""The README's draft and rule of one's own, outside the package: every script takes the draft."""

import json
import re

import jax
import pytest
from tiny import LINES, PAIR, ROOT, runner, save_models

from spec_jax import GREEDY, DecodeConfig, conformance, generate, plain_generate
from spec_jax.drafters.model import ModelDrafter
from spec_jax.testing import TableModel, prompts

BLOCKS = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
CODE = next(code for code in BLOCKS if 'class CopySource' in code)
SMALL = {
    'generate.py': ['--config.compare=True', '--config.repeats=1'],
    'verify.py': [
        '--config.verify.rule=False',
        '--config.verify.greedy_prompts=2',
        '--config.verify.sampled_prompts=1',
        '--config.verify.samples=256',
    ],
    'measure_alpha.py': ['--config.alpha.batch_size=4'],
}

AT_ONCE = ('shapes', 'closed_form', 'greedy_identity', 'honest_counts')  # `-m slow` runs the other checks


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('own')
    save_models(folder, 'target')
    (folder / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    (folder / 'my_draft.py').write_text(CODE)
    return folder


@pytest.mark.parametrize('script', SMALL)
def test_a_script_takes_it(script, folder):
    kind = '{w}/my_draft.py:copy_source'
    draft_flag = (
        f'--config.alpha.drafts={kind}' if script == 'measure_alpha.py' else f'--config.draft.kind={kind}'
    )
    run = runner(
        script, folder, *PAIR, '--config.max_new_tokens=6', '--config.gamma=2', draft_flag, *SMALL[script]
    )
    ((code, out, err),) = run([f'--workdir={folder / script}'])
    assert code == 0, out + err
    report = json.loads((folder / script / 'report.json').read_text())
    if script == 'generate.py':
        assert report['greedy_match'] == 1.0


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in conformance.CHECKS],
)
def test_it_conforms(name):
    space = {}
    exec(CODE, space)  # what the README shows is what is tested
    result = conformance.CHECKS[name](lambda target: space['CopySource']())
    assert result.passed, result.detail


def test_the_readmes_rule_keeps_at_most_two_tokens_and_the_targets_text():
    space = {}
    exec(next(code for code in BLOCKS if 'class AtMostTwo' in code), space)
    target = TableModel.random(jax.random.key(0), 8, num_tables=8)
    config = DecodeConfig(4, 20, GREEDY, rule=space['AtMostTwo']())
    output = generate(target, ModelDrafter(target), prompts(range(8)), jax.random.key(0), config)
    plain = plain_generate(target, prompts(range(8)), jax.random.key(0), config)
    assert (output.tokens == plain.tokens).all() and (output.stats.histogram[:, 2] >= 6).all()
