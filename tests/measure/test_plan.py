"""The calculator against the paper's Tables 1 and 2."""

import pathlib
import subprocess
import sys
from functools import partial

import pytest

from spec_jax.measure import plan


def test_the_papers_figures():
    result = plan.plan(alpha=0.8, c=0.0, c_hat=0.0, max_gamma=5)  # Table 1
    assert [round(result['rows'][gamma]['operations'], 2) for gamma in (2, 5)] == [1.23, 1.63]
    assert [round(result['rows'][gamma]['speedup'], 2) for gamma in (2, 5)] == [2.44, 3.69]
    result = plan.plan(alpha=0.75, c=0.02, c_hat=0.0, max_gamma=10)  # Table 2's first row
    assert round(result['rows'][7]['tokens_per_call'], 2) == 3.60
    assert round(result['rows'][7]['speedup'], 2) == 3.16


def test_plain_decoding_is_the_first_row():
    row = plan.plan(alpha=0.5, c=0.1, c_hat=0.1, max_gamma=1)['rows'][0]
    assert row == dict(gamma=0, tokens_per_call=1.0, speedup=1.0, operations=1.0)


def test_the_best_gamma_by_hand():
    # (1 - .5^(g + 1)) / .5 / (.2 g + 1): 1, 1.25, 1.25, 1.172: the shorter of two equals
    result = plan.plan(alpha=0.5, c=0.2, c_hat=0.2, max_gamma=3)
    assert result['best_gamma'] == 1 and result['guaranteed'] == pytest.approx(1.25)
    assert 'gamma = 1 is best: 1.50 tokens per target call, 1.25 times' in plan.sentence(result, 0.5, 0.2)
    assert plan.table(result).splitlines()[3].split()[-2] == 'best'


def test_where_no_gamma_gains_the_sentence_states_it():
    result = plan.plan(alpha=0.1, c=0.2, c_hat=0.2, max_gamma=4)
    assert result['best_gamma'] == 0 and result['guaranteed'] is None
    assert 'No draft length gains anything: alpha = 0.1 is not above c = 0.2' in plan.sentence(
        result, 0.1, 0.2
    )


def test_a_best_gamma_at_the_edge_comes_with_a_hint_to_try_longer_ones():
    result = plan.plan(alpha=0.95, c=0.01, c_hat=0.01, max_gamma=3)
    assert result['best_gamma'] == 3 and 'raise --max_gamma' in plan.sentence(result, 0.95, 0.01)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(alpha=1.2), 'alpha: expected a number from 0 to 1, got 1.2'),
        (dict(alpha=float('nan')), 'alpha: expected'),
        (dict(c=-0.1), 'c: expected .* got -0.1'),
        (dict(c=float('nan')), 'c: expected'),
        (dict(max_gamma=0), 'max_gamma: expected an integer >= 1, got 0'),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        plan.plan(**(dict(alpha=0.5, c=0.1, c_hat=0.1, max_gamma=3) | change))


def test_the_script_prints_and_draws(tmp_path):
    script = [sys.executable, pathlib.Path(__file__).parents[2] / 'scripts/plan.py', '--alpha=.8', '--c=.05']
    run = partial(subprocess.run, capture_output=True, text=True)
    done = run([*script, f'--plot={tmp_path / "plan.png"}'])
    assert done.returncode == 0, done.stderr
    assert '|   7 |' in done.stdout and 'gamma = 8 is best' in done.stdout
    assert (tmp_path / 'plan.png').read_bytes().startswith(b'\x89PNG')
    done = run([*script, f'--plot={tmp_path / "plan.txt"}'])
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        'error: plot: expected a name in .png'
    )
