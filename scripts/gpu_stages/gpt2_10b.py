"""Train GPT-2 with 10.28e9 parameters in fp16 within the GPU memory of a 32 GiB V100, placed as the plan proposes.

torch's `set_per_process_memory_fraction` caps the memory. It imitates the smaller card's capacity, not its speed.
"""

from __future__ import annotations

from gpu_stages import large
from gpu_stages.stage import Stage

TITLE = "10B parameters under a cap of 32 GiB of GPU memory"
COLUMNS = large.COLUMNS
CAP = 32 << 30
CASES = {
    "shares as planned, overlap forward": ["tiered.overlap=forward"],
    "shares as planned, overlap off": ["tiered.overlap=off"],
    "8-bit moments, shares as planned, overlap forward": ["optim.moment_dtype=8bit", "tiered.overlap=forward"],
    "no state on the GPU, overlap backward": ["--gpu-fraction", "0", "tiered.overlap=backward"],
}


def carry_out(stage: Stage) -> None:
    words = ["--dtype", "fp16", "--engine", "tiered", "{drive}", "optim.initial_loss_scale=1024"]
    if stage.rehearsal:
        words += ["model.overrides.n_layer=2", "model.overrides.n_embd=64", "--seq-len", "32", "--micro-batch", "2"]
        words += ["--params", "gpu"]
    else:
        words += ["--model", "gpt2-10b", "--seq-len", "1024", "--micro-batch", "4"]
    stage.record.note(large.MFU)
    stage.record.note(large.IN_A_ROW)
    stage.record.note(large.FILLED)
    stage.record.note("The cap holds the capacity of a smaller card and not its speed; shares are the plan's own")
    for case, more in stage.some(CASES):
        large.measure(
            stage,
            large.Case(case, [*words, *more]),
            steps=1 if stage.rehearsal else 3,
            dtype="fp16",
            size=128 if stage.rehearsal else 8192,
            cap_bytes=CAP,
        )
