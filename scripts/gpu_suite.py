"""Run the checks that need a GPU, stage by stage within a time limit; scripts/gpu_suite.sh documents its use.

    gpu_suite.py ── stage (gpu_stages/parity.py, ...) ────jobs────> worker processes, which use the GPU
         ├── Record: STAGE.json and STAGE.md, rewritten after every result
         └── Archive: all of them in one tar file, rewritten every ten seconds

This process imports neither torch nor transformers, so that a crash or hang affects a worker alone and the stage
continues. Exits with 1 if something failed, and 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from gpu_stages import check, parity, speed, tests
from gpu_stages.record import Archive, Record
from gpu_stages.stage import Stage, facts

NEEDED = ("torch", "transformers", "pydantic", "safetensors", "psutil", "tqdm", "yaml")  # required by the package
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class StageKind:
    """A stage of the suite; `most` limits its seconds within a call, so that the later stages are reached."""

    title: str
    columns: Mapping[str, str]
    carry_out: Callable[[Stage], None]
    most: float = float("inf")


STAGES = {
    "kernels": StageKind(check.TITLE, check.COLUMNS, check.kernels, most=100),
    "tests": StageKind(tests.TITLE, tests.COLUMNS, tests.carry_out, most=130),
    "parity": StageKind(parity.TITLE, parity.COLUMNS, parity.carry_out, most=90),
    **{name: StageKind(group.title, speed.COLUMNS, group.carry_out) for name, group in speed.GROUPS.items()},
    "machine": StageKind("Rates and plans of this machine", check.COLUMNS, check.machine),
}
# The two calls for a machine that is there for fifteen minutes: seconds, and stages by evidence a minute.
CALLS = {
    "first": (480.0, ("kernels", "tests", "parity", "speed")),
    "second": (200.0, ("8b", "drive", "machine", "rivals", "10b")),
}


def main() -> int:
    options = _options()
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        told = f"lacks {', '.join(lacking)}; `make gpu-folder` gathers what it can on a machine with a network"
        print(f"gpu_suite: {sys.executable} {told}", file=sys.stderr)
        return 2
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that files on the drive are removed
    limit, names = CALLS.get(options.what, (540.0, (options.what,)))
    end = _BEGAN + (options.seconds or (_REHEARSAL if options.rehearse else limit))
    about = facts(options.drive)
    if about["gpu"] is None and not options.rehearse:
        print("gpu_suite: torch sees no GPU here; nothing was run. --rehearse goes without", file=sys.stderr)
        return 2
    kept = options.tar or options.rehearse  # elsewhere: the pages of the documentation are for results to read
    folder = options.folder or (Path(tempfile.mkdtemp(prefix="gpu-suite-")) if kept else _PAGES)
    good = True
    with Archive(folder, options.tar) if options.tar else nullcontext():
        for name in names:
            kind = STAGES[name]
            record = Record(
                folder, name, title=kind.title, columns=kind.columns, about=about, rehearsal=options.rehearse
            )
            seconds = end - time.monotonic()
            seconds = seconds if options.rehearse else min(kind.most, seconds)
            with Stage(record, seconds=seconds, drive=options.drive, only=options.only) as stage:
                kind.carry_out(stage)
            good = record.close() and good
            print(f"gpu_suite: {record.page}, {time.monotonic() - _BEGAN:.0f} s in all", file=sys.stderr)
    return 0 if good else 1


_BEGAN = time.monotonic()
_REHEARSAL = 3600.0  # seconds; limits are for a machine with a GPU, and the machine of a rehearsal may be slow
_PAGES = ROOT / "docs" / "benchmarks" / "gpu"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=[*CALLS, *STAGES])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, without a GPU; the numbers mean nothing")
    parser.add_argument("--seconds", type=float, help="until everything has ended; what was not reached is listed")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has TEXT in it")
    parser.add_argument("--drive", type=Path, default=ROOT, help="a directory on the drive")
    parser.add_argument("--tar", type=Path, metavar="FILE", help="rewritten every ten seconds with all results")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
