"""Compare planned GPU bytes with those that torch tracks. This needs neither a GPU nor the memory.

    compare_gpu_bytes.py [--only TEXT ...] [--quick] [--table FILE] [--json FILE]

The module that a run trains, at full depth with loss, checkpointing and hand-over of gradients, runs forward and
backward on tensors without memory (FakeTensorMode). torch.distributed._tools.mem_tracker.MemTracker records the peak.
The planned figure leaves out what no tensor shows: the driver's context, gradients that are still being copied, and
the allocator's margin.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from offload_trainer.config import TrainConfig
from offload_trainer.model import presets
from offload_trainer.model.loader import ModelSource, resolve_model
from offload_trainer.model.ulysses import share_rows
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.planner import make_plan
from offload_trainer.storage.owned_dirs import scratch

UNSEEN = ("CUDA context", "reserve", "allocator", "gradients in flight", "NCCL", "broadcasts")  # not visible as tensors

_LLAMA = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_key_value_heads": 8, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {  # the keys of their config.json that affect bytes
    "Llama-3-8B": {
        **_LLAMA,
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "vocab_size": 128256},
    },
    "Qwen3-8B": {
        **_LLAMA,
        **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
    },
    "Mixtral-8x7B": {
        **_LLAMA,
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        **{"sliding_window": None, "max_position_embeddings": 32768},
    },
    "Qwen3-30B-A3B": {
        **_LLAMA,
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
        **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960},
    },
}
PRESETS = ("gpt2-medium", "gpt2-xl", "gpt2-10b")


@dataclass(frozen=True)
class Case:
    model: str
    rows: int
    length: int
    checkpointing: str  # "on", "a third" of the blocks, or "off"
    offloaded: bool = False

    @property
    def name(self) -> str:
        words = [] if self.offloaded and self.checkpointing == "on" else [self.checkpointing]
        kept = " ".join([*words, *(["in host memory"] if self.offloaded else [])])
        return f"{self.model}, {self.rows} x {self.length}, checkpointing {kept}"


def cases(*, quick: bool) -> list[Case]:
    sizes = [(4, 1024)] if quick else [(rows, length) for length in (1024, 8192) for rows in (1, 4, 16)]
    kinds = [("on", False), ("on", True), ("a third", False), ("a third", True), ("off", False)]
    return [Case(model, *size, *kind) for model in (*PRESETS, *SHAPES) for size in sizes for kind in kinds]


def wish(case: Case, folder: Path) -> TrainConfig:
    shape = SHAPES.get(case.model) or presets.PRESETS[case.model]
    section: dict[str, Any] = {"name": case.model, "activation_checkpointing": case.checkpointing}
    if case.checkpointing == "a third":
        section["activation_checkpointing"] = max(1, (shape.get("num_hidden_layers") or shape["n_layer"]) // 3)
    if case.model in SHAPES:
        directory = folder / case.model
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(SHAPES[case.model]))
        section |= {"name": str(directory), "random_init": True}
    elif case.length > 1024:
        section["overrides"] = {"n_positions": case.length}  # its own context is 1024
    if case.offloaded:
        section["offload_activations"] = "cpu"
    return TrainConfig.model_validate(
        {
            "model": section,
            "data": {"seq_len": case.length},
            "train": {"micro_batch_size": case.rows, "gradient_accumulation_steps": 1},
            "placement": {"engine": "tiered", "params": "gpu", "optimizer": "cpu", "ram_fraction": 1.0},
            "save": {"every": 0},
        }
    )


def planned(config: TrainConfig, source: ModelSource) -> int:
    """Return the planned GPU bytes of one rank, without `UNSEEN` items."""
    machine = MachineProfile(
        gpu="any", gpu_bytes=10**13, ram_bytes=10**13, cores=8, drives=(), output=DriveFacts("/out", 10**13, "ext4")
    )
    ranks = config.parallel.sequence
    plan = make_plan(config, source.shape, machine, world=ranks)
    # Offloaded block inputs are freed immediately here; the plan also counts those in transit.
    unseen = (*UNSEEN, "block inputs") if config.model.offload_activations else UNSEEN
    return sum(item.bytes for item in plan.items if item.tier == "gpu" and item.name not in unseen) // ranks


def tracked(config: TrainConfig, source: ModelSource) -> int:
    """Return the peak bytes of a micro-batch with the weights, or of a rank's part of it if ranks share rows."""
    with ExitStack() as stack:
        # transformers would inspect values that do not exist; rows of consecutive positions are not packed.
        asked = masking_utils.find_packed_sequence_indices
        stack.callback(setattr, masking_utils, "find_packed_sequence_indices", asked)
        masking_utils.find_packed_sequence_indices = lambda *_: None
        stack.enter_context(FakeTensorMode())
        chunk = config.model.mlp_chunk
        module = source.build(dtype=torch.bfloat16, mlp_chunk=chunk if isinstance(chunk, int) else 0)
        module.train()
        length, positions = config.data.seq_len, list[torch.Tensor]()
        if (count := config.parallel.sequence) > 1:
            share_rows(module.model, send=torch.empty_like, count=count)
            length //= count
            positions.append(torch.zeros(config.train.micro_batch_size, length, dtype=torch.int64))
        tied = _take_apart(module)
        if config.model.offload_activations:
            _keep_inputs_elsewhere(module)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, tied))
        tokens = torch.zeros(config.train.micro_batch_size, length, dtype=torch.int64)
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


