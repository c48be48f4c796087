"""Export of weights to a directory of safetensors that transformers, vLLM and llama.cpp's converter can load.

A source is a checkpoint, a session's model, or a directory in the same format. One tensor is in memory at a time, or
one group of tensors where transformers fuses tensors that are separate on the hub.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from offload_trainer.common.errors import TrainerError, UserError, reason
from offload_trainer.common.safe_files import is_there, read_back
from offload_trainer.common.units import format_bytes
from offload_trainer.model.loader import BUFFERS
from offload_trainer.model.pretrained import (
    INDEX,
    Group,
    ShardIndex,
    as_they_are,
    model_in,
    opened_weights,
    read_model_config,
    saved_groups,
)
from offload_trainer.offloading.pages.manifest import DESCRIPTION
from offload_trainer.run.checkpoint import (
    MADE,
    RESIDENT,
    RunConfiguration,
    read_manifest,
    reading,
)
from offload_trainer.storage.atomic_io import bytes_below, copy_tree, make_directories, sync_directory, write_text
from offload_trainer.storage.owned_dirs import MARK, replacing
from offload_trainer.storage.retention import find_checkpoint
from offload_trainer.storage.scratch_dir import PAGES, folders_in, is_alive
from offload_trainer.storage.tensorfile import (
    DTYPES,
    SAFETENSORS_DTYPES,
    PlacedWriter,
    TensorEntry,
    TensorFileReader,
    describe_invalid_values,
)

NamedTensor = tuple[str, torch.Tensor]
EXPORT = "the export to"  # purpose written in the scratch directory's mark
_NAMED = 10  # number of weights named in a message
_SAMPLE = 32  # number of groups of tensors that --check compares
_CARD = """\
---
library_name: transformers
tags:
- offload-trainer
---

Weights in {dtype}, from {origin}.
{settings}"""


@dataclass(frozen=True)
class Source:
    """A readable set of weights: whole masters, frozen weights and buffers by the model's own names."""

    shapes: Mapping[str, tuple[int, ...]]  # name -> shape, in the order of `each`
    read: Callable[[str], torch.Tensor]  # read one of them, any number of times
    model: Path  # directory with config.json and the tokenizer
    description: str  # name of the source in messages
    origin: str = ""  # origin of the weights, for the model card
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the run's; the model card lists some
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # exported in their own dtypes
    own_names: bool = False  # exported in one file under these names, for a model that transformers does not build
    weights: Callable[[], Iterator[NamedTensor]] | None = None  # yields all but the buffers, if not `read` one by one

    def each(self) -> Iterator[NamedTensor]:
        """Yield the weights, then the buffers, one at a time."""
        every = ((name, self.read(name)) for name in self.shapes if name not in self.buffers)
        return chain(self.weights() if self.weights else every, self.buffers.items())

    def with_buffers(self, given: Mapping[str, torch.Tensor] | None = None) -> Self:
        """Return the source with buffers after the weights: those `given`, or from the file next to config.json."""
        path, held = self.model / BUFFERS, dict(given or {})
        if given is None and is_there(path):
            with TensorFileReader(path) as file:
                held = {name: file.read(name) for name in file.entries}
        shapes = dict(self.shapes) | {name: tuple(buffer.shape) for name, buffer in held.items()}
        known = self.read
        return replace(self, buffers=held, shapes=shapes, read=lambda n: held[n] if n in held else known(n))


