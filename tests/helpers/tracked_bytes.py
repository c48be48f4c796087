"""GPU bytes of a micro-batch as planned and as torch tracks them; this needs neither a GPU nor the memory.

The module that a run trains, with loss, checkpointing and hand-over of gradients, runs forward and backward on tensors
without memory (FakeTensorMode). torch.distributed._tools.mem_tracker.MemTracker records the peak. The planned figure
leaves out what no tensor shows: the driver's context, gradients still being copied, and the allocator's margin.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from offload_trainer.config import TrainConfig
from offload_trainer.model.attention import share_rows
from offload_trainer.model.init_weights import without_values
from offload_trainer.model.loader import ModelSource
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.planner import make_plan
from offload_trainer.settings import load_config

UNSEEN = ("CUDA context", "reserve", "allocator", "gradients in flight", "NCCL", "broadcasts")  # not visible as tensors


def config_of(
    shape: dict[str, Any], kept: str, *, folder: Path, rows: int, length: int, ranks: int = 1, **model: Any
) -> TrainConfig:
    """Return the configuration of a model with the keys `shape` of its config.json, and more keys of `model`.

    `kept` is a value of model.activation_checkpointing; after it, " in RAM" offloads the blocks' inputs.
    """
    (folder / "config.json").write_text(json.dumps(shape))
    checkpointed, _, offloaded = kept.partition(" in ")
    model |= {"activation_checkpointing": checkpointed, "offload_activations": "cpu" if offloaded else "false"}
    words = ["--engine", "tiered", "--params", "gpu", "--optimizer", "cpu", "--ram-fraction", "1", "--save-every", "0"]
    words += ["--seq-len", str(length), "--micro-batch", str(rows), f"parallel.sequence={ranks}"]
    words += [f"model.{key}={value}" for key, value in model.items()]
    return load_config(["--model", str(folder), "--scratch", *words])


def planned(config: TrainConfig, source: ModelSource, *, session: bool = False) -> int:
    """Return the planned GPU bytes of one rank, of a run or a session, without those that no tensor shows."""
    machine = MachineProfile(
        gpu="any", gpu_bytes=10**13, ram_bytes=10**13, cores=8, drives=(), output=DriveFacts("/out", 10**13, "ext4")
    )
    ranks = config.parallel.sequence
    plan = make_plan(config, source.shape, machine, world=ranks, saves=not session)
    # Offloaded block inputs are freed immediately here; the plan also counts those in transit.
    unseen = (*UNSEEN, "block inputs") if config.model.offload_activations else UNSEEN
    return sum(item.bytes for item in plan.items if item.tier == "gpu" and item.name not in unseen) // ranks


def tracked(config: TrainConfig, source: ModelSource, *, session: bool = False) -> int:
    """Return the peak bytes of a micro-batch with the weights, or of a rank's part of it if ranks share rows.

    `session`: the uses of a tied weight share one parameter.
    """
    with ExitStack() as stack:
        # transformers would inspect values that do not exist; rows of consecutive positions are not packed.
        asked = masking_utils.find_packed_sequence_indices
        stack.callback(setattr, masking_utils, "find_packed_sequence_indices", asked)
        masking_utils.find_packed_sequence_indices = lambda *_: None
        stack.enter_context(FakeTensorMode())
        chunk = config.model.mlp_chunk
        module = source.build(dtype=torch.bfloat16, mlp_chunk=chunk if isinstance(chunk, int) else 0)
        module.train()
        module.summed = partial(module.summed, gpu=True)
        length, positions = config.data.seq_len, list[torch.Tensor]()
        if (count := config.parallel.sequence) > 1:
            share_rows(module.model, torch.empty_like, count=count)
            length //= count
            positions.append(torch.zeros(config.train.micro_batch_size, length, dtype=torch.int64))
        tokens = torch.zeros(config.train.micro_batch_size, length, dtype=torch.int64)
        parameters = without_values(module.model, dtype=torch.bfloat16, place=tokens.device, separate=not session)
        for uses in parameters.values():
            memory, waiting = torch.empty(uses[0].shape, dtype=torch.bfloat16), list[torch.Tensor]()
            for use in uses:
                use.data = memory
                use.register_post_accumulate_grad_hook(partial(_hand_over, waiting if len(uses) > 1 else None))
        if config.model.offload_activations:
            _keep_inputs_elsewhere(module)
        tracker = _Peak()
        tracker.track_external(module, tokens)
        with tracker:
            module(tokens, tokens, None, tokens.numel(), *positions).backward()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


class _Peak(MemTracker):
    """A MemTracker without per-module statistics, which take most of its time."""

    def _note(self, *_: Any) -> None:
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _note


def _hand_over(waiting: list[torch.Tensor] | None, parameter: torch.nn.Parameter) -> None:
    """Drop a complete gradient; a tied weight's first one is kept until that of its other use is added."""
    gradient, parameter.grad = parameter.grad, None
    if waiting:
        waiting.pop().add_(gradient)
    elif waiting is not None:
        waiting.append(gradient)


def _keep_inputs_elsewhere(module: Any) -> None:
    """Simulate offloading of checkpointed inputs by moving them to the meta device, which is not counted."""

    def kept_elsewhere(function: Any, *args: Any, **kwargs: Any) -> Any:
        def back(there: torch.Tensor) -> torch.Tensor:
            return torch.empty(there.shape, dtype=there.dtype)

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.to("meta"), back):
            return checkpoint(function, *args, **kwargs)

    for part in module.modules():
        if hasattr(part, "_gradient_checkpointing_func"):
            part._gradient_checkpointing_func = partial(kept_elsewhere, use_reentrant=False)
