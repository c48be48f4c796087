#!/usr/bin/env bash
# setup.sh PYTHON VENV: make a virtual environment with exactly the tested versions.
set -euo pipefail
python=$1 venv=$2

fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "$python is not installed; name another with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module: apt-get install python3-venv"
command -v g++ >/dev/null || fail "no C++ compiler: apt-get install g++"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
# Install torch first and pinned: as a dependency, it would come with several GB of CUDA libraries on a CPU machine.
# Python compiles the modules that are used; compiling all of torch's takes 20 seconds.
pip --no-compile "$(grep '^torch==' requirements.lock)"
pip uv  # installs the other packages in an eighth of pip's time
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -r requirements.lock
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -e .
# Triton, for its interpreter, is installed beside the environment: within it, torch and others would load it on a CPU,
# and 3.9 reports leaks at the end of such processes.
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --target "$venv/triton" triton==3.9.0
