"""Sources of weights for an export: a checkpoint, a dead run's page files, or a run's final weights; and their card.

A run directory stands for its newest checkpoint, or for the final weights of a run without checkpoints. The model card
(README.md of an export) tells the model, the data, settings, and the recorded numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import (
    MADE,
    RESIDENT,
    RunConfiguration,
    complete_checkpoints,
    find_checkpoint,
    read_manifest,
    read_state,
    reading,
)
from offload_trainer.errors import UserError
from offload_trainer.model.checkpoint_mapping import model_in
from offload_trainer.model.loader import BUFFERS
from offload_trainer.model.pretrained import opened_weights
from offload_trainer.offloading.pages.manifest import DESCRIPTION, read_store
from offload_trainer.safe_files import Count, Steps, is_there, lenient_record, read_back, shown
from offload_trainer.storage.owned_dirs import MARK
from offload_trainer.storage.scratch_dir import PAGES, folders_in, is_alive, protected
from offload_trainer.storage.tensorfile import TensorFileReader, describe_invalid_values
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics
from offload_trainer.units import format_count, format_seconds
from offload_trainer.units import shown as printable

NamedTensor = tuple[str, torch.Tensor]
_NAMED = 10  # number of weights named in a message
FINAL_RECORD = "export.json"


@dataclass(frozen=True)
class Source:
    """A readable set of weights: whole masters, frozen weights and buffers by the model's own names."""

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
    """Yield the weights and buffers of `source`; at the end raise UserError if one contained a NaN or an infinity."""
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


@lenient_record
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
    """Open the weights of a run, a checkpoint or a dead run's page files, which their run does not remove meanwhile."""
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
            "it started, or it is not a run on one node that keeps two copies of its whole state on drives "
            "(--optimizer nvme --ram-fraction 0 tiered.state_copies=2, no frozen weights); export its newest checkpoint"
        )
    left = final_export(path)
    newest = complete_checkpoints(path / "checkpoints")[-1:] if left else []
    if left and all(read_state(checkpoint).step < left.step for checkpoint in newest):
        with opened_model(path / "export") as source:
            yield replace(
                source,
                model=path / "model",
                description=f"{path / 'export'}, after step {left.step}",
                card=lambda dtype: model_card(
                    path, dtype=dtype, source=f"the run after step {left.step}", run=left.run, step=left.step
                ),
            )
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
            card=partial(_checkpoint_card, checkpoint),
        )
        yield source.with_buffers()


def _checkpoint_card(checkpoint: Path, dtype: str) -> str:
    """Return the card of a checkpoint, with the metrics of its run directory if it is still inside one."""
    run = read_back(checkpoint / MADE, RunConfiguration, fix="Export another checkpoint of the run")
    step = read_state(checkpoint).step
    return model_card(checkpoint.parent.parent, dtype=dtype, source=checkpoint.name, run=run, step=step)


def _describe_page_files(run: Path) -> str:
    """Describe page files that a dead run without a checkpoint has left on drives, as the end of a sentence, or ""."""
    with suppress(OSError, ValueError, UserError):
        for folder in folders_in(run / PAGES):
            if is_there(folder / DESCRIPTION) and not is_alive(folder):
                return f". Page files that it left are in {folder}: export that directory"
    return ""


@contextmanager
def opened_model(directory: Path) -> Iterator[Source]:
    """Open a directory that transformers can load, such as an export, as any pretrained model is read."""
    model = model_in(directory)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with opened_weights(directory, model) as found:
        source = Source(
            shapes={name: shapes[name] for name in found.order()},
            weights=lambda: found.each(found.parameters),
            read=found.read,
            model=directory,
            description=str(directory),
            card=lambda dtype: "",
        )
        yield source.with_buffers(dict(found.each(found.buffers)))


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
        card=lambda dtype: model_card(
            stored.model.parent, dtype=dtype, source=text, run=RunConfiguration({}), updates=stored.step
        ),
    )


_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- offload-trainer
---
"""
_OPTIM = ("name", "lr", "betas", "weight_decay", "max_grad_norm", "schedule", "moment_dtype")  # keys that a card shows


def model_card(
    run_directory: Path,
    *,
    dtype: str,
    source: str,
    run: RunConfiguration,
    step: int | None = None,
    updates: int | None = None,
) -> str:
    """Return the card's text. `run` is a checkpoint's record of its run; metrics come from `run_directory`.

    Metrics end at `step`, or at the step that made update number `updates`. Numbers that were not recorded are left
    out.
    """
    model, optim, data, train = (run.config.get(section, {}) for section in ("model", "optim", "data", "train"))
    base, paths = model.get("base", "model"), data.get("path")
    facts: list[tuple[str, Any]] = [("Weights", f"{dtype}, from the masters of {source}")]
    if run.config:
        changed = f" ({model['overrides']})" if model.get("overrides") else ""
        start = f"random weights{changed}" if run.random else "its weights"
        facts += [
            ("Model", f"{model.get('name')}, from {start}"),
            ("Base", None if base == "model" else f"frozen matrices of blocks, rounded to {base}"),
            ("Trained in", f"{model.get('dtype')}, masters in {optim.get('master_dtype', 'fp32')}"),
            ("Text", ", ".join(Path(str(path)).name for path in paths) if isinstance(paths, list | tuple) else None),
            ("Optimizer", ", ".join(f"{key}={optim.get(key)}" for key in _OPTIM)),
            ("Seed", train.get("seed")),
        ]
    rows = read_metrics(run_directory / "metrics.jsonl")
    if updates is not None:
        step = next((row.step for row in [r for r in rows if not r.skipped][updates - 1 : updates]), updates)
    rows = [row for row in rows if step is None or row.step <= step]
    if rows:
        last = rows[-1]
        facts += [
            ("Steps", f"{last.step}" + (f" of {train['steps']}" if "steps" in train else "")),
            ("Tokens", f"{last.tokens} ({format_count(last.tokens)})"),
            ("Loss of the last step", f"{last.loss:.4f}" if last.loss is not None else None),
            ("Time in steps", format_seconds(sum(row.seconds for row in rows))),
        ]
    elif step is not None:
        facts.append(("Steps", step))
    seen = [e for e in read_evaluations(run_directory / "evaluations.jsonl") if step is None or e.step <= step]
    if seen and seen[-1].validation_loss is not None:
        bits = seen[-1].bits_per_byte
        told = f"{seen[-1].validation_loss:.4f}" + (f" ({bits:.4f} bits a byte)" if bits is not None else "")
        facts.append((f"Validation loss after step {seen[-1].step}", told))
    if packages := run.environment.packages:
        facts.append(("Made with", ", ".join(f"{name} {number}" for name, number in packages.items() if number)))
    lines = [f"| {name} | {_plain(value)} |" for name, value in facts if value is not None]
    title = Path(str(model.get("name", "Trained weights"))).name
    return f"{_HEAD}\n# {_plain(title)}\n\n| | |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def _plain(text: object) -> str:
    """Return text for a Markdown table: markup and HTML escaped, on one line."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", " ".join(printable(text).split()))
