"""Predict the seconds of each phase of a step from the machine's measured rates. Pure arithmetic.

    forward, backward   the slowest of: computation, weight copies to the device, drives, adding gradients in RAM
    update              the slowest of: AdamW on the CPU and on the GPU, drives, weight copies to the device

Everything within a phase overlaps. Phases run one after the other, unless the update overlaps the next forward
(`overlap.py`). A phase for which a rate is missing is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload_trainer.plan.machine import DriveFacts, DriveRates, MachineProfile, Rate, update_key
from offload_trainer.plan.time.compute_time import seconds_of_token
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes, format_count

PHASES = ("forward", "backward", "update")

UPDATE_START = 0.005  # seconds that Python spends on iterating over pages and ranges
_OF_FP32_STATES = {"fp32": 1.0, "bf16": 0.75, "8bit": 0.45}  # relative update speed, if only fp32 was measured


@dataclass(frozen=True)
class Bound:
    """A lower bound on a phase's time: one resource that the phase waits for."""

    phase: str
    seconds: float | None  # None: no rate was measured
    what: str
    kind: str  # compute, turns, adamw, adamw_gpu, device, drive, memory, network, gpus or meeting
    place: str = ""  # the disk, if `kind` is "drive"


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of each phase (None: unknown), and the bounds that they follow from."""

    seconds: dict[str, float | None]
    bounds: tuple[Bound, ...]
    behind: bool = False  # the update overlaps the next forward
    ahead: bool = False  # the update of pages on drives also overlaps the backward
    hidden: float = 0.0  # seconds of the update that overlap hides
    could_hide: float = 0.0  # seconds that overlapping the next forward would hide, if it is off
    if_clipped: float = 0.0  # extra seconds of a step whose speculative update has to be redone

    @property
    def step(self) -> float | None:
        """Return the seconds of a whole step, or None if a phase is unknown."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) - self.hidden if len(known) == len(self.seconds) else None

    @property
    def otherwise(self) -> Forecast:
        """Return this forecast with the overlap of update and next forward toggled."""
        assert not self.ahead
        return replace(self, behind=not self.behind, hidden=self.could_hide, could_hide=self.hidden)

    @property
    def in_line(self) -> dict[str, float | None]:
        """Return the seconds of each phase without overlap; of an overlapped update, only the exposed part."""
        update = self.seconds.get("update")
        if not self.behind or update is None:
            return self.seconds
        return {**self.seconds, "update": 0.0, "wait": update - self.hidden}

    @property
    def apart(self) -> tuple[str, ...]:
        """Return the phases that do not overlap with others, so that a measurement can correct their prediction."""
        return () if self.ahead else ("backward",) if self.behind else PHASES

    def limits(self, phase: str) -> str:
        """Return a description of the phase's slowest bound."""
        longest = self._longest(phase)
        return longest.what if longest else "not timed"

    def kind(self, phase: str) -> str:
        """Return the kind of the phase's slowest bound, or "" if nothing was measured."""
        longest = self._longest(phase)
        return longest.kind if longest else ""

    def _longest(self, phase: str) -> Bound | None:
        known = [bound for bound in self.bounds if bound.phase == phase and bound.seconds is not None]
        return max(known, key=lambda bound: bound.seconds or 0.0, default=None)


def correction_key(engine: str, phase: str, kind: str, *, ranks: int) -> str:
    """Return the key under which a ratio of measured to predicted seconds is stored."""
    return f"{engine}.{phase}.{kind}{f'.{ranks} ranks' if ranks > 1 else ''}"


def forecast(
    work: Workload,
    machine: MachineProfile,
    traffic: Sequence[Traffic],
    bounds: Sequence[Bound],
    *,
    engine: str,
    stretch: float = 1.0,
    on_top: Mapping[str, float] | None = None,
) -> Forecast:
    """Predict the seconds of a step.

    Args:
        work: the step's counts.
        machine: the rates; corrections from earlier runs are applied.
        traffic: bytes moved in each phase.
        bounds: the engine's bounds in addition to computation and traffic.
        engine: name under which corrections are stored.
        stretch: factor by which the update's drive time exceeds simultaneous reading and writing of its bytes.
        on_top: seconds that a phase takes in addition to its slowest bound.
    """
    every = [*_computing(work, machine), *bounds]
    for phase in PHASES:
        longer = stretch if phase == "update" else 1.0
        every += _traffic_bounds([m for m in traffic if m.phase == phase], machine, phase=phase, stretch=longer)
    found = Forecast({"data": 0.0}, tuple(every))
    for phase in PHASES:
        known = _longest([bound for bound in every if bound.phase == phase])
        if known is not None:
            key = correction_key(engine, phase, found.kind(phase), ranks=work.world)
            ratio = machine.rates.corrections.get(key, 1.0)
            known = ratio * (known + (on_top or {}).get(phase, 0.0))
        found.seconds[phase] = known
    return found


