"""Methods of a Session: save, resume and export. A save is complete or absent; `offload-train export` can read it.

It is a checkpoint (run/checkpoint.py) with session.json (the optimizer's groups, and the state of schedulers and other
objects as plain data), resident/ (optimizer.py), and buffers.safetensors, the module's persistent buffers, if any. If
all offloaded weights are frozen, it contains none of them.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offload_trainer.common.errors import TrainerError, UserError, reason
from offload_trainer.common.safe_files import MOST_BYTES, Crc32, is_there, read_back
from offload_trainer.model.loader import BUFFERS
from offload_trainer.offloading.model import OffloadedModel
from offload_trainer.offloading.weights.parameter import OffloadedParameter, forget_writes, refuse_written
from offload_trainer.plan.tiered.layout import Unit
from offload_trainer.ranks import everybody, from_rank_zero
from offload_trainer.run.checkpoint import TrainState, write_checkpoint
from offload_trainer.run.export import DTYPES, Source, write_model
from offload_trainer.session.optimizer import WEIGHT, layout_of, read_residents, write_residents
from offload_trainer.storage.atomic_io import StoredFile, sync_file, write_text
from offload_trainer.storage.manifest import MANIFEST, Manifest, checked_manifest, refuse_other_run
from offload_trainer.storage.owned_dirs import clear, is_removable
from offload_trainer.storage.retention import WORK

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from torch.distributed.checkpoint.stateful import Stateful

    from offload_trainer.session.session import Session

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (name, fp32 values) -> values to export
_STATE = "session.json"
_FIX = "Resume from another save"
_COMPARED = 1024  # elements of each frozen weight in the checksum that identifies a base model


@dataclass(frozen=True)
class _SessionState:
    """Content of session.json."""

    groups: list[dict[str, Any]]  # param_groups, with names in place of parameters
    stateful: list[dict[str, Any]]  # state_dicts of the caller's objects
    base: Crc32 | None  # checksum of the model's weights if all are frozen


def save(session: Session, directory: str | Path, *stateful: Stateful) -> None:
    """Save master weights, moments, step counts, optimizer groups and each `stateful`'s state_dict().

    All ranks call it. An existing save at `directory` is replaced only once the new one is complete, so a kill at any
    moment leaves one of the two. Raises UserError for a state_dict that is not plain data, and if `directory` holds
    something other than a save, and TrainerError if writing fails.
    """
    session._refuse_closed()
    refuse_written(session._model_parameters)
    final, group, optimizer = Path(directory).absolute(), everybody(), session.optimizer
    states = [_plain(one.state_dict(), type(one).__name__) for one in stateful]
    groups = [
        _plain({**group, "params": names}, "the optimizer's group")
        for group, names in zip(optimizer.param_groups, optimizer.names(), strict=True)
    ]
    state = json.dumps(asdict(_SessionState(groups, states, base=_base(session._offloaded))))
    if len(state) > MOST_BYTES:
        most = f"{len(state)} bytes, of {MOST_BYTES} at most: keep large lists, such as a sampler's order, elsewhere"
        raise UserError(f"the state of the groups and the {len(states)} objects takes {most}")
    residents, buffers, step = optimizer.residents, session._kept_buffers, steps_done(session)
    record = replace(session._record, layout={**session._record.layout, **layout_of({**residents, **buffers})})
    snapshot = session._offloaded.snapshot()

    def also(new: Path) -> dict[str, StoredFile]:
        write_text(new / _STATE, state)
        if buffers:
            save_file({name: one.cpu().contiguous().clone() for name, one in buffers.items()}, new / BUFFERS)
            sync_file(new / BUFFERS)
        return write_residents(new, residents, optimizer.state)

    try:
        group.first(lambda: _refuse_to_replace(final))
        write_checkpoint(final, snapshot, group, state=TrainState(step, 0, 0), record=record, also=also)
    except OSError as error:
        raise TrainerError(f"{final} could not be written: {reason(error)}; what was there before stays") from error
    finally:
        snapshot.close()


def export(session: Session, directory: str | Path, *, dtype: str = "bf16", merge: bool = True) -> None:
    """Export the weights, streamed one at a time, to a directory that transformers can load.

    `dtype`: "bf16", "fp16" or "fp32". A module that is not a causal language model of transformers is written to
    model.safetensors under the names of its parameters and persistent buffers. `merge`: merge LoRA adapters into the
    weights, bit for bit as PEFT's merge_and_unload; raises UserError for other parameters that cannot be merged.
    Quantised weights are exported with the values that the model computes with, and the model card says so. Ranks other
    than 0 return immediately.
    """
    session._refuse_closed()
    if session.rank:
        return
    refuse_written(session._model_parameters)
    change: Change = merging(session.model) if merge else lambda _, weight: weight
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    offloaded, step = session._offloaded, steps_done(session)
    masters = offloaded.store.format.masters.name
    source = Source(
        shapes={name: offloaded.places[name][1].weight.shape for name in (*offloaded.trained, *offloaded.fixed)},
        weights=lambda: ((name, change(name, weight)) for name, weight in offloaded.masters()),
        read=offloaded.master,
        model=session.configuration,
        description=f"a session after step {step}",
        origin=f"{masters} masters after {step} steps{_rounded(offloaded.units)}",
        own_names=not session._from_config,
    )
    buffers = {name: buffer.cpu() for name, buffer in session._kept_buffers.items()}
    write_model(source.with_buffers(buffers), Path(directory), dtype=dtype, check=False)


def resume(session: Session, directory: str | Path, *stateful: Stateful) -> int:
    """Load the save at `directory`, or the newest one below it; return its number of optimizer steps.

    All ranks call it. Pending gradients are dropped in any case. Returns 0 and loads nothing if `directory` does not
    exist or is empty. The save is checked before anything is changed: raises UserError if it is damaged or belongs to
    another model or other parameter groups.
    """
    session._refuse_closed()
    session._clear()
    optimizer, offloaded = session.optimizer, session._offloaded
    path: Path | None = from_rank_zero(lambda: _newest(Path(directory).absolute()), Path | None)
    if path is None:
        return 0
    manifest = checked_manifest(path, fix=_FIX)
    residents, buffers, record = optimizer.residents, session._kept_buffers, session._record
    layout = {**record.layout, **layout_of({**residents, **buffers})}
    refuse_other_run(path, manifest, identity=record.identity, layout=layout)
    held = read_back(path / _STATE, _SessionState, fix=_FIX)
    if len(held.stateful) != len(stateful):
        raise UserError(f"{path} holds the state of {len(held.stateful)} objects, and {len(stateful)} were given")
    if [group.get("params") for group in held.groups] != optimizer.names():
        sizes = ", ".join(str(len(group.get("params", ()))) for group in held.groups)
        raise UserError(f"{path} was made with other groups of parameters (of {sizes} parameters): use the same groups")
    if held.base != _base(offloaded):
        raise UserError(f"{path} was made with other weights, or in another dtype or base: load the same model for it")
    values, kept = read_residents(path, residents), load_file(path / BUFFERS) if buffers else {}
    offloaded.load(path)
    with torch.no_grad():
        for name, parameter in residents.items():
            parameter.copy_(values[name].pop(WEIGHT))
            optimizer.state[parameter] = {kind: value.to(parameter.device) for kind, value in values[name].items()}
    for name, buffer in buffers.items():
        buffer.copy_(kept[name])
    for group, saved in zip(optimizer.param_groups, held.groups, strict=True):
        group |= {key: tuple(v) if isinstance(v, list) else v for key, v in saved.items() if key != "params"}
    for one, state in zip(stateful, held.stateful, strict=True):
        one.load_state_dict(state)
    forget_writes(session._model_parameters)
    return steps_done(session)


def _refuse_to_replace(final: Path) -> None:
    if final.exists() and not is_there(final / MANIFEST) and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{final} contains something other than a save, and is not replaced: name another directory")


def _rounded(units: Sequence[Unit]) -> str:
    """Return sentences for the model card that say which weights were quantised when they were loaded, or ""."""
    if not (blocks := [unit.name for unit in units if unit.quantised]):
        return ""
    weights = [place.weight for unit in units for place in unit.places if place.weight.quantised]
    return (
        f".\n\n{len(weights)} matrices of {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}) were rounded to "
        f"{weights[0].quantised} when they were loaded. They are exported as rounded, adapters added if they were "
        "merged"
    )


def steps_done(session: Session) -> int:
    """Return the largest number of updates of any weight, offloaded or not."""
    states = session._optimizer.state.values() if session._optimizer else ()
    return max([session._offloaded.steps_done, *(int(state["step"]) for state in states if state)])


def _base(offloaded: OffloadedModel) -> int | None:
    """Return a CRC-32 over the first elements of all weights if all are frozen, and so not saved; else None."""
    if offloaded.trained:
        return None
    crc = 0
    for name in offloaded.fixed:
        unit, place = offloaded.places[name]
        some = offloaded.weights.get(unit.index, place.start, min(place.weight.numel, _COMPARED))
        crc = zlib.crc32(some.contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def _plain(value: Any, where: str) -> Any:
    """Return `value` as JSON-compatible data, tuples as lists. Raises UserError that names anything else in it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise UserError(f"{where} is {type(value).__name__}, and a save holds plain data: numbers, text, lists of them")


