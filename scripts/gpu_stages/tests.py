"""Run the package's tests of the update and its overlap: those that need a GPU, and those that use one where it is.

Tests that imitate a GPU are skipped where there is one. Several tests run at a time if pytest-xdist is installed.
"""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from gpu_stages.stage import Failure, Stage

TITLE = "The tests of the update and its overlap, on this machine"
COLUMNS = {"check": "check", "found": "found", "seconds": "s"}
_AT_ONCE = 8  # test processes; each initialises CUDA
_TO_REPORT = 10.0  # seconds that pytest gets for its report when the time is over

# Files with tests marked gpu. They are named, since pytest would import every other file too, and some need packages
# that a machine without network lacks.
MARKED = ("tests/optim/test_cuda_adam.py", "tests/offload/test_tiered.py")
# Files whose tests build engines, on the GPU where there is one.
COMPUTING = (
    "tests/offload/test_pairs.py",
    "tests/offload/test_schedules.py",
    "tests/offload/test_speculative_update.py",
    "tests/offload/test_overlap.py",
    "tests/offload/test_tiered.py",
)
CHECKS = {
    "tests marked gpu": ["-m", "gpu", *MARKED],
    "tests that compute": ["-m", "not ops and not slow and not gpu", "--maxfail=20", *COMPUTING],
}
# A rehearsal runs one quick test of each, since other test runs cover the rest.
_REHEARSED = {
    "tests marked gpu": ["-m", "gpu", "tests/offload/test_tiered.py"],
    "tests that compute": ["tests/offload/test_schedules.py", "-k", "clipped_steps and third"],
}
FAILED = "tests-failed.txt"  # the file with the messages of failed tests


def carry_out(stage: Stage) -> None:
    (stage.record.folder / FAILED).unlink(missing_ok=True)
    for name, what in (_REHEARSED if stage.rehearsal else CHECKS).items():
        stage.add_row(partial(_run_tests, stage, what), check=name)


def _run_tests(stage: Stage, what: Sequence[str], row: dict[str, Any]) -> None:
    """Run pytest and complete its row; a file next to the table gets the messages of failed tests."""
    start, report = time.monotonic(), stage.drive / "tests.xml"
    # --foreground: pytest alone gets the signal, and ends its processes itself.
    command = ["timeout", "--foreground", "--preserve-status", "--signal=INT", f"{max(1.0, stage.left() - _TO_REPORT)}"]
    command += [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}"]
    if find_spec("xdist") is not None and not stage.rehearsal:
        command += ["-n", str(_AT_ONCE)]
    report.unlink(missing_ok=True)
    done = stage.command([*command, *what])
    row["seconds"] = time.monotonic() - start
    if done.returncode == 5:
        row["found"] = "there are none"
        return
    if not report.exists():
        raise Failure(f"failed: {' '.join((done.stdout + done.stderr).split())[-300:]}")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    told = ", ".join(f"{count} {key}" for key, count in counts.items())
    if done.returncode == 2:
        told += ", then there was no time for the others"
    wrong = [
        f"{case.get('classname')}::{case.get('name')}: {(bad.get('message') or '').strip()[:200]}"
        for case in suite.iter("testcase")
        for bad in (*case.findall("failure"), *case.findall("error"))
    ]
    if wrong:
        with (stage.record.folder / FAILED).open("a") as said:
            said.write(f"== {' '.join(what)}\n{done.stdout[-200_000:]}\n")
        raise Failure(f"failed: {told}: {'; '.join(wrong)}")
    row["found"] = told
