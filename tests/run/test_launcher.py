"""Tests of the launcher: the rank whose end it reports, signals that it passes on, and ranks that outlive it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import run_script

from offload_trainer import ranks
from offload_trainer.errors import LOST, UserError
from offload_trainer.manifest import MANIFEST
from offload_trainer.run import launcher
from offload_trainer.run.launcher import first_failure
from offload_trainer.run.train import _join
from offload_trainer.settings import load_config


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


@pytest.mark.slow
def test_ranks_that_cannot_train_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--gpus 3, but the launcher has started 2"):
        _join(load_config(["--gpus", "3"]).placement, world=2)


@pytest.mark.slow
def test_nodes_have_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are grouped into nodes by torchrun's LOCAL_RANK."""

    def of(*local: int) -> tuple[range, ...]:
        monkeypatch.setattr(ranks, "place_here", lambda: (0, len(local)))
        monkeypatch.setattr(ranks, "all_gather_json", lambda _: list(local))
        return ranks.nodes()

    assert of(0) == (range(1),)
    assert of(0, 1, 2) == (range(3),)
    assert of(0, 1, 0, 1) == (range(2), range(2, 4))
    assert of(0, 0, 0) == (range(1), range(1, 2), range(2, 3))
    for uneven in ((0, 0, 1), (0, 1, 2, 0), (1, 0)):
        with pytest.raises(UserError, match="not as many on every node"):
            of(*uneven)


@pytest.mark.slow
def test_a_launcher_says_where_the_next_start_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher names the checkpoint to resume from by the files in the run directory."""

    def told(failed: dict[int, int], *, stopped: int = 0) -> int:
        return launcher._report_failure(failed, ["--gpus", "2", "--output", str(tmp_path)], stopped=stopped)

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
    assert told({}) == 0


# A launcher of two processes, which follow their arguments and report how they ended.
LAUNCHED = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from offload_trainer.run import launcher

# Long enough for a busy machine where the ranks react, and shorter than a save where they must be left to it.
launcher._GRACE = 0.5 if sys.argv[2] == "saves" else 4
sys.modules["offload_trainer.run.resume_point"] = SimpleNamespace(resume_hint=lambda words: "it goes on")
start = launcher._Ranks.start
folder, fault = Path(sys.argv[1]), sys.argv[2]
RANK = '''
import os, signal, sys, time
from pathlib import Path

folder, fault, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])

def stop(number, frame):
    with open(folder / f"told-{rank}", "a") as file:
        file.write(f"{number} ")
    if fault == "saves" and number == signal.SIGTERM:
        time.sleep(1.5)  # longer than ranks of a run that fails are given
        sys.exit(128 + number)
    if fault == "hangs" and number == signal.SIGTERM:
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit(69)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
(folder / f"ready-{rank}").touch()
if rank and fault in ("fails", "ignores"):
    while not (folder / "ready-0").exists():
        time.sleep(0.005)
    sys.exit(3)
while True:
    time.sleep(0.01)
    if fault == "fails" and (folder / f"told-{rank}").exists():
        sys.exit(69)
'''
own = lambda: [sys.executable, "-c", RANK, *sys.argv[1:]]
launcher._Ranks.start = lambda self, command, *, count: start(self, own(), count=count)

def ask():
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not all((folder / f"told-{rank}").exists() for rank in range(2)):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)

if fault in ("saves", "hangs"):
    if not os.fork():  # another process: the launcher has no thread while it starts its ranks
        parent = os.getppid()
        os.getpid = lambda: parent
        ask()
        os._exit(0)
sys.exit(launcher.run_ranks([], count=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "expected_text"),
    [
        ("fails", 3, ["15"]),  # the other one gets SIGTERM, and ends
        ("ignores", 3, ["15"]),  # it does not end, and is killed
        ("saves", 128 + 15, ["10 15", "10 15"]),  # both get the launcher's signal once, and time to save
        ("hangs", 128 + 15, ["10 15", "10 15"]),  # one stands still, so the other ends without it: it is killed
    ],
)
def test_the_launcher_ends_ranks_and_passes_signals_on(
    fault: str, code: int, expected_text: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    done = run_script(script, tmp_path, fault)
    assert done.returncode == code, done.stderr
    assert [path.read_text().strip() for path in sorted(tmp_path.glob("told-*"))] == expected_text
    assert done.stderr == ("offload-train: stopped by SIGTERM; it goes on\n" if code == 128 + 15 else "")


LEFT = """
import os, signal, threading, time
from offload_trainer.run import launcher

launcher._LOOK = 0.02
heard, sleep = threading.Event(), time.sleep
time.sleep = lambda seconds: heard.wait() if seconds == launcher._GRACE else sleep(seconds)
reader, writer = os.pipe()
parent = os.fork()
if not parent:
    middle = os.getpid()
    if os.fork():
        os._exit(0)  # and the rank below has no launcher
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_PORT": "29512", "TORCHELASTIC_RUN_ID": "x"}
    os.environ[launcher.LAUNCHER] = str(middle)
    signal.signal(signal.SIGTERM, lambda *_: (os.write(writer, b"told to end\\n"), heard.set()))
    launcher.end_without_launcher(lambda line: os.write(writer, f"{line}\\n".encode()))
    time.sleep(600)
    os._exit(0)
os.close(writer)
told = b""
while more := os.read(reader, 4096):  # until SIGKILL closes the pipe
    told += more
print(told.decode())
"""


def test_a_rank_without_a_launcher_ends(tmp_path: Path) -> None:
    """A rank without its launcher ends in order, or immediately if that takes too long."""
    script = tmp_path / "left.py"
    script.write_text(LEFT)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert "the launcher of the ranks (process" in done.stdout
    assert "told to end" in done.stdout
