"""Write, find and verify checkpoints. A checkpoint directory is either complete or does not exist.

MANIFEST.json is written last, and has the format, step, run identity, and size and CRC-32 of every file. The others are
state.json (TrainState), *.safetensors (master weights and moments by name, optim/state_files.py), engine.json, run.json
(configuration, plan, versions), model/ (configuration, tokenizer), and from a Session resident/. One of weights alone
(save.every=0) has no moments and no engine.json. A directory is written under a hidden name and renamed, in a
background thread if the engine's snapshot allows it. It can be read without the engine or a GPU.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from offload_trainer import __version__
from offload_trainer.common.errors import LOST, RERUN_HINT, TrainerError, UserError, reason
from offload_trainer.common.safe_files import Count, Steps, exact_record, is_there, quoted, read_back
from offload_trainer.common.units import format_bytes, format_seconds
from offload_trainer.config import OptimSection
from offload_trainer.engine.protocol import Engine, Snapshot
from offload_trainer.optim.state_files import WeightsSnapshot
from offload_trainer.plan.shape import Weight
from offload_trainer.ranks import ALONE, Group, everybody, from_rank_zero, group_of
from offload_trainer.storage.atomic_io import StoredFile, bytes_below, copy_tree, sync_directory, sync_file, write_text
from offload_trainer.storage.locks import NoLocks, shared_lock
from offload_trainer.storage.manifest import FORMAT, MANIFEST, Manifest, checked_manifest, refuse_other_run
from offload_trainer.storage.owned_dirs import name_in_workplace, replacing
from offload_trainer.storage.retention import WORK, complete_checkpoints, prune, remove_leftovers, step_of
from offload_trainer.storage.transfer import Future, Workers

RESIDENT, MADE = "resident", "run.json"
_LOGS = "metrics.jsonl", "evaluations.jsonl"  # logs in the run directory; synced before a checkpoint is complete
_SMALL_FILES = 1 << 18  # upper bound for most models, in bytes, of headers, manifest and the other JSON

# Settings that may change at resume although they change the training; `check_resume` reports each one that did.
STEERING = {
    "model": ("name", "dtype", "attention"),
    "optim": tuple(key for key in OptimSection.model_fields if key not in ("name", "kernel", "on_nonfinite_grad")),
    "train": ("steps", "micro_batch_size", "gradient_accumulation_steps"),
    "placement": ("gpus",),
    "parallel": ("pipeline",),
}


@exact_record
class TrainState:
    """Progress of a run between two steps. Stored as plain JSON in state.json."""

    step: Steps  # completed steps
    tokens: Count  # tokens trained on, summed over all ranks
    data_position: Count  # rows consumed, summed over all ranks


@dataclass(frozen=True)
class RunRecord:
    """Metadata of a run that every checkpoint stores next to the training state."""

    identity: Mapping[str, Any]  # seed, data, ...: compared at resume
    layout: Mapping[str, Any]  # each weight's shape and whether it is trained: compared at resume
    run: Mapping[str, Any]  # configuration, plan, versions
    model: Path  # directory with the model's configuration and tokenizer


class Checkpoints:
    """Saver of a run's state under `root`, one checkpoint at a time. Its exit ends or abandons the one in progress."""

    def __init__(
        self, root: Path, *, record: RunRecord, keep: int, need_bytes: int, say: Callable[[str], None]
    ) -> None:
        """Prepare saving under `root`; nothing is written yet. `need_bytes`: bytes of one checkpoint's tensors."""
        self.saved: int | None = None  # newest step whose checkpoint is complete
        self.seconds: float | None = None  # duration of the latest save, from the call of `save` on
        self.record = record
        self._root, self._keep, self._need, self._say = root, keep, need_bytes, say
        self._place = _device_and_inode(root.parent)
        self._told: set[str] = set()  # notes already printed
        self._under_way: tuple[Future, Snapshot, int] | None = None
        self._worker: Workers | None = None
        self._beside_training = ALONE

    def save(self, engine: Engine, state: TrainState, *, weights: Sequence[Weight] = ()) -> None:
        """Save `state` and the engine's state. Collective: all ranks call it, and each writes its own part.

        `weights`: all of the model, to save them alone, in fp32. No older checkpoint is pruned then, since a run can
        resume from those only.

        Raises TrainerError on every rank if the disk cannot be written or is too full; older checkpoints stay
        untouched. A failure in the background thread is raised by `synchronize` or the next `save`.
        """
        self.synchronize()
        start, final = time.perf_counter(), checkpoint_of(self._root, state.step)
        if len(weights) > 0 and from_rank_zero(lambda: is_there(final / MANIFEST), bool):
            return  # a save failed after it was complete
        everybody().first(partial(self._make_room, weights))
        if weights:
            shapes = {weight.name: weight.shape for weight in sorted(weights, key=lambda weight: not weight.trainable)}
            snapshot: Snapshot = WeightsSnapshot(shapes, engine.named_master_parameters())
        else:
            snapshot = engine.snapshot()

        def work(group: Group) -> None:
            with closing(snapshot):
                self._write(snapshot, state, group)
                self.seconds = time.perf_counter() - start

        if not snapshot.concurrent:
            work(everybody())
            self.saved = state.step
            return
        self._worker = self._worker or Workers(1, "save")
        self._under_way = self._worker.submit(partial(work, self._beside_training)), snapshot, state.step

    @property
    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._under_way is not None and not self._under_way[0].done

    @property
    def ended(self) -> bool:
        """True if a background save has finished on this rank; the ranks agree on that before they `synchronize`."""
        return self._under_way is not None and self._under_way[0].done

    def synchronize(self) -> None:
        """Block until the save in progress has finished; raise its error, if any."""
        if self._under_way is None:
            return
        (future, _, step), self._under_way = self._under_way, None
        future.wait()
        self.saved = step

    def __enter__(self) -> Self:
        """Open the group that the background thread communicates over. Collective: all ranks enter together."""
        self._beside_training = group_of(in_step=False)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Finish the save in progress if the run ends in order; abandon it if the run is aborting."""
        in_order = isinstance(error, TrainerError) and error.exit_code != LOST
        if self._under_way and error is not None and not in_order:
            self._under_way[1].close()
            self._under_way = None
        try:
            self.synchronize()
        except TrainerError as failed:
            if error is None:
                raise
            self._say(f"and {failed}")  # the run ends with the error that came first
        # After an error with several ranks the thread may be blocked on a rank that is still running: leave it.
        if self._worker and (self._beside_training is ALONE or error is None):
            self._worker.close()

    def _make_room(self, weights: Sequence[Weight]) -> None:
        """Check that the run directory is still the same one and has room for a checkpoint; remove leftovers."""
        if _device_and_inode(self._root.parent) != self._place:
            raise TrainerError(
                f"{self._root.parent} is not the directory that this run began in: is its drive no longer mounted? "
                "Nothing was saved. Mount it, and the same command resumes from the newest checkpoint in it"
            )
        try:
            self._root.mkdir(exist_ok=True)
            sync_directory(self._root.parent)
            remove_leftovers(self._root)
            free = shutil.disk_usage(self._root).free
            tensors = sum(4 * weight.numel for weight in weights) if weights else self._need
            need = tensors + bytes_below(self.record.model) + _SMALL_FILES
        except OSError as error:
            raise TrainerError(f"{self._root} cannot be written: {reason(error)}; nothing was saved") from error
        if free < need:
            raise TrainerError(
                f"{self._root}: a checkpoint takes {format_bytes(need)} and {format_bytes(free)} are free; older "
                "checkpoints are untouched. Free space there"
            )

    def _write(self, snapshot: Snapshot, state: TrainState, group: Group) -> None:
        """Write one checkpoint. Collective over `group`: a failure on one rank is raised on all."""
        start, final = time.perf_counter(), checkpoint_of(self._root, state.step)
        try:
            group.first(lambda: list(map(sync_file, [self._root.parent / log for log in _LOGS])))
            files = write_checkpoint(final, snapshot, group, state=state, record=self.record, say=self._say)
        except OSError as error:
            raise TrainerError(
                f"{final} could not be written: {reason(error)}; older checkpoints are untouched. Free space there, "
                f"and {RERUN_HINT}"
            ) from error
        if group.rank == 0:
            alone = isinstance(snapshot, WeightsSnapshot)
            how = ", weights without moments" if alone else ", in the background" if snapshot.concurrent else ""
            self._report_save(final, files, seconds=time.perf_counter() - start, how=how)
            if not alone:
                self._prune()

    def _report_save(self, final: Path, files: dict[str, StoredFile], *, seconds: float, how: str) -> None:
        size = sum(about.bytes for about in files.values())
        rate = f"{size / seconds / 1e6:.0f} MB/s"
        self._say(f"saved {final}: {format_bytes(size)} in {format_seconds(seconds)}, {rate}{how}")

    def _prune(self) -> None:
        for line in prune(self._root, keep=self._keep):
            if line not in self._told:
                self._told.add(line)
                self._say(f"note: {line}")


def checkpoint_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def write_checkpoint(
    final: Path,
    snapshot: Snapshot,
    group: Group,
    *,
    state: TrainState,
    record: RunRecord,
    also: Callable[[Path], dict[str, StoredFile]] = lambda new: {},
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, StoredFile]:
    """Write a checkpoint under a hidden name, then rename it to `final`; return each file's size and CRC-32.

    Collective over `group`. `also`: called on the first rank with the hidden directory before the manifest is written;
    it may write more files, and returns what it knows of their sizes and checksums.
    """
    new = name_in_workplace(final)
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(replacing(final, what=WORK, say=say))
            new.mkdir()

        def finish() -> None:
            files.update(also(new))
            finish_checkpoint(new, files, state, record)
            stack.close()  # renames it, and the group learns of an error

        group.first(begin)
        files = snapshot.write(new, group)
        group.first(finish)
    return files


def finish_checkpoint(directory: Path, files: dict[str, StoredFile], state: TrainState, record: RunRecord) -> None:
    """Write what the engine does not write, add size and CRC-32 of each file to `files`, then write the manifest."""
    write_text(directory / "state.json", json.dumps(asdict(state), indent=1))
    write_text(directory / MADE, json.dumps(record.run, indent=1))
    copy_tree(record.model, directory / "model")
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in files:
            files[name] = StoredFile.of(path)
    manifest = asdict(Manifest(FORMAT, state.step, dict(record.identity), dict(record.layout), files))
    manifest |= {"offload_trainer": __version__, "torch": torch.__version__}
    write_text(directory / MANIFEST, json.dumps(manifest, indent=1))


def _device_and_inode(directory: Path) -> tuple[int, int] | None:
    """Return (device, inode), which differ if another filesystem is mounted at the path; None if there is nothing."""
    with suppress(OSError):
        found = directory.stat()
        return found.st_dev, found.st_ino
    return None


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Hold a shared lock on a checkpoint, so that its run does not prune it. Raises UserError if it just has."""
    gone = UserError(f"{checkpoint}: removed in the meantime by its run, which has a newer one")
    with ExitStack() as held:
        try:
            held.enter_context(shared_lock(checkpoint / MANIFEST))
        except NoLocks:
            pass  # without file locks a run never prunes
        except (FileNotFoundError, BlockingIOError):
            raise gone from None
        except OSError as error:
            raise UserError(f"{checkpoint / MANIFEST} cannot be read: {error.strerror}. {_fix(checkpoint)}") from error
        if not (checkpoint / MANIFEST).exists():
            raise gone
        yield


