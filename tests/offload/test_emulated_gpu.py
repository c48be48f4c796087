"""Tests of the CUDA device on simulated streams that run late, and of training on the emulated GPU."""

import math
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu, Event, Stream, Work, emulated_gpu, queued
from engine_bench import Step, assert_same, batches, engine, masters, model_directory, plain, train
from placements import ALL_ON_DRIVES as DRIVE
from placements import ON as CHECKPOINTED

from offload_trainer.common.errors import TrainerError
from offload_trainer.data import rows
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.optim import state_files
from offload_trainer.optim.cuda_adam import CudaKernel
from offload_trainer.optim.norms import norm_of
from offload_trainer.storage.transfer import Future
from offload_trainer.telemetry.meters import PhaseClock

RAM = ["--params", "cpu", "tiered.weight_buffers=2"]
ON_GPU = ["--params", "gpu", "placement.gradients=gpu"]
BREADTH = "tiered.micro_batch_order=breadth_first"
CASES: dict[str, tuple[list[str], int]] = {  # words, and micro-batches a step
    "resident": (["--params", "gpu"], 3),
    "in RAM": (RAM, 1),
    "on the drive": (DRIVE, 3),
    "inputs in RAM": ([*RAM, CHECKPOINTED, "model.offload_activations=true"], 2),
    "block by block": ([*RAM, CHECKPOINTED, BREADTH, "placement.gradients=cpu"], 3),
    "block by block, on the drive": ([*DRIVE, CHECKPOINTED, BREADTH, "tiered.overlap=backward"], 3),
    "during the forward": ([*RAM, "tiered.overlap=forward"], 1),
    "during the backward": ([*DRIVE, "tiered.overlap=backward"], 1),
    "fp16": ([*DRIVE, "--dtype", "fp16", "tiered.overlap=backward"], 3),
    "fp16, skipped": ([*DRIVE, "--dtype", "fp16", "tiered.overlap=backward"], 1),
    "frozen": ([*DRIVE, 'model.freeze=["wte","h.1.mlp"]', "tiered.overlap=forward"], 2),
}
LONGER: dict[str, tuple[list[str], int]] = {
    "during the forward, from the drive": ([*DRIVE, "tiered.overlap=forward"], 3),
    "shadows of some": ([*RAM, "tiered.overlap=backward"], 1),
    "shadows of some, from the drive": ([*DRIVE, "tiered.overlap=backward"], 2),
    "everything away, block by block": ([*DRIVE, CHECKPOINTED, BREADTH, "model.offload_activations=true"], 3),
    "fp16, block by block": ([*RAM, CHECKPOINTED, BREADTH, "placement.gradients=cpu", "--dtype", "fp16"], 2),
    "loss in chunks": ([*RAM, "model.loss_chunk=10"], 2),
}
FETCH = CudaDevice.fetch
pytestmark = pytest.mark.usefixtures("nothing_is_small")


def stepped(made: Any, accumulate: int) -> list[Step]:
    """Train four steps, and evaluate before the third; return that loss as a further step."""
    data, seen = batches(4 * accumulate), list[Step]()
    look = lambda step: seen.append((made.eval_loss(data[0]), 1.0)) if step == 3 else None  # noqa: E731
    return train(made, data, accumulate=accumulate, before=look) + seen


