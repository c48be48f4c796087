"""Arguments of the commands: an argparse parser for each command's own switches, and the text of `--help`.

Words that a parser does not know are configuration, which `settings.py` reads; `settings.FLAGS` has the flags that
stand for keys. Add a command or a switch to `COMMANDS`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from offload_trainer.config import TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS
from offload_trainer.settings import FLAGS, all_keys, file_hint, refuse_unwritable
from offload_trainer.synonyms import command_of, nearest
from offload_trainer.units import parse_bytes, shown

_CONFIG = "[CONFIG.yaml] [flags] [section.key=value ...]"
_KEYS = "Other keys are given as section.key=value; docs/config.md lists them all."
_ALSO = "All other flags of `train` are accepted too, so the same arguments work for both."


class _Parser(argparse.ArgumentParser):
    """Parser that raises UserError for mistakes, and knows no abbreviations of its flags."""

    def __init__(self, prog: str, **given: Any) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shown(message.removeprefix('argument '))}; `{self.prog} --help` says more")


def _whole(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: it should be a whole number, at least {least}")
        return int(text)

    return whole


def _temperature(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it should be a number, at least 0")
    return found


def _size(text: str) -> int:
    if not (found := parse_bytes(text)):
        raise argparse.ArgumentTypeError(f"{text}: a number with a unit, such as 500MB or 5GB")
    return found


def _writable(text: str) -> Path:
    refuse_unwritable([text])
    return Path(text)


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _value(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, **more}


_JSON = {"--json": _switch("print JSON")}
_SAMPLING = {
    "--tokens": _value("N", "generate at most N tokens (default %(default)s)", type=_whole(1), default=100),
    "--temperature": _value(
        "X",
        "sampling temperature (default %(default)s); 0: always the most likely token",
        type=_temperature,
        default=0.8,
    ),
    "--seed": _value("N", "random seed (default %(default)s)", type=_whole(0), default=0),
}
_MODEL_SOURCE = _value(
    "SOURCE",
    "a run directory (its newest checkpoint), a checkpoint, or an exported directory; the model runs on the CPU, and "
    "weights that take more than half of the free memory are read from the disk for each token",
    type=Path,
)

# Configuration flags shown in a command's help. All others are accepted too.
_RARE = ("--validation-data", "--seed", "--lr", "--resume", "--force")
_PLANNED = tuple(name for name in FLAGS if name not in (*_RARE, "--steps", "--epochs"))
_DATA = ("--model", "--scratch", "--data", "--validation-data", "--tokenizer", "--seq-len")


@dataclass(frozen=True)
class Command:
    """A command: its help, its own arguments, and the configuration flags that its help shows.

    `flags` is empty for a command that takes no configuration.
    """

    summary: str
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of argparse's add_argument, by name
    flags: tuple[str, ...] = ()
    more: str = ""
    begins: str = ""  # words that come before the configuration


COMMANDS = {
    "train": Command(
        "train a model; the default command",
        {"--print-config": _switch("print the complete configuration as YAML and stop")},
        tuple(FLAGS),
        "Run the same command again to resume from the newest checkpoint in --output.",
    ),
    "plan": Command(
        "show what a run stores where, whether it fits, and how long a step takes",
        {
            **_JSON,
            "--machine": _value(
                "NAME|FILE.json",
                "plan for another machine: a known one, such as v100-32gb, or a file that `bench --json` printed",
            ),
            "--explain": _switch("show every item, phase, update schedule and rejected placement"),
            "--nodes": _value("K", "plan for K machines with --gpus ranks each"),
            "--parallel": _switch("compare ways to parallelise a step over the ranks: ZeRO, tensor, sequence"),
        },
        _PLANNED,
        "Writes nothing. Exit code 0: the run fits; 2: it does not fit, or the configuration is wrong.",
    ),
    "bench": Command(
        "measure the speed of this machine and each --nvme, for later plans",
        {
            **_JSON,
            "--drive-gigabytes": _value("N", "gigabytes to write and read on each drive", type=_whole(1), default=0),
        },
        ("--nvme", "--dtype", "--gpus", "--output"),
        "The results are saved in the cache directory, and every later plan on this machine uses them. Links between "
        "GPUs, or with --gpus N between ranks on the CPU, are measured too.",
    ),
    "tune": Command(
        "try settings close to the plan in short real runs, and save the fastest",
        {
            **_JSON,
            "--write": _value(
                "FILE.yaml", "file for the fastest configuration (default %(default)s)", type=Path, default="tuned.yaml"
            ),
            "--trial-steps": _value("N", "steps of each trial (default %(default)s)", type=_whole(1), default=6),
        },
        tuple(name for name in _PLANNED if name != "--save-every"),
    ),
    "doctor": Command(
        "check everything that a run needs, and say how to fix what fails",
        _JSON,
        ("--model", "--scratch", "--nvme", "--engine", "--gpus", "--output"),
        "Exit code 1: something is missing.",
    ),
    "prepare": Command(
        "tokenise the data into the cache", {}, _DATA, "A run does this itself; `prepare` does it ahead of time."
    ),
    "export": Command(
        "export the weights of a run or checkpoint as a Hugging Face directory",
        {
            "source": _value(
                "SOURCE",
                "a run directory (its newest checkpoint), a checkpoint, or page files of a killed run on a drive",
                type=_writable,
            ),
            "destination": _value("DEST", "the new directory", type=_writable),
            "--dtype": _value("NAME", "fp16 (default), bf16 or fp32", choices=("fp16", "bf16", "fp32"), default="fp16"),
            "--max-shard-size": _value(
                "SIZE", "largest file of a directory, such as 500MB (default %(default)s)", type=_size, default="5GB"
            ),
            "--check": _switch("read every header back and compare a sample of the tensors"),
        },
    ),
    "import": Command(
        "begin a run from another trainer's checkpoint: weights, optimizer state and step",
        {},
        ("--model", "--scratch", "--dtype", "--steps", "--lr"),
        "SOURCE is a checkpoint of transformers' Trainer or FSDP2 (a directory of torch.distributed.checkpoint). RUN "
        "is a new run directory. Give words of the run, above all --model and model.freeze. The command that goes on "
        "is printed.",
        begins="SOURCE RUN ",
    ),
    "sample": Command(
        "continue a prompt with the model that a run has saved",
        {
            "source": _MODEL_SOURCE,
            "--prompt": _value("TEXT", "text to continue (default: none)", default=""),
            **_SAMPLING,
        },
    ),
    "chat": Command(
        "chat with the model that a run has saved, in the terminal",
        {"source": _MODEL_SOURCE, **_SAMPLING},
        more="Type one message a line; end with Ctrl-D.",
    ),
    "runs": Command(
        "list runs with their step, losses, and whether they can be resumed",
        {
            "directory": _value(
                "DIR", "searched at any depth (default %(default)s)", type=Path, nargs="?", default=Path("runs")
            ),
            **_JSON,
        },
    ),
    "report": Command(
        "compare runs: configuration, losses, time, memory",
        {
            "runs": _value("RUN", "a run directory; the run may still be running", type=Path, nargs="+"),
            **_JSON,
            "--html": _value("FILE.html", "also write an HTML page with the losses in one chart", type=Path),
        },
    ),
    "ls": Command("list the recipes that come with the package, what each is for and what it needs", _JSON),
    "cp": Command(
        "copy a recipe to a file that you can edit and train with",
        {
            "name": _value("NAME", "a recipe that `ls` lists"),
            "destination": _value(
                "DEST",
                "file or directory (default: the current one); no file is overwritten",
                type=_writable,
                nargs="?",
            ),
        },
    ),
}


def parse(command: str, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of the command's own arguments, and the other words, which are configuration, in order.

    Raises UserError for mistakes.
    """
    parser, configured = _parser(command), bool(COMMANDS[command].flags)
    return parser.parse_known_args(words) if configured else (parser.parse_intermixed_args(words), [])


