"""Decide whether a run changes its update schedule after its first steps, whose phases correct the plan's forecast.

    StepRecords ── machine_as_measured ──> rates with corrections ── plan again ──> ScheduleChange, or None

A schedule is the pair `tiered.overlap` and `tiered.master_format`. No bit of the results depends on it, so a run may
save a checkpoint, close its engine, and resume from that checkpoint with another schedule (`run/train.py`). It does so
at most once, only for keys that the user left at `auto`, and only if the rest of the run earns back what it costs.

With several ranks, rank 0 decides by the phases of the slowest one, and all ranks change after the same step. Runs on
several machines keep their schedule: every machine would have to check its room for the new plan, and rates of the
network are not measured at a start.

The checkpoint records the new schedule in its configuration, and a run that resumes keeps it (`run/planning.py`). A
start therefore plans the layout that the page files of such a run have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from offload_trainer.checkpoint import RunRecord
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import checkpoint_bytes
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan, workload
from offload_trainer.plan.step_time import PHASES, Forecast, correction_key
from offload_trainer.plan.tiered.engine import WORTH
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.workload import Workload
from offload_trainer.ranks import from_rank_zero
from offload_trainer.run.build import Setup, resolve
from offload_trainer.run.planning import Planned, shared_plan
from offload_trainer.telemetry.metrics import StepRecord
from offload_trainer.units import format_bytes, format_count, format_seconds

_WARM = 2  # steps in which allocators and caches fill
_COUNTED = 6  # steps after those whose medians are used
_LAST = 40  # step of this process after which an unsteady run is no longer watched
_UNCLIPPED = 8  # steps without clipping before counted ones, if the update guesses that a step is not clipped
_SPREAD = 0.3  # largest interquartile range of a step's seconds, relative to the median
_LEAST_SECONDS = 0.05  # shorter steps and phases are Python's own time
_FARTHEST = 4.0  # largest correction either way; only a wrong rate explains more
_CLOSE = 0.02  # relative error up to which a forecast equals a measurement


@dataclass(frozen=True)
class ScheduleChange:
    """Another schedule for the rest of a run."""

    planned: Planned  # the run's configuration and plan from now on
    told: str  # a line for the user: the measurement, the change and the seconds that it saves


class ScheduleWatch:
    """Watch the first steps of a run that has just been built, and decide once whether it changes its schedule."""

    def __init__(self, setup: Setup, *, build_seconds: float, say: Callable[[str], None]) -> None:
        """Watch a run. `build_seconds`: the time that building its engine took. `say`: prints the decision."""
        self.setup = setup  # It has the new plan once `__call__` has returned a record.
        self._build_seconds, self._say = build_seconds, say
        self._rows: list[StepRecord] = []
        self._seen = 0
        self._deciding = may_change(setup.planned)

    def __call__(self, record: StepRecord | None) -> RunRecord | None:
        """Take a step's record; return the run's metadata with another schedule if it should change to that now.

        Collective: rank 0 decides, which alone has the record, and all ranks return the same.
        """
        if not self._deciding:
            return None
        found = list[ScheduleChange]()

        def decided() -> tuple[bool, str | None]:
            assert record is not None
            change = self._change_after(record)
            if change is None:
                return self._deciding, None
            found.append(change)
            return self._deciding, change.told

        self._deciding, told = from_rank_zero(decided, tuple[bool, str | None])
        if told is None:
            return None
        self._say(told)
        planned = shared_plan(found[0].planned if found else self.setup.planned)
        self.setup = with_change(self.setup, ScheduleChange(planned, told))
        return self.setup.record

    def _change_after(self, record: StepRecord) -> ScheduleChange | None:
        """Return another schedule if this step's record and those before it decide for one."""
        self._seen += 1
        rows = self._rows
        rows.append(record)
        if _guesses(self.setup.plan) and _was_clipped(record, limit=self.setup.optim.max_grad_norm):
            rows.clear()
        counted = rows[_UNCLIPPED if _guesses(self.setup.plan) else _WARM :]
        steady = len(counted) >= _COUNTED and _is_steady(counted[-_COUNTED:])
        self._deciding = not steady and self._seen < _LAST
        if not steady:
            return None
        left = self.setup.train.steps - record.step
        return decide(self.setup.planned, counted[-_COUNTED:], left=left, build_seconds=self._build_seconds)


def with_change(setup: Setup, change: ScheduleChange) -> Setup:
    """Return the setup of the rest of the run; its plan has the reason as a note."""
    plan = replace(change.planned.plan, notes=(*change.planned.plan.notes, change.told))
    return resolve(replace(change.planned, plan=plan), setup.data, setup.log)


