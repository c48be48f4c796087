"""Compare two nodes on one machine (two network namespaces with a link) with one rank: the bits must be the same.

    python soak/two_nodes.py FOLDER [--each 1|2] [--steps 20] [--mbit N] [--params gpu|cpu|nvme] [--lose | --refuse]

torchrun is started in each of two namespaces, which see each other only through a veth pair. Each has its own drive
directory. GPT-2, tied, with dropout, trains in bf16 with half of the state on the drive. One node's ranks are killed
after a checkpoint, the same command resumes, and losses, norms and the last checkpoint must be one rank's. Then one
rank resumes a checkpoint of the nodes, and the nodes resume one of that rank. The bytes that leave a node in a step are
read from the link's counters and compared with the plan.

With `--lose`, the link is cut instead, and in another run all of node 1 is stopped (SIGSTOP): the remaining processes
end and say why. With `--refuse`, the nodes have different secrets: both end before anything is written, and say so.
Needs root and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SPACES, LINKS = ("offload-0", "offload-1"), ("otveth0", "otveth1")
PORT = "29631"
SHAPE = ["n_layer=3", "n_embd=96", "n_head=4", "vocab_size=2048", "resid_pdrop=0.1", "embd_pdrop=0.1", "attn_pdrop=0.1"]
MICRO = 4  # micro-batches of a step, over all ranks


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network(mbit: int | None) -> Iterator[None]:
    """Create two namespaces and a link of `mbit` Mbit/s between them."""
    for name in SPACES:
        ip("netns", "add", name)
    try:
        ip("link", "add", LINKS[0], "netns", SPACES[0], "type", "veth", "peer", "name", LINKS[1], "netns", SPACES[1])
        for space, link, address in zip(SPACES, LINKS, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
            if mbit:
                rate = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
                subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", *rate], check=True)
        yield
    finally:
        for name in SPACES:
            ip("netns", "del", name)


def sent(node: int) -> int:
    """Return the number of bytes that have left a node."""
    words = ["ip", "-n", SPACES[node], "-s", "-j", "link", "show", LINKS[node]]
    told = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return int(told[0]["stats64"]["tx"]["bytes"])


def command(folder: Path, output: Path, *, node: int, steps: int, ranks: int, params: str) -> list[str]:
    drive = folder / f"drive-{node}"
    drive.mkdir(exist_ok=True)
    shape = [f"model.overrides.{one}" for one in SHAPE]
    return [
        *("train", "--model", "gpt2", "--scratch", *shape, "--dtype", "bf16", "--seq-len", "64", "--micro-batch", "2"),
        *("--accumulate", str(MICRO // ranks), "--steps", str(steps), "--save-every", "5", "save.keep=9"),
        *("--engine", "tiered", "--params", params, "--optimizer", "nvme", "--ram-fraction", "0.5"),
        *("--nvme", str(drive), "--output", str(output), "placement.threads=1", f"data.cache={folder}/cache"),
    ]


def start(
    folder: Path,
    output: Path,
    *,
    each: int,
    steps: int,
    params: str,
    secrets: Sequence[str] = ("what both nodes know",) * 2,
) -> list[subprocess.Popen[bytes]]:
    """Start torchrun on both nodes."""
    started = []
    for node, space in enumerate(SPACES):
        words = command(folder, output, node=node, steps=steps, ranks=2 * each, params=params)
        torchrun = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(each)]
        torchrun += ["--master-addr", ADDRESSES[0], "--master-port", PORT, "-m", "offload_trainer"]
        with open(folder / f"told-{node}", "ab") as told:
            started.append(
                subprocess.Popen(
                    [*torchrun, *words],
                    env=os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL", "OFFLOAD_TRAINER_SECRET": secrets[node]},
                    stdout=told,
                    stderr=told,
                    start_new_session=True,
                )
            )
    return started


def lines(output: Path) -> list[dict]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def wait_for(output: Path, step: int, started: list[subprocess.Popen[bytes]]) -> None:
    while len(lines(output)) < step:
        assert all(one.poll() is None for one in started), "ended too early"
        time.sleep(0.02)


def bytes_of_a_step(
    output: Path, started: list[subprocess.Popen[bytes]], *, first: int, last: int
) -> tuple[float, float]:
    """Return the bytes that leave node 0 and node 1 in a step, averaged between two lines of metrics.

    With few steps this is imprecise: the counters are read as soon as a line appears, when part of the next step's
    bytes
    may have been sent.
    """
    wait_for(output, first, started)
    began, steps = [sent(node) for node in (0, 1)], len(lines(output))
    wait_for(output, last, started)
    moved = [sent(node) - before for node, before in enumerate(began)]
    steps = len(lines(output)) - steps
    return moved[0] / steps, moved[1] / steps


def signal_all(launcher: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the launcher and its ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for pid in [launcher.pid, *map(int, children)]:
        os.kill(pid, number)


def lose(folder: Path, alone: Path, *, each: int, steps: int, params: str) -> None:
    """Cut the link during a run, and stop node 1 in another; both must resume with one rank's bits."""
    for name in ("cut", "stopped"):
        run, how = folder / name, {"each": each, "steps": steps, "params": params}
        started = start(folder, run, **how)
        wait_for(run, 7, started)
        began = time.monotonic()
        if name == "cut":
            ip("-n", SPACES[1], "link", "set", LINKS[1], "down")
            codes = finished(started)
            ip("-n", SPACES[1], "link", "set", LINKS[1], "up")
        else:
            signal_all(started[1], signal.SIGSTOP)
            codes = [started[0].wait(900)]
            signal_all(started[1], signal.SIGKILL)
            finished(started)
        words = [line for line in (folder / "told-0").read_text().splitlines() if "sent no heartbeat" in line]
        took = time.monotonic() - began
        print(f"{name}: all that go on have ended after {took:.1f} s, exit codes {codes}: {words[-1:]}", flush=True)
        assert finished(start(folder, run, **how)) == [0, 0]
        compare(f"{name} and resumed", run, alone, step=steps)