def finite_weights(source: Source) -> Iterator[NamedTensor]:
    """Yield the weights and buffers of `source`; at the end raise UserError if one contained a NaN or an infinity."""
    wrong = []
    for name, tensor in source.each():
        if name not in source.buffers and (what := describe_invalid_values(tensor)):
            wrong.append(f"{name} ({what})")
        yield name, tensor
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UserError(
            f"{source.description}: {len(wrong)} weights cannot be used: {', '.join(wrong[:_NAMED])}{more}. Nothing "
            "was exported; export a checkpoint from before the training diverged"
        )


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open the weights of a run or a checkpoint."""
    if is_there(path / DESCRIPTION) or (is_there(path / MARK) and is_there(path / "state")):
        again = "has died: repeat its command, which resumes from them or from its newest checkpoint"
        raise UserError(
            f"{path}: page files, and no checkpoint; its run {'is alive' if is_alive(path) else again}. Ask it for a "
            "checkpoint, with a file named save in its run directory or SIGUSR1, and export that"
        )
    try:
        checkpoint = find_checkpoint(path)
    except UserError as error:
        left = ""  # page files of a dead run without a checkpoint
        with suppress(OSError, ValueError, UserError):
            for folder in folders_in(path / PAGES):
                if is_there(folder / DESCRIPTION) and not is_alive(folder):
                    left = f". Page files that it left are in {folder}: repeat its command, which resumes from them"
                    break
        raise UserError(f"{error}{left}") from error
    with reading(checkpoint), ExitStack() as stack:
        read_manifest(checkpoint, moments=False)
        if (checkpoint / RESIDENT).exists():
            raise UserError(
                f"{checkpoint} holds what a session trained beside the model's weights, adapters for one: export it "
                "from there, with session.resume and session.export, which merges them"
            )
        files = [
            stack.enter_context(TensorFileReader(held))
            for name in ("master", "fixed")
            if (held := checkpoint / f"{name}.safetensors").exists()
        ]
        places = {name: file for file in files for name in file.entries}
        source = Source(
            shapes={name: file.entries[name].shape for name, file in places.items()},
            read=lambda name: places[name].read(name),
            model=checkpoint / "model",
            description=str(checkpoint),
            origin=f"the masters of {checkpoint.name}",
            settings=read_back(checkpoint / MADE, RunConfiguration, fix="Export another checkpoint of the run").config,
        )
        yield source.with_buffers()


@contextmanager
def opened_model(directory: Path) -> Iterator[Source]:
    """Open a directory that transformers can load, such as an export, as any pretrained model is read."""
    model = model_in(directory)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with opened_weights(directory, model) as found:
        source = Source(
            shapes={name: shapes[name] for _, names in found.groups for name in names.values() if name in shapes},
            weights=lambda: found.each(found.parameters),
            read=found.read,
            model=directory,
            description=str(directory),
        )
        yield source.with_buffers(dict(found.each(found.buffers)))


# -- directories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    source: str
    bytes: int
    compared: int  # tensors read back and found equal to the source


def export(source: Path, destination: Path, *, dtype: str, shard_bytes: int = 5 * 10**9, check: bool) -> Exported:
    """Write what `opened` opens to `destination`, as `write_model` does."""
    with opened(source) as found:
        return write_model(found, destination, dtype=dtype, shard_bytes=shard_bytes, check=check)


def write_model(
    source: Source, destination: Path, *, dtype: str, shard_bytes: int = 5 * 10**9, check: bool
) -> Exported:
    """Write the weights of `source` in `dtype` (fp32, bf16 or fp16), and its buffers in their dtypes.

    `check`: read all headers and a sample of tensors back. With own names the configuration stays, and gets no card.
    Raises UserError for a destination that is not empty, too little space, or values that do not fit fp16, and
    TrainerError if the disk refuses or the check fails. An error leaves no partial export.
    """
    destination = destination.resolve()
    place = {name: number for number, name in enumerate(source.shapes)}
    # A saved tensor can be written once the last of its source tensors has been read.
    made = as_they_are(source.shapes) if source.own_names else saved_groups(list(source.shapes), source.model)
    groups = sorted(made, key=lambda group: max(place[name] for name in group.sources))
    entries = [
        TensorEntry(name, source.buffers[kept].dtype if kept in source.buffers else DTYPES[dtype], shape)
        for group in groups
        for kept in group.sources[:1]
        for name, shape in group.shapes(source.shapes).items()
    ]
    total = sum(entry.bytes for entry in entries)
    check_destination(destination, total + bytes_below(source.model))
    try:
        with replacing(destination, what=EXPORT) as temporary:
            copy_tree(source.model, temporary)
            (temporary / BUFFERS).unlink(missing_ok=True)
            if not source.own_names:
                _describe(temporary, source, dtype=dtype)
            weights = _converted(finite_weights(source), groups)
            _write_shards(weights, temporary, entries=entries, shard_bytes=total if source.own_names else shard_bytes)
            sync_directory(temporary)
            compared = check_export(temporary, source, groups=groups, entries=entries) if check else 0
    except OSError as error:
        raise TrainerError(
            f"{destination}: {reason(error)}; nothing is left there. The export takes {format_bytes(total)}"
        ) from error
    return Exported(source.description, total, compared)


def _describe(directory: Path, source: Source, *, dtype: str) -> None:
    config = read_model_config(directory)
    named = str(DTYPES[dtype]).removeprefix("torch.")
    config["dtype"] = config["torch_dtype"] = named
    for part in config.values():  # an image-text model's parts name their own
        if isinstance(part, dict):
            part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), named)
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    # The card shows the name of the run's model and its optimizer's settings, if they are known.
    name = Path(str(source.settings.get("model", {}).get("name"))).name
    found = {"model.name": name} | {f"optim.{key}": value for key, value in source.settings.get("optim", {}).items()}
    lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in found.items())
    settings = f"\n```\n{lines}```\n" if source.settings else ""
    write_text(directory / "README.md", _CARD.format(dtype=dtype, origin=source.origin, settings=settings))


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


def check_destination(destination: Path, total: int) -> None:
    """Raise UserError if the destination is in use or `total` bytes are not free."""
    if is_there(destination) and (not destination.is_dir() or any(destination.iterdir())):
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
        writer = PlacedWriter(directory / file, shard, whole=True)
        for entry in shard:
            name, tensor = next(weights)
            cast = tensor.to(entry.dtype)
            narrowed = entry.dtype is torch.float16 and tensor.dtype is not torch.float16  # some buffers are fp16
            if narrowed and not torch.isfinite(cast).all():
                overflowing.append(f"{name} (largest {tensor.abs().max().item():.4g})")
            writer.put(name, 0, cast)
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

    It compares every name, dtype and shape, and the values of an even sample. Raises TrainerError with the differences.
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
