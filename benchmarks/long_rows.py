"""Long rows in bounded memory: MLPs in pieces, and blocks' inputs in host memory or on a drive. Plan beside run.

    python benchmarks/long_rows.py tiles  --drive DIR [--tokens 32768] [--dtype fp32] [--box "box --ram 1536M --"]
    python benchmarks/long_rows.py inputs --drive DIR [--dtype fp32]

`tiles`: one row of a small Llama with wide MLPs, whole outside of the box, then inside it: whole, which the plan
refuses; whole all the same (--force), which the kernel kills; and in pieces, as the plan chooses. `inputs`: 96 narrow
blocks, whose inputs are most of what is held, kept as they are, in host memory, on the drive.

Prints for each run its exit code, the peak of resident memory beside what the plan says, and the losses.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_trainer.storage.removal import scratch

_LLAMA = {"model_type": "llama", "vocab_size": 2048, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 2}
DEEP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 96, "num_attention_heads": 2}
KILLED = -9


@dataclass(frozen=True)
class Found:
    """A finished run."""

    code: int
    peak: int  # bytes of resident memory up to the last step; 0 where there was none
    losses: tuple[float, ...]
    plan: dict[str, Any]  # empty where there is none
    said: str  # on stderr

    @property
    def planned(self) -> int:
        return self.plan["tiers"]["ram"]["need"] if self.plan else 0

    @property
    def chunk(self) -> int:
        return self.plan["chosen"]["mlp_chunk"] if self.plan else 0


def run(folder: Path, name: str, shape: dict[str, int], *words: str, box: Sequence[str] = ()) -> Found:
    """Two steps of a model of this shape in a process of its own, its output in `folder`."""
    model, output = folder / f"model-{name}", folder / f"run-{name}"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_LLAMA | shape))
    always = ["--scratch", "--tokenizer", "builtin", "--steps", "2", "--save-every", "0", "train.eval_every=0"]
    always += [f"data.cache={folder}/cache", "placement.threads=2", "--engine", "tiered", "model.checkpointing=on"]
    command = [sys.executable, "-m", "offload_trainer", "--model", str(model), "--output", str(output), *always, *words]
    with (folder / f"{name}.txt").open("w+") as said:
        child = subprocess.run([*box, *command], stdout=subprocess.DEVNULL, stderr=said, check=False)
        said.seek(0)
        text = said.read()
    told, steps = output / "plan.json", output / "metrics.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    return Found(
        code=child.returncode,
        # Its own words of the kernel's VmHWM: the maximum that wait4 tells outlives exec, so it may be this process's.
        peak=lines[-1]["host_rss_bytes"] if lines else 0,
        losses=tuple(line["loss"] for line in lines),
        plan=json.loads(told.read_text()) if told.exists() else {},
        said=text,
    )


def tiles(folder: Path, *, tokens: int, dtype: str, box: Sequence[str]) -> dict[str, Found]:
    shape = WIDE | {"max_position_embeddings": tokens}
    words = ["--seq-len", str(tokens), "--micro-batch", "1", "--dtype", dtype, "data.validation=0"]
    whole = "model.mlp_chunk=off"
    return {
        "whole, outside": run(folder, "outside", shape, *words, whole),
        "whole": run(folder, "whole", shape, *words, whole, box=box),
        "whole, --force": run(folder, "forced", shape, *words, whole, "--force", box=box),
        "in pieces": run(folder, "pieces", shape, *words, box=box),
    }


def inputs(folder: Path, *, drive: Path, dtype: str) -> dict[str, Found]:
    shape = DEEP | {"max_position_embeddings": 1024}
    words = ["--seq-len", "1024", "--micro-batch", "32", "--dtype", dtype, "--nvme", str(drive), "data.validation=0"]
    return {
        home: run(folder, home, shape, *words, "--ram-fraction", "1", f"model.offload_activations={home}")
        for home in ("false", "cpu", "nvme")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiles", "inputs"))
    parser.add_argument("--drive", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--box", default="", help="what a command is run in, such as `box --ram 1536M --`")
    wishes = parser.parse_args()
    with scratch("long-rows-", directory=wishes.drive) as folder:
        if wishes.what == "tiles":
            found = tiles(folder, tokens=wishes.tokens, dtype=wishes.dtype, box=shlex.split(wishes.box))
        else:
            found = inputs(folder, drive=wishes.drive, dtype=wishes.dtype)
        for name, one in found.items():
            losses = ", ".join(f"{loss:.6f}" for loss in one.losses) or one.said.strip().splitlines()[-1:]
            ratio = f" ({one.peak / one.planned:.3f})" if one.planned else ""
            print(
                f"{name}: exit {one.code}, planned {one.planned / 1e9:.3f} GB, peak {one.peak / 1e9:.3f} GB{ratio}, "
                f"pieces of {one.chunk or 'all'} tokens; losses {losses}",
                flush=True,
            )


if __name__ == "__main__":
    main()
