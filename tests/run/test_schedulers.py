"""Tests of the files for Slurm, Kubernetes and SkyPilot, and of a job that a real Slurm preempts three times."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from commands import HELPERS, TINY, Run, assert_same_run, call, environment

from offload_trainer import cli
from offload_trainer.errors import UserError
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
BATCH = (ROOT / "configs/slurm.sbatch").read_text()
CLAIM, JOB = yaml.safe_load_all((ROOT / "configs/kubernetes.yaml").read_text())
TASK = yaml.safe_load((ROOT / "configs/skypilot.yaml").read_text())
STOPPED = 128 + signal.SIGTERM


def stop_within(words: list[str]) -> float:
    """Return the `train.stop_within` of a command, whose other words must be valid too."""
    within = load_config(words).train.stop_within
    assert within != "auto"
    return within


# -- Kubernetes --------------------------------------------------------------------------------------------------------


VALIDATE = """
import sys

import kubernetes_validate as schemas
import yaml

claim, job = yaml.safe_load_all(open(sys.argv[1]))
version = schemas.latest_version()
for document in (claim, job):
    schemas.validate(document, version, strict=True)
pod = job["spec"]["template"]["spec"]
misspelt = {**pod, "terminationGraceSeconds": 120}
incomplete = {key: value for key, value in pod.items() if key != "containers"}
for other in (misspelt, incomplete):
    job["spec"]["template"]["spec"] = other
    try:
        schemas.validate(job, version, strict=True)
    except schemas.ValidationError as error:
        print(error.message)
"""


def install(package: str, *words: object, python: object = sys.executable) -> None:
    """Install a package with pip; skip the test without an index."""
    pip = [python, "-m", "pip", "install", "--quiet", *words, package]
    done = subprocess.run(list(map(str, pip)), capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no index here")
    assert done.returncode == 0, done.stderr


@pytest.mark.network
def test_kubernetes_accepts_the_job(tmp_path: Path) -> None:
    """The file is valid in the strict schemas of Kubernetes, which refuse a misspelt key and a missing one."""
    install("kubernetes-validate>=1.31", "--target", tmp_path)
    words = [sys.executable, "-c", VALIDATE, ROOT / "configs/kubernetes.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(PYTHONPATH=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    misspelt, incomplete = done.stdout.splitlines()
    assert "'terminationGraceSeconds' was unexpected" in misspelt
    assert "'containers' is a required property" in incomplete


def test_kubernetes_handles_each_exit_code() -> None:
    spec = JOB["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert stop_within(container["args"]) < pod["terminationGracePeriodSeconds"]
    by_code = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
            by_code |= dict.fromkeys(codes["values"], rule["action"])
    assert by_code == {UserError.exit_code: "FailJob", STOPPED: "Ignore"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    config = load_config(container["args"])
    assert list(config.placement.nvme) == [mounts["pages"]]
    assert config.save.output.startswith(f"{mounts['runs']}/")
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


# -- SkyPilot ----------------------------------------------------------------------------------------------------------

ACCEPT = """
import sys

import sky
import yaml

config = yaml.safe_load(open(sys.argv[1]))
if len(sys.argv) > 2:
    config["resources"]["job_recovery"][sys.argv[2]] = "many"
