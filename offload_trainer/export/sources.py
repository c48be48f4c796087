"""Sources of weights for an export: a checkpoint, a dead run's page files, or a run's final weights.

A run directory stands for its newest checkpoint, or for the final weights of a run without checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import with_config

from offload_trainer.checkpoint import (
    RESIDENT,
    RunConfiguration,
    complete_checkpoints,
    find_checkpoint,
    read_manifest,
    read_state,
    reading,
)
from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.export.model_card import checkpoint_card, final_card, model_card
from offload_trainer.model.loader import BUFFERS, resolve_model
from offload_trainer.offloading.pages.manifest import DESCRIPTION, read_description, read_store
from offload_trainer.safe_files import LENIENT, Count, Line, Steps, is_there, read_back, shown
from offload_trainer.storage.owned_dirs import MARK
from offload_trainer.storage.scratch_dir import PAGES, dead_runs, is_alive, protected
from offload_trainer.storage.tensorfile import TensorFileReader, describe_invalid_values

NamedTensor = tuple[str, torch.Tensor]
_NAMED = 10  # number of weights named in a message
FINAL_RECORD = "export.json"


@dataclass(frozen=True)
class Source:
    """A readable set of weights: whole fp32 masters, frozen weights and buffers by the model's own names."""

    shapes: Mapping[str, tuple[int, ...]]  # `weights` iterates in this order
    weights: Callable[[], Iterator[NamedTensor]]
    read: Callable[[str], torch.Tensor]  # read one of them again
    model: Path  # directory with config.json and the tokenizer
    description: str  # what messages call the source
    card: Callable[[str], str]  # the model card for a dtype
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # exported in their own dtypes

    def with_buffers(self, given: Mapping[str, torch.Tensor] | None = None) -> Source:
        """Return the source with buffers after the weights: those `given`, or from the file next to config.json."""
        path, held = self.model / BUFFERS, dict(given or {})
        if given is None and is_there(path):
            with TensorFileReader(path) as file:
                held = {name: file.read(name) for name in file.entries}
        shapes = dict(self.shapes) | {name: tuple(buffer.shape) for name, buffer in held.items()}
        return replace(
            self,
            buffers=held,
            shapes=shapes,
            weights=lambda: chain(self.weights(), held.items()),
            read=lambda name: held[name] if name in held else self.read(name),
        )


def finite_weights(source: Source) -> Iterator[NamedTensor]:
    """Yield the weights and buffers of `source`.

    After the last one, raises UserError if a weight contained a NaN or an infinity.
    """
    wrong = []
    for name, tensor in source.weights():
        if name not in source.buffers and (what := describe_invalid_values(tensor)):
            wrong.append(f"{name} ({what})")
        yield name, tensor
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UserError(
            f"{source.description}: {len(wrong)} weights cannot be used: {', '.join(wrong[:_NAMED])}{more}. Nothing "
            "was exported; export a checkpoint from before the training diverged"
        )


@with_config(LENIENT)
@dataclass(frozen=True)
class FinalExport:
    """The content of export.json: the step after which the weights in RUN/export were written, and their run."""

    step: Steps
    identity: dict[str, Any]
    run: RunConfiguration
    replaces: Count | None = None  # inode of the directory that existed when this was written


def final_export(run: Path) -> FinalExport | None:
    """Return the record of the final weights in a run directory, or None if there are none.

    Also returns None if the run was killed while writing them, so that RUN/export is still an earlier run's.
    """
    if not is_there(run / FINAL_RECORD) or not is_there(run / "export"):
        return None
    record = read_back(run / FINAL_RECORD, FinalExport, fix=f"Move it and {run / 'export'} away")
    return None if record.replaces == (run / "export").stat().st_ino else record


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open the weights at `path`. Inside the context their run does not remove them."""
    described = is_there(path / DESCRIPTION)
    if described or (is_there(path / MARK) and is_there(path / "state")):
        if is_alive(path):
            raise UserError(
                f"{path}: its run is alive. Ask it for a checkpoint, with a file named save in its run directory or "
                "SIGUSR1, and export that"
            )
        if described:
            with protected(path):
                yield _page_files(path).with_buffers()
            return
        raise UserError(
            f"{path}: page files without a {DESCRIPTION}, so that no masters can be read from them: the run died while "
            "it started, or it did not keep two copies of its whole state on drives (--optimizer nvme --ram-fraction 0 "
            "tiered.state_copies=2); export its newest checkpoint"
        )
    left = final_export(path)
    newest = complete_checkpoints(path / "checkpoints")[-1:] if left else []
    if left and all(read_state(checkpoint).step < left.step for checkpoint in newest):
        with _opened_final(path, left) as source:
            yield source.with_buffers()
        return
    try:
        checkpoint = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}{_describe_page_files(path)}") from error
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
            weights=lambda: ((name, file.read(name)) for name, file in places.items()),
            read=lambda name: places[name].read(name),
            model=checkpoint / "model",
            description=str(checkpoint),
            card=lambda dtype: checkpoint_card(checkpoint, dtype=dtype),
        )
        yield source.with_buffers()


@with_config(LENIENT)
@dataclass(frozen=True)
class _Planned:
    """The part of a run's plan.json that says where page files were."""

    tiers: dict[Line, Any]


def _describe_page_files(run: Path) -> str:
    """Describe page files that a dead run without a checkpoint has left on drives, as the end of a sentence.

    Returns "" if there are none.
    """
    try:
        plan = read_back(run / "plan.json", _Planned, fix="Export its page files by their directory")
        drives = [Path(place) for place in plan.tiers if place not in ("gpu", "ram")]
        dead = [folder for drive in drives for folder in dead_runs(drive, listed=run / PAGES)]
        model = str((run / "model").absolute())
        mine = [one for one in dead if is_there(one / DESCRIPTION) and read_description(one).model == model]
    except (OSError, UserError):
        return ""
    if mine:
        return f". Page files that it left are in {mine[0]}: export that directory"
    return ""


@contextmanager
def _opened_final(run: Path, left: FinalExport) -> Iterator[Source]:
    """Open RUN/export, in fp32, in the way that any pretrained model is read."""
    # With a number of patches, the model is of the class that its configuration names.
    source = resolve_model(ModelSection(name=str(run.absolute() / "export")), seed=0, image_patches=1)
    shapes = {weight.name: weight.shape for weight in source.shape.weights}
    with source.opened() as found:
        yield Source(
            shapes={name: shapes[name] for name in found.order()},
            weights=source.weights,
            read=found.read,
            model=run / "model",
            description=f"{run / 'export'}, after step {left.step}",
            card=lambda dtype: final_card(run / FINAL_RECORD, dtype=dtype),
        )


def _page_files(directory: Path) -> Source:
    stored = read_store(directory)
    if not os.path.isfile(stored.model / "config.json"):
        raise UserError(f"{directory}: its model was in {shown(str(stored.model))}, which holds no config.json now")
    text = f"{directory}, after update {stored.step}"
    return Source(
        shapes=stored.shapes,
        weights=stored.weights,
        read=stored.read,
        model=stored.model,
        description=text,
        card=lambda dtype: model_card(stored.model.parent, dtype=dtype, source=text, run={}, updates=stored.step),
    )
