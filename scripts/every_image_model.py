"""Train a tiny model of every image-text architecture in transformers with images, and compare it with plain torch.

    every_image_model.py [--only NAME ...] [--table FILE] [--json FILE]

transformers initialises and saves each model. Three fp32 steps with an image in each row then train it in four ways:
transformers' module with torch's fused AdamW, and `offload_trainer.load` with everything in RAM, with weights and state
on a drive, and with activation checkpointing. Once more the vision tower is frozen. Inputs are random pixels of the
shape that the model's own forward takes, so no processor is needed. Where `load` refuses an architecture by name,
`offload_trainer.offload` trains the module. FastVlm, Gemma3n and PerceptionLM are not tried without timm and
torchvision: `pip install --no-deps timm torchvision` before.

An architecture is right if five conditions hold. The first loss agrees within 1e-5, and later losses within 1e-4.
Gradient norms agree within a relative 1e-4, and weights within 1e-5, after steps that move them by up to 3e-3. All
placements give the same bits; with activation checkpointing they may be those of plain torch with checkpointing. A
frozen tower does not move, and the rest of the model agrees as before. The exported model loads with
AutoModelForImageTextToText, those of Evolla and ShieldGemma2 with their own classes, and has the same weights.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchvision_for_cpus  # noqa: F401 - before transformers
import transformers
from every_architecture import Trained, counts, differences, one_line, same_bits, too_far, try_all
from special_image_models import SPECIAL
from tiny_image_models import (
    PATCHES,
    ROWS,
    Batch,
    NoInputs,
    Special,
    image_batches,
    kinds,
    tiny_image_config,
    tiny_image_model,
)
from transformers import PreTrainedModel

import offload_trainer as ot
import offload_trainer.plan.tiered.layout as layout
from offload_trainer.config import ModelSection
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.model.loader import checkpoint_blocks, resolve_model

STEPS, LR, EPS = 3, 1e-3, 1e-3  # a large eps keeps rounding from deciding the update of a gradient near 0
ADAM: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": EPS, "weight_decay": 0.0}
RAM: dict[str, Any] = {"params": "cpu", "ram_fraction": 1.0}
DRIVE: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "page_size": 8192}


@dataclass(frozen=True)
class Result:
    """The result of one architecture; `outcome` is right, wrong, refused, traceback, or transformers.

    The last means that transformers builds or runs no such tiny model, and `why` has its error or the reason.
    """

    name: str
    outcome: str
    why: str = ""
    first: float = 0.0  # difference of the first loss
    norm: float = 0.0  # largest relative difference of a gradient norm
    weights: float = 0.0  # largest difference of a weight after the steps
    form: str = ""  # the names of the image inputs
    counted: str = ""  # patches of a row's images that a plan counts without `image_patches`
    frozen: str = ""  # number of weights of the frozen tower, or why none was frozen
    seconds: float = 0.0


# -- both loops -------------------------------------------------------------------------------------------------------


def loop(
    model: PreTrainedModel,
    optimizer: Any,
    data: Sequence[Batch],
    *,
    loss_of: Callable[[PreTrainedModel, Batch], torch.Tensor],
    norm: Callable[[], torch.Tensor],
) -> tuple[list[float], list[float]]:
    """Train with `data`, one batch a step; return the losses and the gradient norms."""
    losses, norms = [], []
    model.train()
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(norm()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def reference(
    folder: Path, data: Sequence[Batch], special: Special, *, freeze: Sequence[str] = (), checkpoints: bool = False
) -> Trained:
    """Train transformers' module with torch's AdamW."""
    model = without_gradients(special.load(folder), freeze)
    if checkpoints:
        checkpoint_blocks(model, reentrant=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, fused=True, **ADAM)
    limit = float("inf")
    norm = partial(torch.nn.utils.clip_grad_norm_, trained, limit)
    losses, norms = loop(model, adam, data, loss_of=special.loss, norm=norm)
    return Trained(losses, norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def without_gradients(model: PreTrainedModel, freeze: Sequence[str]) -> PreTrainedModel:
    """Freeze the weights whose names match one of the patterns, in place; return the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in freeze))
    return model


def ours(
    folder: Path,
    drive: Path,
    data: Sequence[Batch],
    special: Special,
    *,
    freeze: Sequence[str] = (),
    export: Path | None = None,
    **keys: Any,
) -> Trained:
    """Train with `offload_trainer.load`, or `offload` if that refuses the model, and export to `export` if not None.

    No weight is small enough to stay in memory.
    """
    drive.mkdir(exist_ok=True)
    length = max(data[0][key].shape[1] for key in ("input_ids", "labels") if key in data[0])
    words = {"micro_batch_size": ROWS, "seq_len": length, "kernel": "torch", "nvme": [str(drive)], **keys}
    with mock.patch.object(layout, "SMALL", 0), ExitStack() as stack:
        if special.refused:
            session = ot.offload(without_gradients(special.load(folder), freeze), say=lambda _: None, **words)
        else:
            words |= {"dtype": "fp32", "image_patches": PATCHES, "freeze": freeze}
            session = ot.load(folder, say=lambda _: None, **words)
        stack.enter_context(session)
        optimizer = session.adamw(**ADAM)
        norm = partial(session.clip_grad_norm_, float("inf"))
        losses, norms = loop(session.model, optimizer, data, loss_of=special.loss, norm=norm)
        weights = {name: weight.clone() for name, weight in session.named_masters()}
        if export is not None:
            session.export(export, dtype="fp32")
    return Trained(losses, norms, weights)


# -- one architecture -------------------------------------------------------------------------------------------------


def saved(name: str, folder: Path, special: Special) -> list[Batch]:
    """Save a tiny model that transformers initialised, and return batches for it."""
    tiny_image_model(tiny_image_config(kinds()[name], special), special, seed=0).save_pretrained(folder)
    return image_batches(special.load(folder), STEPS, special)


