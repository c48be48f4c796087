"""End runs of several ranks at random moments, and compare their results with those of one undisturbed rank.

    python soak/kill_ranks.py --ranks 3 --kills 200 --seed 0

A rank or the launcher is killed or terminated while the run starts, trains, saves or prunes. Then the same command runs
again, sometimes with another placement or number of ranks. All processes must end within 300 s and state the reason,
and each checkpoint with a manifest must be complete. When a run finishes, its losses, norms, rates and last checkpoint
must match one undisturbed rank.

Ranks are forks, and so is their launcher (`launch`), which treats ranks that end as the program's own launcher does.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trials import (
    PATIENCE,
    Command,
    Difference,
    checkpoints_in,
    compare_state,
    finish,
    moment,
    rows,
    soak_of_kills,
    verify_checkpoint,
    what_was_hit,
)

from offload_trainer.mesh import RUN
from offload_trainer.run.launcher import LAUNCHER, Ended, _report_failure

STEPS, EVERY, KEEP = 10, 2, 2
MICRO_BATCHES = 6  # per step, over all ranks
WITHIN = 300.0  # seconds in which all processes must have ended
PLACEMENTS = (
    ["--ram-fraction", "1"],
    ["--params", "cpu", "--ram-fraction", "1"],
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme", "--params", "cpu"],
)
# The target, the signal, and the message that must follow; {rank} is the rank that was hit.
HITS = {
    "a rank killed": ("rank", signal.SIGKILL, "rank {rank} was killed by SIGKILL"),
    "a rank told to end": ("rank", signal.SIGTERM, ""),
    "the launcher killed": ("launcher", signal.SIGKILL, "the launcher of the ranks (process "),
    "the launcher told to end": ("launcher", signal.SIGTERM, ""),
}
WEIGHTS = (6, 1, 2, 2)


# -- in forks --------------------------------------------------------------------------------------------------------


@dataclass
class Launcher:
    """A launcher that forks the ranks of one command, since the program's own ranks take seconds to start."""

    words: Sequence[str]
    count: int
    told: Path  # receives the ranks' pids, one per line
    ranks: dict[int, int] = field(default_factory=dict)  # rank by pid
    stopped: int = 0
    pid: int = field(default_factory=os.getpid)

    def carry_out(self) -> int:
        run = secrets.token_hex(16)
        for rank in range(self.count):
            pid = os.fork()
            if not pid:
                return self._become(rank, run)
            self.ranks[pid] = rank
        signal.signal(signal.SIGTERM, self._pass_on)
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        written = self.told.with_suffix(".new")
        written.write_text("".join(f"{pid}\n" for pid in self.ranks))
        written.rename(self.told)
        ended: dict[int, Ended] = {}
        while self.ranks:
            pid, status = os.waitpid(-1, 0)
            rank, code = self.ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not ended and not self.stopped:
                self._end()
            if code:
                ended[rank] = Ended(code, time.monotonic())
        return self._code(ended)

    def _become(self, rank: int, run: str) -> int:
        from offload_trainer.cli import main

        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count}
        place |= {RUN: run, LAUNCHER: self.pid}
        os.environ |= {name: str(value) for name, value in place.items()}
        return main(list(self.words))

    def _pass_on(self, number: int, _: object) -> None:
        self.stopped = number
        self._send(number)

    def _end(self) -> None:
        self._send(signal.SIGTERM)
        signal.alarm(300)

    def _send(self, number: int) -> None:
        for pid in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _code(self, ended: dict[int, Ended]) -> int:
        return _report_failure(ended, list(self.words), stopped=self.stopped)


class Ranks(Command):
    """`offload-train WORDS` on several ranks. It counts as ended once all of its processes have ended."""

    def __init__(self, words: Sequence[object], *, count: int, log: Path) -> None:
        self._count, self._told = count, log.with_name("ranks")
        self._told.unlink(missing_ok=True)
        super().__init__(words, log=log)

    def _main(self) -> int:
        return Launcher(self.words, self._count, self._told).carry_out()

    @property
    def ranks(self) -> list[int]:
        """The pids of ranks 0, 1, ...; empty until all have started."""
        return [int(line) for line in self._told.read_text().split()] if self._told.exists() else []

    def ended(self) -> bool:
        if self.code is None:
            if not self._reaped():
                return False
            os.close(self._log)
        return not any(map(_lives, self.ranks))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# -- trials ----------------------------------------------------------------------------------------------------------


