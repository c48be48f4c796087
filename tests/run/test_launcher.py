"""Tests of the launcher: the rank whose end it reports, signals that it passes on, ranks that outlive it or differ."""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from commands import FAULTY, TINY, assert_same_run, call
from forked_child import in_a_fork
from forked_ranks import call_ranks

from offload_trainer import ranks
from offload_trainer.errors import LOST, UserError
from offload_trainer.run import checks
from offload_trainer.run import process_setup as launcher
from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.run.checks import refuse_other_data, refuse_other_programs
from offload_trainer.run.process_setup import first_failure
from offload_trainer.run.train import _join
from offload_trainer.settings import load_config
from offload_trainer.storage.manifest import MANIFEST


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ([LOST, 2], (1, 2)),  # rank 0 ended first, but only because of rank 1
        ([LOST, -signal.SIGKILL], (1, -signal.SIGKILL)),
        ([-signal.SIGTERM, LOST, 1], (2, 1)),
        ([1, 1], (0, 1)),
        ([-signal.SIGTERM, -signal.SIGTERM], (0, -signal.SIGTERM)),
    ],
)
def test_the_first_failed_rank_is_reported(codes: list[int], first: tuple[int, int]) -> None:
    assert first_failure(dict(enumerate(codes))) == first


def test_a_launcher_that_was_stopped_beyond_its_timeout_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python's sigtimedwait returns memory that nobody has set."""
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: SimpleNamespace(si_signo=-(2**20)))
    rank = Mock(poll=lambda: 0)
    assert launcher.wait_for({0: rank}, {signal.SIGCHLD}) == ({}, 0)
    rank.send_signal.assert_not_called()


@pytest.mark.slow
def test_nodes_have_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--gpus 3, but the launcher has started 2"):
        _join(load_config(["--gpus", "3"]).placement, world=2)
    for local, nodes in (
        ((0,), (range(1),)),
        ((0, 1, 2), (range(3),)),
        ((0, 1, 0, 1), (range(2), range(2, 4))),
        ((0, 0, 0), (range(1), range(1, 2), range(2, 3))),
        *((uneven, None) for uneven in ((0, 0, 1), (0, 1, 2, 0), (1, 0))),
    ):
        monkeypatch.setattr(ranks, "place_here", lambda local=local: (0, len(local)))
        monkeypatch.setattr(ranks, "all_gather_json", lambda _, local=local: list(local))
        if nodes:
            assert ranks.nodes() == nodes
        else:
            with pytest.raises(UserError, match="not as many on every node"):
                ranks.nodes()


@pytest.mark.slow
def test_a_launcher_says_where_the_next_start_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(failed: dict[int, int], *, stopped: int = 0) -> int:
        return launcher._report_failure(failed, stopped, ["--gpus", "2", "--output", str(tmp_path)])

    killed = {1: -signal.SIGKILL}
    for kept, where in (
        ((), "nothing was saved yet"),
        (("step-00000003", "step-00000012"), "checkpoint step-00000012"),
    ):
        for name in kept:
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
            (tmp_path / "checkpoints" / name / MANIFEST).touch()
        assert told(killed) == 128 + signal.SIGKILL
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("offload-train: rank 1 was killed by SIGKILL, and the run ended with it; ")
        assert where in line
    assert told(killed, stopped=signal.SIGTERM) == 128 + signal.SIGTERM
    line = "offload-train: stopped by SIGTERM; the same command resumes from the checkpoint step-00000012\n"
    assert capsys.readouterr().err == line
    assert told({1: 143, 0: 1}, stopped=signal.SIGTERM) == 1  # the save failed, which the rank has said
    assert (told({}), told({0: 255})) == (0, 255)
    assert not capsys.readouterr().err