def examine(name: str, folder: Path) -> Result:
    """Return the result of one architecture; a failure becomes its outcome, and no exception escapes."""
    start, special = time.monotonic(), SPECIAL.get(name, Special())
    try:
        data = saved(name, folder / "model", special)
        expected = reference(folder / "model", data, special)
    except NoInputs as error:
        return Result(name, "transformers", f"no image inputs: {error}")
    except Exception as error:  # any error of transformers' code
        return Result(name, "transformers", one_line(error))
    place = folder / "model", folder / "drive", data, special
    try:
        found = {"in RAM": ours(*place, **RAM), "on a drive": ours(*place, export=folder / "export", **DRIVE)}
        checkpoints = special.load(folder / "model").supports_gradient_checkpointing
        if checkpoints:
            found["checkpointed"] = ours(*place, **RAM, activation_checkpointing="on")
        how = RAM | {"activation_checkpointing": "on"} if checkpoints else DRIVE
        wrong, frozen = with_frozen_tower(*place, expected, how)
        counted = patches_by_default(folder / "model", special)
    except (UserError, TrainerError) as error:
        return Result(name, "refused", one_line(error))
    except Exception as error:
        traceback.print_exc()
        return Result(name, "traceback", one_line(error))
    apart = differences(found["in RAM"], expected)
    wrong = [*too_far(*apart), *wrong]
    if special.refused and counted != _REFUSED:
        wrong.append(f"load does not say: {special.refused}")
    others = [how for how, other in found.items() if not same_bits(found["in RAM"], other)]
    if others == ["checkpointed"] and same_bits(
        reference(folder / "model", data, special, checkpoints=True), found[others[0]]
    ):
        others = []  # transformers' own checkpointing adds gradients in another order (Udop)
    wrong += [f"other bits {how}" for how in others]
    wrong += differs(special.load(folder / "export"), found["on a drive"])
    form = " ".join(key for key in data[0] if key not in ("input_ids", "attention_mask", "labels"))
    seconds = round(time.monotonic() - start, 1)
    outcome = "wrong" if wrong else "right"
    return Result(name, outcome, "; ".join(wrong), *apart, form, counted, frozen, seconds)


_REFUSED = "refused by `load`, trained with `offload`"


def patches_by_default(folder: Path, special: Special) -> str:
    """Return how many patches of a row's images are counted without image_patches, or that `load` refuses the model."""
    try:
        images = resolve_model(ModelSection(name=str(folder)), seed=0, image_patches="auto").shape.images
    except UserError as error:
        if special.refused and special.refused in str(error):
            return _REFUSED
        if "give image_patches=N" in str(error):
            return "needs image_patches"
        raise
    if images is None:
        return ""
    return images.why.partition(",")[0] if images.units else "tokens of a row only"


def with_frozen_tower(
    folder: Path, drive: Path, data: Sequence[Batch], special: Special, whole: Trained, how: dict[str, Any]
) -> tuple[list[str], str]:
    """Freeze the tower, if one is known by its name, and compare; return what is wrong, and what was frozen."""
    names = [name for name in whole.weights if re.search(special.tower, name)]
    if not names or len(names) == len(whole.weights):
        return [], "no tower by name"
    expected = reference(folder, data, special, freeze=[special.tower])
    found = ours(folder, drive, data, special, freeze=[special.tower], **how)
    wrong = [f"frozen tower: {one}" for one in too_far(*differences(found, expected))]
    wrong += [f"{name} moved" for name in names if not torch.equal(found.weights[name], expected.weights[name])][:1]
    return wrong, f"{len(names)} weights"


def differs(exported: PreTrainedModel, trained: Trained) -> list[str]:
    """Return what is wrong with an export."""
    loaded = dict(exported.named_parameters())
    other = [name for name, value in trained.weights.items() if not torch.equal(loaded[name], value)]
    return [f"export: {len(other)} weights differ, such as {other[0]}"] if other else []


# -- all of them ------------------------------------------------------------------------------------------------------


_NOT_TRIED = "were not tried"


def main() -> None:
    try_all(kinds(), examine, Result, table=table, about=str(__doc__), not_run=_NOT_TRIED)


def table(results: Sequence[Result]) -> str:
    """Return the Markdown page: a description of the columns, a row for each architecture, and what was not tried."""
    lines = [
        "# Every image-text model of transformers",
        "",
        "Look up your image-text architecture: whether it trains here as in plain torch, and how closely.",
        "",
        f"Written by `scripts/every_image_model.py --table docs/benchmarks/image_models.md`: transformers "
        f"{transformers.__version__}, torch {torch.__version__}. {counts(results, not_run=_NOT_TRIED)}.",
        "",
        *(" ".join(part.split()) + "\n" for part in str(__doc__).split("\n\n")[2:]),
        "`loss`, `norm` and `weights` are the differences. Names are those of transformers' configurations, whose "
        "defaults `scripts/tiny_image_models.py` shrinks.",
        "",
        "| architecture | | loss | norm | weights | inputs | frozen | the plan counts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        if r.outcome != "transformers":
            figures = [f"{x:.0e}" if r.outcome in ("right", "wrong") else "" for x in (r.first, r.norm, r.weights)]
            said = "; ".join(part for part in (r.counted, SPECIAL.get(r.name, Special()).note, r.why) if part)
            cells = [r.name, r.outcome, *figures, r.form, r.frozen, said]
            lines.append(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    if rest := [f"| {r.name} | {r.why.replace('|', ' ')} |" for r in results if r.outcome == "transformers"]:
        lines += ["", "## What was not tried", "", "| architecture | why |", "| --- | --- |", *rest]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
