"""Test torch.distributed.pipelining on transformers' models; docs/pipeline.md reports the results.

    python soak/pipeline_trial.py FOLDER [--steps 5]

Two ranks (gloo, CPU, fp32) each have half of the blocks of a small model. The model's own forward runs on each, with
identities in place of the missing blocks. A step has four micro-batches and AdamW, and clips the norm over both stages
to 1; the reference is one process with the whole model. The table's rows, each in separate processes:

    traced      torch's own split of the whole model (`pipeline`, by torch.export)
    torch       GPipe and 1F1B, torch's AdamW; a tied head's gradient summed over its two ranks, and not summed
    offloaded   each stage in a session of this package (`ot.offload`), weights and state on a drive
    dropout     the same with dropout, reseeded for each micro-batch on each rank
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import offload_trainer as ot

STAGES, MICRO, ROWS, LENGTH, VOCABULARY, LR = 2, 4, 2, 24, 211, 1e-2
_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
_GPT2 = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64}
_CHANCE = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
CASES = {
    "llama traced": {},
    "gpt2 traced": {},
    "llama torch gpipe": {},
    "llama torch 1f1b": {},
    "gpt2 torch 1f1b": {"ties": True},
    "gpt2 torch 1f1b, ties left": {},
    "gpt2 dropout torch 1f1b": {"ties": True},
    "llama offloaded gpipe": {"offloaded": True},
    "llama offloaded 1f1b": {"offloaded": True},
}


def model_of(case: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if case.startswith("llama"):
        config: Any = LlamaConfig(**_LLAMA, vocab_size=VOCABULARY, tie_word_embeddings=False)
    else:
        chance = dict.fromkeys(_CHANCE, 0.1 if "dropout" in case else 0.0)
        config = GPT2Config(**_GPT2, **chance, vocab_size=VOCABULARY)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def rows_of(steps: int) -> list[torch.Tensor]:
    """Return int64 [MICRO x ROWS, LENGTH + 1] for each step: each token is a function of the one before it."""
    made, generator = [], torch.Generator().manual_seed(5)
    for _ in range(steps):
        columns = [torch.randint(VOCABULARY, (MICRO * ROWS,), generator=generator)]
        for _ in range(LENGTH):
            columns.append((5 * columns[-1] + 3) % VOCABULARY)
        made.append(torch.stack(columns, 1))
    return made


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's contribution to the mean loss of the step."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO


class Passing(nn.Module):
    """An identity in place of a block that another rank has."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states


class Stage(nn.Module):
    """Part of the blocks in the model's own forward, which still computes positions, rotary tables and masks."""

    def __init__(self, model: PreTrainedModel, number: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == STAGES - 1
        body = getattr(model, model.base_model_prefix)
        name = "layers" if hasattr(body, "layers") else "h"
        blocks = getattr(body, name)
        each = len(blocks) // STAGES
        mine = range(number * each, (number + 1) * each)
        setattr(body, name, nn.ModuleList(b if n in mine else Passing() for n, b in enumerate(blocks)))
        self._come: torch.Tensor | None = None
        if not self.first:
            getattr(body, name)[0].register_forward_hook(lambda *_: self._come)
            for embedding in (part for part in body.modules() if isinstance(part, nn.Embedding)):
                tied = embedding.weight is model.get_output_embeddings().weight
                embedding.weight.requires_grad_(tied)  # Its output is discarded; a tied embedding is also the head.
        if not self.last:
            norm = "norm" if hasattr(body, "norm") else "ln_f"
            setattr(body, norm, nn.Identity())
        self.model = model if self.last else body
        self.seeds = iter(range(10**9))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map ids [rows, length] (first stage) or hidden states to hidden states, or to logits (last stage)."""
        torch.manual_seed(next(self.seeds))
        ids = given if self.first else torch.zeros(given.shape[:2], dtype=torch.int64)
        self._come = given
        output = self.model(input_ids=ids, use_cache=False)
        return output.logits if self.last else output.last_hidden_state  # type: ignore[no-any-return]


# -- one process ------------------------------------------------------------------------------------------------------


def alone(case: str, steps: int) -> dict[str, Any]:
    model = model_of(case).train()
    adam = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms, seeds = [], [], iter(range(10**9))
    for rows in rows_of(steps):
        total = 0.0
        for part in rows.chunk(MICRO):
            torch.manual_seed(next(seeds))
            loss = loss_of(model(input_ids=part[:, :-1], use_cache=False).logits, part[:, 1:])
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return {"losses": losses, "norms": norms}


# -- one of two ranks --------------------------------------------------------------------------------------------------


def staged(case: str, steps: int, *, folder: Path, ties: bool = False, offloaded: bool = False) -> dict[str, Any]:
    """Train one rank's stage; return losses and norms."""
    rank = dist.get_rank()
    stage = Stage(model_of(case), rank).train()
    with ExitStack() as stack:
        step = _offloaded(stage, folder / f"drive{rank}", stack) if offloaded else _torch(stage, ties=ties)
        hidden = torch.empty(ROWS, LENGTH, 64, requires_grad=True)
        ids = torch.empty(ROWS, LENGTH, dtype=torch.int64)
        logits = torch.empty(ROWS, LENGTH, VOCABULARY, requires_grad=True)
        part = PipelineStage(
            stage,
            rank,
            STAGES,
            torch.device("cpu"),
            input_args=hidden if rank else ids,
            output_args=logits if rank else hidden,
        )
        kind = ScheduleGPipe if "gpipe" in case else Schedule1F1B
        turns = kind(part, MICRO, loss_fn=loss_of, scale_grads=False)
        losses, norms = [], []
        for rows in rows_of(steps):
            told: list[torch.Tensor] = []
            if rank == 0:
                turns.step(rows[:, :-1].contiguous())
            else:
                turns.step(target=rows[:, 1:].contiguous(), losses=told)
            norms.append(step())
            losses.append(sum(float(loss.detach()) for loss in told))
    return {"losses": losses, "norms": norms}


def _torch(stage: Stage, *, ties: bool) -> Callable[[], float]:
    """Return the update function of one stage, which returns the norm over all stages."""
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LR)
    shared = stage.model.get_input_embeddings().weight if ties else None

    def step() -> float:
        squares = torch.zeros(())
        if shared is not None:
            dist.all_reduce(shared.grad)
        for parameter in trained:
            counts = parameter is not shared or stage.first  # counted once
            squares += parameter.grad.square().sum() * counts if parameter.grad is not None else 0
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        adam.step()
        adam.zero_grad()
        return norm

    return step


