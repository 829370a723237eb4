"""The notebooks as committed, and their results when run in small on the demo pair."""

import base64
import json
import os
import pathlib
import struct

import jax
import nbformat
import pytest
from nbclient import NotebookClient

from spec_jax import analysis
from spec_jax.measure import acceptance_report, benchmark_report, plan
from spec_jax.run import profiling

FOLDER = pathlib.Path(__file__).parents[1] / 'notebooks'
NAMES = ('quickstart', 'paper_tables', 'choosing_gamma', 'tpu')
LINES = 3
# Run after a notebook's last cell, in its namespace: the values that the tests check, as JSON.
_PROBES = {
    'quickstart': """
        words=words, p=p, q=q, beta=beta, residual=residual, output=output, accepted_share=accepted_share,
        frequencies=frequencies, sources=sources, texts=texts, figures=figures, line=line, rounds=rounds,
        ids=[one.tolist() for one in results['plain'].ids], gamma=GAMMA, parts=parts,
        histogram=results['speculative'].batch_stats[order.index(line)].histogram[0]
    """,
    'paper_tables': """
        TABLE_1=list(TABLE_1.items()), table_1=table_1, table_2=table_2, table_3=table_3,
        alphas=alphas, speeds=speeds, weights=weights, device=f'{device.platform}: {device.device_kind}'
    """,
    'choosing_gamma': """
        best=best, alphas=alphas, costs=costs, example=example, hopeless=hopeless, rows=rows, choices=choices,
        batches=batches, title=title
    """,
    'tpu': """
        figures=figures, seconds=seconds, needs=memory.table(needs), hub_figures=hub_figures,
        counted=[counted.count, counted.from_cache], line=int(batch.rows[0]), again=runs.row_ids(again)[0],
        ids=[one.tolist() for one in results['plain'].ids]
    """,
}
# Most of the time in small is compilation; this halves it. XLA aborts on an unknown flag.
_COMPILE_QUICKLY = '--xla_backend_optimization_level=0'
if jax.__version__.startswith('0.10.'):
    _COMPILE_QUICKLY += ' --xla_cpu_use_fusion_emitters=false'
_ORDER = 'order = [int(batch.rows[0]) for batch, _, _ in runs.batches(job.sources, settings)]\n'


def read(name):
    return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


@pytest.mark.parametrize('name', NAMES)
def test_committed_without_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == 'code':
            assert cell.outputs == [] and cell.execution_count is None, cell.source
    assert set(notebook.metadata) == {'kernelspec', 'language_info'}


def test_every_notebook_is_tested_and_begins_alike():
    assert {path.stem for path in FOLDER.glob('*.ipynb')} == set(NAMES)
    setups = {next(cell.source for cell in read(name).cells if cell.cell_type == 'code') for name in NAMES}
    assert len(setups) == 1
    for name in NAMES:
        sources = [cell.source for cell in read(name).cells]
        assert sources[0].startswith('# ')
        assert not [source for source in sources if '\ndef ' in source or '\nclass ' in source]


def test_without_a_clone_the_error_states_what_to_do(tmp_path, monkeypatch):
    setup = next(cell.source for cell in read('quickstart').cells if cell.cell_type == 'code')
    monkeypatch.chdir(tmp_path)
    before_pip = setup.partition('try:')[0]
    with pytest.raises(FileNotFoundError, match='git clone ADDRESS.*%cd'):
        exec(before_pip, {})


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """By notebook its executed cells, and the values of its probe.

    One kernel runs them all, its names wiped in between, so that equal programs are compiled once.
    """
    cells, ends = [], {}
    for name in NAMES:
        cells.append(nbformat.v4.new_code_cell(f'%reset -f\nimport os\nos.chdir({str(FOLDER)!r})'))
        cells += read(name).cells
        source = (_ORDER if name == 'quickstart' else '') + (
            f'import json\nprint(json.dumps(dict({_PROBES[name].strip()}), default=lambda one: one.tolist()))'
        )
        cells.append(nbformat.v4.new_code_cell(source))
        ends[name] = len(cells)
    home = tmp_path_factory.mktemp('jupyter')
    env = os.environ | dict(
        SPEC_JAX_LINES=str(LINES),
        JAX_PLATFORMS='cpu',
        HF_HUB_OFFLINE='1',
        XLA_FLAGS=_COMPILE_QUICKLY,
        JAX_COMPILATION_CACHE_DIR=str(home / 'compiled'),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
        TMPDIR=str(home),
        IPYTHONDIR=str(home),
        JUPYTER_CONFIG_DIR=str(home),
    )
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=300,
        kernel_name='python3',
        resources={'metadata': {'path': str(FOLDER)}},
    )
    client.execute(env=env)
    results, start = {}, 1
    for name in NAMES:
        probe = notebook.cells[ends[name] - 1]
        results[name] = notebook.cells[start : ends[name] - 1], json.loads(probe.outputs[0].text)
        start = ends[name] + 1
    return results


