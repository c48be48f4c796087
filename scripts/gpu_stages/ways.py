"""Measure every method of the update and of fetching weights by name: without rates, `auto` takes the first of each."""

from __future__ import annotations

from gpu_stages import large, speed
from gpu_stages.large import Case
from gpu_stages.stage import Stage

TITLE = "Ways of the update and of fetching weights"
COLUMNS = {key: told for key, told in large.COLUMNS.items() if key not in ("tokens", "planned_step")}
_DRIVE = ["{drive}", "--gpu-fraction", "0", "--ram-fraction", "0.5"]
_HALF_ON_GPU = ["--gpu-fraction", "0.5", "--ram-fraction", "0.5"]
_AWAY = ["--params", "cpu", "--gpu-fraction", "0", "--ram-fraction", "1"]
_RAM = ["--params", "gpu", "--gpu-fraction", "0", "--ram-fraction", "1"]
CASES = {
    **{
        f"state half in RAM, half on the drive, overlap {way}": ["--params", "gpu", *_DRIVE, f"tiered.overlap={way}"]
        for way in ("off", "forward", "backward")
    },
    "state half in RAM, half on the drive, two places, overlap forward": [
        *("--params", "gpu", *_DRIVE, "tiered.state_copies=2", "tiered.overlap=forward"),
    ],
    "state in RAM, split masters, overlap off": [*_RAM, "tiered.master_format=split", "tiered.overlap=off"],
    "state in RAM, split masters, overlap forward": [*_RAM, "tiered.master_format=split", "tiered.overlap=forward"],
    "state half GPU, half RAM, split masters, overlap forward": [
        *("--params", "gpu", *_HALF_ON_GPU, "tiered.master_format=split", "tiered.overlap=forward"),
    ],
    "state half GPU, half RAM, overlap backward": ["--params", "gpu", *_HALF_ON_GPU, "tiered.overlap=backward"],
    "weights and state in RAM, fetched by blocks, overlap forward": [
        *(*_AWAY, "tiered.fetch_granularity=block", "tiered.overlap=forward"),
    ],
    "weights and state in RAM, fetched by modules, overlap off": [
        *_AWAY,
        "tiered.fetch_granularity=module",
        "tiered.overlap=off",
    ],
    "weights and state in RAM, fetched by modules, overlap forward": [
        *(*_AWAY, "tiered.fetch_granularity=module", "tiered.overlap=forward"),
    ],
    "weights on the drive, state half in RAM, fetched by modules, overlap backward": [
        *("--params", "nvme", *_DRIVE, "tiered.fetch_granularity=module", "tiered.overlap=backward"),
    ],
}


def carry_out(stage: Stage) -> None:
    words = speed.prepare(stage, rows=8, accumulate=1)
    steps, size = (2, 128) if stage.rehearsal else (speed.STEPS, 8192)
    for name, more in CASES.items():
        if stage.asked(name):
            case = Case(name, [*words, *speed.OURS, *more])
            large.measure(stage, case, steps=steps, dtype="bf16", size=size)
