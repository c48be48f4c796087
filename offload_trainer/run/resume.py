"""Choose what a run resumes from, in its locked directory: nothing, a checkpoint, or page files of a killed run.

RUN/pages lists the run's directories of page files on drives. Each has `record`, written after each step (which copy of
each page holds it, and the rest of the state), and run.json (identity, layout and configuration). The ranks of a node
share them: the first rank reads them, and writes the record once all ranks' pages of a step are on the drives.
docs/design_recovery.md says when a run resumes from page files, and when it refuses to start and keeps them.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from offload_trainer.common.errors import RERUN_HINT, TrainerError, UserError
from offload_trainer.common.safe_files import Count, as_kind, quoted, read_back
from offload_trainer.config import SaveSection
from offload_trainer.engine.protocol import Engine
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.pages.manifest import (
    FIX,
    Newest,
    StoreManifest,
    files_of,
    manifest_of,
    read_description,
    read_newest,
    refuse_outside,
)
from offload_trainer.offloading.pages.store import PageTable
from offload_trainer.plan.tiered.spec import TierSizes, layouts_of
from offload_trainer.ranks import from_rank_zero, nodes, place_here
from offload_trainer.run.build import Setup, with_steps
from offload_trainer.run.checkpoint import (
    MADE,
    TrainState,
    changed_settings,
    check_identity,
    check_resume,
    configuration_of,
    read_state,
)
from offload_trainer.run.loop import Job
from offload_trainer.settings import load_config
from offload_trainer.storage import scratch_dir
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.manifest import differences, weights_alone
from offload_trainer.storage.owned_dirs import ScratchDirectory, reason
from offload_trainer.storage.retention import complete_checkpoints, find_resume, remove_leftovers, step_of


@dataclass(frozen=True)
class _Made:
    """Content of run.json next to the page files: the metadata compared at resume."""

    identity: dict[str, Any]
    layout: dict[str, Any]
    config: dict[str, dict[str, Any]]
    ranks: Count


@dataclass(frozen=True)
class PageFiles:
    """Page files of a dead run that this run has taken over."""

    train: TrainState  # progress of the dead run
    newest: Newest
    instead: str  # flag that starts the run without the page files

    def resume(self, engine: Engine) -> None:
        """Load the page files into the engine. Collective. Raises UserError if a page is damaged."""
        assert isinstance(engine, TieredEngine)
        assert self.newest.engine is not None
        try:
            engine.offloaded.resume_from_pages(self.newest.engine, *self.newest.pages)
        except UserError as error:
            raise _refused(str(error), step=self.train.step, instead=self.instead) from error


def _all_steps_done(setup: Setup, checkpoint: Path) -> str | None:
    """Return a message if a checkpoint has all steps and no page files are newer."""
    save, steps, step, output = setup.config.save, setup.config.train.steps, read_state(checkpoint).step, setup.output
    if step < steps:
        return None
    try:
        if newest_state(save)[1]:
            return None
    except (OSError, ValueError, UserError):  # the later check of the page files reports this
        return None
    reached = f"{checkpoint} is already at step {step} of {steps}"
    more = "" if weights_alone(checkpoint) else "; --steps N"
    if checkpoint.resolve().parent.parent != output.resolve():
        raise UserError(
            f"--resume {save.resume}: {reached}, so nothing would be trained or saved in {output}"
            f"{more and f'{more} trains on'}. This exports it: offload-train export {quote(str(checkpoint))} DEST"
        )
    return f"done: {reached}, so nothing is changed{more and f'{more} extends it'}"


def finished(setup: Setup, checkpoint: Path | None) -> bool:
    """Return whether this run has finished here, and say so; else check all of its checkpoint. Collective."""
    record, say = setup.record, setup.log.say

    def told() -> str | None:
        if checkpoint is None:
            return None
        if ended := _all_steps_done(with_steps(setup, read_state(checkpoint)), checkpoint):
            check_identity(checkpoint, record.identity, record.layout)
            return ended
        say(f"checking {checkpoint}")
        for line in check_resume(checkpoint, record):
            say(f"note: {line}")
        return None

    if message := from_rank_zero(told, str | None):
        say(message)
    return message is not None


# -- while a run lives -------------------------------------------------------------------------------------------------


def keep(setup: Setup, job: Job) -> None:
    """Make the page files resumable from now on, by `job.commit`, and list them; say why, if that is not possible."""
    if not setup.log.loud:
        return
    why = _why_never(setup)
    if not why and not all(map(scratch_dir.has_locks, job.swaps)):
        why = "locks do not work on the drive, so the next start could not tell that this run has ended"
    if why:
        if setup.record.run["config"]["tiered"]["state_copies"] == 2:
            setup.log.say(f"note: a kill will leave no page files to resume from: {why}")
        return
    engine, record = job.engine, setup.record
    assert isinstance(engine, TieredEngine)
    engine.offloaded.enable_manifest(model=setup.output / "model")
    made = _Made(dict(record.identity), dict(record.layout), record.run["config"], setup.plan.work.world)
    write_text(job.swaps[0] / MADE, json.dumps(asdict(made)))
    scratch_dir.write_list(setup.listed, job.swaps)
    job.commit = lambda state: engine.commit(asdict(state))


def keep_step(job: Job, state: TrainState) -> bool:
    """Make the page files hold `state`, after which the run ends; return whether they can. Collective."""
    job.engine.synchronize()
    if job.commit:
        job.commit(state)
    return from_rank_zero(lambda: job.commit is not None, bool)


def drop(setup: Setup) -> None:
    """Unregister the page files after the run has ended in order, so that no later run resumes from them."""
    if setup.log.loud:
        with suppress(OSError):  # the directories are removed too, and the next start finds none
            scratch_dir.empty_list(setup.listed)


def clear(setup: Setup) -> None:
    """Remove what killed starts of a finished run left: page files, also on unused drives, and parts of outputs."""
    drop(setup)
    if setup.log.loud:
        with suppress(OSError, TrainerError):  # the next start that trains reports it
            remove_leftovers(setup.output / "checkpoints")
    if place_here()[0] not in [its.start for its in nodes()]:
        return
    for drive in setup.drives:
        try:
            scratch_dir.clear(drive, say=setup.log.say, listed=setup.listed)
        except (OSError, UserError) as error:
            setup.log.say(f"note: files of ended runs in {drive} could not be removed: {reason(error)}")


def _why_never(setup: Setup) -> str:
    """Return why a run with this plan cannot resume from its page files; "" if it can."""
    plan, sizes = setup.plan, setup.plan.sizes
    if not isinstance(sizes, TierSizes) or not plan.uses_drives:
        return "this run stores no state on drives"
    if sizes.places < 2:
        return "this run's pages have only one copy (tiered.state_copies=1)"
    if plan.work.nodes > 1:
        return f"this run has {plan.work.nodes} nodes; only runs on one node can resume from page files"
    if any(page.home < 0 for page in layouts_of(plan.work).homes(plan.placement, sizes).pages):
        return "this run stores some of its state in memory; with --ram-fraction 0 all of it is on drives"
    if any(not weight.trainable for weight in setup.source.shape.weights):
        return "they do not contain the weights that are not trained (model.freeze)"
    return ""


# -- at the start of a run ---------------------------------------------------------------------------------------------


def take_over(
    setup: Setup, stack: ExitStack, *, begins: TrainState | None
) -> tuple[PageFiles | None, Sequence[ScratchDirectory]]:
    """Return the page files that this run resumes from, None if there are none newer than the checkpoint.

    Return also their directories on rank 0, locked until `stack` closes. `begins`: the checkpoint's state. Collective.
    Raises UserError if the page files may be newer but this run cannot use them.
    """
    places: list[ScratchDirectory] = []

    def search() -> PageFiles | None:
        saved = complete_checkpoints(setup.output / "checkpoints")
        instead, step = f"--resume {quote(str(saved[-1]))}" if saved else "--resume never", 0
        try:
            with ExitStack() as locks:
                folders = _folders(setup, begins=begins)
                if not folders:
                    return None
                for folder in folders:
                    try:
                        places.append(scratch_dir.take_over(folder, say=setup.log.say))
                    except BlockingIOError:
                        raise TrainerError(f"{folder} is in use: its run is still running; wait for its end") from None
                    locks.callback(places[-1].leave)
                manifest = read_description(folders[0])
                for folder in folders:
                    refuse_outside(folder, manifest)
                newest = read_newest(manifest)
                if newest is None or newest.train is None or newest.engine is None:
                    return None  # the run was killed before it completed a step
                train = as_kind(newest.train, TrainState)
                if begins and train.step <= begins.step:
                    return None
                step = train.step
                _refuse_otherwise(setup, folders, manifest)
                for folder in folders:
                    scratch_dir.wait_for_ranks(folder, say=setup.log.say)
                stack.push(locks.pop_all())
        except (OSError, ValueError, TrainerError) as error:
            raise _refused(reason(error), step=step, instead=instead) from error
        where = ", ".join(str(place.path) for place in places)
        than = f"the checkpoint of step {begins.step}" if begins else "any checkpoint: there is none"
        setup.log.say(f"resuming from the page files in {where}, step {step}; they are newer than {than}")
        return PageFiles(train, newest, instead)

    if setup.config.save.resume != "auto":
        return None, ()
    return from_rank_zero(search, PageFiles | None), places


def _refused(why: str, *, step: int, instead: str) -> UserError:
    """Return the error of a start that cannot use the page files. `step`: the step in them; 0 if not known."""
    of = f"of step {step}, newer than any checkpoint" if step else "which may be newer than any checkpoint"
    return UserError(
        f"the page files that this run has left, {of}, cannot be resumed from, and are kept: {why}. Once that is "
        f"fixed, the same command resumes from them; start without them with {instead}"
    )


def _folders(setup: Setup, *, begins: TrainState | None) -> list[Path]:
    """Return the directories of the run's page files. Raises ValueError if its list names one that does not exist."""
    kept = [folder for drive in setup.drives for folder in scratch_dir.kept_for(setup.listed, drive)]
    if not os.path.lexists(setup.listed):
        return kept
    named = scratch_dir.named_in(setup.listed)
    gone = [folder for folder in named if not folder.is_dir()]
    moved = {folder.name for folder in kept} & {folder.name for folder in gone}  # their drive is mounted elsewhere
    if gone and len(gone) == len(named) and begins and not moved:
        listing = ", ".join(map(str, gone))
        setup.log.say(f"note: page files were in {listing}, which no longer exists; resuming from the checkpoint")
        return []
    if gone:
        there = next((f", where it was: it is at {one} now" for one in kept if one.name in moved), "?")
        raise ValueError(f"{gone[0]} does not exist; is its drive mounted{there}")
    return named


