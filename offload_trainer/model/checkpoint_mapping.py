"""Map checkpoint keys and layouts to a model's parameters and back by transformers' conversion rules, group by group.

    keys of files       ──loading_groups──>  Group ...  ──convert──>  parameters under the model's names
    model's parameters  ──saved_groups────>  Group ...  ──convert──>  tensors in the hub's layout

transformers has rules for each architecture that rename, merge or split tensors (experts are saved separately and fused
in the model). It applies them to a whole model. This module converts one group at a time in bounded memory, and tries
each conversion on meta tensors first, so that names and shapes are known before any data is read.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, dot_natural_key, rename_source_key

from offload_trainer.errors import UserError
from offload_trainer.model.init_weights import meta_model
from offload_trainer.safe_files import one_line, read_back, refuse_pipes, shown

_MOST_LAYERS = 10_000  # each is a module; models of 1,000 have been published

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together; most groups have one source and one result."""

    sources: tuple[str, ...]
    convert: Callable[[Read], dict[str, torch.Tensor]]  # reads each source once

    def shapes(self, sources: Shapes) -> dict[str, tuple[int, ...]]:
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
            raise UserError(f"{where}: {shown(str(key))} is {value}, and at most {_MOST_LAYERS} layers are planned")


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
    used = next((pattern for _, pattern in members if pattern is not None), None)
    if used is None:
        return Group(sources, lambda read: {rename(first): read(sources[0])})
    converter = next(c for c in reversed(converters) if used in c.source_patterns)

    def convert(read: Read) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(converter)  # a converter accumulates state
        for source, pattern in members:
            rule.add_tensor(first, source, pattern, read(source))
        made = rule.convert(first, model=model, config=getattr(model, "config", None))
        return {rename(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

    return Group(sources, convert)
