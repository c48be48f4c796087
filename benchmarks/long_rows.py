"""Benchmark rows and blocks in bounded memory: tiled MLPs, offloaded or shared block inputs, and blocks fetched by
module.

    python benchmarks/long_rows.py tiles  --drive DIR [--tokens 32768] [--dtype fp32] [--box "box --ram 1536M --"]
    python benchmarks/long_rows.py parts  --drive DIR [--dtype fp32] [--box "box --ram 1536M --"]
    python benchmarks/long_rows.py inputs --drive DIR [--dtype fp32]

`tiles` trains one row of a small Llama with wide MLPs: untiled outside the box, then inside it. There the plan refuses
the untiled run, the kernel kills it if forced (--force), and the plan's choice of tiles runs. `parts` does the same
for a Llama with blocks that are too large, everything on the drive, fetched whole and by module.

`inputs` trains 48 narrow blocks on a row of 8,192 tokens, with block inputs in place, in host memory, or on the drive.
Two ranks then have half of every row each (parallel.sequence), or half of each product (parallel.tensor) with whole or
partitioned inputs (parallel.partition_activations).

For each run, the exit code, the peak of resident memory, the planned memory of all ranks, and the losses are printed.
With several ranks, the peak is the sum of each rank's maximum (VmHWM). File pages that several ranks map, mostly
libraries, count once, as in the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks_memory import ranks_below

from offload_trainer.storage.owned_dirs import scratch

_LLAMA = {"model_type": "llama", "vocab_size": 2048, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
_STOCK = ["--engine", "deepspeed", "--gpus", "2", "--optimizer", "cpu"]
WIDE = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 2}
DEEP = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 48, "num_attention_heads": 2}
LARGE = {"hidden_size": 1024, "intermediate_size": 24576, "num_hidden_layers": 2, "num_attention_heads": 8}
TOKENS = 8192  # length of a row
THREADS = 1  # threads of each rank; more would only wait for each other on shared cores
STEPS = 2
KILLED = -9
# variables of another run's launcher
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
INPUTS = {
    "here": ["--engine", "tiered"],
    "in host memory": ["--engine", "tiered", "model.offload_activations=cpu"],
    "on the drive": ["--engine", "tiered", "model.offload_activations=nvme"],
    "sequence 2": ["--engine", "tiered", "--gpus", "2", "parallel.sequence=2"],
    "tensor 2, whole": [*_STOCK, "parallel.tensor=2"],
    "tensor 2, in parts": [*_STOCK, "parallel.tensor=2", "parallel.partition_activations=true"],
    "tensor 2, in host memory": [*_STOCK, "parallel.tensor=2", "model.offload_activations=cpu"],
}


@dataclass(frozen=True)
class Found:
    """A finished run."""

    code: int
    peaks: tuple[int, ...]  # bytes of peak resident memory of each rank until the last step; empty without a step
    losses: tuple[float, ...]
    plan: dict[str, Any]  # empty if there is no plan
    said: str  # on stderr
    again: int = 0  # bytes of `peaks` that are counted twice, since ranks share them

    @property
    def peak(self) -> int:
        return sum(self.peaks) - self.again

    @property
    def planned(self) -> int:
        return self.plan["tiers"]["ram"]["need"] if self.plan else 0

    @property
    def chunk(self) -> int:
        return self.plan["chosen"]["mlp_chunk"] if self.plan else 0


def run(folder: Path, name: str, shape: dict[str, int], *words: str, box: Sequence[str] = ()) -> Found:
    """Train two steps of a model of this shape in separate processes, with output in `folder`."""
    model, output = folder / f"model-{name}", folder / f"run-{name}"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_LLAMA | shape))
    always = ["--scratch", "--tokenizer", "builtin", "--steps", str(STEPS), "--save-every", "0", "train.eval_every=0"]
    always += [f"data.cache={folder}/cache", "model.activation_checkpointing=on"]
    command = [sys.executable, "-m", "offload_trainer", "train", "--model", str(model), "--output", str(output)]
    alone = {key: value for key, value in os.environ.items() if key not in _LAUNCHED}
    told, steps = output / "plan.json", output / "metrics.jsonl"
    ranks: dict[int, Resident] = {}
    with (folder / f"{name}.txt").open("w+") as said:
        child = subprocess.Popen([*box, *command, *always, *words], stdout=subprocess.DEVNULL, stderr=said, env=alone)
        while child.poll() is None:
            if not steps.exists() or steps.read_bytes().count(b"\n") < STEPS:  # the plan does not cover exports
                ranks |= {pid: held for pid in ranks_below(child.pid) if (held := resident(pid)).most}
            time.sleep(0.05)
        said.seek(0)
        text = said.read()
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    # This is the run's own VmHWM: wait4's maximum survives exec, and so may belong to this process.
    own = (lines[-1]["host_rss_bytes"],) if lines else ()
    several = sorted(ranks.values(), key=lambda held: held.most)[-2:] if "--gpus" in words else []
    return Found(
        code=child.returncode,
        peaks=tuple(held.most for held in several) or own,
        again=sum(held.files for held in several) - max((held.files for held in several), default=0),
        losses=tuple(line["loss"] for line in lines),
        plan=json.loads(told.read_text()) if told.exists() else {},
        said=text,
    )


@dataclass(frozen=True)
class Resident:
    """A process's peak resident bytes, and its current bytes of file pages."""

    most: int = 0
    files: int = 0


