"""Command line of `offload-train`: dispatch the first word to a command and print its result or error.

Words after the command are configuration (`settings.py`). torch and transformers are imported only after a command
has a valid configuration, so that help and mistakes appear immediately.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from offload_trainer import __version__
from offload_trainer.errors import RERUN_HINT, PeerFailed, Stopped, TrainerError, UserError, exit_code, explain, reason
from offload_trainer.help_text import (
    help_text,
    parse_export_arguments,
    parse_import_arguments,
    parse_sampling_arguments,
    take_command,
    take_count,
    take_switches,
    take_value,
)
from offload_trainer.plan.machine import describe_rates
from offload_trainer.plan.plan import Plan
from offload_trainer.run.launcher import has_launcher, start_ranks
from offload_trainer.run.process_setup import go_offline, prepare_process, prepared, quieten
from offload_trainer.settings import dump_config, load_config, refuse_unwritable
from offload_trainer.signals import no_checkpoint_yet, stop_at_once
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
        print(help_text(name))
    elif "--version" in words:
        print(__version__)
    else:
        _COMMANDS[name or "train"](words)


def _train(words: list[str]) -> None:
    given = list(words)
    switches = take_switches(words, "--dry-run", "--print-config")
    config = load_config(words)
    if "--print-config" in switches:
        print(dump_config(config), end="")
        return
    if "--dry-run" in switches:
        _print_plan(words, as_json=False)
        return
    with no_checkpoint_yet(), redirect_stdout(sys.stderr):  # libraries print there
        start_ranks(given, count=config.placement.gpus, engine=config.placement.engine_name)
        prepare_process(config)
        quieten()
        from offload_trainer.run.train import train_run

        train_run(config)


def _plan(words: list[str]) -> None:
    switches = take_switches(words, "--json", "--parallel")
    as_json, parallel = "--json" in switches, "--parallel" in switches
    name, nodes = take_value(words, "--machine"), take_value(words, "--nodes")
    if name is None and nodes is not None:
        raise UserError(
            "--nodes belongs to --machine, whose links say what is between them: `plan --machine NAME|FILE`"
        )
    if parallel:
        _compare_modes(words, name, nodes, as_json=as_json)
        return
    if name is None:
        _print_plan(words, as_json=as_json)
        return
    from offload_trainer.plan.machine import read_machine
    from offload_trainer.plan.parallel.tables import describe, to_json
    from offload_trainer.run.commands.plan import described, plan_cluster, plan_elsewhere

    machine, words = described(read_machine(name), words)
    config = load_config(words)
    quieten(loads=False)
    if nodes is not None or machine.nodes > 1:
        plans = plan_cluster(config, machine, str(machine.nodes) if nodes is None else nodes)
        found = to_json(plans, machine) if as_json else describe(plans, machine)
        print(json.dumps(found, indent=1) if as_json else shown(found), flush=True)
        next((one for one in plans if one.fits), plans[-1]).refuse(force=config.placement.force)
        return
    plan = plan_elsewhere(config, machine)
    _show(plan, as_json=as_json)
    plan.refuse(force=config.placement.force)


def _compare_modes(words: list[str], name: str | None, nodes: str | None, *, as_json: bool) -> None:
    """Print a comparison of all ways to divide a step over the ranks. Raises UserError if none fits."""
    from offload_trainer.plan.machine import read_machine
    from offload_trainer.run.commands.plan import compare_modes, described

    machine = None
    if name is not None:
        machine, words = described(read_machine(name), words)
    config = load_config(words)
    quieten(loads=machine is None)
    found = compare_modes(config, machine, nodes)
    print(json.dumps(found.to_json(), indent=1) if as_json else shown(found.describe()), flush=True)
    found.refuse()


def _print_plan(words: list[str], *, as_json: bool) -> None:
    """Print the plan of a run and check that it could start here. Raises UserError if it could not.

    A conflict with existing files in the default run directory only prints a note, since the user has not named that
    directory or checkpoint.
    """
    config = prepared(words)
    from offload_trainer.run.checks import check_start, refuse, refuse_output
    from offload_trainer.run.planning import plan_run

    planned = plan_run(config, longest=True)
    _show(planned.plan, as_json=as_json)
    refuse(planned)
    check_start(planned, say=_say)
    try:
        refuse_output(planned)
    except UserError as error:
        if "output" in config.save.model_fields_set or config.save.resume not in ("auto", "never"):
            raise
        _say(f"note: training with these words would be refused: {error}")


def _show(plan: Plan, *, as_json: bool) -> None:
    print(json.dumps(plan.to_json(), indent=1) if as_json else shown(plan.describe()), flush=True)


def _bench(words: list[str]) -> None:
    as_json = bool(take_switches(words, "--json"))
    gigabytes = take_count(words, "--drive-gigabytes", otherwise=0)
    config = prepared(words)
    from offload_trainer.run.machine_rates import bench_here

    with redirect_stdout(sys.stderr):  # libraries print there
        machine = bench_here(
            config.placement,
            output=config.save.output,
            dtype=config.model.dtype,
            page=config.tiered.page_size,
            ranks=config.placement.gpus,
            drive_bytes=gigabytes * 10**9 or None,
            say=_say,
        )
    print(json.dumps(machine.to_json(), indent=1) if as_json else describe_rates(machine))


def _tune(words: list[str]) -> None:
    as_json = bool(take_switches(words, "--json"))
    path = Path(take_value(words, "--write") or "tuned.yaml")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write {path}: {path.absolute().parent} is not a directory")
    steps = take_count(words, "--trial-steps", otherwise=6)
    from offload_trainer.run.commands.recipes import refuse_taken, write_new

    refuse_taken(path)
    config = prepared(words)
    from offload_trainer.machine.rate_cache import keep_ratios
    from offload_trainer.run.commands.tune import ratios, steered_phase, tune
    from offload_trainer.run.planning import plan_run

    planned = plan_run(config)
    plan = planned.plan
    _say(plan.describe())
    plan.refuse(force=config.placement.force)
    trials = tune(words, plan.tunable, phase=steered_phase(plan), steps=steps, say=_say)
    write_new(path, dump_config(load_config([*words, *trials[0].words.split()])))
    as_planned = next(trial for trial in trials if not trial.words)
    try:
        keep_ratios(planned.machine, ratios(plan, as_planned))
    except OSError as error:  # the configuration is already written, so this is not fatal
        _say(f"note: measured / predicted seconds could not be kept for later plans: {reason(error)}")
    if as_json:
        print(json.dumps([trial.to_json() for trial in trials], indent=1))
        return
    found, before = trials[0].seconds, as_planned.seconds
    print(f"{trials[0].words or 'as planned'}: {found:.2f} s a step, as planned {before:.2f}; {path}")


def _doctor(words: list[str]) -> None:
    as_json = bool(take_switches(words, "--json"))
    given = os.environ.get("OMP_NUM_THREADS")
    config = prepared(words)
    from offload_trainer.plan.engines import engine_of
    from offload_trainer.run.commands.doctor import examine, report

    with redirect_stdout(sys.stderr):  # libraries print there
        checks = examine(
            config.placement,
            config.model,
            output=config.save.output,
            engine=engine_of(config),
            threads_given=given,
        )
    print(json.dumps([vars(check) for check in checks], indent=1) if as_json else report(checks))
    if any(check.state == "failure" for check in checks):
        raise TrainerError("doctor: something that a run needs is missing, see above")


def _say(line: str) -> None:
    print(shown(line), file=sys.stderr, flush=True)


def _prepare(words: list[str]) -> None:
    config = prepared(words)
    from offload_trainer.run.train import prepare_run

    print("\n".join(map(str, prepare_run(config))))


def _export(words: list[str]) -> None:
    arguments = parse_export_arguments(words)
    repository = None
    if pushed := arguments.pop("push_to_hub"):
        from offload_trainer.export.hub import HubRepository

        repository = HubRepository(pushed)
    else:
        go_offline()
    if arguments.pop("trainer"):
        from offload_trainer.run.commands.export_trainer import export_trainer

        kept = {key: arguments[key] for key in ("shard_bytes", "check")}
        done = export_trainer(arguments["source"], arguments["destination"], **kept)
    else:
        from offload_trainer.export.export_command import export

        done = export(**arguments)
    compared = f"; read back: every header, {done.compared} tensors equal" if arguments["check"] else ""
    where = f"exported {done.source} in {arguments['dtype']} to {arguments['destination']}"
    print(shown(f"{where}: {format_bytes(done.bytes)}{compared}"))
    if repository is not None:
        print(shown(f"pushed to {repository.push(arguments['destination'], message=f'Export of {done.source}')}"))


def _import(words: list[str]) -> None:
    source, run, words = parse_import_arguments(words)
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


def _sample(words: list[str]) -> None:
    prompt = take_value(words, "--prompt") or ""
    draw = parse_sampling_arguments(words, "sample")
    go_offline()
    from offload_trainer.run.commands.generate import sample

    print(shown(sample(Path(words[0]), prompt, **draw, say=_say)))


def _chat(words: list[str]) -> None:
    draw = parse_sampling_arguments(words, "chat")
    go_offline()
    from offload_trainer.run.commands.generate import chat

    chat(Path(words[0]), sys.stdin, **draw, say=_say)


def _runs(words: list[str]) -> None:
    as_json = bool(take_switches(words, "--json"))
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise UserError(f"runs needs at most one DIR; got {', '.join(map(shown, words))}")
    from offload_trainer.run.commands.runs import aligned, run_table, runs_in

    found = runs_in(Path(words[0] if words else "runs"))
    print(json.dumps([run.to_json() for run in found], indent=1) if as_json else shown(aligned(run_table(found))))


def _ls(words: list[str]) -> None:
    as_json = bool(take_switches(words, "--json"))
    if words:
        raise UserError(f"ls needs no words; got {', '.join(map(shown, words))}")
    from offload_trainer.run.commands.recipes import listing, recipes

    found = recipes()
    print(json.dumps([recipe.to_json() for recipe in found], indent=1) if as_json else listing(found))


def _cp(words: list[str]) -> None:
    refuse_unwritable(words)
    from offload_trainer.run.commands.recipes import copy_recipe

    path, command = copy_recipe(words)
    print(shown(f"{path}: written; {command}"))


def _report(words: list[str]) -> None:
    as_json, page = bool(take_switches(words, "--json")), take_value(words, "--html")
    if unknown := [word for word in words if word.startswith("-")]:
        raise UserError(f"report: {unknown[0]}: unknown flag; known: --json, --html")
    if not words:
        raise UserError("report needs at least one RUN, a run directory; `offload-train runs` lists them")
    from offload_trainer.run.commands.runs import aligned, compared, comparison, write_page

    runs = compared([Path(word) for word in words])
    if page is not None:
        write_page(Path(page), runs)
    print(json.dumps([run.to_json() for run in runs], indent=1) if as_json else shown(aligned(comparison(runs))))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
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
