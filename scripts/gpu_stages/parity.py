"""Compare every placement of weights and state with plain torch within a tolerance, and with each other bit for bit.

All cases run under torch's deterministic algorithms, without which CUDA adds gradients of attention and embeddings in
an arbitrary order. One process runs all cases of a dtype; a case that crashes it loses only its own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import isnan
from typing import Any

from gpu_stages.stage import Failure, Stage, Worker, middle

TITLE = "Homes against plain torch and against each other"
COLUMNS = {
    "dtype": "dtype",
    "accumulate": "micro-batches a step",
    "weights": "weights",
    "shares": "state on GPU, RAM, drive",
    "overlap": "overlap",
    "steps": "steps",
    "skipped": "skipped",
    "apart": "largest loss difference to plain torch",
    "same": "losses, norms, masters as the first home's",
    "step": "step s",
}
BOUND = 2e-2  # relative difference of a loss from plain torch's, whose update kernel rounds differently
WEIGHTS = ("gpu", "cpu", "nvme")
SHARES = ((1.0, 0.0), (0.3, 0.3), (0.0, 1.0), (0.0, 0.0))  # fractions on the GPU and in RAM, the rest on NVMe
_REHEARSED = (("gpu", SHARES[0]), ("gpu", SHARES[1]), ("cpu", SHARES[2]), ("nvme", SHARES[3]))


def carry_out(stage: Stage) -> None:
    homes = _REHEARSED if stage.rehearsal else tuple(product(WEIGHTS, SHARES))
    stage.record.note(f"Deterministic algorithms; dropout 0.1; differences up to {BOUND:g} in the loss pass.")
    worker: Worker | None = None
    for dtype, accumulate in product(("bf16", "fp16"), (1, 4)):
        compared = Compared()
        for weights, shares in [("plain torch", None), *homes]:
            row = {"dtype": dtype, "accumulate": accumulate, "weights": weights, "shares": _told(shares)}
            row["overlap"] = overlap_of(shares) if shares is not None else None
            try:
                if worker is None:
                    worker = stage.worker("parity")
                found = _run(
                    stage, worker, [*_words(stage, dtype, accumulate), *_home(weights, shares, tiny=stage.rehearsal)]
                )
                row |= found
                stage.record.add(compared.outcome(row), **row)
            except Failure as failure:
                worker = None  # the failed process has ended
                stage.record.add(str(failure), **row)
    if worker is not None:
        worker.end()


class Compared:
    """The results of plain torch and of the first placement, for one dtype and number of micro-batches."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None

    def outcome(self, row: dict[str, Any]) -> str:
        """Return the outcome of comparing a row; set its `apart` and `same`."""
        if row["shares"] is None:
            self._plain = row
            return "ok"
        wrong = []
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


def _run(stage: Stage, worker: Worker, words: list[str]) -> dict[str, Any]:
    count = 2 if stage.rehearsal else 20
    worker.build(words)
    steps = worker.ask("steps", count=count)["steps"]
    digest = worker.ask("digest")["digest"]
    worker.ask("close")
    return {
        "steps": count,
        "skipped": sum(step["skipped"] for step in steps),
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "digest": digest,
        "step": middle(steps[1:], "step"),
    }


def _words(stage: Stage, dtype: str, accumulate: int) -> list[str]:
    # 49 M parameters: a step with all state on the drive moves 0.6 GB each way.
    model = ["--model", "gpt2", "model.overrides.n_layer=6", "model.overrides.vocab_size=8192"]
    model += ["--seq-len", "256", "--micro-batch", "4"]
    if stage.rehearsal:
        model = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
    more = ["model.overrides.resid_pdrop=0.1", "model.activation_checkpointing=on", "optim.initial_loss_scale=1024"]
    rate = ["--lr", "5e-5", "optim.warmup_steps=10", "train.deterministic=true"]
    return [*model, *more, *rate, "--dtype", dtype, "--accumulate", str(accumulate)]


def _home(weights: str, shares: tuple[float, float] | None, *, tiny: bool) -> list[str]:
    if shares is None:
        return ["--engine", "plain"]
    gradients = ["placement.gradients=nvme"] if weights == "nvme" else []
    words = ["--engine", "tiered", "--params", weights, "{drive}", *gradients]
    words += ["tiered.page_size=65536"] if tiny else []
    return [
        *words,
        "--gpu-fraction",
        str(shares[0]),
        "--ram-fraction",
        str(shares[1]),
        f"tiered.overlap={overlap_of(shares)}",
    ]


def overlap_of(shares: tuple[float, float]) -> str:
    """Return the overlap to test with this placement; the bits must not depend on it either."""
    if shares[0] == 1:
        return "off"
    return "backward" if sum(shares) < 1 else "forward"


def _told(shares: tuple[float, float] | None) -> str | None:
    return None if shares is None else f"{shares[0]:.1f}, {shares[1]:.1f}, {1 - sum(shares):.1f}"
