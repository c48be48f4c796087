"""Tests of the real CUDA device on simulated streams that run late; `test_pairs.py` compares its results."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated_gpu import Event, Stream, Work, queued
from engine_bench import batches, engine, model_directory, train

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.storage.transfer import Future
from offload_trainer.telemetry.meters import PhaseClock

HOMES = {"resident": ["--params", "gpu"], "in RAM": ["--params", "cpu", "tiered.weight_buffers=2"]}
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's queues are for the CPU's memory"),
    pytest.mark.usefixtures("nothing_is_small"),
]


WAITS = [[(Stream, "wait_event")], [(Event, "synchronize"), (Stream, "synchronize")]]


@pytest.mark.parametrize("forgotten", WAITS, ids=["streams", "threads"])
def test_a_missing_wait_would_show(
    forgotten: list[tuple[type, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued rows of `test_pairs.py` would fail if no stream, or no thread, waited for events."""
    model = model_directory(tmp_path / "gpt2", "gpt2")
    with engine(model, "--engine", "plain") as reference:
        expected = train(reference, batches(3))
    for kind, wait in forgotten:
        monkeypatch.setattr(kind, wait, lambda *_: None)
    with queued(monkeypatch, haste=0.0) as cuda, engine(model, *HOMES["in RAM"], device=cuda.device()) as ours:
        assert train(ours, batches(3)) != expected


@pytest.mark.parametrize("home", ["resident", "in RAM"])
def test_the_training_thread_waits_for_the_device_once_a_step(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More micro-batches add no wait, unless phases are timed on the host: then each adds four."""
    model, found = model_directory(tmp_path / "gpt2", "gpt2"), {}
    for accumulate in (1, 3):
        with queued(monkeypatch) as cuda:
            words = [*HOMES[home], "--accumulate", str(accumulate)]
            with engine(model, *words, device=cuda.device()) as ours:
                for stream in (True, False):
                    clock = PhaseClock(lambda: torch.cuda.current_stream().synchronize(), stream=stream)
                    before = cuda.host_waits
                    ours.train_step(batches(accumulate), lr=1e-4, clock=clock)
                    found[accumulate, stream] = cuda.host_waits - before
                    clock.take()
    assert found[3, True] == found[1, True]
    assert found[3, False] == found[1, False] + 2 * 4


def test_a_copy_over_what_is_still_read_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = CudaDevice.fetch
    monkeypatch.setattr(
        CudaDevice, "fetch", lambda device, source, into, after: fetch(device, source, into, after=None)
    )
    model = model_directory(tmp_path / "gpt2", "gpt2")
    with queued(monkeypatch) as cuda, engine(model, *HOMES["in RAM"], device=cuda.device()) as ours:
        train(ours, batches(1))
        assert cuda.bare


def test_a_unit_from_a_drive_is_copied_as_soon_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that completes the read queues the copy, before the weights are needed; the compute stream is not
    delayed.
    """
    with queued(monkeypatch, haste=0.0) as cuda:
        device, into, read = cuda.device(staging_bytes=4096, stagings=1), torch.zeros(1024), Future()
        filled: list[torch.Tensor] = []
        arrival = device.fetch(lambda staging: (filled.append(staging), read)[1], into, after=device.mark())
        filled[0].fill_(3.0)
        assert [work.kind for work in device._to_device.queue] == []
        reader = threading.Thread(target=read.finish_part)
        reader.start()
        reader.join()
        assert [work.kind for work in device._to_device.queue] == ["wait", "copy", "record"]
        assert not into.any()
        arrival.wait()
        assert bool((into == 3.0).all())
        device.close()


def test_a_staging_buffer_is_reused_only_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third read into two staging buffers starts only after the first copy, on another thread than the requesting
    one.
    """
    with queued(monkeypatch, haste=0.0) as cuda:
        device = cuda.device(staging_bytes=4096, stagings=2)
        inside, reads = [torch.zeros(1024) for _ in range(4)], [Future() for _ in range(4)]
        stagings: list[torch.Tensor] = []
        begun = [threading.Event() for _ in range(4)]

        def source(number: int, staging: torch.Tensor) -> Future:
            assert len(stagings) == number
            if number >= 2:  # the staging buffer's previous content has been copied
                assert bool((inside[number - 2] == number - 2 + 1.0).all())
            stagings.append(staging)
            begun[number].set()
            return reads[number]

        arrivals = [device.fetch(partial(source, n), into, after=device.mark()) for n, into in enumerate(inside)]
        assert len(stagings) == 2
        for number, read in enumerate(reads):
            assert begun[number].wait(300)
            stagings[number].fill_(number + 1.0)
            read.finish_part()
        for number, arrival in enumerate(arrivals):
            arrival.wait()
            assert bool((inside[number] == number + 1.0).all())
        assert stagings[0].data_ptr() == stagings[2].data_ptr() != stagings[1].data_ptr() == stagings[3].data_ptr()
        device.close()


def test_a_failed_read_is_raised_by_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with queued(monkeypatch) as cuda:
        device, read = cuda.device(staging_bytes=4096, stagings=1), Future()
        arrivals = [device.fetch(lambda _: read, torch.zeros(1024), after=None) for _ in range(2)]
        read.finish_part(TrainerError("lost"))
        for arrival in arrivals:
            with pytest.raises(TrainerError, match="lost"):
                arrival.wait()
        device.close()


def test_copies_to_the_host_keep_their_memory_and_block_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept input waits only for what computed it, leaves on its own stream, and returns on another one."""
    with queued(monkeypatch, haste=0.0) as cuda:
        device, values, host, back = cuda.device(), torch.ones(8), torch.zeros(8), torch.zeros(8)
        device._to_host.queue.append(Work("copy", lambda: pytest.fail("a gradient was waited for")))
        kept = device.keep(values, host)
        assert cuda.recorded(values)
        returned = device.copy_back(host, back, after=device.mark(), ready=kept)
        returned.arrival.wait()
        returned.left.wait()
        assert torch.equal(back, values)
        assert cuda.log == [f"{device._inputs_to_host.name} copy", f"{device._inputs_to_device.name} copy"]
        device._to_host.queue.clear()
        device.close()
