"""Page files that the same command goes on from after a kill, without a checkpoint.

    RUN/pages           the directories on drives whose page files are this run's, one a line (storage/lease)
    <lease>/record      after each step which places hold it, and the rest of the state (offloading/page_index)
    <lease>/run.json    what the run was made with, to be compared as a checkpoint's manifest is

Where all state is on drives and pages have two places, the files always hold one whole step. They are gone on from
where they lie, if they are newer than the newest checkpoint and hold the same pages; 16-bit weights are made from the
masters. Otherwise what differs is said, and the run goes on from its checkpoint; but where the number of ranks is
another, which is easily mended, it stops and says so.

Several ranks of one node have the files and the record in common. The first rank looks at them, writes the record once
all ranks' pages of a step are home, and before that no rank writes a page of the next one. Where a rank of the dead run
may still write in the files, that is waited for (`lease.wait_for_ranks`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import with_config

from offload_trainer.checkpoint import MADE, TrainState, changed_settings
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.identity import differences
from offload_trainer.offloading.page_account import (
    DESCRIPTION,
    Newest,
    Told,
    description,
    read_description,
    read_newest,
    refuse_outside,
)
from offload_trainer.offloading.page_index import files_of
from offload_trainer.plan.layout import units_of
from offload_trainer.plan.sizes import TierSizes, homes_in
from offload_trainer.ranks import nodes, on_rank_zero, place_here, share_from_zero
from offload_trainer.readback import LENIENT, Count, as_kind, file_bytes, parsed, read_back, shown
from offload_trainer.run.build import Setup
from offload_trainer.storage.durable import write_text
from offload_trainer.storage.lease import clear, folders_in, keep_listed, keep_none, root_of, wait_for_ranks
from offload_trainer.storage.lease import take_over as taken_over
from offload_trainer.storage.removal import Workplace
from offload_trainer.trainer import Job


@with_config(LENIENT)
@dataclass(frozen=True)
class _Made:
    """What a run was made with."""

    identity: dict[str, Any]
    layout: dict[str, Any]
    config: dict[str, dict[str, Any]]
    ranks: Count = 1


class Lost(UserError):
    """Page files that can be gone on from, which this start would remove."""


@dataclass(frozen=True)
class PageFiles:
    """A dead run's page files, now this run's."""

    places: Sequence[Workplace]  # none on ranks other than the first
    train: TrainState  # where its loop stood
    newest: Newest
    pages: int

    def go_on(self, job: Job) -> None:
        """Make the engine stand where they do. All ranks call it."""
        assert isinstance(job.engine, TieredEngine)
        assert self.newest.engine is not None
        job.engine.go_on(self.newest.engine, self.newest.places(self.pages))


# -- while a run lives -------------------------------------------------------------------------------------------------


def keep(setup: Setup, job: Job) -> None:
    """From now on, where the plan allows it, page files are of one step, and a kill or an error leaves them.

    The first rank says so for all, since the record is its own; and where two places were asked for, why not.
    """
    if not setup.log.loud:
        return
    if why := _why_never(setup):
        if setup.planned.config.tiered.places == 2:
            setup.log.say(f"note: a kill will leave no page files to go on from: {why}")
        return
    engine, record = job.engine, setup.record
    assert isinstance(engine, TieredEngine)
    assert engine.offloaded.account is not None
    engine.offloaded.account.commits = True
    made = _Made(dict(record.identity), dict(record.layout), record.run["config"], setup.planned.plan.world)
    write_text(job.swaps[0] / MADE, json.dumps(asdict(made)))
    keep_listed(setup.listed, job.swaps)
    job.commit = lambda state: engine.commit(asdict(state))


def drop(setup: Setup) -> None:
    """The run has ended in order: nothing is gone on from."""
    if setup.log.loud:
        with suppress(OSError):  # then the next start looks, and finds nothing
            keep_none(setup.listed)


def clear_drives(setup: Setup) -> None:
    """The run had ended before: what is left of one that was killed between its end and the removal goes."""
    drop(setup)
    if place_here()[0] not in [its.start for its in nodes()]:
        return
    for drive in setup.planned.config.placement.nvme:
        try:
            clear(Path(drive).expanduser(), say=setup.log.say, listed=setup.listed)
        except (OSError, UserError) as error:
            setup.log.say(f"note: what dead runs left in {drive} stays: {_sentence(error)}")


def _why_never(setup: Setup) -> str:
    """Why page files of this plan are not gone on from; nothing where they are."""
    plan = setup.planned.plan
    sizes = plan.sizes
    if not isinstance(sizes, TierSizes) or not plan.uses_drives:
        return "this run keeps no state on drives"
    if sizes.remainders:
        return "this run keeps remainders of masters (tiered.masters=remainder), which are nothing without its weights"
    if sizes.places < 2:
        return "this run's pages have one place (tiered.places=1)"
    if plan.nodes > 1:
        return f"this run has {plan.nodes} nodes, each with page files of its own, and one alone goes on from them"
    if any(page.home < 0 for page in _pages(setup)):
        return "this run keeps some of its state in memory; --ram-fraction 0 keeps all of it on drives"
    if sizes.checksums:
        return "checksums (tiered.checksums) went with the memory of the run that wrote them"
    if any(not weight.trainable for weight in setup.planned.source.shape.weights):
        return "weights that are not trained (model.freeze) are not in them"
    return ""


def _pages(setup: Setup) -> Sequence[Any]:
    plan = setup.planned.plan
    assert isinstance(plan.sizes, TierSizes)
    return homes_in(units_of(setup.planned.source.shape), plan.placement, plan.sizes).pages


# -- when it starts ----------------------------------------------------------------------------------------------------


def take_over(setup: Setup, stack: ExitStack, *, begins: TrainState | None) -> PageFiles | None:
    """The page files that this run goes on from, where they are newer than the checkpoint of `begins`; said if so.

    None, and said why, where it cannot. They are locked until `stack` closes. All ranks call it, and the first one
    looks. UserError where they would be lost for what can be mended.
    """
    if setup.planned.config.save.resume != "auto":
        return None
    found: list[PageFiles] = []
    on_rank_zero(lambda: found.extend(_taken_over(setup, stack, begins=begins)))
    told = share_from_zero([(one.train, one.newest, one.pages) for one in found], list[tuple[TrainState, Newest, int]])
    return next(iter(found or [PageFiles((), *one) for one in told]), None)


def _taken_over(setup: Setup, stack: ExitStack, *, begins: TrainState | None) -> list[PageFiles]:
    """One, or none."""
    with ExitStack() as locks:
        try:
            found = _found(setup, locks, begins=begins)
            if found is None:
                return []
        except Lost:
            raise
        except (OSError, ValueError, TrainerError) as error:
            setup.log.say(f"note: page files that were left are not gone on from: {_sentence(error)}")
            return []
        stack.push(locks.pop_all())
    where = ", ".join(str(place.path) for place in found.places)
    than = f"the checkpoint of step {begins.step}" if begins else "any checkpoint: there is none"
    setup.log.say(f"going on from the page files in {where}, step {found.train.step}; they are newer than {than}")
    return [found]


def _sentence(error: BaseException) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def _found(setup: Setup, locks: ExitStack, *, begins: TrainState | None) -> PageFiles | None:
    """What the run's list names, locked; None where that is no newer than `begins`.

    ValueError, TrainerError, OSError with why it cannot be used, Lost.
    """
    folders = folders_in(setup.listed)
    if not folders:
        return None
    if why := _why_never(setup):
        raise ValueError(why)
    places = []
    for folder in folders:
        places.append(taken_over(folder, say=setup.log.say))
        locks.callback(places[-1].leave)
    told = read_description(folders[0])
    for folder in folders:
        refuse_outside(folder, told)
    files_of(told)  # one that was cut short would be made as long as it was, with zeros
    newest = read_newest(told)
    if newest is None or newest.train is None or newest.engine is None:
        return None  # no step of the run was whole yet
    train = as_kind(newest.train, TrainState)
    if begins and train.step <= begins.step:
        return None
    _refuse_others(setup, folders, told, step=train.step)
    for folder in folders:
        try:
            wait_for_ranks(folder, say=setup.log.say)
        except TrainerError as error:
            raise Lost(f"page files of step {train.step} may still be written by a rank of the run: {error}") from error
    return PageFiles(places, train, newest, len(told.pages))


def _refuse_others(setup: Setup, folders: Sequence[Path], told: Told, *, step: int) -> None:
    """ValueError where they are another run's, or lie otherwise, Lost where only the number of ranks is another.

    Lines for settings that steer it differently.
    """
    made = read_back(folders[0] / MADE, _Made, fix="The run goes on from its newest checkpoint")
    others = differences(made.identity, _in_json(setup.record.identity))
    others += differences(made.layout, _in_json(setup.record.layout))
    if others:
        raise ValueError(f"they are of another run: {'; '.join(others[:5])}")
    wished = [root_of(Path(drive).expanduser()).resolve() for drive in setup.planned.config.placement.nvme]
    if [folder.parent.resolve() for folder in folders] != wished:
        raise ValueError(f"they lie in {shown(', '.join(told.drives))}, and --nvme names other directories")
    units, sizes = units_of(setup.planned.source.shape), setup.planned.plan.sizes
    assert isinstance(sizes, TierSizes)
    ours = description(
        folders, units, _pages(setup), format=sizes.format, model=setup.output / "model", places=sizes.places
    )
    theirs = parsed(file_bytes(folders[0] / DESCRIPTION), dict)
    differ = [key for key, told in _in_json(ours).items() if told != theirs.get(key)]
    if "pages" in differ and made.ranks != setup.planned.plan.world:
        raise Lost(
            f"the page files in {folders[0]}, of step {step} and newer than any checkpoint, are laid out for "
            f"{made.ranks} rank(s), and this run has {setup.planned.plan.world}: give --gpus {made.ranks}, or let go "
            "of them by --resume never or --resume CHECKPOINT"
        )
    if differ:
        raise ValueError(f"they are laid out otherwise than this run's ({', '.join(_WORDS.get(k, k) for k in differ)})")
    for line in changed_settings("the page files' run", made.config, setup.record.run["config"]):
        setup.log.say(f"note: {line}")


def _in_json(told: Mapping[str, Any]) -> dict[str, Any]:
    """As it would be read back."""
    return parsed(json.dumps(dict(told)), dict)


_WORDS = {
    "pages": "pages: tiered.page_size, tiered.drive_speeds or the shares",
    "states": "optim.states",
    "rule": "optim.name",
    "model": "the run directory has moved",
    "places": "tiered.places",
}