def _computing(work: Workload, machine: MachineProfile) -> list[Bound]:
    """Return the computation bounds of forward and backward: one GPU per rank, or one CPU for all ranks of a node."""
    tokens = work.tokens // (work.world if machine.gpu is not None else work.nodes)
    return [
        Bound(
            phase,
            None if seconds is None else tokens * seconds,
            f"computing {format_count(work.tokens)} tokens",
            "compute",
        )
        for phase, seconds in seconds_of_token(work, machine).items()
    ]


def in_turn(work: Workload, machine: MachineProfile, traffic: Sequence[Traffic]) -> list[Bound]:
    """Return the bounds of forward and backward with a single weight buffer, where copies and computation alternate."""
    found = []
    for computing in _computing(work, machine):
        phase = computing.phase
        moving = _traffic_bounds([one for one in traffic if one.phase == phase], machine, phase=phase, stretch=1.0)
        each = (computing.seconds, _longest(moving) if moving else 0.0)
        seconds = None if None in each else sum(one for one in each if one)
        what = f"{computing.what}, alternating with weight transfers, since there is only one buffer"
        found.append(Bound(phase, seconds, what, "turns"))
    return found


def _longest(bounds: Sequence[Bound]) -> float | None:
    """Return the largest bound, or None if any is unknown, since the unknown one may be the largest."""
    known = [bound.seconds for bound in bounds if bound.seconds is not None]
    return max(known) if known and len(known) == len(bounds) else None


def update_rate(work: Workload, machine: MachineProfile) -> float | None:
    """Return the parameters per second of the CPU update kernel that the run will use, for its moment format."""
    rates, states = machine.rates.update, work.state.moments.name
    names = ["native", "torch"] if work.kernel == "auto" else [work.kernel]
    for name in names:
        if timed := rates.get(update_key(name, states)):
            return timed.value
        if whole := rates.get(name):
            return whole.value * _OF_FP32_STATES[states]
    return None


def _traffic_bounds(moved: Sequence[Traffic], machine: MachineProfile, *, phase: str, stretch: float) -> list[Bound]:
    """Return one bound for each disk, and one for copies to and from the device."""
    by_disk: dict[str, list[Traffic]] = {}
    for one in moved:
        drive = machine.drive(one.place)
        by_disk.setdefault(drive.disk or one.place if drive else one.place, []).append(one)
    bounds = []
    for disk, parts in by_disk.items():
        read, written = sum(part.read for part in parts), sum(part.written for part in parts)
        if not read and not written:
            continue
        if disk == "device":
            seconds = _device_seconds(machine, read=read, written=written)
            ways = ((read, "to the device"), (written, "from the device"))
            what = ", ".join(f"{format_bytes(count)} {way}" for count, way in ways if count)
        else:
            drives = [drive for drive in (machine.drive(part.place) for part in parts) if drive]
            alone = _drive_seconds(drives[0] if drives else None, read=read, written=written)
            seconds = None if alone is None else stretch * alone
            ways = ((read, "read"), (written, "written"))
            what = f"{parts[0].place}: " + ", ".join(f"{format_bytes(count)} {way}" for count, way in ways if count)
        bounds.append(Bound(phase, seconds, what, "device" if disk == "device" else "drive", disk))
    return bounds


def _device_seconds(machine: MachineProfile, *, read: int, written: int) -> float | None:
    """Return the seconds of simultaneous copies both ways; a copy on a CPU reads and writes each byte."""
    rates = machine.rates
    if machine.gpu is None:
        return None if rates.memory is None else 2 * (read + written) / rates.memory.value
    return _at_once(read, written, rates.to_device, rates.from_device, rates.both_ways, rates.both_ways)


def _drive_seconds(drive: DriveFacts | None, *, read: int, written: int) -> float | None:
    if drive is None or drive.rates is None:
        return None
    rates: DriveRates = drive.rates
    return _at_once(read, written, rates.read, rates.write, rates.mixed_read, rates.mixed_write)


def _at_once(
    read: int, written: int, alone_in: Rate | None, alone_out: Rate | None, in_: Rate | None, out: Rate | None
) -> float | None:
    """Return the seconds of both directions in parallel until one has finished, then of the other alone."""
    if alone_in is None or alone_out is None or in_ is None or out is None:
        return None
    together = min(read / in_.value, written / out.value)
    left_in, left_out = read - together * in_.value, written - together * out.value
    return together + max(left_in / alone_in.value, left_out / alone_out.value, 0.0)


def tokens_that_hide_the_update(found: Forecast, *, tokens: int, share: float = 0.1) -> int | None:
    """Return the tokens per step, by accumulation, from which on the update takes at most `share` of the step."""
    forward, backward, update = (found.seconds[phase] for phase in PHASES)
    if forward is None or backward is None or update is None or forward + backward <= 0:
        return None
    return -int(-tokens * (update - found.hidden) * (1 - share) / share // (forward + backward))
