"""Check a tiny model of every causal language architecture in transformers.

    every_architecture.py [--only NAME ...] [--table docs/architectures.csv]

transformers initialises and saves each model.

training  Three fp32 steps train the model in three ways: transformers' module with torch's AdamW, the tiered engine
          with everything in RAM, and with weights and state on a drive, with gradient checkpointing where the model
          has it. The reference loss is the one that transformers computes from `labels`, where that is the next-token
          cross-entropy, else the cross-entropy of the logits. The first loss must agree within 1e-5, later losses and
          a final evaluation within 1e-4, and weights within 1e-5 after steps that move them by up to 3e-3. Gradient
          norms must agree within a relative 1e-4, or as closely as the reference's own norms do after its initial
          weights are moved by one rounding. The same holds with the router loss, where transformers has one. Both
          placements must have the same bits.
packing   The model must keep packed documents of a row apart (offload_trainer/model/tiny_model.py).
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY, kinds, tiny_config
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.data.rows import Batch
from offload_trainer.model.init_weights import initial_weights
from offload_trainer.model.tiny_model import refuse_crossing
from offload_trainer.storage.owned_dirs import scratch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/helpers"))

from engine_bench import engine, masters, train

STEPS, ROWS, LENGTH, LR, EPS = 3, 2, 16, 1e-3, 1e-3  # a large eps keeps rounding from deciding tiny updates
FIRST, NORM, WEIGHT = 1e-5, 1e-4, 1e-5  # tolerances of losses, norms (relative) and weights
SECONDS = 600  # time limit of one architecture
RUN = (
    f"--lr {LR} --dtype fp32 --steps {STEPS} --micro-batch {ROWS} --seq-len {LENGTH} --engine tiered optim.eps={EPS} "
    "optim.weight_decay=0 optim.max_grad_norm=0 optim.betas=[0.9,0.95] model.random_init=false"
)
RAM = ("--params", "cpu", "--ram-fraction", "1")
DRIVE = ("--params", "nvme", "--optimizer", "nvme")


@dataclass(frozen=True)
class Result:
    """The result of one check of one architecture.

    `outcome` is right, wrong, refused, traceback, or transformers (fails there).
    """

    outcome: str
    why: str = ""
    notes: tuple[str, ...] = ()  # notes of the plan
    router: str = ""  # the outcome with output_router_logits, where transformers then adds a loss
    drawn: str = ""  # "equal" if random initial weights have transformers' bits, "other bits", or why there are none


@dataclass(frozen=True)
class Subject:
    """A tiny model that transformers saved, and what torch gives for it."""

    name: str
    folder: Path  # "model" is saved there
    model: PreTrainedModel  # its weights are those after the steps
    data: list[Batch]
    expected: Trained
    labels: bool  # the loss is the one that transformers computes from labels

    @property
    def checkpointing(self) -> str:
        return f"model.activation_checkpointing={'on' if self.model.supports_gradient_checkpointing else 'auto'}"


Check = Callable[[Subject], Result]


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
        made.append(Batch(inputs=tokens, targets=targets, seed=number))
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


def ours(
    folder: Path,
    words: Sequence[str],
    data: Sequence[Batch],
    *,
    model: str = "model",
    look: Callable[[Any], None] = lambda made: None,
) -> tuple[Trained, Any]:
    """Train with the tiered engine, built as the training command builds it; return also its plan.

    `look` gets the engine after the steps.
    """
    (folder / "drive").mkdir(exist_ok=True)
    with engine(folder / model, *RUN.split(), *words, drives=[folder / "drive"]) as made:
        steps = train(made, data, lr=LR)
        look(made)
        losses = [*(loss for loss, _ in steps), made.eval_loss(data[0])]
        return Trained(losses, [norm or 0.0 for _, norm in steps], masters(made)), made.plan


# -- the checks --------------------------------------------------------------------------------------------------------


def check_training(subject: Subject) -> Result:
    """Compare losses, norms and weights with transformers and torch, and the bits of two placements."""
    folder, data, config = subject.folder, subject.data, subject.model.config
    in_ram, plan = ours(folder, (*RAM, subject.checkpointing), data)
    on_drive, _ = ours(folder, (*DRIVE, subject.checkpointing), data)
    router = with_router_loss(subject) if subject.labels and hasattr(config, "output_router_logits") else ""
    apart = differences(in_ram, subject.expected)
    wrong = too_far(*apart, norms=NORM if apart[1] <= NORM else max(NORM, magnified(subject)))
    if not same_bits(in_ram, on_drive):
        wrong.append("homes have other bits")
    if router not in ("", "right"):
        wrong.append(f"with the routers' loss: {router}")
    notes = tuple(n for n in plan.notes if n.startswith(("attention:", "loss:", "gradient checkpointing:")))
    return Result("wrong" if wrong else "right", "; ".join(wrong), notes, router, drawn(tiny(subject.name)))


def check_packing(subject: Subject) -> Result:
    """Test if packed documents of a row stay apart."""
    refuse_crossing(subject.model)
    return Result("right")


def examine(name: str, folder: Path, *checks: Check) -> list[Result]:
    """Return the results of an architecture's checks; a failure becomes an outcome, and no exception escapes."""
    data, found = batches(), list[Result]()
    try:
        model = saved(tiny(name), folder / "model")
        expected, labels = reference(model, data)
    except Exception as error:
        return [Result("transformers", one_line(error))] * len(checks)
    subject = Subject(name, folder, model, data, expected, labels)
    for check in checks:
        try:
            found.append(check(subject))
        except TrainerError as error:
            found.append(Result("refused", one_line(error)))
        except Exception as error:
            traceback.print_exc()
            found.append(Result("traceback", one_line(error)))
    return found


