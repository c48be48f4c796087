"""Train with FSDP on the CPU, save a checkpoint as transformers' Trainer does with accelerate, and train on.

fsdp_checkpoint(folder, ranks=2, version=2, kind="SHARDED_STATE_DICT")     run the ranks; FOLDER holds `model`
accelerate_fsdp_ranks.py FOLDER RANK RANKS VERSION KIND FROZEN     run one of the ranks; FROZEN is part of names, or -

After `BEFORE` steps the ranks write FOLDER/checkpoint-N with accelerate's functions. Rank 0 adds the other files of a
Trainer, writes FOLDER/state, the state that torch gathers, one file a kind, and prints the losses of `AFTER` further
steps as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from engine_bench import batches
from fsdp2_ranks import AFTER, BEFORE, BETAS, DECAY, LR, losses_of_ranks, mean_loss, write_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.trainer_callback import TrainerState

STEPS = 9


def fsdp_checkpoint(folder: Path, *, ranks: int, version: int, kind: str, frozen: str = "-") -> list[float]:
    """Run the ranks; return the losses of the steps after the checkpoint."""
    return losses_of_ranks(__file__, folder, ranks, [version, kind, frozen])


def sharded(model: Any, *, ranks: int, version: int) -> Any:
    if version == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def write_checkpoint(folder: Path, model: Any, adam: Any, scheduler: Any, *, version: int, kind: str) -> None:
    """Write what Trainer._save_checkpoint writes with FSDP."""
    directory = folder / f"checkpoint-{BEFORE}"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    processes = dist.get_world_size()
    if version == 1:  # FSDP 1 frees and reuses memory that it "offloads" from the CPU to the CPU, and reads it later
        plugin.optim_state_dict_config.offload_to_cpu = False
        processes = 1  # accelerate offloads the weights if there are more
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=processes)
    save_fsdp_model(plugin, accelerator, model, str(directory))
    save_fsdp_optimizer(plugin, accelerator, adam, model, str(directory))
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), directory / "scheduler.pt")
        TrainerState(global_step=BEFORE, max_steps=STEPS).save_to_json(str(directory / "trainer_state.json"))


def main() -> None:
    folder, rank, ranks, version, kind, frozen = Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:7]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    PartialState(cpu=True)  # accelerate's loggers ask for it
    whole = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(frozen not in name)
    model = sharded(whole, ranks=ranks, version=version)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if ("norm" in name) == vector], "weight_decay": decay}
        for vector, decay in ((False, DECAY), (True, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    scheduler = get_scheduler("constant", adam)
    data = batches((BEFORE + AFTER) * ranks)[rank::ranks]

    def update() -> None:
        if version == 1:
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        scheduler.step()
        adam.zero_grad()

    def step(number: int) -> float:
        return mean_loss(model, data[number], ranks=ranks, update=update)

    for number in range(BEFORE):
        step(number)
    write_checkpoint(folder, model, adam, scheduler, version=version, kind=kind)
    write_state(folder, model, adam, offload=version == 2)
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
