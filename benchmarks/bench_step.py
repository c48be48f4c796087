"""Paired A/B benchmark of engines: each case has its own process, and the cases take turns on the same rows.

    bench_step.py [--warm 2] [--pairs 5] [WORDS] --case "NAME: WORDS" ...

WORDS are `offload-train` arguments (--model gpt2-medium --seq-len 128 ...); a case's words follow the common ones and
take precedence. `--engine` also takes the names in peers.py: `native` runs plain torch's forward and backward without
an update, the least that every engine must do. A page of Markdown is printed: medians beside the plan's predictions,
ratios, settings. Time the machine first (`offload-train bench`), so that plans predict seconds.

    parent:  build A, build B ...  ->  A step, B step, A step, B step ...  ->  medians, ratios, settings
    child:   the normal path of offload-train to an engine; instead of its loop, a step whenever the parent asks

Waiting children are stopped (SIGSTOP), so that their idle threads cost the running child nothing. Checkpoints,
validation and export are off.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from subprocess import PIPE
from typing import Any

import peers

from offload_trainer.errors import TrainerError
from offload_trainer.storage.owned_dirs import scratch

# the same schedule, however many steps are timed
ALWAYS = ["--steps", "1000", "train.eval_every=0", "--save-every", "0"]
SECONDS = ("step", "forward", "backward", "update")

# -- the child ---------------------------------------------------------------------------------------------------------


def child(words: list[str]) -> None:
    """Build the engine for `words`, then answer each line on stdin with a step, as JSON on the original stdout."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped child must not outlive its parent
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout
    from offload_trainer.run.process_setup import prepared

    peer = next((word for word in words if word in peers.SETTINGS), None)
    config = prepared(["tiered" if word == peer else word for word in words])
    import torch  # threads must have been configured before

    from offload_trainer.run import build, train
    from offload_trainer.telemetry.meters import HostTimer, PhaseClock, peak_rss_bytes
    from offload_trainer.trainer import timed_steps

    if peer:  # plain torch keeps the allocator's defaults
        build.set_malloc_threshold = lambda *_, **__: None

    def serve(job: Any) -> None:
        if peer and torch.cuda.is_available():
            job.clock = PhaseClock(HostTimer(torch.cuda.synchronize))  # the plan is the tiered engine's
        print(
            json.dumps({"build_peak": peak_rss_bytes(), "parameters": job.checkpoints.record.identity["parameters"]}),
            file=answers,
        )
        steps = timed_steps(job, steps=sys.maxsize)
        for _ in sys.stdin:
            print(json.dumps(next(steps)), file=answers)

    train.train_run(config, instead=serve, build=peers.builder(peer))


