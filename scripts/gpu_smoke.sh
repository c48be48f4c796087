#!/usr/bin/env bash
# gpu_smoke.sh [OUT]: on a machine with a GPU, 20 steps of each placement in bf16 and fp16 against plain torch on the
# GPU, as a table in OUT (default docs/benchmarks/gpu.md). DRIVE=/mnt/ssd names the drive, PYTHON the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
  || { echo "gpu_smoke: torch sees no GPU here; nothing was run" >&2; exit 1; }
exec "$python" scripts/compare_placements.py "${1:-docs/benchmarks/gpu.md}" "${DRIVE:-$(mktemp -d)}" bf16,fp16 \
  --model gpt2-medium --seq-len 512 --micro-batch 4 --steps 20 --lr 5e-5 optim.warmup_steps=10
