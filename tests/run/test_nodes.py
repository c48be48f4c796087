"""Tests of runs on several nodes, here processes numbered as torchrun does, and of torchrun's restarts.

They have the bits of one rank, also after a kill and a resume.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND, FAULTY, KILL, TINY, Run, assert_same_run, call, environment, start

from offload_trainer import ranks
from offload_trainer.errors import LOST, TrainerError, UserError
from offload_trainer.run import checks
from offload_trainer.run.checks import refuse_unseen

pytestmark = pytest.mark.slow

NODES = 2
DROPOUT = [f"model.overrides.{name}=0.1" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
WORDS = [*TINY, *DROPOUT, "--scratch", "--dtype", "bf16", "--engine", "tiered", "--save-every", "2", "--steps", "6"]
HALF = ["--optimizer", "nvme", "--ram-fraction", "0.5", "--params", "cpu"]
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
    """Return a free port for rank 0, and a bound socket that reserves it until it is closed."""
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


def by(ranks: int) -> list[str]:
    return ["--accumulate", str(4 // ranks)]


def assert_resumed(words: Sequence[object], output: Path, *, alone: Run, **where: Any) -> None:
    """Check that two nodes of one rank resume to the end of the run that one rank made."""
    codes, text = run_nodes(*words, *by(2), "tiered.state_copies=2", "--output", output, each=1, **where)
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


@pytest.mark.parametrize("ways", [by(4), [*by(2), "parallel.pipeline=2"]])
def test_killed_and_resumed_with_the_bits_of_one_rank(
    ways: Sequence[object], spaces: list[str], tmp_path: Path, drive: Path
) -> None:
    """On two nodes, the last with networks of their own, or one rank, and the other way round."""
    words, one = [*WORDS, *HALF], [*by(1), "--nvme", drive]
    alone = call(*words, *one, output=tmp_path / "alone")
    output = tmp_path / "killed"
    killing = f"pause~{output}/checkpoints/step-00000002/MANIFEST.json+kill@step=4"
    script = [FAULTY, f"2:{killing};3:{killing}"]
    codes, text = run_nodes(*words, *ways, "--output", output, each=2, folder=tmp_path / "nodes", script=script)
    assert codes == [LOST] * 2 + [-KILL] * 2, text
    by_one = call(*words, *one, output=cut(output, tmp_path / "by one"))
    assert_same_run(by_one, alone)
    assert_resumed(words, output, folder=tmp_path / "again", alone=alone)
    back = cut(alone.output, tmp_path / "back")
    assert_resumed(words, back, folder=tmp_path / "other", alone=alone, spaces=spaces)


def test_a_node_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, port = held_port()
    with bound:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        monkeypatch.setattr(ranks, "_JOINING", 0.5)
        with pytest.raises(TrainerError, match=f"after 0.5 s not all ranks .* reach 127.0.0.1:{port} .* 1/2"):
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


def test_a_run_directory_that_others_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PATIENCE", 0.1)
    refuse_unseen(tmp_path, first=0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="must be on a filesystem that all nodes share"):
        checks._read_token(tmp_path / ".seen-0123")


# -- torchrun's restarts: killed ranks resume the run, and a run that is told to stop ends -----------------------------


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


def test_killed_ranks_are_restarted(alone: Run, seed: int, tmp_path: Path) -> None:
    """A rank is killed three times: before a random step, before a random write of an update, and in a save.

    The ranks join although the addresses of those before them are still in torchrun's store.
    """
    dice, output = random.Random(seed), tmp_path / "out"
    faults = f"{dice.randrange(2)}:kill@step={dice.randrange(2, 9)}"
    faults += f",{dice.randrange(2)}:kill@page={dice.randrange(1, 10)},0:kill@manifest"
    code, text = torchrun("--output", output, folder=tmp_path / "nodes", script=[FAULTY, faults])
    assert code == 0, f"{faults}: {text[-6000:]}"
    assert text.count("failed (exitcode: -9)") == 3, text[-6000:]
    assert_same_run(Run(0, text, output), alone)


def test_a_run_whose_torchrun_is_told_to_stop_is_not_restarted(alone: Run, tmp_path: Path) -> None:
    """torchrun ends with the run, which has saved its step; the same command resumes."""
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
