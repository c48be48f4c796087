# A run as a Ray job, on one or several nodes; it is started again where ranks or a node were lost.
# run:    ray job submit -- python configs/ray_job.py --ranks 8 -- --nvme /mnt/ssd --model gpt2-xl --output /shared/xl
# It needs pip install 'ray[default]' on each node. After `ray job stop`, which needs RAY_JOB_STOP_WAIT_TIME_S to leave
# time for a save (docs/faults.md), the same command resumes. Several nodes share --output.
import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FINAL = (0, 2, 130, 143)  # exit codes after which nothing is started again: done, refused, told to stop


class Node:
    """The ranks of one node."""

    def __init__(self) -> None:
        self.launcher: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return the address of this node and a free port there."""
        with socket.socket() as any_socket:
            any_socket.bind(("", 0))
            return ray.util.get_node_ip_address(), any_socket.getsockname()[1]

    def run(self, words: list[str], secret: str) -> int:
        """Run the launcher of this node's ranks to its end; return its exit code.

        If this process is killed, the kernel sends SIGTERM to the launcher.
        """
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", *words]
        self.launcher = subprocess.Popen(command, env=os.environ | {"OFFLOAD_TRAINER_SECRET": secret})
        return self.launcher.wait()

    def stop(self) -> None:
        """Send SIGTERM to the launcher, which passes it on to the ranks."""
        while self.launcher is None:
            time.sleep(0.1)
        self.launcher.terminate()


def launcher_words(arguments: argparse.Namespace, *, node: int, host: str, port: int) -> list[str]:
    """Return the module that starts the ranks of a node, and its words."""
    if arguments.nodes == 1:
        return ["offload_trainer", "train", *arguments.words, "--gpus", str(arguments.ranks)]
    words = ["torch.distributed.run", "--nnodes", str(arguments.nodes), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(arguments.ranks), "--master-addr", host, "--master-port", str(port)]
    return [*words, "-m", "offload_trainer", "train", *arguments.words]


def attempt(arguments: argparse.Namespace, *, secret: str, signals: list[int]) -> list[int]:
    """Run on all nodes to the end; return the exit code of each, 1 for a lost one.

    `signals` receives the signals that ask the job to stop.
    """
    need = {"CPU": arguments.cpus} | ({} if arguments.no_gpus else {"GPU": arguments.ranks})
    group = placement_group([need] * arguments.nodes, strategy="STRICT_SPREAD")
    try:
        while not group.wait(1):
            if signals:
                return [128 + signals[0]]
        nodes = [
            ray.remote(Node)
            .options(
                max_concurrency=2,  # `stop` is called while `run` waits
                num_cpus=arguments.cpus,
                num_gpus=need.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(arguments.nodes)
        ]
        host, port = ray.get(nodes[0].address.remote())
        words = [launcher_words(arguments, node=number, host=host, port=port) for number in range(arguments.nodes)]
        ends = [node.run.remote(its, secret) for node, its in zip(nodes, words, strict=True)]
        passed_on = False
        while ray.wait(ends, num_returns=len(ends), timeout=1)[1]:
            if signals and not passed_on:
                passed_on = True
                for node in nodes:
                    node.stop.remote()
        return [_code(end) for end in ends]
    finally:
        remove_placement_group(group)


def _code(end: ray.ObjectRef) -> int:
    try:
        code: int = ray.get(end)
    except ray.exceptions.RayError as error:
        print(f"a node was lost: {error}", flush=True)
        return 1
    return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each node")
    parser.add_argument("--cpus", type=int, default=1, help="cores to reserve on each node")
    parser.add_argument("--no-gpus", action="store_true", help="do not reserve a GPU for each rank")
    parser.add_argument("--max-failures", type=int, default=3, help="times that the run is started again")
    parser.add_argument("--pause", type=float, default=35.0, help="seconds before that, in which lost ranks end")
    parser.add_argument("words", nargs="+", help="words of offload-train, after --")
    arguments = parser.parse_args()
    ray.init()
    signals: list[int] = []
    signal.signal(
        signal.SIGTERM, lambda number, _: signals.append(number)
    )  # `ray job stop`; after ray.init, which sets it
    secret, code = secrets.token_hex(32), 1
    for left in reversed(range(arguments.max_failures + 1)):
        code = next(filter(None, attempt(arguments, secret=secret, signals=signals)), 0)
        if signals or code in FINAL or not left:
            break
        again = f"it is started again in {arguments.pause:g} s, {left} more times"
        print(f"the run ended with code {code}; {again}", flush=True)
        until = time.monotonic() + arguments.pause
        while not signals and time.monotonic() < until:
            time.sleep(0.1)
    return code


if __name__ == "__main__":
    sys.exit(main())
