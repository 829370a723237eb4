"""Runs a script for many command lines at the price of one import: a fork for each, made before JAX starts.

python forked.py SCRIPT < [[arg, ...], ...]   ->   [[exit code, stdout, stderr], ...]
"""

import importlib.util
import json
import os
import sys
import tempfile


def _run_forked(module, argv) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [module.__file__, *argv]
            module.cli.run(module.main)  # exits
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return os.waitstatus_to_exitcode(status), *texts


if __name__ == '__main__':
    spec = importlib.util.spec_from_file_location('script', sys.argv[1])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    json.dump([_run_forked(script, argv) for argv in json.load(sys.stdin)], sys.stdout)