def outputs(cells):
    return [output for cell in cells for output in cell.get('outputs', [])]


def test_nothing_but_tables_pictures_and_text_comes_out(run):
    pictures = {}
    for name, (cells, _) in run.items():
        for output in outputs(cells):
            assert output.output_type != 'error'
            assert output.get('name') != 'stderr', output.text
        images = [
            output.data['image/png'] for output in outputs(cells) if 'image/png' in output.get('data', {})
        ]
        pictures[name] = [struct.unpack('>II', base64.b64decode(png)[16:24]) for png in images]
    assert {name: len(sizes) for name, sizes in pictures.items()} == dict(
        quickstart=3, paper_tables=4, choosing_gamma=8, tpu=1
    )
    assert all(min(size) > 150 and max(size) > 500 for sizes in pictures.values() for size in sizes)


def test_quickstart_shows_the_rule(run):
    _, values = run['quickstart']
    p, q = values['p'], values['q']
    assert sum(p) == pytest.approx(1) and sum(q) == pytest.approx(1)
    assert values['beta'] == pytest.approx(0.67)  # .30 + .25 + .05 + .05 + .02
    assert values['residual'] == pytest.approx([0.20 / 0.33, 0, 0.10 / 0.33, 0.03 / 0.33, 0])
    assert values['output'] == pytest.approx(p)
    assert values['accepted_share'] == pytest.approx(0.67, abs=0.02)
    assert values['frequencies'] == pytest.approx(p, abs=0.02)


def test_quickstart_decodes_both_ways(run):
    cells, values = run['quickstart']
    figures = values['figures']
    assert len(values['sources']) == LINES
    assert values['texts']['plain'] == values['texts']['speculative'] and figures['greedy_match'] == 1
    assert figures['tokens'] == sum(map(len, values['ids']))
    assert 1 < figures['tokens_per_call'] <= values['gamma'] + 1
    text = ''.join(output.text for output in outputs(cells) if output.output_type == 'stream')
    assert f'{figures["alpha"]:.3f}' in text and 'speed-up predicted (Theorem 3.8)' in text
    parts = sum(values['parts'].values())
    assert parts == pytest.approx(
        max(figures['tokens_per_call'] / figures['speedup'], parts - values['parts']['all else'])
    )


def test_quickstart_shows_each_round(run):
    cells, values = run['quickstart']
    rounds, gamma = values['rounds'], values['gamma']
    shown = [token for draft_ids, target_ids in rounds for token in draft_ids + target_ids]
    assert shown == values['ids'][values['line']]
    assert all(len(draft_ids) <= gamma and len(target_ids) == 1 for draft_ids, target_ids in rounds[:-1])
    counts = [sum(len(draft_ids) == number for draft_ids, _ in rounds) for number in range(gamma + 1)]
    assert counts == values['histogram']
    (picture,) = [
        output.data['text/html'] for output in outputs(cells) if 'inline-block' in str(output.get('data', ''))
    ]
    assert picture.count('inline-block') == len(rounds)
    assert picture.count('#b7e1b0') == sum(len(draft_ids) for draft_ids, _ in rounds)


