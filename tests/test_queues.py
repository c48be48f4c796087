"""The real CUDA device over queues that run late: the numbers are plain torch's, and a missing wait would show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_of_engines import assert_same, batches, engine, masters, model_directory, train
from queues import FakeEvent, FakeStream, queued

import offload_trainer.plan.layout as layout

ALL = ["--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "tiered.unit_buffers=2"]
HOMES = {
    "resident": ["--params", "gpu"],
    "in RAM": ["--params", "cpu", "tiered.unit_buffers=2"],
    "three buffers": ["--params", "cpu", "tiered.unit_buffers=3"],
    "on the drive": ["--params", "nvme", "tiered.unit_buffers=2"],
    "all on the drive": ALL,
    "checkpointed": [*ALL, "model.checkpointing=on"],
    "reentrant": [*ALL, "model.checkpointing=on", "model.checkpointing_variant=reentrant"],
}
LARGEST = 1 << 20  # bytes; no unit of these models is larger


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SMALL", 0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("home", HOMES)
def test_queues_that_run_late_change_nothing(
    home: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16, four steps; downloads, uploads and fetches run at random, or when waited for."""
    model, drive = model_directory(tmp_path / "gpt2", "gpt2"), tmp_path / "drive"
    drive.mkdir()
    words, data = [*HOMES[home], "--accumulate", str(accumulate)], batches(4 * accumulate)
    with engine(model, "--engine", "plain", "--accumulate", str(accumulate)) as reference:
        expected, weights = train(reference, data, accumulate=accumulate), masters(reference)
    for haste in (0.0, 0.5):
        with queued(monkeypatch, seed=accumulate, haste=haste) as cuda:
            device = cuda.device(staging_bytes=LARGEST, stagings=2)
            with engine(model, *words, drives=[drive], device=device) as ours:
                assert train(ours, data, accumulate=accumulate) == expected
                assert_same(masters(ours), weights)


@pytest.mark.parametrize("forgotten", [(FakeStream, "wait_event"), (FakeStream, "synchronize")])
def test_a_missing_wait_would_show(
    forgotten: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is able to fail: where nothing waits for an event, or for a stream, the numbers are wrong."""
    model = model_directory(tmp_path / "gpt2", "gpt2")
    with engine(model, "--engine", "plain") as reference:
        expected = train(reference, batches(3))
    monkeypatch.setattr(*forgotten, lambda *_: None)
    with queued(monkeypatch, haste=0.0) as cuda, engine(model, *HOMES["in RAM"], device=cuda.device()) as ours:
        assert train(ours, batches(3)) != expected


def test_queues_run_in_order_and_no_sooner_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    with queued(monkeypatch, haste=0.0):
        one, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        source, middle, end = torch.ones(3), torch.zeros(3), torch.zeros(3)
        with torch.cuda.stream(one):
            middle.copy_(source, non_blocking=True)
            event.record()
            middle.copy_(2 * source, non_blocking=True)
        with torch.cuda.stream(other):
            other.wait_event(event)
            end.copy_(middle, non_blocking=True)
        assert not middle.any()
        assert isinstance(event, FakeEvent)
        assert not event.query()
        other.synchronize()
        assert (middle.tolist(), end.tolist()) == ([1.0] * 3, [1.0] * 3)
        one.synchronize()
        assert middle.tolist() == [2.0] * 3
