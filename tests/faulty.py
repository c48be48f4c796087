"""faulty.py FAULT ARGUMENT WORDS...: the command, with one thing that goes wrong.

full-save DIRECTORY     the filesystem of DIRECTORY fills up once the second save has begun
full-export DIRECTORY   the same once an export has begun
read-error N, write-error N     the Nth transfer of page files fails with EIO
clock SEED              the system's clock jumps by days, forwards and backwards, whenever it is looked at
"""

import errno
import itertools
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from conftest import fill

from offload_trainer.cli import main


def full_save(directory: str) -> None:
    from offload_trainer.engine.tiered_state import TieredSnapshot

    write, saves = TieredSnapshot.write, itertools.count(1)

    def then_full(self: Any, place: Path) -> Any:
        if next(saves) == 2:
            fill(Path(directory))
        return write(self, place)

    TieredSnapshot.write = then_full  # type: ignore[method-assign]


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
    "full-export": full_export,
    "read-error": lambda number: transfer_error("preadv", number),
    "write-error": lambda number: transfer_error("pwritev", number),
    "clock": clock,
}

FAULTS[sys.argv[1]](sys.argv[2])
raise SystemExit(main(sys.argv[3:]))
