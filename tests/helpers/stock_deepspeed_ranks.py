"""Run several ranks of stock DeepSpeed; report each step's results and the bytes that its collectives carried.

run_stock_ranks(folder, words, ranks=2)      run `ranks` ranks in forks; FOLDER holds `model`, a directory with weights
planned_bytes(folder, words, ranks=2)        return the collectives' bytes according to the plan
stock_deepspeed_ranks.py FOLDER RANK RANKS STEPS WORDS...      run one of the ranks

Rank 0 prints {"steps": [(loss, gradient norm), ...], "bytes": [of a rank in each step], "calls": {what: how often},
"stage": ZeRO's, "apart": [weights that differ between ranks at the end]} as JSON, and writes
FOLDER/masters.safetensors.
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
from zlib import crc32

import torch
from commands import run_all
from engine_bench import batches, masters, train
from run_stock_deepspeed import build
from safetensors.torch import save_file
from uneven_targets import EPS, LR, masked

from offload_trainer.config import PlacementSection
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.engine.deepspeed import DeepSpeedEngine
from offload_trainer.errors import STORE
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan
from offload_trainer.ranks import join, join_torch
from offload_trainer.settings import load_config

ACCUMULATE = 2
NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "reduce_scatter_tensor")
calls: Counter[str] = Counter()
moved = [0.0]  # bytes, of each step


def run_stock_ranks(folder: Path, *words: object, ranks: int, steps: int = 3) -> dict[str, Any]:
    """Run the ranks in forks; return what rank 0 prints."""
    scripts = ([__file__, folder, rank, ranks, steps, *words] for rank in range(ranks))
    said = run_all(*scripts, folder=folder, stock=True)
    lines = [line for line in said[0].splitlines() if line.startswith("{")]  # libraries print at exit
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def planned_bytes(folder: Path, *words: str, ranks: int) -> int:
    """Return the bytes that the plan forecasts through each rank in a step, for FOLDER/model trained as here."""
    told = ["--accumulate", str(ACCUMULATE), "--micro-batch", "2", "--seq-len", "24", "--save-every", "0", *words]
    config = load_config(["--model", str(folder / "model"), "--engine", "deepspeed", *told])
    shape = resolve_model(config.model, seed=0).shape
    plan = make_plan(config, shape, probe_machine(PlacementSection()), world=ranks)
    return sum(one.written for one in plan.links if one.place == "gpus")


def ring_bytes(name: str, args: tuple[Any, ...], count: int) -> float:
    """Return the bytes that a ring of `count` ranks moves through each of them for one collective."""
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
    """Count the collectives from this call on. Those under 100 bytes carry losses, norms and flags; the plan omits
    them.
    """
    for name in NAMES:
        inner: Callable[..., Any] = getattr(torch.distributed, name)

        def counting(*args: Any, name: str = name, inner: Callable[..., Any] = inner, **words: Any) -> Any:
            given = inspect.signature(inner).bind(*args, **words).arguments
            members = torch.distributed.get_world_size(given.get("group"))
            size = ring_bytes(name, tuple(given.values()), members)
            if size >= 100:
                moved[-1] += size
                calls[f"{name} of {members}"] += 1
            return inner(*args, **words)

        setattr(torch.distributed, name, counting)


def apart(engine: DeepSpeedEngine, held: dict[str, torch.Tensor], ranks: int) -> list[str]:
    """Return the unsharded weights whose masters, or values in the model, differ between ranks."""
    mine = dict(held)
    if engine._placement.stage < 3:
        whole = {n: p for n, p in engine._parameters.items() if tuple(p.shape) == engine._parts.shape(n)}
        mine |= {f"{name}, in the model": parameter.detach().float().cpu() for name, parameter in whole.items()}
    sums: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(sums, {name: crc32(t.contiguous().numpy()) for name, t in mine.items()})
    return [name for name in mine if len({its[name] for its in sums}) > 1]


def main() -> None:
    folder, rank, ranks, steps = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ[STORE] = str(folder / "store")
    count_collectives()
    use_fp32_products(torch.bfloat16)  # A real run does the same.
    join()
    join_torch("gloo")
    engine = build(folder, ["--accumulate", str(ACCUMULATE), f"optim.eps={EPS}", "--lr", str(LR), *sys.argv[5:]])
    # A real run splits the data in the same way.
    data = masked(batches(steps * ACCUMULATE * engine.world))[engine.rank :: engine.world]
    calls.clear()
    lr = engine._optimizer.param_groups[0]["lr"]
    found = train(engine, data, accumulate=ACCUMULATE, lr=lr, before=lambda _: moved.append(0.0))
    stage = engine._engine.zero_optimization_stage()
    said = {"steps": found, "bytes": moved[1:], "calls": dict(calls), "stage": stage}
    held = masters(engine)
    said["apart"] = apart(engine, held, ranks)
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "masters.safetensors")
        print(json.dumps(said))


if __name__ == "__main__":
    main()
