#!/usr/bin/env bash
# gpu_smoke.sh [FOLDER]: all that only a machine with a GPU can show, into FOLDER (default docs/benchmarks/gpu).
#   doctor.txt bench.json   what the machine is and how fast
#   placements.md           20 steps of each placement in bf16 and fp16 against plain torch on the GPU
#   predictions.md          plans beside runs
#   saves.txt, kills.txt    what a checkpoint costs beside training, and 50 random kills
#   10b.txt, 10b.jsonl      GPT-2 10B in fp16: the plan, and 3 steps if it fits, nothing saved
# Each part that fails is said and does not stop the next. DRIVE=/mnt/ssd names the drive, PYTHON the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-docs/benchmarks/gpu}
drive=${DRIVE:-$(mktemp -d)}
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
  || { echo "gpu_smoke: torch sees no GPU here; nothing was run" >&2; exit 1; }
mkdir -p "$out"
failed=0
part() { echo "-- $1" >&2; shift; "$@" || { echo "gpu_smoke: exit $? of: $*" >&2; failed=1; }; }
train() { "$python" -m offload_trainer "$@"; }
part doctor train doctor --nvme "$drive" >"$out/doctor.txt"
part bench train bench --json --nvme "$drive" >"$out/bench.json"
part placements "$python" scripts/compare_placements.py "$out/placements.md" "$drive" bf16,fp16 \
  --model gpt2-medium --seq-len 512 --micro-batch 4 --steps 20 --lr 5e-5 optim.warmup_steps=10
part predictions "$python" scripts/compare_predictions.py --nvme "$drive" --only "354M, tiered" --table "$out/predictions.md"
part saves "$python" scripts/bench_save.py -- --model gpt2-medium --nvme "$drive" --ram-fraction 0.5 \
  --output "$drive/saves" >"$out/saves.txt"
part kills env KILL_DIRECTORY="$drive" "$python" scripts/kill_and_resume.py --kills 50 >"$out/kills.txt"
flagship=(--model gpt2-10b --dtype fp16 --nvme "$drive" --steps 3 --save-every 0 train.eval_every=0 --output "$drive/10b")
part "10b, planned" train plan "${flagship[@]}" >"$out/10b.txt"
part "10b" "$python" -m offload_trainer.tune 3 "${flagship[@]}" >"$out/10b.jsonl"
exit "$failed"
