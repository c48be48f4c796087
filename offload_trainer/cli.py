"""Command line of `offload-train`: dispatch the first word to a command and print its result or error.

Words after the command are configuration (`settings.py`). torch and transformers are imported only after a command
has a valid configuration, so that help and mistakes appear immediately.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload_trainer import __version__
from offload_trainer.arguments import help_text, parse, take_command
from offload_trainer.errors import RERUN_HINT, PeerFailed, Stopped, TrainerError, UserError, exit_code, explain, reason
from offload_trainer.plan.machine import describe_rates
from offload_trainer.run.launcher import has_launcher, start_ranks
from offload_trainer.run.process_setup import go_offline, prepare_process, prepared, quieten, refuse_missing
from offload_trainer.settings import dump_config, load_config
from offload_trainer.signals import stop_at_once
from offload_trainer.stdio import lasting_streams
from offload_trainer.units import format_bytes, shown


def main(words: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: done; 2: a mistake of the user's; 128 + the signal's number after a signal; 1: any other known error. An error
    that is a bug propagates with its traceback.
    """
    words = list(sys.argv[1:] if words is None else words)
    with lasting_streams():
        try:
            with stop_at_once():
                _carry_out(list(words))
        except BaseException as error:
            message = _error_message(error, words)
            if message is None:
                raise
            # The launcher sends a stop signal to every rank, and reports it itself.
            if not isinstance(error, PeerFailed) and not (isinstance(error, Stopped) and has_launcher()):
                _say(f"offload-train: {message}")
            if os.environ.get("WORLD_SIZE", "1") != "1" and not isinstance(error, Stopped):
                from offload_trainer.ranks import announce_failed_join

                announce_failed_join(message)
            return exit_code(error)
    return 0


def _error_message(error: BaseException, words: list[str]) -> str | None:
    """Return the error message for the user, completed with the step that a rerun resumes from; None for a bug."""
    message = explain(error)
    if message is None or RERUN_HINT not in message:
        return message
    from offload_trainer.run.resume_point import with_resume_hint

    return with_resume_hint(message, words)


def _carry_out(words: list[str]) -> None:
    if not words:
        print(help_text(), flush=True)
        raise UserError("nothing was asked for; `offload-train train` trains a small model on the text that ships here")
    name = take_command(words)
    if "--help" in words or "-h" in words:
        print(help_text(name), end="")
    elif "--version" in words:
        print(__version__)
    else:
        _COMMANDS[name or "train"](*parse(name or "train", words))


def _say(line: str) -> None:
    print(shown(line), file=sys.stderr, flush=True)


def _answer(found: Any, *, as_json: bool, told: Callable[[], str]) -> None:
    """Print a result as JSON, or in the words of `told`."""
    print(json.dumps(found, indent=1, default=asdict) if as_json else shown(told()), flush=True)


def _train(given: Namespace, words: list[str]) -> None:
    config = load_config(words)
    if given.print_config:
        print(dump_config(config), end="")
        return
    with redirect_stdout(sys.stderr):  # libraries print there
        if not has_launcher():
            refuse_missing(config)
        start_ranks(words, count=config.placement.gpus, engine=config.placement.engine_name)
        prepare_process(config)
        quieten()
        from offload_trainer.run.train import train_run

        train_run(config)


def _plan(given: Namespace, words: list[str]) -> None:
    """Plan for this machine or another. Raises UserError if the run could not start."""
    if given.machine is None and given.nodes is not None:
        raise UserError(
            "--nodes belongs to --machine, whose links say what is between them: `plan --machine NAME|FILE`"
        )
    if given.machine is None and not given.parallel:
        _plan_here(given, words)
        return
    from offload_trainer.plan.machine import read_machine
    from offload_trainer.run.commands.plan import compare_modes, described, plan_elsewhere

    machine = None
    if given.machine is not None:
        machine, words = described(read_machine(given.machine), words)
    config = load_config(words)
    quieten(loads=machine is None)
    if given.parallel or machine is None:
        values, text, plan = compare_modes(config, machine, given.nodes)
        _answer(values, as_json=given.json, told=lambda: text)
    else:
        plan = plan_elsewhere(config, machine, nodes=given.nodes)
        steps = config.train.known_steps
        _answer(plan.to_json(), as_json=given.json, told=lambda: plan.describe(steps=steps, full=given.explain))
    plan.refuse(force=config.placement.force)


