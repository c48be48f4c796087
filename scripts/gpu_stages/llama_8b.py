"""Llama-3-8B's shape in bf16: the optimizer state on the GPU, half of it in RAM, all of it in RAM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_stages import large
from gpu_stages.stage import Stage

TITLE = "8B parameters, by where the optimizer state lives"
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
CASES = {
    "all of the state on the GPU": ["--gpu-fraction", "1"],
    "half on the GPU, half in RAM": ["--gpu-fraction", "0.5", "--ram-fraction", "0.5"],
    "all of the state in RAM": ["--gpu-fraction", "0", "--ram-fraction", "1"],
    "half in RAM, block inputs too": [
        *("--gpu-fraction", "0.5", "--ram-fraction", "0.5", "model.offload_activations=cpu", "model.checkpointing=on"),
    ],
}


def carry_out(stage: Stage) -> None:
    model = model_directory(stage.drive / "llama", tiny=stage.rehearsal)
    length, rows, steps, size = (32, 2, 1, 128) if stage.rehearsal else (4096, 4, 4, 8192)
    stage.record.note(large.MFU)
    stage.record.note("Weights are filled for benchmarks (scripts/gpu_stages/fill.py): no losses are meant")
    words = ["--model", str(model), "--scratch", "data.tokenizer=builtin", "--dtype", "bf16", "--seq-len", str(length)]
    words += ["--micro-batch", str(rows), "--engine", "tiered", "--params", "gpu"]
    for case, shares in stage.some(CASES):
        large.measure(stage, case, [*words, *shares], steps=steps, dtype="bf16", size=size)


def model_directory(folder: Path, *, tiny: bool) -> Path:
    """A directory with the shape's config.json and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | (_TINY if tiny else {}), indent=1))
    return folder