def _refuse_otherwise(setup: Setup, folders: Sequence[Path], manifest: StoreManifest) -> None:
    """Raise ValueError if the page files are another run's, incomplete, or of another layout; note other settings."""
    if not os.path.lexists(setup.listed):
        raise ValueError(f"{setup.listed}, which listed {', '.join(map(str, folders))}, no longer exists")
    files_of(manifest)  # checks sizes: opening a truncated file later would extend it with zeros
    if why := _why_never(setup):
        raise ValueError(why)
    identity, layout = setup.record.identity, setup.record.layout
    plan, layouts = setup.plan, layouts_of(setup.plan.work)
    assert isinstance(plan.sizes, TierSizes)
    made = read_back(folders[0] / MADE, _Made, fix=FIX)
    if others := differences(made.identity, identity) + differences(made.layout, layout):
        raise ValueError(f"{folders[0] / MADE} is of another run: {'; '.join(others[:5])}")
    expected = [scratch_dir.root_of(drive).resolve() for drive in setup.drives]
    if [folder.parent.resolve() for folder in folders] != expected:
        raise ValueError(f"they are in {quoted(', '.join(manifest.drives))}, and --nvme names other directories")
    table = PageTable(layouts.homes(plan.placement, plan.sizes).pages, plan.work.state)
    ours = manifest_of(folders, layouts.units, table, model=setup.output / "model", run=manifest.run)
    differ = [one.name for one in fields(ours) if getattr(ours, one.name) != getattr(manifest, one.name)]
    if "pages" in differ and (ranks := made.ranks) != (world := plan.work.world):
        raise ValueError(f"they were written by {ranks} rank(s), and this run has {world}: use --gpus {ranks}")
    if differ:
        raise ValueError(f"their layout differs from this run's ({', '.join(_WORDS.get(k, k) for k in differ)})")
    for line in changed_settings("the page files' run", made.config, setup.record.run["config"]):
        setup.log.say(f"note: {line}")


