#!/usr/bin/env bash
# gpu_suite.sh WHAT [FOLDER] [--tar FILE] [--seconds N] [--only TEXT] [--drive DIR] [--rehearse]: run the GPU checks.
#   WHAT     first | second: the two calls for a machine that is lent for minutes; or the names of single stages
#   FOLDER   gets STAGE.json and STAGE.md of each stage, rewritten after every result (default docs/benchmarks/gpu, and
#            with --tar a temporary one)
# The whole ends within N seconds (first: 480, second: 200) and lists the cases that it had no time for. --tar packs
# FOLDER into FILE every ten seconds. --only TEXT runs the cases whose name contains TEXT. DIR is on the drive for page
# files (default: this checkout's). --rehearse runs without a GPU, on tiny shapes. Where packages are missing, they and
# the kernels come from .gpu (`make gpu-folder`); nothing is installed or downloaded. PYTHON names the interpreter.
# docs/benchmarks/gpu.md has the details.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -d "$root/.gpu" ] && ! "$python" -c "import pydantic" 2>/dev/null; then
  export PYTHONPATH="$root/.gpu/site:$PYTHONPATH" OFFLOAD_TRAINER_CACHE="${OFFLOAD_TRAINER_CACHE:-$root/.gpu/cache}"
fi
exec "$python" "$root/scripts/gpu_suite.py" "$@"
