"""Read DeepSpeed's checkpoints of ZeRO-1, 2 and 3, of any number of ranks, and its universal checkpoints.

    DIR/latest                  name of the newest checkpoint directory, TAG
    TAG/*_optim_states.pt       one file a rank: its part of the flat fp32 masters and moments
    TAG/*_model_states.pt       names and shapes in the order of the flat buffers; steps; frozen weights
    TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt     only in universal checkpoints: one file a weight

ZeRO-1 and 2 concatenate the weights of each group, pad the result, and give each rank an equal range of it. ZeRO-3
gives each rank an equal range of each weight, and concatenates these; the range of the last rank ends in padding. A
rank's sub-groups follow each other, so a weight's range has one offset in all of them together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.run.foreign.pickles import load_pickle
from offload_trainer.run.foreign.state import (
    AdamSettings,
    ForeignState,
    ScalerState,
    adam_settings,
    scaler_state,
    scheduler_position,
)
from offload_trainer.safe_files import file_bytes, is_there

_FLAT, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAMS = ("adam", "adamw", "fusedadam", "torch_adam", "cpuadam")  # optimizer.type in DeepSpeed's configuration
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
Shapes = dict[str, tuple[int, ...]]


def tag_directory(source: Path) -> Path | None:
    """Return the directory with the files of a DeepSpeed checkpoint: `source`, or the one that it names as newest.

    Returns None if `source` is not DeepSpeed's. Raises UserError if the directory that it names is not there.
    """
    if any(source.glob("*_optim_states.pt")) or is_there(source / "zero"):
        return source
    for name in ("latest", "latest_universal"):
        if is_there(source / name):
            try:
                tag = file_bytes(source / name, most=1000, links=True).decode().strip()
            except ValueError as error:
                raise UserError(f"{source / name} cannot be read: {error}") from error
            found = source / Path(tag).name
            if not found.is_dir():
                raise UserError(f"{source / name} names {tag!r}, which is not there: import another directory of it")
            return found
    return None


@contextmanager
def opened_zero(tag: Path) -> Iterator[ForeignState]:
    """Open the checkpoint in `tag`.

    Raises UserError for missing files, another optimizer, and weights that several ranks share.
    """
    told = f"{tag} (DeepSpeed)"
    models = _model_files(tag, told=told)
    about = load_pickle(models[0])
    if not isinstance(about, Mapping) or not about.get("param_shapes"):
        raise UserError(f"{models[0]} has no param_shapes: it is not of a ZeRO run, or of a version that is not read")
    if about.get("mp_world_size") not in (None, 1):
        raise UserError(f"{told}: {about['mp_world_size']} ranks share each weight; convert it to whole weights first")
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in about["param_shapes"]]
    trained = {name: shape for group in shapes for name, shape in group.items()}
    fixed, read_fixed = _frozen_weights(models, about, trained=trained)
    if is_there(tag / "zero"):
        reader = _universal(tag / "zero", shapes, told=told)
    else:
        reader = _partitioned(tag, shapes, told=told)
    config = about.get("ds_config")
    _refuse_other_optimizer(config, told=told)
    yield ForeignState(
        told=told,
        step=int(about.get("global_steps", 0)),
        trained=trained,
        fixed=fixed,
        updates=reader.updates,
        read=reader.read,
        read_fixed=read_fixed,
        settings=replace(reader.settings, peak=_peak(config) or reader.settings.peak),
        position=scheduler_position(about.get("lr_scheduler")),
        scaler=_scaler(reader.scaler, told=told),
    )


@dataclass(frozen=True)
class _Reader:
    read: Callable[[str, str], torch.Tensor]
    updates: Callable[[str], int]
    settings: AdamSettings
    scaler: Any  # the pickled loss scaler


def _model_files(tag: Path, *, told: str) -> list[Path]:
    """Return the files of model states, one for all ranks or one a rank, in the order of ranks."""
    found = sorted(tag.glob("*mp_rank_*_model_states.pt"), key=_rank_of)
    if not found:
        raise UserError(f"{told}: there is no *_model_states.pt, which holds the names of the weights")
    if others := [path.name for path in tag.glob("*_model_states.pt") if "mp_rank_00" not in path.name]:
        raise UserError(f"{told}: {len(others)} files of other model-parallel ranks or experts, such as {others[0]}")
    return found


def _rank_of(path: Path) -> int:
    found = _RANK.search(path.name)
    return int(found[1]) if found else -1


def _refuse_other_optimizer(config: Any, *, told: str) -> None:
    """Raise UserError if DeepSpeed's configuration names another optimizer than Adam, or Adam with L2 decay."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return  # the training script made the optimizer; its state has been checked
    kind, params = str(section.get("type", "adam")), section.get("params") or {}
    if kind.lower() not in _ADAMS:
        raise UserError(f"{told}: its optimizer is {kind}, and an import reads Adam and AdamW")
    if params.get("adam_w_mode") is False and params.get("weight_decay"):
        raise UserError(
            f"{told}: adam_w_mode=false adds weight_decay={params['weight_decay']} to the gradient, and AdamW here "
            "decays the weights themselves: its moments cannot be continued"
        )


