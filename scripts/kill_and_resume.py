"""SIGKILL a small run at random moments, over and over, and hold what it ends with against one that was left alone.

    python scripts/kill_and_resume.py --kills 200 --seed 0

A run is killed while it starts, trains, saves, prunes or exports, and started again by the same command, with another
placement of its state at times. After every kill each checkpoint that has a manifest must be whole. When a run gets to
its end its losses, gradient norms and rates, the masters and both moments, and the export must be those of the
uninterrupted run, bit for bit. Commands run in forks of a process that has imported torch, to save its start; the
kernel kills them as it would any other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

STEPS, EVERY, KEEP = 12, 2, 2
PLACEMENTS = (
    ["--ram-fraction", "1"],
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme"],
    ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"],
    ["--params", "cpu", "--ram-fraction", "0.25"],
)
PATIENCE = 120  # seconds for a command
SAME = ("step", "tokens", "loss", "grad_norm", "lr", "skipped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    wishes = parser.parse_args()
    load_libraries()
    with tempfile.TemporaryDirectory(dir=os.environ.get("KILL_DIRECTORY")) as folder:
        Trial(Path(folder), random.Random(wishes.seed)).carry_out(wishes.kills)


def load_libraries() -> None:
    """What each command would import, once; nothing here computes, so that no thread is lost in a fork."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from offload_trainer import cli

    cli._quiet()
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import offload_trainer.engine.tiered
    import offload_trainer.export.weights
    import offload_trainer.run
    import offload_trainer.trainer  # noqa: F401


class Trial:
    """Runs, kills and comparisons under one directory."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.drive = folder / "drive"
        self.drive.mkdir()
        self.log = folder / "log.txt"
        self.found: Counter[str] = Counter()  # what a kill hit
        self.finished = self.made = 0
        self.reference = folder / "uninterrupted"

    def carry_out(self, kills: int) -> None:
        start = time.monotonic()
        self.finish(self.words(self.reference, PLACEMENTS[0]))
        self.finish(["export", self.reference, self.reference / "hf", "--dtype", "fp32"])
        output = None
        while sum(self.found.values()) < kills:
            if output is None:
                self.made += 1
                output = self.folder / f"run-{self.made}"
            if self.dice.random() < 0.65:
                self.kill_training(output)
                continue
            self.finish(self.words(output, self.dice.choice(PLACEMENTS)))
            for _ in range(self.dice.randrange(3)):
                self.kill_export(output)
            self.compare(output)
            shutil.rmtree(output)
            output = None
        if output is not None:
            self.finish(self.words(output, self.dice.choice(PLACEMENTS)))
            self.compare(output)
        print(
            f"{sum(self.found.values())} kills, {self.finished} runs, {time.monotonic() - start:.0f} s; hit: ", end=""
        )
        print(", ".join(f"{count} {what}" for what, count in self.found.most_common()))

    # -- one command --------------------------------------------------------------------------------------------------

    def words(self, output: Path, placement: list[str]) -> list[object]:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
        often = ["--steps", STEPS, "--save-every", EVERY, f"save.keep={KEEP}", "train.eval_every=0"]
        names = ["--nvme", self.drive, "--output", output, f"data.cache={self.folder / 'cache'}"]
        return [*small, *often, *names, *placement, "placement.threads=1", "tiered.page_size=65536"]

    def start(self, words: list[object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            from offload_trainer.cli import main

            code = main([str(word) for word in words])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def finish(self, words: list[object]) -> None:
        """Run a command to its end, which must be a good one."""
        _, status = os.waitpid(self.start(words), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"{words}\n{self.log.read_text()[-4000:]}")

    def kill(self, words: list[object], when: Callable[[], bool]) -> bool:
        """Run a command and kill it once `when` holds; whether it was still alive."""
        pid = self.start(words)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                if os.waitstatus_to_exitcode(status) != 0:
                    raise SystemExit(f"{words}\n{self.log.read_text()[-4000:]}")
                return False
            if when():
                break
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    # -- kills --------------------------------------------------------------------------------------------------------

    def kill_training(self, output: Path) -> None:
        checkpoints = output / "checkpoints"
        before = {path.name for path in checkpoints.glob("step-*")}
        moment = self.dice.choice(["any", "step", "save", "save", "prune"])
        after, begun = self.dice.randrange(1, STEPS), time.monotonic()
        delay = self.dice.uniform(0, {"any": 2.5, "step": 0.05, "save": 0.06, "prune": 0.02}[moment])
        due: list[float] = []

        def when() -> bool:
            if moment == "any":
                return time.monotonic() - begun > delay
            seen = {
                "step": lambda: lines(output / "metrics.jsonl") >= after,
                "save": lambda: any(checkpoints.glob(".step-*.tmp")),
                "prune": lambda: {path.name for path in checkpoints.glob("step-*")} - before,
            }[moment]
            if not due and seen():
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        if not self.kill(self.words(output, self.dice.choice(PLACEMENTS)), when):
            return
        self.found[self.what_was_hit(output)] += 1
        self.check_checkpoints(checkpoints)

    def what_was_hit(self, output: Path) -> str:
        left = [path.name for path in (output / "checkpoints").glob(".step-*")]
        if any(name.endswith(".tmp") for name in left):
            return "in a save"
        if left:
            return "in a prune"
        return (
            "in training" if "resumed from" in self.log.read_text() or lines(output / "metrics.jsonl") else "at start"
        )

    def kill_export(self, output: Path) -> None:
        destination = output / "hf"
        words = ["export", output, destination, "--dtype", "fp32"]
        delay, due = self.dice.uniform(0, 0.05), []

        def when() -> bool:
            if not due and (output / ".hf.tmp").exists():
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        if self.kill(words, when):
            self.found["in an export"] += 1
        if destination.exists():
            self.compare_export(destination)
            shutil.rmtree(destination)

    # -- comparisons --------------------------------------------------------------------------------------------------

    def check_checkpoints(self, root: Path) -> None:
        """Each that has a manifest is whole."""
        from offload_trainer.checkpoint import complete_checkpoints, read_manifest

        for checkpoint in complete_checkpoints(root):
            read_manifest(checkpoint)

    def compare(self, output: Path) -> None:
        """The run's numbers, state and export are the uninterrupted one's."""
        ours, theirs = (rows(directory / "metrics.jsonl") for directory in (output, self.reference))
        if ours != theirs:
            raise SystemExit(f"{output}: {ours}\nuninterrupted: {theirs}")
        last = f"checkpoints/step-{STEPS:08d}"
        for path in sorted((self.reference / last).glob("*.safetensors")):
            if (output / last / path.name).read_bytes() != path.read_bytes():
                raise SystemExit(f"{output}: {path.name} differs")
        left = [path.name for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]
        if left:
            raise SystemExit(f"{output}: left over: {left}")
        shutil.rmtree(output / "hf", ignore_errors=True)
        self.finish(["export", output, output / "hf", "--dtype", "fp32"])
        self.compare_export(output / "hf")
        self.finished += 1
        print(f"run {self.made}: the same; {sum(self.found.values())} kills so far", flush=True)

    def compare_export(self, directory: Path) -> None:
        for path in sorted((self.reference / "hf").iterdir()):
            if path.suffix != ".md" and (directory / path.name).read_bytes() != path.read_bytes():
                raise SystemExit(f"{directory}: {path.name} differs")


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def rows(path: Path) -> list[dict[str, object]]:
    return [{key: row[key] for key in SAME} for row in map(json.loads, path.read_text().splitlines())]


if __name__ == "__main__":
    main()