def test_the_papers_tables_follow_from_its_formulas(run):
    cells, values = run['paper_tables']
    assert len(values['table_1']) == 6
    for (alpha, gamma, operations, speed), (key, printed) in zip(
        values['table_1'], values['TABLE_1'], strict=True
    ):
        assert [alpha, gamma] == key
        assert [round(operations, 2), round(speed, 2)] == printed
        assert operations == pytest.approx(float(analysis.operations_factor(alpha, gamma, 0)))
    assert len(values['table_2']) == 12
    for task, size, temperature, gamma, alpha, c, tokens, theory, expected, measured, implied in values[
        'table_2'
    ]:
        assert benchmark_report.PAPER[task][size, temperature] == (gamma, alpha, c, expected, measured)
        assert theory == pytest.approx(float(analysis.walltime_improvement(alpha, gamma, c)))
        low = analysis.walltime_improvement(alpha - 0.005, gamma, c + 0.005)  # all three are rounded
        high = analysis.walltime_improvement(alpha + 0.005, gamma, c - 0.005)
        assert low - 0.05 <= expected <= high + 0.05
        assert float(analysis.walltime_improvement(alpha, gamma, implied)) == pytest.approx(measured)
        assert (implied < 0) == (measured > tokens)
    assert len(values['table_3']) == sum(
        len(sizes) for kinds in acceptance_report.PAPER_ALPHA.values() for sizes in kinds.values()
    )
    assert values['table_3'][0][:4] == ['EnDe', 'unigram', 0.08, 0.07]


def test_the_demos_tables_are_measured_and_name_weights_and_device(run):
    cells, values = run['paper_tables']
    (row,), (speed,) = values['alphas'], values['speeds']
    assert row['texts'] == LINES and 0 < row['alpha'] < 1
    assert speed['predicted_speedup'] == pytest.approx(
        float(analysis.walltime_improvement(speed['alpha'], speed['gamma'], speed['c']))
    )
    assert speed['greedy_match'] == 1
    tables = [
        output.data['text/markdown'] for output in outputs(cells) if 'text/markdown' in output.get('data', {})
    ]
    assert tables == [
        f'{values["weights"]}\n\n{acceptance_report.alpha_table([row])}',
        f'{values["weights"]}\n\n{benchmark_report.table_2([speed], "EnDe")}',
        benchmark_report.screen_table([speed]),
    ]
    assert 'spec_jax/demo/target' in values['weights'] and values['device'] in values['weights']


def test_choosing_gamma(run):
    cells, values = run['choosing_gamma']
    best, alphas, costs = values['best'], values['alphas'], values['costs']
    for row, c in zip(best, costs, strict=True):
        for gamma, alpha in zip(row, alphas, strict=True):
            assert abs(alpha - c) < 1e-9 or (gamma > 0) == (alpha > c), (alpha, c)
    assert values['example'] == plan.plan(alpha=0.72, c=0.08, c_hat=0.08, max_gamma=8)
    assert values['hopeless']['best_gamma'] == 0
    (row,) = values['rows']
    assert row['attainable_speedup'] == pytest.approx(
        row['tokens_per_call'] / (row['gamma'] * row['c'] + row['cost_of_rows'])
    )
    assert values['batches'] == values['rows']
    assert values['choices']['measured'] == row['gamma']
    tables = [
        output.data['text/markdown'] for output in outputs(cells) if 'text/markdown' in output.get('data', {})
    ]
    assert tables == [
        plan.table(values['example']),
        f'{values["title"]}\n\n{benchmark_report.screen_table([row])}',
        benchmark_report.batch_table([row]),
    ]


def test_tpu_runs_on_a_cpu_but_for_the_pair_from_the_hub(run):
    cells, values = run['tpu']
    assert values['figures']['greedy_match'] == 1 and values['hub_figures'] is None
    assert values['again'] == values['ids'][values['line']]
    count, from_cache = values['counted']
    assert 0 < from_cache == count
    seconds = values['seconds']
    assert list(seconds) == list(profiling.SCOPES) and all(seconds.values())
    assert seconds['target'] > seconds['update']
    tables = [
        output.data['text/markdown'] for output in outputs(cells) if 'text/markdown' in output.get('data', {})
    ]
    assert tables == [values['needs']] and 'xxl + small, batch 16' in tables[0]
    text = ''.join(output.text for output in outputs(cells) if output.output_type == 'stream')
    assert 'no accelerator here: left out' in text and ' x cpu: ' in text


def test_what_the_same_pair_measures_is_the_same_in_all_of_them(run):
    counted = ('tokens', 'rounds', 'alpha', 'accepted_histogram')
    first = run['quickstart'][1]['figures']
    others = (
        run['paper_tables'][1]['speeds'][0],
        run['choosing_gamma'][1]['rows'][0],
        run['tpu'][1]['figures'],
    )
    for other in others:
        assert {name: other[name] for name in counted} == {name: first[name] for name in counted}
