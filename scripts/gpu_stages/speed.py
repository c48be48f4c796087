"""Time steps of 8 thousand tokens: this package by state placement and overlap, plain torch, and other libraries'
offload.

Each case has its own process, and the machine to itself: it takes one warm-up step and then the timed ones, and ends
before the next case is built. Plain torch is measured again at the end, which shows drift of the machine's speed. The
forward and backward of plain torch alone are the lower bound for every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from gpu_stages import large, peers
from gpu_stages.large import Case
from gpu_stages.stage import Failure, Stage

TITLE = "Speed at 8 thousand tokens a step, beside others"
COLUMNS = {"case": "case", "rate": "tokens/s", "against": "x plain torch"} | {
    key: large.COLUMNS[key]
    for key in ("step_spread", "forward", "backward", "update", "mfu", "gpu_peak", "retries", "rss", "build")
}
OURS = ["--engine", "tiered"]
PLAIN = "plain torch"
TRACE = "speed-trace.json.gz"
STEPS = 5


def carry_out(stage: Stage) -> None:
    words = prepare(stage, rows=8, accumulate=1)
    for name, settings in peers.SETTINGS.items():
        stage.record.note(f"{name}: {settings}")
    found = compare(stage, cases(), words)
    trace(stage, words)
    if found is not None and not stage.rehearsal and stage.asked(f"{PLAIN} again"):
        compare(stage, [replace(plain(), name=f"{PLAIN} again")], words, against=found)


def plain() -> Case:
    return Case(PLAIN, ["--engine", "plain"])


def shares(gpu: str, ram: str, overlap: str) -> list[str]:
    """Return arguments with weights on the GPU and this state placement and overlap; nothing is left to `auto`."""
    return [*OURS, "--params", "gpu", "--gpu-fraction", gpu, "--ram-fraction", ram, f"tiered.overlap={overlap}"]


def cases() -> list[Case]:
    away = [*OURS, "--params", "cpu", "--gpu-fraction", "0", "--ram-fraction", "1"]
    found = [
        plain(),
        Case("forward and backward alone", ["--engine", "plain"], peer="native"),
        Case("ours, state in RAM, overlap forward", shares("0", "1", "forward")),
        Case("ours, state in RAM, overlap off", shares("0", "1", "off")),
        Case("ours, state on the GPU, overlap off", shares("1", "0", "off")),
        Case("ours, state half GPU, half RAM, overlap forward", shares("0.5", "0.5", "forward")),
        Case("ours, state in RAM, overlap backward", shares("0", "1", "backward")),
        Case("ours, weights and state in RAM, overlap forward", [*away, "tiered.overlap=forward"]),
        Case("torchao, CPU offload", ["--engine", "plain"], peer="torchao"),
        Case("FSDP2, CPU offload", ["--engine", "plain"], peer="fsdp2"),
        Case(
            f"{PLAIN}, checkpointing off, foreach",
            ["--engine", "plain", "model.activation_checkpointing=off"],
            peer="foreach",
        ),
        Case(
            "forward and backward alone, checkpointing off",
            ["--engine", "plain", "model.activation_checkpointing=off"],
            peer="native",
        ),
    ]
    if find_spec("deepspeed") is not None:
        stock = ["--engine", "deepspeed", "--optimizer", "cpu"]
        found += [
            Case("ZeRO-2, optimizer in RAM", [*stock, "--params", "gpu"]),
            Case("ZeRO-3, both in RAM", [*stock, "--params", "cpu"]),
        ]
    return found


def prepare(stage: Stage, *, rows: int, accumulate: int) -> list[str]:
    """Note what the rows mean; return the arguments that all cases share, which a case's own override."""
    if stage.rehearsal:
        model, length, rows = ["model.overrides.n_layer=2", "model.overrides.n_embd=64"], 32, 2
    else:
        model, length = ["--model", _model(stage)], 1024
    told = f"`{' '.join(model)}`, bf16, {accumulate} x {rows} rows of {length} tokens, checkpointing on but where a row"
    for note in (f"{told} says so", large.MFU, large.IN_A_ROW, large.FILLED):
        stage.record.note(note)
    words = [*model, "--dtype", "bf16", "--seq-len", str(length), "--micro-batch", str(rows)]
    return [*words, "--accumulate", str(accumulate), "model.activation_checkpointing=on"]


def compare(
    stage: Stage, compared: Sequence[Case], words: Sequence[str], *, against: float | None = None
) -> float | None:
    """Add a row for each selected case; return plain torch's tokens a second, the reference for the others (`against`).

    A rehearsal notes the cases that it cannot run, for want of a GPU or of time.
    """
    for case in compared:
        if not stage.asked(case.name):
            continue
        missing = _missing(stage, case)
        if missing:
            stage.record.note(f"{case.name} was not run: {missing}")
            continue
        timed = measure_against(stage, replace(case, words=[*words, *case.words]), against)
        if case.name == PLAIN:
            against = timed
    return against


def measure_against(stage: Stage, case: Case, against: float | None) -> float | None:
    """Add a case's row, including its rate relative to `against`; return its rate in tokens a second."""
    steps, size = (2, 128) if stage.rehearsal else (STEPS, 8192)
    row = large.measure(stage, case, steps=steps, dtype="bf16", size=size)
    if row is None:
        return None
    rate = float(row["rate"])
    stage.record.complete(against=1.0 if case.name == PLAIN else rate / against if against else None)
    return rate


def _missing(stage: Stage, case: Case) -> str | None:
    if case.peer == "torchao":
        if find_spec("torchao") is None:
            return peers.LACKS_TORCHAO
        return "torchao refuses a machine without a GPU" if stage.rehearsal else None
    stock = "deepspeed" in case.words
    return "its kernels take minutes to build" if stock and stage.rehearsal else None


def _model(stage: Stage) -> str:
    """Return a model of 1.6e9 parameters if plain torch can train it on this GPU, else one of half the size."""
    gpu = stage.record.about["gpu"]
    return "gpt2-xl" if float(gpu.split(", ")[-2].removesuffix(" GiB")) > 70 else "gpt2-large"


def trace(stage: Stage, words: Sequence[str]) -> None:
    """Record a step whose update overlaps the forward.

    chrome://tracing and https://ui.perfetto.dev read the trace.
    """
    path = stage.record.folder / TRACE
    name = "a trace of state in RAM, overlap forward"
    if not stage.asked(name):
        return
    path.unlink(missing_ok=True)
    row: dict[str, Any] = {"case": name}
    try:
        with stage.process(name) as worker:
            worker.build([*words, *shares("0", "1", "forward")], fill=True)
            worker.ask("steps", count=large.WARM)
            size = worker.ask("trace", path=str(path))["bytes"]
    except Failure as failure:
        stage.record.add(str(failure), **row)
        return
    if size > 10_000_000:
        path.unlink()
        stage.record.note(f"A trace of {size / 1e6:.0f} MB was too large to keep")
    else:
        stage.record.note(f"{path.name}: {name}, {size / 1e6:.2f} MB")
