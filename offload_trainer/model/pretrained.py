"""Pretrained weights: safetensors on disk -> (name, tensor), one tensor at a time.

A file's keys may lack or carry the body's prefix (`h.0...` for `transformer.h.0...`); tied weights may be there
twice. Checkpoints that transformers itself converts on loading (experts saved one by one, ...) go through its own
loader, whole in host memory. Everything that does not fit is named at once before anything is read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.initial import NamedTensor, tied_names

logger = logging.getLogger(__name__)


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors shards of a model directory; UserError where there are none or one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise UserError(f"{directory}: {index.name} names shards that are not there: {', '.join(missing)}")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    raise UserError(
        f"{directory}: no model.safetensors; add --scratch for random weights, "
        "or convert the weights with transformers' save_pretrained"
    )


def pretrained_weights(directory: Path, model: PreTrainedModel) -> Iterator[NamedTensor]:
    """Yield (name, tensor in the file's dtype, on the CPU) for every parameter of `model`, tied ones once.

    `model` may be without memory (meta). Raises UserError naming every missing, unexpected and misshapen key.
    """
    places, problems = _match(checkpoint_files(directory), model)
    if problems:
        yield from _converted(directory, model, problems)
        return
    for path, keys in places.items():
        with safe_open(path, framework="pt", device="cpu") as shard:
            for key, name in keys:
                yield name, shard.get_tensor(key)


def _converted(directory: Path, model: PreTrainedModel, problems: list[str]) -> Iterator[NamedTensor]:
    """transformers' own loader, for layouts that it renames or fuses; `problems` if it cannot either."""
    logger.warning(
        "%s: keys differ from the model's, so transformers converts them with all weights in host memory",
        directory,
    )
    loaded, info = type(model).from_pretrained(
        directory, output_loading_info=True, ignore_mismatched_sizes=True, dtype="auto"
    )
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise UserError(f"{directory}: the weights do not fit the model\n  " + "\n  ".join(problems))
    for name, parameter in loaded.named_parameters():
        yield name, parameter.detach()


Places = dict[Path, list[tuple[str, str]]]


def _match(files: list[Path], model: PreTrainedModel) -> tuple[Places, list[str]]:
    """Pairs of (key in the file, parameter's name) for each file, and what does not fit."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    silent = tied_names(model) | {name for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    prefix = f"{model.base_model_prefix}."
    places: Places = {}
    found: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as shard:
            for key in shard.keys():  # noqa: SIM118 - not a dict
                name = next((name for name in (key, prefix + key, key.removeprefix(prefix)) if name in expected), None)
                if name is None or name in found:
                    spellings = (key, prefix + key)
                    if not any(s in silent for s in spellings) and not any(
                        pattern.search(s) for pattern in ignored for s in spellings
                    ):
                        unexpected.append(key)
                    continue
                found.add(name)
                shape = tuple(shard.get_slice(key).get_shape())
                if shape != expected[name]:
                    misshapen.append(f"{key} is {shape}, the model wants {expected[name]}")
                places.setdefault(path, []).append((key, name))
    missing = [name for name in expected if name not in found]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    return places, problems


def _some(names: list[str], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def as_parameter(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in the run's dtype; fp16's overflow is refused rather than trained with."""
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        raise UserError(f"a weight of {tensor.abs().max().item():.3g} does not fit fp16 (65504); use --dtype bf16")
    return cast
