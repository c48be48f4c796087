"""Kill (SIGKILL) a small run at random moments, and compare its result with that of an undisturbed run.

    python soak/kill_and_resume.py --kills 200 --seed 0

A run is killed while it starts, trains, saves, prunes or exports, and restarted by the same command, sometimes with
another placement of its state. After every kill, each checkpoint with a manifest must be complete. When a run
finishes, its losses, gradient norms, rates, masters, moments and export must match the undisturbed run bit for bit.
`soak.py` does the same with everything else that can end or disturb a run.

With `--warnings` a training is stopped by SIGTERM instead, with a random `train.stop_within` of `--limits`, and must
end within it: saved, or immediately where saving does not fit. `--slow` is the share of these trainings whose steps
take 6 s more, so that a limit of 5 s is too short for some.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trials import (
    Command,
    Difference,
    checkpoints_in,
    compare_export,
    compare_state,
    finish,
    moment,
    rows,
    soak_of_kills,
    verify_checkpoint,
    what_was_hit,
)

from offload_trainer.storage.owned_dirs import ScratchDirectory

STEPS, EVERY, KEEP = 12, 2, 2
PLACEMENTS = (
    ["--ram-fraction", "1"],
    ["--gpu-fraction", "1"],
    ["--gpu-fraction", "0.4", "--ram-fraction", "0.3"],
    ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    ["--optimizer", "nvme"],
    ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"],
    ["--params", "cpu", "--ram-fraction", "0.25"],
)
LIMITS = (1.05, 1.5, 5, 15, 60)  # seconds, of which one is kept for the end
SLOW = 6.0  # seconds that a slow step takes longer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warnings", action="store_true")
    parser.add_argument("--limits", type=float, nargs="+", default=LIMITS)
    parser.add_argument("--slow", type=float, default=0.0)

    def carry_out(folder: Path, dice: random.Random, wishes: argparse.Namespace) -> None:
        limits = wishes.limits if wishes.warnings else ()
        Trial(folder, dice, limits=limits, slow=wishes.slow).carry_out(wishes.kills)

    soak_of_kills(parser, carry_out, kills=200)


class Trial:
    """Runs, kills and comparisons in one directory."""

    def __init__(self, folder: Path, dice: random.Random, *, limits: Sequence[float], slow: float) -> None:
        """`limits`: train.stop_within of warnings; empty: kill instead. `slow`: share of warnings in slow steps."""
        self.folder, self.dice, self.limits, self.slow = folder, dice, limits, slow
        self.drive = folder / "drive"
        self.drive.mkdir()
        self.log = folder / "log.txt"
        self.found: Counter[str] = Counter()  # phases that kills hit
        self.took: defaultdict[float, list[float]] = defaultdict(list)  # seconds from a warning to the end, by limit
        self.finished = self.made = self.exports = 0
        self.reference = folder / "uninterrupted"

    def carry_out(self, kills: int) -> None:
        start = time.monotonic()
        self.finish(self.words(self.reference, PLACEMENTS[0]))
        self.finish(["export", self.reference, self.reference / "hf", "--dtype", "fp32"])
        output = None
        while sum(self.found.values()) < kills:
            if output is None:
                self.made += 1
                place = ScratchDirectory(self.folder / f"trial-{self.made}", what="the run in")
                output = place.path / "run"
            if self.dice.random() < 0.65:
                self.kill_training(output)
                continue
            self.finish(self.words(output, self.dice.choice(PLACEMENTS)))
            for _ in range(0 if self.limits else self.dice.randrange(3)):
                self.kill_export(output)
            self.compare(output)
            place.close()
            output = None
        if output is not None:
            self.finish(self.words(output, self.dice.choice(PLACEMENTS)))
            self.compare(output)
        print(
            f"{sum(self.found.values())} kills, {self.finished} runs, {time.monotonic() - start:.0f} s; hit: ", end=""
        )
        print(", ".join(f"{count} {what}" for what, count in self.found.most_common()))
        for limit, took in sorted(self.took.items()):
            print(f"  limit {limit:g} s: {len(took)} warnings, the slowest end after {max(took):.2f} s")

    def words(self, output: Path, placement: list[str]) -> list[object]:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
        often = ["--steps", STEPS, "--save-every", EVERY, f"save.keep={KEEP}", "train.eval_every=0"]
        names = ["--nvme", self.drive, "--output", output, f"data.cache={self.folder / 'cache'}"]
        more = ["placement.threads=1", "tiered.page_size=65536", "train.deterministic=true"]
        return [*small, *often, *names, *placement, *more]

    def finish(self, words: list[object]) -> None:
        finish(words, log=self.log)

    def warn(self, words: list[object], when: Callable[[], bool]) -> bool:
        """Run a training and send it SIGTERM once `when` is true; return True if it was still running.

        Steps may be slow, and `when` is then replaced. Raises Difference if the training does not end within its
        `train.stop_within`.
        """
        within, first = self.dice.choice(self.limits), None
        if self.dice.random() < self.slow:
            first, when = self.slow_steps()
        command = Command([*words, f"train.stop_within={within}"], log=self.log, first=first)
        if command.wait_for(when):
            command.send(signal.SIGTERM)
        start = time.monotonic()
        # Before the command handles signals, and after it has put their handlers back, SIGTERM has its default action.
        if command.wait() not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise Difference(f"exit {command.code}: {command}")
        seconds = time.monotonic() - start
        if command.code and seconds > within:
            raise Difference(f"{seconds:.2f} s after SIGTERM, not {within}: {command}")
        if command.code:
            self.took[within].append(seconds)
        return command.code != 0

    def slow_steps(self) -> tuple[Callable[[], None], Callable[[], bool]]:
        """Return what makes the steps of a command slow, and a random moment after its first step, as a condition.

        A warning in the first step would come before the run can know how long its steps take.
        """
        one_done, delay, due = self.folder / "one-done", self.dice.uniform(0, SLOW), list[float]()
        one_done.unlink(missing_ok=True)

        def first() -> None:
            from offload_trainer.engine.tiered import TieredEngine

            step = TieredEngine.train_step

            def slow(*given: Any, **words: Any) -> Any:
                time.sleep(SLOW)
                done = step(*given, **words)
                one_done.touch()
                return done

            TieredEngine.train_step = slow

        def when() -> bool:
            if not due and one_done.exists():
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        return first, when

    def kill(self, words: list[object], when: Callable[[], bool]) -> bool:
        """Run a command and kill it once `when` is true; return True if it was still running."""
        command = Command(words, log=self.log)
        if command.wait_for(when):
            command.send(signal.SIGKILL)
        if command.wait() not in (0, -signal.SIGKILL):
            raise Difference(f"exit {command.code}: {command}")
        return command.code != 0

    def kill_training(self, output: Path) -> None:
        _, when = moment(self.dice, output, steps=STEPS)
        end = self.warn if self.limits else self.kill
        if not end(self.words(output, self.dice.choice(PLACEMENTS)), when):
            return
        said = self.log.read_text()
        if self.limits:
            words = ("everything saved", "nothing to save", "stopped at once", "complete and saved")
            self.found[next((each for each in words if each in said), "default action")] += 1
        else:
            self.found[what_was_hit(output, said)] += 1
        for checkpoint in checkpoints_in(output / "checkpoints").values():
            verify_checkpoint(checkpoint)

    def kill_export(self, output: Path) -> None:
        destination = output / f"hf-{self.exports}"
        words = ["export", output, destination, "--dtype", "fp32"]
        delay, due = self.dice.uniform(0, 0.05), []

        def when() -> bool:
            if not due and destination.with_name(f".{destination.name}.tmp").exists():
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        if self.kill(words, when):
            self.found["in an export"] += 1
        if destination.exists():
            compare_export(destination, self.reference / "hf")
            self.exports += 1  # the next export uses another directory

    def compare(self, output: Path) -> None:
        """Raise Difference unless the run's metrics, state and export match the undisturbed run's."""
        ours, theirs = (rows(directory / "metrics.jsonl") for directory in (output, self.reference))
        if ours != theirs:
            raise Difference(f"{output}: {ours}\nuninterrupted: {theirs}")
        last = f"checkpoints/step-{STEPS:08d}"
        compare_state(output / last, self.reference / last)
        left = [path.name for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]
        if left:
            raise Difference(f"{output}: left over: {left}")
        destination = output / f"hf-{self.exports}"
        self.finish(["export", output, destination, "--dtype", "fp32"])
        compare_export(destination, self.reference / "hf")
        self.finished += 1
        print(f"run {self.made}: the same; {sum(self.found.values())} kills so far", flush=True)


if __name__ == "__main__":
    main()
