"""Configuration parser: merge a YAML file, flags and `section.key=value` words into one `TrainConfig`.

All mistakes are collected and reported together, each with the nearest valid name. Nothing here imports torch, so a
mistake is reported in well under a second. Add a flag to `FLAGS`; the keys themselves are in `config.py`.
"""

import difflib
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from offload_trainer.common.errors import UserError, reason
from offload_trainer.common.safe_files import LimitedYaml, parsed_yaml, read_yaml
from offload_trainer.common.units import is_utf8, shown
from offload_trainer.config import TrainConfig
from offload_trainer.plan.planner import combination_mistakes
from offload_trainer.settings.synonyms import nearest, plain, term_of, value_of


@dataclass(frozen=True)
class Flag:
    """Command-line flag that sets one configuration key."""

    key: str
    metavar: str = ""
    repeat: bool = False  # may be given several times; the values make a list


FLAGS: dict[str, Flag] = {
    "--model": Flag("model.name", "NAME"),
    "--scratch": Flag("model.random_init"),
    "--dtype": Flag("model.dtype", "bf16|fp16|fp32"),
    "--data": Flag("data.path", "PATH", repeat=True),
    "--validation-data": Flag("data.validation_path", "PATH", repeat=True),
    "--tokenizer": Flag("data.tokenizer", "NAME"),
    "--seq-len": Flag("data.seq_len", "N"),
    "--steps": Flag("train.steps", "N"),
    "--epochs": Flag("train.epochs", "N"),
    "--micro-batch": Flag("train.micro_batch_size", "N"),
    "--accumulate": Flag("train.gradient_accumulation_steps", "N"),
    "--seed": Flag("train.seed", "N"),
    "--lr": Flag("optim.lr", "RATE"),
    "--nvme": Flag("placement.nvme", "DIR", repeat=True),
    "--engine": Flag("placement.engine", "auto|tiered|deepspeed"),
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


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which `_Loader` would read as another type, and escapes unprintable text."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


class _Loader(LimitedYaml):
    """YAML loader in which 1e-4 is a number, `off` is text, and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in sorted(key for key, times in keys.items() if times > 1):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    letter: [one for one in resolvers if not one[0].endswith((":timestamp", ":bool"))]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


@dataclass
class _Draft:
    """Configuration under construction: nested plain values, and the mistakes found so far."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)  # list keys whose values from the file a flag has replaced
    worded: set[str] = field(default_factory=set)  # keys set on the command line

    def put(self, key: str, text: str, *, spelled: str) -> None:
        """Set one key from its text, parsed as YAML unless the key's type is text. `spelled`: as the user wrote it."""
        self.worded.add(key)
        section, _, name = key.partition(".")
        annotation: Any = all_keys()[key].annotation if key in all_keys() else None
        overrides = section == "model" and name.startswith("overrides.") and name != "overrides."
        if annotation is None and not overrides:
            self.mistakes.append(_no_key(spelled, key, text))
            return
        value: Any = text
        if annotation is str:
            if (here := value_of(key, text)) and not Path(text).exists():
                self.mistakes.append(f"{key}: {text!r}: no such path; use {here}")
        else:
            try:
                value = parsed_yaml(text, _Loader)
            except ValueError as error:
                if text[:1] + text[-1:] in ("[]", "{}", '""', "''"):
                    self.mistakes.append(f"{spelled}: {error}")
                    return
        if overrides:
            name, _, inner = name.partition(".")
            self.values.setdefault(section, {}).setdefault(name, {})[inner] = value
            return
        if get_origin(annotation) is tuple and not isinstance(value, list):
            value = [text if str in get_args(annotation) else value]
        self.values.setdefault(section, {})[name] = value


def _matching(given: Any) -> list[Any]:
    """Return the files that match a pattern such as `books/*.txt`; anything else, or one without matches, unchanged."""
    path = Path(given).expanduser() if isinstance(given, str) and any(letter in given for letter in "*?[") else None
    found = [] if path is None or path.exists() else sorted(glob.glob(str(path), recursive=True))
    return list(found) or [given]


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Return the schema of each key by its name, `section.key`."""
    models: dict[str, Any] = {section: info.annotation for section, info in TrainConfig.model_fields.items()}
    return {f"{section}.{name}": key for section, model in models.items() for name, key in model.model_fields.items()}


def _parts(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal or not get_args(annotation):
        yield from get_args(annotation) or [annotation]
    else:
        for inner in get_args(annotation):
            yield from _parts(inner)


def literals_of(annotation: Any) -> Iterator[str]:
    """Yield the literal values that a type allows."""
    for part in _parts(annotation):
        if part is bool:
            yield from ("true", "false")
        elif isinstance(part, str | int):
            yield str(part)


def _no_key(spelled: str, key: str, text: str | None) -> str:
    return f"{spelled}: unknown key{_hint(plain(key), text, as_flag=False)}"


def _hint(word: str, text: str | None, *, as_flag: bool) -> str:
    """Return the equivalent of another trainer's word, or the name that the word misspells; "" if there is neither."""
    # The last parts of a dotted word come first, since `optimizer.lr` is a learning rate.
    parts, leaves = word.split("."), {key.rpartition(".")[2] for key in all_keys()}
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        if equivalent := _other_name(end, text, as_flag=as_flag):
            return f"; {equivalent}"
        if same := [key for key in all_keys() if key.rpartition(".")[2] == end]:
            if as_flag and len(same) == 1:
                return f"; use {_written(same[0], text, as_flag=True)}"
            closest = difflib.get_close_matches(word, same, n=len(same) if len(parts) == 1 else 1, cutoff=0)
            return f"; did you mean {' or '.join(_name(key, as_flag=as_flag) for key in closest)}?"
    for part in reversed(parts[:-1]):
        if part not in TrainConfig.model_fields and (equivalent := _other_name(part, None, as_flag=as_flag)):
            return f"; {equivalent}"
    near = nearest(parts[-1], [*leaves, *TrainConfig.model_fields, *(FLAGS if as_flag else ())])
    if near is None:
        return ""
    if near in leaves:
        same = [key for key in all_keys() if key.endswith(f".{near}")]
        near = _name(difflib.get_close_matches(word, same, n=1, cutoff=0)[0], as_flag=as_flag)
    equivalent = _other_name(near, text, as_flag=as_flag) if term_of(near) else ""
    return f"; did you mean {near}?" + (f" {equivalent[0].upper()}{equivalent[1:]}" if equivalent else "")


def _other_name(word: str, text: str | None, *, as_flag: bool) -> str:
    """Return the key and value equivalent to another trainer's word and its value; "" for an unknown word."""
    if (term := term_of(word)) is None:
        return ""
    key, fixed, value = term.here.partition("=")
    if not key:
        return term.note
    if fixed and text is not None and plain(text) in ("false", "no", "off", "0", "none"):
        if value not in ("on", "true"):
            default = all_keys()[key].get_default()
            return f"use {_written(key, None, as_flag=as_flag)}" if value == default else "leave it out"
        value = "off" if value == "on" else "false"
    elif not fixed:
        instead = None if text is None else value_of(key, text)
        value = "" if term.note else instead or text or ""
        if "=" in value and value == instead:  # a replacement of the key too
            key, _, value = value.partition("=")
    written = _written(key, value if value and _is_allowed(key, value) else None, as_flag=as_flag)
    return f"use {written}" + (f" ({term.note})" if term.note else "")


def _name(key: str, *, as_flag: bool) -> str:
    return next((name for name, flag in FLAGS.items() if as_flag and flag.key == key), key)


def _written(key: str, value: str | None, *, as_flag: bool) -> str:
    """Return how to set a key on the command line: its flag if `as_flag` and it has one, else `section.key=value`."""
    if flag := FLAGS.get(_name(key, as_flag=as_flag)):
        given = quote(value) if value else flag.metavar
        return f"{_name(key, as_flag=True)} {given}" if flag.metavar else _name(key, as_flag=True)
    engine = " --engine deepspeed" if key.startswith("deepspeed.") else ""
    kind: Any = all_keys()[key].annotation if key in all_keys() else str
    parts = list(_parts(kind))
    open_ended = ["N"] if int in parts or float in parts else ["TEXT"] if str in parts else []
    choices = "|".join(dict.fromkeys([*open_ended, *literals_of(kind)]))  # `off|forward|backward`, `N|auto`, `TEXT`
    return f"{key}={choices if value is None else quote(value)}{engine}"


def _is_allowed(key: str, text: str) -> bool:
    draft = _Draft()
    draft.put(key, text, spelled=key)
    with suppress(ValidationError):
        TrainConfig.model_validate_json(json.dumps(draft.values, default=str))
        return not draft.mistakes
    return False


_TEXT = (".txt", ".md", ".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".bin", ".gz", ".bz2", ".xz", ".zst")


def _misplaced(word: str) -> str:
    """Return advice for a path given in place of a configuration file; "" if it may be a configuration."""
    path = Path(word).expanduser()
    if path.suffix in _TEXT or any(letter in word for letter in "*?["):
        return f"text to train on is named by a flag: --data {quote(word)}"
    if path.suffix == ".py":
        return "scripts are run by Python and use the library: docs/library.md"
    if not os.path.exists(path) and "/" in word and path.suffix not in (".yaml", ".yml", ".json"):
        return "no such file; a model or text is named by a flag: --model NAME, --data PATH"
    if not os.path.isdir(path):
        return ""
    if (path / "config.yaml").exists():
        return f"a run's configuration is {path / 'config.yaml'}"
    flag, what = ("--model", "a model") if (path / "config.json").exists() else ("--data", "text to train on")
    return f"{what} is named by a flag: {flag} {quote(word)}"


def file_hint(path: Path) -> str:
    """Return a question that names the configuration whose name is closest to a missing one's; "" if none is."""
    known = [] if os.path.exists(path) else [found.name for found in path.parent.glob("*.y*ml")]
    near = difflib.get_close_matches(path.name, known, n=1, cutoff=0.6)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _read_file(path: Path, draft: _Draft) -> None:
    try:
        content = read_yaml(path, _Loader)
    except (OSError, ValueError) as error:
        draft.mistakes.append(f"{path}: {reason(error)}{file_hint(path)}")
        return
    if content is None:
        return
    if not isinstance(content, dict):
        draft.mistakes.append(f"{path}: expected sections such as `optim:`, found {type(content).__name__}")
        return
    for section, values in content.items():
        if section not in TrainConfig.model_fields:  # perhaps a flat key or a section of another trainer
            near = nearest(str(section), TrainConfig.model_fields) if isinstance(values, dict) else None
            for key, value in _flat({section: None if near in TrainConfig.model_fields else values}):
                text = None if value is None or isinstance(value, list | dict) else str(value)
                draft.mistakes.append(_no_key(f"{path}: {key}", key, text))
        elif values is not None and not isinstance(values, dict):
            draft.mistakes.append(f"{path}: {section} must hold keys, found {values!r}")
        else:
            draft.values[section] = dict(values or {})


def _flat(content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        inside = isinstance(value, dict) and value != {}
        yield from _flat(value, f"{prefix}{name}.") if inside else [(f"{prefix}{name}", value)]


def _more_values(queue: list[str]) -> list[str]:
    """Return the words after a repeatable flag's first value that are further values of it."""
    others = (".yaml", ".yml")
    return list(takewhile(lambda word: not (word.startswith("-") or "=" in word or word.endswith(others)), queue))


def _apply_words(words: list[str], draft: _Draft) -> None:
    """Apply flags and overrides to the draft in order; steps or epochs of the file go if the words have the other."""
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, text = word.partition("=")
        flag = FLAGS.get(name)
        if equals and not word.startswith("-"):
            draft.put(name, text, spelled=word)
        elif not word.startswith("-"):
            first = "a configuration file is the first word" if word.endswith((".yaml", ".yml")) else ""
            what = _misplaced(word) or first or "expected section.key=value or a flag"
            draft.mistakes.append(f"{word}: {what}")
        elif flag is None:
            # What follows an unknown flag is most likely its value.
            follows = not equals and queue and not queue[0].startswith("-") and "=" not in queue[0]
            given = queue.pop(0) if follows else text if equals else None
            key = plain(name)
            if key in all_keys():
                problem = f"a key is written without dashes: {_written(key, given, as_flag=False)}"
            else:
                problem = f"unknown flag{_hint(key, given, as_flag=True)}"
            draft.mistakes.append(f"{name}: {problem}")
        elif not flag.metavar:
            draft.put(flag.key, text if equals else "true", spelled=word)
        elif not equals and (not queue or queue[0].startswith("--")):
            draft.mistakes.append(f"{name}: needs a value ({flag.metavar})")
        else:
            value = text if equals else queue.pop(0)
            if flag.repeat:
                more = [] if equals else _more_values(queue)
                del queue[: len(more)]
                section, _, key = flag.key.partition(".")
                values = draft.values.setdefault(section, {})
                values[key] = [*(values[key] if flag.key in draft.repeated else ()), value, *more]
                draft.repeated.add(flag.key)
            else:
                draft.put(flag.key, value, spelled=name)
    train = draft.values.get("train", {})
    steps, epochs = "train.steps" in draft.worded, "train.epochs" in draft.worded
    if epochs and not steps and train.get("epochs", "auto") != "auto":
        train.pop("steps", None)
    elif steps and not epochs:
        train.pop("epochs", None)


_COMPLAINTS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_COMPLAINTS |= {"tuple": "a list", "list": "a list", "Field required": "a list of all its values"}
_COMPLAINTS |= {"dictionary": "keys with values"}


def _validation_mistakes(error: ValidationError) -> Iterator[str]:
    """Yield one message per invalid key, merging pydantic's errors for the branches of a union."""
    seen: dict[str, list[str]] = {}
    given: dict[str, Any] = {}
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:2])
        if item["type"] == "extra_forbidden":
            yield _no_key(key, key, str(item["input"]))
            continue
        complaint = item["msg"].removeprefix("Input should be ").removeprefix("a valid ").removeprefix("Value error, ")
        seen.setdefault(key, []).append(_COMPLAINTS.get(complaint, complaint))
        given.setdefault(key, item["input"])
    for key, complaints in seen.items():
        wanted = " or ".join(dict.fromkeys(complaints))
        if here := value_of(key, given[key]):
            wanted = f"{wanted}; use {here}"
        yield f"{key}: {given[key]!r} is not allowed; it should be {wanted}"


def load_config(words: list[str], *, drives: Sequence[str] | None = None) -> TrainConfig:
    """Parse ``[CONFIG.yaml] [flags] [section.key=value ...]`` into a validated configuration.

    `drives`: the directories of `placement.nvme` unless a word gives some; the file's are of another machine. Raises
    UserError that lists all mistakes, each with a suggestion if there is one.
    """
    refuse_unwritable(words)
    draft = _Draft()
    rest = list(words)
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        path = rest.pop(0)
        if what := _misplaced(path):
            draft.mistakes.append(f"{path}: a configuration ends in .yaml; {what}")
            rest = rest[len(_more_values(rest)) :]
        else:
            _read_file(Path(path), draft)
    _apply_words(rest, draft)
    if drives is not None and "placement.nvme" not in draft.worded | draft.repeated:
        draft.values.setdefault("placement", {})["nvme"] = list(drives)
    data = draft.values.get("data", {})
    for name in ("path", "validation_path"):
        if isinstance(given := data.get(name), list):
            data[name] = [place for each in given for place in _matching(each)]
    return validated(draft.values, draft.mistakes)


def with_words(config: TrainConfig, words: str) -> TrainConfig:
    """Return the configuration with more words of the command line, which spaces divide, after its own.

    Raises UserError that lists all mistakes.
    """
    draft = _Draft(config.model_dump(mode="json", exclude_unset=True))
    _apply_words(words.split(), draft)
    return validated(draft.values, draft.mistakes)


def validated(values: dict[str, dict[str, Any]], mistakes: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration with these values, by section and name.

    Raises UserError that lists all mistakes, those already found first.
    """
    found = list(mistakes)
    try:
        # Strict validation accepts a list for a tuple only when the input is JSON.
        config = TrainConfig.model_validate_json(json.dumps(values, default=str))
        found.extend(combination_mistakes(config))
    except ValidationError as error:
        found.extend(_validation_mistakes(error))
    if found:
        plural = "mistake" if len(found) == 1 else "mistakes"
        listed = "\n".join(f"  - {mistake}" for mistake in found)
        raise UserError(shown(f"{len(found)} {plural} in the configuration:\n{listed}"))
    return config


def refuse_unwritable(words: list[str]) -> None:
    """Raise UserError if a word is not valid UTF-8, because it could not be written to a file."""
    if broken := [word for word in words if not is_utf8(word)]:
        raise UserError(f"{shown(broken[0])}: not UTF-8, as the files that are written must be; use another name")


def dump_config(config: TrainConfig) -> str:
    """Return the configuration as YAML, which `load_config` reads back to an equal one."""
    values = config.model_dump(mode="json")
    if config.train.epochs != "auto":  # it determines the number of steps
        del values["train"]["steps"]
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
