"""Forwarding of step and evaluation records to experiment trackers: TensorBoard, wandb, trackio.

    StepRecord, EvalRecord ── Trackers ──┬─ tensorboard: tensorboard/ in the run directory
                                         ├─ wandb: its account, or wandb/ there (WANDB_MODE=offline)
                                         └─ trackio: its local directory (TRACKIO_DIR)

Each is an optional extra, and records are sent only to the trackers in `save.trackers`. A tracker that cannot start is
an error that prevents the run. One that fails later is dropped with one message, and never stops the training.
A resumed run continues the tracker's same run: trackers.json in the run directory holds each tracker's run id.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import one_line, read_back
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord

Numbers = dict[str, float]

_PROJECT = "offload-trainer"
_LAST = 60.0  # seconds to wait at the end of a run for records that a tracker has queued


@dataclass(frozen=True)
class Tracked:
    """The facts about a run that trackers need."""

    directory: Path  # the run directory
    config: Mapping[str, Any]  # section.key: value
    done: int  # steps done before this start, if the run is resumed

    @property
    def name(self) -> str:
        return self.directory.absolute().name


@dataclass(frozen=True)
class _Tracker:
    """A tracker that has started. `identity` is its id of the run, used to resume it."""

    identity: str
    log: Callable[[Numbers, int], object]
    close: Callable[[], object]


class Trackers:
    """Sends each record to all trackers in `names`, whose libraries queue it and return.

    Raises UserError if one of them is not installed or cannot start.
    """

    def __init__(self, names: Sequence[str], run: Tracked, *, say: Callable[[str], None]) -> None:
        refuse_missing(names)
        self._say = say
        known: dict[str, str] = {}
        memory = run.directory / "trackers.json"
        if run.done and memory.exists():
            fix = "Remove it: trackers then begin another run for the rest of this one"
            known = read_back(memory, dict[str, str], fix=fix)
        self._trackers = {name: _begin(name, run, known.get(name)) for name in dict.fromkeys(names)}
        identities = {name: tracker.identity for name, tracker in self._trackers.items()}
        write_text(memory, json.dumps(known | identities, indent=1))

    def put(self, group: str, record: StepRecord | EvalRecord) -> None:
        """Log a finished step (group "train") or validation."""
        numbers = numbers_of(group, record)
        self._each(lambda tracker: tracker.log(numbers, record.step))

    def close(self) -> None:
        """Wait, with a time limit, until all trackers have taken all records."""
        thread = threading.Thread(target=lambda: self._each(lambda tracker: tracker.close()), daemon=True)
        thread.start()
        thread.join(_LAST)
        if thread.is_alive():
            self._say(
                f"note: {', '.join(self._trackers)}: not all was taken within {_LAST:.0f} s; metrics.jsonl has it"
            )

    def _each(self, act: Callable[[_Tracker], object]) -> None:
        """Call `act` for each tracker; drop one for which it raises."""
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # no tracker error may stop the run
                del self._trackers[name]
                self._say(f"note: {name} gets nothing more of this run, metrics.jsonl has it all: {one_line(error)}")


def numbers_of(group: str, record: StepRecord | EvalRecord) -> Numbers:
    """Return the record's numbers by name, such as train/loss, phases/forward, memory/ram or validation/loss."""
    values: Numbers = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict):
            values |= {f"{name}/{key}": number for key, number in value.items()}
        elif name != "step" and value is not None:
            values[f"{group}/{name.removeprefix('validation_')}"] = value
    return values


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UserError if one of these trackers cannot be imported. No other tracker is imported."""
    for name in names:
        try:
            module, attribute = _KINDS[name].imported
            if not hasattr(import_module(module), attribute):  # a directory of that name, such as wandb/ of runs
                raise ImportError(f"{module} is not installed; a directory of that name is found instead")
        except ImportError as error:
            raise UserError(
                f"save.trackers={name}: {one_line(error)}. Install it: pip install 'offload-trainer[{name}]'"
            ) from error


def _begin(name: str, run: Tracked, identity: str | None) -> _Tracker:
    try:
        return _KINDS[name].begin(run, identity)
    except Exception as error:  # errors of a library, a network or an account
        raise UserError(f"save.trackers={name} cannot begin: {one_line(error)}. {_KINDS[name].fix}") from error


# -- the trackers ----------------------------------------------------------------------------------------------------


def _tensorboard(run: Tracked, _: str | None) -> _Tracker:
    """Start TensorBoard. Events of an earlier run for steps that are repeated are hidden (`purge_step`)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.done + 1, max_queue=100_000)

    def log(numbers: Numbers, step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return _Tracker("tensorboard", log, writer.close)


def _wandb(run: Tracked, identity: str | None) -> _Tracker:
    """Start wandb. A missing API key is an error, since wandb would prompt for one on the terminal and block."""
    import wandb

    if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not wandb.api.api_key:
        raise UserError("there is no API key for it here")
    identity = identity or secrets.token_hex(4)
    began = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=run.name,
        id=identity,
        resume="allow",
        dir=str(run.directory),
        config=dict(run.config),
        settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
    )
    began.define_metric("step")
    # wandb's own counter accepts no step twice, and a resumed run repeats some
    began.define_metric("*", step_metric="step")
    return _Tracker(identity, lambda numbers, step: began.log({**numbers, "step": step}), began.finish)


def _trackio(run: Tracked, identity: str | None) -> _Tracker:
    """Start trackio. A new run gets a unique name, since trackio would mix it with an earlier run of the same name."""
    import trackio

    identity = identity or f"{run.name}-{secrets.token_hex(2)}"
    began = trackio.init(project=_PROJECT, name=identity, config=dict(run.config), resume="allow")
    return _Tracker(identity, lambda numbers, step: began.log(numbers, step=step), began.finish)


@dataclass(frozen=True)
class _Kind:
    imported: tuple[str, str]  # a module, and a name in it
    begin: Callable[[Tracked, str | None], _Tracker]  # second argument: the tracker's id of this run, if it has one
    fix: str  # advice for the user if it cannot start


_KINDS = {
    "tensorboard": _Kind(
        ("torch.utils.tensorboard", "SummaryWriter"), _tensorboard, "Look at the run directory, or leave it out"
    ),
    "wandb": _Kind(
        ("wandb", "init"),
        _wandb,
        "`wandb login`, or WANDB_MODE=offline, which writes to the run directory alone (`wandb sync` sends that)",
    ),
    "trackio": _Kind(("trackio", "init"), _trackio, "Name another TRACKIO_DIR, or leave it out"),
}