# One of two ranks of a launcher, which reports the signals that it gets; rank 0 may send them to the launcher.
RANK = """
import os, signal, sys, time
from pathlib import Path

folder, fault, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])

def stop(number, frame):
    with open(folder / f"told-{rank}", "a") as file:
        file.write(f"{number} ")
    if fault == "saves" and number == signal.SIGTERM:
        time.sleep(1.5)  # longer than ranks of a run that fails are given
        sys.exit(128 + number)
    if fault == "stops":
        sys.exit(69)
    if fault == "hangs" and number == signal.SIGTERM:
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit(69)

def wait_for(name):
    while not all((folder / f"{name}-{rank}").exists() for rank in range(2)):
        time.sleep(0.005)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
(folder / f"ready-{rank}").touch()
wait_for("ready")
if rank and fault in ("fails", "ignores"):
    sys.exit(3)
if fault == "stops":
    os.kill(os.getpid(), signal.SIGSTOP) if rank else sys.exit(time.sleep(0.5) or 3)
if not rank and fault in ("saves", "hangs"):
    os.kill(os.getppid(), signal.SIGUSR1)
    wait_for("told")
    os.kill(os.getppid(), signal.SIGTERM)
while True:
    time.sleep(0.01)
    if fault == "fails" and (folder / f"told-{rank}").exists():
        sys.exit(69)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "expected_text"),
    [
        ("fails", 3, ["15"]),  # the other one gets SIGTERM, and ends
        ("ignores", 3, ["15"]),  # it does not end, and is killed
        ("stops", 3, ["15"]),  # it is stopped, and is continued to end
        ("saves", 128 + 15, ["10 15", "10 15"]),  # both get the launcher's signal once, and time to save
        ("hangs", 128 + 15, ["10 15", "10 15"]),  # one stands still, so the other ends without it: it is killed
    ],
)
def test_the_launcher_ends_ranks_and_passes_signals_on(
    fault: str, code: int, expected_text: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        # Long enough for a busy machine where the ranks react, and shorter than a save where they must be left to it.
        launcher._GRACE = 0.5 if fault == "saves" else 4
        sys.modules["offload_trainer.run.resume"] = SimpleNamespace(resume_hint=lambda words: "it goes on")
        launcher.COMMAND = [sys.executable, "-c", RANK, str(tmp_path), fault]
        return launcher.run_ranks([], count=2)

    assert in_a_fork(work) == code
    assert [path.read_text().strip() for path in sorted(tmp_path.glob("told-*"))] == expected_text
    told = capfd.readouterr().err
    assert told == ("offload-train: stopped by SIGTERM; it goes on\n" if code == 128 + 15 else "")


def test_a_rank_without_a_launcher_ends() -> None:
    reader, writer = os.pipe()
    heard, sleep = threading.Event(), time.sleep

    def work() -> int:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", launcher.LAUNCHER: str(os.getpid())}
        if os.fork():
            return 0  # and the rank below has no launcher
        launcher._LOOK = 0.02
        time.sleep = lambda seconds: heard.wait() if seconds == launcher._GRACE else sleep(seconds)
        signal.signal(signal.SIGTERM, lambda *_: (os.write(writer, b"told to end\n"), heard.set()))
        launcher.end_without_launcher(lambda line: os.write(writer, f"{line}\n".encode()))
        sleep(600)
        return 1

    assert in_a_fork(work) == 0
    os.close(writer)
    with open(reader) as file:
        told = file.read()  # until SIGKILL closes the pipe
    assert "the launcher of the ranks (process" in told
    assert "told to end" in told


# -- commands with several ranks that end early, or that differ --------------------------------------------------------


FOUR = [*TINY, "--engine", "tiered", "--steps", 6, "--save-every", 2, "train.eval_every=0", "--micro-batch", "1"]


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    """Its rank alone reports it, and no partial file gets its final name. A rerun of two ranks has the bits of one."""
    alone = call(*FOUR, "--accumulate", 6, output=tmp_path / "alone")
    ended = call_ranks(*FOUR, "--accumulate", 2, output=tmp_path / "out", script=[FAULTY, "1:broken@put=2"])
    assert [run.code for run in ended] == [1, 1, 1]
    printed = [[line for line in run.text.splitlines() if line.startswith("offload-train")] for run in ended]
    assert [len(lines) for lines in printed] == [0, 1, 0], printed
    assert "exp_avg.safetensors: No space left on device" in printed[1][0]
    assert "No space left on device" in (tmp_path / "out/log.txt").read_text().splitlines()[-1]
    checkpoints = tmp_path / "out/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    two = call_ranks(*FOUR, "--accumulate", 3, output=tmp_path / "out", count=2)
    assert [run.code for run in two] == [0, 0], two
    assert "resumed from" in two[0].text
    assert "in the background" in two[0].text
    assert_same_run(two[0], alone)
    read_manifest(checkpoints / "step-00000006")


@pytest.mark.slow
def test_ranks_of_different_commands_do_not_begin(tmp_path: Path) -> None:
    ended = call_ranks(*FOUR, output=tmp_path / "out", count=2, last=["--lr", "0.25"])
    assert [run.code for run in ended] == [2, 2]
    assert "optim.lr: rank 1 has 0.25, rank 0 has" in ended[0].text.replace("rank 0 0", "rank 0 has 0")
    assert not ended[1].text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_program_and_other_data_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are three ranks, of which this is the first and the last reports other facts."""
    monkeypatch.setattr(checks, "place_here", lambda: (0, 3))
    program = partial(refuse_other_programs, load_config([]).model_dump(mode="json"))
    data = partial(refuse_other_data, {"tokens": 5, "text": 1234}, {"a": {"shape": [2], "trained": True}})
    for refuse, changed, told in (
        (program, {"torch": "2.1"}, f"torch: rank 2 has 2.1, rank 0 {torch.__version__}"),
        (program, {"CPU instruction set (torch)": "Z80"}, "CPU instruction set (torch): rank 2 has Z80, rank 0 "),
        (data, {"text": 77}, "text: rank 2 has 77, rank 0 1234"),
        (data, {"the model's weights": 3}, "the model's weights: rank 2 has 3"),
    ):
        monkeypatch.setattr(checks, "all_gather_json", lambda mine, more=changed: [mine, mine, mine | more])
        with pytest.raises(UserError) as refused:
            refuse()
        assert told in str(refused.value)
