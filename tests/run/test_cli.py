import os
import signal
from types import SimpleNamespace

import pytest
from absl import flags

from spec_jax.run import cli


def test_an_error_becomes_one_line():
    assert cli.one_line(ValueError('two\n   lines')) == 'two lines'
    assert cli.one_line(FileNotFoundError(2, 'No such file', 'here')) == 'here: No such file'
    assert cli.one_line(OSError('own words')) == 'own words'
    assert cli.one_line(ValueError()) == 'ValueError'


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_is_noted_and_the_second_acts_as_ever(number, code, capsys):
    before = signal.getsignal(number)
    with cli.StopSignal() as stop:
        assert not stop()
        stop.exit_if_set()
        os.kill(os.getpid(), number)
        assert stop()
        assert signal.getsignal(number) is before
    assert 'once more' in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        stop.exit_if_set()
    assert exited.value.code == code


def test_handlers_are_as_before_when_nothing_came():
    before = signal.getsignal(signal.SIGINT)
    with cli.StopSignal():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(('args', 'refused'), [(['--coordinator=10.0.0.1:8476'], True), ([], False)])
def test_the_profiler_is_for_a_process_that_is_alone(args, refused, monkeypatch, tmp_path):
    flag_values = flags.FlagValues()
    flags.DEFINE_string('coordinator', None, '', flag_values=flag_values)
    flag_values(['script', *args])
    monkeypatch.setattr(cli.flags, 'FLAGS', flag_values)
    monkeypatch.setattr(cli, '_PROFILE', SimpleNamespace(value=tmp_path / 'trace'))
    if refused:
        with pytest.raises(ValueError, match='profile: expected a single process'):
            cli._traced()
        assert not (tmp_path / 'trace').exists()
    else:
        with cli._traced():
            pass
        assert list((tmp_path / 'trace').glob('plugins/profile/*/*.xplane.pb'))
