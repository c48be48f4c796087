"""Compare the tiered engine with plain torch on a tiny model of every causal language architecture in transformers.

    every_architecture.py [--only NAME ...] [--table FILE] [--json FILE]

transformers initialises and saves each model. Three fp32 steps then train it in three ways: transformers' module with
torch's AdamW, the tiered engine with everything in RAM, and the tiered engine with weights and state on a drive. The
tiered engine uses gradient checkpointing where the model supports it. The reference loss is the one that transformers
computes from `labels`, where that is the next-token cross-entropy, else the cross-entropy of the logits.

An architecture is right if four conditions hold. The first loss agrees within 1e-5, and later losses and a final
evaluation within 1e-4. Gradient norms agree within a relative 1e-4, or as closely as the reference's own norms do after
its initial weights are moved by one rounding. Weights agree within 1e-5, after steps that move them by up to 3e-3. Both
placements give the same bits. The first three must also hold with the router loss, where transformers has one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY, kinds, tiny_config
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload_trainer.data.rows import Batch, DataState
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.init_weights import initial_weights
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.run.planning import as_wished
from offload_trainer.settings import load_config
from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.storage.scratch_dir import DriveLease
from offload_trainer.telemetry.meters import PhaseClock

STEPS, ROWS, LENGTH, LR, EPS = 3, 2, 16, 1e-3, 1e-3  # a large eps keeps rounding from deciding tiny updates
FIRST, NORM, WEIGHT = 1e-5, 1e-4, 1e-5  # tolerances of losses, norms (relative) and weights
SECONDS = 600  # time limit of one architecture
WORDS = (
    "--lr",
    str(LR),
    "--dtype",
    "fp32",
    "--steps",
    str(STEPS),
    "--micro-batch",
    str(ROWS),
    "--seq-len",
    str(LENGTH),
)
OPTIM = (
    f"optim.eps={EPS}",
    "optim.weight_decay=0",
    "optim.max_grad_norm=0",
    "optim.betas=[0.9,0.95]",
    "optim.kernel=torch",
)
RAM = ("--params", "cpu", "--ram-fraction", "1")
DRIVE = ("--params", "nvme", "--optimizer", "nvme", "tiered.page_size=8192")


@dataclass(frozen=True)
class Result:
    """The result of one architecture; `outcome` is right, wrong, refused, traceback, or transformers (fails there)."""

    name: str
    outcome: str
    why: str = ""
    loss: str = ""  # the reference: "labels" for transformers' own loss, "logits" for the cross-entropy of the logits
    first: float = 0.0  # difference of the first loss
    norm: float = 0.0  # largest relative difference of a gradient norm
    weights: float = 0.0  # largest difference of a weight after the steps
    router: str = ""  # the outcome with output_router_logits, where transformers then adds a loss
    drawn: str = ""  # "equal" if random initial weights have transformers' bits, "other bits", or why there are none
    notes: tuple[str, ...] = ()  # notes of the plan
    seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms of the steps, and the weights after the last one."""

    losses: list[float]  # each step, then an evaluation of the first batch
    norms: list[float]
    weights: dict[str, torch.Tensor]


def batches() -> list[Batch]:
    """Return batches in which each token determines the next one; the last token of a row has no target."""
    made, random = [], torch.Generator().manual_seed(5)
    for number in range(STEPS):
        columns = [torch.randint(5, VOCABULARY - 5, (ROWS,), generator=random)]
        for _ in range(LENGTH - 1):
            columns.append((5 * columns[-1] + 3) % (VOCABULARY - 10) + 5)
        tokens = torch.stack(columns, 1)
        targets = functional.pad(tokens[:, 1:], (0, 1), value=-100)
        made.append(Batch(inputs=tokens, targets=targets, state=DataState(0), seed=number))
    return made


# -- the reference -----------------------------------------------------------------------------------------------------


def reference_loss(model: PreTrainedModel, batch: Batch, *, labels: bool | None) -> tuple[torch.Tensor, bool]:
    """Return the loss of transformers' module, and whether it is the loss computed from `labels`.

    `labels`: use that loss, or the cross-entropy; None: use it if it equals the next-token cross-entropy.
    """
    torch.manual_seed(batch.seed)
    output = model(input_ids=batch.inputs, labels=batch.inputs, use_cache=False)
    wanted = functional.cross_entropy(output.logits.float().flatten(0, 1), batch.targets.flatten())
    if labels is None:
        labels = abs(float((output.loss - wanted).detach())) < FIRST
    return output.loss if labels else wanted, labels


def reference(model: PreTrainedModel, data: Sequence[Batch], *, labels: bool | None = None) -> tuple[Trained, bool]:
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses, norms = [], []
    for batch in data:
        loss, labels = reference_loss(model, batch, labels=labels)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))))
        losses.append(float(loss.detach()))
        adam.step()
        adam.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.eval()  # RWKV rescales its weights in evaluation mode, so they are copied before
    with torch.no_grad():
        losses.append(float(reference_loss(model, data[0], labels=labels)[0]))
    return Trained(losses, norms, weights), bool(labels)


