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
# pip takes torch's wheel from where it is configured to, which may be one without the several GB of CUDA libraries. uv
# installs it with all others, in an eighth of pip's time. Python compiles the modules that are used; compiling all of
# torch's takes 20 seconds.
pip() { "$venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
uv() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
wheels=$venv/wheels
pip download --no-deps --dest "$wheels" "$(grep '^torch==' requirements.lock)" &
pip install --no-compile uv
# Triton, for its interpreter, is installed beside the environment: within it, torch and others would load it on a CPU,
# and 3.9 reports leaks at the end of such processes.
uv --no-deps --target "$venv/triton" triton==3.9.0
wait $!
uv --find-links "$wheels" -r requirements.lock -e .
rm "$wheels"/torch-*.whl
