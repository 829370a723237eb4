"""A sound loop stays flat; a planted leak and a planted recompilation are caught. On table models."""

import dataclasses
import mmap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.measure import runs, setup, soak
from spec_jax.sampling import SamplingConfig
from spec_jax.testing import TableModel

SETTINGS = setup.Settings(DecodeConfig(2, 5, SamplingConfig()), batch_size=2, max_source_length=24)
SOURCES = [np.array(ids, np.int32) for ids in ([5, 6, 7, 1], [1], [8, 9, 1])]
WIDTHS, PASS = (16, 24), 8  # two batches of two rows, of each width
BOUND = 16  # MB


@pytest.fixture(scope='module')
def program():
    target, draft = (TableModel.random(jax.random.key(seed), vocab_size=12, eos_id=1) for seed in (0, 1))
    return runs.speculative_program(target, ModelDrafter(draft), SETTINGS)


def soaked(program, prompts=10 * PASS, **options):
    return soak.run(program, soak.make_passes(SOURCES, prompts, SETTINGS), SETTINGS, **options)


def test_a_pass_has_every_width_twice_and_an_empty_line():
    passes = soak.make_passes(SOURCES, 3 * PASS + 1, SETTINGS)
    assert [len(prompts) for prompts in passes] == [8, 8, 8, 1]
    last = passes.pop()
    assert [len(ids) for ids in last] == [1]
    for prompts in passes:
        assert all(ids.dtype == np.int32 and ids[-1] == 1 and 1 not in ids[:-1] for ids in prompts)
        lengths = [len(ids) for ids in prompts]
        assert lengths[0] == 1 and all(2 <= one <= 16 for one in lengths[2::2])
        assert all(17 <= one <= 24 for one in lengths[1::2])
        widths = [inputs.tokens.shape for _, inputs, _ in runs.batches(prompts, SETTINGS)]
        assert widths == [(2, 16)] * 2 + [(2, 24)] * 2
    text = np.concatenate([ids[:-1] for prompts in passes for ids in prompts])
    np.testing.assert_array_equal(text, np.resize([5, 6, 7, 8, 9], len(text)))


def test_all_lengths_come():
    settings = dataclasses.replace(SETTINGS, max_source_length=20)
    passes = soak.make_passes(SOURCES, 1000, settings)
    assert {len(ids) for prompts in passes for ids in prompts} == set(range(1, 21))


def test_too_little_to_soak_is_refused():
    with pytest.raises(
        ValueError, match='expected an integer >= 16, two passes over 2 widths at batch size 2; got 15'
    ):
        soak.make_passes(SOURCES, 15, SETTINGS)
    with pytest.raises(ValueError, match='empty lines alone'):
        soak.make_passes(SOURCES[1:2], 100, SETTINGS)


def test_compilations_are_counted_while_they_are_looked_at():
    double, x = jax.jit(lambda x: 2 * x), [np.ones(size, np.float32) for size in (1, 2, 3)]
    double(x[0])
    with soak.Compilations() as compilations:
        double(x[1]), double(x[0]), double(x[1])
    double(x[2])
    assert (compilations.count, compilations.from_cache) == (1, 0)


def test_a_sound_loop_is_bounded_and_every_pass_has_a_seed_of_its_own(program):
    seen = []

    def noting(inputs, keys):
        seen.append(jax.random.key_data(keys).tolist())
        return program(inputs, keys)

    run = soaked(noting)
    figures = soak.figures(run, BOUND)
    assert figures['faults'] == [] and figures['prompts'] == 10 * PASS == run.samples[-1].prompts
    assert figures['compilations_first_pass'] >= len(WIDTHS) and figures['compilations_later'] == 0
    assert figures['live_arrays'][0] == figures['live_arrays'][1]
    assert len(seen) == 10 * 4 and len(set(map(str, seen))) == len(seen)
    assert run.stats.tested_at.shape == (2,) and run.stats.histogram.shape == (3,)
    assert run.stats.histogram.sum() == run.stats.rounds > 0
    assert 'bounded' in soak.summary(figures)


