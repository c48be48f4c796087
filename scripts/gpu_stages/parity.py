"""Compare every placement of weights and state with plain torch within a tolerance, and with each other bit for bit.

All cases run under torch's deterministic algorithms, without which CUDA adds gradients of attention and embeddings in
an arbitrary order. One process runs all cases; a case that crashes it loses only its own result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from statistics import median
from typing import Any

from gpu_stages.stage import Stage

BOUND = 2e-2  # relative difference of a loss from plain torch's, whose update kernel rounds differently
STEPS = 6
PLAIN = "plain torch"
# Weights, and the state's fractions on the GPU and in RAM (the rest is on the drive), and the update's overlap.
_ALL_ON_GPU, _ALL_IN_RAM = ("gpu", 1.0, 0.0, "off"), ("gpu", 0.0, 1.0, "backward")
_MIXED, _AWAY, _ON_DRIVE = ("gpu", 0.3, 0.3, "backward"), ("cpu", 0.0, 1.0, "forward"), ("nvme", 0.0, 0.0, "backward")
Placed = tuple[str, float, float, str]


@dataclass(frozen=True)
class Setting:
    """The settings that compared runs share."""

    dtype: str
    accumulate: int  # micro-batches a step
    limit: int  # optim.max_grad_norm

    def __str__(self) -> str:
        return f"{self.dtype}, {self.accumulate} micro-batches, gradients clipped at {self.limit}"


# A sparse matrix: every placement once, and twice those that differ in a clipped step, in fp16 and with accumulation.
MATRIX: Mapping[Setting, Sequence[Placed]] = {
    Setting("bf16", 1, 1000): [
        *(_ALL_ON_GPU, _MIXED, _ALL_IN_RAM, _AWAY, _ON_DRIVE),
        *(("gpu", 0.0, 1.0, "forward"), ("cpu", 0.3, 0.3, "backward")),
    ],
    Setting("bf16", 4, 1): [_ALL_ON_GPU, _MIXED, _ALL_IN_RAM],
    Setting("fp16", 4, 1000): [_ALL_ON_GPU, _MIXED, _AWAY],
}
REHEARSED = 2  # placements of each setting in a rehearsal


def carry_out(stage: Stage) -> None:
    stage.record.note(f"Deterministic algorithms; dropout 0.1; differences up to {BOUND:g} in the loss pass.")
    for setting, places in MATRIX.items():
        compared = Compared()
        for placed in (None, *places[: REHEARSED if stage.rehearsal else None]):
            name = f"{setting}: {told(placed)}"
            stage.add_row(partial(_compare, stage, setting, placed, compared), case=name, plain=placed is None)


def _compare(stage: Stage, setting: Setting, placed: Placed | None, compared: Compared, row: dict[str, Any]) -> str:
    """Train one case, complete its row and return the outcome."""
    words = [*_words(setting, tiny=stage.rehearsal), *_home(placed, tiny=stage.rehearsal)]
    peer = "plain" if placed is None else None
    found = stage.run(words, kept=True, steps=2 if stage.rehearsal else STEPS, digest=True, peer=peer)
    steps, early = found["steps"], found["early"] or {"valid": 0, "pages": 0}
    row |= {
        "steps": len(steps),
        "skipped": sum(step["skipped"] for step in steps),
        "clipped": sum((step["grad_norm"] or 0.0) > setting.limit for step in steps),
        "pages updated early, valid": f"{early['valid']} of {early['pages']}",
        "redone": early["pages"] - early["valid"],
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "digest": found["digest"],
        "step": median(step["step"] for step in steps[1:]),
    }
    return compared.outcome(row)


def told(placed: Placed | None) -> str:
    """Return a placement in words."""
    if placed is None:
        return PLAIN
    weights, gpu, ram, overlap = placed
    return f"weights {weights}, state {gpu:g} GPU, {ram:g} RAM, {1 - gpu - ram:.1g} drive, overlap {overlap}"


class Compared:
    """The results of plain torch and of the first placement, for one dtype and number of micro-batches."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None

    def outcome(self, row: dict[str, Any]) -> str:
        """Return the outcome of comparing a row; set its `apart` and `same`.

        `apart` is the largest difference of a loss to plain torch's; `same` says whether losses, norms and masters are
        those of the first placement.
        """
        if row["plain"]:
            self._plain = row
            return "ok"
        wrong = []
        if row["redone"] and not row["clipped"]:
            wrong.append(f"{row['redone']} pages were updated again, though no step was clipped")
        if self._plain is not None:
            row["apart"] = _furthest(row["losses"], self._plain["losses"])
            if not row["apart"] < BOUND:  # the negation also catches NaN
                wrong.append(f"loss is {row['apart']:.2g} from plain torch's")
        if self._first is None:
            self._first = row
        else:
            wrong += [f"{key} differ" for key in ("losses", "norms", "digest") if row[key] != self._first[key]]
            row["same"] = not any(word.endswith("differ") for word in wrong)
        return f"failed: {', '.join(wrong)}" if wrong else "ok"


def _furthest(losses: Sequence[float], plain: Sequence[float]) -> float:
    """Return the largest difference, or NaN if a loss is NaN."""
    apart = [abs(one - other) for one, other in zip(losses, plain, strict=True)]
    return float("nan") if any(map(isnan, apart)) else max(apart)


def _words(setting: Setting, *, tiny: bool) -> list[str]:
    # 49 M parameters: a step with all state on the drive moves 0.6 GB each way.
    model = ["--model", "gpt2", "model.overrides.n_layer=6", "model.overrides.vocab_size=8192"]
    model += ["--seq-len", "256", "--micro-batch", "4"]
    if tiny:
        model = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
    more = ["model.overrides.resid_pdrop=0.1", "model.activation_checkpointing=on"]
    rate = ["--lr", "5e-5", "optim.warmup_steps=10", "train.deterministic=true"]
    step = ["--dtype", setting.dtype, "--accumulate", str(setting.accumulate), f"optim.max_grad_norm={setting.limit}"]
    return [*model, *more, *rate, *step]


def _home(placed: Placed | None, *, tiny: bool) -> list[str]:
    if placed is None:
        return ["--engine", "tiered", "--params", "gpu", "--optimizer", "gpu"]  # the plan; the engine is plain torch
    weights, gpu, ram, overlap = placed
    words = ["--engine", "tiered", "--params", weights, "{drive}", f"tiered.overlap={overlap}"]
    words += ["placement.gradients=nvme"] if weights == "nvme" else []
    words += ["tiered.page_size=65536"] if tiny else []
    return [*words, "--gpu-fraction", str(gpu), "--ram-fraction", str(ram)]