def may_change(planned: Planned) -> bool:
    """Return whether the run may change its schedule: it leaves one open, can save, and knows the seconds of a step."""
    plan, tiered = planned.plan, planned.config.tiered
    left_open = "auto" in (tiered.overlap, tiered.master_format)
    can_save = planned.config.save.every != 0 and plan.cannot_save is None
    return left_open and can_save and plan.engine == "tiered" and plan.nodes == 1 and plan.forecast.step is not None


def _guesses(plan: Plan) -> bool:
    """Return whether the update starts before it is known that a step is not clipped."""
    return isinstance(plan.sizes, TierSizes) and plan.sizes.ahead


def _was_clipped(record: StepRecord, *, limit: float) -> bool:
    return record.skipped or record.grad_norm is None or bool(limit and record.grad_norm > limit)


def _seconds(record: StepRecord) -> float:
    """Return the seconds of a step's phases that a plan forecasts."""
    return sum(record.phases.get(phase, 0.0) for phase in (*PHASES, "wait"))


def _is_steady(rows: Sequence[StepRecord]) -> bool:
    seconds = [_seconds(row) for row in rows]
    low, middle, high = quantiles(seconds, n=4)
    return high - low <= _SPREAD * middle


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(planned: Planned, rows: Sequence[StepRecord], *, left: int, build_seconds: float) -> ScheduleChange | None:
    """Return another schedule if the plan, corrected by `rows`, expects enough of it; else None.

    It must save the planner's ordinary margin of a step, and in the `left` steps more than changing takes, whichever
    resource explains the measurements. Without corrections the same configuration must have the same layout, since that
    is what a later start plans.
    """
    now, machines = with_schedule(planned, planned.plan), machines_as_measured(planned, rows)
    if not machines:
        return None
    place = planned.config.placement.model_copy(update={"params": str(planned.plan.placement.params)})
    found = planned_with(replace(planned, config=planned.config.model_copy(update={"placement": place})), machines[0])
    new = replace(with_schedule(planned, found.plan), plan=found.plan, machine=machines[0])
    layouts = [_layout(planned_with(new, machine).plan) for machine in (planned.machine, *machines)]
    if schedule_in_words(new) == schedule_in_words(now) or not new.plan.fits or set(layouts) != {_layout(new.plan)}:
        return None
    steps = [tuple(planned_with(one, machine).plan.forecast.step or 0.0 for one in (now, new)) for machine in machines]
    before, after = min(steps, key=lambda pair: pair[0] - pair[1])
    cost = seconds_of_change(new, build_seconds=build_seconds)
    if any(its[1] > (1 - WORTH) * its[0] for its in steps) or (before - after) * left < cost:
        return None
    return ScheduleChange(new, _told(now, new, rows, steps=(before, after), left=left, cost=cost))


def with_schedule(planned: Planned, plan: Plan) -> Planned:
    """Return `planned` with the schedule of `plan` set in its configuration."""
    sizes = plan.sizes
    assert isinstance(sizes, TierSizes)
    overlap = "backward" if sizes.ahead else "forward" if sizes.overlap else "off"
    update = {"overlap": overlap, "master_format": "split" if sizes.remainders else "fp32"}
    config = planned.config.model_copy(update={"tiered": planned.config.tiered.model_copy(update=update)})
    return replace(planned, config=config)


def planned_with(planned: Planned, machine: MachineProfile) -> Planned:
    """Return `planned` with its configuration planned again, on `machine`."""
    plan = planned.plan
    _, plan = resolve_and_plan(planned.config, planned.source.shape, machine, world=plan.world, nodes=plan.nodes)
    return replace(planned, plan=plan, machine=machine)


def _layout(plan: Plan) -> tuple[object, ...]:
    """Return all that the engine is built from."""
    return plan.placement, plan.sizes, plan.checkpointed, plan.micro_batch, plan.mlp_chunk


def schedule_in_words(planned: Planned) -> str:
    """Return the settings of the schedule."""
    tiered = planned.config.tiered
    split = " tiered.master_format=split" if tiered.master_format == "split" else ""
    return f"tiered.overlap={tiered.overlap}{split}"


def _told(
    now: Planned, new: Planned, rows: Sequence[StepRecord], *, steps: tuple[float, float], left: int, cost: float
) -> str:
    expected, measured = now.plan.forecast.step or 0.0, median(map(_seconds, rows))
    saved = format_seconds((steps[0] - steps[1]) * left)
    return (
        f"steps {rows[0].step}-{rows[-1].step} took {format_seconds(measured)} each, planned were "
        f"{format_seconds(expected)}: changing from {schedule_in_words(now)} to {schedule_in_words(new)}, by these "
        f"measurements {format_seconds(steps[1])} a step instead of {format_seconds(steps[0])}. That saves about "
        f"{saved} in the {format_count(left)} steps left and takes about {format_seconds(cost)}, to save and load "
        f"a checkpoint of {format_bytes(checkpoint_bytes(_workload(new)))}"
    )


