"""Stages that run commands: the update kernels, tests, and the rates of this machine.

A check that fails does not stop the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from worker import Failure

from gpu_stages.stage import Stage

Row = dict[str, Any]

# Files with tests marked gpu. They are named, since pytest would import every other file too, and some need packages
# that a machine without network lacks.
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
FAILED = "tests-failed.txt"  # the file with the messages of failed tests
_AT_ONCE = 8  # test processes; each initialises CUDA
_TO_REPORT = 10.0  # seconds that pytest gets for its report when the time is over


def kernels(stage: Stage) -> None:
    stage.add_row(partial(_doctor, stage), check="doctor, and the kernels of the update")


def tests(stage: Stage) -> None:
    """Run the tests of the update and its overlap; those that imitate a GPU are skipped where there is one."""
    (stage.record.folder / FAILED).unlink(missing_ok=True)
    for name, what in (_REHEARSED if stage.rehearsal else TESTS).items():
        stage.add_row(partial(_run_tests, stage, what), check=name)


def machine(stage: Stage) -> None:
    stage.add_row(partial(_bench, stage), check="bench")


def _doctor(stage: Stage, row: Row) -> None:
    """Add which kernel the CPU has, and fail if the GPU's does not compile or has other bits."""
    row["checks"] = _ours(stage, ["doctor", "--json", "--nvme", str(stage.drive)])
    told = {f"{check['name']}: {check['found']}": check["state"] for check in row["checks"]}
    row["found"] = "; ".join(text for text, state in told.items() if state != "ok" or "kernel" in text)
    wrong = [text for text, state in told.items() if state == "failure" or "cannot store optimizer state" in text]
    if wrong:
        raise Failure(f"failed: {'; '.join(wrong)}")


def _bench(stage: Stage, row: Row) -> None:
    """Measure the machine's rates, and write bench.json next to the table, for `plan --machine FILE` elsewhere."""
    if stage.rehearsal:
        raise Failure("not run: it takes a minute")
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


def _run_tests(stage: Stage, what: Sequence[str], row: Row) -> None:
    """Run pytest and complete its row; a file next to the table gets the messages of failed tests."""
    start = time.monotonic()
    # --foreground: pytest alone gets the signal, and ends its processes itself.
    command = ["timeout", "--foreground", "--preserve-status", "--signal=INT", f"{max(1.0, stage.left() - _TO_REPORT)}"]
    command += [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["--continue-on-collection-errors"]
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