def _plan_here(given: Namespace, words: list[str]) -> None:
    """Print the plan of a run and check that it could start here. Raises UserError if it could not.

    A conflict with existing files in the default run directory only prints a note, since the user has not named that
    directory or checkpoint.
    """
    config = prepared(words, runs=True)
    from offload_trainer.run.checks import check_start, refuse, refuse_output
    from offload_trainer.run.planning import plan_run

    planned = plan_run(config, longest=True)
    _answer(
        planned.plan.to_json(),
        as_json=given.json,
        told=lambda: planned.plan.describe(steps=config.train.known_steps, full=given.explain),
    )
    refuse(planned)
    check_start(planned, say=_say)
    try:
        refuse_output(planned)
    except UserError as error:
        if "output" in config.save.model_fields_set or config.save.resume not in ("auto", "never"):
            raise
        _say(f"note: training with these words would be refused: {error}")


def _bench(given: Namespace, words: list[str]) -> None:
    config = prepared(words)
    from offload_trainer.run.machine_rates import bench_here

    with redirect_stdout(sys.stderr):  # libraries print there
        machine = bench_here(
            config.placement,
            output=config.save.output,
            dtype=config.model.dtype,
            page=config.tiered.page_size,
            ranks=config.placement.gpus,
            drive_bytes=given.drive_gigabytes * 10**9 or None,
            say=_say,
        )
    _answer(machine.to_json(), as_json=given.json, told=lambda: describe_rates(machine))


def _tune(given: Namespace, words: list[str]) -> None:
    path = given.write
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: {path.absolute().parent} is not a directory")
    from offload_trainer.run.commands.recipes import refuse_taken, write_new

    refuse_taken(path)
    config = prepared(words, runs=True)
    from offload_trainer.machine.rate_cache import keep_ratios
    from offload_trainer.run.commands.tune import ratios, steered_phase, tune
    from offload_trainer.run.planning import plan_run

    planned = plan_run(config)
    plan = planned.plan
    _say(plan.describe(steps=config.train.known_steps))
    plan.refuse(force=config.placement.force)
    trials = tune(words, plan.tunable, phase=steered_phase(plan), steps=given.trial_steps, say=_say)
    write_new(path, dump_config(load_config([*words, *trials[0].words.split()])))
    as_planned = next(trial for trial in trials if not trial.words)
    try:
        keep_ratios(planned.machine, ratios(plan, as_planned))
    except OSError as error:  # the configuration is already written, so this is not fatal
        _say(f"note: measured / predicted seconds could not be kept for later plans: {reason(error)}")
    best = f"{trials[0].words or 'as planned'}: {trials[0].seconds:.2f} s a step, as planned {as_planned.seconds:.2f}"
    _answer([trial.to_json() for trial in trials], as_json=given.json, told=lambda: f"{best}; {path}")


def _doctor(given: Namespace, words: list[str]) -> None:
    config = prepared(words)
    from offload_trainer.plan.engines import engine_of
    from offload_trainer.run.commands.doctor import examine, report

    with redirect_stdout(sys.stderr):  # libraries print there
        checks = examine(
            config.placement,
            config.model,
            output=config.save.output,
            engine=engine_of(config),
        )
    _answer(checks, as_json=given.json, told=lambda: report(checks))
    if any(check.state == "failure" for check in checks):
        raise TrainerError("doctor: something that a run needs is missing, see above")


