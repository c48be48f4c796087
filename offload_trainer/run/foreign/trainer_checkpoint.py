"""Read a checkpoint directory of transformers' Trainer.

    model.safetensors (or shards)   weights; fp32 unless the model was loaded in another dtype
    optimizer.pt                    state by position: weights with decay in the model's order, then the others
    trainer_state.json              steps
    scheduler.pt                    steps that the learning rate scheduler has counted
    scaler.pt                       the loss scale, in fp16

A Trainer that runs FSDP writes the weights and the optimizer's state as distributed_checkpoint.py reads them, and the
other files as here.

The optimizer numbers parameters and does not name them. The order is that of `Trainer.create_optimizer`; every count
and shape is compared with the model's before a number is taken for a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import with_config
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.model.pretrained import opened_weights
from offload_trainer.run.foreign.pickles import load_pickle
from offload_trainer.run.foreign.state import ForeignState, ScalerState, adam_settings
from offload_trainer.safe_files import LENIENT, Steps, as_kind, is_there, read_back

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
_SCALER = "scaler.pt"
# The names that `Trainer.get_decay_parameter_names` exempts from weight decay; all weights of nn.LayerNorm are too.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@with_config(LENIENT)
@dataclass(frozen=True)
class _TrainerState:
    """The part of trainer_state.json that an import reads."""

    global_step: Steps
    max_steps: Steps = 0


@contextmanager
def opened_trainer(directory: Path, model: Any) -> Iterator[ForeignState]:
    """Open a Trainer's checkpoint of `model`, a model on the meta device with its frozen weights marked.

    Raises UserError for a file that is missing, another optimizer, and state that does not fit the model.
    """
    told = f"{directory} (transformers' Trainer)"
    if is_there(directory / "adapter_config.json"):
        raise UserError(f"{told}: holds adapters, and a run trains whole weights: merge them into their model first")
    groups, state = _parts(load_pickle(directory / OPTIMIZER), told=told)
    rate, adam = adam_settings(groups, told=told)
    places = {name: state.get(number) for name, number in _positions(model, groups, state, told=told).items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with opened_weights(directory, model) as weights:

        def read(name: str, kind: str) -> torch.Tensor:
            if kind == "master":
                return weights.read(name)
            moments = places[name]
            return torch.zeros(shapes[name]) if moments is None else moments[kind]

        yield ForeignState(
            told=told,
            step=max((int(moments["step"]) for moments in state.values()), default=0),
            shapes=shapes,
            trained=set(places),
            updates=lambda name: 0 if (moments := places[name]) is None else int(moments["step"]),
            read=read,
            rate=rate,
            adam=adam,
        )


def with_trainer_files(state: ForeignState, directory: Path) -> ForeignState:
    """Return `state` with the step, the scheduler's position and the loss scale of the Trainer's files in `directory`.

    A directory without trainer_state.json is not a Trainer's, and changes nothing. Raises UserError for a damaged file.
    """
    if not is_there(directory / STATE):
        return state
    fix = "Import another checkpoint of that run"
    about = read_back(directory / STATE, _TrainerState, links=True, finite=False, fix=fix)
    position, scaler = None, None
    if is_there(directory / SCHEDULER):
        saved = load_pickle(directory / SCHEDULER)
        # torch's ReduceLROnPlateau has no base_lrs, and counts evaluations as last_epoch.
        position = saved.get("last_epoch") if isinstance(saved, Mapping) and "base_lrs" in saved else None
    # A scaler that is switched off has an empty state.
    if is_there(directory / _SCALER) and (saved := load_pickle(directory / _SCALER)):
        try:
            scaler = as_kind(saved, ScalerState)
        except ValueError as error:
            raise UserError(f"{directory / _SCALER} has no loss scale to go on with: {error}. {fix}") from error
    return replace(state, step=about.global_step, steps=about.max_steps or None, position=position, scaler=scaler)


def _parts(saved: Any, *, told: str) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the groups and the state of an optimizer's state_dict.

    Raises UserError if it is not a state_dict of torch's Adam or AdamW.
    """
    groups, state = (saved.get(key) if isinstance(saved, Mapping) else None for key in ("param_groups", "state"))
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise UserError(f"{told}: {OPTIMIZER} is not the state_dict of a torch optimizer")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise UserError(f"{told}: {OPTIMIZER} has no groups of numbered parameters")
    wanted = {"step", "exp_avg", "exp_avg_sq"}
    for number, moments in state.items():
        held = set(moments) if isinstance(moments, dict) else set()
        if held != wanted:
            raise UserError(
                f"{told}: its optimizer is neither torch's Adam nor its AdamW: parameter {number} has "
                f"{', '.join(sorted(map(str, held))) or 'no state'}, expected {', '.join(sorted(wanted))}"
            )
    return groups, state


def decay_order(model: nn.Module) -> list[list[str]]:
    """Return the trained parameters with and without weight decay, in the order of a Trainer's optimizer."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    of_norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    spared = {name for name in trained if _WITHOUT_DECAY.search(name.lower()) or name.startswith(of_norms)}
    return [[name for name in trained if name not in spared], [name for name in trained if name in spared]]


def _positions(
    model: nn.Module, groups: list[dict[str, Any]], state: Mapping[int, Mapping[str, Any]], *, told: str
) -> dict[str, int]:
    """Return the optimizer's number of each trained parameter.

    Raises UserError, with the counts and shapes, if the numbers cannot be those of the model's parameters.
    """
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    decayed = decay_order(model)
    held = [group["params"] for group in groups]
    orders = [decayed, [list(trained)]]  # A Trainer has two groups; a single group has the order of the model.
    sizes = [len(numbers) for numbers in held]
    fitting = [order for order in orders if [len(names) for names in order] == sizes]
    if not fitting:
        raise UserError(
            f"{told}: its optimizer has groups of {sizes} parameters; the model has {len(decayed[0])} with weight "
            f"decay and {len(decayed[1])} without. Freeze with model.freeze what it did not train"
        )
    found = dict(zip(chain.from_iterable(fitting[0]), chain.from_iterable(held), strict=True))
    wrong = [
        f"parameter {number} {tuple(state[number][kind].shape)}, {name} {trained[name]}"
        for name, number in found.items()
        if number in state
        for kind in ("exp_avg", "exp_avg_sq")
        if tuple(state[number][kind].shape) != trained[name]
    ]
    if wrong:
        raise UserError(
            f"{told}: {len(wrong)} moments do not have the shapes of the model's weights, the first: {wrong[0]}"
        )
    return found