# -- the parent --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A case and its process's answers. The first `warm` steps are not counted."""

    name: str
    words: list[str]
    warm: int
    facts: dict[str, Any] = field(default_factory=dict)
    # plan, machine, environment and deepspeed files of its run directory
    told: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the case's process, built and stopped; end it and remove its files afterwards."""
        with scratch("bench-") as folder:
            self._log = folder / "log"
            command = [sys.executable, __file__, "--child", *ALWAYS, *self.words, "--output", f"{folder}/run"]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True)
            try:
                start = time.perf_counter()
                self.facts = self._answer() | {"build_seconds": time.perf_counter() - start}
                print(f"{self.name}: built in {self.facts['build_seconds']:.0f} s", file=sys.stderr)
                self.told = {path.stem: json.loads(path.read_text()) for path in (folder / "run").glob("*.json")}
                yield
            finally:
                self._process.send_signal(signal.SIGCONT)
                self._process.communicate()  # closing stdin makes it close its engine and exit

    def step(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        print("step", file=self._process.stdin, flush=True)
        self.steps.append(self._answer())
        print(f"{self.name}:", *(f"{key} {self.steps[-1][key]:.4g}" for key in (*SECONDS, "loss")), file=sys.stderr)

    def _answer(self) -> dict[str, Any]:
        """Return the next answer and stop the process. Raises TrainerError with the end of its log if it has died."""
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # its log may be written after its stdout is closed
            raise TrainerError(f"{self.name}: ... {' '.join(self._log.read_text(errors='replace').split())[-400:]}")
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def timed(self, key: str) -> list[float]:
        return [step[key] for step in self.steps[self.warm :]]

    def median(self, key: str) -> float:
        return median(self.timed(key))


def measure(cases: list[Case], *, steps: int) -> None:
    with ExitStack() as stack:
        for case in cases:
            stack.enter_context(case.running())
        for _ in range(steps):
            for case in cases:
                case.step()


def spread(numbers: list[float]) -> str:
    return f"{median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(cases: list[Case]) -> Iterator[str]:
    """Yield a table of medians and spreads, drive bytes a parameter, and memory peaks over all steps, including
    warm-up.
    """
    yield row(["case", *SECONDS, "read B/param", "written B/param", "peak RSS GB", "with build", "built s"])
    yield row(["---"] * 10)
    for case in cases:
        drive = [case.median(f"{way}_bytes") / case.facts["parameters"] for way in ("read", "written")]
        peak = max(step["peak_rss"] for step in case.steps)
        numbers = [*drive, peak / 1e9, max(peak, case.facts["build_peak"]) / 1e9, case.facts["build_seconds"]]
        yield row([case.name, *(spread(case.timed(key)) for key in SECONDS), *(f"{number:.2f}" for number in numbers)])


def predictions(cases: list[Case]) -> Iterator[str]:
    """Yield a table of what the plan predicts, what was measured, and measured / predicted."""
    yield row(["case", "peak host GB", "read GB", "written GB", "update s", "step s"])
    yield row(["---"] * 6)
    for case in cases:
        plan, peak = case.told["plan"], max(step["peak_rss"] for step in case.steps)
        seconds, moved = plan["seconds"], [moved for moved in plan["traffic"] if moved["place"] != "device"]
        known = None not in seconds.values()
        pairs = [(plan["tiers"]["ram"]["need"] / 1e9, peak / 1e9)]
        for way in ("read", "written"):
            pairs.append((sum(each[way] for each in moved) / 1e9, case.median(f"{way}_bytes") / 1e9))
        pairs.append((0 if plan["hidden"] else seconds["update"], case.median("update")))
        pairs.append((sum(seconds.values()) - plan["hidden"] if known else 0, case.median("step")))
        yield row([case.name, *(f"{a:.2f}, {b:.2f} ({b / a:.2f})" if a else "-" for a, b in pairs)])


def ratios(cases: list[Case]) -> Iterator[str]:
    """Yield a table of time ratios for each pair of cases."""
    yield row(["ratio of medians", *SECONDS, "step, pair by pair"])
    yield row(["---"] * 6)
    for one, other in combinations(cases, 2):
        pairs = [a / b for a, b in zip(one.timed("step"), other.timed("step"), strict=True)]
        medians = [(one.median(key), other.median(key)) for key in SECONDS]
        yield row([f"{one.name} / {other.name}", *(f"{a / b:.2f}" if b else "" for a, b in medians), spread(pairs)])


def settings(case: Case) -> Iterator[str]:
    """Yield a case's words, the plan's choices, DeepSpeed's configuration, losses and norms."""
    yield from (f"### {case.name}", "", f"`{shlex.join(case.words)}`", "")
    words = {"plan": case.told["plan"]["chosen"], "deepspeed": case.told.get("deepspeed")}
    yield from ("```json", *(json.dumps({name: content}) for name, content in words.items() if content), "```", "")
    yield from (f"{key}: {[step[key] for step in case.steps]}\n" for key in ("loss", "grad_norm"))


def machine(case: Case) -> str:
    """Return the facts about machine and versions that the numbers depend on."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, text=True)
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    units = " ".join({"avx512_bf16", "amx_bf16", "amx_fp16"}.intersection(cpu.get("flags", "").split()))
    here, there, plan = (case.told[name] for name in ("machine", "environment", "plan"))
    return (
        f"Commit {commit.strip()}, {time.strftime('%Y-%m-%d %H:%M')}; {cpu.get('model name', 'CPU')}, 16-bit units "
        f"{units or 'none'}, {here['cores']} cores, {there['threads']} threads; GPU {here['gpu'] or 'none'}; "
        f"{there['system']}, Python {there['python']}, {there['packages']}; {case.facts['parameters']:,} parameters, "
        f"{plan['chosen']['tokens_per_step']} tokens a step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--case", action="append", default=[])
    for name, default in (("warm", 2), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options, common = parser.parse_known_args()
    named = [text.partition(": ") for text in options.case]
    cases = [Case(name, common + shlex.split(words), options.warm) for name, _, words in named]
    if not cases:
        raise TrainerError('name the cases: --case "NAME: WORDS" ...')
    measure(cases, steps=options.warm + options.pairs)
    print(f"{machine(cases[0])}\n")
    print(f"Medians (smallest-largest) of {options.pairs} steps of each case, after {options.warm} warm ones.\n")
    print("\n".join([*table(cases), "", *predictions(cases), ""]))
    if cases[1:]:
        print("\n".join([*ratios(cases), ""]))
    for case in cases:
        print("\n".join(settings(case)))


if __name__ == "__main__":
    try:
        child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
    except TrainerError as error:
        raise SystemExit(f"bench_step: {error}") from None
