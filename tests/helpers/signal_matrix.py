"""Run small trainings that end in every way, in forks of a process that has imported torch: signal x phase x stream.

    python tests/helpers/signal_matrix.py FOLDER [--only WORD,WORD] [--phases PHASE,PHASE] [--pairs] [--table]

One line is printed for each cell, or a table. A cell is a whole command with a small model. When it reaches the phase,
its stdout and stderr lose their reader (for those kinds of stream), and it sends itself the signal once or twice.
The results are compared with the documented exit codes and outcomes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pty
import resource
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

SIGNALS = ("HUP", "INT", "TERM", "QUIT", "USR1")
PHASES = ("start", "plan", "first build", "training", "save", "prune", "evaluation", "final export")
STREAMS = ("terminal", "file", "closed pipe", "gone terminal")
STEPS, EVERY = 6, 2
PATIENCE = 600  # seconds for a cell


@dataclass(frozen=True)
class Cell:
    signal: str
    times: int
    phase: str
    stream: str

    @property
    def number(self) -> int:
        return int(signal.Signals[f"SIG{self.signal}"])

    @property
    def at_once(self) -> bool:
        """Return True for phases in which a run has nothing to save yet."""
        return self.phase in PHASES[:3]

    @property
    def insists(self) -> bool:
        """Return True if the second signal ends the run immediately. A second SIGHUP does not; SIGUSR1 never ends a
        run.
        """
        return self.times == 2 and self.signal in ("INT", "TERM", "QUIT")


@dataclass
class End:
    """The outcome of a cell."""

    cell: Cell
    code: int = -1  # exit code as a shell reports it: 128 + N for a process killed by signal N
    seconds: float = 0.0
    checkpoints: list[int] = field(default_factory=list)
    steps: int = 0  # lines of metrics.jsonl
    exported: bool = False
    wrong: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        if self.exported:
            return "exported"
        return "saved" if self.steps and self.steps in self.checkpoints else "not saved"


def all_cells() -> list[Cell]:
    return [Cell(*cell) for cell in product(SIGNALS, (1, 2), PHASES, STREAMS)]


def pairs() -> list[Cell]:
    """Return a quarter of all cells, in which every pair of signal (once or twice), phase and stream still occurs."""
    kinds = list(product(SIGNALS, (1, 2)))
    return [
        Cell(*kind, phase, STREAMS[-(one + other) % len(STREAMS)])
        for (one, kind), (other, phase) in product(enumerate(kinds), enumerate(PHASES))
    ]


def load_libraries() -> None:
    """Import what each command needs, once. Nothing is computed here, since a fork would lose the threads
    that start.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from offload_trainer.run.process_setup import quieten

    quieten()
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import offload_trainer.engine.tiered
    import offload_trainer.export.directory
    import offload_trainer.run.train
    import offload_trainer.trainer  # noqa: F401

    gc.collect()
    gc.freeze()  # Without this, each fork's garbage collection would touch, and so copy, all of it.


# -- in the child ----------------------------------------------------------------------------------------------------


class Moment:
    """The moment at which a cell's signals are sent, at most once a run."""

    def __init__(self, cell: Cell, reader: int) -> None:
        self.cell, self.reader = cell, reader
        self.over = False
        self.asked: Any = None  # the training loop's stop and save requests, once it has started

    def come(self) -> None:
        if self.over:
            return
        self.over = True
        if self.cell.stream in STREAMS[2:]:
            os.kill(self.reader, signal.SIGKILL)
            os.waitpid(self.reader, 0)
        try:
            os.kill(os.getpid(), self.cell.number)
            self._until_handled()
        finally:  # Without anything to save, the first signal raises from here.
            if self.cell.times == 2:
                os.kill(os.getpid(), self.cell.number)
                self._until_handled()

    def _until_handled(self) -> None:
        """Wait until the training loop has seen the signal: handlers run in the main thread, and this may be
        another.
        """
        deadline = time.monotonic() + 300
        while self.asked and not (self.asked.stop or self.asked.save) and time.monotonic() < deadline:
            time.sleep(0.001)


