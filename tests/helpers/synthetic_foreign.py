"""Write checkpoints of other trainers in their layouts, from a random state; import them and compare the result.

model_and_state(folder)          a model with random weights, and a random state of it
write_trainer(folder, state)     transformers' Trainer
write_fsdp(folder, state)        the same with FSDP2, through accelerate
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from engine_bench import assert_same, model_directory
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from uneven_targets import random_weights

from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.run.commands.import_checkpoint import Imported, import_checkpoint
from offload_trainer.settings import load_config

STEP, STEPS = 2, 9
KINDS = ("master", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor
GROUP = {"lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def model_and_state(folder: Path, name: str = "qwen3", **sizes: int) -> tuple[Path, State]:
    """Write a small model with random weights; return its directory, and a state of them with random moments."""
    directory = random_weights(model_directory(folder / "model", name, tied=False, **sizes))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {kind: {name: torch.rand_like(p) for name, p in masters.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return directory, {"master": masters, **moments}


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


def write_fsdp(folder: Path, state: State) -> None:
    """Write the two directories of SHARDED_STATE_DICT, and the Trainer's file."""
    weights, optimizer = distributed(state)
    dcp.save({"model": weights}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    write_trainer_state(folder)


def distributed(state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights and optimizer as get_state_dict does."""
    moments = {name: _moments(state, name) for name in state["master"]}
    return state["master"], {"state": moments, "param_groups": [GROUP | {"params": list(moments)}]}


def _moments(state: State, name: str) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(float(STEP))} | {kind: state[kind][name] for kind in ("exp_avg", "exp_avg_sq")}


def imported(source: Path, run: Path, *words: str, notes: list[str] | None = None) -> Imported:
    """Import `source` as the command with `words` does; check the manifest of what it wrote."""
    config = load_config(list(words))
    done = import_checkpoint(source, run, config, say=(notes if notes is not None else []).append)
    read_manifest(done.checkpoint)
    return done


def state_of(checkpoint: Path) -> State:
    return {kind: load_file(checkpoint / f"{kind}.safetensors") for kind in KINDS}


def assert_same_state(found: State, expected: State) -> None:
    """Assert that both have the same names and bit-identical tensors, none of them all zeros."""
    for kind in KINDS:
        assert_same(found[kind], expected[kind])
        assert any(tensor.any() for tensor in expected[kind].values())
