"""Run directory: its initial files, which a crash leaves whole or absent, the log, and the lock on it."""

import json
import os
import platform
import stat
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import TrainerError, UserError, explain
from offload_trainer.common.packages import version_of
from offload_trainer.common.safe_files import is_there, read_back
from offload_trainer.common.stdio import write_now
from offload_trainer.common.units import shown
from offload_trainer.data.run_data import RunData
from offload_trainer.data.tokenizer import save_tokenizer
from offload_trainer.model.loader import save_model_config
from offload_trainer.ranks import everybody
from offload_trainer.run.checkpoint import RunRecord
from offload_trainer.run.planning import Planned
from offload_trainer.settings import dump_config
from offload_trainer.storage.atomic_io import make_directories, open_to_append, remove_abandoned, write_text
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import reason
from offload_trainer.storage.retention import remove_leftovers
from offload_trainer.storage.tensorfile import DTYPES

# Files that a run writes in its directory, except checkpoints and weights, which are checked separately.
WRITTEN = (
    *("config.yaml", "plan.json", "machine.json", "environment.json", "deepspeed.json", "trackers.json"),
    *("log.txt", "metrics.jsonl", "evaluations.jsonl", "report.html", "stream.jsonl"),
)
_MARK = ".lock"


@dataclass
class Log:
    """Message log: writes to log.txt, once there is a run directory, and to stderr. Silent on ranks other than 0.

    The file comes first, because stderr may block or be closed.
    """

    loud: bool
    file: RawIOBase | None = None

    @contextmanager
    def opened(self, output: Path) -> Iterator[None]:
        """Write to log.txt of the run directory, too, within this context."""
        with open(open_to_append(output / "log.txt"), "ab", buffering=0) as self.file:
            try:
                yield
            finally:
                self.file = None

    def say(self, line: str) -> None:
        if self.loud:
            self.write(line)
            print(shown(line), file=sys.stderr, flush=True)

    def say_now(self, line: str) -> None:
        """Log a line from a signal handler."""
        if self.loud:
            self.write(line)
            write_now(line)

    def write(self, text: str) -> None:
        """Write to log.txt only, with a timestamp on each line."""
        if self.file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {part}\n" for part in shown(text).splitlines())
        try:
            self.file.write(lines.encode(errors="backslashreplace"))
        except OSError as error:  # a failing log must not end the run
            self.file = None
            write_now(f"note: log.txt can no longer be written: {error.strerror}")


def hold(stack: ExitStack, output: Path, log: Log, *, create: bool) -> int:
    """Lock the run directory until `stack` closes; return the descriptor of the lock. Collective.

    It is -1 on ranks other than 0, and where there is no lock that this user may write, unless `create`, which creates
    the directory if needed. Raises UserError if another run has it. Prints a note on a filesystem without locks.
    """
    locks: list[int] = []

    def take() -> None:
        if not create and not os.access(output / _MARK, os.W_OK):
            return
        make_directories(output)
        try:
            lock, unlocked = stack.enter_context(exclusive_lock(output / _MARK, say=log.say, patience=1.0))
        except TrainerError:
            raise UserError(f"{output}: another run is using this directory; name another --output") from None
        except OSError as error:
            raise UserError(f"{output / _MARK} cannot be a run's lock: {reason(error)}; move it away") from error
        if unlocked:
            log.say(
                f"note: {output}: {unlocked}. A second run in this directory would not be noticed: start none. Older "
                "checkpoints are not pruned, and leftovers of a killed save are not removed"
            )
        locks.append(lock)

    everybody().first(take)
    return next(iter(locks), -1)


def refuse_strangers(output: Path) -> None:
    """Raise UserError if the run would replace or append to files that no run has written."""
    there = [name for name in WRITTEN if is_there(output / name)]
    if odd := [name for name in there if not stat.S_ISREG((output / name).lstat().st_mode)]:
        raise UserError(f"{output / odd[0]} is a link, a directory or no regular file: a run writes one of that name")
    there += [name for name in ("model", "pages") if is_there(output / name)]
    if os.path.isfile(output / "save") and os.path.getsize(output / "save"):  # an empty one asks for a checkpoint
        there.append("save")
    if there and not is_there(output / _MARK):
        raise UserError(
            f"{output} holds {', '.join(there)}, which a run there would replace, and no {_MARK}, so it was not "
            "written by a run: name another --output, or move it away. If it is a copy of a run, make an empty "
            f"{output / _MARK}"
        )


@contextmanager
def run_directory(output: Path, log: Log, *, lock: int) -> Iterator[None]:
    """Log to the run directory, also why the run fails; remove leftovers. `lock`'s file has a living run's pid."""
    with log.opened(output):
        try:
            if os.fstat(lock).st_size:
                why = "the last run here ended without a message: it was killed, ran out of memory, or lost power"
                log.say(f"note: {why}")
                os.ftruncate(lock, 0)
            try:
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            except OSError as error:
                error.filename = str(output / _MARK)
                raise
            remove_leftovers(output / "checkpoints")
            remove_abandoned(output)
            yield
        except BaseException as error:  # `cli` shows it to the user
            log.write(f"ended: {explain(error) or traceback.format_exc()}")
            raise
        finally:
            os.ftruncate(lock, 0)


def write_known(planned: Planned, data: RunData) -> None:
    """Write the configuration, plan, machine, package versions, model configuration and tokenizer of a run."""
    output, config, source = planned.output, planned.config, planned.source
    write_text(output / "config.yaml", dump_config(config))
    for name, about in {"plan": planned.plan.to_json(), "machine": asdict(planned.machine)}.items():
        write_text(output / f"{name}.json", json.dumps(about, indent=1))
    write_text(output / "environment.json", json.dumps(environment(), indent=1))
    dtype = DTYPES[config.model.dtype]
    save_model_config(source, output / "model", dtype=dtype, end_of_text=data.spec.tokenizer.eos_token_id)
    save_tokenizer(data.spec.tokenizer, output / "model")
    stop_at(output / "model" / "generation_config.json", data.ends_of_answers)


def stop_at(file: Path, ends: Iterable[int]) -> None:
    """Add ids to those at which generation stops: a chat template may end answers with others than the model's."""
    settings = read_back(file, dict[str, Any], fix=f"It is a copy of the model's {file.name}: mend that one")
    known = settings.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    if missing := [id_ for id_ in ends if id_ not in known]:
        write_text(file, json.dumps(settings | {"eos_token_id": known + missing}, indent=2))


def record_of(planned: Planned, *, identity: Mapping[str, Any], model: Path) -> RunRecord:
    """Return the metadata of checkpoints. `model`: a directory with the model's configuration, which is copied."""
    config, plan = planned.config.model_dump(mode="json"), planned.plan.to_json()
    run = {"config": config, "plan": plan, "environment": environment()}
    return RunRecord(identity=identity, layout=planned.layout, run=run, model=model)


def environment() -> dict[str, Any]:
    names = ("offload-trainer", "torch", "deepspeed", "transformers", "bitsandbytes", "safetensors")
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in names},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "command": sys.argv,
    }
