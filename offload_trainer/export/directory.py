"""Export to a directory of safetensors that transformers, vLLM and llama.cpp's converter can load.

    weights by the model's names ──saved_groups──> hub layout ──> 16 or 32 bits ──> shards, index, card

One tensor is in memory at a time, or one group of tensors where transformers fuses tensors that are separate on the
hub. The directory is written under a temporary name and renamed when it is complete.

A run that makes no checkpoints leaves such a directory at its end:

    RUN/export/        fp32, in transformers' layout
    RUN/export.json    the step, the run and its identity; written before export/ gets its name

A later start neither overwrites them nor trains a finished run again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from offload_trainer.checkpoint import RunConfiguration, RunRecord
from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.export.sources import (
    FINAL_RECORD,
    NamedTensor,
    Source,
    final_export,
    finite_weights,
    model_card,
    opened,
)
from offload_trainer.model.checkpoint_mapping import Group, as_they_are, read_model_config, saved_groups
from offload_trainer.model.loader import BUFFERS
from offload_trainer.model.pretrained import INDEX, ShardIndex
from offload_trainer.plan.shape import Weight
from offload_trainer.safe_files import as_kind, is_there, read_back
from offload_trainer.storage.atomic_io import bytes_below, copy_tree, make_directories, sync_directory, write_text
from offload_trainer.storage.owned_dirs import replacing
from offload_trainer.storage.tensorfile import DTYPES, SAFETENSORS_DTYPES, TensorEntry, TensorFileWriter
from offload_trainer.units import format_bytes

EXPORT = "the export to"  # purpose written in the scratch directory's mark
_SAMPLE = 32  # number of groups of tensors that --check compares


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    source: str
    bytes: int
    compared: int  # tensors read back and found equal to the source


def export(source: Path, destination: Path, *, dtype: str, shard_bytes: int = 5 * 10**9, check: bool) -> Exported:
    """Write what `opened` opens to `destination`, as `write_model` does."""
    with opened(source) as found:
        return write_model(found, destination, dtype=dtype, shard_bytes=shard_bytes, check=check)


def write_model(
    source: Source,
    destination: Path,
    *,
    dtype: str,
    shard_bytes: int = 5 * 10**9,
    replace: bool = False,
    check: bool = False,
    by_name: bool = False,
) -> Exported:
    """Write the weights of `source` in `dtype` (fp32, bf16 or fp16), and its buffers in their dtypes.

    `check`: read all headers and a sample of tensors back. `by_name` keeps the names of the weights and the
    configuration as they are and writes no card, for a model that transformers does not build.

    Raises UserError for a destination that is not empty (unless `replace`), too little space, or values that do not fit
    fp16, naming each weight and its largest value. Raises TrainerError if the disk refuses or the check fails. After an
    error no partial export is left.
    """
    destination = destination.resolve()
    place = {name: number for number, name in enumerate(source.shapes)}
    # A saved tensor can be written once the last of its source tensors has been read.
    made = as_they_are(source.shapes) if by_name else saved_groups(list(source.shapes), source.model)
    groups = sorted(made, key=lambda group: max(place[name] for name in group.sources))
    entries = [
        TensorEntry(name, source.buffers[kept].dtype if kept in source.buffers else DTYPES[dtype], shape)
        for group in groups
        for kept in group.sources[:1]
        for name, shape in group.shapes(source.shapes).items()
    ]
    total = sum(entry.bytes for entry in entries)
    check_destination(destination, total + bytes_below(source.model), replace=replace)
    try:
        with replacing(destination, what=EXPORT) as temporary:
            copy_tree(source.model, temporary)
            (temporary / BUFFERS).unlink(missing_ok=True)
            if not by_name:
                _describe(temporary, source, dtype=dtype)
            weights = _converted(finite_weights(source), groups)
            _write_shards(weights, temporary, entries=entries, shard_bytes=shard_bytes)
            sync_directory(temporary)
            compared = check_export(temporary, source, groups=groups, entries=entries) if check else 0
    except OSError as error:
        raise TrainerError(
            f"{destination}: {reason(error)}; nothing is left there. The export takes {format_bytes(total)}"
        ) from error
    return Exported(source.description, total, compared)


def _describe(directory: Path, source: Source, *, dtype: str) -> None:
    """Write the card, and the dtype into the model's configuration."""
    config = read_model_config(directory)
    named = str(DTYPES[dtype]).removeprefix("torch.")
    config["dtype"] = config["torch_dtype"] = named
    for part in config.values():  # an image-text model's parts name their own
        if isinstance(part, dict):
            part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), named)
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(directory / "README.md", source.card(dtype))


