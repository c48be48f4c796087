"""Train with stock DeepSpeed on several ranks; count the bytes that its collectives carry."""

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from engine_bench import batches, masters, train
from forked_ranks import count_calls, counts, in_ranks
from uneven_targets import EPS, LR, masked

from offload_trainer.config import PlacementSection
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.engine.deepspeed import DeepSpeedEngine, deepspeed_config, start_processes
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan
from offload_trainer.settings import load_config

ACCUMULATE = 2
NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def train_stock(folder: Path, *words: str, ranks: int, steps: int = 3) -> Any:
    """Train FOLDER/model, which has weights; return what rank 0 has seen: see `_train`."""
    return in_ranks(_train, folder, words, steps, count=ranks, folder=folder, stock=True)[0]


def planned_bytes(folder: Path, *words: str, ranks: int) -> int:
    """Return the bytes that the plan forecasts through each rank in a step, for FOLDER/model trained as here."""
    told = ["--accumulate", str(ACCUMULATE), "--micro-batch", "2", "--seq-len", "24", "--save-every", "0", *words]
    config = load_config(["--model", str(folder / "model"), "--engine", "deepspeed", *told])
    shape = resolve_model(config.model, seed=0).shape
    plan = make_plan(config, shape, probe_machine(PlacementSection()), world=ranks)
    return sum(one.written for one in plan.links if one.place == "gpus")


def build(folder: Path, words: list[str]) -> DeepSpeedEngine:
    config = load_config(["--model", str(folder / "model"), "--engine", "deepspeed", "--nvme", str(folder), *words])
    source = resolve_model(config.model, seed=0)
    world = start_processes()
    machine = probe_machine(config.placement, output=str(folder))
    plan = make_plan(config, source.shape, machine, world=world)
    how = {"accelerator": "cpu", "swap_directory": str(folder / "swap")}
    told = deepspeed_config(plan.work, config.optim, config.deepspeed, plan.placement, plan.sizes, **how)
    return DeepSpeedEngine(source, plan.work, config.optim, placement=plan.placement, words=told)


def counted(name: str, signature: inspect.Signature, *args: Any, **words: Any) -> dict[str, int]:
    """Return a call of the collective `name`, and the bytes that a ring moves through each of its ranks."""
    given = signature.bind(*args, **words).arguments
    members, tensors = torch.distributed.get_world_size(given.get("group")), list(given.values())
    whole = tensors[1 if name.startswith("reduce_scatter") else 0]
    size = whole.nbytes if isinstance(whole, torch.Tensor) else sum(one.nbytes for one in whole)
    size = (2 if name == "all_reduce" else 1) * size * (members - 1) // members
    # The plan omits less, which carries losses, norms and flags.
    return {"bytes": size, f"{name} of {members}": 1} if size >= 100 else {}


def apart(engine: DeepSpeedEngine, held: dict[str, torch.Tensor]) -> list[str]:
    """Return the unsharded weights whose masters, or values in the model, differ between ranks."""
    mine = dict(held)
    if engine._placement.stage < 3:
        whole = {name: part for name, part in engine._parameters.items() if name not in engine._parts.dims}
        mine |= {f"{name}, in the model": parameter.detach().float().cpu() for name, parameter in whole.items()}
    sums: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(sums, {name: crc32(t.contiguous().numpy()) for name, t in mine.items()})
    return [name for name in mine if len({its[name] for its in sums}) > 1]


def _train(folder: Path, words: list[str], steps: int) -> SimpleNamespace:
    for name in NAMES:
        signature = inspect.signature(getattr(torch.distributed, name))
        count_calls(torch.distributed, name, partial(counted, name, signature))
    use_fp32_products(torch.bfloat16)  # A real run does the same.
    engine = build(folder, ["--accumulate", str(ACCUMULATE), f"optim.eps={EPS}", "--lr", str(LR), *words])
    # A real run splits the data in the same way.
    data = masked(batches(steps * ACCUMULATE * engine.world))[engine.rank :: engine.world]
    lr = engine._optimizer.param_groups[0]["lr"]
    found = train(engine, data, accumulate=ACCUMULATE, lr=lr, before=lambda _: counts.clear())
    called = dict(counts)  # the last step's calls, copied here since reading the masters has collectives too
    held, stage = masters(engine), engine._engine.zero_optimization_stage()
    seen = {"steps": found, "stage": stage, "masters": held, "apart": apart(engine, held)}
    return SimpleNamespace(**seen, bytes=called.pop("bytes"), calls=called)