# -- ours --------------------------------------------------------------------------------------------------------------


@contextmanager
def tiered(model: Path, drive: Path, words: Sequence[str]) -> Iterator[tuple[TieredEngine, Any]]:
    """Yield the tiered engine, built as the training command builds it, and its plan."""
    drive.mkdir(exist_ok=True)
    config = load_config(["--model", str(model), "--nvme", str(drive), "--engine", "tiered", *WORDS, *OPTIM, *words])
    source = as_wished(resolve_model(config.model, seed=0), config)
    plan = make_plan(config, source.shape, probe_machine(config.placement, output=str(drive)))
    lease = DriveLease(drive)
    work, drives = workload(config, source.shape), [lease.path]
    engine = TieredEngine(source, work, config.optim, placement=plan.placement, sizes=plan.sizes, drives=drives)  # type: ignore[arg-type]
    try:
        yield engine, plan
    finally:
        engine.close()
        lease.close()


def ours(model: Path, drive: Path, words: Sequence[str], data: Sequence[Batch]) -> tuple[Trained, Any]:
    with tiered(model, drive, words) as (engine, plan):
        steps = [engine.train_step([batch], lr=LR, clock=PhaseClock()) for batch in data]
        losses = [*(step.loss for step in steps), engine.eval_loss(data[0])]
        weights = {name: tensor.clone() for name, tensor in engine.named_master_parameters()}
    return Trained(losses, [s.grad_norm or 0.0 for s in steps], weights), plan


# -- one architecture --------------------------------------------------------------------------------------------------


def examine(name: str, folder: Path) -> Result:
    """Return the result of one architecture; a failure becomes its outcome, and no exception escapes."""
    start, data = time.monotonic(), batches()
    config = tiny_config(kinds()[name])
    try:
        model = saved(config, folder / "model")
        how = f"model.activation_checkpointing={'on' if model.supports_gradient_checkpointing else 'auto'}"
        expected, labels = reference(model, data)
    except Exception as error:
        return Result(name, "transformers", one_line(error))
    loss = "labels" if labels else "logits"
    try:
        in_ram, plan = ours(folder / "model", folder / "drive", (*RAM, how), data)
        on_drive, _ = ours(folder / "model", folder / "drive", (*DRIVE, how), data)
        router = with_router_loss(name, folder, how, data) if labels and hasattr(config, "output_router_logits") else ""
    except (UserError, TrainerError) as error:
        return Result(name, "refused", one_line(error), loss)
    except Exception as error:
        traceback.print_exc()
        return Result(name, "traceback", one_line(error), loss)
    apart = differences(in_ram, expected)
    norms = NORM if apart[1] <= NORM else max(NORM, magnified(folder / "model", data, expected, labels=labels))
    wrong = too_far(*apart, norms=norms)
    if not same_bits(in_ram, on_drive):
        wrong.append("homes have other bits")
    if router not in ("", "right"):
        wrong.append(f"with the routers' loss: {router}")
    outcome, notes = (
        "wrong" if wrong else "right",
        tuple(n for n in plan.notes if n.startswith(("attention:", "loss:", "gradient checkpointing:"))),
    )
    seconds = round(time.monotonic() - start, 1)
    return Result(name, outcome, "; ".join(wrong), loss, *apart, router, drawn(config), notes, seconds)


def saved(config: Any, folder: Path) -> PreTrainedModel:
    """Save a model with weights that transformers initialised, and return it as transformers loads it again."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def with_router_loss(name: str, folder: Path, how: str, data: Sequence[Batch]) -> str:
    """Return "right", a description of the difference, or "" if output_router_logits adds no loss to this model."""
    model = saved(tiny_config(kinds()[name], output_router_logits=True), folder / "router")
    with torch.no_grad():
        wanted, added = (reference_loss(model, data[0], labels=labels)[0] for labels in (False, True))
    if torch.equal(wanted, added):
        return ""
    expected, _ = reference(model, data, labels=True)
    found, _ = ours(folder / "router", folder / "drive", (*RAM, how), data)
    return "; ".join(too_far(*differences(found, expected))) or "right"


def magnified(folder: Path, data: Sequence[Batch], expected: Trained, *, labels: bool) -> float:
    """Return how far the reference's norms move when its initial weights are moved by one rounding.

    For Gemma4Text this is 1.2e-3.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps)
    return differences(reference(model, data, labels=labels)[0], expected)[1]


def drawn(config: Any) -> str:
    """Return "equal", "other bits", or why random weights cannot be made for this configuration."""
    torch.manual_seed(0)
    theirs = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    try:
        found = dict(initial_weights(config, seed=0))
    except TrainerError as error:
        return one_line(error)
    same = found.keys() == theirs.keys() and all(torch.equal(found[key], theirs[key]) for key in theirs)
    return "equal" if same else "other bits"


