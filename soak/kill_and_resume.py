"""Kill (SIGKILL) small runs at random moments: each must resume, and end with the bits of an undisturbed run.

    python soak/kill_and_resume.py --kills 200 --seed 0 [--ranks 2 [--pipeline]] [--pages]

A run is killed while it starts, resumes, trains, saves or prunes, and started again by the same command. With
checkpoints, each start has another placement of the state, sometimes another number of ranks, and sometimes the run is
told to end (SIGTERM) instead. With `--pages` only the last weights are saved: all state is in page files of two copies,
and a start resumes from those. With several ranks, one of them or their launcher is killed. With `--pipeline` they
compute one model, and each start has another number of them, up to `--ranks`.

After each kill, what is left must be complete and of no earlier step than before, all processes must end within 300 s,
and the next start must resume from that step. The last line counts kills, finished runs and the moments that were hit.
On a failure the script exits with 1 and prints what differs, the command and its output; `--seed` repeats the choices,
but not the exact moments.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runs import Difference, Run, checkpoints_in, compare, count_lines, finish, verify_checkpoint

from offload_trainer.common.errors import UserError
from offload_trainer.config import SaveSection
from offload_trainer.run.resume import newest_state
from offload_trainer.storage.manifest import weights_alone

STEPS = 14
WITHIN = 300.0  # seconds in which all processes must have ended
ENDED = {0, *(code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number))}
SMALL = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
SMALL += ["--steps", STEPS, "train.eval_every=5", "train.deterministic=true", "placement.threads=1"]
SMALL += ["--engine", "tiered"]
SAVED = ["--save-every", "2", "save.keep=2", "tiered.page_size=65536"]
PAGES = ["--save-every", "0", "--optimizer", "nvme", "tiered.state_copies=2", "tiered.page_size=16384"]
ON_DRIVE = ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"]


@dataclass(frozen=True)
class Kind:
    """The words of a run, and those of which each start gets one, since they change no bit."""

    words: Sequence[object]
    placements: Sequence[Sequence[object]] = ((),)
    drives: int = 1


PLACEMENTS = (
    ["--ram-fraction", "1"],
    ["--gpu-fraction", "0.4", "--ram-fraction", "0.3"],
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme", "--params", "cpu"],
    ON_DRIVE,
)
CHECKPOINTS = (
    Kind(SAVED, PLACEMENTS),
    Kind([*SAVED, "optim.name=muon"], PLACEMENTS),
    Kind([*SAVED, "--dtype", "fp16"], PLACEMENTS),
)
PAGE_FILES = (
    Kind([*PAGES, "tiered.overlap=off"]),
    Kind([*PAGES, "tiered.overlap=forward", "optim.moment_dtype=8bit"], drives=2),
    Kind([*PAGES, "tiered.overlap=backward"]),
    Kind([*PAGES, "tiered.overlap=backward", "--dtype", "bf16", "optim.master_dtype=bf16"]),
    Kind([*PAGES, "tiered.overlap=forward", *ON_DRIVE]),
    Kind([*PAGES, "tiered.overlap=backward", "optim.name=muon"]),
    Kind([*PAGES, "tiered.overlap=forward", "optim.name=muon", *ON_DRIVE], drives=2),
    Kind([*PAGES, "tiered.overlap=off", "--dtype", "fp16"]),
)


class Trial:
    """Runs, kills and comparisons in one directory."""

    def __init__(
        self, folder: Path, dice: random.Random, *, kills: int, ranks: int, pages: bool, pipeline: bool = False
    ) -> None:
        self.folder, self.dice, self.kills, self.ranks, self.pages = folder, dice, kills, ranks, pages
        self.pipeline = pipeline
        self.log = folder / "log.txt"
        self.drives = [folder / "drive-0", folder / "drive-1"]
        self.hits: Counter[str] = Counter()  # moments at which a command was ended
        for drive in self.drives:
            drive.mkdir()

    def carry_out(self, kinds: Sequence[Kind]) -> None:
        begun, runs = time.monotonic(), 0
        while self.hits.total() < self.kills:
            kind, output = kinds[runs % len(kinds)], self.folder / f"run-{runs}"
            alone = self.folder / f"undisturbed-{runs % len(kinds)}"
            if not alone.exists():
                finish([*self.words(kind, alone, ranks=1), *kind.placements[0]], log=self.log)
                self.export(alone)
            self.carry_out_one(kind, output)
            self.export(output)
            compare(output, alone)
            self.refuse_leftovers(output)
            runs += 1
            print(f"run {runs}: the bits of an undisturbed run; {self.hits.total()} kills so far", flush=True)
        hits = ", ".join(f"{count} {what}" for what, count in self.hits.most_common())
        print(f"{self.hits.total()} kills ({hits}), {runs} runs, {time.monotonic() - begun:.0f} s")

    def words(self, kind: Kind, output: Path, *, ranks: int) -> list[object]:
        named = [word for drive in self.drives[: kind.drives] for word in ("--nvme", drive)]
        where = ["--output", output, f"data.cache={self.folder / 'cache'}"]
        count = ["--gpus", ranks] if ranks > 1 else []
        if self.pipeline:
            count += ["--accumulate", 2, f"parallel.pipeline={ranks}", "model.overrides.n_layer=4"]
        else:
            count += ["--accumulate", self.ranks // ranks]
        return [*SMALL, *kind.words, *named, *where, *count]

    def start(self, kind: Kind, output: Path) -> Run:
        ranks = self.ranks
        if not self.pages:
            ranks = self.dice.choice(range(1, ranks + 1) if self.pipeline else [1, *[ranks] * 4])
        placements = [words for words in kind.placements if ranks == 1 or "--gpu-fraction" not in words]
        return Run([*self.words(kind, output, ranks=ranks), *self.dice.choice(placements)], log=self.log)

    def carry_out_one(self, kind: Kind, output: Path) -> None:
        """Kill and start a run until it finishes."""
        step = 0
        while True:
            run = self.start(kind, output)
            name, when = self.moment(output)
            hit = self.hits.total() < self.kills and run.wait_for(when) and self.end(run)
            code = run.wait(WITHIN) if hit else run.wait()
            if "Traceback" in run.text or code not in (ENDED if hit else (0,)):
                raise Difference(f"exit {code}: {run}")
            self.check_resumed(run, step, finished=code == 0)
            if code == 0:
                return
            self.hits[name] += 1
            step = self.left(output, step)

    def moment(self, output: Path) -> tuple[str, Callable[[], bool]]:
        """Return a random moment of a run: its name, and a condition that is true from then on."""
        checkpoints, metrics = output / "checkpoints", output / "metrics.jsonl"
        before, after = set(checkpoints_in(output)), count_lines(metrics) + self.dice.randrange(1, 6)
        seconds, seen = {
            "at the start": (3.0 * self.ranks, lambda: True),
            "in a step": (0.1, lambda: count_lines(metrics) >= after),
            "in a save": (0.06, lambda: any(checkpoints.glob(".step-*.tmp"))),
            "in a prune": (0.02, lambda: before - set(checkpoints_in(output))),
        }[name := self.dice.choice(MOMENTS[self.pages])]
        delay, due = self.dice.uniform(0, seconds), list[float]()

        def when() -> bool:
            if not due and seen():
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        return name, when

    def end(self, run: Run) -> bool:
        """Kill one process of the command, or tell it to end, which saves a checkpoint; return False if it has ended.

        A launcher that is killed makes its ranks save too. With `--pages` no start resumes from a checkpoint.
        """
        told = not self.pages and self.dice.random() < 0.2

        def choose(pids: list[int]) -> int:
            return self.dice.choice(pids[1:] if self.pages and len(pids) > 1 else pids)

        return run.send(signal.SIGTERM if told else signal.SIGKILL, choose=choose)

    def check_resumed(self, run: Run, step: int, *, finished: bool) -> None:
        """Raise Difference if a start resumed from another step than `step`, or a finished one from none."""
        said = re.findall(r"(?:resumed from|resuming from the page files in) .*?step (\d+)", run.text)
        if said and int(said[0]) != step:
            raise Difference(f"step {step} was left, and the next start resumed from another: {run}")
        if finished and step and not said and "\ndone" not in run.text:
            raise Difference(f"step {step} was left, and the next start did not resume from it: {run}")

    def left(self, output: Path, before: int) -> int:
        """Return the step that a start can resume from, 0 for none; raise Difference if it is earlier than `before`."""
        checkpoints = checkpoints_in(output)
        for checkpoint in checkpoints.values():
            verify_checkpoint(checkpoint)
        step = max(checkpoints, default=0)
        if self.pages:
            if other := [path for n, path in checkpoints.items() if n != STEPS or not weights_alone(path)]:
                raise Difference(f"{output}: only the last weights should have been saved: {other}")
            try:
                _, kept = newest_state(SaveSection(output=str(output)))
            except (OSError, ValueError, UserError) as error:
                raise Difference(f"{output}: a start could not use its page files: {error}") from error
            step = max(step, kept)
        if step < before:
            raise Difference(f"{output}: step {before} was left by a kill, and step {step} by the next one")
        return step

    # -- results -------------------------------------------------------------------------------------------------------

    def export(self, output: Path) -> None:
        finish(["export", output, output / "exported", "--dtype", "fp32"], log=self.log)

    def refuse_leftovers(self, output: Path) -> None:
        left = [*output.glob("checkpoints/.*"), *output.glob(".*.tmp")]
        left += [path for drive in self.drives for path in drive.glob("offload-trainer/run-*")]
        if left:
            raise Difference(f"left over: {', '.join(map(str, left))}")


MOMENTS = {  # moments to end a run at, for each value of `pages`
    False: ("at the start", "in a step", "in a save", "in a save", "in a prune"),
    True: ("at the start", "in a step", "in a step", "in a step", "in a save"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        os.environ["OFFLOAD_TRAINER_CACHE"] = f"{folder}/machine"
        given = {name: value for name, value in vars(wish).items() if name != "seed"}
        trial = Trial(Path(folder), random.Random(wish.seed), **given)
        try:
            trial.carry_out(PAGE_FILES if wish.pages else CHECKPOINTS)
        except Difference as found:
            raise SystemExit(str(found)) from None


if __name__ == "__main__":
    main()