def _newest(directory: Path) -> Path | None:
    """Return `directory` if it is a save, else the newest save in it; None if it is missing or empty."""
    if directory.parent.is_dir():
        clear(directory, what=WORK)  # remove a killed save, and restore the older one that it was replacing
    if is_there(directory / MANIFEST):
        return directory
    if not directory.exists():
        return None
    for place in directory.glob(".*.tmp"):
        if is_removable(place, what=WORK):
            clear(directory / place.name[1:-4], what=WORK)
    if found := [path for path in directory.iterdir() if is_there(path / MANIFEST)]:
        return max(found, key=lambda path: read_back(path / MANIFEST, Manifest, fix=_FIX).step)
    if left := [path.name for path in directory.iterdir() if not path.name.startswith(".")]:
        raise UserError(f"{directory}: neither a save ({MANIFEST}) nor a directory of saves; it holds {left[0]}")
    return None


def merging(model: nn.Module) -> Change:
    """Return a function that merges the active adapters of `model`, if any, into a weight, in the weight's dtype."""
    layers: dict[str, list[LoraLayer]] = {}
    merged: set[nn.Parameter] = set()
    if "peft" in sys.modules:  # without an import of PEFT there are no adapters
        from peft.tuners.lora import LoraLayer

        for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
            weight = getattr(layer.get_base_layer(), "weight", None)
            if isinstance(weight, OffloadedParameter) and not any(getattr(layer, "lora_bias", {}).values()):
                layers.setdefault(weight.weight, []).append(layer)
                merged |= set(layer.parameters())
    left = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, OffloadedParameter) and parameter not in merged
    ]
    if left:
        instead = "merge=False writes the weights without them, and their library's save_pretrained writes them"
        raise UserError(f"{len(left)} parameters cannot be merged into the weights ({left[0]}, ...): {instead}")

    @torch.no_grad()
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        for layer in layers.get(name, ()):  # PEFT merges in a copy of the layer whose base holds only this weight
            place = next(p.device for p in layer.parameters() if not isinstance(p, OffloadedParameter))
            base, one = copy.copy(layer.get_base_layer()), copy.copy(layer)
            base._parameters = {"weight": nn.Parameter(weight.to(place, base.weight.dtype), requires_grad=False)}
            one._modules = {**layer._modules, "base_layer": base}
            one.merged_adapters = []
            one.merge()
            weight = base.weight.detach().cpu()
        return weight

    return change
