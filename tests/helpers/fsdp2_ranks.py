"""Train with FSDP2 on the CPU, save a checkpoint with torch.distributed.checkpoint, and train on.

fsdp2_checkpoint(folder, ranks=2, flat=False)     run `ranks` ranks; FOLDER holds `model`, a directory with weights
fsdp2_ranks.py FOLDER RANK RANKS FLAT     run one of the ranks

After `BEFORE` steps the ranks write FOLDER/dcp: state by name, settings by number of the group or, if FLAT is 1, by
name of the weight. Rank 0 writes FOLDER/state, the state that torch gathers, one file a kind, and prints the losses of
`AFTER` further steps as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from commands import start
from engine_bench import batches
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

BEFORE, AFTER, LR = 3, 3, 1e-2
DECAY, BETAS = 0.1, (0.9, 0.95)


def fsdp2_checkpoint(folder: Path, *, ranks: int, flat: bool = False) -> list[float]:
    """Run the ranks; return the losses of the steps after the checkpoint."""
    return losses_of_ranks(__file__, folder, ranks, [int(flat)])


def losses_of_ranks(script: str, folder: Path, ranks: int, words: Sequence[object]) -> list[float]:
    """Run `script` FOLDER RANK RANKS WORDS for each rank; return the losses that rank 0 prints last."""
    said = [folder / f"said{rank}" for rank in range(ranks)]
    started = [
        start(script, folder, rank, ranks, *words, stdout=out, stderr=out, own=True) for rank, out in enumerate(said)
    ]
    codes = [process.wait(300) for process in started]
    assert not any(codes), [out.read_text()[-3000:] for out in said]
    losses: list[float] = json.loads(said[0].read_text().splitlines()[-1])
    return losses


def mean_loss(model: Any, batch: Any, *, ranks: int, update: Callable[[], None]) -> float:
    """Compute the loss and the gradients of a batch, call `update`, and return the mean loss of all ranks."""
    inputs = torch.cat([batch.inputs, batch.targets[:, -1:]], 1)
    loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
    loss.backward()
    update()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / ranks


def write_state(folder: Path, model: Any, adam: Any, *, offload: bool = True) -> None:
    """Write the state that torch gathers, on rank 0 alone with `offload`; weights without state are `fixed`."""
    whole, gathered = get_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
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


def main() -> None:
    folder, rank, ranks, flat = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    data = batches((BEFORE + AFTER) * ranks)[rank::ranks]

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    def step(number: int) -> float:
        return mean_loss(model, data[number], ranks=ranks, update=update)

    for number in range(BEFORE):
        step(number)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    weights, state = get_state_dict(model, adam, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / "dcp"))
    write_state(folder, model, adam)
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
