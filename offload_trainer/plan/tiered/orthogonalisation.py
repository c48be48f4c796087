"""Count the operations, seconds and memory of orthogonalising matrices, for an update rule such as Muon."""

from __future__ import annotations

from math import prod

from offload_trainer.plan.machine import MachineProfile, layer_key
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.step_time import stands_for

ITERATIONS = 5  # Newton-Schulz iterations, as in torch.optim.Muon
RATE = layer_key("bf16", "orthogonalisation", "update")  # FLOP/s of the iteration in `Rates.layers`


def products_of(shape: tuple[int, int]) -> int:
    """Return the floating-point operations for one matrix."""
    less, more = sorted(shape)
    return ITERATIONS * (4 * less * less * more + 2 * less**3)


def seconds_of(model: ModelShape, machine: MachineProfile) -> float | None:
    """Return the seconds for all matrices of a model, on the GPU if there is one; None if no rate is known.

    The rate is that of the iteration, or else of a layer's products. Pages that the CPU updates move each matrix to the
    GPU and back with 16 bits an element, which is not overlapped.
    """
    rates = machine.rates
    timed = rates.layers.get(RATE) or rates.matmul.get(stands_for("bf16", machine) or "")
    if timed is None:
        return None
    matrices = [(weight.numel, weight.matrix) for weight in model.weights if weight.matrix]
    seconds = sum((count // prod(shape) * products_of(shape) / timed.value for count, shape in matrices), start=0.0)
    if machine.gpu is not None and rates.to_device is not None and rates.from_device is not None:
        moved = 2 * sum(count for count, _ in matrices)
        seconds += moved / rates.to_device.value + moved / rates.from_device.value
    return seconds


def workspace_bytes(model: ModelShape, *, gpu: bool) -> int:
    """Return the bytes for the largest matrix in use: the iteration's matrices, and on a CPU an fp32 copy."""
    shapes = [weight.matrix for weight in model.weights if weight.matrix]
    return max(((6 if gpu else 8) * prod(shape) + 4 * min(shape) ** 2 for shape in shapes), default=0)