task = sky.Task.from_yaml_config(config, env_overrides=[("NFS", "fs:/")])
(resources,) = task.resources
print(resources.use_spot, resources.job_recovery)
"""


@pytest.mark.network
@pytest.mark.slow
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    """SkyPilot, in a separate environment, makes a task of the file, and refuses a value of the wrong type."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install("skypilot>=0.14", python=python)
    (tmp_path / "dist").mkdir()  # a source of file_mounts must exist

    def accept(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [python, "-c", ACCEPT, ROOT / "configs/skypilot.yaml", *words]
        env = environment(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1")
        return subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env)

    done = accept()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True {")
    refused = accept("max_restarts_on_errors")
    assert refused.returncode
    assert "max_restarts_on_errors" in refused.stderr + refused.stdout


def test_skypilot_recovers_a_preempted_job() -> None:
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    name, *words = shlex.split(TASK["run"].replace("\\\n", ""))
    assert name == "offload-train"
    assert stop_within(words) < 120  # AWS warns two minutes ahead
    assert TASK["resources"]["infra"].partition("/")[0] in load_config(words).train.stop_on
    for script in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)


# -- Slurm: the batch file with stand-ins ------------------------------------------------------------------------------

# Runs the command of srun once for each rank, one after the other; $ENDS also tells the batch shell to end.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && count=${1#--ntasks=}
  shift
done
for ((rank = 0; rank < count; rank++)); do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@"; done
[ -z "$ENDS" ] || kill -TERM $PPID
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo one; echo two; else echo "$@" >>requeued; fi
"""
TRAIN = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${#OFFLOAD_TRAINER_SECRET} $*" >>ranks
"""


def of_batch_file(name: str) -> str:
    """Return the value of an option of sbatch in the batch file, without its comment."""
    (value,) = re.findall(rf"^#SBATCH --{name}=(\S+)", BATCH, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, "", False), (2, "", False), (STOPPED, "", True), (STOPPED, "yes", False)]
)
def test_the_batch_file_requeues_only_preempted_jobs(code: int, ends: str, requeued: bool, tmp_path: Path) -> None:
    """A warned job is requeued; one that has finished or failed, or that Slurm ends itself, is not."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("offload-train", TRAIN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodes", "SLURM_CPUS_PER_TASK": "1"}
    env = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_NTASKS_PER_NODE="2", **job)
    env |= {"CODE": str(code), "ENDS": ends}
    words = ["--data", "a b.jsonl"]
    done = subprocess.run(["bash", ROOT / "configs/slurm.sbatch", *words], cwd=tmp_path, env=env)
    assert done.returncode == code
    ranks = [f"{rank} {rank % 2} 4 2 one 64 --data a b.jsonl train.stop_within=100" for rank in range(4)]
    assert (tmp_path / "ranks").read_text().splitlines() == ranks
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 123\n"


def test_the_batch_file_warns_in_time() -> None:
    (within,) = re.findall(r"^STOP_WITHIN=(\d+)$", BATCH, re.MULTILINE)
    name, _, seconds = of_batch_file("signal").partition("@")
    assert name == "TERM"
    assert int(within) < int(seconds)


# -- Slurm: a real one -------------------------------------------------------------------------------------------------

EVERY, PREEMPTIONS = 5, 3
STEPS = 20  # assert_same_run compares this checkpoint
DROPOUT = [f"model.overrides.{name}=0.1" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
WORDS = [*TINY, *DROPOUT, "--steps", str(STEPS), "--save-every", "100", "train.eval_every=0"]


def until(condition: Callable[[], bool], told: Callable[[], str], *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


def free_ports() -> int:
    """Return the first of two neighbouring ports that are free."""
    for port in range(20000, 30000, 2):
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("", port))
            other.bind(("", port + 1))
            return port
    raise AssertionError("no two neighbouring ports are free")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a Slurm of one node; skip the test if that is impossible here."""
    if os.getuid() or not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("Slurm is started by root, from Debian's packages: apt-get install slurm-wlm")
    script, folder = ROOT / "soak/slurm_one_node.sh", tmp_path / "slurm"
    subprocess.run([script, "start", folder], check=True, env=os.environ | {"PORT": str(free_ports())})
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        yield
    finally:
        subprocess.run([script, "stop", folder], check=True)


def submit(*words: object, folder: Path, **extra: str) -> str:
    """Submit a job; return its number."""
    argv = ["sbatch", "--parsable", *map(str, words)]
    done = subprocess.run(argv, cwd=folder, env=environment(**extra), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def facts(job: str) -> dict[str, str]:
    """Return what Slurm says about a job."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return dict(word.partition("=")[::2] for word in printed.split())


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_job_preempted_three_times_has_the_bits_of_a_run_left_alone(tmp_path: Path) -> None:
    """Each start pauses after five more steps until its ranks have been warned, then saves and is requeued."""
    whole = call(*WORDS, "--gpus", "2", output=tmp_path / "whole")
    assert cli.main(["cp", "slurm", str(tmp_path)]) == 0
    batch = tmp_path / "slurm.sbatch"
    batch.write_text(re.sub(r"^#SBATCH --gpus-per-node=.*\n", "", BATCH, flags=re.MULTILINE))  # there are none here
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/offload-train"
    command.write_text(
        f"#!/bin/sh\nstart=${{SLURM_RESTART_COUNT:-0}}\nexec {sys.executable} {HELPERS}/run_and_pause.py "
        f'$(({EVERY} * (start + 1))) {tmp_path}/warned-$start "$@"\n'
    )
    command.chmod(0o755)
    (tmp_path / f"warned-{PREEMPTIONS}").touch()  # the last start trains to the end
    output, log = tmp_path / "out", tmp_path / "log"
    metrics = output / "metrics.jsonl"
    shape = ["--ntasks-per-node=2", "--cpus-per-task=1", f"--output={log}"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    job = submit(*shape, batch, *WORDS, "--output", output, folder=tmp_path, PATH=path)

    def told() -> str:
        return f"{facts(job)}\n{log.read_text() if log.exists() else ''}"

    for number in range(PREEMPTIONS):
        steps = EVERY * (number + 1)
        until(lambda: metrics.exists() and metrics.read_text().count("\n") == steps, told)  # noqa: B023
        submit("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true", folder=tmp_path)
        until(lambda: log.read_text().count("SIGTERM: finishing this step") == number + 1, told)  # noqa: B023
        (tmp_path / f"warned-{number}").touch()
        until(lambda: facts(job)["Restarts"] == str(number + 1), told)  # noqa: B023
    until(lambda: facts(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), told)
    text = log.read_text()
    assert (facts(job)["JobState"], facts(job)["ExitCode"]) == ("COMPLETED", "0:0"), text
    stops = [int(step) for step in re.findall(r"stopped after step (\d+), everything saved", text)]
    assert stops == [EVERY, 2 * EVERY, 3 * EVERY]
    assert_same_run(Run(0, text, output), whole)
