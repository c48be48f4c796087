"""Fill in the tables of docs/parallel.md with the output of each of its commands.

The commands name a model on Hugging Face's hub; here they read its configuration from a temporary directory.

python scripts/write_parallel_docs.py            write the page
python scripts/write_parallel_docs.py --print    print it instead
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from offload_trainer.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallel.md"
_MODEL = "Qwen/Qwen3-8B"
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_TABLE = re.compile(r"^ {4}offload-train (plan --parallel [^\n]+)\n\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def filled(page: str) -> str:
    """Return the page with each command's current table, without the arguments that all of them share."""
    return _TABLE.sub(lambda found: f"    offload-train {found[1]}\n\n```text\n{_printed(found[1])}```", page)


def _printed(command: str) -> str:
    told = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(told):
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        main(shlex.split(command.replace(f"--model {_MODEL}", f"--model {folder} --scratch")))
    return "".join(f"{line}\n" for line in told.getvalue().splitlines() if not line.startswith("  assumed: "))


if __name__ == "__main__":
    page = filled(PAGE.read_text())
    if "--print" in sys.argv:
        print(page, end="")
    else:
        PAGE.write_text(page)
