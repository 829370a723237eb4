#!/usr/bin/env bash
# Makes .venv, installs, and translates the shipped sentences plainly and speculatively.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install requirements.txt
python scripts/generate.py --config=configs/demo_ende.py --config.compare=True --config.data.limit=40 \
  --workdir=workdir/quickstart "$@"
