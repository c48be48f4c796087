"""From a YAML file, flags and `section.key=value` words to one `TrainConfig`, with every mistake at once.

    defaults  <-  CONFIG.yaml  <-  flags and section.key=value, in the order given

Nothing here imports torch: a mistake is answered in well under a second.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from offload_trainer.config import TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.plan.choose import combination_mistakes
from offload_trainer.readback import LimitedYaml, parsed_yaml, read_yaml
from offload_trainer.units import is_utf8, shown


@dataclass(frozen=True)
class Flag:
    """A short spelling of one key on the command line."""

    key: str
    metavar: str = ""
    repeat: bool = False  # may be given several times; the values make a list


FLAGS: dict[str, Flag] = {
    "--model": Flag("model.name", "NAME"),
    "--scratch": Flag("model.scratch"),
    "--dtype": Flag("model.dtype", "bf16|fp16|fp32"),
    "--data": Flag("data.path", "PATH", repeat=True),
    "--validation-data": Flag("data.validation_path", "PATH", repeat=True),
    "--tokenizer": Flag("data.tokenizer", "NAME"),
    "--seq-len": Flag("data.seq_len", "N"),
    "--steps": Flag("train.steps", "N"),
    "--micro-batch": Flag("train.micro_batch", "N"),
    "--accumulate": Flag("train.accumulate", "N"),
    "--seed": Flag("train.seed", "N"),
    "--lr": Flag("optim.lr", "RATE"),
    "--nvme": Flag("placement.nvme", "DIR", repeat=True),
    "--engine": Flag("placement.engine", "auto|tiered|deepspeed|plain"),
    "--params": Flag("placement.params", "auto|gpu|cpu|nvme"),
    "--optimizer": Flag("placement.optimizer", "auto|gpu|cpu|nvme"),
    "--gpu-fraction": Flag("placement.gpu_fraction", "auto|0..1"),
    "--ram-fraction": Flag("placement.ram_fraction", "auto|0..1"),
    "--gpus": Flag("placement.gpus", "N"),
    "--force": Flag("placement.force"),
    "--output": Flag("save.output", "DIR"),
    "--resume": Flag("save.resume", "auto|never|DIR"),
    "--save-every": Flag("save.every", "N"),
}


# What earlier versions knew: a key with what it then was where nothing was said, or a value; and what to do instead.
_GONE_KEYS: dict[str, tuple[Any, str]] = {
    "model.checkpointing_variant": ("auto", "each engine takes the variant of checkpointing that is right there"),
}
_GONE_VALUES = {
    "optim.name=adamw8bit": "8-bit moments are optim.states=8bit; with --engine deepspeed they are bitsandbytes'",
    "optim.kernel=deepspeed": "native and torch are faster; leave it at auto",
}
# What people look for, and nothing carries out yet.
_NOT_YET = {
    "parallel.pipeline": "not carried out yet: docs/pipeline.md tells why; `plan --parallel` says what it would bring",
}


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else than text, and escapes what a line may not hold."""


def _quoted_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _quoted_text)
_TOKENS_OR_ROWS = ("tokens_per_step", "micro_batch", "accumulate")  # the first, or the other two


