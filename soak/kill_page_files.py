"""Kill (SIGKILL) runs without checkpoints at random moments: each restart resumes from the page files, bit for bit.

    python soak/kill_page_files.py --kills 300 --seed 0 --ranks 2
    python soak/kill_page_files.py --kills 100 --only muon

All state is on drives, in pages with two copies, and no checkpoint is ever saved. A run is killed while it starts,
resumes, trains or exports, and restarted by the same command; sometimes other runs use its drive in between. After each
kill the files must hold one complete step, never an earlier one than before, and the next start must say that it
resumes from that step. With several ranks, one of them is killed. When a run finishes, its metrics and its weights
must match those of one undisturbed rank bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kill_ranks import Ranks
from trials import Command, Difference, compare_file, finish, lines, rows, soak_of_kills

from offload_trainer.errors import UserError
from offload_trainer.offloading.pages.stored_masters import read_store

STEPS = 30
KINDS = (  # settings of each run: AdamW and Muon, every update schedule, each moment format, one drive or two
    ["tiered.overlap=off"],
    ["tiered.overlap=forward"],
    ["tiered.overlap=backward"],
    ["tiered.overlap=forward", "optim.moment_dtype=8bit", "TWO"],
    ["tiered.overlap=off", "optim.moment_dtype=bf16"],
    ["tiered.overlap=forward", "--params", "nvme", "placement.gradients=nvme"],
    ["tiered.overlap=off", "optim.name=muon"],
    ["tiered.overlap=forward", "optim.name=muon", "TWO"],
    ["tiered.overlap=backward", "optim.name=muon"],
    ["tiered.overlap=forward", "optim.name=muon", "--params", "nvme", "placement.gradients=nvme"],
    ["tiered.overlap=off", "--dtype", "fp16", "optim.initial_loss_scale=1099511627776", "optim.loss_scale_window=3"],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="part of the words of a kind, such as muon; empty: all kinds")

    def carry_out(folder: Path, dice: random.Random, wishes: argparse.Namespace) -> None:
        kinds = [kind for kind in KINDS if wishes.only in " ".join(kind)]
        if not kinds:
            parser.error(f"--only {wishes.only}: no kind of run has it")
        Trial(folder, dice, kinds, ranks=wishes.ranks).carry_out(wishes.kills)

    soak_of_kills(parser, carry_out, kills=300)


class Trial:
    """Runs, kills and comparisons in one directory."""

    def __init__(self, folder: Path, dice: random.Random, kinds: Sequence[list[str]], *, ranks: int) -> None:
        self.folder, self.dice, self.kinds, self.ranks = folder, dice, kinds, ranks
        self.log = folder / "log.txt"
        self.found: Counter[str] = Counter()  # states that kills left
        self.runs = 0
        for name in ("one", "two"):
            (folder / name).mkdir()

    def carry_out(self, kills: int) -> None:
        start = time.monotonic()
        while self.killed < kills:
            kind = self.runs % len(self.kinds)
            alone = self.folder / f"alone-{kind}"
            if not alone.exists():
                finish([*self.words(kind, alone, ranks=1), "tiered.state_copies=1"], log=self.log)
            self.runs += 1
            self.one_run(self.folder / f"run-{self.runs}", kind, most=kills)
            self.compare(self.folder / f"run-{self.runs}", alone)
            print(f"run {self.runs}: the same; {self.killed} kills so far", flush=True)
        print(f"{self.killed} kills, {self.runs} runs, {time.monotonic() - start:.0f} s; left: ", end="")
        print(", ".join(f"{count} {what}" for what, count in self.found.most_common()))

    @property
    def killed(self) -> int:
        return sum(self.found.values())

    def words(self, kind: int, output: Path, *, ranks: int) -> list[object]:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"]
        state = ["--optimizer", "nvme", "tiered.state_copies=2", "tiered.page_size=16384", "--save-every", 0]
        named = ["--nvme", self.folder / "one", *(["--nvme", self.folder / "two"] if "TWO" in self.kinds[kind] else [])]
        more = [word for word in self.kinds[kind] if word != "TWO"]
        more += ["--engine", "tiered", "--accumulate", self.ranks // ranks]
        where = ["--output", output, f"data.cache={self.folder / 'cache'}", "placement.threads=1"]
        return [
            *small,
            *state,
            *named,
            *more,
            *where,
            "--steps",
            STEPS,
            "train.eval_every=7",
            "train.deterministic=true",
        ]

    def one_run(self, output: Path, kind: int, *, most: int) -> None:
        """Kill and restart a run until it finishes or `most` kills were made."""
        step = 0
        while True:
            command = self.start(self.words(kind, output, ranks=self.ranks))
            if self.killed < most and command.wait_for(self.moment(output)):
                self.kill(command)
            code = command.wait()
            self.told(command.text, step)
            if code == 0:
                return
            if code not in (-signal.SIGKILL, 128 + signal.SIGKILL):
                raise Difference(f"exit {code}: {command}")
            step = self.left(output, step)
            if self.dice.random() < 0.1:
                self.another()

    def start(self, words: list[object]) -> Command:
        return Command(words, log=self.log) if self.ranks == 1 else Ranks(words, count=self.ranks, log=self.log)

    def kill(self, command: Command) -> None:
        """Kill the process, or one rank; killing the launcher would make the ranks save and exit in order."""
        ranks = command.ranks if isinstance(command, Ranks) else []
        with suppress(ProcessLookupError):
            os.kill(self.dice.choice(ranks or [command.pid]), signal.SIGKILL)

    def moment(self, output: Path) -> Callable[[], bool]:
        """Return a condition for a random moment: during the start, or some steps and a fraction later."""
        begun, seen = time.monotonic(), lines(output / "metrics.jsonl")
        at_start, after = self.dice.random() < 0.2, seen + self.dice.randrange(0, 9)
        delay = self.dice.uniform(0, 2.0 if at_start else 0.08)
        due: list[float] = []

        def when() -> bool:
            if at_start:
                return time.monotonic() - begun > delay
            if not due and lines(output / "metrics.jsonl") > after:
                due.append(time.monotonic() + delay)
            return bool(due) and time.monotonic() >= due[0]

        return when

    def told(self, text: str, step: int) -> None:
        """Raise Difference unless a start that got far enough said that it resumes from `step`, or from nothing if that
        is 0.
        """
        if "engine ready" not in text:
            return
        said = [line for line in text.splitlines() if "resuming from the page files" in line]
        if step and not any(f", step {step};" in line for line in said):
            raise Difference(
                f"page files of step {step} were left, and the next start did not go on from them:\n{text}"
            )
        if said and not step:
            raise Difference(f"no page files were left, and the start says that it goes on from some:\n{text}")

    def left(self, output: Path, before: int) -> int:
        """Return the step of the page files that a kill left, or 0 if there are none."""
        listed = output / "pages"
        folders = [Path(line) for line in listed.read_text().splitlines()] if listed.exists() else []
        step, what = 0, "no step"
        if folders and all(folder.is_dir() for folder in folders):
            try:
                stored = read_store(folders[0])
                if stored.updating:
                    raise Difference(f"{folders[0]}: mixed after step {stored.step}")
                step, what = _loops_step(folders[0]), "a whole step"
            except UserError as error:
                if "before its first update" not in str(error):
                    raise Difference(str(error)) from error
        if step < before and not (output / "export").exists():
            raise Difference(f"page files of step {before} have become those of step {step}: {folders}")
        self.found[what] += 1
        return step

    def another(self) -> None:
        """Train another run on the same drives, which removes what dead runs left there."""
        place = self.folder / f"another-{self.killed}"
        finish([*self.words(2 % len(self.kinds), place, ranks=1), "--steps", 1], log=self.log)

    def compare(self, output: Path, alone: Path) -> None:
        for name, keys in (("metrics.jsonl", None), ("evaluations.jsonl", ("step", "validation_loss"))):
            ours, theirs = (rows(place / name, *([keys] if keys else [])) for place in (output, alone))
            if ours != theirs:
                raise Difference(f"{output}/{name}: {ours}\nalone: {theirs}")
        compare_file(output / "export/model.safetensors", alone / "export/model.safetensors")
        for name in ("one", "two"):
            left = self.folder / name / "offload-trainer"
            if left.exists() and list(left.iterdir()):
                raise Difference(f"left over: {list(left.iterdir())}")


def _loops_step(folder: Path) -> int:
    """Return the loop's step, which is ahead of the updates if some were skipped."""
    from offload_trainer.offloading.pages.manifest import read_description, read_newest

    newest = read_newest(read_description(folder))
    assert newest is not None
    assert newest.train is not None
    return newest.train["step"]


if __name__ == "__main__":
    main()
