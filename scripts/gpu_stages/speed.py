"""Seconds of a step over tokens a step: ours by home of the state, plain torch, stock ZeRO, FSDP2 with CPU offload.

For each number of tokens all cases are built, each in a process of its own, and take steps in turn; those that wait
stand still. What plain torch's forward and backward take alone is the floor under everybody. Stock ZeRO comes in a
second round, beside plain torch and ours again: host memory does not hold all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from gpu_stages import peers
from gpu_stages.record import OUT_OF_TIME
from gpu_stages.stage import Failure, Stage, Worker, middle, spread

TITLE = "Speed over tokens a step, beside others"
COLUMNS = {
    "tokens": "tokens a step",
    "case": "case",
    "rate": "tokens/s",
    "against": "x plain torch",
    "step_spread": "step s (smallest-largest)",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "mfu": "MFU",
    "gpu_peak": "GPU allocated GB",
    "rss": "host peak GB",
    "loss": "loss of the last step",
    "build": "built in s",
}
_OURS = ["--engine", "tiered"]
TRACED = "ours, state in RAM"
_LEFT_OUT = ("ours, state half GPU, half RAM", "ours, weights and state in RAM")
TRACE = "speed-trace.json.gz"


@dataclass
class Case:
    """One way to train, and its process while there is one."""

    name: str
    words: list[str]
    peer: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = "ok"


def first_round() -> list[Case]:
    return [
        _plain(),
        Case("ours, state on the GPU", [*_OURS, "--params", "gpu", "--gpu-fraction", "1"]),
        Case("ours, state half GPU, half RAM", [*_OURS, "--params", "gpu", *_shares("0.5", "0.5")]),
        _in_ram(),
        Case("ours, weights and state in RAM", [*_OURS, "--params", "cpu", *_shares("0", "1")]),
        Case("forward and backward alone", ["--engine", "plain"], peer="native"),
        Case("FSDP2, CPU offload", ["--engine", "plain"], peer="fsdp2"),
    ]


def second_round() -> list[Case]:
    return [
        _plain(),
        _in_ram(),
        Case("ZeRO-2, optimizer in RAM", ["--engine", "deepspeed", "--params", "gpu", "--optimizer", "cpu"]),
        Case("ZeRO-3, both in RAM", ["--engine", "deepspeed", "--params", "cpu", "--optimizer", "cpu"]),
    ]


def _plain() -> Case:
    return Case("plain torch", ["--engine", "plain"])


def _in_ram() -> Case:
    return Case(TRACED, [*_OURS, "--params", "gpu", *_shares("0", "1")])


def _shares(gpu: str, ram: str) -> list[str]:
    return ["--gpu-fraction", gpu, "--ram-fraction", ram]


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how often."""

    model: Sequence[str]
    length: int
    batches: Sequence[tuple[int, int]]  # rows of a micro-batch, micro-batches
    warm: int
    steps: int
    product: int  # side of the matrices whose product is timed


_REAL = Sizes([], 1024, ((8, 1), (2, 1), (8, 4)), warm=2, steps=5, product=8192)
_TINY = Sizes(["model.overrides.n_layer=2", "model.overrides.n_embd=64"], 32, ((2, 2),), warm=1, steps=1, product=128)


def carry_out(stage: Stage) -> None:
    sizes = _TINY if stage.rehearsal else _REAL
    (stage.record.folder / TRACE).unlink(missing_ok=True)
    model = list(sizes.model) or ["--model", _model(stage)]
    stage.record.note(
        f"`{' '.join(model)}`, bf16, rows of {sizes.length} tokens, checkpointing as the plan has it (on)"
    )
    for name, settings in peers.SETTINGS.items():
        stage.record.note(f"{name}: {settings}")
    product = _product(stage, sizes.product)
    stage.record.note(f"a product of {sizes.product} x {sizes.product} matrices: {product / 1e12:.3g} TFLOP/s in bf16")
    rounds = [first_round]
    if stage.rehearsal or find_spec("deepspeed") is None:
        why = "its kernels take minutes to build" if stage.rehearsal else "it is not installed"
        stage.record.note(f"stock DeepSpeed was not run: {why}")
    else:
        rounds.append(second_round)
    for rows, accumulate in sizes.batches:
        words = [*model, "--dtype", "bf16", "--seq-len", str(sizes.length), "--micro-batch", str(rows)]
        words += ["--accumulate", str(accumulate), "model.checkpointing=on"]
        for made in rounds:
            # Those that a rehearsal leaves out differ from others in words alone, which parity tries.
            compared = [case for case in made() if not (stage.rehearsal and case.name in _LEFT_OUT)]
            compare(stage, compared, words, sizes, tokens=rows * accumulate * sizes.length)
            add_rows(stage, compared, tokens=rows * accumulate * sizes.length, product=product)