def patch(owner: Any, name: str, moment: Moment, *, nth: int = 1) -> None:
    """Trigger `moment` before the `nth` call of `owner.name`."""
    call, calls = getattr(owner, name), iter(range(1, 10**9))

    def then(*arguments: Any, **named: Any) -> Any:
        if next(calls) == nth:
            moment.come()
        return call(*arguments, **named)

    setattr(owner, name, then)


def arm(moment: Moment) -> None:
    """Install the trigger for the cell's phase."""
    from offload_trainer import checkpoint, cli, trainer
    from offload_trainer.engine.tiered import TieredEngine
    from offload_trainer.export import directory
    from offload_trainer.offloading.pages.named_state import TieredSnapshot
    from offload_trainer.optim import kernel_cache
    from offload_trainer.run import planning

    train = trainer.train

    def noted(job: Any, asked: Any, **named: Any) -> Any:
        moment.asked = asked
        return train(job, asked, **named)

    trainer.train = noted
    match moment.cell.phase:
        case "start":
            patch(cli, "prepare_process", moment)
        case "plan":
            patch(planning, "resolve_and_plan", moment)
        case "first build":
            patch(kernel_cache.subprocess, "run", moment)
        case "training":
            patch(TieredEngine, "train_step", moment, nth=3)
        case "save":
            patch(TieredSnapshot, "write", moment)
        case "prune":
            patch(checkpoint, "prune", moment, nth=2)
        case "evaluation":
            patch(TieredEngine, "eval_loss", moment)
        case "final export":
            patch(directory, "write_model", moment)


def words(cell: Cell, folder: Path, shared: Path) -> list[str]:
    small = ["model.overrides.n_layer=1", "model.overrides.n_embd=32", "model.overrides.n_head=2", "--seq-len", "16"]
    often = ["--micro-batch", "1", "train.eval_every=3", "train.eval_rows=1", "save.keep=1", f"--steps={STEPS}"]
    saves = 0 if cell.phase == "final export" else EVERY
    names = ["--nvme", str(folder / "drive"), "--output", str(folder / "out"), f"data.cache={shared / 'cache'}"]
    homes = ["--optimizer=nvme", "--ram-fraction=0.5", "placement.threads=1", "tiered.page_size=16384"]
    return [*small, *often, f"--save-every={saves}", *names, *homes]


def start_reader(cell: Cell, text: Path) -> int:
    """Set stdout and stderr to the cell's kind of stream; return the pid of the process that reads them, or 0."""
    if cell.stream == "file":
        writer, reader = os.open(text, os.O_WRONLY | os.O_CREAT, 0o666), -1
    elif "pipe" in cell.stream:
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
    pid = 0
    if reader >= 0:
        pid = os.fork()
        if not pid:
            os.close(writer)
            with open(text, "wb", buffering=0) as file:
                try:
                    while data := os.read(reader, 1 << 16):
                        file.write(data)
                except OSError:  # The terminal's other end was closed.
                    pass
            os._exit(0)
        os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    return pid


def run_cell(cell: Cell, folder: Path, shared: Path) -> None:
    """Run the cell in the forked child; never return."""
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        cache = folder / "machine-cache" if cell.phase == "first build" else shared / "machine-cache"
        os.environ["OFFLOAD_TRAINER_CACHE"] = str(cache)
        moment = Moment(cell, start_reader(cell, folder / "text"))
        arm(moment)
        from offload_trainer.cli import main

        code = main(words(cell, folder, shared))
        if not moment.over:
            code = 98
    finally:
        os._exit(code)


# -- in the parent ---------------------------------------------------------------------------------------------------


def finish(cell: Cell, folder: Path, shared: Path) -> End:
    """Run a cell in a fork and collect its outcome."""
    (folder / "drive").mkdir(parents=True)
    end, start = End(cell), time.monotonic()
    pid = os.fork()
    if not pid:
        run_cell(cell, folder, shared)
    status = wait(pid)
    if status is None:
        end.wrong.append(f"still running after {PATIENCE} s")
    else:
        code = os.waitstatus_to_exitcode(status)
        end.code = code if code >= 0 else 128 - code
    end.seconds = time.monotonic() - start
    look(end, folder)
    return end


