"""Tests of pages with two copies on a drive: a step is committed as a whole or not at all."""

import os
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from dead_run_files import stored_masters
from engine_bench import assert_same, batches, engine, masters, plain, train
from placements import Build

from offload_trainer.offloading.update.updater import Updater

pytestmark = pytest.mark.usefixtures("nothing_is_small")

TWO = ["--optimizer", "nvme", "tiered.state_copies=2"]


def lease(drive: Path) -> Path:
    return next((drive / "offload-trainer").glob("run-*"))


# -- commit or discard -------------------------------------------------------------------------------------------------


def test_files_hold_one_whole_step_at_every_moment(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any page of any update would find the previous step, also with two drives."""
    drives = [build.drive / "a", build.drive / "b"]
    seen: list[int] = []
    update = Updater._update_page

    with engine(build.model, *TWO, drives=drives) as ours:
        ours.offloaded.enable_manifest(model=tmp_path)
        assert stored_masters(lease(drives[0])) is None
        before: dict[str, torch.Tensor] = {}

        def looked(*given: Any, **words: Any) -> None:
            update(*given, **words)
            if before:
                step, found = stored_masters(lease(drives[len(seen) % 2]))
                assert_same(found, before)
                seen.append(step)

        monkeypatch.setattr(Updater, "_update_page", looked)
        for data in batches(4):
            train(ours, [data])
            ours.commit({})
            ours.synchronize()
            before = masters(ours)
        pages = len(ours.offloaded.store.pages)
    assert seen == [step for step in (1, 2, 3) for _ in range(pages)]


@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_the_order_that_a_power_cut_needs(
    overlap: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are synced before the record that names them, and the record before old pages are overwritten."""
    calls: list[str] = []

    def seen(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def calling(descriptor: int, *given: Any) -> Any:
            file = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
            if file in ("state", "record") and name != "fdatasync":
                calls.append(f"write {file}")
            done = call(descriptor, *given)
            if file in ("state", "record") and name == "fdatasync":
                calls.append(f"sync {file}")
            return done

        return calling

    with build(TWO, f"tiered.overlap={overlap}") as ours:
        ours.offloaded.enable_manifest(model=tmp_path)
        for name in ("pwrite", "pwritev", "fdatasync"):
            monkeypatch.setattr(os, name, seen(name))
        for number, data in enumerate(batches(3), 1):
            train(ours, [data])
            ours.commit({"step": number})
        ours.synchronize()
    assert [call for call, _ in groupby(calls)] == 3 * ["write state", "sync state", "write record", "sync record"]


# -- saving ----------------------------------------------------------------------------------------------------------


def test_the_next_update_waits_for_no_save(build: Build, tmp_path: Path) -> None:
    """Only the second update from now would overwrite what the save reads, since pages have two copies."""
    with build(TWO, "tiered.overlap=forward") as ours:
        snapshot = ours.snapshot()
        late = threading.Timer(60, snapshot.close)
        late.start()
        train(ours, batches(1))
        ours.synchronize()
        assert late.is_alive()
        late.cancel()
        assert_same(masters(ours), plain(build.model, 1)[1])
        train(ours, batches(2)[1:])
        assert ours.offloaded.update_progress.is_running
        (tmp_path / "saved").mkdir()
        snapshot.write(tmp_path / "saved")
        assert_same(masters(ours), plain(build.model, 2)[1])