class _Loader(LimitedYaml):
    """YAML without its surprises: 1e-4 is a number, `off` is a word, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in sorted(key for key, times in keys.items() if times > 1):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool")
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_Dumper.yaml_implicit_resolvers = {
    letter: _Loader.yaml_implicit_resolvers.get(letter, []) + yaml.SafeDumper.yaml_implicit_resolvers.get(letter, [])
    for letter in {**_Loader.yaml_implicit_resolvers, **yaml.SafeDumper.yaml_implicit_resolvers}
}


@dataclass
class _Draft:
    """The wish while it is collected: nested plain values, and what was wrong on the way."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)  # flags that already replaced the file's list
    worded: set[str] = field(default_factory=set)  # keys that the command line gives

    def put(self, key: str, text: str, *, spelled: str) -> None:
        """Set one key from its text. A key of text type takes the text as it stands."""
        self.worded.add(key)
        section, _, name = key.partition(".")
        if key in _GONE_KEYS:
            self.mistakes.append(_gone(spelled, key))
            return
        annotation = annotation_of(section, name)
        if annotation is None and not _overrides_key(section, name):
            self.mistakes.append(_unknown(spelled, key, known=all_keys()))
            return
        value: Any = text
        if annotation is not str:
            try:
                value = parsed_yaml(text, _Loader)
            except ValueError as error:
                if text[:1] + text[-1:] in ("[]", "{}", '""', "''"):
                    self.mistakes.append(f"{spelled}: {error}")
                    return
                value = text
        if _overrides_key(section, name):
            name, _, inner = name.partition(".")
            self.values.setdefault(section, {}).setdefault(name, {})[inner] = value
            return
        if _is_list(annotation) and not isinstance(value, list):
            value = [text if str in get_args(annotation) else value]
        self.values.setdefault(section, {})[name] = value

    def append(self, key: str, text: str) -> None:
        """Add to a list; the first flag starts the list anew."""
        section, _, name = key.partition(".")
        values = self.values.setdefault(section, {})
        if key not in self.repeated:
            values[name] = []
            self.repeated.add(key)
        values[name].append(text)

    def leave_out_what_words_replace(self) -> None:
        """Tokens of a step, or its micro-batch and accumulation: the command line's choice is not beside the file's."""
        train = self.values.get("train", {})
        given = {name for name in _TOKENS_OR_ROWS if f"train.{name}" in self.worded}
        if "tokens_per_step" in given and train["tokens_per_step"] != "auto":
            replaced = set(_TOKENS_OR_ROWS) - given
        else:
            replaced = {"tokens_per_step"} - given if given else set()
        self.values["train"] = {name: value for name, value in train.items() if name not in replaced}


def all_keys() -> Iterator[str]:
    for section, info in TrainConfig.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        yield from (f"{section}.{name}" for name in model.model_fields)


def describe_key(key: str) -> str:
    """What a key means, from the configuration's types."""
    section, _, name = key.partition(".")
    model = TrainConfig.model_fields[section].annotation
    assert isinstance(model, type)
    return str(model.model_fields[name].description)


def annotation_of(section: str, name: str) -> Any:
    """The type of a key; None where there is no such key."""
    info = TrainConfig.model_fields.get(section)
    if info is None or not isinstance(info.annotation, type):
        return None
    found = info.annotation.model_fields.get(name)
    return found.annotation if found else None


def _overrides_key(section: str, name: str) -> bool:
    return section == "model" and name.startswith("overrides.") and len(name) > len("overrides.")


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def _unknown(spelled: str, word: str, *, known: Iterable[str]) -> str:
    if word in _NOT_YET:
        return f"{spelled}: {_NOT_YET[word]}"
    known = list(known)
    # A key in the wrong section is a mistake that nearness of spelling does not find.
    leaf = word.rpartition(".")[2]
    near = [key for key in known if key.rpartition(".")[2] == leaf][:1]
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{spelled}: there is no such key{hint}"


def _gone(spelled: str, key: str) -> str:
    return f"{spelled}: there is no {key} any more: {_GONE_KEYS[key][1]}; leave it out"


def _read_file(path: Path, draft: _Draft) -> None:
    try:
        content = read_yaml(path, _Loader)
    except (OSError, ValueError) as error:
        draft.mistakes.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
        return
    if content is None:
        return
    if not isinstance(content, dict):
        draft.mistakes.append(f"{path}: expected sections such as `optim:`, found {type(content).__name__}")
        return
    for section, values in content.items():
        if section not in TrainConfig.model_fields:
            draft.mistakes.append(_unknown(f"{path}: {section}", str(section), known=TrainConfig.model_fields))
        elif values is not None and not isinstance(values, dict):
            draft.mistakes.append(f"{path}: {section} must hold keys, found {values!r}")
        else:
            draft.values[section] = dict(values or {})
    # A file that an earlier version wrote holds every key.
    for key, (default, _) in _GONE_KEYS.items():
        section, _, name = key.partition(".")
        if draft.values.get(section, {}).pop(name, default) != default:
            draft.mistakes.append(_gone(f"{path}: {key}", key))


