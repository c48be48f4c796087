"""Tests of ranks of one launcher, several nodes and torchrun: how they end, differ, and resume with equal bits."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import COMMAND, FAULTY, KILL, TINY, Run, assert_same_run, call, environment, start
from forked_child import in_a_fork
from forked_ranks import call_ranks

from offload_trainer import ranks
from offload_trainer.common.errors import LOST, STORE, TrainerError, UserError
from offload_trainer.run import checks
from offload_trainer.run import process_setup as launcher
from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.run.checks import refuse_other_data, refuse_other_programs, refuse_unseen
from offload_trainer.run.process_setup import first_failure
from offload_trainer.run.train import _join
from offload_trainer.settings import load_config
from offload_trainer.storage.manifest import ENGINE, MANIFEST


def test_the_first_failed_rank_is_reported() -> None:
    for codes, first in (
        ([LOST, 2], (1, 2)),  # rank 0 ended first, but only because of rank 1
        ([LOST, -signal.SIGKILL], (1, -signal.SIGKILL)),
        ([-signal.SIGTERM, LOST, 1], (2, 1)),
        ([1, 1], (0, 1)),
        ([-signal.SIGTERM, -signal.SIGTERM], (0, -signal.SIGTERM)),
    ):
        assert first_failure(dict(enumerate(codes))) == first


def test_a_launcher_that_was_stopped_beyond_its_timeout_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python's sigtimedwait returns uninitialised memory."""
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
        (("step-00000003",), "step-00000003 holds weights without moments, from which no run resumes"),
        (("step-00000003", "step-00000012"), "checkpoint step-00000012"),
    ):
        for name in kept:
            (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "checkpoints" / name / MANIFEST).touch()
        if len(kept) > 1:
            (tmp_path / "checkpoints" / kept[-1] / ENGINE).touch()
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
    assert capfd.readouterr().err == ("offload-train: stopped by SIGTERM; it goes on\n" if code == 128 + 15 else "")


def test_a_rank_without_a_launcher_ends() -> None:
    reader, writer = os.pipe()
    heard, sleep = threading.Event(), time.sleep

    def work() -> int:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", launcher.LAUNCHER: str(os.getpid())}
        if os.fork():
            return 0  # this process was the launcher of the rank below
        launcher._LOOK = 0.02
        time.sleep = lambda seconds: heard.wait() if seconds == launcher._GRACE else sleep(seconds)
        signal.signal(signal.SIGTERM, lambda *_: (os.write(writer, b"told to end\n"), heard.set()))
        launcher.end_without_launcher(lambda line: os.write(writer, f"{line}\n".encode()))
        sleep(600)
        return 1

    assert in_a_fork(work) == 0
    os.close(writer)
    with open(reader) as file:
        told = file.read()  # returns when SIGKILL closes the pipe
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


# -- several nodes, here processes numbered as torchrun does -----------------------------------------------------------

NODES = 2
TWO = ["--accumulate", "2"]  # two ranks make steps of four micro-batches
# A program of Python that runs another one in the network namespace that its first word names.
INSIDE = "import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', sys.argv[1], sys.executable, *sys.argv[2:]])"


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Yield a network namespace for each node, 10.78.0.1 and 10.78.0.2, with a link between them; none without root."""
    names = [f"offload-{os.getpid()}-{number}" for number in range(NODES)]
    with ExitStack() as stack:
        if os.geteuid() != 0 or not shutil.which("ip"):
            names = []
        for name in names:
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
        for number, name in enumerate(names):
            if number == 0:
                ip(f"link add link0 netns {name} type veth peer name link1 netns {names[1]}")
            ip(f"-n {name} addr add 10.78.0.{number + 1}/24 dev link{number}")
            ip(f"-n {name} link set link{number} up")
            ip(f"-n {name} link set lo up")
        yield names


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def held_port() -> tuple[socket.socket, str]:
    """Return a bound socket that reserves a free port until it is closed, and the port."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound, str(bound.getsockname()[1])


