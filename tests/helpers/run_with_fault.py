"""run_with_fault.py FAULT ARGUMENT WORDS...: run the command with one injected fault.

full-save DIRECTORY     the filesystem of DIRECTORY fills up once the second save has begun
full-step DIRECTORY     it fills up before the line of step 8, once the preceding checkpoint is complete
low-save DIRECTORY      it has one MB left when the second save checks the free space
full-export DIRECTORY   it fills up once an export has begun
read-error N, write-error N     the Nth transfer of page files fails with EIO
clock SEED              the system's clock jumps by days, forwards and backwards, at every reading
"""

import errno
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from commands import fill

from offload_trainer.cli import main


def full_save(directory: str) -> None:
    from offload_trainer.offloading.pages.named_state import TieredSnapshot

    write, saves = TieredSnapshot.write, itertools.count(1)

    def then_full(self: Any, place: Path, *group: Any) -> Any:
        if next(saves) == 2:
            fill(Path(directory))
        return write(self, place, *group)

    TieredSnapshot.write = then_full  # type: ignore[method-assign]


def full_part(rank: str) -> None:
    """Fill the disk for one rank only, in the second save, after its first page."""
    if os.environ["RANK"] != rank:
        return
    from offload_trainer.storage.tensorfile import PlacedWriter

    put, pages = PlacedWriter.put, itertools.count(1)

    def then_full(self: Any, *given: Any) -> None:
        if self.path.name == "exp_avg.safetensors" and "step-00000004" in str(self.path) and next(pages) == 2:
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - until the process ends
        put(self, *given)

    PlacedWriter.put = then_full  # type: ignore[method-assign]


def full_step(directory: str) -> None:
    from offload_trainer.telemetry.sinks import JsonLines

    write = JsonLines.write

    def then_full(self: Any, line: str) -> None:
        if json.loads(line)["step"] == 8:
            while not list(Path(directory).glob("*/checkpoints/step-*")):
                time.sleep(0.005)
            fill(Path(directory))
        write(self, line)

    JsonLines.write = then_full  # type: ignore[method-assign]


def low_save(directory: str) -> None:
    from offload_trainer.checkpoint import Checkpoints

    look, saves = Checkpoints._make_room, itertools.count(1)

    def in_a_low_disk(self: Any) -> None:
        if next(saves) == 2:
            fill(Path(directory))
            filler = Path(directory) / "filler"
            os.truncate(filler, filler.stat().st_size - (1 << 20))
        look(self)

    Checkpoints._make_room = in_a_low_disk  # type: ignore[method-assign]


def full_export(directory: str) -> None:
    from offload_trainer.export import directory as exports

    copy = exports.copy_tree

    def then_full(*places: Path) -> None:
        copy(*places)
        fill(Path(directory))

    exports.copy_tree = then_full  # type: ignore[assignment]


def transfer_error(name: str, number: str) -> None:
    call, calls = getattr(os, name), itertools.count(1)

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        about = os.readlink(f"/proc/self/fd/{descriptor}")
        if about.endswith("/state") and next(calls) == int(number):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, buffers, offset)

    setattr(os, name, failing)


def clock(seed: str) -> None:
    dice, real, written = random.Random(seed), time.time, time.strftime

    def jumping() -> float:
        return real() + dice.uniform(-20, 20) * 86400

    time.time = jumping
    time.strftime = lambda form, *rest: written(form, time.gmtime(jumping()))


FAULTS = {
    "full-save": full_save,
    "full-part": full_part,
    "full-step": full_step,
    "low-save": low_save,
    "full-export": full_export,
    "read-error": lambda number: transfer_error("preadv", number),
    "write-error": lambda number: transfer_error("pwritev", number),
    "clock": clock,
}

FAULTS[sys.argv[1]](sys.argv[2])
raise SystemExit(main(sys.argv[3:]))
