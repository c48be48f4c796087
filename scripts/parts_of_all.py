"""Compare fetching by module with fetching whole blocks, on a tiny model of every causal architecture in transformers.

    parts_of_all.py [--only NAME ...] [--json FILE]

The tiered engine trains each model in fp32 for three steps with all weights in RAM, with gradient checkpointing where
transformers has it: with tiered.fetch_granularity=block, and with module in one buffer and in two. An architecture is
right if losses, norms and master weights have the same bits, and if a step fetches each part as often as planned. For
whole blocks and weights outside blocks, tests/model/test_fetches.py checks the fetch counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from every_architecture import LR, batches, in_a_child, one_line, reference, saved, tiered
from tiny_models import kinds, tiny_config

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.probes import submodules
from offload_trainer.model.probes.tiny_model import TrialFailed, try_on_tiny_model
from offload_trainer.model.shape import block_names
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.tiered import footprint, layout
from offload_trainer.telemetry.meters import PhaseClock

SECONDS = 600  # time limit of one architecture
VECTORS = 4096  # elements of an aligned unit of vectors
SMALL = {"all in parts": 0, "what is little stays": 1 << 20}  # elements of a block that stay on the device
OUTCOMES = ("right", "wrong", "whole", "refused", "traceback", "transformers")
WORDS = ("--params", "cpu", "--ram-fraction", "1")


@dataclass(frozen=True)
class Result:
    """The result of one architecture.

    `outcome` is right, wrong, whole (not divided), refused, traceback, or transformers (fails there).
    """

    name: str
    outcome: str
    why: str = ""
    blocks: int = 0
    parts: int = 0
    trial: str = ""  # the result of the trial run
    seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    steps: list[tuple[float, float | None]]
    masters: dict[str, torch.Tensor]
    fetched: dict[str, int]  # fetches in a step after the first, by offloaded unit
    planned: dict[str, int]
    inside: list[str]  # the units within blocks
    parts: int
    blocks: int


class _Count:
    """Counters of the fetches of each unit between two updates, actual and planned."""

    def __init__(self) -> None:
        self.steps: list[Counter[int]] = []
        self.planned: list[Counter[int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        start, begin, fetched = WeightPrefetcher._start, WeightPrefetcher.begin, footprint.fetched

        def started(stream: WeightPrefetcher, unit: int, number: int) -> None:
            if self.steps:
                self.steps[-1][unit] += 1
            start(stream, unit, number)

        def begun(stream: WeightPrefetcher) -> None:
            self.steps.append(Counter())
            begin(stream)

        def noted(*given: Any) -> Any:
            found = fetched(*given)
            self.planned.append(Counter())
            for (unit, _), times in found.items():
                self.planned[-1][unit] += times
            return found

        with (
            mock.patch.object(WeightPrefetcher, "_start", started),
            mock.patch.object(WeightPrefetcher, "begin", begun),
            mock.patch.object(footprint, "fetched", noted),
        ):
            yield


def train(model: Path, drive: Path, *words: str) -> Trained:
    count = _Count()
    with count.watching(), tiered(model, drive, [*WORDS, *words]) as (engine, _):
        steps = [engine.train_step([batch], lr=LR, clock=PhaseClock()) for batch in batches()]
        masters = {name: tensor.clone() for name, tensor in engine.named_master_parameters()}
        away = [unit for unit in engine.offloaded.units if engine.offloaded.weights.resident(unit.index) is None]
    parts = [unit.within for unit in away if unit.is_part]
    numbers = [(step.loss, step.grad_norm) for step in steps]
    fetched, planned = ({unit.name: of[unit.index] for unit in away} for of in (count.steps[-2], count.planned[-1]))
    inside = [unit.name for unit in away if unit.block]
    return Trained(numbers, masters, fetched, planned, inside, len(parts), len(set(parts)))


def differences(found: Trained, expected: Trained) -> list[str]:
    """Return the differences from the expected bits and fetch counts."""
    wrong = []
    if any(loss != loss for loss, _ in found.steps):
        wrong.append("a loss is NaN")
    if found.steps != expected.steps:
        wrong.append(f"losses and norms {found.steps} for {expected.steps}")
    other = [name for name, value in expected.masters.items() if not torch.equal(found.masters[name], value)]
    if other:
        wrong.append(f"{len(other)} weights differ, {other[0]} among them")
    return wrong + otherwise(found, found.inside)


def otherwise(found: Trained, among: Collection[str]) -> list[str]:
    """Return a sentence on the units fetched more or less often than planned, or nothing if there are none."""
    names = [name for name in among if found.planned[name] != found.fetched[name]]
    told = ", ".join(f"{name} {found.fetched[name]} times for {found.planned[name]}" for name in names)
    fetched, planned = sum(found.fetched.values()), sum(found.planned.values())
    return [f"{fetched} units fetched, {planned} planned: {told}"] if names else []


def whole_blocks(model: Path, drive: Path, *words: str) -> list[str]:
    """Return how fetches of whole blocks differ from the plan with one and two buffers, where so few suffice."""
    wrong = []
    for buffers in (1, 2):
        try:
            with mock.patch.object(layout, "SMALL", VECTORS):
                found = train(
                    model, drive, "tiered.fetch_granularity=block", f"tiered.weight_buffers={buffers}", *words
                )
        except UserError as error:
            if "weight_buffers must be" not in str(error):
                raise
            continue
        wrong += [f"whole, {buffers} buffers: {what}" for what in otherwise(found, found.fetched)]
    return wrong


def examine(name: str, folder: Path) -> Result:
    """Return the result of one architecture; a failure becomes its outcome, and no exception escapes."""
    start, wrong = time.monotonic(), list[str]()
    try:
        model = saved(tiny_config(kinds()[name]), folder / "model")
        reference(model, batches()[:1])
    except Exception as error:
        return Result(name, "transformers", one_line(error))
    how = f"model.activation_checkpointing={'on' if model.supports_gradient_checkpointing else 'off'}"
    trial, parts, blocks, whole = "", 0, 0, None
    try:
        trial = _trial(saved_config(folder / "model"))
        for moved, small in SMALL.items():
            with (
                mock.patch.object(layout, "SMALL", VECTORS),
                mock.patch.object(layout, "_STAYS", small),
                mock.patch.object(layout, "_WORTH", 1.0),  # experts are most weights of tiny models
            ):
                ways = _ways(folder, how)
                if ways and whole is None:
                    whole = train(folder / "model", folder / "drive", how, "tiered.fetch_granularity=block")
            for way, one in ways.items():
                assert whole is not None
                wrong += [f"{moved}, {way}: {what}" for what in differences(one, whole)]
                parts, blocks = max(parts, one.parts), max(blocks, one.blocks)
    except (UserError, TrainerError) as error:
        return Result(name, "refused", one_line(error))
    except Exception as error:
        traceback.print_exc()
        return Result(name, "traceback", one_line(error))
    outcome = "wrong" if wrong else "right" if parts else "whole"
    seconds = round(time.monotonic() - start, 1)
    return Result(name, outcome, "; ".join(wrong), blocks, parts, trial, seconds)


def saved_config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def _trial(config: Any) -> str:
    """Run the trial that divides blocks; return its result, or why it could not run."""
    model = meta_model(config, trust_remote_code=False)
    names, needs = submodules.divisible_modules(model, trust_remote_code=False)
    if names:
        return f"{len(names)} modules, {len(needs)} orders"
    if not block_names(model):
        return "no blocks"
    try:
        try_on_tiny_model(model, submodules._proven, trust_remote_code=False)
    except TrialFailed as error:
        return str(error)
    return "nothing"


def _ways(folder: Path, how: str) -> dict[str, Trained]:
    """Return the training results with one buffer and with two, or none if no block is divided."""
    found: dict[str, Trained] = {}
    for way, buffers in (("one buffer", 1), ("two buffers", 2)):
        words = ["tiered.fetch_granularity=module", f"tiered.weight_buffers={buffers}"]
        try:
            found[way] = train(folder / "model", folder / "drive", how, *words)
        except UserError as error:
            if not str(error).startswith("tiered.fetch_granularity=module: a trial"):
                raise
            return {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations, such as Llama")
    parser.add_argument("--json", type=Path)
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for name in wishes.only or kinds():
        one = in_a_child(name, examine, Result)
        results.append(one)
        print(
            f"{name:24} {one.outcome:12} {one.parts:3} of {one.blocks}  {one.seconds:5} {one.trial} {one.why}",
            flush=True,
        )
    if wishes.json:
        wishes.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(counts(results))
    sys.exit(any(result.outcome in ("wrong", "traceback") for result in results))


def counts(results: Sequence[Result]) -> str:
    found = [(what, [one.name for one in results if one.outcome == what]) for what in OUTCOMES]
    told = [f"{len(names)} {what}" for what, names in found if names]
    whole = dict(found)["whole"]
    return ", ".join(told) + (f"; whole: {', '.join(whole)}" if whole else "")


if __name__ == "__main__":
    main()