def run_nodes(
    *words: object,
    each: int,
    folder: Path,
    script: Sequence[object] = (COMMAND,),
    spaces: Sequence[str] = (),
) -> tuple[list[int], str]:
    """Run two nodes of `each` ranks with a drive each, in these networks; return all exit codes and the output."""
    folder.mkdir()
    bound, port = held_port()
    told, running = [], []
    for rank in range(NODES * each):
        drive = folder / f"drive-{rank // each}"
        drive.mkdir(exist_ok=True)
        place = {"RANK": rank, "LOCAL_RANK": rank % each, "WORLD_SIZE": NODES * each, "LOCAL_WORLD_SIZE": each}
        env = {name: str(value) for name, value in place.items()}
        env |= {"MASTER_ADDR": "10.78.0.1" if spaces else "127.0.0.1", "MASTER_PORT": port}
        told.append(folder / f"told-{rank}")
        argv = [*(("-c", INSIDE, spaces[rank // each]) if spaces else ()), *script, *words, "--nvme", drive]
        running.append(start(*argv, stdout=told[-1], stderr=told[-1], own=bool(spaces), **env))
    with bound:
        codes = [rank.wait(300) for rank in running]
    return codes, "\n".join(path.read_text(errors="replace")[-3000:] for path in told)


def assert_resumed(words: Sequence[object], output: Path, *, alone: Run, **where: Any) -> None:
    """Check that two nodes of one rank resume to the end of the run that one rank made."""
    codes, text = run_nodes(*words, *TWO, "tiered.state_copies=2", "--output", output, each=1, **where)
    assert codes == [0, 0], text
    assert "no page files to resume from: this run has 2 nodes" in text
    assert "resumed from" in text
    assert_same_run(Run(0, text, output), alone)
    assert not list(where["folder"].glob("drive-*/offload-trainer/run-*"))


def cut(run: Path, to: Path) -> Path:
    """Return a copy of a run that was killed after its first checkpoint."""
    shutil.copytree(run, to)
    for later in sorted((to / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    return to


@pytest.mark.slow
@pytest.mark.parametrize("ways", [["--accumulate", "1"], [*TWO, "parallel.pipeline=2"]])
def test_killed_and_resumed_with_the_bits_of_one_rank(
    ways: Sequence[object], spaces: list[str], tmp_path: Path, drive: Path
) -> None:
    """On two nodes, the last with networks of their own, or one rank, and the other way round."""
    words = [*TINY, "--scratch", "--dtype", "bf16", "--engine", "tiered", "--save-every", "2", "--steps", "6"]
    words += [f"model.overrides.{name}=0.1" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    words += ["--optimizer", "nvme", "--ram-fraction", "0.5", "--params", "cpu"]
    one = ["--accumulate", "4", "--nvme", drive]
    alone = call(*words, *one, output=tmp_path / "alone")
    output = tmp_path / "killed"
    killing = f"pause~{output}/checkpoints/step-00000002/MANIFEST.json+kill@step=4"
    script = [FAULTY, f"2:{killing};3:{killing}"]
    codes, text = run_nodes(*words, *ways, "--output", output, each=2, folder=tmp_path / "nodes", script=script)
    assert codes == [LOST] * 2 + [-KILL] * 2, text
    assert_same_run(call(*words, *one, output=cut(output, tmp_path / "by one")), alone)
    assert_resumed(words, output, folder=tmp_path / "again", alone=alone)
    assert_resumed(words, cut(alone.output, tmp_path / "back"), folder=tmp_path / "other", alone=alone, spaces=spaces)


@pytest.mark.slow
def test_a_node_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, port = held_port()
    with bound:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        monkeypatch.setattr(ranks, "_JOINING", 0.5)
        with pytest.raises(TrainerError, match=f"after 0.5 s not all ranks .* reach 127.0.0.1:{port} .* 1/2"):
            ranks.join()


def test_a_rank_whose_launcher_has_ended_does_not_wait_for_others() -> None:
    os.environ.update({"RANK": "0", "WORLD_SIZE": "2", STORE: "/proc/0/fd/3"})
    with pytest.raises(TrainerError, match="the launcher has ended before all ranks have come"):
        ranks.join()


WATCHES = """
import time
from offload_trainer import ranks
ranks.UNANSWERED = 3
ranks.join()
ranks.end_if_rank_vanishes(say=lambda line: print(line, flush=True))
print("connected", flush=True)
time.sleep(300)
"""


@pytest.mark.slow
def test_a_node_that_vanishes_ends_the_others(spaces: list[str]) -> None:
    """The link between the networks is cut, which closes no connection."""
    if not spaces:
        pytest.skip("makes networks, which root alone can")
    nodes = []
    with ExitStack() as stack:
        for number, space in enumerate(spaces):
            place = {"RANK": f"{number}", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "7000"}
            program = [sys.executable, "-c", INSIDE, space, "-c", WATCHES]
            nodes.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment(**place)))
            stack.enter_context(nodes[-1])
            stack.callback(nodes[-1].kill)
        assert [node.stdout.readline() for node in nodes] == ["connected\n"] * 2
        ip(f"-n {spaces[1]} link set link1 down")
        for node, lost in zip(nodes, (1, 0), strict=True):
            line = f"no answer from rank {lost} for 3 s, and the run ends. The same command resumes\n"
            assert (node.stdout.readline(), node.wait(60)) == (line, 1)


@pytest.mark.slow
def test_a_run_directory_that_others_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PATIENCE", 0.1)
    refuse_unseen(tmp_path, first=0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="must be on a filesystem that all nodes share"):
        checks._read_token(tmp_path / ".seen-0123")


# -- torchrun's restarts: killed ranks resume the run, and a run that is asked to stop ends ----------------------------


ON_DRIVE = [*TINY, "--engine", "tiered", "--optimizer", "nvme", "--steps", 20, "--save-every", 3, "train.eval_every=0"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    (folder / "drive").mkdir()
    return call(*ON_DRIVE, "--accumulate", 2, "--nvme", folder / "drive", output=folder / "alone")


def torchrun(
    *words: object, folder: Path, script: Sequence[object] = ("-m", "offload_trainer", "train")
) -> tuple[int, str]:
    """Run two ranks under torchrun; return its exit code and all that was printed, which is in the file `told`."""
    drive = folder / "drive"
    drive.mkdir(parents=True)
    bound, port = held_port()
    launch = ["-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", 2, "--max-restarts", 3]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port]
    told = folder / "told"
    with bound:
        argv = [*launch, *script, *ON_DRIVE, "--accumulate", 1, "--nvme", drive, *words]
        code = start(*argv, stdout=told, stderr=told, own=True, CUDA_VISIBLE_DEVICES="").wait(400)
    assert not list(drive.glob("offload-trainer/run-*"))
    return code, told.read_text(errors="replace")


@pytest.mark.slow
def test_killed_ranks_are_restarted(alone: Run, seed: int, tmp_path: Path) -> None:
    """Before a random step, a random write, and in a save. torchrun's store still has the addresses of those before."""
    dice, output = random.Random(seed), tmp_path / "out"
    faults = f"{dice.randrange(2)}:kill@step={dice.randrange(2, 9)}"
    faults += f",{dice.randrange(2)}:kill@page={dice.randrange(1, 10)},0:kill@manifest"
    code, text = torchrun("--output", output, folder=tmp_path / "nodes", script=[FAULTY, faults])
    assert code == 0, f"{faults}: {text[-6000:]}"
    assert text.count("failed (exitcode: -9)") == 3, text[-6000:]
    assert_same_run(Run(0, text, output), alone)


@pytest.mark.slow
def test_a_run_whose_torchrun_is_told_to_stop_is_not_restarted(alone: Run, tmp_path: Path) -> None:
    first, output = tmp_path / "first", tmp_path / "out"
    # Rank 0 tells torchrun, and waits until that has passed the signal on, to all processes of its session.
    stop = "trap '' TERM\nkill -TERM $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
    waits = f"until grep -q 'finishing this step' {first}/told\ndo sleep 0.05\ndone"
    code, text = torchrun("--output", output, folder=first, script=[FAULTY, f"sh~{stop}\n{waits}@line=5"])
    assert code == 1, text[-6000:]
    assert text.count("stopped after step") == 1  # no rank was started again
    assert "stopped after step 5, everything saved; the same command resumes from there" in text
    assert (output / "checkpoints/step-00000005/MANIFEST.json").exists()
    code, text = torchrun("--output", output, folder=tmp_path / "again")
    assert code == 0, text[-6000:]
    assert_same_run(Run(0, text, output), alone)
