"""Model presets: configurations of GPT-2 with random weights; and the names that `model.name` may have.

OpenAI's pretrained weights have a hub id (``openai-community/gpt2``). Dropout is off: no token is seen often enough.
"""

import difflib
import math
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import UserError


def _gpt2(layers: int, hidden: int, heads: int, *, vocabulary: int = 50304, context: int = 1024) -> dict[str, Any]:
    """Return keys of transformers' GPT2Config. 50304 is GPT-2's 50257 tokens rounded up to a multiple of 128.

    With GPT-2's standard deviation of 0.02 the tied head of a wide model starts with a high loss: two layers of width
    4096 start at 11.600, where guessing gives 10.826; with 0.25 / sqrt(hidden) at most 0.06 above.
    """
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": context,
        "initializer_range": round(min(0.02, 0.25 / math.sqrt(hidden)), 5),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-mini": _gpt2(6, 256, 8, vocabulary=2048, context=256),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-10b": _gpt2(50, 4096, 32),
}


def local_directory(name: str) -> Path | None:
    """Return the directory that `model.name` names; None for a preset or hub id. Raises UserError for other names."""
    path = Path(name).expanduser()
    if name in PRESETS:
        return None
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{path}: not a model directory: it has no config.json")
        return path
    if "/" not in name or name.startswith((".", "/", "~")):
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}), nor a directory, "
            f"nor a hub id such as openai-community/gpt2{hint}"
        )
    return None
