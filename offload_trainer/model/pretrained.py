"""Reading of pretrained safetensors weights as (name, tensor), one tensor or one group of merged tensors at a time.

Keys in the files may lack or have the body's prefix (`h.0...` for `transformer.h.0...`), use older names, or separate
what the model fuses; `checkpoint_mapping` converts them. Tied weights may be present twice, or under either name. All
weights that do not fit are reported together before any data is read. Unused keys are left out, with a note.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.checkpoint_mapping import Group, loading_groups
from offload_trainer.model.init_weights import NamedTensor, first_names, tied_names
from offload_trainer.safe_files import FileName, is_there, lenient_record, read_back, shown
from offload_trainer.storage.tensorfile import TensorFileReader, describe_invalid_values

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 5  # number of keys named in a note


@lenient_record
class ShardIndex:
    """The content of a model.safetensors.index.json."""

    weight_map: dict[str, FileName]


def checkpoint_files(directory: Path, named: Any = None) -> list[Path]:
    """Return the safetensors files that transformers would read: the single file, else the shards that an index names.

    `named`: what config.json names instead. Raises UserError if there is no such file, it is outside, or lacks a shard.
    """
    outside = not isinstance(named, str) or Path(named).is_absolute() or ".." in Path(named).parts
    if named is not None and (outside or not named.isprintable()):
        raise UserError(f"{directory}: config.json's transformers_weights is {shown(str(named))}, no file in there")
    for name in (named,) if named else (SINGLE, INDEX):
        path = directory / name
        if not is_there(path):
            continue
        if not name.endswith(".index.json"):
            return [path]
        fix = "It is no index of shards; save the weights again, or download them again"
        shards = sorted(set(read_back(path, ShardIndex, links=True, fix=fix).weight_map.values()))
        missing = [shard for shard in shards if not (directory / shard).exists()]
        if missing:
            raise UserError(f"{directory}: {name} names shards that are not there: {', '.join(missing)}")
        return [directory / shard for shard in shards]
    raise UserError(
        f"{directory}: no {named or SINGLE}; add --scratch for random weights, "
        "or convert the weights with transformers' save_pretrained"
    )


@dataclass(frozen=True)
class OpenedWeights:
    """Open weight files: parameters and saved buffers in their files' dtypes, readable repeatedly and in any order."""

    directory: Path
    parameters: Set[str]  # names; tied parameters have one
    buffers: Set[str]  # names of buffers that are saved with the weights
    notes: list[str]  # sentences for the plan on what is not read
    files: Mapping[str, TensorFileReader]  # the file of each key
    # Each with the names of the parameters and buffers that it sets, by the names of its results; others are not used.
    groups: Sequence[tuple[Group, Mapping[str, str]]]

    def weights(self) -> Iterator[NamedTensor]:
        """Yield every parameter. Raises UserError for a weight with a NaN or an infinity."""
        for name, tensor in self.each(self.parameters):
            if wrong := describe_invalid_values(tensor):
                raise UserError(f"{self.directory}: {name}: {wrong}: no training can begin from that; mend the weights")
            yield name, tensor

    def each(self, wanted: Set[str]) -> Iterator[NamedTensor]:
        """Yield the tensors in `wanted` in the order of the files' keys; a group that is converted is read once."""
        for group, names in self.groups:
            if not wanted.isdisjoint(names.values()):
                made = group.convert(lambda key: self.files[key].read(key))
                yield from ((name, made.pop(given)) for given, name in names.items() if name in wanted)
                made.clear()  # before the next group is read

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor by its name in the model."""
        return next(tensor for _, tensor in self.each({name}))


@contextmanager
def opened_weights(directory: Path, model: PreTrainedModel) -> Iterator[OpenedWeights]:
    """Open weights by their names in `model`, which may be meta. Raises UserError that names all that do not fit it."""
    paths = checkpoint_files(directory, getattr(model.config, "transformers_weights", None))
    with ExitStack() as stack:
        files: dict[str, TensorFileReader] = {}
        for path in paths:
            file = stack.enter_context(TensorFileReader(path))
            files |= dict.fromkeys(file.entries, file)
        groups, unexpected = loading_groups(list(files), model)
        shapes = {key: file.entries[key].shape for key, file in files.items()}
        made = [group.shapes(shapes) for group in groups]
        given = {name: shape for each in made for name, shape in each.items()}
        parameters, buffers = dict(model.named_parameters()), persistent_buffers(model)
        expected = {name: tuple(tensor.shape) for name, tensor in {**parameters, **buffers}.items()}
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
        unused = _reported(unexpected, model)
        read = [key for group, each in zip(groups, made, strict=True) for key in group.sources if each.keys() - buffers]
        quantised = [key for key in read if not files[key].entries[key].dtype.is_floating_point]
        if getattr(model.config, "quantization_config", None):
            quantised += unused
        problems = {
            "missing": [name for name in expected if name not in names.values()],
            "misshapen": misshapen,
            "quantised, which is not read here": quantised,
        }
        if any(problems.values()):
            problems["unexpected"] = unused
            lines = [f"{title}: {', '.join(found)}" for title, found in problems.items() if found]
            raise UserError(f"{directory}: the weights do not fit the model\n  " + "\n  ".join(lines))
        for other, name in model.all_tied_weights_keys.items():  # transformers would not tie two of different values
            if {other, name} <= given.keys() & files.keys() and not files[other].same(other, files[name], name):
                raise UserError(
                    f"{directory}: {other} and {name} hold different values, and config.json ties them; set "
                    "tie_word_embeddings to false there to train both"
                )
        notes = []
        if paths == [directory / SINGLE] and is_there(directory / INDEX):
            notes.append(f"weights: from {SINGLE}, as in transformers; the shards of {INDEX} are not read")
        if unused:
            more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
            listing = ", ".join(shown(key) for key in unused[:_NAMED])
            notes.append(
                f"weights: {len(unused)} tensors have no place in {type(model).__name__} and are not read, as in "
                f"transformers, nor exported: {listing}{more}"
            )
        # A buffer of two modules is saved under one name.
        saved = {name for name, _ in model.named_buffers()} & buffers.keys()
        sets = [{one: names[one] for one in each if one in names} for each in made]
        wanted = [(group, each) for group, each in zip(groups, sets, strict=True) if each]
        yield OpenedWeights(directory, parameters.keys(), saved, notes, files, wanted)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict contains, by name, without state_dict(), which a session replaces."""
    return {
        f"{owner}.{leaf}" if owner else leaf: buffer
        for owner, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf not in module._non_persistent_buffers_set
    }


def _reported(keys: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Return the keys that transformers' loader would report as unexpected.

    It says nothing of recomputed buffers, other names of tied weights, and leftovers of older versions.
    """
    silent = tied_names(model) | {name for name, _ in model.named_buffers()} - persistent_buffers(model).keys()
    spellings = {key: {key, f"{model.base_model_prefix}.{key}"} for key in keys}
    left: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set().union(*spellings.values()) - silent)
    model._adjust_missing_and_unexpected_keys(left)
    return [key for key in keys if spellings[key] <= left.unexpected_keys]


def as_parameter(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in the run's dtype. Raises UserError for values that overflow fp16."""
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        raise UserError(f"a weight of {tensor.abs().max().item():.3g} does not fit fp16 (65504); use --dtype bf16")
    return cast
