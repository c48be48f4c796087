"""Kill a rank, or fill the disk of a real `offload-train --gpus 3` run, and then rerun the command.

    python soak/faults_of_ranks.py [--ranks 3]

The ranks are started by the command's own launcher, as for a user (`kill_ranks.py` tries many moments, with forks).
In each run, after four steps, one rank is killed, or another file fills the run's output disk (a tmpfs). All processes
must end within 300 s and state the reason. Once there is space again, the same command must finish with the losses,
norms, masters and moments of one undisturbed rank. Mounting the tmpfs needs root.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trials import Difference, checkpoints_in, compare_state, lines, rows, verify_checkpoint

from offload_trainer.storage.owned_dirs import scratch

STEPS, AFTER, WITHIN = 20, 4, 300.0
ACCUMULATE = 12  # micro-batches of a step, over all ranks
ROOM = "64M"  # size of the tmpfs


class Ranks:
    """A running `offload-train WORDS --gpus N`, whose processes are found by a variable in their environment."""

    def __init__(self, words: list[str], *, count: int, log: Path) -> None:
        self.log, self.name = log, os.urandom(8).hex().encode()
        command = [sys.executable, "-m", "offload_trainer", *words, "--gpus", str(count)]
        with log.open("w") as said:
            named = os.environ | {"FAULTS_OF_RANKS": self.name.decode()}
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=named)

    def ranks(self) -> dict[int, int]:
        """Return the pid of each live rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                given = dict(part.partition(b"=")[::2] for part in (folder / "environ").read_bytes().split(b"\0"))
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has just ended
            if given.get(b"FAULTS_OF_RANKS") == self.name and b"RANK" in given and state not in "ZX":
                found[int(given[b"RANK"])] = int(folder.name)
        return found

    def until(self, when: Callable[[], bool]) -> None:
        while not when():
            if self.process.poll() is not None:
                raise Difference(f"exit {self.process.returncode}: {self.log.read_text()[-4000:]}")
            time.sleep(0.001)

    def end(self, *, since: float | None = None) -> float:
        """Return the seconds from `since` (default: now) until the launcher and all ranks have ended."""
        since = time.monotonic() if since is None else since
        self.process.wait(timeout=600)
        while left := self.ranks():
            if time.monotonic() - since > WITHIN:
                raise Difference(f"ranks {sorted(left)} live on: {self.log.read_text()[-4000:]}")
            time.sleep(0.01)
        return time.monotonic() - since


class Trial:
    def __init__(self, folder: Path, *, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "drive").mkdir()
        self.alone = folder / "alone"
        self.run(self.alone, ranks=1)

    def start(self, output: Path, *, ranks: int) -> Ranks:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "1"]
        often = ["--steps", str(STEPS), "--save-every", "2", "save.keep=1", "train.eval_every=0"]
        names = ["--nvme", f"{self.folder}/drive", "--output", f"{output}", f"data.cache={self.folder}/cache"]
        more = ["--optimizer", "nvme", "--ram-fraction", "0.5", "tiered.page_size=65536", "placement.threads=1"]
        count = ["--engine", "tiered", "--accumulate", str(ACCUMULATE // ranks)]
        return Ranks([*small, *often, *names, *more, *count], count=ranks, log=self.folder / "log.txt")

    def run(self, output: Path, *, ranks: int) -> None:
        run = self.start(output, ranks=ranks)
        run.end()
        if run.process.returncode:
            raise Difference(f"exit {run.process.returncode}: {run.log.read_text()[-4000:]}")

    def kill(self) -> float:
        """Kill a rank; return the seconds until all processes have ended."""
        output = self.folder / "killed"
        run, rank = self.begun(output), self.ranks - 1
        began = time.monotonic()
        os.kill(run.ranks()[rank], signal.SIGKILL)
        seconds = run.end(since=began)
        self.told(run, f"rank {rank} was killed by SIGKILL", output)
        self.again(output)
        return seconds

    def begun(self, output: Path) -> Ranks:
        """Start a run and wait until it has logged `AFTER` steps."""
        run = self.start(output, ranks=self.ranks)
        run.until(lambda: lines(output / "metrics.jsonl") >= AFTER)
        return run

    def fill(self) -> float:
        """Fill the disk; return the seconds from the reported failed write until all processes have ended."""
        output = self.folder / "full"
        output.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", output], check=True)
        try:
            run = self.begun(output)
            with suppress(OSError), (output / "ballast").open("wb", buffering=0) as ballast:
                while ballast.write(bytes(4096)):
                    pass
            run.until(lambda: b"No space left" in run.log.read_bytes())
            seconds = run.end()
            (output / "ballast").unlink()
            self.told(run, "No space left on device", output)
            self.again(output)
        finally:
            subprocess.run(["umount", output], check=True)
        return seconds

    def told(self, run: Ranks, reason: str, output: Path) -> None:
        text = run.log.read_text()
        if not run.process.returncode or reason not in text or "Traceback" in text:
            raise Difference(f"exit {run.process.returncode}, and it should have said {reason!r}: {text[-4000:]}")
        print(next(line for line in text.splitlines() if reason in line))
        for checkpoint in checkpoints_in(output / "checkpoints").values():
            verify_checkpoint(checkpoint)

    def again(self, output: Path) -> None:
        """Rerun the command to the end; raise Difference unless the result is that of one rank."""
        self.run(output, ranks=self.ranks)
        ours, theirs = (rows(directory / "metrics.jsonl") for directory in (output, self.alone))
        if ours != theirs:
            raise Difference(f"{output}: {ours}\nalone: {theirs}")
        last = f"checkpoints/step-{STEPS:08d}"
        compare_state(output / last, self.alone / last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    with scratch("faults-") as folder:
        trial = Trial(folder, ranks=parser.parse_args().ranks)
        print(f"a rank killed: all had ended after {trial.kill():.1f} s; a rerun has the bits of one rank", flush=True)
        print(f"a full disk: all had ended {trial.fill():.1f} s after it was told; a rerun has the bits of one rank")


if __name__ == "__main__":
    try:
        main()
    except Difference as found:
        raise SystemExit(str(found)) from None