def _peak(config: Any) -> float | None:
    """Return the learning rate that DeepSpeed's configuration names as the largest, if it names one."""
    for section, key in (("scheduler", "warmup_max_lr"), ("optimizer", "lr")):
        its = config.get(section) if isinstance(config, Mapping) else None
        found = (its.get("params") or {}).get(key) if isinstance(its, Mapping) else None
        if isinstance(found, int | float):
            return float(found)
    return None


def _scaler(saved: Any, *, told: str) -> ScalerState | None:
    """Return the state of DeepSpeed's loss scaler, or None if the run was not in fp16.

    DeepSpeed doubles the scale after `scale_window` + 1 steps the first time, and then after `scale_window` steps.
    """
    scale = getattr(saved, "cur_scale", None)
    if scale is None or (scale == 1 and not getattr(saved, "dynamic", False)):
        return None
    if not getattr(saved, "dynamic", False):
        return scaler_state(scale, unlike="is constant", told=told)
    window, factor = getattr(saved, "scale_window", 0), getattr(saved, "scale_factor", 2.0)
    stable = getattr(saved, "cur_iter", 0) - getattr(saved, "last_overflow_iter", -1) - 1
    differs = [] if factor == 2 else [f"changes by a factor of {factor:g}"]
    if (hysteresis := getattr(saved, "delayed_shift", 1)) > 1:
        differs.append(f"shrinks at the {hysteresis}. overflow")
    good = (stable - 1) % window if stable > 0 and window > 0 else 0
    return scaler_state(scale, good_steps=good, window=window, unlike=" and ".join(differs), told=told)


def _frozen_weights(
    models: Sequence[Path], about: Mapping[str, Any], *, trained: Shapes
) -> tuple[Shapes, Callable[[str], torch.Tensor]]:
    """Return the shapes of the weights without state, and the function that reads one.

    ZeRO-2 and 3 store them apart, whole in one file or in ranges of all ranks. ZeRO-1 has them in the whole module.
    """
    if about.get("frozen_param_shapes") is None:
        module = about.get("module") or {}
        whole = {name: its for name, its in module.items() if isinstance(its, torch.Tensor) and name not in trained}
        return {name: tuple(its.shape) for name, its in whole.items()}, lambda name: whole[name]
    shapes = {name: tuple(shape) for name, shape in about["frozen_param_shapes"].items()}
    load = lru_cache(maxsize=None)(load_pickle)  # tensors are mapped, so they take no memory

    def read(name: str) -> torch.Tensor:
        count, parts, have = math.prod(shapes[name]), [], 0
        for path in models:
            parts.append(load(path)["frozen_param_fragments"][name].reshape(-1))
            have += parts[-1].numel()
            if have >= count:
                return torch.cat(parts)[:count].view(shapes[name])
        raise UserError(f"{models[0]}: {name} has {have} elements in {len(models)} files, and its shape {count}")

    return shapes, read


