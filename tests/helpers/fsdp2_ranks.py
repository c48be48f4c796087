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
from pathlib import Path

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
    said = [folder / f"said{rank}" for rank in range(ranks)]
    started = [
        start(__file__, folder, rank, ranks, int(flat), stdout=out, stderr=out, own=True)
        for rank, out in enumerate(said)
    ]
    codes = [process.wait(300) for process in started]
    assert not any(codes), [out.read_text()[-3000:] for out in said]
    losses: list[float] = json.loads(said[0].read_text().splitlines()[-1])
    return losses


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

    def step(number: int) -> float:
        inputs = torch.cat([data[number].inputs, data[number].targets[:, -1:]], 1)
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / ranks

    for number in range(BEFORE):
        step(number)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    weights, state = get_state_dict(model, adam, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / "dcp"))
    whole, gathered = get_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        (folder / "state").mkdir()
        moments = ("exp_avg", "exp_avg_sq")
        kinds = {kind: {name: its[kind] for name, its in gathered["state"].items()} for kind in moments}
        for kind, tensors in {"master": whole, **kinds}.items():
            made = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
            save_file(made, folder / f"state/{kind}.safetensors")
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
