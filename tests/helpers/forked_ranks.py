"""Run several ranks on this machine, each in a fork, and read what they trained and saved.

run_ranks(cases, count=3, folder=...)   run each case in turn; rank 0 writes steps and state to the case's folder
call_ranks(words, output=..., count=3)  run the command with `count` ranks; return each rank's exit code and output
python forked_ranks.py RANK COUNT FOLDER NODES      run one of the ranks, which reads FOLDER/cases.json
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from commands import Run, run_all, start
from engine_bench import Step, batches, engine, masters, train
from fork_server import COMMAND
from safetensors.torch import save_file
from uneven_targets import masked

import offload_trainer.plan.tiered.layout as layout
from offload_trainer import ranks
from offload_trainer.errors import STORE
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.ranks import all_gather_json, place_here, wait_for_all
from offload_trainer.storage.transfer import Transfers

FILES = ("master", "exp_avg", "exp_avg_sq")


put = TieredSnapshot._put


def slow(*given: Any) -> None:
    """Write a page more slowly than a step of the small models here takes."""
    put(*given)
    time.sleep(0.01)


@dataclass(frozen=True)
class Case:
    """A run of `steps` steps with `micro` micro-batches each over all ranks, on the engine that `words` describe."""

    model: str
    words: tuple[str, ...]
    out: str
    steps: int = 20
    micro: int = 2
    drives: tuple[str, ...] = ()
    load: str = ""
    skip: int = 0  # steps that an earlier run has trained
    evaluate: bool = False  # Before the last step each rank evaluates a batch; the losses are appended to the steps.
    unequal: bool = False  # Micro-batches count different numbers of targets, and some pieces of rows count none.
    meanwhile: int = 0  # steps trained while the state after `steps` is written, slowly

    def run(self) -> None:
        """Train, and write the steps and the state to `out`."""
        data = batches(self.micro * (self.skip + self.steps + self.meanwhile))
        data = (masked(data) if self.unequal else data)[self.micro * self.skip :]
        data, more = data[: self.micro * self.steps], data[self.micro * self.steps :]
        with engine(
            Path(self.model), "--engine", "tiered", *self.words, drives=[Path(drive) for drive in self.drives]
        ) as made:
            rank, world = made.rank, made.world  # data-parallel rank and size
            if self.load:
                made.load(Path(self.load))
            start = tuple(_moved)
            losses: list[float] = []

            def before(step: int) -> None:
                if self.evaluate and step == self.steps:
                    losses.extend(made.eval_loss(batch) for batch in data[rank : self.micro : world])

            done = train(made, data[rank::world], accumulate=self.micro // world, before=before)
            done += [(loss, None) for each in zip(*all_gather_json(losses), strict=True) for loss in each]
            moved = all_gather_json([after - first for first, after in zip(start, _quiet(made), strict=True)])
            Path(self.out).mkdir(parents=True, exist_ok=True)
            snapshot, group = made.snapshot(), ranks.new_group() if self.meanwhile else ranks.everybody()
            with ThreadPoolExecutor(1) as thread, patch.object(TieredSnapshot, "_put", slow if more else put):
                writing = thread.submit(snapshot.write, Path(self.out), group)
                if more:
                    train(made, more[rank::world], accumulate=self.micro // world)
                writing.result()
            snapshot.close()
            save_file(masters(made), Path(self.out) / f"masters-{place_here()[0]}.safetensors")
            if place_here()[0] == 0:
                (Path(self.out) / "steps.json").write_text(json.dumps(done))
                (Path(self.out) / "moved.json").write_text(json.dumps([sum(way) for way in zip(*moved, strict=True)]))
            wait_for_all()

    @property
    def seen(self) -> tuple[list[Step], bytes]:
        """Return the losses and norms, and the masters file as rank 0 has it."""
        out = Path(self.out)
        steps = [tuple(step) for step in json.loads((out / "steps.json").read_text())]
        return steps, (out / "masters-0.safetensors").read_bytes()  # type: ignore[return-value]

    @property
    def files(self) -> dict[str, bytes]:
        """Return all files of the saved state."""
        beside = ("steps.json", "moved.json", *(path.name for path in Path(self.out).glob("masters-*")))
        return {path.name: path.read_bytes() for path in Path(self.out).iterdir() if path.name not in beside}

    @property
    def left(self) -> tuple[list[Step], list[bytes]]:
        """Return the losses and norms, and the files of masters and moments."""
        out = Path(self.out)
        steps = [tuple(step) for step in json.loads((out / "steps.json").read_text())]
        return steps, [(out / f"{name}.safetensors").read_bytes() for name in FILES]  # type: ignore[return-value]

    @property
    def moved(self) -> list[int]:
        """Return the bytes that all ranks read and wrote on drives in all steps."""
        found: list[int] = json.loads((Path(self.out) / "moved.json").read_text())
        return found


_moved = [0, 0]  # bytes that this rank has read from and written to drives


def _count_what_is_moved() -> None:
    for way, name in enumerate(("read", "write")):
        move = getattr(Transfers, name)

        def counting(self: Any, file: Any, offset: int, buffer: torch.Tensor, way: int = way, move: Any = move) -> Any:
            _moved[way] += buffer.nbytes
            return move(self, file, offset, buffer)

        setattr(Transfers, name, counting)


def _quiet(engine: Any) -> tuple[int, ...]:
    """Return the bytes moved once no transfer is in flight."""
    engine.synchronize()
    engine.offloaded.node.align()
    engine.offloaded.stream.forget()
    return tuple(_moved)


def run_ranks(
    cases: Sequence[Case],
    *,
    count: int,
    folder: Path,
    nodes: int = 1,
    script: str = __file__,
) -> None:
    """Run all `cases` on `count` ranks, spread over `nodes` simulated nodes; each rank runs `script`."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_all(*([script, rank, count, folder, nodes] for rank in range(count)), folder=folder)