def _offloaded(stage: Stage, drive: Path, stack: ExitStack) -> Callable[[], float]:
    """Return the same for a stage whose weights and state are on a drive."""
    drive.mkdir()
    away = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    mine = [name for name, part in stage.named_modules() if type(part).__name__ == "LlamaDecoderLayer"]
    sizes = {"gradient_accumulation_steps": MICRO, "micro_batch_size": ROWS, "seq_len": LENGTH}
    session = stack.enter_context(
        ot.offload(
            stage, blocks=mine, nvme=[str(drive)], ram_fraction=0.0, dtype="fp32", say=lambda _: None, **away, **sizes
        )
    )
    adam = session.adamw(lr=LR)

    def step() -> float:
        mine = session.clip_grad_norm_(float("inf"))
        squares = mine.square()
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        session.clip_grad_norm_(max(1e-30, (float(mine) + 1e-6) * min(1.0, 1.0 / (norm + 1e-6))))
        adam.step()
        adam.zero_grad()
        return norm

    return step


def traced(case: str) -> dict[str, Any]:
    """Split the model with torch's tracer, and compare its parts with the whole model."""
    model = model_of(case).eval()
    ids = rows_of(1)[0][:ROWS, :-1].contiguous()
    at = "model.layers.2" if case.startswith("llama") else "transformer.h.2"
    made = pipeline(model, (ids,), {"use_cache": False}, split_spec={at: SplitPoint.BEGINNING})
    stages = [made.get_stage_module(number) for number in range(made.num_stages)]
    states: Any = (ids,)
    for stage in stages:
        states = stage(*(states if isinstance(states, tuple) else (states,)))
    logits = states.logits if hasattr(states, "logits") else states[0] if isinstance(states, tuple) else states
    expected = model(input_ids=ids, use_cache=False).logits
    shorter = rows_of(1)[0][:ROWS, : LENGTH // 2].contiguous()
    try:
        stages[0](shorter)
        other = "runs"
    except Exception as error:
        other = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"stages": made.num_stages, "apart": float((logits - expected).abs().max()), "rows of another length": other}


# -- all cases ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--as-rank", nargs=2, default=None, help="of its own: the case and the rank")
    asked = parser.parse_args()
    if asked.as_rank:
        return as_rank(*asked.as_rank, folder=asked.folder, steps=asked.steps)
    for number, case in enumerate(case for case in CASES if asked.only in case):
        folder = asked.folder / str(number)
        folder.mkdir(parents=True)
        count = 1 if "traced" in case else STAGES
        words = [sys.executable, __file__, str(folder), "--steps", str(asked.steps), "--as-rank", case]
        logs = [(folder / f"said{rank}").open("w+") for rank in range(count)]
        ranks = [subprocess.Popen([*words, str(rank)], stdout=out, stderr=out) for rank, out in enumerate(logs)]
        codes = []
        for rank in ranks:
            try:
                codes.append(rank.wait(900))
            except subprocess.TimeoutExpired:
                rank.kill()
                codes.append(-9)
        print(f"{case:<28} {told(case, folder, logs, codes, steps=asked.steps)}", flush=True)
    return 0


def as_rank(case: str, rank: str, *, folder: Path, steps: int) -> int:
    torch.set_num_threads(1)
    if "traced" in case:
        found = traced(case)
    else:
        os.environ["LOCAL_RANK"] = rank
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=STAGES)
        found = staged(case, steps, folder=folder, **CASES[case])
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    return 0


def told(case: str, folder: Path, logs: list[Any], codes: list[int], *, steps: int) -> str:
    """Return how far losses and norms are from one process's, or the ranks' last errors."""
    if any(codes):
        said = [Path(log.name).read_text().splitlines() for log in logs]
        errors = [next((line for line in reversed(lines) if "Error: " in line), "") for lines in said]
        return "; ".join(f"rank {number} ended with {code}: {errors[number]}" for number, code in enumerate(codes))
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(len(codes))]
    if "traced" in case:
        return json.dumps(found[0])
    expected = alone(case, steps)
    apart = {
        name: max(abs(a - b) / abs(b) for a, b in zip(found[-1][name], expected[name], strict=True))
        for name in ("losses", "norms")
    }
    return f"losses {apart['losses']:.1e} apart, norms {apart['norms']:.1e}, of one process's {steps} steps"


if __name__ == "__main__":
    sys.exit(main())
