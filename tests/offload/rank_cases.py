"""Train the same cases on one rank or several, and note the steps, the saved state and the bytes that each moved."""

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_bench import Step, batches, engine, masters, train
from forked_ranks import count_calls, counts, in_ranks
from placements import digest
from seen_calls import run_before
from uneven_targets import masked

from offload_trainer import ranks
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.storage.transfer import Transfers


@dataclass(frozen=True)
class Result:
    """One rank's results of a case. Results with the same bits are equal, whatever was counted."""

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


def assert_no_open_port() -> None:
    """Assert that this process listens at no TCP port that another machine could reach."""
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert all(address.ip in ("127.0.0.1", "::1") for address in found), found


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
