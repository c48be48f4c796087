"""Run random sequences of commands on small models for a given time, and check every guarantee after each command.

    python soak/soak.py --minutes 60 --seed 1

Each round takes one or two runs of kinds drawn from `soak_world.KINDS` and does what users, terminals and disks do. It
trains, kills and stops them at random moments, resumes with other placements, shares and drives, saves on demand,
starts twice, exports, renames, fills a disk, closes terminals and pipes, times the machine, and tunes.

After every command, each checkpoint must be complete and match the undisturbed run at that step bit for bit, unless it
was pruned by the rule. Metrics must match too, and the user's own files must be unchanged. The first difference ends
the soak with exit code 1; it prints the seed and the round's commands, and keeps the directory. `--round N` repeats one
round.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from soak_training import FATES, ON_DRIVES, Training
from soak_world import KINDS, STEPS, Kind, Trial, World
from trials import Command, Difference, finish, load_libraries, moment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--directory", type=Path, help="where to work; a new directory is made in it")
    parser.add_argument("--kinds", default="", help=f"of {', '.join(kind.name for kind in KINDS)}; empty: all")
    parser.add_argument("--without", default="", help=f"what is not done, of {', '.join([*FATES, *Soak.ACTIONS])}")
    wishes = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=wishes.directory))
    world = World(folder)
    os.environ |= world.environment()
    tempfile.tempdir = None
    load_libraries()
    kinds = [kind for kind in KINDS if not wishes.kinds or kind.name in wishes.kinds.split(",")]
    soak = Soak(world, seed=wishes.seed, kinds=kinds, without=set(wishes.without.split(",")))
    print(f"seed {wishes.seed}, in {folder}", flush=True)
    deadline = time.monotonic() + 60 * wishes.minutes
    number = wishes.round or 1
    try:
        with world.small_disk() as mounted:
            if not mounted:
                print("no filesystem can be mounted here: no disk is filled")
            while time.monotonic() < deadline and (not wishes.rounds or number <= wishes.rounds):
                soak.round(number)
                if wishes.round:
                    break
                number += 1
    except Difference as found:
        soak.print_table()
        told = "\n".join(soak.sequence)
        print(f"DIFFERENCE\n{found}\n\nseed {wishes.seed}, round {number}, kept in {folder}; its commands:\n{told}")
        return 1
    soak.print_table()
    print("no difference")
    shutil.rmtree(folder)
    return 0


class Soak:
    """Rounds of random commands in a world."""

    def __init__(self, world: World, *, seed: int, kinds: list[Kind], without: set[str]) -> None:
        self.world, self.seed, self.kinds = world, seed, kinds
        self.fates = {name: weight for name, (weight, _) in FATES.items() if name not in without}
        self.actions = {name: about for name, about in self.ACTIONS.items() if name not in without}
        self.done: Counter[str] = Counter()
        self.sequence: list[str] = []  # commands of this round
        self.dice = random.Random()
        self.training = Training(world, done=self.done, note=self.note)
        self.trials: list[Trial] = []
        self.made = 0

    def round(self, number: int) -> None:
        """Train one or two new runs to their end, with random events in between."""
        self.sequence, self.made = [], 0
        self.dice = self.training.dice = random.Random(f"{self.seed} {number}")
        self.trials = [self.new_trial() for _ in range(self.dice.choice((1, 1, 2)))]
        names, weights = [*self.actions], [weight for weight, _ in self.actions.values()]
        for _ in range(self.dice.randrange(4, 11)):
            (name,) = self.dice.choices(names, weights)
            self.actions[name][1](self)
            self.world.check(self.trials)
            self.begin_anew()
        for trial in self.trials:
            self.train((trial, "goes on"))
            if self.dice.random() < 0.3:
                self.train((trial, "goes on"))
            self.export(trial=trial, kill=False)
        for trial in self.trials:
            self.world.remove(trial)
        self.done["rounds"] += 1
        print(f"round {number}: {', '.join(trial.kind.name for trial in self.trials)}: no difference", flush=True)

    def new_trial(self) -> Trial:
        self.made += 1
        trial = self.world.new_trial(self.dice, f"run-{self.made}", self.kinds)
        self.note(f"{trial.output}: {trial.kind.name}, keep {trial.keep}{', without checkpoints' * trial.final}")
        self.world.alone(trial.kind)
        return trial

    def begin_anew(self) -> None:
        """Replace finished runs with new ones in most cases, since little more can happen to a finished run."""
        for place, trial in enumerate(self.trials):
            if trial.reached == STEPS and self.dice.random() < 0.7:
                self.note(f"rm -r {trial.output}")
                self.world.remove(trial)
                self.trials[place] = self.new_trial()

    def note(self, line: str) -> None:
        self.sequence.append(f"  {line}")

    def train(self, *wishes: tuple[Trial, str]) -> None:
        self.training.train([*wishes], trials=self.trials)

    # -- actions -------------------------------------------------------------------------------------------------------

    def fate(self, trial: Trial) -> str:
        names = [name for name in self.fates if name != "disk full" or trial.on_disk]
        return self.dice.choices(names, [self.fates[name] for name in names])[0]

    def train_one(self) -> None:
        trial = self.dice.choice(self.trials)
        self.train((trial, self.fate(trial)))
        if self.dice.random() < 0.5:
            self.export_pages()

    def train_all(self) -> None:
        """Train both runs of this round on the same drives."""
        self.train(*((trial, self.fate(trial)) for trial in self.trials))

    def train_twice(self) -> None:
        """Start two commands in one directory: the first to lock it trains, and the other is refused or runs
        afterwards.
        """
        trial = self.dice.choice(self.trials)
        first = self.training.start(trial, "second start")
        first.command.wait_for(moment(self.dice, trial.output, steps=STEPS)[1])
        second = self.training.start(trial, "second start")
        if 0 not in (second.command.wait(), first.command.wait()):
            raise Difference(f"neither of two starts trained: {first.command}\n{second.command}")
        self.world.check(self.trials)
        self.training.check_end(first)
        self.training.check_end(second)

    def export(self, trial: Trial | None = None, *, kill: bool | None = None) -> None:
        """Export a run or one of its checkpoints; sometimes kill the export and repeat it."""
        trial = trial or self.dice.choice(self.trials)
        found = sorted(self.present(trial))
        if not trial.reached:
            return
        step = self.dice.choice([trial.reached, *found])
        source = trial.output if step == trial.reached else self.step(trial, step)
        dtype = self.dice.choice(["fp32", "fp16", "bf16"])
        place = self.dice.choice([self.world.exports, self.world.drives[0] / "offload-trainer"]) / "run-xl-export"
        words = ["export", source, place, "--dtype", dtype]
        if (self.dice.random() < 0.5) if kill is None else kill:
            self.kill_export(words, place)
            self.take_away(place, trial, step, dtype)
        self.note(" ".join(map(str, words)))
        finish(words, log=self.training.log())
        self.done["export: exit 0"] += 1
        if hidden := [path for path in place.parent.glob(f".{place.name}*") if path not in self.world.sentinels.known]:
            raise Difference(f"left over: {hidden}")
        self.take_away(place, trial, step, dtype)

    def kill_export(self, words: list[object], place: Path) -> None:
        delay, begun = self.dice.uniform(0, 0.1), []
        self.note(f"{' '.join(map(str, words))}   # SIGKILL {delay:.4f} s into it")
        command = Command(words, log=self.training.log())

        def due() -> bool:
            if not begun and (any(place.parent.glob(f".{place.name}*")) or place.exists()):
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() > begun[0] + delay

        if command.wait_for(due):
            command.send(signal.SIGKILL)
        if command.wait() not in (0, -signal.SIGKILL):
            raise Difference(f"exit {command.code}: {command}")
        self.done[f"export: exit {command.code}"] += 1

    def take_away(self, place: Path, trial: Trial, step: int, dtype: str) -> None:
        """Check the export at `place`, if there is one, and remove it."""
        if place.exists():
            self.world.check_export(place, trial.kind, step, dtype)
            shutil.rmtree(place)

    def export_pages(self) -> None:
        """Export the page files of each dead run: it is refused, or gives the weights after the stated update."""
        place = self.world.exports / "pages"
        for folder, trial in self.world.dead_stores(self.trials):
            words = ["export", folder, place, "--dtype", "fp32"]
            self.note(" ".join(map(str, words)))
            command = Command(words, log=self.training.log())
            if command.wait() not in (0, 2) or "Traceback" in command.text:
                raise Difference(f"exit {command.code}: {command}")
            self.done[f"export of page files: exit {command.code}"] += 1
            if command.code == 0:
                step = int(re.findall(r"after update ([0-9]+)", command.text)[0])
                self.take_away(place, trial, step, "fp32")

    def present(self, trial: Trial) -> set[int]:
        self.world.check([trial])
        return trial.present

    def rename_checkpoint(self) -> None:
        """Rename a checkpoint as a user would, or rename it back."""
        trial = self.dice.choice(self.trials)
        back = [path for path, step in trial.renamed.items() if not self.step(trial, step).exists()]
        if back and self.dice.random() < 0.3:
            path = self.dice.choice(back)
            step = trial.renamed.pop(path)
            self.world.sentinels.move(path, self.step(trial, step))
            self.world.sentinels.forget(self.step(trial, step))
            self.note(f"mv {path} {self.step(trial, step)}")
        elif found := sorted(self.present(trial)):
            step = self.dice.choice(found)
            end = self.dice.choice(["-best", ".damaged", ".bak", "-2", ".pruned"])
            path = self.step(trial, step).with_name(f"step-{step:08d}{end}")
            if path.exists():
                return
            self.step(trial, step).rename(path)
            self.world.sentinels.adopt(path)
            trial.renamed[path] = step
            trial.present.discard(step)
            self.note(f"mv {self.step(trial, step)} {path}")
        self.done["checkpoint renamed"] += 1

    def step(self, trial: Trial, step: int) -> Path:
        return trial.checkpoints / f"step-{step:08d}"

    def rename_run(self) -> None:
        trial = self.dice.choice(self.trials)
        new = trial.output.with_name(f"run-{self.dice.randrange(10**6)}")
        self.note(f"mv {trial.output} {new}")
        self.world.sentinels.move(trial.output, new)
        trial.renamed = {new / path.relative_to(trial.output): step for path, step in trial.renamed.items()}
        trial.output = new
        self.done["run directory renamed"] += 1

    def rename_own(self) -> None:
        """Rename something of the user's on a drive that runs use, too."""
        root = self.dice.choice(self.world.drives) / "offload-trainer"
        ours = {trial.output for trial in self.trials}
        mine = [path for path in sorted(root.iterdir()) if path in self.world.sentinels.known and path not in ours]
        old = self.dice.choice(mine)
        new = root / f"run-{self.dice.randrange(1 << 32):08x}"
        self.note(f"mv {old} {new}")
        self.world.sentinels.move(old, new)
        self.done["user's directory on a drive renamed"] += 1

    def time_machine(self) -> None:
        drives = self.dice.sample(self.world.drives, self.dice.randrange(1, 3))
        words = ["bench", *(word for drive in drives for word in ("--nvme", drive)), "placement.threads=1"]
        self.run_aside(words, small_bench, drives)

    def tune(self) -> None:
        trial, drive = self.dice.choice(self.trials), self.dice.choice(self.world.drives)
        words = ["tune", *self.world.words(trial.kind), "--nvme", drive, *ON_DRIVES[0], "--trial-steps", "3"]
        self.run_aside([*words, "--write", self.world.folder / "tuned.yaml"], small_tune, [drive])

    def look(self) -> None:
        """Run a command that writes nothing."""
        trial = self.dice.choice(self.trials)
        words = [*self.world.words(trial.kind), "--nvme", self.world.drives[0], "--output", trial.output]
        self.run_aside([self.dice.choice(["plan", "doctor", "prepare"]), *words], None, [])

    def run_aside(self, words: list[object], first: Callable[[], None] | None, drives: list[Path]) -> None:
        """Run a command other than training, and kill it in half of the cases."""
        delay = self.dice.uniform(0, 3) if self.dice.random() < 0.5 else float("inf")
        self.note(f"{' '.join(map(str, words))}   # {'goes on' if delay > 9 else f'SIGKILL {delay:.4f} s in'}")
        command, begun = Command(words, log=self.training.log(), first=first), time.monotonic()
        if command.wait_for(lambda: time.monotonic() > begun + delay):
            command.send(signal.SIGKILL)
        if command.wait() not in (0, -signal.SIGKILL) or "Traceback" in command.text:
            raise Difference(f"exit {command.code}: {command}")
        self.done[f"{words[0]}: exit {command.code}"] += 1
        if command.code == 0:
            self.world.check_drives(drives, self.trials)

    ACTIONS: dict[str, tuple[float, Callable[[Soak], None]]] = {  # noqa: RUF012
        "train": (10, train_one),
        "train at once": (2, train_all),
        "second start": (1, train_twice),
        "export": (2, export),
        "rename checkpoint": (2, rename_checkpoint),
        "rename run": (1, rename_run),
        "rename own": (1, rename_own),
        "bench": (0.4, time_machine),
        "tune": (0.2, tune),
        "look": (0.7, look),
    }

    def print_table(self) -> None:
        """Print what was done and what was checked."""
        for title, counts in (("done", self.done), ("checked", self.world.checked)):
            print(f"\n| {title} | times |\n| --- | --- |")
            for name, count in sorted(counts.items()):
                print(f"| {name} | {count} |")
        sys.stdout.flush()


def small_bench() -> None:
    """Shrink the bench to a few megabytes; called in the fork."""
    from offload_trainer.machine import bench

    bench._PIECE, bench.ON_CPU = 1 << 20, bench.LayerSizes((64, 64, 64), tokens=64, width=64)
    bench._repeat = partial(bench._repeat, least=2)
    bench._triad = lambda _size: bench.Rate(1e10, "measured", "not here")
    limits = {"drive_bytes": 32 << 20, "drive_seconds": 0.2, "try_seconds": 0.1, "update_elements": 1 << 16}
    bench.Budget = partial(bench.Budget, **limits)


def small_tune() -> None:
    """Make `tune` try a single alternative to the plan; called in the fork."""
    from offload_trainer.plan.tiered.engine import TieredCandidate

    TieredCandidate.tunable = lambda self: [("tiered.page_buffers=4",)]


if __name__ == "__main__":
    raise SystemExit(main())
