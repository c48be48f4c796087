"""Measure lower bounds for the rows of `8b`: forward and backward without offload, and torchao's offload."""

from __future__ import annotations

from importlib.util import find_spec

from gpu_stages import large, llama_8b, peers
from gpu_stages.large import Case
from gpu_stages.stage import Stage

TITLE = "8B parameters: forward and backward alone, and torchao's CPUOffloadOptimizer"
COLUMNS = large.COLUMNS
_PLAIN = ["--engine", "plain", "--force"]  # --force: the plan counts optimizer state on the GPU, which no case here has
CASES = {
    "forward and backward alone, checkpointing on": ([*_PLAIN, "model.activation_checkpointing=on"], "native"),
    "forward and backward alone, checkpointing off": ([*_PLAIN, "model.activation_checkpointing=off"], "native"),
    "torchao, CPU offload, checkpointing on": ([*_PLAIN, "model.activation_checkpointing=on"], "torchao"),
}


def carry_out(stage: Stage) -> None:
    words = llama_8b.prepare(stage)
    for peer in ("native", "torchao"):
        stage.record.note(f"{peer}: {peers.SETTINGS[peer]}")
    for name, (more, peer) in stage.some(CASES):
        if peer == "torchao" and find_spec("torchao") is None:
            stage.record.add(peers.LACKS_TORCHAO, case=name)
            continue
        large.measure(stage, Case(name, [*words, *more], peer), **llama_8b.sizes(stage))
