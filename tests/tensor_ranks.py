"""One of several processes for DeepSpeed's AutoTP: what each step gave, and the bytes that its collectives carried.

tensor_ranks.py FOLDER RANK RANKS STEPS WORDS...      FOLDER holds `model`, a directory with weights

Rank 0 prints {"steps": [(loss, gradient norm), ...], "bytes": {group size: a rank's in those steps}} as JSON, and
leaves FOLDER/masters.safetensors.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_of_engines import batches, masters, train
from counted import EPS, LR, masked
from deepspeed_alone import build
from safetensors.torch import save_file

ACCUMULATE = 2
NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "reduce_scatter_tensor")
moved: Counter[str] = Counter()
calls: Counter[str] = Counter()


def ring_bytes(name: str, args: tuple[Any, ...], count: int) -> float:
    """What a ring of `count` ranks moves through each of them."""
    part = (count - 1) / count
    if name == "all_reduce":
        return float(2 * part * args[0].nbytes)
    if name in ("all_gather", "reduce_scatter"):
        whole = args[0] if name == "all_gather" else args[1]
        return float(part * sum(one.nbytes for one in whole))
    if name in ("all_gather_into_tensor", "reduce"):
        return float(part * args[0].nbytes)
    return float(part * args[1].nbytes)  # reduce_scatter_tensor


def count_collectives() -> None:
    """From now on; what is less than 1 kB are losses, norms and flags, which the plan does not count."""
    for name in NAMES:
        inner: Callable[..., Any] = getattr(torch.distributed, name)

        def counting(*args: Any, name: str = name, inner: Callable[..., Any] = inner, **words: Any) -> Any:
            given = inspect.signature(inner).bind(*args, **words).arguments
            members = torch.distributed.get_world_size(given.get("group"))
            size = ring_bytes(name, tuple(given.values()), members)
            if size >= 1000:
                moved[str(members)] += round(size)
                calls[f"{name} of {members}"] += 1
            return inner(*args, **words)

        setattr(torch.distributed, name, counting)


def main() -> None:
    folder, rank, ranks, steps = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # of no use: they meet at a file
    count_collectives()
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    words = ["--accumulate", str(ACCUMULATE), "--optimizer", "cpu", f"optim.eps={EPS}", *sys.argv[5:]]
    engine = build(folder, words)
    data = masked(batches(steps * ACCUMULATE * engine.world))[engine.rank :: engine.world]
    moved.clear()
    calls.clear()
    found = train(engine, data, accumulate=ACCUMULATE, lr=LR)
    said = {"steps": found, "bytes": dict(moved), "calls": dict(calls)}
    held = masters(engine)
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "masters.safetensors")
        print(json.dumps(said))


if __name__ == "__main__":
    main()
