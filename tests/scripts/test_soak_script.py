"""scripts/soak.py as its user sees it, on a tiny pair of random weights; with it the compilation cache and the
profiler, which every script has."""

import json

import pytest
from tiny import LINES, ROOT, run_forked, save_models

from spec_jax.run import profiling
from spec_jax.run.report import KEYS

LEAKY = """
from spec_jax.measure import runs
from spec_jax.drafters.prompt_lookup import PromptLookup

def build(config, target, tokenizer):
    make, kept = runs.speculative_program, []

    def keeping(*args):
        program = make(*args)
        return lambda inputs, keys: kept.append(program(inputs, keys)) or kept[-1]

    runs.speculative_program = keeping
    return PromptLookup()
"""


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('soak')
    save_models(root, 'target', 'draft')
    (root / 'leaky.py').write_text(LEAKY)
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    (root / 'empty.txt').write_text('\n\n')
    (root / 'file').write_text('')
    return root


@pytest.fixture(scope='module')
def run(world):
    return lambda *command_lines: run_forked(
        ROOT / 'scripts/soak.py',
        [
            [
                f'--config={ROOT / "configs/demo_ende.py"}',
                f'--config.target={world / "target"}',
                f'--config.draft.path={world / "draft"}',
                f'--config.data.path={world / "lines.txt"}',
                '--config.max_new_tokens=9',
                '--config.max_source_length=16',
                '--config.batch_size=2',
                '--config.gamma=2',
                '--prompts=24',
                *extra,
            ]
            for extra in command_lines
        ],
        world,
    )


@pytest.fixture(scope='module')
def done(run, world):
    """[exit code, stdout, stderr] of a run, of the same again with the profiler, and of one that leaks."""
    return run(
        [f'--workdir={world}/first'],
        [f'--workdir={world}/again', f'--profile={world}/trace', '--max_growth_mb=500'],  # a trace grows
        [f'--workdir={world}/leaky', f'--config.draft.kind={world}/leaky.py:build'],
    )


def soaked(folder):
    return json.loads((folder / 'report.json').read_text())['soak']


def test_a_sound_run_leaves_figures_and_a_plot(done, world):
    code, out, err = done[0]
    assert code == 0, err
    report = json.loads((world / 'first' / 'report.json').read_text())
    assert list(report)[: len(KEYS)] == list(KEYS)
    assert report['tokens'] > 0 and report['tokens_per_s'] > 0
    figures = report['soak']
    assert figures['prompts'] == 24 and len(figures['samples']) == 7 and figures['faults'] == []
    assert figures['compilations_first_pass'] > 0 and figures['compilations_later'] == 0
    assert 'bounded: each shape once, memory flat' in out
    assert sorted(path.name for path in (world / 'first').iterdir()) == ['report.json', 'soak.png']
    assert (world / 'first' / 'soak.png').read_bytes().startswith(b'\x89PNG')


def test_a_second_process_takes_its_programs_from_the_compilation_cache(done, world):
    first, again = (soaked(world / name) for name in ('first', 'again'))
    compiled = first['compilations_first_pass']
    assert first['compilations_from_cache'] < compiled
    assert again['compilations_first_pass'] == again['compilations_from_cache'] == compiled


def test_the_trace_names_the_parts_of_the_loop(done, world):
    code, out, err = done[1]
    assert code == 0, (out, err)
    seconds = profiling.seconds_by_scope(world / 'trace')
    assert all(seconds[scope] > 0 for scope in profiling.SCOPES), seconds
    assert seconds['target'] > seconds['update']


def test_a_leak_ends_in_a_failure(done, world):
    code, out, err = done[2]
    first, last = soaked(world / 'leaky')['live_arrays']
    assert code == 1 and last > first, err
    assert f'FAILED: {first} JAX arrays were alive after the first pass and {last} after the last' in out


BAD = {
    'profile is a file': (['--profile={w}/file'], 'file: File exists'),
    'too few prompts': (['--prompts=7'], 'prompts: expected an integer >= 8'),
    'empty lines': (['--config.data.path={w}/empty.txt'], 'empty lines alone'),
}


def test_bad_input_gets_one_line_before_any_work(run, world):
    lines = [
        [f'--workdir={world}/bad{n}', *(arg.format(w=world) for arg in args)]
        for n, (args, _) in enumerate(BAD.values())
    ]
    for n, ((name, (_, message)), (code, out, err)) in enumerate(zip(BAD.items(), run(*lines), strict=True)):
        shown = err.strip().splitlines()
        assert code == 1 and len(shown) == 1 and shown[0].startswith('error: '), (name, err)
        assert message in shown[0], (name, shown)
        assert out == '' and not list((world / f'bad{n}').glob('*')), name