def _prepare(_: Namespace, words: list[str]) -> None:
    config = prepared(words, runs=True)
    from offload_trainer.run.train import prepare_run

    print("\n".join(map(str, prepare_run(config))))


def _export(given: Namespace, _: list[str]) -> None:
    go_offline()
    from offload_trainer.export.directory import export

    done = export(
        given.source,
        given.destination,
        dtype=given.dtype,
        shard_bytes=given.max_shard_size,
        check=given.check,
    )
    compared = f"; read back: every header, {done.compared} tensors equal" if given.check else ""
    where = f"exported {done.source} in {given.dtype} to {given.destination}"
    print(shown(f"{where}: {format_bytes(done.bytes)}{compared}"))


def _import(_: Namespace, words: list[str]) -> None:
    if len(words) < 2 or any(word.startswith("-") or ("=" in word and not Path(word).exists()) for word in words[:2]):
        named = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"import needs SOURCE and RUN first; got {named}. `offload-train import --help` says more")
    source, run, words = Path(words[0]), Path(words[1]), words[2:]
    config = prepared(words)
    if "output" in config.save.model_fields_set and Path(config.save.output) != run:
        raise UserError(f"--output {config.save.output}: the new run directory is RUN, here {run}; leave --output out")
    from offload_trainer.run.commands.import_checkpoint import import_checkpoint

    with redirect_stdout(sys.stderr):  # libraries print there
        done = import_checkpoint(
            source,
            run,
            model=config.model,
            optim=config.optim,
            config=config.model_dump(mode="json"),
            say=_say,
        )
    print(shown(f"imported {done.told} to {done.checkpoint}: {format_bytes(done.bytes)}"))
    print(shown(f"{done.rates}\ngo on with: {shlex.join(['offload-train', *words])} {done.words}"))


def _sample(given: Namespace, _: list[str]) -> None:
    go_offline()
    from offload_trainer.run.commands.generate import sample

    print(shown(sample(given.source, given.prompt, **_drawn(given), say=_say)))


def _chat(given: Namespace, _: list[str]) -> None:
    go_offline()
    from offload_trainer.run.commands.generate import chat

    person = sys.stdin.isatty()
    with suppress(*[Stopped] * person):  # Ctrl-C ends a conversation as Ctrl-D does
        chat(given.source, _typed() if person else sys.stdin, **_drawn(given), say=_say)


def _typed() -> Iterator[str]:
    """Yield the lines that a person types behind a prompt."""
    _say("type a message; Ctrl-D ends")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _drawn(given: Namespace) -> dict[str, Any]:
    return {"tokens": given.tokens, "temperature": given.temperature, "seed": given.seed}


def _runs(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.runs import aligned, run_table, runs_in

    found = runs_in(given.directory)
    _answer(found, as_json=given.json, told=lambda: aligned(run_table(found)))


def _report(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.runs import aligned, compared, comparison, write_page

    found = compared(given.runs)
    if given.html is not None:
        write_page(given.html, found)
    _answer([run.to_json() for run in found], as_json=given.json, told=lambda: aligned(comparison(found)))


def _ls(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.recipes import listing, recipes

    found = recipes()
    _answer(found, as_json=given.json, told=lambda: listing(found))


def _cp(given: Namespace, _: list[str]) -> None:
    from offload_trainer.run.commands.recipes import copy_recipe

    path, command = copy_recipe(given.name, given.destination)
    print(shown(f"{path}: written; {command}"))


_COMMANDS: dict[str, Callable[[Namespace, list[str]], None]] = {
    "train": _train,
    "plan": _plan,
    "bench": _bench,
    "tune": _tune,
    "doctor": _doctor,
    "prepare": _prepare,
    "export": _export,
    "import": _import,
    "sample": _sample,
    "chat": _chat,
    "runs": _runs,
    "report": _report,
    "ls": _ls,
    "cp": _cp,
}
