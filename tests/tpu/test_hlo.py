"""What is read from an optimized program, on one small enough to be counted by hand."""

import pathlib

import pytest

from spec_jax.tpu.hlo import Program

TEXT = (pathlib.Path(__file__).parent / 'small.hlo').read_text()


@pytest.fixture
def program():
    return Program(TEXT)


@pytest.fixture
def body(program):
    (loop,) = program.loops(program.entry)
    return loop.called['body']


def test_loops_and_how_often_they_run(program, body):
    (outer,), (inner,) = program.loops(program.entry), program.loops(body)
    assert (program.entry, body) == ('main.3', 'body.2')
    assert program.trips(outer) is None and program.trips(inner) == 6


def test_cycles_count_a_loop_as_often_as_it_runs(program, body):
    assert program.cycles(body) == 6 * 7 + 11 + 1 + 1 + 100 + 20
    assert program.cycles(program.entry) == 1000 + 500 + program.cycles(body)


def test_cycles_by_scope_take_the_first_that_fits(program, body):
    assert program.by_scope(body, ('draw', 'draft', 'target')) == {
        'draw': 42,
        'draft': 0,
        'target': 131,
        '': 2,
    }
    assert program.by_scope(body, ('draft', 'target'))['draft'] == 42


def test_copies_leave_out_small_ones_other_types_and_those_to_on_chip_memory(program, body):
    assert [copy.name for copy in program.copies(body, 'bf16', 8192)] == ['copy.4', 'copy-start.2']
    assert [copy.name for copy in program.copies(program.entry, 'bf16', 1)] == [
        'copy.4',
        'copy.6',
        'copy-start.2',
    ]


def test_exchanges_between_chips_by_kind(program, body):
    assert program.collectives(body) == {'all-reduce': (1, 8 * 16 * 4)}
