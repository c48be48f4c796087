"""Seconds of a step, phase by phase, from what the machine was timed at. Pure arithmetic.

    forward, backward   the slowest of: computing, the weights' way to the device, the drives, adding gradients in RAM
    update              the slowest of: AdamW on the CPU and on the GPU, the drives, the weights' way to the device

What overlaps counts once: everything within a phase does, phases follow each other, but for an update that runs behind
the next forward (`overlap.py`). A phase for which the machine has no rate is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload_trainer.plan.computing import seconds_of_token
from offload_trainer.plan.machine import DriveFacts, DriveRates, MachineProfile, Rate, update_key
from offload_trainer.plan.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes, format_count

PHASES = ("forward", "backward", "update")

UPDATE_START = 0.005  # seconds: pages and stretches are walked in Python
_OF_FP32_STATES = {"fp32": 1.0, "bf16": 0.75, "8bit": 0.45}  # speed of the update, where fp32 alone was timed


@dataclass(frozen=True)
class Bound:
    """One thing that a phase waits for."""

    phase: str
    seconds: float | None  # None: not timed
    what: str
    kind: str  # "compute", "turns", "adamw", "adamw_gpu", "device", "drive" or "memory"
    place: str = ""  # of a drive: the disk


@dataclass(frozen=True)
class Forecast:
    """Seconds of each phase (None: not known), and all that they were worked out from."""

    seconds: dict[str, float | None]
    bounds: tuple[Bound, ...]
    behind: bool = False  # whether the update runs behind the next forward
    ahead: bool = False  # and begins behind the backward, where its pages are on drives
    hidden: float = 0.0  # seconds of it that nothing waits for
    could_hide: float = 0.0  # seconds of one in line that nothing would wait for behind the next forward
    if_clipped: float = 0.0  # seconds that a step takes longer where it is decided otherwise than was expected

    @property
    def step(self) -> float | None:
        """Seconds of a whole step."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) - self.hidden if len(known) == len(self.seconds) else None

    @property
    def otherwise(self) -> Forecast:
        """The same with an update in line that is behind the next forward, and behind it where it is in line."""
        assert not self.ahead
        return replace(self, behind=not self.behind, hidden=self.could_hide, could_hide=self.hidden)

    @property
    def in_line(self) -> dict[str, float | None]:
        """Seconds of each phase as one after the other: of an update behind the forward, what is waited for."""
        update = self.seconds.get("update")
        if not self.behind or update is None:
            return self.seconds
        return {**self.seconds, "update": 0.0, "wait": update - self.hidden}

    @property
    def apart(self) -> tuple[str, ...]:
        """The phases whose seconds are theirs alone."""
        return () if self.ahead else ("backward",) if self.behind else PHASES

    def limits(self, phase: str) -> str:
        """What makes a phase as long as it is."""
        longest = self._longest(phase)
        return longest.what if longest else "not timed"

    def kind(self, phase: str) -> str:
        """Of what that is; nothing where nothing was timed."""
        longest = self._longest(phase)
        return longest.kind if longest else ""

    def _longest(self, phase: str) -> Bound | None:
        known = [bound for bound in self.bounds if bound.phase == phase and bound.seconds is not None]
        return max(known, key=lambda bound: bound.seconds or 0.0, default=None)


def correction_key(engine: str, phase: str, kind: str, *, ranks: int) -> str:
    """What a ratio of measured to predicted seconds holds for."""
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
    """Seconds of a step. `bounds`: what its phases wait for beside products and traffic, as the engine says.

    `stretch`: how many times as long the update's drives take as their bytes both ways at once. `on_top`: seconds that
    a phase takes beyond the slowest of what it waits for.
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
    """Forward and backward: each rank has a GPU, or the ranks of a node one CPU."""
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
    """Of a forward and a backward with one buffer for weights: what comes is not on its way while others compute."""
    found = []
    for computing in _computing(work, machine):
        phase = computing.phase
        moving = _traffic_bounds([one for one in traffic if one.phase == phase], machine, phase=phase, stretch=1.0)
        each = (computing.seconds, _longest(moving) if moving else 0.0)
        seconds = None if None in each else sum(one for one in each if one)
        what = f"{computing.what}, and weights that come in between: there is one buffer"
        found.append(Bound(phase, seconds, what, "turns"))
    return found


def _longest(bounds: Sequence[Bound]) -> float | None:
    """None where something has not been timed, since it may be what everything waits for."""
    known = [bound.seconds for bound in bounds if bound.seconds is not None]
    return max(known) if known and len(known) == len(bounds) else None


def update_rate(work: Workload, machine: MachineProfile) -> float | None:
    """Parameters a second of the kernel that the run takes on the CPU, with moments as it stores them."""
    rates, states = machine.rates.update, work.state.moments.name
    names = ["native", "torch"] if work.kernel == "auto" else [work.kernel]
    for name in names:
        if timed := rates.get(update_key(name, states)):
            return timed.value
        if whole := rates.get(name):
            return whole.value * _OF_FP32_STATES[states]
    return None


def _traffic_bounds(moved: Sequence[Traffic], machine: MachineProfile, *, phase: str, stretch: float) -> list[Bound]:
    """One bound for each disk, and one for the way to the device."""
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
    """A GPU's copies each way at once; where the CPU computes, a copy in memory, which reads and writes each byte."""
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
    """Both ways together until one is done, then the other one by itself."""
    if alone_in is None or alone_out is None or in_ is None or out is None:
        return None
    together = min(read / in_.value, written / out.value)
    left_in, left_out = read - together * in_.value, written - together * out.value
    return together + max(left_in / alone_in.value, left_out / alone_out.value, 0.0)


def tokens_that_hide_the_update(found: Forecast, *, tokens: int, share: float = 0.1) -> int | None:
    """Tokens a step (more of them by accumulation) from which the update is at most `share` of it."""
    forward, backward, update = (found.seconds[phase] for phase in PHASES)
    if forward is None or backward is None or update is None or forward + backward <= 0:
        return None
    return -int(-tokens * (update - found.hidden) * (1 - share) / share // (forward + backward))
