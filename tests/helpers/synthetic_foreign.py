"""Write checkpoints of other trainers in their layouts, from weights at hand.

write_trainer(folder, state)     transformers' Trainer; write_zero: DeepSpeed ZeRO-2 of one rank; write_fsdp: accelerate
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

STEP, STEPS = 2, 9
State = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor
GROUP = {"lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def random_state(masters: dict[str, torch.Tensor]) -> State:
    """Return a state with these masters and random moments."""
    moments = {kind: {name: torch.rand_like(p) for name, p in masters.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return {"master": masters, **moments}


def write_trainer(folder: Path, state: State) -> None:
    """Write a Trainer's files; the names of norms contain "norm", as the Trainer's rule for weight decay expects."""
    save_file(state["master"], folder / "model.safetensors", metadata={"format": "pt"})
    order = sorted(state["master"], key=lambda name: "norm" in name)
    count = sum("norm" not in name for name in order)
    groups = [
        GROUP | {"params": list(range(count))},
        GROUP | {"params": list(range(count, len(order))), "weight_decay": 0.0},
    ]
    moments = {number: _moments(state, name) for number, name in enumerate(order)}
    torch.save({"state": moments, "param_groups": groups}, folder / "optimizer.pt")
    write_trainer_state(folder)


def write_trainer_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP, "max_steps": STEPS}))


def write_zero(folder: Path, state: State, *, scaler: Any = None) -> None:
    """Write a tag of ZeRO-2, and the file that names it."""
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    flat = {kind: torch.cat([p.reshape(-1) for p in tensors.values()]) for kind, tensors in state.items()}
    base = {"state": {0: {"step": STEP, "exp_avg": flat["exp_avg"], "exp_avg_sq": flat["exp_avg_sq"]}}}
    optimizer = {
        "single_partition_of_fp32_groups": [flat["master"]],
        "base_optimizer_state": base | {"param_groups": [GROUP | {"params": [0]}]},
        "partition_count": 1,
        "loss_scaler": scaler,
    }
    shapes = {name: p.shape for name, p in state["master"].items()}
    about = {"param_shapes": [shapes], "frozen_param_shapes": {}, "global_steps": STEP, "mp_world_size": 1}
    torch.save({"optimizer_state_dict": optimizer}, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(about, tag / "mp_rank_00_model_states.pt")


def write_fsdp(folder: Path, state: State) -> None:
    """Write the two directories of SHARDED_STATE_DICT, and the Trainer's file."""
    moments = {name: _moments(state, name) for name in state["master"]}
    groups = [GROUP | {"params": list(moments)}]
    folder.mkdir(exist_ok=True)
    dcp.save({"model": state["master"]}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    optimizer = {"optimizer": {"state": moments, "param_groups": groups}}
    dcp.save(optimizer, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    write_trainer_state(folder)


def _moments(state: State, name: str) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(float(STEP))} | {kind: state[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
