"""Command line of `offload-train`: dispatch the first word to a command and print its result or error.

argparse parses a command's own switches and writes `--help`. Words that it does not know are configuration, which
`settings/` reads; `settings.FLAGS` has the flags that stand for keys. Add a command or a switch to `COMMANDS`. torch
and transformers are imported only after a command has a valid configuration, so that help and mistakes appear
immediately.
"""

import argparse
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError

from offload_trainer import __version__
from offload_trainer.common.errors import RERUN_HINT, PeerFailed, Stopped, TrainerError, UserError, exit_code, explain
from offload_trainer.common.stdio import lasting_streams
from offload_trainer.common.units import format_bytes, shown
from offload_trainer.config import TrainConfig
from offload_trainer.model.presets import PRESETS
from offload_trainer.plan.machine import describe_rates, read_machine
from offload_trainer.run import process_setup
from offload_trainer.run.signals import stop_at_once
from offload_trainer.settings import FLAGS, all_keys, dump_config, file_hint, load_config, refuse_unwritable
from offload_trainer.settings.synonyms import command_of, nearest


def main(words: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: done; 2: a mistake of the user's; 128 + the signal's number after a signal; 1: any other known error. An error
    that is a bug propagates with its traceback.
    """
    words = list(sys.argv[1:] if words is None else words)
    with lasting_streams():
        try:
            with stop_at_once():
                _run_command(list(words))
        except BaseException as error:
            if (message := explain(error)) is None:
                raise
            if RERUN_HINT in message:
                from offload_trainer.run.resume import with_resume_hint

                message = with_resume_hint(message, words)
            # The launcher sends a stop signal to every rank, and reports it itself.
            if not isinstance(error, PeerFailed) and not (isinstance(error, Stopped) and process_setup.has_launcher()):
                _say(f"offload-train: {message}")
            return exit_code(error)
    return 0


def _run_command(words: list[str]) -> None:
    if not words:
        print(help_text(flags=False), flush=True)
        raise UserError("nothing was asked for; `offload-train train` trains a small model on the text that ships here")
    name = take_command(words)
    if "--help" in words or "-h" in words:
        print(help_text(name), end="")
    elif "--version" in words:
        print(__version__)
    else:
        COMMANDS[name or "train"].run(*parse(name or "train", words))


def _say(line: str) -> None:
    print(shown(line), file=sys.stderr, flush=True)


def _answer(given: Namespace, found: Any, text: str) -> None:
    """Print a result as JSON if --json was given, else as text."""
    print(json.dumps(found, indent=1, default=asdict) if given.json else shown(text), flush=True)


def _train(given: Namespace, words: list[str]) -> None:
    config = load_config(words)
    if given.print_config:
        print(dump_config(config), end="")
        return
    with redirect_stdout(sys.stderr):  # libraries print there
        if process_setup.ranks_of_environment()[1] == 1:  # several ranks connect first, so that one message is printed
            process_setup.refuse_missing(config)
        process_setup.start_ranks(words, count=config.placement.gpus, engine=config.placement.engine_name)
        process_setup.prepare_process(config)
        process_setup.quieten()
        from offload_trainer.run.train import train_run

        train_run(config)


def _plan(given: Namespace, words: list[str]) -> None:
    if given.machine is None and given.nodes is not None:
        raise UserError(
            "--nodes belongs to --machine, whose links say what is between them: `plan --machine NAME|FILE`"
        )
    if given.machine is None and not given.parallel:
        config = process_setup.prepared(words, check=partial(process_setup.refuse_missing, data=False))
        from offload_trainer.run.checks import check_start, refuse, refuse_output
        from offload_trainer.run.planning import plan_run

        planned = plan_run(config)
        plan = planned.plan
        _answer(given, plan.to_json(), plan.describe(steps=config.train.known_steps, full=given.explain))
        refuse(planned)
        check_start(planned, say=_say)
        try:
            refuse_output(planned)
        except UserError as error:  # only noted, if the user has not named that directory or checkpoint
            if "output" in config.save.model_fields_set or config.save.resume not in ("auto", "never"):
                raise
            _say(f"note: training with these words would be refused: {error}")
        return
    from offload_trainer.run.commands.plan import compare_modes, described, plan_elsewhere

    machine = None if given.machine is None else read_machine(given.machine)
    config = load_config(words, drives=[drive.directory for drive in machine.drives] if machine else None)
    machine = described(machine, config.placement.nvme) if machine else None
    process_setup.quieten()
    if given.parallel or machine is None:
        values, text, plan = compare_modes(config, machine, given.nodes)
    else:
        plan = plan_elsewhere(config, machine, nodes=given.nodes)
        values, text = plan.to_json(), plan.describe(steps=config.train.known_steps, full=given.explain)
    _answer(given, values, text)
    plan.refuse(force=config.placement.force)


def _bench(given: Namespace, words: list[str]) -> None:
    config = process_setup.prepared(words)
    from offload_trainer.machine.rate_cache import cache_file
    from offload_trainer.run.machine_rates import bench_here

    with redirect_stdout(sys.stderr):  # libraries print there
        machine = bench_here(config, drive_bytes=given.drive_gigabytes * 10**9 or None, say=_say)
    kept = f"`offload-train plan` knows seconds from now on; all rates, and how they were measured:\n  {cache_file()}"
    _answer(given, machine, f"{describe_rates(machine)}\n{kept}")


def _tune(given: Namespace, words: list[str]) -> None:
    path = given.write
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: {path.absolute().parent} is not a directory")
    from offload_trainer.run.commands.recipes import refuse_taken, write_new

    refuse_taken(path)
    config = process_setup.prepared(words, check=process_setup.refuse_missing)
    from offload_trainer.run.commands.tune import steered_phase, tunable, tune
    from offload_trainer.run.planning import plan_run

    plan = plan_run(config).plan
    _say(plan.describe(steps=config.train.known_steps))
    plan.refuse(force=config.placement.force)
    trials = tune(words, tunable(plan), phase=steered_phase(plan), steps=given.trial_steps, say=_say)
    write_new(path, dump_config(load_config([*words, *trials[0].words.split()])))
    as_planned = next(trial for trial in trials if not trial.words)
    best = f"{trials[0].words or 'as planned'}: {trials[0].seconds:.2f} s a step, as planned {as_planned.seconds:.2f}"
    _answer(given, [trial.to_json() for trial in trials], f"{best}; {path}")


def _doctor(given: Namespace, words: list[str]) -> None:
    config = process_setup.prepared(words)
    from offload_trainer.run.commands.doctor import examine, report

    with redirect_stdout(sys.stderr):  # libraries print there
        checks = examine(config)
    _answer(given, checks, report(checks))
    if any(check.state == "failure" for check in checks):
        raise TrainerError("doctor: something that a run needs is missing, see above")


def _prepare(_: Namespace, words: list[str]) -> None:
    config = process_setup.prepared(words, check=process_setup.refuse_missing)
    from offload_trainer.run.train import prepare_run

    print("\n".join(map(str, prepare_run(config))))


def _export(given: Namespace, _: list[str]) -> None:
    process_setup.go_offline()
    from offload_trainer.run.export import export

    size, check = given.max_shard_size, given.check
    done = export(given.source, given.destination, dtype=given.dtype, shard_bytes=size, check=check)
    compared = f"; read back: every header, and a sample of {done.compared} tensors, equal" if check else ""
    where = f"exported {done.source} in {given.dtype} to {given.destination}"
    print(shown(f"{where}: {format_bytes(done.bytes)}{compared}"))


def _import(_: Namespace, words: list[str]) -> None:
    if len(words) < 2 or any(word.startswith("-") or ("=" in word and not Path(word).exists()) for word in words[:2]):
        named = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"import needs SOURCE and RUN first; got {named}. `offload-train import --help` says more")
    source, run, words = Path(words[0]), Path(words[1]), words[2:]
    config = process_setup.prepared(words)
    if "output" in config.save.model_fields_set and Path(config.save.output) != run:
        raise UserError(f"--output {config.save.output}: the new run directory is RUN, here {run}; leave --output out")
    from offload_trainer.run.commands.import_checkpoint import import_checkpoint

    with redirect_stdout(sys.stderr):  # libraries print there
        done = import_checkpoint(source, run, config, say=_say)
    print(shown(f"imported {done.told} to {done.checkpoint}: {format_bytes(done.bytes)}"))
    print(shown(f"{done.rates}\ngo on with: {shlex.join(['offload-train', *words])} {done.words}"))


def _generate(given: Namespace, _: list[str]) -> None:
    """Continue a prompt (`sample`), or talk (`chat`)."""
    process_setup.go_offline()
    from offload_trainer.run.commands.generate import chat, sample

    drawn = {"tokens": given.tokens, "temperature": given.temperature, "seed": given.seed, "say": _say}
    if "prompt" in given:
        print(shown(sample(given.source, given.prompt, **drawn)))
        return
    person = sys.stdin.isatty()
    with suppress(*[Stopped] * person):  # Ctrl-C ends a conversation as Ctrl-D does
        chat(given.source, _typed() if person else sys.stdin, **drawn)


def _typed() -> Iterator[str]:
    _say("type a message; earlier ones are remembered; Ctrl-D ends")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _runs(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.runs import aligned, run_table, runs_in

    found = runs_in(given.directory)
    _answer(given, found, aligned(run_table(found)))


def _report(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.runs import aligned, compared, comparison, write_page

    found = compared(given.runs)
    if given.html is not None:
        write_page(given.html, found)
        _say(f"{given.html}: written")
    _answer(given, [run.to_json() for run in found], aligned(comparison(found)))


def _ls(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.recipes import listing, recipes

    found = recipes()
    _answer(given, found, listing(found))


def _cp(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.recipes import copy_recipe

    path, command = copy_recipe(given.name, given.destination)
    print(shown(f"{path}: written; {command}"))


# -- arguments and help ------------------------------------------------------------------------------------------------


_CONFIG = "[CONFIG.yaml] [flags] [section.key=value ...]"
_KEYS = "Other keys are given as section.key=value; docs/config.md lists them all."


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError for mistakes and accepts no abbreviated flags."""

    def __init__(self, prog: str, **given: Any) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        purpose = f" ({(self.description or '').partition('. ')[0]})" if message.startswith("unrecognized") else ""
        raise UserError(f"{shown(message.removeprefix('argument '))}; `{self.prog} --help`{purpose} says more")


def _read_as(kind: Any, wanted: str) -> Callable[[str], Any]:
    """Return a function that reads text as a type of pydantic's, or says what is `wanted`."""

    def read(text: str) -> Any:
        with suppress(ValidationError):
            return TypeAdapter(kind).validate_python(text)
        raise argparse.ArgumentTypeError(f"{text}: it should be {wanted}")

    return read


def _whole(least: int) -> Callable[[str], Any]:
    return _read_as(Annotated[int, Field(ge=least)], f"a whole number, at least {least}")


def _size(text: str) -> str:
    """Refuse what follows a size's first number and unit, which pydantic's ByteSize ignores."""
    if not re.fullmatch(r"\d*\.?\d+\s*([kmgtp]?i?b)?", text, re.IGNORECASE):
        raise ValueError(text)
    return text


def _writable(text: str) -> Path:
    refuse_unwritable([text])
    return Path(text)


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _value(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, **more}


_NODES = _read_as(Annotated[int, Field(ge=1, le=1024)], "one whole number from 1 to 1024")
_SIZE = _read_as(Annotated[ByteSize, BeforeValidator(_size), Field(gt=0)], "a number with a unit, such as 500MB or 5GB")
_JSON = {"--json": _switch("print JSON")}
_SAMPLING = {
    "--tokens": _value("N", "generate at most N tokens (default %(default)s)", type=_whole(1), default=100),
    "--temperature": _value(
        "X",
        "sampling temperature (default %(default)s); 0: always the most likely token",
        type=_read_as(Annotated[float, Field(ge=0, allow_inf_nan=False)], "a number, at least 0"),
        default=0.8,
    ),
    "--seed": _value("N", "random seed (default %(default)s)", type=_whole(0), default=0),
}
_SOURCE = _value(
    "SOURCE",
    "a run directory (its newest checkpoint), a checkpoint, or an exported directory; the model runs on the CPU, and "
    "weights that take more than half of the free memory are read from the disk for each token",
    type=Path,
)


@dataclass(frozen=True)
class Command:
    """A command: what it does, its help, and its own arguments. `configured`: other words are the configuration."""

    run: Callable[[Namespace, list[str]], None]  # takes the argument values, and the words of the configuration
    summary: str
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> keywords of argparse's add_argument
    configured: bool = False
    more: str = ""
    begins: str = ""  # words that come before the configuration


COMMANDS = {
    "train": Command(
        _train,
        "train a model; the default command",
        {"--print-config": _switch("print the complete configuration as YAML and stop")},
        configured=True,
        more="Run the same command again to resume from the newest checkpoint in --output.",
    ),
    "plan": Command(
        _plan,
        "show what a run stores where, whether it fits, and how long a step takes",
        {
            **_JSON,
            "--machine": _value(
                "NAME|FILE.json",
                "plan for another machine: a known one, such as v100-32gb, or a file that `bench --json` printed",
            ),
            "--explain": _switch("show every item, phase, and rejected placement or schedule"),
            "--nodes": _value("K", "plan for K machines with --gpus ranks each", type=_NODES),
            "--parallel": _switch("compare ways to parallelise a step over the ranks: ZeRO, tensor, pipeline"),
        },
        configured=True,
        more="Writes nothing. Exit code 0: the run fits; 2: it does not fit, or the configuration is wrong.",
    ),
    "bench": Command(
        _bench,
        "measure the speed of this machine and each --nvme, for later plans",
        {
            **_JSON,
            "--drive-gigabytes": _value("N", "gigabytes to write and read on each drive", type=_whole(1), default=0),
        },
        configured=True,
        more="The results are saved in the cache directory, and every later plan on this machine uses them. Links "
        "between GPUs, or with --gpus N between ranks on the CPU, are measured too.",
    ),
    "tune": Command(
        _tune,
        "try settings close to the plan in short real runs, and save the fastest",
        {
            **_JSON,
            "--write": _value(
                "FILE.yaml", "file for the fastest configuration (default %(default)s)", type=Path, default="tuned.yaml"
            ),
            "--trial-steps": _value("N", "steps of each trial (default %(default)s)", type=_whole(1), default=6),
        },
        configured=True,
    ),
    "doctor": Command(
        _doctor,
        "check everything that a run needs, and say how to fix what fails",
        _JSON,
        configured=True,
        more="Exit code 1: something is missing.",
    ),
    "prepare": Command(
        _prepare,
        "tokenise the data into the cache",
        configured=True,
        more="A run does this itself; `prepare` does it ahead of time.",
    ),
    "export": Command(
        _export,
        "export the weights of a run or checkpoint as a Hugging Face directory",
        {
            "source": _value("SOURCE", "a run directory (its newest checkpoint) or a checkpoint", type=_writable),
            "destination": _value("DEST", "the new directory", type=_writable),
            "--dtype": _value("NAME", "fp16 (default), bf16 or fp32", choices=("fp16", "bf16", "fp32"), default="fp16"),
            "--max-shard-size": _value(
                "SIZE", "largest file of a directory, such as 500MB (default %(default)s)", type=_SIZE, default="5GB"
            ),
            "--check": _switch("read every header back and compare a sample of the tensors"),
        },
    ),
    "import": Command(
        _import,
        "begin a run from another trainer's checkpoint: weights, optimizer state and step",
        configured=True,
        more="SOURCE is a checkpoint of transformers' Trainer or FSDP2 (a directory of torch.distributed.checkpoint). "
        "RUN is a new run directory. Give words of the run, above all --model and model.freeze. The command that goes "
        "on is printed.",
        begins="SOURCE RUN ",
    ),
    "sample": Command(
        _generate,
        "continue a prompt with the model that a run has saved",
        {"source": _SOURCE, "--prompt": _value("TEXT", "text to continue (default: none)", default=""), **_SAMPLING},
    ),
    "chat": Command(
        _generate,
        "chat with the model that a run has saved, in the terminal",
        {"source": _SOURCE, **_SAMPLING},
        more="Type one message a line; end with Ctrl-D.",
    ),
    "runs": Command(
        _runs,
        "list runs with their step, losses, and whether they can be resumed",
        {
            "directory": _value(
                "DIR", "searched at any depth (default %(default)s)", type=Path, nargs="?", default=Path("runs")
            ),
            **_JSON,
        },
    ),
    "report": Command(
        _report,
        "compare runs: configuration, losses, time, memory",
        {
            "runs": _value("RUN", "a run directory; the run may still be running", type=Path, nargs="+"),
            **_JSON,
            "--html": _value("FILE.html", "also write an HTML page with the losses in one chart", type=Path),
        },
    ),
    "ls": Command(_ls, "list the recipes that come with the package, what each is for and what it needs", _JSON),
    "cp": Command(
        _cp,
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


def parse(command: str, words: list[str]) -> tuple[Namespace, list[str]]:
    """Return the values of the command's own arguments, and the other words, which are configuration, in order.

    Raises UserError for mistakes.
    """
    parser = _parser(command)
    if not COMMANDS[command].configured:
        return parser.parse_intermixed_args(words), []
    given, rest = parser.parse_known_args(words)
    for name in (word.partition("=")[0] for word in rest if word.startswith("--")):
        others = [f"`offload-train {other}`" for other, about in COMMANDS.items() if name in about.arguments]
        if others and name not in FLAGS:
            raise UserError(f"{name}: only {', '.join(others)} {'takes' if len(others) == 1 else 'take'} this flag")
    return given, rest


def _parser(command: str) -> _Parser:
    about = COMMANDS[command]
    given: dict[str, Any] = {"description": f"{about.summary[0].upper()}{about.summary[1:]}. {about.more}"}
    if about.configured:
        given |= {"usage": f"%(prog)s {about.begins}{_CONFIG}", "epilog": _KEYS}
    parser = _Parser(f"offload-train {command}", **given)
    for name, options in about.arguments.items():
        parser.add_argument(name, **options)
    return parser


def help_text(command: str | None = None, *, flags: bool = True) -> str:
    """Return the help of a command, or of the program, perhaps without `flags`, as wide as the terminal."""
    if command is not None:
        parser, flags = _parser(command), COMMANDS[command].configured
    else:
        parser = _Parser(
            "offload-train",
            usage=f"%(prog)s [COMMAND] {_CONFIG}",
            description="Trains all parameters of a causal language model that need not fit on the GPU: weights, "
            "gradients and optimizer state are placed on the GPU, in RAM and on NVMe drives. `offload-train --nvme "
            "DIR` alone trains a small model on the text that comes with the package.",
            epilog="`offload-train COMMAND --help` shows the switches of a command, `offload-train --version` the "
            f"version. {_KEYS}",
        )
        commands = parser.add_argument_group("commands")
        for name, about in COMMANDS.items():
            commands.add_argument(name, help=about.summary)
    sections = {FLAGS[name].key.partition(".")[0] for name in FLAGS if flags}
    docs = {name: info.annotation.__doc__ for name, info in TrainConfig.model_fields.items() if name in sections}
    groups = {name: parser.add_argument_group(name, doc) for name, doc in docs.items()}
    for name, flag in FLAGS.items() if flags else ():
        key = all_keys()[flag.key]
        default = ", ".join(key.default) if isinstance(key.default, tuple) else str(key.default)
        told = f" [default {default}]" if default not in ("", "False") else ""
        text = f"{key.description}{told}".replace("%", "%%")
        options = _value(flag.metavar, text) if flag.metavar else _switch(text)
        groups[flag.key.partition(".")[0]].add_argument(name, **options)
    return parser.format_help()


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
    if term := command_of(word):
        here = f"use `offload-train {term.here}`" if term.here else ""
        return "; " + (f"{here} ({term.note})" if here and term.note else here or term.note)
    near = nearest(word, COMMANDS)
    return f"; did you mean {near}?" if near in COMMANDS else file_hint(Path(word))
