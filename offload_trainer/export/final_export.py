"""Final weights in the run directory, written at the end of a run that makes no checkpoints.

    RUN/export/        fp32, in transformers' layout
    RUN/export.json    the step, the run and its identity; written before export/ gets its name

A later start neither overwrites them nor trains a finished run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import RunRecord
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.export.directory import write_model
from offload_trainer.export.model_card import model_card
from offload_trainer.export.sources import FINAL_RECORD, FinalExport, NamedTensor, Source, final_export
from offload_trainer.plan.shape import Weight
from offload_trainer.storage.atomic_io import write_text

_SECTIONS = ("model", "data", "optim", "train")  # sections of the configuration on which the weights depend
# keys of these sections on which the weights do not depend
_ASIDE = {
    *("data.cache", "model.checkpointing_variant", "optim.kernel", "train.eval_every", "train.eval_rows"),
    "train.epochs",  # the run records the resulting steps
    *("train.sample_every", "train.sample_prompt", "train.sample_tokens"),
}


def write_final(
    weights: Iterator[NamedTensor], layout: Sequence[Weight], output: Path, *, record: RunRecord, step: int
) -> Path:
    """Write a live engine's master weights and return the directory.

    They come in the order of `layout`, with the frozen ones last. Raises TrainerError if there is no room or the disk
    refuses.
    """
    order = sorted(layout, key=lambda weight: not weight.trainable)
    told = f"the run after step {step}"
    live = Source(
        shapes={weight.name: weight.shape for weight in order},
        weights=lambda: weights,
        read=_given_once,
        model=output / "model",
        told=told,
        card=lambda dtype: model_card(output, dtype=dtype, source=told, run=record.run, step=step),
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


def _given_once(name: str) -> torch.Tensor:
    raise AssertionError(f"{name}: a live engine gives each weight once")


def done_before(output: Path, record: RunRecord, *, begins_at: int, anew: bool, exports: bool) -> str | None:
    """Return a message if this run has already ended here and left its weights, or None if there are steps to train.

    `begins_at` is the step that this start would resume from. `anew` is set for `save.resume=never`. `exports` is
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
    changed = _differences(found, record)
    whole = found.step == record.run["config"]["train"]["steps"]
    if whole and not changed and not anew:
        return f"done before: {found.step} steps; the weights are in {place}. To train anew name another --output"
    why = f"differs in {', '.join(changed[:5])}" if changed else f"ended after step {found.step}"
    raise UserError(
        f"{place} holds what an earlier run has trained, which {why} and left no checkpoint to go on from; this run "
        f"would overwrite it. Name another --output (and --model {place} to train those weights on), or move it away"
    )


def _differences(found: FinalExport, record: RunRecord) -> list[str]:
    """Return the keys in which the configuration or identity of an earlier run differs."""
    then, now = found.run.config, json.loads(json.dumps(record.run["config"]))
    keys = [f"{section}.{key}" for section in _SECTIONS for key in _unequal(then.get(section, {}), now[section])]
    keys = [key for key in keys if key not in _ASIDE]
    return keys + _unequal(found.identity, json.loads(json.dumps(dict(record.identity))))


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]