def refused(folder: Path, *, each: int, steps: int, params: str) -> None:
    """Nodes with different secrets must end before anything is written, and both must say so."""
    started = start(folder, folder / "refused", each=each, steps=steps, params=params, secrets=("a" * 16, "b" * 16))
    codes = finished(started)
    words = [(folder / f"told-{node}").read_text() for node in (0, 1)]
    assert all(codes), codes
    assert not (folder / "refused").exists()
    for told in words:
        line = next(line for line in told.splitlines() if line.startswith("offload-train: "))
        print(f"another secret: exit codes {codes}: {line}", flush=True)
        assert "give every node the same OFFLOAD_TRAINER_SECRET" in line


def listeners(node: int) -> list[str]:
    """Return the addresses at which processes listen in a node's namespace."""
    told = subprocess.run(
        ["ip", "netns", "exec", SPACES[node], "ss", "-Hltn"], check=True, capture_output=True, text=True
    )
    return sorted(line.split()[3] for line in told.stdout.splitlines())


def finished(started: list[subprocess.Popen[bytes]]) -> list[int]:
    return [one.wait(900) for one in started]


def told(run: Path) -> list[tuple[float, ...]]:
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr")) for line in lines(run)]


def compare(name: str, run: Path, alone: Path, *, step: int) -> None:
    """Raise AssertionError if losses, norms, or the checkpoint's files differ."""
    assert told(run) == told(alone), f"{name}: other losses"
    for file in ("master", "exp_avg", "exp_avg_sq"):
        path = Path(f"checkpoints/step-{step:08d}/{file}.safetensors")
        assert (run / path).read_bytes() == (alone / path).read_bytes(), f"{name}: {path} differs"
    print(f"{name}: {step} steps with the bits of one rank", flush=True)


def one_rank(folder: Path, output: Path, *, steps: int, params: str) -> None:
    words = command(folder, output, node=0, steps=steps, ranks=1, params=params)
    with open(folder / "told-alone", "ab") as told:
        subprocess.run([sys.executable, "-m", "offload_trainer", *words], check=True, stdout=told, stderr=told)


def cut(source: Path, target: Path, *, step: int) -> Path:
    """Copy a run in the state after the checkpoint of `step`."""
    later = {path.name for path in (source / "checkpoints").glob("step-*") if int(path.name[5:]) > step}
    return shutil.copytree(source, target, ignore=lambda _, names: later.intersection(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=1, choices=(1, 2))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mbit", type=int)
    parser.add_argument("--params", default="cpu")
    parser.add_argument("--lose", action="store_true")
    parser.add_argument("--refuse", action="store_true")
    wish = parser.parse_args()
    folder, how = wish.folder.absolute(), {"steps": wish.steps, "params": wish.params}
    folder.mkdir(parents=True)
    alone, several = folder / "alone", folder / "several"
    if not wish.refuse:
        one_rank(folder, alone, **how)
    with network(wish.mbit):
        if wish.refuse:
            refused(folder, each=wish.each, **how)
            return 0
        if wish.lose:
            lose(folder, alone, each=wish.each, **how)
            return 0
        started = start(folder, several, each=wish.each, **how)
        wait_for(several, 1, started)
        for node in (0, 1):
            print(f"node {node} listens at {', '.join(listeners(node))}", flush=True)
        moved = bytes_of_a_step(several, started, first=3, last=wish.steps - 4)
        signal_all(started[1], signal.SIGKILL)  # As in a power loss, except that the kernel closes the connections.
        print(f"killed node 1 after step {len(lines(several))}: exit codes {finished(started)}", flush=True)
        assert finished(start(folder, several, each=wish.each, **how)) == [0, 0]
        compare(f"2 nodes x {wish.each}, killed and resumed", several, alone, step=wish.steps)
        tell_bytes(several, moved)
        by_one = cut(several, folder / "by-one", step=5)
        one_rank(folder, by_one, **how)
        compare("a checkpoint of the nodes, by one rank", by_one, alone, step=wish.steps)
        back = cut(alone, folder / "back", step=5)
        assert finished(start(folder, back, each=wish.each, **how)) == [0, 0]
        compare("a checkpoint of one rank, by the nodes", back, alone, step=wish.steps)
    return 0


def tell_bytes(run: Path, moved: tuple[float, float]) -> None:
    """Print the bytes that each node sends in a step, and what the plan says that the first sends and receives."""
    links = [link for link in json.loads((run / "plan.json").read_text())["links"] if link["place"] == "network"]
    for node, way in enumerate(("written", "read")):
        told = {link["phase"]: link[way] for link in links}
        parts = " + ".join(f"{phase} {size / 1e6:.2f}" for phase, size in told.items())
        size = moved[node]
        print(
            f"from node {node} in a step: {size / 1e6:.2f} MB, planned {parts} MB: {size / sum(told.values()):.3f} x",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
