"""Reading of pretrained safetensors weights as (name, tensor), one tensor or one group of merged tensors at a time.

Keys in the files may lack or have the body's prefix (`h.0...` for `transformer.h.0...`), use older names, or separate
what the model fuses; `checkpoint_mapping` converts them. Tied weights may be present twice, or under either name. All
keys that do not fit are reported together before any data is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import with_config
from torch import nn
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.checkpoint_mapping import Group, loading_groups
from offload_trainer.model.init_weights import NamedTensor, first_names, tied_names
from offload_trainer.safe_files import LENIENT, FileName, is_there, read_back
from offload_trainer.storage.tensorfile import TensorFileReader, describe_invalid_values


@with_config(LENIENT)
@dataclass(frozen=True)
class ShardIndex:
    """The content of a model.safetensors.index.json."""

    weight_map: dict[str, FileName]


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors shards of a model directory. Raises UserError if there are none or one is missing."""
    index = directory / "model.safetensors.index.json"
    if is_there(index):
        fix = "It is no index of shards; save the weights again, or download them again"
        names = sorted(set(read_back(index, ShardIndex, links=True, fix=fix).weight_map.values()))
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


@dataclass(frozen=True)
class _Match:
    """The assignment of tensors in files to a model's parameters and buffers."""

    places: dict[str, Path]  # the file of each key
    groups: list[tuple[Group, list[str]]]  # each with the names of the parameters that it sets
    names: dict[str, str]  # name that a group produces -> parameter that it sets; other results are not used


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict contains, by name, without state_dict(), which a session replaces."""
    return {
        f"{owner}.{leaf}" if owner else leaf: buffer
        for owner, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf not in module._non_persistent_buffers_set
    }


@dataclass(frozen=True)
class OpenedWeights:
    """Open weight files of a model: parameters and saved buffers in their files' dtypes.

    They can be read repeatedly and in any order.
    """

    directory: Path
    parameters: Set[str]  # names; tied parameters have one
    buffers: Set[str]  # names of buffers that are saved with the weights
    match: _Match
    files: Mapping[Path, TensorFileReader]

    def weights(self) -> Iterator[NamedTensor]:
        """Yield every parameter. Raises UserError for a weight with a NaN or an infinity."""
        for name, tensor in self.each(self.parameters):
            if wrong := describe_invalid_values(tensor):
                raise UserError(f"{self.directory}: {name}: {wrong}: no training can begin from that; mend the weights")
            yield name, tensor

    def order(self) -> list[str]:
        """Return the names in the order of `weights`."""
        return [name for _, names in self.match.groups for name in names if name in self.parameters]

    def each(self, wanted: Set[str]) -> Iterator[NamedTensor]:
        """Yield the tensors in `wanted` in the order of the files' keys.

        A group of tensors that is merged or split is read once.
        """
        for group, names in self.match.groups:
            if not wanted.isdisjoint(names):
                yield from ((name, tensor) for name, tensor in self._made(group) if name in wanted)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor by its name in the model."""
        group = next(group for group, names in self.match.groups if name in names)
        return next(tensor for made, tensor in self._made(group) if made == name)

    def _made(self, group: Group) -> Iterator[NamedTensor]:
        made = group.convert(lambda key: self.files[self.match.places[key]].read(key))
        return ((self.match.names[given], tensor) for given, tensor in made.items() if given in self.match.names)


@contextmanager
def opened_weights(directory: Path, model: PreTrainedModel) -> Iterator[OpenedWeights]:
    """Open a directory's weights under the names of `model`, which may be on the meta device.

    Raises UserError for weights that do not fit.
    """
    match = match_weights(directory, model)
    parameters = {name for name, _ in model.named_parameters()}
    # A buffer of two modules is saved under one name.
    buffers = {name for name, _ in model.named_buffers()} & persistent_buffers(model).keys()
    with ExitStack() as stack:
        files = {path: stack.enter_context(TensorFileReader(path)) for path in set(match.places.values())}
        yield OpenedWeights(directory, parameters, buffers, match, files)


def match_weights(directory: Path, model: PreTrainedModel) -> _Match:
    """Read the files' headers and match keys to parameters. Raises UserError naming all that does not fit."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, Path] = {}
    for path in checkpoint_files(directory):
        with TensorFileReader(path) as file:
            shapes |= {key: entry.shape for key, entry in file.entries.items()}
            places |= dict.fromkeys(file.entries, path)
    groups, unexpected = loading_groups(list(shapes), model)
    kept = dict(model.named_parameters()) | persistent_buffers(model)
    expected = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    made = [group.shapes(shapes) for group in groups]
    given = {name: shape for each in made for name, shape in each.items()}
    names = {name: name for name in given if name in expected}
    names |= {
        other: name
        for other, name in first_names(model).items()
        if other in given and name in expected and name not in given
    }
    misshapen = [
        f"{name} is {given[other]}, the model wants {expected[name]}"
        for other, name in names.items()
        if given[other] != expected[name]
    ]
    problems = {
        "missing": [name for name in expected if name not in names.values()],
        "unexpected": [key for key in unexpected if not _passed_over(key, model)],
        "misshapen": misshapen,
    }
    lines = [f"{title}: {', '.join(found)}" for title, found in problems.items() if found]
    if lines:
        raise UserError(f"{directory}: the weights do not fit the model\n  " + "\n  ".join(lines))
    _refuse_other_heads(directory, model, given=set(given), places=places)
    sets = [[names[name] for name in each if name in names] for each in made]
    return _Match(places, [(group, each) for group, each in zip(groups, sets, strict=True) if each], names)


def _refuse_other_heads(directory: Path, model: PreTrainedModel, *, given: set[str], places: dict[str, Path]) -> None:
    """Raise UserError if a tied weight is present under both names with different values.

    transformers would not tie the two.
    """
    for other, name in model.all_tied_weights_keys.items():
        if not {other, name} <= given or not {other, name} <= places.keys():
            continue
        with TensorFileReader(places[other]) as one, TensorFileReader(places[name]) as two:
            if not one.same(other, two, name):
                raise UserError(
                    f"{directory}: {other} and {name} hold different values, and config.json ties them; set "
                    "tie_word_embeddings to false there to train both"
                )


def _passed_over(key: str, model: PreTrainedModel) -> bool:
    """Return whether transformers ignores this key too.

    Such keys are non-persistent buffers, other names of tied weights, and leftovers of older versions.
    """
    silent = tied_names(model) | {name for name, _ in model.named_buffers()} - persistent_buffers(model).keys()
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    spellings = (key, f"{model.base_model_prefix}.{key}")
    return any(s in silent or any(pattern.search(s) for pattern in ignored) for s in spellings)


def as_parameter(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in the run's dtype. Raises UserError for values that overflow fp16."""
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        raise UserError(f"a weight of {tensor.abs().max().item():.3g} does not fit fp16 (65504); use --dtype bf16")
    return cast
