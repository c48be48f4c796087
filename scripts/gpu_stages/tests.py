"""Run the package's tests on this machine: those that need a GPU, and those that compute, which use the GPU here.

Tests that imitate a GPU are skipped where there is one. Several tests run at a time if pytest-xdist is installed.
"""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from gpu_stages.stage import Failure, Stage

TITLE = "The tests that compute, on this machine"
COLUMNS = {"check": "check", "found": "found", "seconds": "s"}
_AT_ONCE = 6  # test processes; each initialises CUDA

# Whole files whose tests compute, on the GPU where there is one, the quickest first.
COMPUTING = (
    "tests/offload/test_against_torch.py",
    "tests/offload/test_gradients.py",
    "tests/run/test_streams.py",
    "tests/offload/test_shares.py",
    "tests/optim/test_stored_moments.py",
    "tests/optim/test_update_page.py",
    "tests/model/test_dropout.py",
    "tests/run/test_checkpoint.py",
    "tests/offload/test_tiered.py",
    "tests/optim/test_moments.py",
    "tests/optim/test_adam_kernels.py",
    "tests/offload/test_update_progress.py",
    "tests/offload/test_stream.py",
    "tests/offload/test_overlap.py",
    "tests/offload/test_speculative_update.py",
    "tests/offload/test_parts.py",
    "tests/offload/test_tiered_split_masters.py",
    "tests/offload/test_activations.py",
    "tests/model/test_tiles.py",
)

_SMALL = "tests/run/test_streams.py"
FAILED = "tests-failed.txt"  # the file with the messages of failed tests


def carry_out(stage: Stage) -> None:
    # Tests marked ops build DeepSpeed's kernels. A rehearsal runs one small file; other test runs cover the rest.
    checks = {"tests that need a GPU": ["-m", "gpu", "tests"]}
    checks |= {file: ["-m", "not ops and not slow", file] for file in ((_SMALL,) if stage.rehearsal else COMPUTING)}
    (stage.record.folder / FAILED).unlink(missing_ok=True)
    for name, what in checks.items():
        if not stage.asked(name):
            continue
        try:
            stage.need_time()
            start = time.monotonic()
            stage.record.add(check=name, **tests(stage, what), seconds=time.monotonic() - start)
        except Failure as failure:
            stage.record.add(str(failure), check=name)


def tests(stage: Stage, what: Sequence[str]) -> dict[str, Any]:
    """Run pytest and return its outcome; a file next to the table gets the messages of failed tests."""
    if stage.rehearsal:
        what = [*what[:-1], _SMALL]
    report = stage.drive / "tests.xml"
    options = ["-q", "--all", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options]
    if find_spec("xdist") is not None and not stage.rehearsal:
        command += ["-n", str(_AT_ONCE)]
    report.unlink(missing_ok=True)
    done = stage.command([*command, f"--junitxml={report}", *what])
    if done.returncode == 5:
        return {"found": "there are none"}
    if not report.exists():
        raise Failure(f"failed: {' '.join((done.stdout + done.stderr).split())[-300:]}")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    told = ", ".join(f"{count} {key}" for key, count in counts.items())
    wrong = [
        f"{case.get('classname')}::{case.get('name')}: {(bad.get('message') or '').strip()[:200]}"
        for case in suite.iter("testcase")
        for bad in (*case.findall("failure"), *case.findall("error"))
    ]
    if wrong:
        with (stage.record.folder / FAILED).open("a") as said:
            said.write(f"== {' '.join(what)}\n{done.stdout[-200_000:]}\n")
        raise Failure(f"failed: {told}: {'; '.join(wrong)}")
    return {"found": told}
