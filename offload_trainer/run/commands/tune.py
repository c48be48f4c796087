"""Short real runs around the plan, each in a process of its own, and the fastest settings as a file.

    plan -> groups of changes, each tried on top of the best so far -> FILE.yaml, and the ratio of measured to predicted

A trial that runs out of memory costs only itself. What decides is the median, over the steps without the first two, of
the phase that the keys steer. Settings that are not at least 2 % faster than what they replace are left out, since
steps differ by as much from run to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from offload_trainer.errors import TrainerError
from offload_trainer.plan.calibration import steady_ratios
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.time.step_time import PHASES
from offload_trainer.safe_files import parsed
from offload_trainer.settings import load_config
from offload_trainer.storage.owned_dirs import scratch

_WARM = 2
_GAIN = 0.98
_ALWAYS = (
    "--steps",
    "1000",
    "train.epochs=auto",
    "train.eval_every=0",
    "train.sample_every=0",
    "--save-every",
    "0",
    "--resume",
    "never",
)


@dataclass
class Trial:
    """Words added to the given ones, and what came out."""

    words: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Of a step; infinite for one that failed."""
        return self.phase("step")

    def phase(self, name: str) -> float:
        counted = self.steps[_WARM:] or self.steps
        return median(step[name] for step in counted) if counted and not self.failed else float("inf")

    def to_json(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "seconds": self.seconds if self.steps and not self.failed else None,
            "failed": self.failed or None,
            "steps": self.steps,
        }


def steered_phase(plan: Plan) -> str:
    """What the keys of `Plan.tunable` make longer or shorter; forward and backward would only add their noise."""
    alone = plan.placement.params == "gpu" and not plan.forecast.behind
    return "update" if alone and plan.uses_drives else "step"


def tune(
    words: Sequence[str],
    groups: Sequence[Sequence[str]],
    *,
    phase: str,
    steps: int,
    say: Callable[[str], None],
) -> list[Trial]:
    """The trials, the one with the shortest `phase` first. TrainerError where not even the plan itself runs."""
    best = run_trial(words, "", steps=steps, say=say)
    if best.failed:
        raise TrainerError(f"the plan itself does not run, so there is nothing to tune: {best.failed}")
    trials = [best]
    for group in groups:
        found = [run_trial(words, f"{best.words} {added}".strip(), steps=steps, say=say) for added in group]
        trials += found
        fastest = min(found, key=lambda trial: trial.phase(phase))
        if fastest.phase(phase) < _GAIN * best.phase(phase):
            best = fastest
    return [best, *(trial for trial in trials if trial is not best)]


def run_trial(words: Sequence[str], added: str, *, steps: int, say: Callable[[str], None]) -> Trial:
    """One real run of a few steps, in a process of its own."""
    trial = Trial(added)
    start = time.perf_counter()
    with scratch("tune-") as folder:
        log = folder / "log"
        command = [
            sys.executable,
            "-m",
            "offload_trainer.run.commands.tune",
            str(steps),
            *words,
            *_ALWAYS,
            *added.split(),
        ]
        command += ["--output", f"{folder}/run"]
        with log.open("w") as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        trial.steps = [
            parsed(line, dict[str, Any], finite=False) for line in done.stdout.splitlines() if line.startswith("{")
        ]
        if done.returncode:
            reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            trial.failed = f"{reason}: {' '.join(log.read_text(errors='replace').split())[-300:]}"
    took = f"{time.perf_counter() - start:.0f} s"
    outcome = trial.failed or f"{trial.seconds:.2f} s a step, update {trial.phase('update'):.2f}"
    say(f"tune: {added or 'as planned'}: {outcome} (trial of {took})")
    return trial


def ratios(plan: Plan, trial: Trial) -> dict[str, float]:
    """Measured / predicted seconds, as far as the trial's steps say anything of the next run."""
    taken = {phase: [step[phase] for step in trial.steps[_WARM:]] for phase in PHASES}
    return steady_ratios(plan.forecast, taken, engine=plan.engine, ranks=plan.world)


def _child(words: list[str]) -> None:
    """Carry out a trial: one JSON line a step on stdout, which libraries do not get to see."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from offload_trainer.run.process_setup import prepare_process

    steps = int(words.pop(0))
    config = load_config(words)
    prepare_process(config)
    from offload_trainer.run.train import train_run

    def time_steps(job: Any) -> None:
        from offload_trainer.trainer import timed_steps

        for record in timed_steps(job, steps=steps):
            print(json.dumps(record), file=answers)

    train_run(config, instead=time_steps)


if __name__ == "__main__":
    try:
        _child(sys.argv[1:])
    except TrainerError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
