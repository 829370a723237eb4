# Sourced by quickstart.sh and test.sh: makes and enters .venv. PYTHON names another interpreter.

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: expected Python 3.11 or newer, got $("$python" --version 2>&1); set PYTHON=python3.13, say" >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
source .venv/bin/activate

# Installs a requirements file and the library in place; done once for each state of the file.
install() {
  local stamp=.venv/installed-$(cat requirements.txt "$1" pyproject.toml | cksum | tr -d ' ')
  [ -e "$stamp" ] && return
  python -m pip install --quiet --disable-pip-version-check --requirement "$1" --editable .
  touch "$stamp"
}
