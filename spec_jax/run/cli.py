"""The command line of all scripts: a config flag, a profiler, quiet logs, and one line in place of a traceback for
errors that the user can fix.

    _CONFIG = cli.define_config()

    if __name__ == '__main__':
        cli.run(main)
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

# Read by transformers at import; without them it warns every user that PyTorch was not found.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from spec_jax.run import profiling  # noqa: E402

# Errors that a user can cause: bad values, missing or unwritable files, NaN from a model. Any other is a bug.
USER_ERRORS = (ValueError, OSError, FloatingPointError)

_PROFILE = flags.DEFINE_string(
    'profile',
    None,
    "Folder for a trace of the run by JAX's profiler; the shorter the run, the easier to read.",
)


def define_config() -> flags.FlagHolder:
    """The flag --config=FILE.py, required, whose keys are overridden by --config.key=value."""
    holder = config_flags.DEFINE_config_file('config', help_string='Recipe, such as one of configs/.')
    flags.mark_flag_as_required('config')
    return holder


def run(main: Callable[[Sequence[str]], object]) -> None:
    """Parses the flags and runs `main(argv)`; does not return.

    Exits with 0; with 1 after a line `error: ...` on stderr for one of `USER_ERRORS` or a bad flag; with 130 on
    Ctrl-C. With --verbosity=1 the traceback and the libraries' logs are shown too. With --profile=DIR the run is
    traced (`profiling.trace`).
    """
    flags.FLAGS.set_default('verbosity', logging.FATAL)
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


class StopSignal:
    """Records a first Ctrl-C or SIGTERM, so that long work can finish its step; a second one acts as usual.

        with cli.StopSignal() as stop:
            while not stop(): ...
        stop.exit_if_set()

    Attributes:
      number: of the signal received, or None.
    """

    def __init__(self):
        self.number = None
        self._before = {}

    def __enter__(self) -> StopSignal:
        self._before = {kind: signal.signal(kind, self._note) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number, _) -> None:
        self.number = number
        self.__exit__()
        print('\nstopping; once more to stop at once', file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.number is not None

    def exit_if_set(self) -> None:
        """Exits as a shell reports the signal: 130 or 143."""
        if self.number is not None:
            sys.exit(128 + self.number)


def one_line(error: BaseException) -> str:
    """The message of an error, on one line."""
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ': '.join([*names, error.strerror])
    return ' '.join(str(error).split()) or type(error).__name__


def _parse(argv: Sequence[str]) -> list[str]:
    for arg in argv:
        name, given, value = arg.partition('=')
        file = value.partition(':')[0]  # what follows a colon is get_config's argument
        if name == '--config' and given and not pathlib.Path(file).is_file():
            sys.exit(
                f'error: --config: expected a Python file; got {file!r}, which is not one: check the path'
            )
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # raised by ml_collections for an unknown key
        key, guess = re.match(r'\W*(\w*)', str(error))[1], re.search(r'Did you mean "(\w+)"', str(error))
        names = [arg.partition('=')[0] for arg in argv]
        given = [name for name in names if key in name.split('.')]
        what = f'{given[0]}: the configuration has no such key' if given else one_line(error)
        sys.exit(
            f'error: {what}; ' + (f'did you mean {guess[1]}?' if guess else 'see the file given by --config')
        )
    except (flags.Error, TypeError, *USER_ERRORS) as error:
        what, _, traceback = str(error).partition(
            ': Error whilst parsing config file'
        )  # ml_collections, at length
        if not traceback:
            sys.exit(f'error: {one_line(error)}')
        sys.exit(f'error: {what.removeprefix("flag ")}: {traceback.strip().splitlines()[-1]}')


def _guarded(main: Callable, argv: Sequence[str]) -> None:
    quiet = flags.FLAGS.verbosity < logging.DEBUG
    if quiet:
        # At INFO, app.run's default, Orbax prints a page for each checkpoint. It raises its errors as exceptions,
        # and logs them again as tracebacks and as warnings of coroutines that were never awaited.
        logging.set_verbosity(logging.FATAL)
        sys.unraisablehook = lambda _: None
    try:
        with _traced():
            main(argv)
    except KeyboardInterrupt:
        sys.exit(130)
    except USER_ERRORS as error:
        if not quiet:
            raise
        sys.exit(f'error: {one_line(error)}')


def _traced() -> AbstractContextManager:
    """The trace of --profile, or no context where it is not given."""
    if _PROFILE.value is None:
        return nullcontext()
    # The profiler initialises the devices, which must not happen before the processes have joined.
    if 'coordinator' in flags.FLAGS and flags.FLAGS.coordinator:
        raise ValueError('profile: expected a single process; got --coordinator too: leave one out')
    return profiling.trace(_PROFILE.value)
