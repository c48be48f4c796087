"""A test of the Ray recipe: a job of two ranks, stopped once and killed once, has the bits of one left alone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from commands import TINY, Run, assert_same_run, call, environment

from offload_trainer import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("ray") and find_spec("aiohttp_cors")),
        reason="needs ray[default], which no extra of this package installs",
    ),
]

# A step takes long enough to be stopped in it.
WORDS = [*TINY, "--accumulate", 48, "--steps", 20, "--save-every", 4, "train.eval_every=0", "--engine", "tiered"]


def free_ports(count: int) -> list[int]:
    """Return free ports. They are all bound at once, since a port that is free again could be given twice."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture
def cluster() -> Iterator[str]:
    """Start a Ray cluster of one node that shares nothing with another one; yield the address of its job server."""
    own, dashboard, agent, client = map(str, free_ports(4))
    address = f"http://127.0.0.1:{dashboard}"

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{address}/api/jobs/", timeout=5) as response:
            return response.status == 200
        return False

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        words = ["start", "--head", "--block", "--disable-usage-stats", "--include-dashboard", "true"]
        words += ["--num-cpus", "2", "--object-store-memory", "80000000", "--temp-dir", folder]
        words += ["--port", own, "--dashboard-port", dashboard]
        words += ["--dashboard-agent-listen-port", agent, "--ray-client-server-port", client]
        command = [sys.executable, "-m", "ray.scripts.scripts", *words]
        with open(Path(folder) / "told", "wb") as told:
            head = subprocess.Popen(command, stdout=told, stderr=told, env=environment(), start_new_session=True)
        try:
            wait_for(answers, "the cluster")
            yield address
        finally:
            head.terminate()
            with suppress(subprocess.TimeoutExpired):
                head.wait(30)
            for process in psutil.process_iter(["cmdline"]):
                if folder in " ".join(process.info["cmdline"] or ()):
                    process.kill()


def steps_of(output: Path) -> int:
    """Return the last step in the metrics; 0 without any."""
    path = output / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def kill_a_rank(output: Path) -> None:
    (pid,) = (
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(output) in (process.info["cmdline"] or ()) and process.environ().get("RANK") == "1"
    )
    os.kill(pid, signal.SIGKILL)


def test_a_job_is_stopped_and_submitted_again(cluster: str, tmp_path: Path, drive: Path) -> None:
    """A stop saves the step; the second job starts its ranks again after one of them was killed."""
    from ray.job_submission import JobSubmissionClient

    alone = call(*WORDS, "--gpus", 2, "--nvme", drive, output=tmp_path / "alone")
    recipe, output = tmp_path / "ray_job.py", tmp_path / "out"
    assert cli.main(["cp", "ray_job", str(recipe)]) == 0
    job = [sys.executable, recipe, "--ranks", 2, "--no-gpus", "--pause", 2, "--"]
    job += [*WORDS, "--nvme", drive, "--output", output, "train.stop_within=60"]
    client = JobSubmissionClient(cluster)

    def submitted(name: str, step: int) -> None:
        """Submit the job and wait until it has trained `step`."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "90"}
        command = shlex.join(map(str, job))
        client.submit_job(entrypoint=command, submission_id=name, runtime_env={"env_vars": variables})
        wait_for(lambda: steps_of(output) >= step or ended(name), name)

    def ended(name: str) -> bool:
        return client.get_job_status(name).is_terminal()

    submitted("stopped", 7)
    assert client.stop_job("stopped")
    wait_for(lambda: ended("stopped"), "stopped")
    told, saved = client.get_job_logs("stopped"), steps_of(output)
    assert client.get_job_status("stopped") == "STOPPED", told
    assert "everything saved; the same command resumes from there" in told
    assert (output / f"checkpoints/step-{saved:08d}/MANIFEST.json").exists(), told
    assert saved < 20
    submitted("killed", saved + 1)
    kill_a_rank(output)
    wait_for(lambda: ended("killed"), "killed")
    told = client.get_job_logs("killed")
    assert client.get_job_status("killed") == "SUCCEEDED", told
    assert "rank 1 was killed by SIGKILL" in told
    assert_same_run(Run(0, told, output), alone)
