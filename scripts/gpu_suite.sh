#!/usr/bin/env bash
# gpu_suite.sh WHAT [FOLDER] [--tar FILE] [--seconds N] [--only TEXT] [--drive DIR] [--rehearse]: run the GPU checks.
#   WHAT     first | second: the two calls for a machine that is there for minutes, or the name of a stage
#   FOLDER   gets STAGE.json and STAGE.md of each stage, rewritten after every result (default docs/benchmarks/gpu, and
#            with --tar a temporary one)
# The whole ends within N seconds (first: 480, second: 200) and lists the cases that it had no time for. --tar packs
# FOLDER into FILE after every result. --only TEXT runs the cases whose name contains TEXT. DIR is on the drive for page
# files (default: this checkout's). --rehearse runs without a GPU, on tiny shapes. PYTHON names the interpreter, .venv's
# by default. Without either it is python3, with the packages and kernels of .gpu (`make gpu-folder`). Nothing is
# installed or downloaded.
# docs/benchmarks/gpu.md has the details.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-$root/.venv/bin/python}
if [ ! -x "$(command -v "$python")" ]; then
  python=python3
  if [ -d "$root/.gpu" ]; then
    export PYTHONPATH="$root/.gpu/site:$PYTHONPATH" OFFLOAD_TRAINER_CACHE="${OFFLOAD_TRAINER_CACHE:-$root/.gpu/cache}"
    "$python" "$root/scripts/gpu_folder.py" --place-kernel "$root/.gpu" || echo "gpu_suite: no kernel from .gpu" >&2
  fi
fi
exec "$python" "$root/scripts/gpu_suite.py" "$@"
