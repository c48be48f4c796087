"""Measure the CPU seconds until each command's first output on a terminal, and show that output.

    python benchmarks/first_lines.py [--rounds 3] [COMMAND...]

Each command runs in an empty directory on a separate terminal and is killed after its first output. CPU seconds are the
process's own (user and system, all threads), which other load changes little; the minimum of the rounds is reported.
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from offload_trainer.storage.owned_dirs import scratch

WORDS = {
    "--help": [],
    "--version": [],
    "train": ["--model", "gpt2-mini", "--nvme", "."],
    "train --dry-run": ["--model", "gpt2-mini", "--nvme", "."],
    "train --print-config": [],
    "train --gpus": ["2", "--model", "gpt2-mini"],
    "plan": ["--model", "gpt2-mini", "--nvme", "."],
    "plan --machine": ["h200", "--model", "gpt2-10b"],
    "plan --parallel": ["--machine", "8xh100-80gb", "--model", "gpt2-10b"],
    "bench": ["--nvme", "."],
    "tune": ["--nvme", "."],
    "doctor": ["--nvme", "."],
    "prepare": ["--data", "text.txt", "--model", "gpt2-mini"],
    "export": ["run", "out"],
    "sample": ["run"],
    "chat": ["run"],
    "eval": ["run", "--tasks", "hellaswag"],
    "runs": [],
    "report": ["run"],
    "init": [],
    "ls": [],
    "cp": ["tiny"],
}


def first_line(words: list[str], folder: Path) -> tuple[float, str]:
    """Return the CPU seconds until the first byte, and the first line."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "offload_trainer", *words]
    process = subprocess.Popen(argv, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        told = os.read(ours, 4096).decode(errors="replace")
        spent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK"), told.strip().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("commands", nargs="*", default=list(WORDS))
    asked = parser.parse_args()
    for command in asked.commands:
        with scratch("first-lines-") as folder:
            (folder / "text.txt").write_text("It was the best of times.\n" * 100)
            found = [first_line([*command.split(), *WORDS[command]], folder) for _ in range(asked.rounds)]
        print(f"{min(seconds for seconds, _ in found):5.2f} s  {command:28} {found[0][1][:90]}", flush=True)


if __name__ == "__main__":
    main()