def _converted(weights: Iterable[NamedTensor], groups: Sequence[Group]) -> Iterator[NamedTensor]:
    """Yield the converted tensors of each group; tensors that arrive before their group's turn are buffered."""
    held: dict[str, torch.Tensor] = {}
    stream = iter(weights)
    for group in groups:
        while not all(name in held for name in group.sources):
            name, tensor = next(stream)
            held[name] = tensor
        yield from group.convert(held.pop).items()
    assert next(stream, None) is None, "more weights came than groups take"


def check_destination(destination: Path, total: int, *, replace: bool = False) -> None:
    """Raise UserError if the destination is in use or `total` bytes are not free."""
    if is_there(destination) and not replace and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: already holds something; name another")
    if os.path.ismount(destination):
        raise UserError(f"{destination}: a mount point cannot be replaced by the export: name a directory in it")
    try:
        make_directories(destination.parent)
    except OSError as error:
        raise UserError(f"{destination}: cannot be made: {error.strerror}") from error
    if (free := shutil.disk_usage(destination.parent).free) < total:
        raise UserError(f"{destination}: {format_bytes(total)} are needed there, and {format_bytes(free)} are free")


def _write_shards(
    weights: Iterator[NamedTensor], directory: Path, *, entries: Sequence[TensorEntry], shard_bytes: int
) -> None:
    shards, held = list[list[TensorEntry]]([[]]), 0
    for entry in entries:
        if shards[-1] and held + entry.bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.bytes
    overflowing, places = list[str](), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer = TensorFileWriter(directory / file, shard)
        for entry in shard:
            name, tensor = next(weights)
            cast = tensor.to(entry.dtype)
            narrowed = entry.dtype is torch.float16 and tensor.dtype is not torch.float16  # some buffers are fp16
            if narrowed and not torch.isfinite(cast).all():
                overflowing.append(f"{name} (largest {tensor.abs().max().item():.4g})")
            writer.write(name, cast)
            places[name] = file
        writer.close()
    assert next(weights, None) is None, "more weights came than entries"
    if overflowing:
        raise UserError(
            f"{len(overflowing)} weights hold values beyond fp16's 65504: {', '.join(overflowing)}; "
            "export with --dtype bf16"
        )
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(entry.bytes for entry in entries)}, "weight_map": places}
        write_text(directory / INDEX, json.dumps(index, indent=1))


