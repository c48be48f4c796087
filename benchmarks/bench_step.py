"""Paired A/B benchmark of engines: each case has its own process, and the cases take turns on the same rows.

    bench_step.py [--warm 2] [--pairs 5] [WORDS] --case "NAME: WORDS" ...

WORDS are `offload-train` arguments (--model gpt2-medium --seq-len 128 ...); a case's words follow the common ones and
take precedence. `--engine` also takes the names in peers.py: `native` runs plain torch's forward and backward without
an update, the least that every engine must do. A page of Markdown is printed: medians beside the plan's predictions,
ratios, settings. Time the machine first (`offload-train bench`), so that plans predict seconds.

    build A, build B ...  ->  A step, B step, A step, B step ...  ->  medians, ratios, settings

A case runs in a process of worker.py. Waiting processes are stopped (SIGSTOP), so that their idle threads cost the
running one nothing. Checkpoints,
validation and export are off.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import peers
from worker import Failure, Worker, facts

from offload_trainer.common.errors import TrainerError

SECONDS = ("step", "forward", "backward", "update")


@dataclass
class Case:
    """A case and its process's answers. The first `warm` steps are not counted."""

    name: str
    words: list[str]
    warm: int
    facts: dict[str, Any] = field(default_factory=dict)  # about the built engine, with its plan
    steps: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the case's process, built and stopped; end it and remove its files afterwards."""
        peer = next((word for word in self.words if word in peers.SETTINGS), None)
        words = ["tiered" if word == peer else word for word in self.words]
        self._worker = Worker()
        try:
            with self._awake():
                self.facts = self._worker.run(words=words, peer=peer, asked=True)
            print(f"{self.name}: built in {self.facts['build_seconds']:.0f} s", file=sys.stderr)
            self.deepspeed = [json.loads(path.read_text()) for path in self._worker.output.glob("deepspeed.json")]
            yield
        finally:
            self._worker.process.send_signal(signal.SIGCONT)
            self._worker.process.communicate()  # closing stdin makes it close its engine and exit
            self._worker.end()

    def step(self) -> None:
        with self._awake():
            self.steps.append(self._worker.ask("step"))
        print(f"{self.name}:", *(f"{key} {self.steps[-1][key]:.4g}" for key in (*SECONDS, "loss")), file=sys.stderr)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Let the process run inside the block. A Failure there becomes a TrainerError that names the case."""
        self._worker.process.send_signal(signal.SIGCONT)
        try:
            yield
        except Failure as failure:
            raise TrainerError(f"{self.name}: {failure}") from failure
        self._worker.process.send_signal(signal.SIGSTOP)

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
        peak = max(step["host_rss_bytes"] for step in case.steps)
        numbers = [*drive, peak / 1e9, max(peak, case.facts["build_peak"]) / 1e9, case.facts["build_seconds"]]
        yield row([case.name, *(spread(case.timed(key)) for key in SECONDS), *(f"{number:.2f}" for number in numbers)])


def predictions(cases: list[Case]) -> Iterator[str]:
    """Yield a table of what the plan predicts, what was measured, and measured / predicted."""
    yield row(["case", "peak host GB", "read GB", "written GB", "update s", "step s"])
    yield row(["---"] * 6)
    for case in cases:
        plan, peak = case.facts["plan"], max(step["host_rss_bytes"] for step in case.steps)
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
    words = [{"plan": case.facts["plan"]["chosen"]}, *({"deepspeed": content} for content in case.deepspeed)]
    yield from ("```json", *map(json.dumps, words), "```", "")
    yield from (f"{key}: {[step[key] for step in case.steps]}\n" for key in ("loss", "grad_norm"))


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
    of_first = cases[0].facts
    size = f"{of_first['parameters']:,} parameters, {of_first['plan']['chosen']['tokens_per_step']} tokens a step"
    about = "; ".join(f"{key} {value}" for key, value in facts().items())
    print(f"{time.strftime('%Y-%m-%d %H:%M')}; {size}; {about}.\n")
    print(f"Medians (smallest-largest) of {options.pairs} steps of each case, after {options.warm} warm ones.\n")
    print("\n".join([*table(cases), "", *predictions(cases), ""]))
    if cases[1:]:
        print("\n".join([*ratios(cases), ""]))
    for case in cases:
        print("\n".join(settings(case)))


if __name__ == "__main__":
    try:
        main()
    except TrainerError as error:
        raise SystemExit(f"bench_step: {error}") from None