def trained(
    gpu: EmulatedGpu, model: Path, drive: Path, words: list[str], *, accumulate: int = 1, limit: float = 0, **how: Any
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Return what `stepped` does on the emulated GPU, and the masters, without clipping unless there is a limit."""
    given, device = [*words, f"optim.max_grad_norm={limit}"], gpu.device(staging_bytes=1 << 20, stagings=2)
    with engine(model, "--accumulate", str(accumulate), *given, drives=[drive], device=device, **how) as ours:
        return stepped(ours, accumulate), masters(ours)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LONGER)])
def test_it_trains_as_plain_torch(case: str, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights have plain torch's bits. Sums over micro-batches are measured in another order on a GPU."""
    (words, accumulate), model = (CASES | LONGER)[case], model_directory(tmp_path / "gpt2", "gpt2")
    dtype = words[words.index("--dtype") :][:2] if "--dtype" in words else []
    given = ["--accumulate", str(accumulate), "optim.max_grad_norm=0", *dtype]
    given += [word for word in words if word.startswith(("model.freeze", "model.loss_chunk"))]
    if "skipped" in case:
        monkeypatch.setattr(state_files, "INITIAL_SCALE", 2.0**22)
    with engine(model, "--engine", "plain", *given) as reference:
        expected, weights = stepped(reference, accumulate), masters(reference)
    with emulated_gpu(monkeypatch, haste=0.2, seconds=0.001) as gpu:
        shadows = 0.4 if "shadows" in case else 0
        steps, found = trained(gpu, model, drive, words, accumulate=accumulate, shadows=shadows)
    assert [loss for loss, _ in steps] == [loss for loss, _ in expected]
    norms, wanted = ([math.inf if norm is None else norm for _, norm in one] for one in (steps, expected))
    assert norms == pytest.approx(wanted, rel=1e-5)
    assert ("skipped" in case) == (math.inf in norms)
    assert_same(found, weights)
    assert (gpu.freed, gpu.bare, gpu.elsewhere) == ([], [], set())


@pytest.mark.parametrize("rule", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_every_placement_clips_equally(rule: str, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's norms, by which gradients are clipped, are not plain torch's to the bit."""
    model, found, added, begin = model_directory(tmp_path / "gpt2", "gpt2"), [], [], Gradients.__init__

    class Kernel(CudaKernel):
        """A stand-in for the compiled addition."""

        adds_gradients = True

        def __init__(self) -> None:
            pass

        def add_gradient(self, sums: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
            added.append(sums)
            return norm_of(sums if values is None else sums.add_(values), ordered=True)

    whole = [*RAM, CHECKPOINTED, BREADTH, "placement.gradients=cpu"]
    for words, kernel in ((ON_GPU, None), (ON_GPU, Kernel()), (DRIVE, Kernel()), (whole, None), (whole, Kernel())):
        with emulated_gpu(monkeypatch, haste=0.2, seconds=0.001) as gpu, monkeypatch.context() as patch:

            def built(made: Any, parts: Any, *a: Any, beside: Any = kernel, **words: Any) -> None:
                kernels = parts.kernels[0], beside  # replaces the engine's second kernel
                begin(made, replace(parts, kernels=kernels), *a, **words)

            patch.setattr(Gradients, "__init__", built)
            given = [*words, f"optim.name={rule}"]
            found.append(trained(gpu, model, drive, given, accumulate=2, limit=0.1))
    assert len(added) == 2 * 4 * len(found[0][1])  # added only in each step's last micro-batch
    assert all(norm is not None and norm > 0.1 for _, norm in found[0][0])
    for steps, weights in found[1:]:
        assert steps == found[0][0]
        assert_same(weights, found[0][1])


def test_a_further_micro_batch_waits_at_most_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks in each forward whether rows are packed (`find_packed_sequence_indices`)."""
    model = model_directory(tmp_path / "gpt2", "gpt2")
    for words in (RAM, ["--params", "gpu"]):
        waits: dict[bool, list[int]] = {True: [], False: []}  # phases are timed by the device's events, or on the host
        for accumulate in (1, 3):
            given = [*words, "--accumulate", str(accumulate)]
            with emulated_gpu(monkeypatch) as gpu, engine(model, *given, device=gpu.device()) as ours:
                for stream, found in waits.items():
                    clock = PhaseClock(lambda: torch.cuda.current_stream().synchronize(), stream=stream)
                    before = gpu.host_waits
                    ours.train_step(batches(accumulate), lr=1e-4, clock=clock)
                    found.append(gpu.host_waits - before)
                    clock.take()
        further, timed = (after - before for before, after in waits.values())
        assert 0 <= further <= 2
        assert timed == further + 2 * 4


def test_planted_faults_are_caught(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_directory(tmp_path / "gpt2", "gpt2")
    mixed = pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu")
    for owner, name, fault, error in (
        (rows, "_copied", lambda tensor, place: tensor, mixed),
        (EmulatedGpu, "record_stream", lambda *_: None, nullcontext()),
    ):
        with monkeypatch.context() as patch, emulated_gpu(monkeypatch, haste=0.0, seconds=0.003) as gpu, error:
            patch.setattr(owner, name, fault)
            trained(gpu, model, drive, RAM)
        assert bool(gpu.freed) == (owner is EmulatedGpu)


@pytest.mark.parametrize(
    "faults",
    [
        {(Stream, "wait_event"): lambda *_: None},
        {(Event, "synchronize"): lambda *_: None, (Stream, "synchronize"): lambda *_: None},
        {(CudaDevice, "fetch"): lambda *given, after: FETCH(*given, after=None)},
    ],
    ids=["streams do not wait", "threads do not wait", "copies do not wait for readers"],
)
def test_a_missing_wait_would_show(faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late rows of `test_pairs.py` would fail, or `bare` would name a copy over what a kernel may still read."""
    model = model_directory(tmp_path / "gpt2", "gpt2")
    expected, _ = plain(model, 3)
    for (owner, name), fault in faults.items():
        monkeypatch.setattr(owner, name, fault)
    with queued(monkeypatch, haste=0.0) as cuda, engine(model, *RAM, device=cuda.device()) as ours:
        steps = train(ours, batches(3))
        assert cuda.bare if (CudaDevice, "fetch") in faults else steps != expected


def test_a_unit_from_a_drive_is_copied_as_soon_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that completes the read queues the copy; a failed read is raised by the wait for it."""
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
        lost = Future()
        arrivals = [device.fetch(lambda _: lost, torch.zeros(1024), after=None) for _ in range(2)]
        lost.finish_part(TrainerError("lost"))
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
        for returned in device.copy_back(host, back, after=device.mark(), ready=kept):
            returned.wait()
        assert torch.equal(back, values)
        assert cuda.log == [f"{device._inputs_to_host.name} copy", f"{device._inputs_to_device.name} copy"]
        device._to_host.queue.clear()
        device.close()
