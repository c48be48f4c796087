"""Tests of optimizer state on the device: any split among device, RAM and drives gives the same bits.

Without a GPU, host memory replaces the device's; `late_cuda_streams.py` simulates a GPU's streams that run late.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import pytest
from engine_bench import DROPOUT, Step, batches, drives, engine, model_directory, saved, train
from late_engines import engine_on_streams

from offload_trainer.offloading.device import CudaDevice
from offload_trainer.plan.tiered.layout import ALIGN, DEVICE, RAM
from offload_trainer.storage.transfer import done

pytestmark = pytest.mark.usefixtures("nothing_is_small")

SHARES = {
    "device": ["--gpu-fraction", "1"],
    "all three": ["--gpu-fraction", "0.3", "--ram-fraction", "0.3"],
    "RAM": ["--ram-fraction", "1"],
    "drive": ["--gpu-fraction", "0", "--ram-fraction", "0"],
}
RUNS = {  # dtype, tied, micro-batches
    "bf16-tied-1": ("bf16", True, 1),
    "fp16-untied-3": ("fp16", False, 3),
    "bf16-untied-3": ("bf16", False, 3),
    "fp16-tied-1": ("fp16", True, 1),
}


def model_in(folder: Path, *, tied: bool) -> Path:
    return model_directory(folder / f"gpt2-{tied}", "gpt2", tied=tied, **DROPOUT)


@cache
def in_ram(folder: Path, dtype: str, tied: bool, accumulate: int, *words: str) -> tuple[list[Step], dict[str, bytes]]:
    """Return four steps and the saved state with all of the optimizer state in RAM."""
    wished = ["--dtype", dtype, "--accumulate", str(accumulate), *words]
    with engine(model_in(folder, tied=tied), *wished) as ours:
        steps = train(ours, batches(4 * accumulate), accumulate=accumulate)
        return steps, saved(ours, folder / f"in RAM {len(list(folder.iterdir()))}")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("share", SHARES)
def test_shares_do_not_change_a_bit(share: str, run: str, folder: Path, tmp_path: Path) -> None:
    """Losses, norms, masters and moments match with dropout, also after resuming halfway with other shares.

    The runs together resume each share as every other.
    """
    dtype, tied, accumulate = RUNS[run]
    expected, state = in_ram(folder, dtype, tied, accumulate)
    wished, data = ["--dtype", dtype, "--accumulate", str(accumulate)], batches(4 * accumulate)
    half = 2 * accumulate
    with engine(model_in(folder, tied=tied), *wished, *SHARES[share], drives=drives(folder, 1)) as ours:
        first = train(ours, data[:half], accumulate=accumulate)
        saved(ours, tmp_path / "half")
        assert first + train(ours, data[half:], accumulate=accumulate) == expected
        assert saved(ours, tmp_path / "whole") == state
    before, turn = list(SHARES).index(share), list(RUNS).index(run)
    for place, (name, words) in enumerate(SHARES.items()):
        if name == share or (before + place - turn) % 4:
            continue
        model = model_in(folder, tied=tied)
        with engine(model, *wished, *words, drives=drives(folder, 1), load_weights=False) as other:
            other.load(tmp_path / "half")
            assert train(other, data[half:], accumulate=accumulate) == expected[2:]
            assert saved(other, tmp_path / name) == state


ELSEWHERE = {
    "weights in RAM": ["--params", "cpu"],
    "weights and gradients on the drive": ["--params", "nvme", "placement.gradients=nvme"],
    "weights on the drive, gradients on the device": ["--params", "nvme", "placement.gradients=gpu"],
    "gradients on the drive": ["placement.gradients=nvme"],
}


@pytest.mark.parametrize(
    ("share", "elsewhere", "accumulate"),
    [("device", [], 3), *(("all three", words, 1 + 2 * (n % 2)) for n, words in enumerate([[], *ELSEWHERE.values()]))],
)
def test_streams_that_run_late_change_nothing(
    share: str, elsewhere: list[str], accumulate: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, state = in_ram(folder, "bf16", True, accumulate)
    words = [*SHARES[share], *elsewhere, "--accumulate", str(accumulate), "tiered.weight_buffers=2"]
    with engine_on_streams(monkeypatch, model_in(folder, tied=True), *words, drives=drives(folder, 1)) as ours:
        data = batches(4 * accumulate)
        steps = train(ours, data[: 2 * accumulate], accumulate=accumulate)
        snapshot = ours.snapshot()
        (tmp_path / "half").mkdir()
        writing = threading.Thread(target=snapshot.write, args=[tmp_path / "half"])
        writing.start()
        assert steps + train(ours, data[2 * accumulate :], accumulate=accumulate) == expected
        writing.join()
        assert saved(ours, tmp_path / "whole") == state
    with engine(model_in(folder, tied=True), "--accumulate", str(accumulate), load_weights=False) as other:
        other.load(tmp_path / "half")
        assert train(other, data[2 * accumulate :], accumulate=accumulate) == expected[2:]


def test_a_missing_wait_would_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail if the update did not wait for the device."""
    monkeypatch.setattr(CudaDevice, "reached", lambda self: done())
    with engine_on_streams(monkeypatch, model_in(folder, tied=True), *SHARES["device"]) as ours:
        assert train(ours, batches(4)) != in_ram(folder, "bf16", True, 1)[0]


def test_pages_are_placed_by_the_shares(folder: Path) -> None:
    """The device holds whole units with their gradients (a remainder aside), and each share is exact up
    to alignment.
    """
    model = model_in(folder, tied=True)
    for share, wanted in (
        ("device", {DEVICE: 1.0}),
        ("all three", {DEVICE: 0.3, RAM: 0.3, 0: 0.4}),
        ("RAM", {RAM: 1.0}),
    ):
        with engine(model, *SHARES[share], drives=drives(folder, 1)) as ours:
            pages = ours.offloaded.store.pages
            total = sum(page.elements for page in pages)
            for home, part in wanted.items():
                held = sum(page.elements for page in pages if page.home == home)
                assert held == pytest.approx(part * total, abs=2 * ALIGN)
            assert {page.home for page in pages} == set(wanted)
            units = {page.unit for page in pages}
            whole = {u for u in units if all(page.home == DEVICE for page in pages if page.unit == u)}
            assert bool(whole) == (DEVICE in wanted)
            assert {u for u in units if ours.offloaded.gradients.on_device(u) is not None} == whole
            assert len({page.unit for page in pages if page.home == DEVICE} - whole) <= 1
