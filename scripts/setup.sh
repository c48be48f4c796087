#!/usr/bin/env bash
# setup.sh PYTHON VENV: make a virtual environment with exactly the tested versions, and install what DeepSpeed's
# kernels need.
set -euo pipefail
python=$1 venv=$2

fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "$python is not installed; name another with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module: apt-get install python3-venv"
command -v g++ >/dev/null || fail "no C++ compiler: apt-get install g++"

# DeepSpeed's NVMe kernel needs libaio's header; only --engine deepspeed and tiered.io=async_io use it.
if [ ! -e /usr/include/libaio.h ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q libaio-dev; } >/dev/null \
      || fail "apt-get install libaio-dev failed; DeepSpeed's engine cannot use NVMe without it"
  else
    echo "setup: libaio-dev is missing; DeepSpeed's engine cannot use NVMe until: sudo apt-get install libaio-dev" >&2
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Install torch first and pinned: as a dependency, pip would fetch several GB of CUDA libraries on a CPU machine.
"$venv/bin/pip" install --quiet --disable-pip-version-check "$(grep '^torch==' requirements.lock)"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements.lock
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