def _apply_words(words: list[str], draft: _Draft) -> None:
    """Flags and overrides in the order given. Mistakes are collected, never raised."""
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("-"):
            key, equals, text = word.partition("=")
            if equals:
                draft.put(key, text, spelled=word)
            else:
                draft.mistakes.append(f"{word}: expected section.key=value or a flag")
            continue
        name, equals, text = word.partition("=")
        flag = FLAGS.get(name)
        if flag is None:
            near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.5)
            draft.mistakes.append(f"{name}: there is no such flag" + (f"; did you mean {near[0]}?" if near else ""))
            # What follows an unknown flag is most likely its value.
            if not equals and queue and not queue[0].startswith("-") and "=" not in queue[0]:
                queue.pop(0)
        elif not flag.metavar:
            draft.put(flag.key, text if equals else "true", spelled=word)
        elif not equals and (not queue or queue[0].startswith("--")):
            draft.mistakes.append(f"{name}: needs a value ({flag.metavar})")
        else:
            value = text if equals else queue.pop(0)
            if flag.repeat:
                draft.append(flag.key, value)
            else:
                draft.put(flag.key, value, spelled=name)


def _validation_mistakes(error: ValidationError) -> Iterator[str]:
    """One line a mistake; the several complaints about a union's branches become one."""
    seen: dict[str, list[str]] = {}
    given: dict[str, Any] = {}
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:2])
        if item["type"] == "extra_forbidden":
            yield _unknown(key, key, known=all_keys())
            continue
        complaint = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        seen.setdefault(key, []).append(complaint)
        given.setdefault(key, item["input"])
    for key, complaints in seen.items():
        wanted = " or ".join(dict.fromkeys(complaints))
        if instead := _GONE_VALUES.get(f"{key}={given[key]}"):
            yield f"{key}: there is no {given[key]} any more: {instead}"
            continue
        yield f"{key}: {given[key]!r} is not allowed; it should be {wanted}"


def load_config(words: list[str]) -> TrainConfig:
    """``[CONFIG.yaml] [flags] [section.key=value ...]`` as one validated wish.

    Raises UserError with every mistake, each with the nearest name.
    """
    refuse_unwritable(words)
    draft = _Draft()
    rest = list(words)
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        _read_file(Path(rest.pop(0)), draft)
    _apply_words(rest, draft)
    draft.leave_out_what_words_replace()
    config = None
    try:
        # JSON, because there a list may fill a tuple while everything else stays strict.
        config = TrainConfig.model_validate_json(json.dumps(draft.values, default=str))
    except ValidationError as error:
        draft.mistakes.extend(_validation_mistakes(error))
    if config is not None:
        draft.mistakes.extend(combination_mistakes(config))
    if config is None or draft.mistakes:
        plural = "mistake" if len(draft.mistakes) == 1 else "mistakes"
        listed = "\n".join(f"  - {mistake}" for mistake in draft.mistakes)
        raise UserError(f"{len(draft.mistakes)} {plural} in the configuration:\n{listed}")
    return config


def refuse_unwritable(words: list[str]) -> None:
    """UserError for a word whose bytes are no UTF-8."""
    if broken := [word for word in words if not is_utf8(word)]:
        raise UserError(f"{shown(broken[0])}: not UTF-8, as the files that are written must be; use another name")


def dump_config(config: TrainConfig, *, given_only: bool = False) -> str:
    """The configuration as YAML that `load_config` reads back to an equal one: complete, or what was said of it."""
    values = config.model_dump(mode="json", exclude_unset=given_only)
    if config.train.tokens_per_step != "auto":  # which chooses those two
        for name in ("micro_batch", "accumulate"):
            values["train"].pop(name, None)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
