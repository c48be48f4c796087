"""Training commands of a soak: they get random placements and random events, and their end is checked."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak_world import STEPS, Trial, World
from trials import PATIENCE, Command, Difference, End, moment, rows, what_was_hit

IN_RAM = ["--ram-fraction", "1"]
ON_DRIVES = (
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme"],
    ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"],
    ["--params", "cpu", "--ram-fraction", "0.25"],
)
# Events of a training command, with their weights and the exit codes that they allow.
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


@dataclass
class Flight:
    """A running training command, and the event that will happen to it."""

    trial: Trial
    command: Command
    fate: str
    due: Callable[[], bool]  # true when the event is due
    drives: list[Path]
    before: bytes  # metrics.jsonl, and the newest checkpoint's step, at the start
    base: int
    happened: bool = False


class Training:
    """Starts training commands in a world, and checks how they end."""

    def __init__(self, world: World, *, done: Counter[str], note: Callable[[str], None]) -> None:
        self.world, self.done, self.note = world, done, note
        self.dice = random.Random()  # replaced in each round
        self.serial = 0

    def log(self) -> Path:
        """Return the path for the next command's log; the last twenty are kept."""
        self.serial += 1
        return self.world.folder / f"log-{self.serial % 20}.txt"

    def train(self, wishes: list[tuple[Trial, str]], *, trials: list[Trial]) -> None:
        """Start these trials together, apply the named event to each, and check the results. `trials` are all of the
        world's.
        """
        full = any(fate == "disk full" for _, fate in wishes)
        flights = [self.start(trial, "disk full" if full and trial.on_disk else fate) for trial, fate in wishes]
        deadline = time.monotonic() + PATIENCE
        while under_way := [flight for flight in flights if not flight.command.ended()]:
            for flight in under_way:
                self.let_happen(flight)
            if time.monotonic() > deadline:
                raise Difference(f"does not end: {', '.join(str(flight.command) for flight in under_way)}")
            time.sleep(0.0005)
        if self.world.mounted:
            (self.world.disk / "filler").unlink(missing_ok=True)
        self.world.check(trials)
        for flight in flights:
            self.check_end(flight)
        if all(flight.command.code == 0 for flight in flights):
            trained = [
                flight for flight in flights if "done before" not in flight.command.text
            ]  # otherwise no drive is leased
            self.world.check_drives([drive for flight in trained for drive in flight.drives], trials)

    def start(self, trial: Trial, fate: str) -> Flight:
        placement, drives = self.placement(trial)
        words = [*self.world.words(trial.kind), *placement, "--output", str(trial.output)]
        trial.every = 0 if trial.final else self.dice.choice((trial.every, self.dice.randrange(1, 5)))
        words += ["--save-every", str(trial.every), f"save.keep={trial.keep}"]
        ends: dict[str, End] = {"pipe closed": "pipe", "terminal closed": "terminal"}
        told, due = moment(self.dice, trial.output, steps=STEPS)
        metrics = trial.output / "metrics.jsonl"
        before, base = metrics.read_bytes() if metrics.exists() else b"", trial.newest
        self.note(f"{' '.join(words)}   # {fate}{', ' + told if fate in FATES and fate != 'goes on' else ''}")
        command = Command(words, log=self.log(), end=ends.get(fate, "file"))
        return Flight(trial, command, fate, due, drives, before, base, happened=fate in ("goes on", "second start"))

    def placement(self, trial: Trial) -> tuple[list[str], list[Path]]:
        """Return random words for the state's placement, and the drives that it leases."""
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
        """Apply the event once it is due."""
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
        """Check the exit code and the messages, and that the last step was saved if it could be."""
        trial, command, fate = flight.trial, flight.command, flight.fate
        refused = fate == "second start" and command.code == 2 and "another run" in command.text
        if not refused and command.code not in FATES.get(fate, (0, {0}))[1]:
            raise Difference(f"{fate}: exit {command.code}: {command}")
        if "Traceback" in command.text:
            raise Difference(f"{fate}: a traceback: {command}")
        hit = what_was_hit(trial.output, command.text) if fate == "SIGKILL" and command.code else f"exit {command.code}"
        self.done[f"train, {fate if flight.happened else 'goes on'}: {hit}"] += 1
        (trial.output / "save").unlink(missing_ok=True)
        self.world.check_told(trial, {int(step) for step in re.findall(r"saved \S*/step-([0-9]+)", command.text)})
        if command.code == 0:
            self.world.check_finished(trial, saved=flight.base < STEPS and not trial.final)
        elif fate not in ("SIGKILL", "disk full", "second start"):
            metrics = trial.output / "metrics.jsonl"
            last = max((row["step"] for row in rows(metrics)), default=0)
            if last > flight.base and metrics.read_bytes() != flight.before and trial.reached != last:
                raise Difference(f"{fate}: trained to step {last}, and saved {trial.reached}: {command}")


def fill(directory: Path) -> None:
    """Fill the filesystem of `directory` to its last byte."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
