#!/usr/bin/env bash
# gpu_suite.sh STAGE [FOLDER] [--rehearse] [--only TEXT] [--seconds N] [--drive DIR]: run a stage of the GPU checks.
#   STAGE    check | tests | parity | speed | tokens | ways | 8b | 8b-plain | 10b | saves, or all, one after the other
#   FOLDER   gets STAGE.json and STAGE.md, rewritten after every result (default docs/benchmarks/gpu)
# A stage ends after N seconds (default 520) and lists the cases that it had no time for. --only TEXT runs the cases
# whose name contains TEXT. DIR is on the drive for page files (default: the directory of temporary files). --rehearse
# runs a stage without a GPU, on tiny shapes. The script installs and downloads nothing; PYTHON names the interpreter.
# docs/benchmarks/gpu.md has the details.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/scripts/gpu_suite.py" "$@"
