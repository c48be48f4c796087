"""Checkpoints: directories that are either whole or not there.

    checkpoints/step-00000100/
        MANIFEST.json      written last: format, step, what the state belongs to, every file's bytes and CRC-32
        state.json         TrainState
        *.safetensors      masters and moments by name (optim/state_files.py)
        engine.json        Adam's step count, the loss scale
        run.json           the run's configuration, plan and versions
        model/             the model's configuration and its tokenizer
        resident/          of a session: what was trained beside the model's weights (session/extra_params.py)

    trainer ── save(state) ──> snapshot ── written under a hidden name, synced, renamed ──> the oldest go
                                 (behind the training, where the engine's snapshot allows it)

Nothing in one needs the engine, the GPU, the model's class or the rest of the run directory to be read.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pydantic import with_config

from offload_trainer import __version__
from offload_trainer.config import RecordedConfig
from offload_trainer.engine.protocol import Engine, Snapshot
from offload_trainer.errors import LOST, TrainerError, UserError, reason
from offload_trainer.manifest import FORMAT, MANIFEST, Manifest, checked_manifest
from offload_trainer.ranks import ALONE, Group, everybody, new_group, on_rank_zero, wait_for_all
from offload_trainer.resume_compat import refuse_other_run
from offload_trainer.retention import WORK, complete_checkpoints, prune, remove_leftovers, step_of, steps_in
from offload_trainer.safe_files import LENIENT, Count, Steps, is_there, open_file, read_back, shown
from offload_trainer.storage.atomic_io import (
    bytes_below,
    copy_tree,
    put_in_place,
    sync_directory,
    sync_file,
    write_text,
)
from offload_trainer.storage.locks import NoLocks, take
from offload_trainer.storage.owned_dirs import name_in_workplace, replacing
from offload_trainer.storage.transfer import Future, Workers, ending
from offload_trainer.units import format_bytes, format_seconds

RESIDENT, MADE = "resident", "run.json"
_SMALL_FILES = 1 << 18  # bytes of headers, manifest and the other JSON, at most, for most models

# What a run may change when it goes on, and what then goes on differently.
_STEERING = {
    "model": ("dtype", "attention", "mlp_chunk"),
    "optim": (
        "lr",
        "betas",
        "eps",
        "moment_dtype",
        "weight_decay",
        "max_grad_norm",
        "schedule",
        "warmup_steps",
        "decay_steps",
    ),
    "train": ("steps", "micro_batch_size", "gradient_accumulation_steps"),
}


@with_config(LENIENT)  # older ones also hold generators, which nothing needs
@dataclass(frozen=True)
class TrainState:
    """Where a run stands between two steps. Plain JSON."""

    step: Steps  # done
    tokens: Count  # trained on, all ranks
    data_position: Count  # rows consumed, all ranks


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """What a run's checkpoints say beside its state."""

    identity: Mapping[str, Any]  # seed, data, ...: compared at resume
    layout: Mapping[str, Any]  # each weight's shape, and whether it is trained: compared at resume
    run: Mapping[str, Any]  # configuration, plan, versions
    model: Path  # directory with the model's configuration and tokenizer