def wait(pid: int) -> int | None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def look(end: End, folder: Path) -> None:
    """Fill in what the run left on disk, and note what differs from the documentation."""
    from offload_trainer.checkpoint import complete_checkpoints, read_manifest

    cell, out, wrong = end.cell, folder / "out", end.wrong
    for checkpoint in complete_checkpoints(out / "checkpoints"):
        read_manifest(checkpoint)
        end.checkpoints.append(int(checkpoint.name.removeprefix("step-")))
    metrics = out / "metrics.jsonl"
    end.steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    end.exported = (out / "export/model.safetensors").exists()
    text, log = (
        path.read_text(errors="replace") if path.exists() else "" for path in (folder / "text", out / "log.txt")
    )
    wrong += [f"{name} holds a traceback" for name, told in (("text", text), ("log.txt", log)) if "Traceback" in told]
    wrong += [f"left over: {path.name}" for path in out.glob("checkpoints/.*") if not killed(cell)]
    wrong += [f"left over: {path}" for path in (folder / "drive/offload-trainer").glob("run-*") if not killed(cell)]
    wrong += [f"left over: {path}" for path in out.glob(".*.tmp")]
    if end.code != expected_code(cell):
        wrong.append(f"exit code {end.code}, documented is {expected_code(cell)}")
    if end.outcome not in expected_outcomes(cell):
        wrong.append(f"{end.outcome}, documented is {' or '.join(expected_outcomes(cell))}")
    if log and not killed(cell):
        last = [line[20:] for line in log.splitlines()][-1]
        if not last.startswith("done:" if cell.signal == "USR1" else "ended: "):
            wrong.append(f"log.txt ends with {last!r}")


def killed(cell: Cell) -> bool:
    """Return True if the second signal kills the process before it can clean up."""
    return cell.at_once and cell.insists


def expected_code(cell: Cell) -> int:
    return 0 if cell.signal == "USR1" else 128 + cell.number


def expected_outcomes(cell: Cell) -> tuple[str, ...]:
    """Return the documented outcomes for the last step. A second signal may arrive just after a save has finished."""
    if cell.signal != "USR1" and cell.at_once:
        return ("not saved",)
    if cell.insists:
        return ("not saved", "saved") if cell.phase != "final export" else ("not saved",)
    return ("exported",) if cell.phase == "final export" else ("saved",)


def table(ends: Sequence[End]) -> str:
    """Return a Markdown table of exit codes and outcomes by phase and signal, with all kinds of streams merged."""
    kinds = list(product(SIGNALS, (1, 2)))
    lines = ["| | " + " | ".join(name + (", twice" if times == 2 else "") for name, times in kinds) + " |"]
    lines.append("| --- |" + " --- |" * len(kinds))
    for phase in PHASES:
        row = []
        for kind in kinds:
            found = [end for end in ends if (end.cell.signal, end.cell.times) == kind and end.cell.phase == phase]
            row.append(" or ".join(dict.fromkeys(f"{end.code} {end.outcome}" for end in found)))
        lines.append(f"| {phase} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="words of cells, with commas: TERM,2,training")
    parser.add_argument("--phases", default=",".join(PHASES), help="some of them, with commas")
    parser.add_argument("--pairs", action="store_true", help="a quarter of all, see `pairs`")
    parser.add_argument("--table", action="store_true", help="print a table at the end instead of a line for each")
    wishes = parser.parse_args()
    load_libraries()
    ends, only = [], [word for word in wishes.only.split(",") if word]
    for number, cell in enumerate(pairs() if wishes.pairs else all_cells()):
        words = (cell.signal, str(cell.times), cell.phase, cell.stream)
        if cell.phase not in wishes.phases.split(",") or not all(map(words.__contains__, only)):
            continue
        folder = wishes.folder / f"cell-{number}"
        end = finish(cell, folder, wishes.folder)
        ends.append(end)
        if not wishes.table:
            print(json.dumps(asdict(end) | {"outcome": end.outcome}), flush=True)
        if not end.wrong:
            shutil.rmtree(folder)
    if wishes.table:
        print(table(ends))
        print(f"{len(ends)} cells, wrong: {[asdict(end) for end in ends if end.wrong] or 'none'}")


if __name__ == "__main__":
    main()