# -- one file a rank ---------------------------------------------------------------------------------------------------


def _partitioned(tag: Path, shapes: Sequence[Shapes], *, told: str) -> _Reader:
    """Return the reader of a checkpoint with one optimizer file a rank. Raises UserError if they are incomplete."""
    files = sorted(tag.glob("*_optim_states.pt"), key=_rank_of)
    if not files:
        raise UserError(f"{told}: there is no *_optim_states.pt, which holds masters and moments")
    ranks = [load_pickle(path)["optimizer_state_dict"] for path in files]
    count = ranks[0].get("partition_count", len(files))
    count = max(count) if isinstance(count, list | tuple) else count
    if [_rank_of(path) for path in files] != list(range(count)):
        numbers = ", ".join(str(_rank_of(path)) for path in files)
        raise UserError(f"{told}: {count} ranks have written it, and the optimizer files here are of ranks {numbers}")
    third = _FLAT_3 in ranks[0]
    if not third and _FLAT not in ranks[0]:
        raise UserError(f"{files[0]} has neither {_FLAT} nor {_FLAT_3}: it is of a version that is not read")
    bases = [rank["optimizer_state_dict" if third else "base_optimizer_state"] for rank in ranks]
    if not all(isinstance(base, Mapping) for base in bases):
        raise UserError(f"{told}: it was saved with elastic_checkpoint, which is not read: save it without")
    flat = [_flat(rank, base, third=third, told=told) for rank, base in zip(ranks, bases, strict=True)]
    settings = _settings(bases[0]["param_groups"], told=told)
    if third:
        read = _third(flat, shapes, told=told)
    else:
        read = _first_and_second(flat, shapes, paddings=ranks[0].get("param_alignment_paddings"), told=told)
    place = {name: number for number, group in enumerate(shapes) for name in group}
    steps = [_steps(base, number, told=told) for base in bases[:1] for number in range(len(shapes))]
    return _Reader(read, lambda name: steps[place[name]], settings, ranks[0].get("loss_scaler"))


def _settings(groups: Sequence[Mapping[str, Any]], *, told: str) -> AdamSettings:
    """Return the settings of groups whose parameters are flat buffers."""
    return adam_settings([{**group, "params": [0]} for group in groups], told=told)


def _flat(rank: Mapping[str, Any], base: Any, *, third: bool, told: str) -> dict[str, list[torch.Tensor]]:
    """Return a rank's flat masters and moments, one tensor a group or sub-group."""
    masters = list(rank[_FLAT_3 if third else _FLAT])
    state = base["state"]
    moments = [state.get(number, {}) for number in range(len(masters))]
    for number, its in enumerate(moments):
        if lacking := [kind for kind in _MOMENTS if kind not in its]:
            has = ", ".join(sorted(map(str, its))) or "nothing"
            raise UserError(
                f"{told}: group {number} of its optimizer has {has}, and no {lacking[0]}: either it is not Adam, or "
                "its state was on NVMe and is not in the checkpoint"
            )
    return {"master": masters, **{kind: [its[kind] for its in moments] for kind in _MOMENTS}}


def _steps(base: Any, number: int, *, told: str) -> int:
    """Return the number of updates of a group, which each Adam keeps in another place."""
    state = base["state"][number]
    step = state.get("step", base["param_groups"][0].get("step"))
    if step is None:
        raise UserError(f"{told}: its optimizer has not stored its number of steps")
    return int(step)