class Checkpoints:
    """Saves a run's state under `root`, one save at a time. As a context manager it ends the one under way."""

    def __init__(
        self,
        root: Path,
        *,
        record: RunRecord,
        keep: int,
        need_bytes: int,
        say: Callable[[str], None],
        growing: Sequence[Path] = (),
    ) -> None:
        """`need_bytes`: bytes of one checkpoint's tensors. `growing`: files synced before a checkpoint is complete."""
        self.saved: int | None = None  # the newest step that is safe
        self.record = record
        self._root, self._keep, self._need, self._say = root, keep, need_bytes, say
        self._place = _place_of(root.parent)
        self._beside = growing
        self._told: set[str] = set()  # notes
        self._under_way: tuple[Future, Snapshot, int] | None = None
        self._worker: Workers | None = None
        self._beside_training = ALONE

    def save(self, engine: Engine, state: TrainState) -> None:
        """Save `state` and the engine's; all ranks call it, and each writes what it keeps.

        Raises TrainerError, the older checkpoints untouched, where the disk refuses or is too full, on every rank. What
        goes wrong behind the training is raised by `look`, `synchronize` or the next save.
        """
        self.synchronize()
        on_rank_zero(self._make_room)
        wait_for_all()
        snapshot = engine.snapshot()
        future = Future()
        self._under_way = future, snapshot, state.step

        def work(group: Group) -> None:
            try:
                self._write(snapshot, state, group)
            finally:
                snapshot.close()

        if snapshot.behind:
            self._worker = self._worker or Workers(1, "save")
            self._worker.put(ending(future, partial(work, self._beside_training)))
        else:
            ending(future, partial(work, everybody()))()
            self.synchronize()

    def note(self, line: str) -> None:
        """Say it, unless it has been said."""
        if line not in self._told:
            self._told.add(line)
            self._say(f"note: {line}")

    @property
    def ended(self) -> bool:
        """Whether a save under way has ended, on this rank; all ranks then `synchronize` after the same step."""
        return self._under_way is not None and self._under_way[0].done

    def synchronize(self) -> None:
        """Return when no save is under way; raises what the last one met."""
        if self._under_way is None:
            return
        (future, _, step), self._under_way = self._under_way, None
        future.wait()
        self.saved = step

    def __enter__(self) -> Checkpoints:
        """All ranks begin together."""
        self._beside_training = new_group()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A save under way is finished where the run ends in order; where it is torn down, it is let go of."""
        in_order = isinstance(error, TrainerError) and getattr(error, "exit_code", 0) != LOST
        if self._under_way and error is not None and not in_order:
            self._under_way[1].close()
            self._under_way = None
        try:
            self.synchronize()
        except TrainerError as failed:
            if error is None:
                raise
            self._say(f"and {failed}")  # the run ends with the error that came first
        if self._worker and (self._beside_training is ALONE or error is None):  # or it may wait for ranks that go on
            self._worker.close()

    # -- one of them --------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Look whether the directory is still the same, and has room."""
        if _place_of(self._root.parent) != self._place:
            raise TrainerError(
                f"{self._root.parent} is not the directory that this run began in: is its drive no longer mounted? "
                "Nothing was saved. Mount it, and the same command resumes from the newest checkpoint in it"
            )
        try:
            self._root.mkdir(exist_ok=True)
            sync_directory(self._root.parent)
            remove_leftovers(self._root)
            free = shutil.disk_usage(self._root).free
            need = self._need + bytes_below(self.record.model) + _SMALL_FILES
        except OSError as error:
            raise TrainerError(
                f"{self._root} cannot be written: {reason(error, self._root)}; nothing was saved"
            ) from error
        if free < need:
            raise TrainerError(
                f"{self._root}: a checkpoint takes {format_bytes(need)} and {format_bytes(free)} are free; "
                "older checkpoints are untouched. Free space there, or set --save-every 0"
            )

    def _write(self, snapshot: Snapshot, state: TrainState, group: Group) -> None:
        """The whole of it, by all ranks of `group`; what goes wrong on one of them is raised by all."""
        start = time.perf_counter()
        final = self._root / f"step-{state.step:08d}"
        try:
            with ExitStack() as stack:
                new = name_in_workplace(final)

                def begin() -> None:
                    stack.enter_context(replacing(final, what=WORK, say=self._say))
                    new.mkdir()

                group.first(begin)
                files = snapshot.write(new, group)
                group.first(lambda: self._finish(new, final, files, state))
        except OSError as error:
            raise TrainerError(
                f"{final} could not be written: {reason(error, self._root)}; older checkpoints are untouched. Free "
                "space there, and the same command resumes from the newest of them"
            ) from error
        if group.rank == 0:
            self._tell(final, files, seconds=time.perf_counter() - start, behind=snapshot.behind)

    def _finish(self, new: Path, final: Path, files: dict[str, Any], state: TrainState) -> None:
        """What is not the engine's, and its name."""
        finish_checkpoint(new, files, state, self.record)
        for path in self._beside:
            sync_file(path)
        put_in_place(new, final)

    def _tell(self, final: Path, files: dict[str, Any], *, seconds: float, behind: bool) -> None:
        size = sum(about["bytes"] for about in files.values())
        while_ = ", while training went on" if behind else ""
        rate = f"{size / seconds / 1e6:.0f} MB/s"
        self._say(f"saved {final}: {format_bytes(size)} in {format_seconds(seconds)}, {rate}{while_}")
        for line in prune(self._root, keep=self._keep):
            self.note(line)


def finish_checkpoint(directory: Path, files: dict[str, Any], state: TrainState, record: RunRecord) -> None:
    """What is not the engine's, put into `files`, then the manifest."""
    write_text(directory / "state.json", json.dumps(asdict(state), indent=1))
    write_text(directory / MADE, json.dumps(record.run, indent=1))
    copy_tree(record.model, directory / "model")
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in files:
            data = path.read_bytes()
            files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest = {
        "format": FORMAT,
        "offload_trainer": __version__,
        "torch": torch.__version__,
        "step": state.step,
        "identity": dict(record.identity),
        "layout": dict(record.layout),
        "files": files,
    }
    write_text(directory / MANIFEST, json.dumps(manifest, indent=1))


