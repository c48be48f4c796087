"""Run functions, trainings or commands on several ranks of this machine, each in a fork that runs this script."""

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import COMMAND, Fork, Run, start
from engine_bench import Step, batches, digest, engine, masters, train
from seen_calls import run_before
from uneven_targets import masked

import offload_trainer.plan.tiered.layout as layout
from offload_trainer import ranks
from offload_trainer.common.errors import STORE
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.storage.transfer import Transfers

Process = Fork | subprocess.Popen[bytes]


def _start(scripts: Sequence[Sequence[object]], folder: Path, *, nodes: int = 1, **how: bool) -> list[Process]:
    """Start scripts as ranks of `nodes` simulated nodes, which meet in `folder`; rank N prints to its file `told-N`."""
    count, processes = str(len(scripts)), []
    for rank, argv in enumerate(scripts):
        local = rank % (len(scripts) // nodes)
        place = {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "LOCAL_RANK": str(local)}
        out = folder / f"told-{rank}"
        processes.append(start(*argv, stdout=out, stderr=out, **how, **place, **{STORE: f"{folder}/store"}))
    return processes


def start_ranks(work: Callable[..., Any], *given: Any, count: int, folder: Path, **how: Any) -> list[Process]:
    """Start ranks that call `work(*given)`. `how`: see `_start`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "work", "wb") as file:
        pickle.dump(sys.path, file)
        pickle.dump((work, given), file)
    return _start([[__file__, folder]] * count, folder, **how)


def in_ranks(work: Callable[..., Any], *given: Any, count: int, folder: Path, **how: Any) -> list[Any]:
    """Call `work(*given)` on each rank, all successful; return what each returned. `how`: see `_start`."""
    codes = [process.wait(400) for process in start_ranks(work, *given, count=count, folder=folder, **how)]
    assert not any(codes), "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("told-*"))
    return [pickle.loads((folder / f"returned-{rank}").read_bytes()) for rank in range(count)]


def assert_no_open_port() -> None:
    """Assert that this process listens at no TCP port that another machine could reach."""
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert all(address.ip in ("127.0.0.1", "::1") for address in found), found


def call_ranks(
    *words: object, output: Path, count: int = 3, script: Sequence[object] = (COMMAND,), last: Sequence[object] = ()
) -> list[Run]:
    """Run `offload-train WORDS --output OUTPUT` on `count` ranks without a launcher; `last` follows the last one's."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = [[*script, *words, "--output", output, *(last if n + 1 == count else ())] for n in range(count)]
        codes = [process.wait(300) for process in _start(scripts, Path(folder))]
        told = [Path(folder, f"told-{rank}").read_text(errors="replace") for rank in range(count)]
        return [Run(code, text, output) for code, text in zip(codes, told, strict=True)]


counts: Counter[str] = Counter()  # what `count_calls` has counted since the last case began
_counting = threading.Lock()


def count_calls(owner: Any, name: str, counted: Callable[..., Mapping[str, int]]) -> None:
    """Add to `counts`, from now on, what `counted` returns for the arguments of each call of `owner.name`."""

    def count(*args: Any, **words: Any) -> None:
        with _counting:
            counts.update(counted(*args, **words))

    run_before(setattr, owner, name, count)


@dataclass(frozen=True)
class Result:
    """What a rank has seen of a case. Results with the same bits are equal, whatever was counted."""

    steps: list[Step]
    masters: str  # digest
    files: dict[str, str]  # digests of the saved state, by name
    counts: dict[str, int] = field(compare=False)  # bytes that this rank moved in the steps: `read`, `written`, ...


@dataclass(frozen=True)
class Case:
    """A run of `steps` steps with `micro` micro-batches each over all ranks, on the engine that `words` describe."""

    model: Path
    words: tuple[str, ...]
    out: Path
    steps: int = 20
    micro: int = 2
    drives: tuple[Path, ...] = ()
    load: Path | None = None
    skip: int = 0  # steps that an earlier run has trained
    evaluate: bool = False  # Before the last step each rank evaluates a batch; the losses are appended to the steps.
    unequal: bool = False  # Micro-batches count different numbers of targets, and some pieces of rows count none.
    meanwhile: int = 0  # steps trained while the state after `steps` is written, slowly

    def run(self, build: Callable[..., Any] = engine) -> Result:
        """Train on the engine that `build` makes, and save its state to `out`."""
        data = batches(self.micro * (self.skip + self.steps + self.meanwhile))
        data = (masked(data) if self.unequal else data)[self.micro * self.skip :]
        data, more = data[: self.micro * self.steps], data[self.micro * self.steps :]
        with build(self.model, "--engine", "tiered", *self.words, drives=self.drives) as made:
            rank, world = made.rank, made.world  # data-parallel rank and size
            if self.load:
                made.load(self.load)
            losses: list[float] = []

            def before(step: int) -> None:
                if self.evaluate and step == self.steps:
                    losses.extend(made.eval_loss(batch) for batch in data[rank : self.micro : world])

            counts.clear()
            done = train(made, data[rank::world], accumulate=self.micro // world, before=before)
            made.synchronize()
            made.offloaded.node.barrier()
            made.offloaded.stream.forget()  # prefetches for the next step have arrived
            counted = dict(counts)
            of_ranks = zip(*ranks.all_gather_json(losses), strict=True)  # some tell the same
            done += [(loss, None) for each in of_ranks for loss in dict.fromkeys(each)]
            self.out.mkdir(parents=True, exist_ok=True)
            snapshot, group = made.snapshot(), ranks.group_of(in_step=False) if self.meanwhile else ranks.everybody()
            with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
                if more:  # a page takes longer than a step of the small models here
                    run_before(patch.setattr, TieredSnapshot, "_put", lambda *_: time.sleep(0.01))
                writing = thread.submit(snapshot.write, self.out, group)
                if more:
                    train(made, more[rank::world], accumulate=self.micro // world)
                writing.result()
            snapshot.close()
            held = digest(masters(made).values())
            ranks.wait_for_all()
            saved = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in self.out.iterdir()}
            return Result(done, held, saved, counted)


def train_cases(cases: Sequence[Case], build: Callable[..., Any] = engine) -> list[Result]:
    """Train each case as one of the ranks, on the engine that `build` makes."""
    count_calls(Transfers, "read", lambda _, file, offset, buffer: {"read": buffer.nbytes})
    count_calls(Transfers, "write", lambda _, file, offset, buffer: {"written": buffer.nbytes})
    found = [case.run(build) for case in cases]
    assert_no_open_port()
    return found


def run_ranks(cases: Sequence[Case], *, work: Callable[..., Any] = train_cases, **how: Any) -> list[list[Result]]:
    """Run all `cases` on the ranks of `in_ranks`; return each case's results by rank."""
    return [[*of_case] for of_case in zip(*in_ranks(work, cases, **how), strict=True)]


if __name__ == "__main__":  # one of the ranks of `start_ranks`
    folder = Path(sys.argv[1])
    with open(folder / "work", "rb") as file:
        sys.path[:] = pickle.load(file)
        work, given = pickle.load(file)
    layout.SMALL = 0  # Offload embeddings and norms of small models too, as those of large models are.
    torch.set_num_threads(1)
    ranks.join()
    returned = work(*given)
    (folder / f"returned-{os.environ['RANK']}").write_bytes(pickle.dumps(returned))
    ranks.wait_for_all()
