"""Run the checks that need a GPU, stage by stage within a time limit; scripts/gpu_suite.sh documents its use.

    gpu_suite.py ── stage (gpu_stages/speed.py, ...) ────jobs────> worker processes, which use the GPU
         └── Record: STAGE.json, STAGE.md and a tar file of all stages, rewritten after every result

This process imports neither torch nor transformers, so that a crash or hang affects a worker alone and the stage
continues, as it does after a check that fails. Exits with 1 if something failed, and 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from gpu_stages import speed  # noqa: E402
from gpu_stages.stage import Record, Stage  # noqa: E402
from worker import Failure, facts  # noqa: E402

NEEDED = ("torch", "transformers", "pydantic", "safetensors", "psutil", "yaml")  # required by the package


# -- stages that run commands: the update kernels, tests, and the rates of this machine --------------------------------

# Files with tests marked gpu. They are named, since pytest would import every other file too, and some
# need packages that a machine without network lacks.
MARKED = ("tests/optim/test_adam_kernels.py", "tests/offload/test_tiered.py")
# Files whose tests build engines, on the GPU where there is one.
COMPUTING = (
    "tests/offload/test_pairs.py",
    "tests/offload/test_schedules.py",
    "tests/offload/test_speculative_update.py",
    "tests/offload/test_tiered.py",
)
TESTS = {
    "tests marked gpu": ["-m", "gpu", *MARKED],
    "tests that compute": ["-m", "not ops and not slow and not gpu", "--maxfail=20", *COMPUTING],
}
# A rehearsal runs these, since other test runs cover the rest.
_REHEARSED = {"tests that are quick": ["tests/house/test_units.py"]}
TESTS_CACHE = Path(tempfile.gettempdir(), "offload-trainer-tests-cache")  # tests/helpers/commands.py
FAILED = "tests-failed.txt"  # the file with the messages of failed tests
_AT_ONCE = 8  # test processes; each initialises CUDA
_TO_REPORT = 10.0  # seconds that pytest gets for its report when the time is over


def kernels(stage: Stage) -> None:
    stage.add_row(partial(_doctor, stage), check="doctor, and the kernels of the update")


def tests(stage: Stage) -> None:
    """Run the tests of the update and its overlap; those that imitate a GPU are skipped where there is one."""
    (stage.record.folder / FAILED).unlink(missing_ok=True)
    if cache := os.environ.get("OFFLOAD_TRAINER_CACHE"):
        with suppress(OSError):  # a copy of what `doctor` has compiled, if there is none yet
            shutil.copytree(Path(cache, "kernels"), TESTS_CACHE / "kernels")
    for name, what in (_REHEARSED if stage.rehearsal else TESTS).items():
        stage.add_row(partial(_run_tests, stage, what), check=name)


def machine(stage: Stage) -> None:
    stage.add_row(partial(_bench, stage), check="bench")


def _doctor(stage: Stage, row: dict[str, Any]) -> None:
    """Add which kernel the CPU has, and fail if the GPU's does not compile or has other bits."""
    row["checks"] = _ours(stage, ["doctor", "--json", "--nvme", str(stage.drive)])
    told = {f"{check['name']}: {check['found']}": check["state"] for check in row["checks"]}
    row["found"] = "; ".join(text for text, state in told.items() if state != "ok" or "kernel" in text)
    wrong = [text for text, state in told.items() if state == "failure" or "cannot store optimizer state" in text]
    if wrong:
        raise Failure(f"failed: {'; '.join(wrong)}")


def _bench(stage: Stage, row: dict[str, Any]) -> None:
    """Measure the machine's rates, and write bench.json next to the table, for `plan --machine FILE` elsewhere."""
    if stage.rehearsal:
        raise Failure("not run: it takes a minute")
    stage.need_time(90.0)
    row["machine"] = _ours(stage, ["bench", "--json", "--nvme", str(stage.drive)])
    (stage.record.folder / "bench.json").write_text(json.dumps(row["machine"], indent=1))
    rates = row["machine"]["rates"]
    told = [f"{dtype} {rate['value'] / 1e12:.4g} TFLOP/s" for dtype, rate in rates["matmul"].items()]
    told += [f"update by {name} {rate['value'] / 1e6:.0f} M/s" for name, rate in rates["update"].items()]
    ways = {way: rates[way] for way in ("to_device", "from_device", "both_ways") if rates[way]}
    row["found"] = ", ".join(told + [f"{way} {rate['value'] / 1e9:.3g} GB/s" for way, rate in ways.items()])


def _ours(stage: Stage, words: Sequence[str]) -> Any:
    """Return a command's JSON, which it prints whatever its exit code. Raises Failure with the last of its stderr."""
    done = stage.command([sys.executable, "-m", "offload_trainer", *words])
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise Failure(f"failed: exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}") from None


def _run_tests(stage: Stage, what: Sequence[str], row: dict[str, Any]) -> None:
    """Run pytest and complete its row; a file next to the table gets the messages of failed tests."""
    start = time.monotonic()
    # --foreground: pytest alone gets the signal, and ends its processes itself.
    command = ["timeout", "--foreground", "--preserve-status", "--signal=INT", f"{max(1.0, stage.left() - _TO_REPORT)}"]
    command += [sys.executable, "-m", "pytest", "--all", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["--continue-on-collection-errors", f"--basetemp={stage.drive / 'tests'}"]
    if find_spec("xdist") is not None and not stage.rehearsal:
        command += ["-n", str(_AT_ONCE)]
    done = stage.command([*command, *what])
    row["seconds"] = time.monotonic() - start
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.strip()]
    row["found"] = "; ".join(lines[-1:])
    wrong = [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode == 2 and lines and not wrong:
        row["found"] += ", then there was no time for the others"
    elif done.returncode not in (0, 5):  # 5: there are none
        with (stage.record.folder / FAILED).open("a") as said:
            said.write(f"== {' '.join(what)}\n{done.stdout[-200_000:]}\n")
        raise Failure(f"failed: {'; '.join(wrong) or ' '.join((done.stdout + done.stderr).split())[-300:]}")


# -- the suite ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageKind:
    """A stage of the suite; `most` limits its seconds within a call, so that the later stages are reached."""

    title: str
    carry_out: Callable[[Stage], None]
    most: float = float("inf")


STAGES = {
    "kernels": StageKind("The bits of the update kernels", kernels, most=130),
    "tests": StageKind("The tests of the update, its overlap and all placements here", tests, most=170),
    **{name: StageKind(group.title, group.carry_out, most=group.most) for name, group in speed.GROUPS.items()},
    "machine": StageKind("Rates of this machine", machine),
}
# The two calls for a machine that is there for fifteen minutes: seconds, and stages by evidence a minute.
CALLS = {
    "first": (480.0, ("kernels", "tests", "speed")),
    "second": (230.0, ("8b", "rivals", "drive", "machine", "10b")),
}


def main() -> int:
    options = _options()
    lacking = [name for name in NEEDED if find_spec(name) is None]
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
            limited = len(names) > 1 and not options.rehearse
            record = Record(folder, name, title=kind.title, about=about, rehearsal=options.rehearse, tar=options.tar)
            stage.begin(record, seconds=min(kind.most, seconds) if limited else seconds)
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
