#!/usr/bin/env bash
# gpu_smoke.sh [OUT]: on a machine with a GPU, 20 steps of each placement in bf16 and fp16 against plain torch on the
# GPU, as a table in OUT (default docs/benchmarks/gpu.md). DRIVE=/mnt/ssd names the drive, PYTHON the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
exec "$python" scripts/gpu_smoke.py "${1:-docs/benchmarks/gpu.md}" "${DRIVE:-$(mktemp -d)}"