def _place_of(directory: Path) -> tuple[int, int] | None:
    """What tells this directory from another of the same name."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- reading ---------------------------------------------------------------------------------------------------------


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Inside, a run that goes on does not prune this checkpoint. UserError if it just has."""
    gone = UserError(f"{checkpoint}: removed in the meantime by its run, which has a newer one")
    try:
        manifest = open_file(checkpoint / MANIFEST)
    except FileNotFoundError:
        raise gone from None
    except ValueError as error:
        raise UserError(f"{checkpoint / MANIFEST} cannot be read: {error}. {_fix(checkpoint)}") from error
    try:
        try:
            take(manifest, shared=True)
        except NoLocks:
            pass  # then nothing is pruned
        except BlockingIOError:
            raise gone from None
        if not (checkpoint / MANIFEST).exists():
            raise gone
        yield
    finally:
        os.close(manifest)


def find_resume(wish: str, *, output: Path) -> Path | None:
    """The checkpoint that `--resume` means, or None to start anew. UserError if it names none.

    UserError as well where a link on the way to the run's checkpoints leads nowhere: there may be some.
    """
    _refuse_dangling(output / "checkpoints")
    if wish == "never":
        return None
    if wish == "auto":
        found = complete_checkpoints(output / "checkpoints")
        if not found and (left := sorted(steps_in(output / "checkpoints"), key=step_of)):
            raise UserError(f"{left[-1]} has no {MANIFEST}, so it is damaged; to start from step 0, move it away")
        return found[-1] if found else None
    return find_checkpoint(Path(wish))


def _refuse_dangling(path: Path) -> None:
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise UserError(
                f"{place} is a link to {shown(os.readlink(place))}, which does not exist: is its drive not mounted? "
                "Mount it; to start from step 0, remove the link or name another --output"
            )


def find_checkpoint(path: Path) -> Path:
    """`path` if it is a checkpoint, or the newest one of the run that it is."""
    if is_there(path / MANIFEST):
        return path
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    if not found:
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        raise UserError(f"{path}: neither a checkpoint ({MANIFEST}) nor a run directory that holds one")
    return found[-1]


@with_config(LENIENT)
@dataclass(frozen=True)
class _RunConfiguration:
    """The part of a run.json that a resume looks at."""

    config: RecordedConfig


def read_manifest(checkpoint: Path, *, moments: bool = True) -> Manifest:
    """The manifest, its files checked against it, those of moments if they matter.

    Raises UserError with the file and what does not match, and the checkpoint before it, if any.
    """
    return checked_manifest(checkpoint, moments=moments, fix=_fix(checkpoint))


def _fix(checkpoint: Path) -> str:
    """What to do where a checkpoint is damaged."""
    earlier = [path for path in complete_checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    offer = f"resumes from the one before it, {earlier[-1]}" if earlier else "starts from step 0"
    return f"Move {checkpoint.name} away, and the same command {offer}"


def read_state(checkpoint: Path) -> TrainState:
    """Where the run of a checkpoint stood. UserError where its state.json cannot be read."""
    return read_back(checkpoint / "state.json", TrainState, fix=_fix(checkpoint))


def check_resume(checkpoint: Path, record: RunRecord) -> list[str]:
    """Say which settings differ from those that the checkpoint was made with, one line each. Writes nothing.

    UserError if it is damaged, belongs to another seed, data or shape, or holds other weights.
    """
    manifest = read_manifest(checkpoint)
    refuse_other_run(checkpoint, manifest.identity, record.identity)
    refuse_other_run(checkpoint, manifest.layout, record.layout)
    return changed_settings(checkpoint.name, configuration_of(checkpoint), record.run["config"])


def configuration_of(directory: Path) -> dict[str, dict[str, Any]]:
    """What the run was made with that left this checkpoint, or these page files. UserError where it cannot be read."""
    return read_back(directory / MADE, _RunConfiguration, fix=_fix(directory)).config


def changed_settings(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which settings that steer a run differ from those that what is called `name` was saved with, one line each."""
    return [
        f"{section}.{key} is {now[section].get(key)}; {name} was saved with {shown(then[key])}"
        for section, keys in _STEERING.items()
        for then in [before.get(section, {})]
        for key in keys
        if key in then and now[section].get(key) != then[key]
    ]


def check_identity(checkpoint: Path, identity: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """UserError where the manifest alone shows that a run of these cannot go on from it; no other file is read."""
    manifest = read_back(checkpoint / MANIFEST, Manifest, fix=_fix(checkpoint))
    if manifest.format != FORMAT:
        raise UserError(f"{checkpoint}: written in format {manifest.format}, this version reads {FORMAT}")
    refuse_other_run(checkpoint, manifest.identity, identity)
    refuse_other_run(checkpoint, manifest.layout, layout)
