"""A rank as in `forked_ranks.py` that starts every update before the step is decided, with NaN in one micro-batch.

    python rank_with_speculation.py RANK COUNT FOLDER NODES

The rank writes OUT/ahead-RANK.json: for each such step the number of pages that were kept, and of all that were done.
Rank 0 writes OUT/ahead-read.json: pairs of a step and a digest of the masters that its record names. The digest is
computed twice: when the record has been written, and before the next one is.
A backward hook pauses before the first block until this rank has updated its pages of all announced units, so the
outcome does not depend on timing. The last rank is late to roll back a step that is skipped, and rank 0 is late to
record its first steps. Until it has, what its last record names must be whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked_ranks
import torch
from engine_bench import engine as plain_engine

from offload_trainer import ranks
from offload_trainer.offloading.pages.manifest import read_description, read_newest, read_store
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.offloading.update.updater import MispredictionWatch, SpeculativeStep, Updater
from offload_trainer.optim import loss_scale

LATE = 3  # updates that rank 0 is late to record
PLANTED = (3, 5, 6)  # steps, counted from 0, whose last micro-batch has NaN in its last gradient
kept: list[tuple[int, int]] = []
told: set[int] = set()
read: list[tuple[int, str]] = []  # recorded steps, and digests of the masters that the record names


def watch() -> None:
    """Start every step speculatively, and record how many of its pages were kept."""
    MispredictionWatch.rarely = True  # type: ignore[method-assign, assignment]
    its, tell, clear = SpeculativeStep.kept, ShardedGradients._report, ShardedGradients.clear

    def seen(ahead: SpeculativeStep, *given: Any) -> set[int]:
        numbers = its(ahead, *given)
        kept.append((len(numbers), len(ahead.written)))
        return numbers

    def telling(self: Any, unit: Any, *given: Any) -> None:
        told.add(unit.index)
        tell(self, unit, *given)

    def clearing(self: Any) -> None:
        told.clear()
        clear(self)

    SpeculativeStep.kept = seen  # type: ignore[method-assign]
    ShardedGradients._report, ShardedGradients.clear = telling, clearing  # type: ignore[method-assign]
    undo = Updater._undo

    def undoing(self: Any, ahead: SpeculativeStep) -> None:
        rank, world = ranks.place_here()
        time.sleep(0.2 if rank == world - 1 > 0 else 0.0)
        undo(self, ahead)

    Updater._undo = undoing  # type: ignore[method-assign]


def plant(ours: Any, *, accumulate: int) -> None:
    """Plant the NaN, and pause the backward until the pages of announced units are updated."""
    updater, store, node = ours.offloaded.updater, ours.offloaded.store, ours.offloaded.node
    seen = [0]

    def last(gradient: torch.Tensor) -> torch.Tensor:
        step, number = divmod(seen[0], accumulate)
        seen[0] += 1
        ahead, end = updater._speculative, time.monotonic() + 300
        if ahead is not None:
            early = (n for n in updater.numbers if store.pages[n].home >= 0 or n in updater.shadows)
            wanted = {number for number in early if store.pages[number].unit in told}
            while not (ahead.error or wanted <= ahead.written.keys()):
                assert time.monotonic() < end
                time.sleep(0.0005)
        its = number * node.world + node.rank == accumulate * node.world - 1
        return gradient.fill_(float("nan")) if step in PLANTED and its else gradient

    ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(last)


def record_late(ours: Any, model: Path) -> None:
    """Record updates as a run does, the first ones late; read what a record names, and again before the next one."""
    ours.offloaded.enable_manifest(model=model)
    manifest = ours.offloaded.manifest
    note, directory = manifest.note, ours.offloaded._drives.directories[0]

    def read_masters() -> None:
        if found := read_newest(read_description(directory)):
            digest = hashlib.sha256()
            for _, master in sorted(read_store(directory).weights()):
                digest.update(master.numpy().tobytes())
            read.append((found.step, digest.hexdigest()))

    def noted(step: int, *, updating: bool) -> None:
        if not updating:
            time.sleep(0.5 if step <= LATE else 0.0)
            read_masters()
        note(step, updating=updating)
        if not updating:
            manifest.commit(step, {})
            read_masters()

    manifest.note = noted


@contextmanager
def engine(model: Path, *words: str, **more: Any) -> Iterator[Any]:
    accumulate = int(words[words.index("--accumulate") + 1])
    with plain_engine(model, *words, shadows=0.6, **more) as made:
        plant(made, accumulate=accumulate)
        store, node = made.offloaded.store, made.offloaded.node
        if node.rank == 0 and store.copies.count == 2 and all(page.home >= 0 for page in store.pages):
            record_late(made, model)
        yield made


def write(case: forked_ranks.Case) -> None:
    """Write what was recorded in a case, and forget it."""
    rank, _ = ranks.place_here()
    (Path(case.out) / f"ahead-{rank}.json").write_text(json.dumps(kept))
    if rank == 0:
        (Path(case.out) / "ahead-read.json").write_text(json.dumps(read))
    kept.clear()
    read.clear()
    ranks.wait_for_all()


if __name__ == "__main__":
    loss_scale.INITIAL_SCALE = 2.0**20  # the first steps in fp16 overflow
    forked_ranks.engine = engine
    watch()
    forked_ranks.main(write)
