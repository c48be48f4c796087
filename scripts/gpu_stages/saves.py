"""Measure what a checkpoint costs training, and kill runs at random moments, on the GPU."""

from __future__ import annotations

import re
import sys

from gpu_stages.stage import ROOT, Failure, Stage

TITLE = "Checkpoints beside training, and kills"
COLUMNS = {
    "case": "case",
    "gigabytes": "GB",
    "alone": "alone s",
    "rate": "MB/s",
    "steps": "steps of a round",
    "plain": "their s",
    "behind": "a save behind them costs s",
    "before": "a save before them costs s",
    "rss": "host peak GB",
    "found": "found",
}
CASES = {
    "state on the GPU": ["--gpu-fraction", "1", "tiered.overlap=off"],
    "state half in RAM, half on the drive": ["--gpu-fraction", "0", "--ram-fraction", "0.5", "tiered.overlap=forward"],
}
KILLS = "killed and resumed, other homes at times"
_LAST_LINE = re.compile(r"^[0-9]+ kills, [0-9]+ runs, .*", re.MULTILINE)


def carry_out(stage: Stage) -> None:
    small = ["model.overrides.n_layer=2", "model.overrides.n_embd=64", "--seq-len", "32", "--micro-batch", "2"]
    words = small if stage.rehearsal else ["--model", "gpt2-medium", "--seq-len", "1024", "--micro-batch", "8"]
    if stage.asked(KILLS):
        kill(stage, count=3 if stage.rehearsal else 12)
    for case, shares in stage.some(CASES):
        save(stage, case, [*words, "--engine", "tiered", "--params", "gpu", "{drive}", *shares])


def save(stage: Stage, case: str, words: list[str]) -> None:
    """Time rounds of steps without a save, with one in the background, and with a completed one before them."""
    rounds, steps = (1, 1) if stage.rehearsal else (3, 6)
    row = {"case": case, "words": " ".join(words), "steps": steps}
    try:
        with stage.worker(case) as worker:
            worker.build(words)
            found = worker.ask("saves", rounds=rounds, steps=steps)
    except Failure as failure:
        stage.record.add(str(failure), **row)
        return
    middle = found["middle"]
    stage.record.add(
        gigabytes=found["bytes"] / 1e9,
        alone=found["alone"],
        rate=found["bytes"] / found["alone"] / 1e6,
        plain=middle["none"],
        behind=middle["behind"] - middle["none"],
        before=middle["before"] - middle["none"],
        rss=found["peak_rss"] / 1e9,
        seconds=found["seconds"],
        **row,
    )


def kill(stage: Stage, *, count: int) -> None:
    """Send SIGKILL at random moments; the resumed runs must end with the bits of an uninterrupted run."""
    script = str(ROOT / "soak" / "kill_and_resume.py")
    try:
        done = stage.command([sys.executable, script, "--kills", str(count)], env={"KILL_DIRECTORY": str(stage.drive)})
        last = _LAST_LINE.search(done.stdout)
        if done.returncode or last is None:
            raise Failure(f"failed: exit {done.returncode}: {' '.join((done.stdout + done.stderr).split())[-300:]}")
        stage.record.add(case=KILLS, found=last[0])
    except Failure as failure:
        stage.record.add(str(failure), case=KILLS)