_WORDS = {
    "pages": "pages: tiered.page_size, the drives' measured speeds or the shares",
    "states": "optim.moment_dtype",
    "masters": "optim.master_dtype",
    "rule": "optim.name",
    "model": "the run directory has moved",
}


# -- what the same command would resume from ---------------------------------------------------------------------------

_WITHOUT = "the same command without --resume resumes"
STARTS_OVER = "nothing was saved yet: the same command starts from step 0"


def with_resume_hint(message: str, words: Sequence[str]) -> str:
    """Complete the phrase `errors.RERUN_HINT` in a message with the point that the command `words` resumes from."""
    hint = resume_hint(words)
    message = re.sub(f"{RERUN_HINT}(?! from)", lambda _: hint, message)
    return message.replace(RERUN_HINT, _WITHOUT) if hint.startswith(_WITHOUT) else message


def resume_hint(words: Sequence[str]) -> str:
    """Return a sentence on where the command `words` would resume from, without the step if it cannot be read."""
    again = RERUN_HINT
    try:
        save = load_config([word for number, word in enumerate(words) if number or word != "train"]).save
        begins = find_resume(save.resume, output=Path(save.output))
        newest = max(map(step_of, complete_checkpoints(Path(save.output) / "checkpoints")), default=-1)
        if save.resume != "auto" and newest > (step_of(begins) if begins else -1):
            save, again = save.model_copy(update={"resume": "auto"}), _WITHOUT
        saved, kept = newest_state(save)
    except (OSError, ValueError, UserError):
        return again
    if kept:
        return f"{again} from its page files, step {kept}"
    if saved and weights_alone(saved):
        return f"{saved.name} holds weights without moments, from which no run resumes"
    if saved:
        return f"{again} from the checkpoint {saved.name}"
    return STARTS_OVER


def earlier_run(save: SaveSection) -> tuple[Mapping[str, Mapping[str, Any]], bool]:
    """Return the configuration of the run to resume, {} if none can be read, and whether it has page files."""
    kept = 0
    try:
        saved, kept = newest_state(save)
        left = scratch_dir.folders_in(Path(save.output) / scratch_dir.PAGES)[0] if kept else saved
        return (configuration_of(left), bool(kept)) if left else ({}, False)
    except (OSError, ValueError, UserError):
        return {}, bool(kept)


def newest_state(save: SaveSection) -> tuple[Path | None, int]:
    """Return (checkpoint or None, step of the page files or 0 if not newer). ValueError if these are damaged."""
    saved = find_resume(save.resume, output=Path(save.output))
    folders = scratch_dir.folders_in(Path(save.output) / scratch_dir.PAGES) if save.resume == "auto" else []
    manifest = read_description(folders[0]) if folders else None
    if manifest is None:
        return saved, 0
    files_of(manifest)
    newest = read_newest(manifest)
    kept = 0 if newest is None or newest.train is None or newest.engine is None else newest.train["step"]
    return saved, kept if kept > (step_of(saved) if saved else 0) else 0
