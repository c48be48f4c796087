"""Compare two nodes with one rank: the bits must be the same, also after a node or the network between them fails.

    python soak/two_nodes.py FOLDER [--each 1|2] [--params gpu|cpu|nvme]

The nodes are two network namespaces of this machine, which see each other only through a link (veth); torchrun starts
`--each` ranks in each of them. Each has its own drive directory. A small GPT-2 with dropout trains in bf16 with half of
the state on the drive. In three runs the ranks of node 1 are killed, its link is cut, and its ranks are stopped
(SIGSTOP). What is left must end, and the same command must resume with the losses, norms and last checkpoint of one
rank. tests/run/test_nodes.py resumes on other numbers of nodes.

Needs root and `ip`; FOLDER must not exist. Each line printed is a comparison that held. A failure is a Difference,
which names what has other bits, or an AssertionError with exit codes; FOLDER/told-0 and told-1 have the nodes' output.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import psutil
from runs import compare, count_lines

ADDRESSES, PORT = ("10.77.0.1", "10.77.0.2"), "29631"
SPACES, LINKS = ("offload-0", "offload-1"), ("otveth0", "otveth1")
SHAPE = ["n_layer=3", "n_embd=96", "n_head=4", "vocab_size=2048", "resid_pdrop=0.1", "embd_pdrop=0.1", "attn_pdrop=0.1"]
STEPS, MICRO = 20, 4  # micro-batches of a step, over all ranks


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network() -> Iterator[None]:
    """Create two namespaces and a link between them."""
    for name in SPACES:
        ip("netns", "add", name)
    try:
        ip("link", "add", LINKS[0], "netns", SPACES[0], "type", "veth", "peer", "name", LINKS[1], "netns", SPACES[1])
        for space, link, address in zip(SPACES, LINKS, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for name in SPACES:
            ip("netns", "del", name)


@dataclass(frozen=True)
class Trial:
    folder: Path
    each: int  # ranks of a node
    params: str

    def command(self, output: Path, *, node: int, ranks: int) -> list[str]:
        drive = self.folder / f"drive-{node}"
        drive.mkdir(exist_ok=True)
        shape = [f"model.overrides.{setting}" for setting in SHAPE]
        return [
            *("train", "--model", "gpt2", "--scratch", *shape, "--dtype", "bf16", "--seq-len", "64"),
            *("--micro-batch", "2", "--accumulate", f"{MICRO // ranks}", "--steps", f"{STEPS}"),
            *("--save-every", "5", "save.keep=9", "--engine", "tiered", "--params", self.params),
            *("--optimizer", "nvme", "--ram-fraction", "0.5", "--nvme", f"{drive}", "--output", f"{output}"),
            *("placement.threads=1", f"data.cache={self.folder}/cache"),
        ]

    def start(self, output: Path) -> list[Popen[bytes]]:
        """Start torchrun on both nodes."""
        started = []
        for node, space in enumerate(SPACES):
            torchrun = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", "2", "--node-rank", f"{node}", "--nproc-per-node", f"{self.each}"]
            torchrun += ["--master-addr", ADDRESSES[0], "--master-port", PORT, "-m", "offload_trainer"]
            words = self.command(output, node=node, ranks=2 * self.each)
            quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
            with open(self.folder / f"told-{node}", "ab") as told:
                started.append(Popen([*torchrun, *words], env=os.environ | quiet, stdout=told, stderr=told))
        return started

    def fail(self, how: str, run: Path) -> str:
        """Start a run, let node 1 fail after a checkpoint, and resume; return how it ended."""
        started = self.start(run)
        while count_lines(run / "metrics.jsonl") < 7:
            assert all(launcher.poll() is None for launcher in started), "ended too early"
            time.sleep(0.02)
        begun = time.monotonic()
        if how == "cut":
            ip("-n", SPACES[1], "link", "set", LINKS[1], "down")
        else:
            signal_all(started[1], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        codes = [started[0].wait(900)]
        took = time.monotonic() - begun
        if how == "stopped":
            signal_all(started[1], signal.SIGKILL)
        codes.append(started[1].wait(900))
        assert all(codes), codes
        if how == "cut":
            ip("-n", SPACES[1], "link", "set", LINKS[1], "up")
        resumed = [launcher.wait(900) for launcher in self.start(run)]
        assert resumed == [0, 0], resumed
        return f"node 0 has ended after {took:.0f} s, exit codes {codes}"


def signal_all(launcher: Popen[bytes], number: int) -> None:
    """Send a signal to the launcher and its ranks."""
    parent = psutil.Process(launcher.pid)
    for process in (parent, *parent.children(recursive=True)):
        process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=1, choices=(1, 2))
    parser.add_argument("--params", default="cpu")
    wish = parser.parse_args()
    folder = wish.folder.absolute()
    folder.mkdir(parents=True)
    trial, alone = Trial(folder, wish.each, wish.params), folder / "alone"
    command = [sys.executable, "-m", "offload_trainer", *trial.command(alone, node=0, ranks=1)]
    with open(folder / "told-alone", "wb") as told:
        subprocess.run(command, check=True, stdout=told, stderr=told)
    with network():
        for how in ("killed", "cut", "stopped"):
            ended = trial.fail(how, folder / how)
            compare(folder / how, alone)
            print(f"node 1 {how}: {ended}; resumed with the bits of one rank", flush=True)


if __name__ == "__main__":
    main()
