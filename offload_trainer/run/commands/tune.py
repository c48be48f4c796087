"""The `tune` command: try settings around the plan in short real runs and keep the fastest.

Each trial runs in a separate process, so that running out of memory ends that trial only.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.safe_files import parsed
from offload_trainer.plan.plan import Plan
from offload_trainer.run.process_setup import prepared
from offload_trainer.storage.owned_dirs import scratch

_WARM = 2  # first steps of a trial that do not count
_GAIN = 0.98  # a setting must be 2 % faster to be kept: steps vary by that much from run to run
_ALWAYS = ("--steps", "1000", "train.epochs=auto", "train.eval_every=0", "--save-every", "0", "--resume", "never")

# Groups of settings, none of which changes a result or a placement
_PAGES = ("tiered.page_size=2097152", "tiered.page_size=8388608"), ("tiered.page_buffers=4", "tiered.page_buffers=10")
_WEIGHTS = ("tiered.weight_buffers=2", "tiered.weight_buffers=4")
_BUCKETS = ("deepspeed.reduce_bucket_size=20000000", "deepspeed.reduce_bucket_size=200000000")
# 12 buffers are the fewest that work with both pipelines.
_NVME_OPTIMIZER = (
    ("deepspeed.pipeline_read=false deepspeed.pipeline_write=false", "deepspeed.optimizer_buffer_count=16"),
    ("deepspeed.sub_group_size=20000000", "deepspeed.sub_group_size=100000000"),
    ("deepspeed.aio_threads=1", "deepspeed.aio_threads=4", "deepspeed.aio_threads=8"),
    ("deepspeed.aio_block_size=262144", "deepspeed.aio_block_size=8388608"),
    ("deepspeed.aio_queue_depth=8", "deepspeed.aio_queue_depth=128"),
)


@dataclass
class Trial:
    """One trial: the words added to the user's command, and its measured steps."""

    words: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Median seconds of a step; infinite for a failed trial."""
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


def tunable(plan: Plan) -> list[tuple[str, ...]]:
    """Return the groups of settings to try for a plan."""
    if plan.engine == "deepspeed":
        return [_BUCKETS, *(_NVME_OPTIMIZER if plan.placement.optimizer == "nvme" else ())]
    return [*(_PAGES if plan.uses_drives else ()), *((_WEIGHTS,) if plan.placement.params != "gpu" else ())]


def steered_phase(plan: Plan) -> str:
    """Return the phase that trials compare: "update" if the settings affect nothing else, without other noise."""
    alone = plan.placement.params == "gpu" and not plan.forecast.behind
    return "update" if alone and plan.uses_drives else "step"


def tune(
    words: Sequence[str], groups: Sequence[Sequence[str]], *, phase: str, steps: int, say: Callable[[str], None]
) -> list[Trial]:
    """Run the trials and return them, the chosen one first.

    Each change of a group is tried on top of the best settings so far. Raises TrainerError if the unchanged plan fails.
    """
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
    """Run a few steps in a separate process, with `added` after the user's words."""
    trial = Trial(added)
    start = time.perf_counter()
    with scratch("tune-") as folder:
        log, timed = folder / "log", folder / "steps.jsonl"
        command = [sys.executable, "-m", "offload_trainer.run.commands.tune", str(steps), str(timed), *words, *_ALWAYS]
        command += [*added.split(), "--output", f"{folder}/run"]
        with log.open("w") as printed:
            done = subprocess.run(command, stdout=printed, stderr=printed, check=False)
        lines = timed.read_text().splitlines() if timed.exists() else []
        trial.steps = [parsed(line, dict[str, Any]) for line in lines]
        if done.returncode:
            reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            trial.failed = f"{reason}: {' '.join(log.read_text(errors='replace').split())[-300:]}"
    took = f"{time.perf_counter() - start:.0f} s"
    outcome = trial.failed or f"{trial.seconds:.2f} s a step, update {trial.phase('update'):.2f}"
    say(f"tune: {added or 'as planned'}: {outcome} (trial of {took})")
    return trial


def _child(steps: str, path: str, *words: str) -> None:
    """Run a trial in this process and write one JSON line per step to the new file `path`."""
    config = prepared([*words])
    from offload_trainer.run.loop import timed_steps
    from offload_trainer.run.train import train_run

    def time_steps(job: Any) -> None:
        with open(path, "w", buffering=1) as answers:
            for record in timed_steps(job, steps=int(steps)):
                print(json.dumps(record), file=answers)

    train_run(config, instead=time_steps)


if __name__ == "__main__":
    try:
        _child(*sys.argv[1:])
    except TrainerError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