def _first_and_second(
    flat: Sequence[Mapping[str, list[torch.Tensor]]], shapes: Sequence[Shapes], *, paddings: Any, told: str
) -> Callable[[str, str], torch.Tensor]:
    """Return the function that reads a weight of ZeRO-1 or 2 from the ranges of the ranks."""
    places: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(shapes):
        start = 0
        for place, (name, shape) in enumerate(group.items()):
            places[name] = number, start
            start += math.prod(shape) + (paddings[number][place] if paddings else 0)
        have = sum(rank["exp_avg"][number].numel() for rank in flat)
        if have < start:
            raise UserError(f"{told}: group {number} has {have} elements in {len(flat)} files; its shapes need {start}")
    whole = {name: shape for group in shapes for name, shape in group.items()}

    def read(name: str, kind: str) -> torch.Tensor:
        (number, first), parts, begin = places[name], [], 0
        last = first + math.prod(whole[name])
        for rank in flat:
            end = begin + rank["exp_avg"][number].numel()  # masters are stored without the padding at the end
            if first < end and begin < last:
                parts.append(rank[kind][number].reshape(-1)[max(first, begin) - begin : min(last, end) - begin])
            begin = end
        return _joined(parts, name, whole[name], kind=kind, told=told)

    return read


def _third(
    flat: Sequence[Mapping[str, list[torch.Tensor]]], shapes: Sequence[Shapes], *, told: str
) -> Callable[[str, str], torch.Tensor]:
    """Return the function that reads a weight of ZeRO-3 from the ranges of the ranks."""
    places: dict[str, tuple[int, int]] = {}  # sub-group, and offset of a rank's range in it
    for number, group in enumerate(shapes):
        start = 0
        for name, shape in group.items():
            places[name] = number, start
            start += -(-math.prod(shape) // len(flat))
        have = flat[0]["exp_avg"][number].numel() if number < len(flat[0]["exp_avg"]) else 0
        if have < start:
            raise UserError(f"{told}: sub-group {number} of rank 0 has {have} elements; its shapes need {start}")
    whole = {name: shape for group in shapes for name, shape in group.items()}

    def read(name: str, kind: str) -> torch.Tensor:
        number, start = places[name]
        count = math.prod(whole[name])
        size = -(-count // len(flat))
        parts = [rank[kind][number].reshape(-1)[start : start + size] for rank in flat]
        return _joined(parts, name, whole[name], kind=kind, told=told)

    return read


def _joined(parts: Sequence[torch.Tensor], name: str, shape: tuple[int, ...], *, kind: str, told: str) -> torch.Tensor:
    """Return the ranges as one weight, without padding. Raises UserError if elements are missing."""
    count, have = math.prod(shape), sum(part.numel() for part in parts)
    if have < count:
        raise UserError(f"{told}: {kind} of {name} has {have} elements in the files, and its shape {count}")
    values = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return values[:count].view(shape)


# -- one file a weight -------------------------------------------------------------------------------------------------


def _universal(zero: Path, shapes: Sequence[Shapes], *, told: str) -> _Reader:
    """Return the reader of a universal checkpoint. Raises UserError if a weight's file is missing."""
    whole = {name: shape for group in shapes for name, shape in group.items()}
    files = {"master": "fp32.pt", **{kind: f"{kind}.pt" for kind in _MOMENTS}}
    missing = [f"{name}/{file}" for name in whole for file in files.values() if not is_there(zero / name / file)]
    if missing:
        raise UserError(f"{told}: {len(missing)} files of zero/ are missing, the first: {missing[0]}")
    common = load_pickle(zero / "optimizer_state.pt")
    groups = common.get("param_groups") or []
    settings = _settings(groups, told=told)

    def read(name: str, kind: str) -> torch.Tensor:
        held = load_pickle(zero / name / files[kind])
        values = (held["param"] if isinstance(held, Mapping) else held).reshape(-1)
        return _joined([values], name, whole[name], kind=kind, told=told)

    def updates(name: str) -> int:
        if is_there(zero / name / "step.pt"):
            return int(load_pickle(zero / name / "step.pt"))
        state = common.get("optimizer_state_dict") or {"state": {}, "param_groups": groups}
        first: Mapping[str, Any] = next(iter(state["state"].values()), {})
        return _steps({"state": [first], "param_groups": groups}, 0, told=told)

    return _Reader(read, updates, settings, common.get("loss_scaler"))
