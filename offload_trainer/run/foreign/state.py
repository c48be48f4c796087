"""State of another trainer's checkpoint: masters and Adam's moments by name, read one tensor at a time.

reader of a format ──> ForeignState ── names_for(our weights) ──> commands/import_checkpoint.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.plan.shape import Weight

_NAMED = 5  # number of weights named in a message
_LARGEST_SCALE = 2.0**127  # the largest power of two in fp32


@dataclass(frozen=True)
class AdamSettings:
    """Settings of the other trainer's optimizer."""

    rate: float | None  # learning rate of the next step
    peak: float | None  # learning rate that its schedule multiplies
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class ScalerState:
    """The loss scale of a source that trains in fp16."""

    scale: float
    good_steps: int = 0  # steps without overflow since it last changed
    window: int | None = None  # number of such steps after which it doubles; None: it is constant
    unlike: str = ""  # how its rule differs from doubling and halving


@dataclass(frozen=True)
class ForeignState:
    """A checkpoint of another trainer, under the names that it uses."""

    told: str  # description for messages
    step: int  # completed steps of the run
    trained: Mapping[str, tuple[int, ...]]  # shapes of the weights with moments
    fixed: Mapping[str, tuple[int, ...]]  # shapes of the other weights
    updates: Callable[[str], int]  # number of updates of a trained weight
    read: Callable[[str, str], torch.Tensor]  # (name, kind) -> a trained weight's master or moment
    read_fixed: Callable[[str], torch.Tensor]
    settings: AdamSettings
    steps: int | None = None  # length of the run, if it is known
    position: int | None = None  # steps that its learning rate scheduler has counted, if it has one
    scaler: ScalerState | None = None  # None: it does not train in fp16

    @property
    def schedule_delay(self) -> int:
        """Return the `optim.schedule_delay` that gives the next step the rate at the scheduler's position.

        It is 1 for a scheduler that counts each step, as torch's do, and more if overflows have held it up.
        """
        delay = 1 if self.position is None else self.step + 1 - self.position
        return delay if delay >= 0 else 1  # a scheduler that counts several steps at a time has no such number

    def names_for(self, weights: Sequence[Weight], *, others: Iterable[str]) -> dict[str, str]:
        """Return the name that this checkpoint has for each of the model's weights.

        Its names may all have one prefix more, that of a wrapper. `others`: names of buffers, and second names of tied
        weights. Raises UserError with the numbers of weights that
        are missing, unexpected, of another shape, or trained on one side only.
        """
        held = {**self.fixed, **self.trained}
        prefix = _common_prefix(held, weights)
        names = {weight.name: f"{prefix}{weight.name}" for weight in weights}
        known = {*names.values(), *(f"{prefix}{name}" for name in others)}
        shapes = {weight.name: weight.shape for weight in weights}
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


def _common_prefix(held: Iterable[str], weights: Sequence[Weight]) -> str:
    """Return the prefix that most weights have among the names `held`, or ""."""
    names = set(held)
    for weight in weights:
        ends = [name for name in names if name == weight.name or name.endswith(f".{weight.name}")]
        if prefixes := sorted({name.removesuffix(weight.name) for name in ends}):
            return max(prefixes, key=lambda prefix: sum(f"{prefix}{one.name}" in names for one in weights))
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def adam_settings(groups: Sequence[Mapping[str, Any]], *, told: str) -> AdamSettings:
    """Return the settings of torch-like parameter groups.

    Raises UserError unless all groups are of Adam or AdamW with one pair of betas, one eps and decoupled weight decay.
    """
    used = [group for group in groups if group.get("params")] or list(groups)
    if not used:
        raise UserError(f"{told}: its optimizer has no groups of parameters")
    if lacking := [key for key in ("betas", "eps", "lr") if any(key not in group for group in used)]:
        raise UserError(f"{told}: its optimizer is neither Adam nor AdamW: its groups have no {', '.join(lacking)}")
    for key, wrong in (("amsgrad", True), ("maximize", True), ("bias_correction", False)):
        if any(key in group and bool(group[key]) == wrong for group in used):
            raise UserError(f"{told}: its optimizer has {key}={wrong}, which AdamW here has not")
    if odd := sorted({key for group in used for key in group if key in _OTHER_RULES}):
        raise UserError(f"{told}: its optimizer is neither Adam nor AdamW: its groups have {', '.join(odd)}")
    decay = max(float(group.get("weight_decay", 0.0)) for group in used)
    if decay and any(group.get("decoupled_weight_decay") is False for group in used):
        raise UserError(
            f"{told}: its optimizer is Adam with weight_decay={decay:g} added to the gradient, and AdamW here decays "
            "the weights themselves: its moments cannot be continued"
        )
    betas = {tuple(float(beta) for beta in group["betas"]) for group in used}
    eps = {float(group["eps"]) for group in used}
    if len(betas) > 1 or len(eps) > 1:
        raise UserError(f"{told}: its groups have several betas {sorted(betas)} or eps {sorted(eps)}; one run has one")
    decays = {float(group.get("weight_decay", 0.0)) for group in used} - {0.0}
    if len(decays) > 1:
        raise UserError(f"{told}: its groups have several weight decays {sorted(decays)}; one run has one, and 0")
    first = used[0]
    first_beta, second_beta = next(iter(betas))
    return AdamSettings(
        rate=float(first["lr"]),
        peak=float(first.get("initial_lr", first["lr"])),
        betas=(first_beta, second_beta),
        eps=next(iter(eps)),
        weight_decay=decay,
    )


def scaler_state(scale: Any, *, good_steps: Any = 0, window: Any = None, unlike: str = "", told: str) -> ScalerState:
    """Return a loss scale and its counters. Raises UserError for values that no run can have."""
    try:
        found = ScalerState(float(scale), int(good_steps), None if window is None else int(window), unlike)
    except (TypeError, ValueError) as error:
        raise UserError(f"{told}: its loss scale cannot be read: {error}") from error
    if not 0 < found.scale <= _LARGEST_SCALE or found.good_steps < 0 or (found.window is not None and found.window < 1):
        raise UserError(
            f"{told}: its loss scale is {found.scale:g} after {found.good_steps} steps without overflow, with a window "
            f"of {found.window}: no run can resume from that; import an older checkpoint"
        )
    return found


def scheduler_position(saved: Any) -> int | None:
    """Return the number of steps in a scheduler's state, or None if it has no schedule of steps."""
    if not isinstance(saved, Mapping):
        return None
    # A schedule of torch has base_lrs; its ReduceLROnPlateau has no base_lrs and counts evaluations as last_epoch.
    position = saved.get("last_epoch" if "base_lrs" in saved else "last_batch_iteration")
    return position if isinstance(position, int) else None


_OTHER_RULES = ("momentum", "max_coeff", "use_muon", "adjust_lr_fn", "scale_parameter", "d_coef")