def _parser(command: str) -> _Parser:
    about = COMMANDS[command]
    given: dict[str, Any] = {"description": f"{about.summary[0].upper()}{about.summary[1:]}. {about.more}"}
    if about.flags:
        given["usage"] = f"%(prog)s {about.begins}{_CONFIG}"
        given["epilog"] = _KEYS if len(about.flags) == len(FLAGS) else f"{_ALSO} {_KEYS}"
    parser = _Parser(f"offload-train {command}", **given)
    for name, options in about.arguments.items():
        parser.add_argument(name, **options)
    return parser


def help_text(command: str | None = None) -> str:
    """Return the help of one command, or of the program if `command` is None, as wide as the terminal."""
    if command is not None:
        parser = _parser(command)
        _show_flags(parser, COMMANDS[command].flags)
        return parser.format_help()
    parser = _Parser(
        "offload-train",
        usage=f"%(prog)s [COMMAND] {_CONFIG}",
        description="Trains all parameters of a causal language model that need not fit on the GPU: weights, gradients "
        "and optimizer state are placed on the GPU, in RAM and on NVMe drives. `offload-train --nvme DIR` alone trains "
        "a small model on the text that comes with the package.",
        epilog="`offload-train COMMAND --help` shows the flags of a command, `offload-train --version` the version. "
        f"{_KEYS}",
    )
    commands = parser.add_argument_group("commands")
    for name, about in COMMANDS.items():
        commands.add_argument(name, help=about.summary)
    _show_flags(parser, tuple(FLAGS))
    return parser.format_help()


def _show_flags(parser: _Parser, names: tuple[str, ...]) -> None:
    """Add configuration flags to a parser's help, in a group for each section of the configuration."""
    for section, info in TrainConfig.model_fields.items():
        here = [name for name in names if FLAGS[name].key.startswith(f"{section}.")]
        if not here:
            continue
        group = parser.add_argument_group(section, info.annotation.__doc__)
        for name in here:
            text = str(all_keys()[FLAGS[name].key].description).replace("%", "%%")
            if metavar := FLAGS[name].metavar:
                group.add_argument(name, metavar=metavar, help=text)
            else:
                group.add_argument(name, action="store_true", help=text)


def take_command(words: list[str]) -> str | None:
    """Remove the command from the front of `words` and return it; None stands for `train`, whose name is optional.

    Raises UserError if the first word is neither a command nor an existing file and does not look like a path.
    """
    if not words or words[0].startswith("-") or "=" in words[0]:
        return None
    if words[0] in COMMANDS:
        return words.pop(0)
    if os.path.exists(words[0]) or "." in words[0] or "/" in words[0]:
        return None
    raise UserError(f"{words[0]}: neither a command ({', '.join(COMMANDS)}) nor a configuration file{_hint(words[0])}")


def _hint(word: str) -> str:
    """Return a suggestion for an unknown command, to append to an error message; "" if nothing is close."""
    if word in PRESETS:
        return f"; a model is named by a flag: --model {word}"
    if known := command_of(word):
        command, note = known
        here = f"use `offload-train {command}`" if command else ""
        return "; " + (f"{here} ({note})" if here and note else here or note)
    near = nearest(word, COMMANDS)
    return f"; did you mean {near}?" if near in COMMANDS else file_hint(Path(word))
