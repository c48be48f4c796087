"""The facts that numbers depend on and no setting contains: sources, processor, memory, GPU and versions.

Run as a script, it prints those of torch and the machine as one JSON line; a missing one is null.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("transformers", "pydantic", "safetensors", "deepspeed", "bitsandbytes", "triton", "torchao")


def facts() -> dict[str, Any]:
    """Return all facts. A separate process collects those of torch, since that initialises CUDA."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"torch does not start here: {done.stderr[-2000:]}")
    describe = ["git", "describe", "--always", "--dirty"] if shutil.which("git") else ["true"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    total = hashlib.sha256()  # also identifies a copy without git history
    for path in sorted((ROOT / "offload_trainer").rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    source = {"commit": commit or "unknown", "source": total.hexdigest()[:12]}
    return source | json.loads(done.stdout.splitlines()[-1])


def _here() -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {"gpu": None, "GiB": 0.0}
    if torch.cuda.is_available():
        card: Any = torch.cuda.get_device_properties(0)
        about = {"gpu": f"{card.name}, sm_{card.major}{card.minor}", "GiB": round(card.total_memory / 2**30, 1)}
    if shutil.which("nvidia-smi"):  # not on machines with AMD cards
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        about["driver"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    units = " ".join({"avx512_bf16", "amx_bf16", "amx_fp16"}.intersection(cpu.get("flags", "").split()))
    name = cpu.get("model name", "unknown")
    about["CPU"] = f"{name}, 16-bit units {units or 'none'}, {len(os.sched_getaffinity(0))} cores"
    about["RAM"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    about |= {"system": platform.platform(), "Python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    about |= {found.name: found.version for found in reversed([*distributions()]) if found.name in _PACKAGES}
    about["torch"] = f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'the CPU alone'}"
    return about | {"compiler": shutil.which(os.environ.get("CXX", "g++"))}


if __name__ == "__main__":
    print(json.dumps(_here()))