def resident(pid: int) -> Resident:
    """Return the memory of a process, or zeros if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return Resident()
    found = [re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmHWM", "RssFile")]
    return Resident(*(int(one[1]) * 1024 if one else 0 for one in found))


def tiles(folder: Path, *, tokens: int, dtype: str, box: Sequence[str]) -> dict[str, Found]:
    shape = WIDE | {"max_position_embeddings": tokens}
    words = ["--seq-len", str(tokens), "--micro-batch", "1", "--dtype", dtype, "data.validation=0"]
    words += ["--engine", "tiered", "placement.threads=2"]
    whole = "model.mlp_chunk=off"
    return {
        "whole, outside": run(folder, "outside", shape, *words, whole),
        "whole": run(folder, "whole", shape, *words, whole, box=box),
        "whole, --force": run(folder, "forced", shape, *words, whole, "--force", box=box),
        "in pieces": run(folder, "pieces", shape, *words, box=box),
    }


def parts(folder: Path, *, drive: Path, dtype: str, box: Sequence[str], only: str = "") -> dict[str, Found]:
    shape, whole = LARGE | {"max_position_embeddings": 1024}, "tiered.fetch_granularity=block"
    always = ["--seq-len", "128", "--micro-batch", "1", "--dtype", dtype, "data.validation=0", "placement.threads=2"]
    always += ["--engine", "tiered", "--nvme", str(drive), "--ram-fraction", "0", "placement.gradients=nvme"]
    always += ["tiered.overlap=off", "tiered.page_size=1048576"]
    ways = {
        "whole, outside": ([whole], ()),
        "whole": ([whole], box),
        "whole, --force": ([whole, "tiered.weight_buffers=1", "--force"], box),
        "by the module": ([], box),
    }
    return {
        name: run(folder, name.replace(" ", "-"), shape, *always, *words, box=where)
        for name, (words, where) in ways.items()
        if only in name
    }


def inputs(folder: Path, *, drive: Path, dtype: str, only: str = "") -> dict[str, Found]:
    shape, found = DEEP | {"max_position_embeddings": TOKENS}, {}
    always = ["--seq-len", str(TOKENS), "--micro-batch", "1", "--dtype", dtype, "data.validation=0"]
    always.append(f"placement.threads={THREADS}")
    for name, words in INPUTS.items():
        if only not in name:
            continue
        own = [] if "deepspeed" in words else ["--nvme", str(drive), "--ram-fraction", "1"]
        found[name] = run(folder, name.replace(" ", "-"), shape, *always, *own, *words)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiles", "parts", "inputs"))
    parser.add_argument("--drive", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", default="", help="of `parts` and `inputs`, those with these words in their name")
    parser.add_argument("--items", action="store_true", help="print what the plan counts of host memory")
    parser.add_argument("--box", default="", help="what a command is run in, such as `box --ram 1536M --`")
    wishes = parser.parse_args()
    with scratch("long-rows-", directory=wishes.drive) as folder:
        if wishes.what == "tiles":
            found = tiles(folder, tokens=wishes.tokens, dtype=wishes.dtype, box=shlex.split(wishes.box))
        elif wishes.what == "parts":
            found = parts(folder, drive=wishes.drive, dtype=wishes.dtype, box=shlex.split(wishes.box), only=wishes.only)
        else:
            found = inputs(folder, drive=wishes.drive, dtype=wishes.dtype, only=wishes.only)
        for name, one in found.items():
            losses = ", ".join(f"{loss:.6f}" for loss in one.losses) or one.said.strip().splitlines()[-1:]
            ratio = f" ({one.peak / one.planned:.3f})" if one.planned else ""
            ranks = f" ({' + '.join(f'{peak / 1e9:.3f}' for peak in one.peaks)})" if len(one.peaks) > 1 else ""
            print(
                f"{name}: exit {one.code}, planned {one.planned / 1e9:.3f} GB, peak {one.peak / 1e9:.3f} GB{ranks}"
                f"{ratio}, pieces of {one.chunk or 'all'} tokens; losses {losses}",
                flush=True,
            )
            for item in one.plan.get("items", []) if wishes.items else []:
                if item["tier"] == "ram" and item["bytes"]:
                    print(f"    {item['name']:<24}{item['bytes'] / 1e6:>10.1f} MB  {item['why']}")


if __name__ == "__main__":
    main()
