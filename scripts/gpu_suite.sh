#!/usr/bin/env bash
# gpu_suite.sh STAGE [FOLDER] [--rehearse] [--only TEXT] [--seconds N] [--drive DIR]: what only a GPU can show.
#   STAGE    check | tests | parity | speed | tokens | ways | 8b | 8b-plain | 10b | saves, or all, one after the other
#   FOLDER   gets STAGE.json and STAGE.md, written as results come in (default docs/benchmarks/gpu)
# A stage ends after N seconds (default 520) and says what it did not get to, which --only TEXT goes on with: the cases
# whose name has TEXT in it. DIR is on the drive that state
# may live on (default: the directory of temporary files). --rehearse goes the same way without a GPU, on tiny shapes.
# Nothing is installed or downloaded; PYTHON names the interpreter. docs/benchmarks/gpu.md has the rest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/scripts/gpu_suite.py" "$@"
