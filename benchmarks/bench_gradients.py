"""Benchmark the hand-over of gradients: measure whether it delays the backward on a simulated GPU.

    python benchmarks/bench_gradients.py [MODEL] [--home ram gpu] [--backward 3] [--micro-batches 4] [--speed 20e9]

The simulated GPU computes `--backward` seconds for each micro-batch, divided among weights by their elements, and half
of that in the forward. It accepts work ahead of time, as a GPU does. Copies to the host take their bytes at `--speed`,
one after the other, and none starts before its gradient is computed. Additions on the device run at 500 GB/s and count
as computing. Additions in host memory are real, on the thread that does them in training. The reported seconds end
when the simulated GPU has finished a backward; "beyond adds" excludes its own additions.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from offload_trainer.config import TrainConfig
from offload_trainer.model.presets import PRESETS, gpt2_shape
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.optim.gradient_kernel import gradient_kernel
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.plan.tiered.layout import DEVICE, RAM, Unit, units_of
from offload_trainer.plan.tiered.spec import GRADIENTS_IN_FLIGHT, gradient_ring
from offload_trainer.settings import load_config
from offload_trainer.storage.transfer import Future, ThreadedTransfers

MEMORY = 500e9  # bytes/s of additions on the simulated GPU


class TimedDevice(CpuDevice):
    """A device that only simulates the time of computing and copying; copies move no data."""

    in_host_memory = False

    def __init__(self, *, speed: float) -> None:
        super().__init__()
        self.computed = 0.0  # when the work queued so far will be done
        self._speed, self._sent = speed, 0.0  # the same for copies
        self._due: queue.SimpleQueue[tuple[float, Future] | None] = queue.SimpleQueue()
        self._timer = threading.Thread(target=self._tell, name="timer", daemon=True)
        self._timer.start()

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device="meta")

    def compute(self, seconds: float) -> None:
        self.computed = max(self.computed, time.monotonic()) + seconds

    def download(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        assert values.nbytes == into.nbytes
        self._sent = max(self._sent, self.computed, time.monotonic()) + values.nbytes / self._speed
        future = Future()
        self._due.put((self._sent, future))
        return future

    def _tell(self) -> None:
        while (one := self._due.get()) is not None:
            time.sleep(max(0.0, one[0] - time.monotonic()))
            one[1].finish_part()

    def close(self) -> None:
        self._due.put(None)
        self._timer.join()
        super().close()


def backward_passes(
    units: Sequence[Unit], config: TrainConfig, *, home: int, seconds: float, speed: float
) -> list[tuple[float, float]]:
    """Return (seconds of the backward, seconds of its additions on the device) for each micro-batch of a step."""
    device, transfers = TimedDevice(speed=speed), ThreadedTransfers()
    homes = [home] * len(units)
    gradients = Gradients(
        units,
        homes,
        dtype=torch.float32,
        device=device,
        files=[],
        transfers=transfers,
        stagings=0,
        ring_bytes=gradient_ring(
            units, homes, item_bytes=2, several=config.train.gradient_accumulation_steps > 1, gpu=True
        ),
        in_flight_bytes=GRADIENTS_IN_FLIGHT,
        order=[],
        kernel=gradient_kernel(choose_kernel("auto")[0]),
    )
    for unit in units:
        if (sums := gradients.store.host(unit.index)) is not None:
            sums.zero_()  # Training allocates pinned memory at the start.
    weights = [place.weight for unit in reversed(units) for place in reversed(unit.places)]
    total = sum(weight.numel for weight in weights)
    where = "meta" if home == DEVICE else "cpu"
    gradient = torch.zeros(max(weight.numel for weight in weights), dtype=torch.bfloat16, device=where)
    found = []
    for number in range(config.train.gradient_accumulation_steps):
        device.compute(seconds / 2)
        before, adding = max(device.computed, time.monotonic()), 0.0
        for weight in weights:
            device.compute(seconds * weight.numel / total)
            gradients.add(weight.name, gradient[: weight.numel], last=False)
            if home == DEVICE and number:
                adding += (4 + 4 + 2) * weight.numel / MEMORY
                device.compute((4 + 4 + 2) * weight.numel / MEMORY)
        gradients.end_of_backward(last=False)
        found.append((device.computed - before, adding))
        # The host runs only a limited time ahead of a GPU; for example, it waits for the loss.
        time.sleep(max(0.0, device.computed - time.monotonic()))
    gradients.finish()
    gradients.close()
    transfers.close()
    device.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt2-medium", choices=PRESETS)
    parser.add_argument("--home", nargs="+", default=["ram", "gpu"], choices=["ram", "gpu"], help="of the sums")
    parser.add_argument("--backward", type=float, default=3.0, help="seconds of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--speed", type=float, default=20e9, help="bytes/s out of the device")
    asked: Any = parser.parse_args()
    units = units_of(gpt2_shape(PRESETS[asked.model]))
    config = load_config(["--accumulate", str(asked.micro_batches)])
    print(f"{asked.model}: seconds of the backward of each micro-batch, {asked.speed / 1e9:g} GB/s out")
    for name in asked.home:
        home = DEVICE if name == "gpu" else RAM
        found = backward_passes(units, config, home=home, seconds=asked.backward, speed=asked.speed)
        each = " ".join(f"{seconds:.3f}" for seconds, _ in found)
        beyond = max((seconds - adding) / found[0][0] for seconds, adding in found[1:])
        print(f"  sums {name:<4} {each}   beyond adds at most {beyond:.3f} x the first")


if __name__ == "__main__":
    main()