def _model(stage: Stage) -> str:
    """1.6e9 parameters where all cases fit beside each other on the GPU, else half as many."""
    gpu = stage.record.about["gpu"]
    return "gpt2-xl" if float(gpu.split(", ")[-2].removesuffix(" GiB")) > 120 else "gpt2-large"


def _product(stage: Stage, size: int) -> float:
    with stage.worker("product") as worker:
        return float(worker.ask("product", dtype="bf16", size=size)["rate"])


def compare(stage: Stage, compared: list[Case], words: list[str], sizes: Sizes, *, tokens: int) -> None:
    """Build all, then let them take steps in turn. What goes wrong with one is its outcome."""
    workers: dict[str, Worker] = {}
    try:
        for case in compared:
            workers[case.name] = stage.worker(case.name)
        with ThreadPoolExecutor(max_workers=1 if stage.rehearsal else 4) as pool:
            list(pool.map(lambda case: _build(case, workers[case.name], words), compared))
        for turn in range(sizes.warm + sizes.steps):
            for case in compared:
                if case.outcome == "ok":
                    _step(stage, case, workers[case.name], counts=turn >= sizes.warm)
        _trace(stage, compared, workers, tokens=tokens)
    except Failure as failure:  # no time even to begin
        for case in compared:
            if case.outcome == "ok" and not case.steps:
                case.outcome = str(failure)
    finally:
        for worker in workers.values():
            worker.end()


def _build(case: Case, worker: Worker, words: list[str]) -> None:
    try:
        case.about = worker.build([*words, *case.words], fill=True, peer=case.peer)
        worker.rest()
    except Failure as failure:
        case.outcome = str(failure)


def _step(stage: Stage, case: Case, worker: Worker, *, counts: bool) -> None:
    if case.steps and stage.left() < 3 * case.steps[-1]["step"]:
        return  # what it has is enough for a row
    try:
        steps = worker.ask("steps", count=1)["steps"]
        worker.rest()
        case.steps += steps if counts else []
    except Failure as failure:
        case.outcome = str(failure)


def _trace(stage: Stage, compared: list[Case], workers: dict[str, Worker], *, tokens: int) -> None:
    """A step of the traced case, once, as chrome://tracing and https://ui.perfetto.dev read it."""
    path = stage.record.folder / TRACE
    case = next(case for case in compared if case.name == TRACED)
    if case.outcome != "ok" or path.exists():
        return
    try:
        size = workers[case.name].ask("trace", path=str(path))["bytes"]
    except Failure as failure:
        stage.record.add(str(failure), tokens=tokens, case=f"{TRACED}: a trace")
        return
    if size > 10_000_000:
        path.unlink()
        stage.record.note(f"A trace of {size / 1e6:.0f} MB was too large to keep")
    else:
        stage.record.note(f"{path.name}: one step of {TRACED!r} at {tokens} tokens, {size / 1e6:.2f} MB")


def add_rows(stage: Stage, compared: list[Case], *, tokens: int, product: float) -> None:
    """A row for each case; tokens a second against plain torch's where that ran."""
    plain = next((middle(case.steps, "step") for case in compared if case.name == "plain torch" and case.steps), None)
    for case in compared:
        row: dict[str, Any] = {"tokens": tokens, "case": case.name, "words": " ".join(case.words)}
        if not case.steps:
            stage.record.add(OUT_OF_TIME if case.outcome == "ok" else case.outcome, **row)
            continue
        seconds = middle(case.steps, "step")
        stage.record.add(
            case.outcome,
            **row,
            rate=tokens / seconds,
            against=plain / seconds if plain else None,
            step_spread=spread(case.steps, "step"),
            **{key: middle(case.steps, key) for key in ("forward", "backward", "update")},
            mfu=case.about["flops_per_step"] / seconds / product,
            gpu_peak=max(step["device_peak"] for step in case.steps) / 1e9,
            rss=max(step["peak_rss"] for step in case.steps) / 1e9,
            loss=case.steps[-1]["loss"],
            build=case.about["build_seconds"],
            plan=case.about["plan"]["chosen"],
            steps=case.steps,
        )
