"""Random sequences of commands on small models, for a given time; after each, everything that was promised is checked.

    python scripts/soak.py --minutes 60 --seed 1

Each round takes one or two runs of kinds drawn from `soak_world.KINDS` and does to them what users, terminals and
disks do: trains, kills and stops at random moments, resumes with other homes and shares and on other drives, saves on
demand, starts twice, exports, renames, fills a disk, closes terminals and pipes, times the machine, tunes. After every
command each checkpoint must be whole and hold the state of the run left alone at that step, bit for bit, or have been
pruned by the rule; so must metrics; the user's own files must be as they were. The first difference ends the soak with
exit code 1: it prints the seed and the round's commands, and keeps the directory. `--round N` repeats one round.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from soak_world import KINDS, STEPS, Kind, Trial, World
from trials import Command, Difference, End, finish, load_libraries, moment, rows, what_was_hit

IN_RAM = ["--ram-fraction", "1"]
ON_DRIVES = (
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme"],
    ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"],
    ["--params", "cpu", "--ram-fraction", "0.25"],
)
# What may happen to a training command, how often, and the exit codes that it may have then.
FATES: dict[str, tuple[int, set[int]]] = {
    "goes on": (2, {0}),
    "SIGKILL": (5, {0, -signal.SIGKILL}),
    "SIGINT": (2, {0, 130}),
    "SIGTERM": (2, {0, 143, -signal.SIGTERM}),
    "SIGHUP": (1, {0, 129, -signal.SIGHUP}),
    "SIGQUIT": (1, {0, 131, -signal.SIGQUIT}),
    "SIGUSR1": (1, {0}),
    "asked to save": (1, {0}),
    "pipe closed": (1, {0}),
    "terminal closed": (1, {0, 129, -signal.SIGHUP}),
    "disk full": (5, {0, 1, 2}),
}


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


@dataclass
class Flight:
    """A training command under way, and what is to happen to it."""

    trial: Trial
    command: Command
    fate: str
    due: Callable[[], bool]  # when it does
    drives: list[Path]
    before: bytes  # metrics.jsonl, and the newest checkpoint, when it started
    base: int
    happened: bool = False


class Soak:
    """Rounds of random commands in a world."""

    def __init__(self, world: World, *, seed: int, kinds: list[Kind], without: set[str]) -> None:
        self.world, self.seed, self.kinds = world, seed, kinds
        self.fates = {name: weight for name, (weight, _) in FATES.items() if name not in without}
        self.actions = {name: about for name, about in self.ACTIONS.items() if name not in without}
        self.done: Counter[str] = Counter()
        self.sequence: list[str] = []  # of this round
        self.dice = random.Random()
        self.trials: list[Trial] = []
        self.serial = self.made = 0

    def round(self, number: int) -> None:
        """One or two runs, from nothing to their end."""
        self.sequence, self.dice, self.serial = [], random.Random(f"{self.seed} {number}"), 0
        self.made = 0
        self.trials = [self.new_trial() for _ in range(self.dice.choice((1, 1, 2)))]
        names, weights = [*self.actions], [weight for weight, _ in self.actions.values()]
        for _ in range(self.dice.randrange(4, 11)):
            (name,) = self.dice.choices(names, weights)
            self.actions[name][1](self)
            self.world.check(self.trials)
            self.begin_anew()
        for trial in self.trials:
            self.train([(trial, "goes on")])
            if self.dice.random() < 0.3:
                self.train([(trial, "goes on")])
            self.export(trial=trial, kill=False)
        for trial in self.trials:
            self.world.remove(trial)
        self.done["rounds"] += 1
        print(f"round {number}: {', '.join(trial.kind.name for trial in self.trials)}: no difference", flush=True)

    def new_trial(self) -> Trial:
        self.made += 1
        trial = self.world.new_trial(self.dice, f"run-{self.made}", self.kinds)
        self.note(f"{trial.output}: {trial.kind.name}, keep {trial.keep}")
        self.world.alone(trial.kind)
        return trial

    def begin_anew(self) -> None:
        """A run that is done has little left to happen to it: at times it makes room for another."""
        for place, trial in enumerate(self.trials):
            if trial.newest == STEPS and self.dice.random() < 0.7:
                self.note(f"rm -r {trial.output}")
                self.world.remove(trial)
                self.trials[place] = self.new_trial()

    def note(self, line: str) -> None:
        self.sequence.append(f"  {line}")

    def log(self) -> Path:
        """A place for what the next command says; the last twenty are kept."""
        self.serial += 1
        return self.world.folder / f"log-{self.serial % 20}.txt"

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, wishes: list[tuple[Trial, str]]) -> None:
        """Start these at the same time, and let happen to each what is wished."""
        flights = [self.start(trial, fate) for trial, fate in wishes]
        for flight in flights:
            self.let_happen(flight)
        while under_way := [flight for flight in flights if not flight.command.ended()]:
            for flight in under_way:
                self.let_happen(flight)
            if time.monotonic() > self.patience:
                raise Difference(f"does not end: {', '.join(str(flight.command) for flight in under_way)}")
            time.sleep(0.0005)
        if self.world.mounted:
            (self.world.disk / "filler").unlink(missing_ok=True)
        self.world.check(self.trials)
        for flight in flights:
            self.check_end(flight)
        alone = len({trial.output for trial, _ in wishes}) == len(wishes)
        if alone and all(flight.command.code == 0 for flight in flights):
            leased = [drive for flight in flights for drive in flight.drives]
            self.world.check_drives(leased, self.trials)

    def start(self, trial: Trial, fate: str) -> Flight:
        placement, drives = self.placement(trial)
        words = [*self.world.words(trial.kind), *placement, "--output", str(trial.output)]
        trial.every = self.dice.choice((trial.every, self.dice.randrange(1, 5)))
        words += ["--save-every", str(trial.every), f"save.keep={trial.keep}"]
        ends: dict[str, End] = {"pipe closed": "pipe", "terminal closed": "terminal"}
        told, due = moment(self.dice, trial.output, steps=STEPS)
        metrics = trial.output / "metrics.jsonl"
        before, base = metrics.read_bytes() if metrics.exists() else b"", trial.newest
        trial.present = set()
        self.note(f"{' '.join(words)}   # {fate}{'' if fate == 'goes on' else ', ' + told}")
        command = Command(words, log=self.log(), end=ends.get(fate, "file"))
        self.patience = time.monotonic() + 180
        return Flight(trial, command, fate, due, drives, before, base, happened=fate == "goes on")

    def placement(self, trial: Trial) -> tuple[list[str], list[Path]]:
        """Words for where the state lives this time, and the drives that they lease."""
        dice = self.dice
        drives = dice.sample(self.world.drives, dice.randrange(1, 3))
        if trial.on_disk and dice.random() < 0.3:
            drives = [self.world.disk / "drive"]
        if trial.kind.plain and dice.random() < 0.15:
            return ["--engine", "plain"], []
        named = [word for drive in drives for word in ("--nvme", str(drive))]
        inside = [
            f"tiered.page_size={dice.choice((16384, 65536, 1 << 20))}",
            f"tiered.io_threads={dice.choice((1, 4))}",
        ]
        inside += dice.choice(([], ["tiered.checksums=true"], ["optim.kernel=torch"], ["tiered.page_buffers=2"]))
        if len(drives) == 2:
            inside += dice.choice(([], ["tiered.drive_speeds=[1,3]"]))
        if dice.random() < 0.2:
            return [*named, *IN_RAM, *inside], []
        return [*named, *dice.choice(ON_DRIVES), *inside], drives

    def let_happen(self, flight: Flight) -> None:
        """What is to happen, once it is due."""
        if flight.happened or flight.command.ended() or not flight.due():
            return
        flight.happened = True
        if flight.fate.endswith("closed"):
            flight.command.hang_up()
        elif flight.fate == "asked to save":
            if flight.trial.output.exists():
                (flight.trial.output / "save").touch()
        elif flight.fate == "disk full":
            fill(self.world.disk)
        else:
            flight.command.send(getattr(signal, flight.fate))

    def check_end(self, flight: Flight) -> None:
        trial, command, fate = flight.trial, flight.command, flight.fate
        refused = fate == "second" and command.code == 2 and "another run" in command.text
        if not refused and command.code not in FATES.get(fate, (0, {0}))[1]:
            raise Difference(f"{fate}: exit {command.code}: {command}")
        if "Traceback" in command.text:
            raise Difference(f"{fate}: a traceback: {command}")
        hit = what_was_hit(trial.output, command.text) if fate == "SIGKILL" and command.code else f"exit {command.code}"
        self.done[f"train, {fate if flight.happened else 'goes on'}: {hit}"] += 1
        (trial.output / "save").unlink(missing_ok=True)
        trained = [row["step"] for row in rows(trial.output / "metrics.jsonl")]
        if command.code == 0:
            self.world.check_finished(trial, saved=flight.base < STEPS)
        elif fate not in ("SIGKILL", "disk full") and (trial.output / "metrics.jsonl").exists() and trained:
            changed = (trial.output / "metrics.jsonl").read_bytes() != flight.before
            if changed and trained[-1] > flight.base and trial.newest != trained[-1]:
                raise Difference(f"{fate}: trained to {trained[-1]}, and saved {trial.newest}: {command}")

    # -- actions -------------------------------------------------------------------------------------------------------

    def fate(self, trial: Trial) -> str:
        names = [name for name in self.fates if name != "disk full" or trial.on_disk]
        return self.dice.choices(names, [self.fates[name] for name in names])[0]

    def train_one(self) -> None:
        trial = self.dice.choice(self.trials)
        self.train([(trial, self.fate(trial))])

    def train_all(self) -> None:
        """Both runs of this round, on the same drives."""
        self.train([(trial, self.fate(trial)) for trial in self.trials])

    def train_twice(self) -> None:
        """A second start in the same directory, at some moment of the first."""
        trial = self.dice.choice(self.trials)
        first = self.start(trial, "goes on")
        first.command.wait_for(moment(self.dice, trial.output, steps=STEPS)[1])
        second = self.start(trial, "second")
        codes = second.command.wait(), first.command.wait()
        self.world.check([trial])
        self.check_end(first)
        self.check_end(second)
        self.done[f"second start: exit {codes[0]}"] += 1

    def export(self, trial: Trial | None = None, *, kill: bool | None = None) -> None:
        """A run, or one of its checkpoints; killed at times, and repeated then."""
        trial = trial or self.dice.choice(self.trials)
        found = sorted(trial.present or self.present(trial))
        if not found:
            return
        step = self.dice.choice(found)
        source = self.dice.choice([trial.output, trial.checkpoints / f"step-{step:08d}"])
        step = max(found) if source == trial.output else step
        dtype = self.dice.choice(["fp32", "fp16", "bf16"])
        place = self.dice.choice([self.world.exports, self.world.drives[0] / "offload-trainer"]) / "run-xl-export"
        words = ["export", source, place, "--dtype", dtype]
        if (self.dice.random() < 0.5) if kill is None else kill:
            delay = self.dice.uniform(0, 0.1)
            self.note(f"{' '.join(map(str, words))}   # SIGKILL {delay:.4f} s into it")
            command = Command(words, log=self.log())
            begun: list[float] = []

            def due() -> bool:
                if not begun and (place.with_name(f".{place.name}.tmp").exists() or place.exists()):
                    begun.append(time.monotonic())
                return bool(begun) and time.monotonic() > begun[0] + delay

            if command.wait_for(due):
                command.send(signal.SIGKILL)
            if command.wait() not in (0, -signal.SIGKILL):
                raise Difference(f"exit {command.code}: {command}")
            self.done[f"export: exit {command.code}"] += 1
            self.take_away(place, trial, step, dtype)
        self.note(" ".join(map(str, words)))
        finish(words, log=self.log())
        self.done["export: exit 0"] += 1
        if (hidden := place.with_name(f".{place.name}.tmp")).exists():
            raise Difference(f"left over: {hidden}")
        self.take_away(place, trial, step, dtype)

    def take_away(self, place: Path, trial: Trial, step: int, dtype: str) -> None:
        """An export that is there is whole."""
        if place.exists():
            self.world.check_export(place, trial.kind, step, dtype)
            shutil.rmtree(place)

    def present(self, trial: Trial) -> set[int]:
        self.world.check([trial])
        return trial.present

    def rename_checkpoint(self) -> None:
        """The user puts one aside under a name of his own, or takes it back."""
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
            trial.made.discard(step)
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
        """Something of the user's own, on a drive beside ours."""
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
        """Commands that write nothing."""
        trial = self.dice.choice(self.trials)
        words = [*self.world.words(trial.kind), "--nvme", self.world.drives[0], "--output", trial.output]
        self.run_aside([self.dice.choice(["plan", "doctor", "prepare"]), *words], None, [])

    def run_aside(self, words: list[object], first: Callable[[], None] | None, drives: list[Path]) -> None:
        """A command that is not training, killed at times."""
        delay = self.dice.uniform(0, 3) if self.dice.random() < 0.5 else float("inf")
        self.note(f"{' '.join(map(str, words))}   # {'goes on' if delay > 9 else f'SIGKILL {delay:.4f} s in'}")
        command, begun = Command(words, log=self.log(), first=first), time.monotonic()
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
        """What was done, and what was checked."""
        for title, counts in (("done", self.done), ("checked", self.world.checked)):
            print(f"\n| {title} | times |\n| --- | --- |")
            for name, count in sorted(counts.items()):
                print(f"| {name} | {count} |")
        sys.stdout.flush()


def fill(directory: Path) -> None:
    """Not one byte is left on its filesystem."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def small_bench() -> None:
    """In the fork: products, arrays and files of a few megabytes."""
    from offload_trainer.machine import bench

    bench._PIECE, bench._MATRIX_CPU = 1 << 20, (64, 64, 64)
    bench._repeat = partial(bench._repeat, least=2)
    bench._triad = lambda: bench.Rate(1e10, "measured", "not here")
    limits = {"drive_bytes": 32 << 20, "drive_seconds": 0.2, "try_seconds": 0.1, "update_elements": 1 << 16}
    bench.Budget = partial(bench.Budget, **limits)


def small_tune() -> None:
    """In the fork: one setting beside the plan's."""
    from offload_trainer import tune

    tune.groups_for = lambda plan, machine: [("tiered.page_buffers=4",)]


if __name__ == "__main__":
    raise SystemExit(main())