def _hand_over(tied: dict[int, list[torch.Tensor]], parameter: torch.nn.Parameter) -> None:
    """Drop a complete gradient; a tied weight's first one is kept until that of its other use is added."""
    gradient, parameter.grad = parameter.grad, None
    waiting = tied.get(parameter.untyped_storage()._cdata)
    if waiting is None or gradient is None:
        return
    if waiting:
        waiting.pop().add_(gradient)
    else:
        waiting.append(gradient)


def _take_apart(module: torch.nn.Module) -> dict[int, list[torch.Tensor]]:
    """Give each use of a tied weight its own parameter on the same memory, as the engine does.

    Return an empty list for waiting gradients, keyed by the storage of each tied weight.
    """
    seen: set[int] = set()
    tied: dict[int, list[torch.Tensor]] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in seen:
                part._parameters[key] = torch.nn.Parameter(parameter.detach())
                tied[parameter.untyped_storage()._cdata] = []
            seen.add(id(parameter))
    return tied


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


def table(found: dict[Case, tuple[int, int]]) -> Iterator[str]:
    yield "| model | rows x tokens | checkpointing | tracked GB | planned GB | planned / tracked |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case, (seen, said) in found.items():
        name, size, kept = case.name.split(", ")
        kept = kept.removeprefix("checkpointing ")
        yield f"| {name} | {size} | {kept} | {seen / 1e9:.3f} | {said / 1e9:.3f} | {said / seen:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="part of a case's name; repeat it for several")
    parser.add_argument("--quick", action="store_true", help="4 x 1024 only")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", type=Path, help="keeps what was tracked; cases that are in it are not tracked again")
    options = parser.parse_args()
    found: dict[Case, tuple[int, int]] = {}
    kept: dict[str, int] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with scratch("gpu-bytes-") as folder:
        for case in cases(quick=options.quick):
            if options.only and not any(part in case.name for part in options.only):
                continue
            start = time.process_time()
            config = wish(case, folder)
            source = resolve_model(config.model, seed=0)
            if case.name not in kept:
                kept[case.name] = tracked(config, source)
                gc.collect()
                if options.json:
                    options.json.write_text(json.dumps(kept, indent=1) + "\n")
            found[case] = kept[case.name], planned(config, source)
            seen, said = found[case]
            took = time.process_time() - start
            print(f"{case.name}: {said / seen:.3f} of {seen / 1e9:.3f} GB, {took:.0f} s", flush=True)
    print("\n".join(table(found)))
    if options.table:
        options.table.write_text("\n".join(table(found)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
