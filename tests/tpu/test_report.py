"""Figures derived from the compiler's analysis, with a stand-in whose output is known."""

import pytest

from spec_jax.models.load import describe
from spec_jax.sampling import GREEDY
from spec_jax.tpu import programs, report

SETUP = programs.Setup(describe('t5-v1_1-xxl'), describe('t5-v1_1-small'), 'v4', 7, 256, 512, GREEDY)
MEMORY = dict(arguments=23 * 10**9, outputs=10**6, shared=0, temporaries=5 * 10**8)
SAID = dict(
    plain_step=dict(milliseconds=10.0),
    target_call=dict(milliseconds=10.2),
    draft=dict(milliseconds=1.5, draft_milliseconds=0.18),
    prefill=dict(milliseconds=30.0),
    loop=dict(
        milliseconds=12.0,
        draft_milliseconds=0.2,
        scopes=dict(draft=1.7, draw=0.05, target=10.1, verify=0.1, update=0.03, **{'': 0.02}),
        memory=MEMORY,
        copies=dict(number=0, bytes=0),
        collectives={},
    ),
)


@pytest.fixture
def compiled(monkeypatch):
    """The compiler's analysis, to be changed by a test."""
    words = {name: dict(part, compile_seconds=1.0) for name, part in SAID.items()}
    monkeypatch.setattr(programs, 'compile_apart', lambda setup, name, limit: words[name])
    return words


def test_ratios(compiled):
    figures = report.figures(SETUP, 60)
    assert figures['c'] == pytest.approx(0.018) and figures['c_in_loop'] == pytest.approx(0.02)
    assert figures['cost_of_rows'] == pytest.approx(1.02)
    assert figures['outside'] == pytest.approx(0.2 / 12)
    floor = programs.read_bytes(SETUP.target, 'bfloat16', 265, 512) / 1.2e12 * 1e3
    assert figures['call_over_floor'] == pytest.approx(10.2 / floor)


def test_predictions_at_the_papers_alpha(compiled):
    """English to German, small, T = 0: alpha .75, gamma 7: 3.5995 tokens a call."""
    first = report.figures(SETUP, 60)['predicted'][0]
    assert (first['task'], first['draft'], first['gamma'], first['alpha']) == ('EnDe', 'small', 7, 0.75)
    tokens = (1 - 0.75**8) / 0.25
    assert first['theorem'] == pytest.approx(tokens / (7 * 0.018 + 1))
    assert first['round'] == pytest.approx(tokens / (7 * 0.02 + 1.02 + 0.02))
    assert len(report.figures(SETUP, 60)['predicted']) == 4  # two tasks, two temperatures


def test_parts_of_the_memory_sum_to_what_was_compiled(compiled):
    hbm = report.figures(SETUP, 60)['hbm']
    parts = ('target_weights', 'draft_weights', 'target_caches', 'draft_caches', 'temporaries')
    assert sum(hbm[part] for part in parts) == hbm['total'] == 23 * 10**9 + 10**6 + 5 * 10**8
    assert hbm['fits'] and hbm['capacity'] == 32 * 2**30


def test_a_program_that_does_not_fit_or_compile_is_reported(compiled):
    compiled['loop']['memory'] = dict(MEMORY, arguments=40 * 10**9)
    text = report.table([report.figures(SETUP, 60)])
    assert '| NO' in text and '| 0.018' in text
    compiled['loop'] = dict(error='the compiler was given up after 60 s')
    figures = report.figures(SETUP, 60)
    assert 'c' not in figures and 'v4, loop: the compiler was given up after 60 s' in report.table([figures])
    assert report.LABEL in report.markdown([figures], 'title')
    assert len(report.plot([figures]).axes) == 2
