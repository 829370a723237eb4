"""Runs command lines of scripts at the price of one import: a fork for each, made before JAX starts.

Reads requests from standard input and answers each on standard output, a line of JSON both:
[script, [[arg, ...], ...], whether to optimise what is compiled]   ->   [[exit code, stdout, stderr], ...]
"""

import ast
import importlib.util
import json
import os
import pathlib
import signal
import sys
import tempfile

_SECONDS = 900  # and a command is ended


def _import_what_it_imports(script: str) -> None:
    tree = ast.parse(pathlib.Path(script).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, script, 'exec'), {})


def _run(script: str, argv: list[str], optimised: bool) -> None:
    if optimised:
        sys.modules['jax'].config.update('jax_disable_most_optimizations', False)
    spec = importlib.util.spec_from_file_location('script', script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [script, *argv]
    try:
        module.cli.run(module.main)
    except SystemExit as end:  # as Python would end, but at once: taking all imports apart takes a second
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if isinstance(end.code, str) else end.code or 0)


def _run_forked(script: str, argv: list[str], optimised: bool) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        child = os.fork()
        if child == 0:
            for file, descriptor in ((nothing, 0), (out, 1), (err, 2)):
                os.dup2(file.fileno(), descriptor)
            signal.alarm(_SECONDS)
            _run(script, argv, optimised)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return os.waitstatus_to_exitcode(status), *texts


if __name__ == '__main__':
    for request in sys.stdin:
        script, command_lines, optimised = json.loads(request)
        _import_what_it_imports(script)
        print(json.dumps([_run_forked(script, argv, optimised) for argv in command_lines]), flush=True)
