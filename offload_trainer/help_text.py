"""Text of `--help` for the program and each command, and parsing of the commands and their own switches.

Add or change a command's help here. Flags that stand for configuration keys are in `settings.FLAGS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS
from offload_trainer.settings import FLAGS, describe_key, refuse_unwritable
from offload_trainer.synonyms import command_of, nearest
from offload_trainer.units import parse_bytes, shown

_CONFIG = "[CONFIG.yaml] [flags] [section.key=value ...]"

_DRAWING = (
    ("--tokens N", "at most so many are drawn; 100 otherwise"),
    ("--temperature X", "0 always takes the likeliest token; 0.8 otherwise"),
    ("--seed N", "the same seed gives the same text; 0 otherwise"),
)
_SOURCE = (
    "SOURCE is a run directory (its newest checkpoint), a checkpoint, or an export's directory. It runs on the CPU.\n"
    "Weights of a run that take more than half of the free memory are read anew for each token."
)

# name: (summary in one line, usage, its own switches, further text)
_COMMANDS: dict[str, tuple[str, str, tuple[tuple[str, str], ...], str]] = {
    "train": (
        "train; the word itself may be left out",
        _CONFIG,
        (
            ("--dry-run", "plan, print, and stop before anything is written"),
            ("--print-config", "print the complete configuration as YAML and stop"),
        ),
        "The same command again goes on from the newest checkpoint in --output.",
    ),
    "plan": (
        "say what would be where and how long a step takes",
        _CONFIG,
        (
            ("--json", "print JSON"),
            (
                "--machine NAME|FILE.json",
                "plan for another machine: one that comes with the package, or what `bench --json` printed",
            ),
            ("--nodes K[,K...]", "for K of them, with --gpus ranks on each; several K: weak scaling, a line each"),
            ("--parallel", "compare the ways to divide a step over the ranks: ZeRO, tensor, sequence, pipeline"),
        ),
        "Nothing is written. 0: it fits; 2: it does not.",
    ),
    "bench": (
        "time this machine and each --nvme, for later plans",
        _CONFIG,
        (("--json", "print JSON"), ("--drive-gigabytes N", "gigabytes that each drive is timed with")),
        "What was timed is kept in the cache directory, and every later plan here takes it. Links between GPUs, or "
        "with --gpus N between ranks on the CPU, are timed too.",
    ),
    "tune": (
        "short real runs around the plan; keeps the fastest",
        _CONFIG,
        (
            ("--json", "print JSON"),
            ("--write FILE.yaml", "where the fastest configuration goes; tuned.yaml otherwise"),
            ("--trial-steps N", "steps of each trial; 6 otherwise"),
        ),
        "",
    ),
    "doctor": (
        "check all that a run needs, each failure with its fix",
        _CONFIG,
        (("--json", "print JSON"),),
        "1: something is missing.",
    ),
    "prepare": ("tokenise the data into the cache", _CONFIG, (), "A run does that by itself."),
    "export": (
        "a run's or a checkpoint's weights as a Hugging Face directory, or as one GGUF file (extra: gguf)",
        "SOURCE DEST",
        (
            ("--dtype NAME", "fp16, bf16 or fp32; for a .gguf file fp16, fp32 or q8_0; fp16 otherwise"),
            ("--max-shard-size SIZE", "largest file of a directory, such as 500MB; 5GB otherwise"),
            ("--check", "read every header back, and compare a sample of the tensors"),
            (
                "--mixed",
                "take a run's page files although it died within an update: some weights are a step further than "
                "others; without it such files are refused",
            ),
        ),
        "SOURCE is a run directory (its newest checkpoint), a checkpoint, or what a dead run left on a drive.\n"
        "A DEST that ends in .gguf is one file for llama.cpp; its card is DEST.md.",
    ),
    "sample": (
        "go on with a text, by what a run has saved",
        "SOURCE",
        (("--prompt TEXT", "what is gone on with; the model begins a text otherwise"), *_DRAWING),
        _SOURCE,
    ),
    "chat": (
        "talk with what a run has saved: a line in, an answer out",
        "SOURCE",
        _DRAWING,
        f"Lines are read until the end of the input. {_SOURCE}",
    ),
    "runs": (
        "list runs: how far each is, its losses, and whether it can go on",
        "[DIR]",
        (("--json", "print JSON"),),
        "DIR is looked through at any depth; runs otherwise.",
    ),
    "report": (
        "compare runs: what differs between them, losses, seconds, memory",
        "RUN [RUN...]",
        (("--json", "print JSON"), ("--html FILE.html", "also write a page, with the losses in one chart")),
        "RUN is a run directory; of one that goes on, what it has done so far.",
    ),
    "init": (
        "ask for a model, a text and a drive, and write a configuration with its plan",
        _CONFIG,
        (("--write FILE.yaml", "where it goes; train.yaml otherwise"),),
        "What a flag or a key says is not asked for. 2: the plan does not fit, and nothing is written.",
    ),
    "ls": (
        "list the recipes that come with the package: what each is for and needs",
        "",
        (("--json", "print JSON"),),
        "",
    ),
    "cp": (
        "copy a recipe, to change and to train with",
        "NAME [DEST]",
        (),
        "DEST is a file or a directory; here under its own name otherwise. Nothing is overwritten.",
    ),
    "completion": (
        "print what makes a shell complete commands, flags, keys and their values",
        "bash|zsh",
        (),
        "In ~/.bashrc or ~/.zshrc: source <(offload-train completion bash), or zsh.",
    ),
}

# Flags shown in a command's help. All other flags are accepted too, so that the words of one command fit the others.
_DATA_FLAGS = ("--model", "--scratch", "--data", "--validation-data", "--tokenizer", "--seq-len")
_SIZE_FLAGS = tuple(
    name for name in FLAGS if name not in ("--validation-data", "--seed", "--lr", "--resume", "--force")
)
_FLAGS_OF = {
    "train": tuple(FLAGS),
    "plan": tuple(name for name in _SIZE_FLAGS if name not in ("--steps", "--epochs")),
    "bench": ("--nvme", "--dtype", "--gpus", "--output"),
    "tune": tuple(name for name in _SIZE_FLAGS if name not in ("--steps", "--epochs", "--save-every")),
    "doctor": ("--model", "--scratch", "--nvme", "--engine", "--gpus", "--output"),
    "prepare": _DATA_FLAGS,
    "init": ("--model", "--scratch", "--data", "--seq-len", "--steps", "--epochs", "--nvme", "--output"),
}

_START = """\
Trains every parameter of a causal language model, its optimizer state in RAM or on a drive.
`offload-train --nvme DIR` alone trains a small model on the text that ships with the package.
"""


def help_text(command: str | None = None) -> str:
    """Return the help of one command, or of the program if `command` is None."""
    if command is None:
        lines = [f"offload-train {_CONFIG}", ""]
        lines += [f"offload-train {name:<12}{told}" for name, (told, *_) in _COMMANDS.items()]
        lines += ["", _START, "`offload-train COMMAND --help` shows one command with its flags, --version the version."]
        return "\n".join([*lines, "", *_flags(tuple(FLAGS)), "", _REST])
    told, words, switches, more = _COMMANDS[command]
    lines = [f"offload-train {command} {words}".rstrip(), "", f"{told[0].upper()}{told[1:]}."]
    lines += ["", *(_entry(name, what) for name, what in switches)] if switches else []
    lines += ["", more] if more else []
    if not takes_keys(command):
        return "\n".join(lines)
    flags = _FLAGS_OF[command]
    others = [] if len(flags) == len(FLAGS) else ["The other flags of `train` may stand too, so that its words suit."]
    return "\n".join([*lines, "", *_flags(flags), "", *others, _REST])


_REST = "Every other key is section.key=value; docs/config.md lists them all."


def _flags(names: tuple[str, ...]) -> list[str]:
    entries = [_entry(f"{name} {FLAGS[name].metavar}".rstrip(), describe_key(FLAGS[name].key)) for name in names]
    return ["flags, each a short spelling of a key:", *entries]


def flags_of(command: str) -> tuple[str, ...]:
    """Return the configuration flags shown in a command's help; empty for a command without configuration."""
    return _FLAGS_OF.get(command, ())