# -- corrections from measured phases ----------------------------------------------------------------------------------


def machines_as_measured(planned: Planned, rows: Sequence[StepRecord]) -> list[MachineProfile]:
    """Return the machine with corrections for which the run's plan has the measured seconds; none if none do.

    Forward and backward are corrected by their own seconds, which exclude waits for the update. If the update overlaps
    the backward, that is longer for it, and the ratio of the forward stands for both. An overlapped update has no
    seconds of its own: it is corrected until the forecast of the step is as measured. If it is slower than planned, any
    of its resources may be the reason: the first machine has the one that the plan calls the slowest, the others the
    others.
    """
    now, rates = with_schedule(planned, planned.plan), planned.machine.rates
    plan, found, timed_as = planned.plan, planned.plan.forecast, _workload(planned).timed_as(planned.plan.engine)
    taken = {phase: median(row.phases.get(phase, 0.0) for row in rows) for phase in ("forward", "backward")}
    measured = median(map(_seconds, rows))
    if measured < _LEAST_SECONDS:
        return []
    ratios = {}
    for phase, seconds in taken.items():
        expected = found.seconds[phase] or 0.0
        ratios[phase] = seconds / expected if expected >= _LEAST_SECONDS else 1.0
    if found.ahead:
        ratios["backward"] = ratios["forward"]
    if not all(1 / _FARTHEST <= ratio <= _FARTHEST for ratio in ratios.values()):
        return []

    def machine(of_update: float, slowest: str = "") -> MachineProfile:
        corrections = dict(rates.corrections)
        for phase, ratio in {**ratios, "update": of_update}.items():
            for kind, times in _times_of_kinds(found, phase, ratio, slowest=slowest).items():
                key = correction_key(timed_as, phase, kind, ranks=plan.world)
                corrections[key] = corrections.get(key, 1.0) * times
        return replace(planned.machine, rates=replace(rates, corrections=corrections))

    def step(of_update: float) -> float | None:
        again = planned_with(now, machine(of_update)).plan
        return again.forecast.step if _layout(again) == _layout(plan) else None

    ratio = _ratio_for(step, measured)
    if ratio is None:
        return []
    others = {bound.kind for bound in found.bounds if bound.phase == "update" and bound.seconds}
    others -= {found.kind("update")}
    return [machine(ratio), *(machine(ratio, kind) for kind in sorted(others) if ratio > 1 + _CLOSE)]


def _times_of_kinds(found: Forecast, phase: str, ratio: float, *, slowest: str) -> dict[str, float]:
    """Return how much longer each resource of a phase takes than forecast, by its kind, if the phase takes `ratio`.

    `slowest`: the resource of the update that takes as long as the phase; "": the slowest one of the forecast, as for
    the other phases. No other resource can have taken longer than the phase.
    """
    kind = slowest if slowest and phase == "update" else found.kind(phase)
    longest = max((bound.seconds or 0.0 for bound in found.bounds if bound.phase == phase), default=0.0)
    whole, times = ratio * longest, dict[str, float]()
    for bound in found.bounds:
        if bound.phase == phase and bound.seconds and (bound.kind == kind or bound.seconds > whole):
            times[bound.kind] = min(times.get(bound.kind, whole / bound.seconds), whole / bound.seconds)
    return times


def _ratio_for(step: Callable[[float], float | None], measured: float) -> float | None:
    """Return the ratio nearest to 1 with which `step`, which grows with it, is as measured; None if none is."""
    first = step(1.0)
    if first is None:
        return None
    if abs(first - measured) <= _CLOSE * measured:
        return 1.0
    near, far = 1.0, _FARTHEST if first < measured else 1 / _FARTHEST
    last = step(far)
    if last is None or (last - measured) * (first - measured) > 0:
        return None
    for _ in range(10):
        middle = (near * far) ** 0.5
        found = step(middle)
        if found is None:
            return None
        if (found - measured) * (first - measured) > 0:
            near = middle
        else:
            far = middle
    return far


# -- what a change costs -----------------------------------------------------------------------------------------------


def _workload(planned: Planned) -> Workload:
    return workload(planned.config, planned.source.shape, world=planned.plan.world, nodes=planned.plan.nodes)


def seconds_of_change(planned: Planned, *, build_seconds: float) -> float:
    """Return the seconds of saving a checkpoint, building the engine of `planned` and loading the checkpoint.

    State on drives is read and written one after the other with the checkpoint, which is the slowest case.
    """
    machine, plan = planned.machine, planned.plan
    read, write = machine.rates_of(machine.output)
    seconds = build_seconds + checkpoint_bytes(_workload(planned)) * (1 / read + 1 / write)
    for drive in machine.drives:
        held = sum(item.bytes for item in plan.items if item.tier == drive.directory)
        read, write = machine.rates_of(drive)
        seconds += held * (1 / read + 1 / write)
    return seconds