def tiny(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    return tiny_config(kinds()[name], **changes)


def saved(config: Any, folder: Path) -> PreTrainedModel:
    """Save a model with weights that transformers initialised, and return it as transformers loads it again."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def with_router_loss(subject: Subject) -> str:
    """Return "right", a description of the difference, or "" if output_router_logits adds no loss to this model."""
    model = saved(tiny(subject.name, output_router_logits=True), subject.folder / "router")
    with torch.no_grad():
        wanted, added = (reference_loss(model, subject.data[0], labels=labels)[0] for labels in (False, True))
    if torch.equal(wanted, added):
        return ""
    expected, _ = reference(model, subject.data, labels=True)
    words = (*RAM, subject.checkpointing, "model.loss_chunk=7")  # the routers' loss comes once, whatever the chunks
    found, _ = ours(subject.folder, words, subject.data, model="router")
    return "; ".join(too_far(*differences(found, expected))) or "right"


def magnified(subject: Subject) -> float:
    """Return how far the reference's norms move when its initial weights are moved by one rounding.

    For Gemma4Text this is 1.2e-3.
    """
    model = AutoModelForCausalLM.from_pretrained(subject.folder / "model", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps)
    return differences(reference(model, subject.data, labels=subject.labels)[0], subject.expected)[1]


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


def in_a_child(name: str, *checks: Check) -> list[Result]:
    """Run `examine` in a forked process, so that a crash or hang ends one architecture only."""
    fork = {"mp_context": multiprocessing.get_context("fork"), "initializer": signal.alarm, "initargs": (SECONDS,)}
    with scratch(f"architecture-{name}") as folder, ProcessPoolExecutor(1, **fork) as child:
        try:
            return child.submit(examine, name, folder, *checks).result()
        except BrokenProcessPool as error:
            return [Result("traceback", str(error))] * len(checks)


def rows_of(found: dict[str, list[Result]]) -> Iterator[list[str]]:
    """Yield the rows of the table: results of training and packing, what the plan says, and random weights.

    `random_weights` is empty if they have the bits of transformers' own initialisation.
    """
    yield ["architecture", "training", "packing", "the plan says", "random_weights"]
    for name, (training, packing) in found.items():
        says = "; ".join(note.split(",")[0] for note in training.notes)
        why = f": {training.why[:120]}" if training.why else ""
        yield [name, training.outcome + why, packing.outcome, says, training.drawn.removeprefix("equal")]


def main() -> None:
    """Read the command line, examine each architecture, write the results, and exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations, such as Llama")
    parser.add_argument("--table", type=Path, help="the CSV to write")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, list[Result]] = {}
    for name in asked.only or kinds():
        found[name] = in_a_child(name, check_training, check_packing)
        for check, one in zip(("training", "packing"), found[name], strict=True):
            print(f"{name} {check}: {one.outcome} {one.why}", flush=True)
    if asked.table:
        with asked.table.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows_of(found))
    for check, results in zip(("training", "packing"), zip(*found.values(), strict=True), strict=True):
        outcomes = Counter(one.outcome for one in results).most_common()
        print(f"{check}:", ", ".join(f"{count} {outcome}" for outcome, count in outcomes))
    sys.exit(any(one.outcome in ("wrong", "traceback") for each in found.values() for one in each))


if __name__ == "__main__":
    main()