def test_outputs_that_are_kept_are_caught(program):
    kept = []

    def leaking(inputs, keys):
        kept.append(program(inputs, keys))
        return kept[-1]

    figures = soak.figures(soaked(leaking), BOUND)
    first, last = figures['live_arrays']
    assert last - first == 9 * 4 * len(jax.tree.leaves(kept[0]))
    (fault,) = figures['faults']
    assert f'{first} JAX arrays were alive after the first pass and {last} after the last' in fault
    assert f'FAILED: {fault}' in soak.summary(figures)


def test_memory_of_the_host_that_is_kept_is_caught(program):
    kept = []

    def leaking(inputs, keys):
        kept.append(mmap.mmap(-1, 2_000_000))  # pages of its own: an allocator may have some to give back
        kept[-1].write(bytes(2_000_000))
        return program(inputs, keys)

    figures = soak.figures(soaked(leaking), BOUND)
    expected = 2 * 4 / PASS  # MB a prompt
    assert figures['resident']['mb_per_1000_prompts'] == pytest.approx(1e3 * expected, rel=0.1)
    assert figures['resident']['growth_mb'] == pytest.approx(8 * PASS * expected, rel=0.1)
    (fault,) = figures['faults']
    assert fault.startswith('resident memory grew by') and 'expected at most 16' in fault


def test_a_shape_that_is_new_for_each_prompt_is_caught(program):
    total, calls = jax.jit(jnp.sum), []

    def trimming(inputs, keys):
        calls.append(total(np.ones(100 + len(calls))))
        return program(inputs, keys)

    figures = soak.figures(soaked(trimming, 3 * PASS), BOUND)
    assert figures['compilations_later'] == 2 * 4
    (fault,) = (fault for fault in figures['faults'] if 'compiled' in fault)
    assert fault.startswith('8 programs were compiled after the first pass')


def test_it_stops_after_the_pass_in_which_a_stop_is_requested(program):
    run = soaked(program, stop=lambda: True)
    assert [sample.prompts for sample in run.samples] == [0, PASS]
    figures = soak.figures(run, BOUND)
    assert figures['faults'] == [] and figures['resident']['growth_mb'] == 0


def sample(prompts, resident, device=None):
    return soak.Sample(prompts, 3, resident, device, 7)


def test_the_slope_is_that_after_the_first_quarter():
    samples = [sample(100 * n, 1000 - 900 / 2**n if n < 2 else 550 + n, 10 + 0.5 * n) for n in range(9)]
    figures = soak.figures(soak.Soaked(samples, None, 2, 1.0), max_growth_mb=2)
    assert figures['warm_up_prompts'] == 200
    assert figures['resident'] == pytest.approx(dict(max_mb=558, mb_per_1000_prompts=10, growth_mb=6))
    assert figures['device'] == pytest.approx(dict(max_mb=14, mb_per_1000_prompts=5, growth_mb=3))
    assert [fault.split()[0] for fault in figures['faults']] == ['resident', 'device']
    text = soak.summary(figures)
    assert '558 MB at most, +10.0 MB per 1,000 prompts' in text and text.count('FAILED') == 2


def test_resident_memory_equals_the_figure_of_linux():
    status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())
    assert soak.resident_bytes() == pytest.approx(1024 * int(status['VmRSS'].split()[0]), rel=0.01)


def test_resident_memory_elsewhere_is_an_error_that_names_linux(monkeypatch):
    monkeypatch.setattr(soak, '_STATM', Path('/nowhere/statm'))
    with pytest.raises(OSError, match='expected Linux'):
        soak.resident_bytes()


def test_the_plot_has_memory_compilations_and_arrays():
    figure = soak.plot(soak.Soaked([sample(n, 500 + n, 5.0) for n in range(9)], None, 0, 1.0), 'title')
    memory, compiled, arrays = figure.axes
    assert [line.get_ydata()[-1] for line in memory.lines] == [508, 5.0]
    assert compiled.lines[0].get_ydata()[-1] == 3 and arrays.lines[0].get_ydata()[-1] == 7
