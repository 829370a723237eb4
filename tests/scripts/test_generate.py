"""scripts/generate.py as its user sees it, on a tiny pair of random weights."""

import json

import jax
import pytest
from tiny import LINES, PAIR, WORDS, assert_refused, make_model, runner, write_tokenizer

from spec_jax.models.t5_weights import save_t5
from spec_jax.run.report import KEYS


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    """A pair, a draft with a permuted vocabulary, and inputs good and bad."""
    root = tmp_path_factory.mktemp('generate')
    for seed, name in enumerate(('target', 'draft', 'other', 'damaged', 'nan')):
        model = make_model(seed)
        if name == 'nan':
            model = model.replace(params=jax.tree.map(lambda x: x * float('nan'), model.params))
        save_t5(model, root / name)
        write_tokenizer(root / name, WORDS if name != 'other' else [*WORDS[:4], 'f', 'e', *WORDS[6:]])
    weights = root / 'damaged' / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / 'bert').mkdir()
    (root / 'bert' / 'config.json').write_text('{"model_type": "bert"}')
    write_tokenizer(root / 'bert')
    (root / 'lines.txt').write_text('\n'.join(LINES) + '\n')
    (root / 'empty.txt').write_text('')
    (root / 'file').write_text('')
    return root


@pytest.fixture(scope='module')
def run(world):
    few = '--config.max_new_tokens=6', '--config.gamma=2', '--config.repeats=1'
    return runner('generate.py', world, *PAIR, *few)


def test_three_ways_of_decoding_write_the_same_lines(run, world):
    folders = [world / name for name in ('speculative', 'plain', 'compared', 'zero')]
    extras = (
        [],
        ['--config.draft.kind=none'],
        ['--config.compare=True', '--config.batch_size=2'],
        ['--config.gamma=0'],
    )
    results = run(*([f'--workdir={folder}', *extra] for folder, extra in zip(folders, extras, strict=True)))
    for code, _, err in results:
        assert code == 0, err
    texts = [(folder / 'output.txt').read_text() for folder in folders]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len(texts[0].splitlines()) == len(LINES) and texts[0].splitlines()[2] == ''
    reports = [json.loads((folder / 'report.json').read_text()) for folder in folders]
    assert all(list(report)[: len(KEYS)] == list(KEYS) for report in reports)
    compared = reports[2]
    assert compared['greedy_match'] == 1.0 and all(compared[key] is not None for key in KEYS)
    assert reports[0]['tokens'] == compared['tokens'] == reports[1]['tokens']
    assert reports[1]['tokens_per_s'] is None and reports[1]['plain_tokens_per_s'] > 0
    assert 'speed-up, measured' in results[2][1] and 'plain' in results[2][1]
    assert not list(world.glob('*/*.partial'))


BAD = {
    'missing input': (['--config.data.path={w}/none.txt'], 'none.txt'),
    'empty input': (['--config.data.path={w}/empty.txt'], 'empty.txt'),
    'missing target': (['--config.target={w}/none'], 'no such folder'),
    'damaged weights': (['--config.target={w}/damaged'], 'model.safetensors'),
    'not a T5': (['--config.target={w}/bert'], 'bert'),
    'other vocabulary': (['--config.draft.path={w}/other'], "id 7 is 'e' in the target and 'f' in the draft"),
    'gamma below 0': (['--config.gamma=-1'], 'gamma: expected an integer from 0 to 16 or auto, got -1'),
    'gamma above 16': (['--config.gamma=17'], 'gamma: expected an integer from 0 to 16 or auto, got 17'),
    'gamma neither number nor auto': (['--config.gamma=best'], 'or auto, got best'),
    'no tokens': (['--config.max_new_tokens=0'], 'max_new_tokens'),
    'unknown draft': (['--config.draft.kind=magic'], "got 'magic'"),
    'unknown key': (['--config.gama=3'], 'gama'),
    'long source refused': (['--config.max_source_length=5', '--config.on_long=refuse'], 'got 2 longer'),
    'unwritable': (['--workdir={w}/file/inside'], 'file'),
    'float16': (['--config.dtype=float16'], 'bfloat16'),
    'NaN weights': (['--config.target={w}/nan'], 'NaN'),
    'compare without a draft': (['--config.draft.kind=none', '--config.compare=True'], 'compare'),
    'temperature': (['--config.temperature=-1.0'], 'temperature'),
    'top_p': (['--config.top_p=0.0'], 'top_p'),
}


def test_bad_input_gets_one_line_and_leaves_nothing(run, world):
    assert_refused(run, world, BAD)


def test_a_gamma_of_auto_is_measured_and_reported(run, world):
    folder = world / 'auto'
    ((code, out, err),) = run([f'--workdir={folder}', '--config.gamma=auto', '--config.compare=True'])
    assert code == 0, err
    report = json.loads((folder / 'report.json').read_text())
    choice = report['gamma_choice']
    assert len(report['accepted_histogram']) == 1 + (choice['gamma'] or 1) and report['greedy_match'] == 1.0
    assert f'gamma = {choice["gamma"]}: alpha = ' in out or 'WARNING: no gamma gains' in out
    assert sorted(path.name for path in folder.iterdir()) == ['output.txt', 'report.json']


def test_long_sources_are_cut_and_counted(run, world):
    ((code, out, _),) = run([f'--workdir={world / "cut"}', '--config.max_source_length=5'])
    assert code == 0 and '2 of 5 sources cut to 5 tokens' in out
    assert json.loads((world / 'cut' / 'report.json').read_text())['truncated'] == 2