class Trial:
    """Runs, hits and comparisons in one directory."""

    def __init__(self, folder: Path, dice: random.Random, *, ranks: int) -> None:
        self.folder, self.dice, self.ranks = folder, dice, ranks
        self.drive = folder / "drive"
        self.drive.mkdir()
        self.log = folder / "log.txt"
        self.hits: Counter[str] = Counter()
        self.at: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.finished = self.made = 0
        self.reference = folder / "alone"

    def carry_out(self, kills: int) -> None:
        start = time.monotonic()
        finish(self.words(self.reference, PLACEMENTS[0], ranks=1), log=self.log)
        output = None
        while sum(self.hits.values()) < kills or output is not None:
            if output is None:
                self.made += 1
                output = self.folder / f"run-{self.made}"
            if sum(self.hits.values()) < kills and self.dice.random() < 0.8:
                self.hit(output)
                continue
            self.finish(output)
            output = None
        print(f"{sum(self.hits.values())} hits, {self.finished} runs, {time.monotonic() - start:.0f} s")
        for what, count in self.hits.most_common():
            print(f"  {what}: {count}, all had ended after {self.longest[what]:.1f} s at most")
        print(f"  at: {', '.join(f'{count} {what}' for what, count in self.at.most_common())}", flush=True)

    def words(self, output: Path, placement: list[str], *, ranks: int) -> list[object]:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "1"]
        often = ["--steps", STEPS, "--save-every", EVERY, f"save.keep={KEEP}", "train.eval_every=0"]
        names = ["--nvme", self.drive, "--output", output, f"data.cache={self.folder / 'cache'}"]
        more = ["placement.threads=1", "tiered.page_size=65536", "--engine", "tiered"]
        return [*small, *often, *names, *placement, *more, "--accumulate", MICRO_BATCHES // ranks]

    def start(self, output: Path) -> Ranks:
        count = self.ranks if self.dice.random() < 0.8 else self.dice.choice([2, 3])
        return Ranks(self.words(output, self.dice.choice(PLACEMENTS), ranks=count), count=count, log=self.log)

    def hit(self, output: Path) -> None:
        """Start or resume the run, and hit it at a random moment."""
        words, when = moment(self.dice, output, steps=STEPS)
        command = self.start(output)
        (what,) = self.dice.choices(list(HITS), WEIGHTS)
        whom, number, told = HITS[what]
        if not command.wait_for(lambda: bool(command.ranks) and when()):
            if command.code:
                raise Difference(f"exit {command.code}: {command}")
            return
        rank = self.dice.randrange(len(command.ranks))
        began, lives = time.monotonic(), any(map(_lives, command.ranks))
        with suppress(ProcessLookupError):
            os.kill(command.ranks[rank] if whom == "rank" else command.pid, number)
        command.wait()
        seconds = time.monotonic() - began
        if command.code == 0 or not lives or f"done: {STEPS} steps" in command.text:
            return  # it had finished its work, with or without its launcher
        if seconds > WITHIN:
            raise Difference(f"{what} {words}: the last process ended after {seconds:.1f} s: {command}")
        if told.format(rank=rank) not in command.text or "Traceback" in command.text:
            raise Difference(f"{what} (rank {rank}) {words}: it is not told: {command}")
        self.hits[what] += 1
        self.at[what_was_hit(output, command.text)] += 1
        self.longest[what] = max(seconds, self.longest.get(what, 0.0))
        for checkpoint in checkpoints_in(output / "checkpoints").values():
            verify_checkpoint(checkpoint)

    def finish(self, output: Path) -> None:
        """Run to the end; raise Difference unless the result is that of one undisturbed rank."""
        command = self.start(output)
        if command.wait() != 0:
            raise Difference(f"exit {command.code}: {command}")
        ours, theirs = (rows(directory / "metrics.jsonl") for directory in (output, self.reference))
        if ours != theirs:
            raise Difference(f"{output}: {ours}\nalone: {theirs}")
        last = f"checkpoints/step-{STEPS:08d}"
        compare_state(output / last, self.reference / last)
        left = [path.name for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]
        if left:
            raise Difference(f"{output}: left over: {left}")
        self.finished += 1
        print(f"run {self.made}: the same; {sum(self.hits.values())} hits so far", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 3), default=3)
    soak_of_kills(
        parser, lambda folder, dice, wishes: Trial(folder, dice, ranks=wishes.ranks).carry_out(wishes.kills), kills=200
    )


if __name__ == "__main__":
    assert PATIENCE > WITHIN
    sys.exit(main())
