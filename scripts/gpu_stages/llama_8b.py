"""Train Llama-3-8B's shape in bf16, with the optimizer state on the GPU, half in RAM or all in RAM, by overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_stages import large
from gpu_stages.large import Case
from gpu_stages.stage import Stage

TITLE = "8B parameters, by where the optimizer state lives and what its update overlaps with"
COLUMNS = large.COLUMNS

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
_RAM = ["--gpu-fraction", "0", "--ram-fraction", "1"]
_HALF = ["--gpu-fraction", "0.5", "--ram-fraction", "0.5"]
CASES = {
    "state in RAM, overlap forward": [*_RAM, "tiered.overlap=forward"],
    "state in RAM, overlap off": [*_RAM, "tiered.overlap=off"],
    "state on the GPU, overlap off": ["--gpu-fraction", "1", "tiered.overlap=off"],
    "state half GPU, half RAM, overlap forward": [*_HALF, "tiered.overlap=forward"],
    "state in RAM, overlap backward": [*_RAM, "tiered.overlap=backward"],
    "state in RAM, split masters, overlap forward": [*_RAM, "tiered.overlap=forward", "tiered.master_format=split"],
    "state half GPU, half RAM, block inputs in RAM, overlap forward": [
        *_HALF,
        *("tiered.overlap=forward", "model.offload_activations=cpu", "model.activation_checkpointing=on"),
    ],
}


def carry_out(stage: Stage) -> None:
    words = prepare(stage)
    for name, more in stage.some(CASES):
        case = Case(name, [*words, "--engine", "tiered", "--params", "gpu", *more])
        large.measure(stage, case, **sizes(stage))


def prepare(stage: Stage) -> list[str]:
    """Note what the rows mean; return the arguments that all cases share."""
    model = model_directory(stage.drive / "llama", tiny=stage.rehearsal)
    length, rows = (32, 2) if stage.rehearsal else (4096, 4)
    for note in (large.MFU, large.IN_A_ROW, large.FILLED):
        stage.record.note(note)
    words = ["--model", str(model), "--scratch", "data.tokenizer=builtin", "--dtype", "bf16", "--seq-len", str(length)]
    return [*words, "--micro-batch", str(rows)]


def sizes(stage: Stage) -> dict[str, Any]:
    """Return the number of timed steps, and the matrix product that they are compared with."""
    return {"steps": 2 if stage.rehearsal else 5, "dtype": "bf16", "size": 128 if stage.rehearsal else 8192}


def model_directory(folder: Path, *, tiny: bool) -> Path:
    """Write a model directory with the shape's config.json and no weights; return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | (_TINY if tiny else {}), indent=1))
    return folder