def _entry(name: str, what: str) -> str:
    """Return one line of help, with at least two spaces between the name and its description."""
    return f"  {name:<36}  {what}"


def command_names() -> list[str]:
    """Return the names of all commands in the order of `--help`."""
    return list(_COMMANDS)


def switches_of(command: str) -> dict[str, bool]:
    """Return a command's own flags, each with True if it takes a value."""
    return {name: bool(value) for name, _, value in (told.partition(" ") for told, _ in _COMMANDS[command][2])}


def takes_keys(command: str) -> bool:
    """Return True if the words after the command are a configuration."""
    return _COMMANDS[command][1] == _CONFIG


def take_command(words: list[str]) -> str | None:
    """Remove the command from the front of `words` and return it; None stands for `train`, whose name is optional.

    Raises UserError if the first word is neither a command nor an existing file and does not look like a path.
    """
    if not words or words[0].startswith("-") or "=" in words[0]:
        return None
    if words[0] in _COMMANDS:
        return words.pop(0)
    if Path(words[0]).exists() or "." in words[0] or "/" in words[0]:
        return None
    raise UserError(f"{words[0]}: neither a command ({', '.join(_COMMANDS)}) nor a configuration file{_hint(words[0])}")


def _hint(word: str) -> str:
    """Return a suggestion for an unknown command, to append to an error message; "" if nothing is close."""
    if word in PRESETS:
        return f"; a model is named by a flag: --model {word}"
    if known := command_of(word):
        command, note = known
        here = f"here it is `offload-train {command}`" if command else ""
        return "; " + (f"{here} ({note})" if here and note else here or note)
    near = nearest(word, _COMMANDS)
    return f"; did you mean {near}?" if near in _COMMANDS else ""


