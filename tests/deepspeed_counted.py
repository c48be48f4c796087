"""One of several processes for stock DeepSpeed on steps that count unequally many targets: tests/counted.py

deepspeed_counted.py FOLDER RANK RANKS STEPS WORDS...      FOLDER holds `model`, a directory with weights

Rank 0 prints (loss, gradient norm) of each step as JSON and leaves FOLDER/masters.safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from bench_of_engines import batches, masters, train
from counted import EPS, LR, masked
from deepspeed_alone import build
from safetensors.torch import save_file

ACCUMULATE = 2


def main() -> None:
    folder, rank, ranks, steps = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # of no use: they meet at a file
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    words = ["--accumulate", str(ACCUMULATE), "--dtype", "fp32", f"optim.eps={EPS}"]
    engine = build(folder, [*words, *sys.argv[5:]])
    data = masked(batches(steps * ACCUMULATE * ranks))[rank::ranks]  # micro-batches go around, as in a run
    found = train(engine, data, accumulate=ACCUMULATE, lr=LR)
    held = masters(engine)
    if rank == 0:
        save_file(held, folder / "masters.safetensors")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
