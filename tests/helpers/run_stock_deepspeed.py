"""Run stock DeepSpeed in one placement, in a separate process; print what the test compares, as JSON.

    run_stock_deepspeed.py FOLDER [late] WORDS...      FOLDER holds `model`, a directory with weights

`late` delays each asynchronous write to drives until DeepSpeed waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_bench import batches, masters, train
from safetensors.torch import load_file

from offload_trainer.engine.deepspeed import DeepSpeedEngine, deepspeed_config, start_processes
from offload_trainer.errors import TrainerError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.settings import load_config


def build(folder: Path, words: list[str]) -> DeepSpeedEngine:
    config = load_config(["--model", str(folder / "model"), "--engine", "deepspeed", "--nvme", str(folder), *words])
    source = resolve_model(config.model, seed=0)
    _, world = start_processes()
    machine = probe_machine(config.placement, output=str(folder))
    plan = make_plan(config, source.shape, machine, world=world)
    told = deepspeed_config(
        workload(config, source.shape, world=world),
        config.optim,
        config.deepspeed,
        plan.placement,
        plan.sizes,
        accelerator="cpu",
        swap_directory=str(folder / "swap"),
    )
    return DeepSpeedEngine(
        source,
        config.model,
        config.optim,
        placement=plan.placement,
        words=told,
    )


def write_late() -> None:
    """Delay the writes of sub-groups until an operation waits for them."""
    from deepspeed.runtime.swap_tensor import pipelined_optimizer_swapper as pipelined

    write, wait = pipelined.swap_out_tensors, pipelined.OptimizerSwapOp.wait
    held: list[tuple[Any, ...]] = []

    def waited(operation: Any) -> None:
        while held and not operation.read_op:
            write(*held.pop(0))
        wait(operation)

    pipelined.swap_out_tensors = lambda *words: held.append(words)
    pipelined.OptimizerSwapOp.wait = waited


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    if words[0] == "late":
        write_late()
        words = words[1:]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    engine = build(folder, words)
    stored = load_file(folder / "model/model.safetensors")
    found: dict[str, object] = {"begun": same(stored, masters(engine))}
    train(engine, batches(4), accumulate=2, lr=1e-3)
    body, before = engine._module.model.model, masters(engine)
    forward, calls = engine._module.forward, 0
    whole = body.layers

    def without_last(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        body.layers = whole[:-1] if calls == 1 else whole
        return forward(*args)

    engine._module.forward = without_last
    try:
        train(engine, batches(2), accumulate=2, lr=1e-3)
        found["refused"] = None
    except TrainerError as error:
        found["refused"] = str(error)
    found["kept"] = same(before, masters(engine))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
