"""State of another trainer's checkpoint: masters and Adam's moments by name, read one tensor at a time.

reader of a format ──> ForeignState ── names_for(our weights) ──> commands/import_checkpoint.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, with_config

from offload_trainer.errors import UserError
from offload_trainer.plan.shape import Weight
from offload_trainer.safe_files import LENIENT

_NAMED = 5  # number of weights named in a message


@with_config(LENIENT)
@dataclass(frozen=True)
class ScalerState:
    """The state of torch's GradScaler."""

    scale: Annotated[float, Field(gt=0, le=2.0**127)]  # the largest power of two in fp32
    good_steps: Annotated[int, Field(ge=0, alias="_growth_tracker")]  # steps without overflow since it last changed
    window: Annotated[int, Field(ge=1, alias="growth_interval")]  # number of such steps after which it grows
    growth_factor: float
    backoff_factor: float


@dataclass(frozen=True)
class ForeignState:
    """A checkpoint of another trainer, under the names that it uses."""

    told: str  # description for messages
    step: int  # completed steps of the run
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the weights
    trained: Collection[str]  # names of those with moments
    updates: Callable[[str], int]  # number of updates of a trained weight
    read: Callable[[str, str], torch.Tensor]  # (name, kind) -> a weight ("master"), or a trained weight's moment
    rate: float  # learning rate of the next step
    adam: Mapping[str, Any]  # as in the configuration's `optim`: lr (which the schedule multiplies), betas, eps, ...
    steps: int | None = None  # length of the run, if it is known
    position: int | None = None  # steps that its learning rate scheduler has counted, if it has one
    scaler: ScalerState | None = None  # None: it does not train in fp16

    @property
    def optim(self) -> dict[str, Any]:
        """Return the keys of the configuration's `optim` with which a run goes on as the source did.

        `schedule_delay` gives the next step the rate at the scheduler's position. It is 1 for a scheduler that counts
        each step, as torch's do, and more if overflows have held it up.
        """
        delay = 1 if self.position is None else self.step + 1 - self.position
        # A scheduler that counts several steps at a time has no such number.
        return {**self.adam, "schedule_delay": delay if delay >= 0 else 1}

    def names_for(self, weights: Sequence[Weight], *, others: Iterable[str]) -> dict[str, str]:
        """Return the name that this checkpoint has for each of the model's weights.

        Its names may all have one prefix more, that of a wrapper. `others`: names of buffers, and second names of tied
        weights. Raises UserError with the numbers of weights that
        are missing, unexpected, of another shape, or trained on one side only.
        """
        held, shapes = self.shapes, {weight.name: weight.shape for weight in weights}
        prefix = common_prefix(held, list(shapes))
        names = {name: f"{prefix}{name}" for name in shapes}
        known = {*names.values(), *(f"{prefix}{name}" for name in others)}
        ours = {weight.name for weight in weights if weight.trainable}
        theirs = {name for name, its in names.items() if its in self.trained}
        problems = {
            "missing there": [name for name, its in names.items() if its not in held],
            "not in the model": [name for name in held if name not in known],
            "of another shape": [
                f"{name} {held[its]}, in the model {shapes[name]}"
                for name, its in names.items()
                if its in held and tuple(held[its]) != shapes[name]
            ],
            "trained by the model's configuration, without moments there": [
                name for name in names if name in ours - theirs and names[name] in held
            ],
            "frozen by model.freeze, with moments there": [name for name in names if name in theirs - ours],
        }
        if told := [f"{len(found)} {what}: {_some(found)}" for what, found in problems.items() if found]:
            raise UserError(
                f"{self.told}: its weights do not fit the model\n  "
                + "\n  ".join(told)
                + "\nName the model that it trained with --model, and weights that it did not train with model.freeze"
            )
        return names


def common_prefix(keys: Collection[str], names: Sequence[str]) -> str:
    """Return the prefix, such as "model.", that most of the names have among the keys; the shortest of several."""
    for name in names:
        if prefixes := [key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")]:
            return max(sorted(prefixes, key=len), key=lambda prefix: sum(f"{prefix}{other}" in keys for other in names))
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def adam_settings(groups: Sequence[Mapping[str, Any]], *, told: str) -> tuple[float, dict[str, Any]]:
    """Return `rate` and `adam` of a ForeignState from a torch optimizer's groups of parameters.

    Raises UserError unless all groups are of Adam or AdamW with one pair of betas, one eps and decoupled weight decay.
    """
    used = [group for group in groups if group.get("params")]
    if not used:
        raise UserError(f"{told}: its optimizer has no groups of parameters")
    # torch's NAdam and RAdam have no amsgrad.
    if lacking := [key for key in ("betas", "eps", "lr", "amsgrad") if any(key not in group for group in used)]:
        raise UserError(f"{told}: its optimizer is neither Adam nor AdamW: its groups have no {', '.join(lacking)}")
    for key in ("amsgrad", "maximize"):
        if any(group.get(key) for group in used):
            raise UserError(f"{told}: its optimizer has {key}=True, which AdamW here has not")
    betas = {tuple(float(beta) for beta in group["betas"]) for group in used}
    eps = {float(group["eps"]) for group in used}
    decays = {float(group.get("weight_decay", 0.0)) for group in used} - {0.0}
    for what, values in (("betas", betas), ("eps", eps), ("weight decays other than 0", decays)):
        if len(values) > 1:
            raise UserError(f"{told}: its groups have several {what}: {sorted(values)}; one run has one")
    if decays and any(group.get("decoupled_weight_decay") is False for group in used):
        raise UserError(
            f"{told}: its optimizer is Adam with weight_decay={max(decays):g} added to the gradient, and AdamW here "
            "decays the weights themselves: its moments cannot be continued"
        )
    rate = float(used[0]["lr"])
    adam = {"betas": list(betas.pop()), "eps": eps.pop(), "weight_decay": max(decays, default=0.0)}
    return rate, {"lr": float(used[0].get("initial_lr", rate)), **adam}
