"""Pretrained weights: configurations and safetensors files, read as (name, tensor) one group of tensors at a time.

Keys in the files may lack or have the body's prefix, use older names, or separate what the model fuses (experts).
transformers has rules for each architecture that rename, merge or split tensors, and applies them to a whole model.
Here one `Group` is converted at a time in bounded memory, forwards to load and backwards to export, and first on meta
tensors: names and shapes are known before any data is read, and all that does not fit is reported together.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, dot_natural_key, rename_source_key

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import FileName, is_there, one_line, quoted, read_back, refuse_pipes
from offload_trainer.model.init_weights import NamedTensor, first_names, meta_model, tied_names
from offload_trainer.storage.tensorfile import TensorFileReader, describe_invalid_values

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 5  # number of keys named in a note
_MOST_LAYERS = 10_000  # each is a module; models of 1,000 have been published

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together; most groups have one source and one result."""

    sources: tuple[str, ...]
    convert: Callable[[Read], dict[str, torch.Tensor]]  # reads each source once

    def shapes(self, sources: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the results."""
        try:
            made = self.convert(lambda name: torch.empty(sources[name], device="meta"))
        except Exception as error:  # transformers' operations validate little, so anything may be raised
            listing = ", ".join(f"{name} {sources[name]}" for name in self.sources)
            raise UserError(f"these weights cannot be merged as the model wants them: {listing} ({error})") from error
        return {name: tuple(tensor.shape) for name, tensor in made.items()}


def loading_groups(keys: Sequence[str], model: PreTrainedModel) -> tuple[list[Group], list[str]]:
    """Return the groups that convert these keys to parameters of `model`, and the keys that match no parameter."""
    renamings, converters = _kinds(get_model_conversion_mapping(model))
    wanted, prefix = dict(model.state_dict()), model.base_model_prefix
    members: dict[str, list[tuple[str, str | None]]] = {}
    unexpected = sorted(keys, key=dot_natural_key)
    # A prefix may be that of another class with the same configuration, such as ShieldGemma 2's classifier.
    for rules in (renamings, [rule for rule in renamings if not isinstance(rule, PrefixChange)]):
        before, tried, unexpected = set(members), unexpected, []
        for key in tried:
            name, pattern = rename_source_key(key, rules, converters, prefix, wanted)
            if name not in wanted:  # a rule may have renamed a correct key, or only the body's prefix is missing
                name, pattern = rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted or name in before or (pattern is None and name in members):
                unexpected.append(key)
            else:
                members.setdefault(name, []).append((key, pattern))
    return [_group(name, found, converters, model) for name, found in members.items()], unexpected


def as_they_are(names: Iterable[str]) -> list[Group]:
    """Return groups that keep each tensor and its name."""
    return [_group(name, [(name, None)]) for name in names]


def saved_groups(names: Sequence[str], directory: Path) -> list[Group]:
    """Return the groups that convert parameters to what `save_pretrained` of a directory's model would write."""
    if "auto_map" in read_model_config(directory):
        # transformers has no rules for a model with custom code, and an export must not run that code.
        return as_they_are(names)
    model = model_in(directory)
    # Prefixes that loading removes inside an inner model, such as `vision_model` in LLaVA's CLIP, are those of
    # checkpoints. Of others it is unknown whether the original weights had them, and transformers reads both forms.
    rules = [
        rule
        for rule in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(rule, PrefixChange)
        or (getattr(rule, "scope_prefix", None) and rule.prefix_to_remove is not None)
    ]
    renamings, converters = _kinds([rule.reverse_transform() for rule in rules[::-1]])
    members: dict[str, list[tuple[str, str | None]]] = {}
    for name in names:
        first, pattern = rename_source_key(name, [], converters)
        members.setdefault(first, []).append((name, pattern))
    return [
        _group(first, found, converters, model, rename=lambda name: rename_source_key(name, renamings, [])[0])
        for first, found in members.items()
    ]


def model_in(directory: Path) -> PreTrainedModel:
    """Return the model that a directory's config.json describes, on the meta device."""
    config = config_in(directory)
    try:
        return meta_model(config)
    except Exception as error:  # transformers' classes validate little, so anything may be raised
        raise UserError(f"{directory / 'config.json'}: transformers makes no model of it: {one_line(error)}") from error


def config_in(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a model directory. Raises UserError if it cannot be read."""
    read_model_config(directory)  # refuse files on which transformers would block or never finish
    refuse_pipes(directory)
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' classes validate in different ways or not at all
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{directory}: this model is Python code of its own, beside its config.json. Read it, and let it run "
                "with model.trust_remote_code=true"
            ) from error
        raise UserError(f"{directory}: {one_line(error)}") from error


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read a config.json. Raises UserError if it cannot be read, or names more layers than can be built."""
    path, fix = directory / "config.json", "It is no model's configuration; save or download it again"
    values = read_back(path, dict[str, Any], links=True, fix=fix)
    refuse_endless(values, str(path))
    return values


def refuse_endless(values: Mapping[Any, Any], where: str) -> None:
    """Raise UserError for a number of layers that transformers would never finish to make modules of."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            refuse_endless(value, where)
        elif str(key).endswith(("layer", "layers")) and isinstance(value, int) and value > _MOST_LAYERS:
            raise UserError(f"{where}: {quoted(str(key))} is {value}, and at most {_MOST_LAYERS} layers are planned")


def _kinds(rules: Sequence[Any]) -> tuple[list[Any], list[WeightConverter]]:
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters


def _group(
    first: str,
    members: Sequence[tuple[str, str | None]],
    converters: Sequence[WeightConverter] = (),
    model: PreTrainedModel | None = None,
    *,
    rename: Callable[[str], str] = str,
) -> Group:
    """Build a group; `members` are (source, converter pattern or None), `first` is the first resulting name."""
    sources = tuple(source for source, _ in members)
    if (used := next((pattern for _, pattern in members if pattern is not None), None)) is None:
        return Group(sources, lambda read: {rename(first): read(sources[0])})
    converter = next(c for c in reversed(converters) if used in c.source_patterns)

    def convert(read: Read) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(converter)  # a converter accumulates state
        for source, pattern in members:
            rule.add_tensor(first, source, pattern, read(source))
        made = rule.convert(first, model=model, config=getattr(model, "config", None))
        return {rename(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

    return Group(sources, convert)


@dataclass(frozen=True)
class ShardIndex:
    """The content of a model.safetensors.index.json."""

    weight_map: dict[str, FileName]


def checkpoint_files(directory: Path, named: Any = None) -> list[Path]:
    """Return the safetensors files that transformers would read: the single file, else the shards that an index names.

    `named`: what config.json names instead. Raises UserError if there is no such file, it is outside, or lacks a shard.
    """
    outside = not isinstance(named, str) or Path(named).is_absolute() or ".." in Path(named).parts
    if named is not None and (outside or not named.isprintable()):
        raise UserError(f"{directory}: config.json's transformers_weights is {quoted(str(named))}, no file in there")
    for name in (named,) if named else (SINGLE, INDEX):
        path = directory / name
        if not is_there(path):
            continue
        if not name.endswith(".index.json"):
            return [path]
        fix = "It is no index of shards; save the weights again, or download them again"
        shards = sorted(set(read_back(path, ShardIndex, links=True, fix=fix).weight_map.values()))
        if missing := [shard for shard in shards if not (directory / shard).exists()]:
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
        firsts = first_names(model).items()
        names |= {other: name for other, name in firsts if other in given and name in expected and name not in given}
        wrong = [(name, given[other]) for other, name in names.items() if given[other] != expected[name]]
        misshapen = [f"{name} is {shape}, the model wants {expected[name]}" for name, shape in wrong]
        unused = _reported(unexpected, model)
        read = [key for group, each in zip(groups, made, strict=True) for key in group.sources if each.keys() - buffers]
        quantised = [key for key in read if not files[key].entries[key].dtype.is_floating_point]
        if getattr(model.config, "quantization_config", None):
            quantised += unused
        missing = [name for name in expected if name not in names.values()]
        problems = {"missing": missing, "misshapen": misshapen, "quantised, which is not read here": quantised}
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
            listing = ", ".join(quoted(key) for key in unused[:_NAMED])
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