def check_export(directory: Path, source: Source, *, groups: Sequence[Group], entries: Sequence[TensorEntry]) -> int:
    """Compare an export with its source through safetensors' own reader; return the number of tensors compared.

    It compares every name, dtype and shape, and the values of a sample: the first, the last and others evenly between.
    Raises TrainerError that names the differences.
    """
    held, paths = dict[str, Any](), dict[str, Path]()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            held |= {name: (values.get_dtype(), tuple(values.get_shape())) for name, values in slices.items()}
            paths |= dict.fromkeys(slices, path)
    expected = {entry.name: (SAFETENSORS_DTYPES[entry.dtype], entry.shape) for entry in entries}
    wrong = [
        f"{name} is {held.get(name, 'missing')}, and should be {expected.get(name, 'absent')}"
        for name in {**expected, **held}
        if held.get(name) != expected.get(name)
    ]
    if (directory / INDEX).exists():
        shards = read_back(directory / INDEX, ShardIndex, fix="Export once more").weight_map
        wrong += [
            f"the index puts {name} in {shards.get(name)}" for name in paths if shards.get(name) != paths[name].name
        ]
    sample = {id(group): group for group in [*groups[:: max(1, len(groups) // _SAMPLE)], groups[-1]]}
    compared = 0
    for group in () if wrong else sample.values():
        for name, tensor in group.convert(source.read).items():
            with safe_open(paths[name], framework="pt") as file:
                there = file.get_tensor(name)
                if not torch.equal(there, tensor.to(there.dtype)):
                    wrong.append(f"{name} holds other values")
            compared += 1
    if wrong:
        raise TrainerError(f"{directory} does not hold what was exported: {'; '.join(wrong)}")
    return compared


# -- final weights of a run ------------------------------------------------------------------------------------------

_SECTIONS = ("model", "data", "optim", "train")  # sections of the configuration on which the weights depend
# keys of these sections on which the weights do not depend
_ASIDE = {
    "data.template_date",  # what a template printed is in the text
    *("data.cache", "optim.kernel", "train.eval_every", "train.eval_rows"),
    "train.epochs",  # the run records the resulting steps
    "train.stop_within",
}


def write_final(
    weights: Iterator[NamedTensor], layout: Sequence[Weight], output: Path, *, record: RunRecord, step: int
) -> Path:
    """Write a live engine's master weights, which come in the order of `layout` with the frozen ones last.

    Return the directory. Raises TrainerError if there is no room or the disk refuses.
    """
    order = sorted(layout, key=lambda weight: not weight.trainable)
    description, run = f"the run after step {step}", as_kind(dict(record.run), RunConfiguration)
    live = Source(
        shapes={weight.name: weight.shape for weight in order},
        weights=lambda: weights,
        read=dict[str, torch.Tensor]().__getitem__,  # a live engine gives each weight once
        model=output / "model",
        description=description,
        card=lambda dtype: model_card(output, dtype=dtype, source=description, run=run, step=step),
    )
    place = output / "export"
    replaces = place.stat().st_ino if place.exists() else None
    kept = {"step": step, "identity": dict(record.identity), "run": dict(record.run), "replaces": replaces}
    try:
        write_text(output / FINAL_RECORD, json.dumps(kept, indent=1))
        write_model(live.with_buffers(), place, dtype="fp32", replace=True)
    except UserError as error:  # at this point a run has ended, so it is no longer a configuration error
        raise TrainerError(str(error)) from error
    return place


def done_before(output: Path, record: RunRecord, *, begins_at: int, restarts: bool, exports: bool) -> str | None:
    """Return a message if this run has already ended here and left its weights, or None if there are steps to train.

    `begins_at` is the step that this start would resume from. `restarts` is set for `save.resume=never`. `exports` is
    whether this run would write final weights. Raises UserError if it would overwrite the weights of another run.
    """
    found, place = final_export(output), output / "export"
    if found is None:
        if exports and place.exists():
            raise UserError(
                f"{place} is where this run would leave its weights: move it away, or name another --output"
            )
        return None
    if found.step <= begins_at:
        return None
    then, now = found.run.config, json.loads(json.dumps(record.run["config"]))
    changed = [f"{section}.{key}" for section in _SECTIONS for key in _unequal(then.get(section, {}), now[section])]
    changed = [key for key in changed if key not in _ASIDE]
    changed += _unequal(found.identity, json.loads(json.dumps(dict(record.identity))))
    whole = found.step == record.run["config"]["train"]["steps"]
    if whole and not changed and not restarts:
        return f"done before: {found.step} steps; the weights are in {place}. To train anew name another --output"
    why = f"differs in {', '.join(changed[:5])}" if changed else f"ended after step {found.step}"
    raise UserError(
        f"{place} holds what an earlier run has trained, which {why} and left no checkpoint to go on from; this run "
        f"would overwrite it. Name another --output (and --model {place} to train those weights on), or move it away"
    )


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]