def held_port() -> tuple[socket.socket, str]:
    """Return a free port for rank 0, and a bound socket that reserves it until it is closed."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound, str(bound.getsockname()[1])


def call_ranks(
    *words: object, output: Path, count: int = 3, script: Sequence[object] = (COMMAND,), last: Sequence[object] = ()
) -> list[Run]:
    """Run `offload-train WORDS --output OUTPUT` on `count` ranks without a launcher; `last` is appended to the last
    rank's words.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder) / f"told-{rank}" for rank in range(count)]
        forks = []
        for rank, path in enumerate(told):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            place |= {STORE: f"{folder}/store"}
            given = [*script, *words, "--output", output, *(last if rank == count - 1 else ())]
            forks.append(start(*given, stdout=path, stderr=path, **{key: str(value) for key, value in place.items()}))
        codes = [fork.wait(300) for fork in forks]
        return [Run(code, path.read_text(errors="replace"), output) for code, path in zip(codes, told, strict=True)]


def join(rank: int, count: int, folder: Path, *, nodes: int = 1) -> None:
    """Join the ranks whose rendezvous is `folder`, as if they were spread over `nodes` nodes."""
    place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "LOCAL_RANK": rank % (count // nodes)}
    os.environ |= {name: str(value) for name, value in place.items()} | {STORE: f"{folder}/store"}
    ranks.join()


def assert_no_open_port() -> None:
    """Assert that this process listens at no TCP port that another machine could reach."""
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert all(address.ip in ("127.0.0.1", "::1") for address in found), found


def main(after: Callable[[Case], None] = lambda case: None) -> None:
    """Be one of the ranks: run each case, then call `after` with it."""
    layout.SMALL = 0  # Offload embeddings and norms of small models too, as those of large models are.
    torch.set_num_threads(1)
    _count_what_is_moved()
    rank, count, folder, nodes = sys.argv[1:]
    join(int(rank), int(count), Path(folder), nodes=int(nodes))
    for told in json.loads((Path(folder) / "cases.json").read_text()):
        case = Case(**told)
        case.run()
        after(case)
    if nodes == "1":
        assert_no_open_port()
    ranks.wait_for_all()


if __name__ == "__main__":
    main()
