#!/usr/bin/env bash
# Makes .venv, installs what the tests need, lints, and runs the tests, two files at a time, long ones not last. Arguments
# go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install requirements-dev.txt
ruff check .
ruff format --check .
python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
