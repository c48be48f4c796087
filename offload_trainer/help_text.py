"""Text of `--help` for the program and each command, and parsing of the commands and their own switches.

Add or change a command's help here. Flags that stand for configuration keys are in `settings.FLAGS`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS
from offload_trainer.settings import FLAGS, describe_key, refuse_unwritable
from offload_trainer.synonyms import command_of, nearest
from offload_trainer.units import parse_bytes, shown

_CONFIG = "[CONFIG.yaml] [flags] [section.key=value ...]"

_DRAWING = (
    ("--tokens N", "generate at most N tokens (default 100)"),
    ("--temperature X", "sampling temperature (default 0.8); 0: always the most likely token"),
    ("--seed N", "random seed (default 0)"),
)
_SOURCE = (
    "SOURCE is a run directory (its newest checkpoint), a checkpoint, or an exported directory. The model runs on the "
    "CPU.\n"
    "If the weights take more than half of the free memory, they are read from the disk for each token."
)

# name: (summary in one line, usage, its own switches, further text)
_COMMANDS: dict[str, tuple[str, str, tuple[tuple[str, str], ...], str]] = {
    "train": (
        "train a model; the default command",
        _CONFIG,
        (
            ("--dry-run", "plan, print, and stop before anything is written"),
            ("--print-config", "print the complete configuration as YAML and stop"),
        ),
        "Run the same command again to resume from the newest checkpoint in --output.",
    ),
    "plan": (
        "show what a run stores where, whether it fits, and how long a step takes",
        _CONFIG,
        (
            ("--json", "print JSON"),
            (
                "--machine NAME|FILE.json",
                "plan for another machine: a known one, such as v100-32gb, or a file that `bench --json` printed",
            ),
            (
                "--nodes K[,K...]",
                "plan for K machines with --gpus ranks each; several K: compare them (weak scaling), one line each",
            ),
            ("--parallel", "compare ways to parallelise a step over the ranks: ZeRO, tensor, sequence"),
        ),
        "Writes nothing. Exit code 0: the run fits; 2: it does not fit, or the configuration is wrong.",
    ),
    "bench": (
        "measure the speed of this machine and each --nvme, for later plans",
        _CONFIG,
        (("--json", "print JSON"), ("--drive-gigabytes N", "gigabytes to write and read on each drive")),
        "The results are saved in the cache directory, and every later plan on this machine uses them. Links between "
        "GPUs, or with --gpus N between ranks on the CPU, are measured too.",
    ),
    "tune": (
        "try settings close to the plan in short real runs, and save the fastest",
        _CONFIG,
        (
            ("--json", "print JSON"),
            ("--write FILE.yaml", "file for the fastest configuration (default tuned.yaml)"),
            ("--trial-steps N", "steps of each trial (default 6)"),
        ),
        "",
    ),
    "doctor": (
        "check everything that a run needs, and say how to fix what fails",
        _CONFIG,
        (("--json", "print JSON"),),
        "Exit code 1: something is missing.",
    ),
    "prepare": (
        "tokenise the data into the cache",
        _CONFIG,
        (),
        "A run does this itself; `prepare` does it ahead of time.",
    ),
    "export": (
        "export the weights of a run or checkpoint as a Hugging Face directory",
        "SOURCE DEST",
        (
            ("--dtype NAME", "fp16 (default), bf16 or fp32"),
            ("--max-shard-size SIZE", "largest file of a directory, such as 500MB (default 5GB)"),
            ("--check", "read every header back and compare a sample of the tensors"),
            (
                "--mixed",
                "accept page files of a run that was killed during an update, in which some weights are one step "
                "ahead of others; they are refused otherwise",
            ),
            ("--trainer", "also write moments and step, so that transformers' Trainer resumes from DEST; in fp32"),
            ("--push-to-hub USER/NAME", "then upload DEST to that repository, which is created, private, if needed"),
        ),
        "SOURCE is a run directory (its newest checkpoint), a checkpoint, or page files of a killed run on a drive.",
    ),
    "import": (
        "begin a run from another trainer's checkpoint: weights, optimizer state and step",
        f"SOURCE RUN {_CONFIG}",
        (),
        "SOURCE is a checkpoint of transformers' Trainer or FSDP2 (a directory of torch.distributed.checkpoint).\n"
        "RUN is a new run directory. Give words of the run, above all --model and model.freeze. The command that goes "
        "on is printed.",
    ),
    "sample": (
        "continue a prompt with the model that a run has saved",
        "SOURCE",
        (("--prompt TEXT", "text to continue (default: none)"), *_DRAWING),
        _SOURCE,
    ),
    "chat": (
        "chat with the model that a run has saved, in the terminal",
        "SOURCE",
        _DRAWING,
        f"Type one message a line; end with Ctrl-D. {_SOURCE}",
    ),
    "runs": (
        "list runs with their step, losses, and whether they can be resumed",
        "[DIR]",
        (("--json", "print JSON"),),
        "DIR (default runs) is searched at any depth.",
    ),
    "report": (
        "compare runs: configuration, losses, time, memory",
        "RUN [RUN...]",
        (("--json", "print JSON"), ("--html FILE.html", "also write an HTML page with the losses in one chart")),
        "RUN is a run directory; the run may still be running.",
    ),
    "ls": (
        "list the recipes that come with the package, what each is for and what it needs",
        "",
        (("--json", "print JSON"),),
        "",
    ),
    "cp": (
        "copy a recipe to a file that you can edit and train with",
        "NAME [DEST]",
        (),
        "DEST is a file or a directory (default: the current directory). Existing files are not overwritten.",
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
    "import": ("--model", "--scratch", "--dtype", "--steps", "--lr"),
}

_START = """\
Trains all parameters of a causal language model that need not fit on the GPU: weights, gradients and optimizer state
are placed on the GPU, in RAM and on NVMe drives.
`offload-train --nvme DIR` alone trains a small model on the text that comes with the package.
"""


def help_text(command: str | None = None) -> str:
    """Return the help of one command, or of the program if `command` is None."""
    if command is None:
        lines = [f"offload-train {_CONFIG}", ""]
        lines += [f"offload-train {name:<12}{summary}" for name, (summary, *_) in _COMMANDS.items()]
        lines += [
            "",
            _START,
            "`offload-train COMMAND --help` shows the flags of a command, `offload-train --version` the version.",
        ]
        return "\n".join([*lines, "", *_flags(tuple(FLAGS)), "", _REST])
    summary, words, switches, more = _COMMANDS[command]
    lines = [f"offload-train {command} {words}".rstrip(), "", f"{summary[0].upper()}{summary[1:]}."]
    lines += ["", *(_entry(name, what) for name, what in switches)] if switches else []
    lines += ["", more] if more else []
    if not _COMMANDS[command][1].endswith(_CONFIG):
        return "\n".join(lines)
    flags = flags_of(command)
    others = (
        []
        if len(flags) == len(FLAGS)
        else ["All other flags of `train` are accepted too, so the same arguments work for both."]
    )
    return "\n".join([*lines, "", *_flags(flags), "", *others, _REST])


_REST = "Other keys are given as section.key=value; docs/config.md lists them all."


def _flags(names: tuple[str, ...]) -> list[str]:
    entries = [_entry(f"{name} {FLAGS[name].metavar}".rstrip(), describe_key(FLAGS[name].key)) for name in names]
    return ["flags, each the short form of a configuration key:", *entries]


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
    return {name: bool(value) for name, _, value in (entry.partition(" ") for entry, _ in _COMMANDS[command][2])}


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
        here = f"use `offload-train {command}`" if command else ""
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
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} {shown(text)}: it should be a whole number, at least 1")
    return int(text)


def parse_export_arguments(words: list[str]) -> dict[str, Any]:
    """Parse the words after `export` into the arguments of `export.export_command.export`, `trainer` and `push_to_hub`.

    Raises UserError for mistakes.
    """
    refuse_unwritable(words)
    switches = take_switches(words, "--check", "--mixed", "--trainer")
    trainer = "--trainer" in switches
    dtype = take_value(words, "--dtype") or ("fp32" if trainer else "fp16")
    largest, pushed = take_value(words, "--max-shard-size"), take_value(words, "--push-to-hub")
    if unknown := [word for word in words if word.startswith("-")]:
        known = "--dtype, --max-shard-size, --check, --mixed, --trainer, --push-to-hub"
        raise UserError(f"export: {unknown[0]}: unknown flag; known: {known}")
    dtypes = ("fp16", "bf16", "fp32")
    if len(words) != 2:
        given = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"export needs SOURCE and DEST; got {given}. `offload-train export --help` says more")
    if trainer and (dtype != "fp32" or "--mixed" in switches):
        raise UserError("--trainer writes a checkpoint in fp32: leave out --dtype and --mixed")
    if dtype not in dtypes:
        raise UserError(f"--dtype {dtype}: it should be one of {', '.join(dtypes)}")
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
        "trainer": trainer,
        "push_to_hub": pushed,
    }


def parse_import_arguments(words: list[str]) -> tuple[Path, Path, list[str]]:
    """Split the words after `import` into SOURCE, RUN and the configuration. Raises UserError for mistakes."""
    if len(words) < 2 or any(word.startswith("-") or ("=" in word and not Path(word).exists()) for word in words[:2]):
        given = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"import needs SOURCE and RUN first; got {given}. `offload-train import --help` says more")
    return Path(words[0]), Path(words[1]), words[2:]


def parse_sampling_arguments(words: list[str], command: str) -> dict[str, Any]:
    """Remove the flags of `sample` and `chat` from `words`; return the arguments of `run.commands.generate`.

    The one word that remains must be SOURCE. Raises UserError for mistakes.
    """
    tokens, temperature = take_value(words, "--tokens"), take_value(words, "--temperature")
    seed = take_value(words, "--seed")
    if len(words) != 1 or words[0].startswith("-"):
        listing = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"{command} needs one SOURCE; got {listing}. `offload-train {command} --help` says more")
    found: dict[str, Any] = {}
    for name, text, least in (("tokens", tokens, 1), ("seed", seed, 0)):
        if text is not None and (not text.isdecimal() or int(text) < least):
            raise UserError(f"--{name} {shown(text)}: it should be a whole number, at least {least}")
        if text is not None:
            found[name] = int(text)
    if temperature is not None:
        try:
            found["temperature"] = float(temperature)
        except ValueError:
            found["temperature"] = -1.0
        if not 0 <= found["temperature"] < math.inf:
            raise UserError(f"--temperature {shown(temperature)}: it should be a number, at least 0")
    return found
