"""Train with FSDP2 on the CPU, save a checkpoint of torch.distributed.checkpoint, and train on.

fsdp2_checkpoint(folder, kind, ranks=2)      run `ranks` ranks; FOLDER holds `model`, a directory with weights

After `BEFORE` steps the ranks write FOLDER/checkpoint. KIND says how:

    numbered    get_state_dict: settings by number of the group
    flat        the same: settings by name of the weight
    trainer     accelerate's two directories, and the other files of transformers' Trainer

Rank 0 writes FOLDER/state, the state that torch gathers, one file a kind.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from engine_bench import batches
from forked_ranks import in_ranks
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.trainer_callback import TrainerState

from offload_trainer.ranks import join_torch, place_here

BEFORE, AFTER, STEPS, LR = 3, 3, 9, 1e-2
DECAY, BETAS = 0.1, (0.9, 0.95)


def fsdp2_checkpoint(folder: Path, kind: str, *, ranks: int, frozen: str = "-") -> list[float]:
    """Run the ranks; return the losses of `AFTER` further steps. `frozen` is part of names of weights, or -."""
    losses: list[float] = in_ranks(_train, folder, kind, frozen, count=ranks, folder=folder / "ranks", own=True)[0]
    return losses


def write_checkpoint(directory: Path, model: Any, adam: Any, scheduler: Any, *, kind: str) -> None:
    if kind != "trainer":
        options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat")
        weights, state = get_state_dict(model, adam, options=options)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(directory))
        return
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    save_fsdp_model(plugin, accelerator, model, str(directory))
    save_fsdp_optimizer(plugin, accelerator, adam, model, str(directory))
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), directory / "scheduler.pt")
        TrainerState(global_step=BEFORE, max_steps=STEPS).save_to_json(str(directory / "trainer_state.json"))


def write_state(folder: Path, model: Any, adam: Any) -> None:
    """Write the state that torch gathers, on rank 0 alone; weights without state are `fixed`."""
    whole, gathered = get_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() > 0:
        return
    (folder / "state").mkdir()
    moments = ("exp_avg", "exp_avg_sq")
    kinds = {kind: {name: its[kind] for name, its in gathered["state"].items()} for kind in moments}
    kinds["master"] = {name: whole[name] for name in gathered["state"]}
    kinds["fixed"] = {name: tensor for name, tensor in whole.items() if name not in gathered["state"]}
    for kind, tensors in kinds.items():
        made = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(made, folder / f"state/{kind}.safetensors")


def _train(folder: Path, kind: str, frozen: str) -> list[float]:
    join_torch("gloo")
    rank, ranks = place_here()
    PartialState(cpu=True)  # accelerate's loggers ask for it
    mesh = init_device_mesh("cpu", (ranks,))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    scheduler = get_scheduler("constant", adam)
    data = batches((BEFORE + AFTER) * ranks)[rank::ranks]

    def step(number: int) -> float:
        inputs = torch.cat([data[number].inputs, data[number].targets[:, -1:]], 1)
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        scheduler.step()
        adam.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / ranks

    for number in range(BEFORE):
        step(number)
    write_checkpoint(folder / "checkpoint", model, adam, scheduler, kind=kind)
    write_state(folder, model, adam)
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    dist.destroy_process_group()
    return losses