def take_switches(words: list[str], *names: str) -> set[str]:
    """Remove the switches `names` from `words` and return those that were present."""
    found = {name for name in names if name in words}
    words[:] = [word for word in words if word not in found]
    return found


def take_value(words: list[str], name: str) -> str | None:
    """Remove the flag `name` and its value from `words`; return the value, or None if the flag is absent.

    Raises UserError if the value is missing.
    """
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != name:
            continue
        if not equals and place + 1 == len(words):
            raise UserError(f"{name} needs a value")
        found = value if equals else words[place + 1]
        del words[place : place + (1 if equals else 2)]
        return found
    return None


def take_count(words: list[str], name: str, *, otherwise: int) -> int:
    text = take_value(words, name)
    if text is None:
        return otherwise
    if not text.isdigit() or not int(text):
        raise UserError(f"{name} {text}: it should be a whole number, at least 1")
    return int(text)


def export_wish(words: list[str]) -> dict[str, Any]:
    """Parse the words after `export` into the arguments of `export.export_command.export`.

    Raises UserError for mistakes.
    """
    refuse_unwritable(words)
    switches = take_switches(words, "--check", "--mixed")
    dtype = take_value(words, "--dtype") or "fp16"
    largest = take_value(words, "--max-shard-size")
    if unknown := [word for word in words if word.startswith("-")]:
        known = "--dtype, --max-shard-size, --check, --mixed"
        raise UserError(f"export: {unknown[0]}: there is no such flag; known: {known}")
    gguf = bool(words) and words[-1].endswith(".gguf")
    dtypes = ("fp16", "fp32", "q8_0") if gguf else ("fp16", "bf16", "fp32")
    if len(words) != 2:
        given = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"export needs SOURCE and DEST; got {given}. `offload-train export --help` says more")
    if dtype not in dtypes:
        what = "a GGUF file" if gguf else "a Hugging Face directory"
        raise UserError(f"--dtype {dtype}: {what} can be had with --dtype {', '.join(dtypes)}")
    if gguf and largest:
        raise UserError("--max-shard-size is for directories of safetensors, and DEST is one GGUF file")
    shard_bytes = parse_bytes(largest or "5GB")
    if not shard_bytes:
        raise UserError(f"--max-shard-size {largest}: a number with a unit, such as 500MB or 5GB")
    return {
        "source": Path(words[0]),
        "destination": Path(words[1]),
        "dtype": dtype,
        "shard_bytes": shard_bytes,
        "check": "--check" in switches,
        "mixed": "--mixed" in switches,
    }