def differences(found: Trained, expected: Trained) -> tuple[float, float, float]:
    """Return the largest differences of losses (later ones count a tenth), of norms (relative) and of weights."""
    losses = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(found.norms, expected.norms, strict=True)]
    if found.weights.keys() != expected.weights.keys():
        return losses[0], max(norms), float("inf")
    weights = [float((found.weights[name] - value).abs().max()) for name, value in expected.weights.items()]
    return max(losses[0], max(losses) / 10), max(norms), max(weights)


def too_far(loss: float, norm: float, weights: float, *, norms: float = NORM) -> list[str]:
    found = (("losses", loss, FIRST), ("norms", norm, norms), ("weights", weights, WEIGHT))
    return [f"{what} {apart:.1e} away" for what, apart, most in found if not apart <= most]


def same_bits(one: Trained, other: Trained) -> bool:
    return (one.losses, one.norms) == (other.losses, other.norms) and all(
        torch.equal(value, other.weights[name]) for name, value in one.weights.items()
    )


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, without temporary paths; foreign errors keep their type's name."""
    text = re.sub(r"\S*/architecture-\S*/model", "DIRECTORY", " ".join(str(error).split()))[:300]
    return text if isinstance(error, UserError | TrainerError) else f"{type(error).__name__}: {text}"


# -- all of them -------------------------------------------------------------------------------------------------------


def in_a_child(name: str, examine: Callable[[str, Path], Any], kind: Callable[..., Any]) -> Any:
    """Run `examine` in a child process, so that a crash ends one architecture only; return its result as a `kind`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            with scratch(f"architecture-{name}") as folder:
                result = examine(name, folder)
            os.write(write, json.dumps(asdict(result)).encode())
        finally:
            os._exit(0)  # also after an exception, which must not reach the parent's caller in a second process
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return kind(**json.loads(told)) if told else kind(name, "traceback", f"the process ended with status {status}")


def main() -> None:
    """Read the command line, examine each architecture, write the results, and exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations, such as Llama")
    parser.add_argument("--table", type=Path, help="the page to write")
    parser.add_argument("--json", type=Path)
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for name in wishes.only or kinds():
        results.append(in_a_child(name, examine, Result))
        print(f"{name:28} {results[-1].outcome:12} {results[-1].why}", flush=True)
    if wishes.json:
        wishes.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if wishes.table:
        wishes.table.write_text(table(results))
    print(counts(results))
    sys.exit(any(result.outcome in ("wrong", "traceback") for result in results))


def counts(results: Sequence[Result]) -> str:
    """Return how many architectures had each outcome."""
    runs = [result for result in results if result.outcome != "transformers"]
    right = sum(result.outcome == "right" for result in runs)
    others = [f"{sum(r.outcome == o for r in runs)} {o}" for o in ("refused", "wrong", "traceback")]
    return f"{right} of {len(runs)} right, {', '.join(others)}; {len(results) - len(runs)} do not run in transformers"


_FIGURES = (("loss", "first"), ("norm", "norm"), ("weights", "weights"))


def table(results: Sequence[Result]) -> str:
    """Return the Markdown page: names of those that are right, what the plan says of some, and reasons of failures."""
    lines = [
        "# Every causal language model of transformers",
        "",
        "Look up your architecture: whether it trains here as in plain torch.",
        "",
        f"Written by `scripts/every_architecture.py --table docs/architectures.md`: transformers "
        f"{transformers.__version__}, torch {torch.__version__}. {counts(results)}.",
        "",
        *(" ".join(part.split()) + "\n" for part in str(__doc__).split("\n\n")[2:]),
        "Names are those of transformers' configurations, whose defaults `scripts/tiny_models.py` shrinks.",
        "",
    ]
    right = [r for r in results if r.outcome == "right"]
    figures = ", ".join(f"{key} {max(getattr(r, field) for r in right):.0e}" for key, field in _FIGURES if right)
    lines += [f"Largest differences of those that are right: {figures}.", "", "## Right", ""]
    lines += [", ".join(r.name for r in right) + ".", ""]
    lines += ["## What the plan says", "", "| architecture | |", "| --- | --- |"]
    for r in results:
        said = "; ".join([*(note.split(",")[0] for note in r.notes), *([r.why] if r.why else [])])
        if r.outcome != "transformers" and (said or r.outcome != "right"):
            lines.append(f"| {r.name} | {said if r.outcome == 'right' else f'{r.outcome}: {said}'} |")
    lines += ["", "## What transformers itself does not run", "", "| architecture | its error |", "| --- | --- |"]
    lines += [f"| {r.name} | {r.why.replace('|', ' ')[:120]} |" for r in results if r.outcome == "transformers"]
    lines += ["", "## Random weights that are not drawn here", "", "| architecture | why |", "| --- | --- |"]
    lines += [f"| {r.name} | {r.drawn.replace('|', ' ')} |" for r in results if r.drawn not in ("equal", "")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
