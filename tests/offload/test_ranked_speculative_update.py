"""Tests of the speculative update with several ranks: it has the bits of one rank, whatever the decision about a step
is.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import DROPOUT, digest, engine, model_directory
from forked_ranks import Case, Result, in_ranks
from placements import FIRST, hold_up, record_kept
from test_ranks import AWAY

from offload_trainer import ranks
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.pages.manifest import read_description, read_newest, read_store
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.optim import loss_scale

pytestmark = pytest.mark.slow

FULL = ("tiered.overlap=backward", "tiered.weight_buffers=2")
ON_DRIVES = {
    "weights on the device": ("--params", "gpu", "--optimizer", "nvme"),
    "a third in RAM": ("--params", "cpu", "--optimizer", "nvme", "--ram-fraction", "0.3"),
    "all on the drive": AWAY,
}
PIPELINE = "parallel.pipeline=3"
LATE = 3  # updates that rank 0 is late to record
PLANTED = (3, 5, 6)  # steps, counted from 0, whose last micro-batch has NaN in its last gradient


# -- on a rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speculated:
    """What a rank has seen of a case."""

    result: Result
    kept: list[tuple[int, int]]  # of each speculative step, the number of pages that were kept, and of all done
    # On rank 0, recorded steps and digests of the masters that the record names, computed twice: when the record has
    # been written, and before the next one is.
    read: list[tuple[int, str]]


def speculate(cases: Sequence[Case]) -> list[Speculated]:
    """Train the cases as one of the ranks; start every update before the step is decided.

    The backward pauses before the first block until this rank has updated its pages of all complete units, so the
    outcome does not depend on timing. The last rank is late to roll back a step that is skipped, and rank 0 is late to
    record its first steps. Until it has, what its last record names must be whole.
    """
    patch, (rank, world), undo = pytest.MonkeyPatch(), ranks.place_here(), Updater._undo
    patch.setattr(loss_scale, "INITIAL_SCALE", 2.0**20)  # the first steps in fp16 overflow
    patch.setattr(TieredEngine, "_as_expected", True)
    late = 0.2 if rank == world - 1 > 0 else 0.0
    patch.setattr(Updater, "_undo", lambda *given: (time.sleep(late), undo(*given)))
    kept, read, found = record_kept(patch), list[tuple[int, str]](), []

    @contextmanager
    def build(model: Path, *words: str, **more: Any) -> Iterator[Any]:
        with engine(model, *words, shadows=0.6, **more) as made:
            hold_up(made)
            plant_in_last(made, accumulate=int(words[words.index("--accumulate") + 1]))
            store = made.offloaded.store
            if rank == 0 and store.copies.count == 2 and all(page.home >= 0 for page in store.pages):
                record_late(made, model, read)
            yield made

    for case in cases:
        found.append(Speculated(case.run(build), [*kept], [*read]))
        kept.clear()
        read.clear()
    return found


def plant_in_last(ours: Any, *, accumulate: int) -> None:
    """Plant the NaN in the last micro-batch of all ranks."""
    calls = count()

    def last(gradient: torch.Tensor) -> torch.Tensor:
        step, number = divmod(next(calls), accumulate)
        ours_is_last = number * ours.world + ours.rank == accumulate * ours.world - 1
        return gradient.fill_(float("nan")) if step in PLANTED and ours_is_last else gradient

    ours.offloaded.parameters[FIRST][0].register_hook(last)


def record_late(ours: Any, model: Path, read: list[tuple[int, str]]) -> None:
    """Record updates as a run does, the first ones late; read what a record names, and again before the next one."""
    ours.offloaded.enable_manifest(model=model)
    manifest = ours.offloaded.manifest
    note, directory = manifest.note, ours.offloaded._drives.directories[0]

    def read_masters() -> None:
        if found := read_newest(read_description(directory)):
            stored = read_store(directory)
            read.append((found.step, digest(map(stored.read, sorted(stored.shapes)))))

    def noted(step: int, *, updating: bool) -> None:
        if not updating:
            time.sleep(0.5 if step <= LATE else 0.0)
            read_masters()
        note(step, updating=updating)
        if not updating:
            manifest.commit(step, {})
            read_masters()

    manifest.note = noted


# -- the tests ---------------------------------------------------------------------------------------------------------


def run(
    folder: Path, words: tuple[str, ...], *, count: int, nodes: int = 1, tied: bool = True, **size: int
) -> list[Speculated]:
    """Train one case, whose steps have `micro` micro-batches on all ranks; return what each rank has seen."""
    name = f"{len([*folder.iterdir()])}"
    model = model_directory(folder / f"model {tied}", "gpt2", tied=tied, **DROPOUT)
    case = Case(model, words, folder / name, **size, drives=(folder / "drive",))
    together = count if PIPELINE in words else 1  # ranks that compute the same micro-batches
    case = replace(case, words=(*words, "--accumulate", str(case.micro * together // count)))
    found = in_ranks(speculate, [case], count=count, nodes=nodes, folder=folder / f"{name} ranks")
    return [of_rank for (of_rank,) in found]


@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (4, 2)])
def test_steps_are_one_ranks(count: int, nodes: int, tmp_path: Path) -> None:
    """bf16 with dropout, norms on both sides of the limit, and three steps with NaN in one rank's last gradient.

    All ranks keep their speculative pages, or none does.
    """
    limit = 1.5
    train, words = partial(run, tmp_path, steps=8, micro=count), ("--dtype", "bf16", f"optim.max_grad_norm={limit}")
    (alone,) = train((*ON_DRIVES["a third in RAM"], *words, "tiered.overlap=off"), count=1)
    norms = [norm for _, norm in alone.result.steps]
    assert [step for step, norm in enumerate(norms) if norm is None] == list(PLANTED)
    clipped = [norm > limit for norm in norms if norm is not None]
    assert set(clipped) == {True, False}
    for home in ON_DRIVES.values():
        for rank in train((*home, *words, *FULL), count=count, nodes=nodes):
            assert rank.result == alone.result, home
            assert len(rank.kept) == len(clipped)
            for was, (counted, done) in zip(clipped, rank.kept, strict=True):
                assert counted == (0 if was else done)
                assert done


@pytest.mark.parametrize(("count", "more"), [(2, ()), (3, (PIPELINE,))])
def test_no_rank_overwrites_what_the_last_record_names(count: int, more: tuple[str, ...], tmp_path: Path) -> None:
    """Rank 0 is late to record a step, and another one could update pages of the next step meanwhile. In a pipeline
    the last rank computes the head, and the second one updates a part of it.

    What a record names stays as it was when the record was written, and is what one rank computes.
    """
    words, steps = (*AWAY, *FULL, "--ram-fraction", "0", "--dtype", "bf16", "optim.max_grad_norm=0"), LATE + 1
    train = partial(run, tmp_path, steps=steps, micro=2, tied=False)
    first, *_ = train((*words, *more), count=count)
    (alone,) = train(words, count=1)
    assert len(first.kept) == LATE
    assert [step for step, _ in alone.read] == sorted([*range(1, steps), *range(1, steps - 1)])
    assert first.read == alone.read


def test_overflow_and_accumulation(tmp_path: Path) -> None:
    """fp16 finds its scale, with two micro-batches a rank; 8-bit moments are rounded stochastically, by the step's
    number.
    """
    words = (*ON_DRIVES["a third in RAM"], "--dtype", "fp16", "optim.moment_dtype=8bit", "optim.max_grad_norm=0")
    (alone,) = run(tmp_path, (*words, "tiered.overlap=off"), count=1, steps=10, micro=4)
    assert {norm is None for _, norm in alone.result.steps} == {True, False}
    for rank in run(tmp_path, (*words, *FULL), count=2, steps=10, micro=4):
        assert rank.result == alone.result
        assert all(counted == done > 0 for counted, done in rank.kept)