@dataclass(frozen=True)
class RunConfiguration:
    """The part of run.json that a resume and a model card read."""

    config: dict[str, dict[str, Any]]


def read_manifest(checkpoint: Path, *, moments: bool = True, contents: bool = True) -> Manifest:
    """Return `checked_manifest`, whose UserError names the previous checkpoint, if there is one."""
    return checked_manifest(checkpoint, fix=_fix(checkpoint), moments=moments, contents=contents)


def _fix(checkpoint: Path) -> str:
    """Return the advice for a damaged checkpoint, as a sentence for an error message."""
    earlier = [path for path in complete_checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    offer = f"resumes from the one before it, {earlier[-1]}" if earlier else "starts from step 0"
    return f"Move {checkpoint.name} away, and the same command {offer}"


def read_state(checkpoint: Path) -> TrainState:
    """Return the training progress in a checkpoint. Raises UserError if its state.json cannot be read."""
    return read_back(checkpoint / "state.json", TrainState, fix=_fix(checkpoint))


def check_resume(checkpoint: Path, record: RunRecord) -> list[str]:
    """Return one line per setting changed since this checkpoint. UserError if it is damaged or of another run."""
    refuse_other_run(checkpoint, read_manifest(checkpoint), identity=record.identity, layout=record.layout)
    return changed_settings(checkpoint.name, configuration_of(checkpoint), record.run["config"])


def configuration_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration in run.json of a checkpoint or of page files. Raises UserError if it cannot be read."""
    return read_back(directory / MADE, RunConfiguration, fix=_fix(directory)).config


def changed_settings(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per setting of `STEERING` that differs, except the steps of a run by epochs."""
    by_epochs = now.get("train", {}).get("epochs", "auto") != "auto"
    return [
        f"{section}.{key} is {now[section].get(key)}; {name} was saved with {quoted(then[key])}"
        for section, keys in STEERING.items()
        for then in [before.get(section, {})]
        for key in keys
        if key in then and now[section].get(key) != then[key] and not (by_epochs and key == "steps")
    ]


def check_identity(checkpoint: Path, identity: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise UserError if, by its manifest alone, the checkpoint is of a run of another identity or layout."""
    refuse_other_run(checkpoint, read_manifest(checkpoint, contents=False), identity=identity, layout=layout)
