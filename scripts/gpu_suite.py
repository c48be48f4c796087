"""Run the checks that need a GPU, stage by stage within a time limit; scripts/gpu_suite.sh documents its use.

    gpu_suite.py ── stage (gpu_stages/speed.py, ...) ────jobs────> worker processes, which use the GPU
         └── Record: STAGE.json, STAGE.md and a tar file of all stages, rewritten after every result

This process imports neither torch nor transformers, so that a crash or hang affects a worker alone and the stage
continues. Exits with 1 if something failed, and 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from gpu_stages import checks, speed  # noqa: E402
from gpu_stages.stage import Record, Stage  # noqa: E402
from worker import facts  # noqa: E402

NEEDED = ("torch", "transformers", "pydantic", "safetensors", "psutil", "tqdm", "yaml")  # required by the package


@dataclass(frozen=True)
class StageKind:
    """A stage of the suite; `most` limits its seconds within a call, so that the later stages are reached."""

    title: str
    carry_out: Callable[[Stage], None]
    most: float = float("inf")


STAGES = {
    "kernels": StageKind("The bits of the update kernels", checks.kernels, most=100),
    "tests": StageKind("The tests of the update, its overlap and all placements here", checks.tests, most=220),
    **{name: StageKind(group.title, group.carry_out) for name, group in speed.GROUPS.items()},
    "machine": StageKind("Rates of this machine", checks.machine),
}
# The two calls for a machine that is there for fifteen minutes: seconds, and stages by evidence a minute.
CALLS = {
    "first": (480.0, ("kernels", "tests", "speed")),
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
    drive = ["stat", "-f", "-c", "%T", options.drive]
    kind = subprocess.run(drive, capture_output=True, text=True, check=False).stdout.strip()
    about = facts() | {"drive": f"{kind}, {shutil.disk_usage(options.drive).free / 1e9:.0f} GB free"}
    if about["gpu"] is None and not options.rehearse:
        print("gpu_suite: torch sees no GPU here; nothing was run. --rehearse goes without", file=sys.stderr)
        return 2
    kept = options.tar or options.rehearse  # elsewhere: the pages of the documentation are for results to read
    folder = options.folder or (Path(tempfile.mkdtemp(prefix="gpu-suite-")) if kept else _PAGES)
    good = True
    with Stage(drive=options.drive, only=options.only, rehearsal=options.rehearse) as stage:
        for name in names:
            kind, seconds = STAGES[name], end - time.monotonic()
            record = Record(folder, name, title=kind.title, about=about, rehearsal=options.rehearse, tar=options.tar)
            stage.begin(record, seconds=seconds if options.rehearse else min(kind.most, seconds))
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
    parser.add_argument("--tar", type=Path, metavar="FILE", help="rewritten with all results after each")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
