"""Divide the optimizer state over the tiers for `auto` shares: as much on the GPU as fits, then in RAM, then on drives.

A share that the configuration sets stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offload_trainer.config import PlacementSection
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import gpu_reserve
from offload_trainer.plan.tiered.spec import TierSizes

_LARGE = 64 * 10**9  # bytes of RAM
_GRADIENT = 4  # upper limit of bytes per element; gradients stay on the GPU if the state is there

Needs = Callable[[TierSizes], Mapping[str, int]]  # returns the bytes needed in "gpu" and "ram"


def shares_that_fit(
    wish: PlacementSection, sizes: TierSizes, machine: MachineProfile, *, trained: int, needs: Needs
) -> TierSizes:
    """Return `sizes` with the shares of `auto` computed; `trained` is the number of elements that have state."""
    if wish.optimizer != "auto":
        return sizes
    if wish.gpu_fraction == "auto" and machine.gpu is not None and not machine.no_state_on_gpu:
        room = machine.gpu_bytes - gpu_reserve(machine)
        sizes = _fill_gpu(wish, sizes, room, trained=trained, needs=needs)
    if wish.ram_fraction == "auto" and wish.nvme:
        sizes = _fill_ram(sizes, machine.ram_bytes, trained=trained, needs=needs)
    return sizes


def left_free(ram: int) -> int:
    """Return the bytes of RAM that stay free if the rest of the state is on drives: 5 %, and 2 % of what exceeds 64 GB.

    This covers the plan's error, which comes from the process and its libraries. The state's bytes are exact, except
    for the kernel's page tables (0.2 %).
    """
    return ram // 20 if ram <= _LARGE else _LARGE // 20 + (ram - _LARGE) // 50


def _fill_gpu(wish: PlacementSection, sizes: TierSizes, have: int, *, trained: int, needs: Needs) -> TierSizes:
    """Return the sizes with the largest GPU share that needs at most `have` bytes.

    The share is a multiple of 1/1000, or all that the RAM share leaves.
    """
    in_ram = 0.0 if wish.ram_fraction == "auto" else wish.ram_fraction
    share, each = round(1 - in_ram, 9), trained * sizes.format.bytes_each

    def shared(share: float) -> TierSizes:
        left = round(1 - share, 9) if wish.ram_fraction == "auto" else in_ram
        return replace(sizes, gpu_fraction=share, ram_fraction=left)

    while share > 0:
        over = needs(shared(share))["gpu"] - have
        if over <= 0:
            return shared(share)
        # This reduction never overshoots: each element of state needs its own bytes and at most one gradient's.
        share = max(0.0, int(1000 * (share - over / (each + _GRADIENT * trained))) / 1000)
    return sizes


def _fill_ram(sizes: TierSizes, have: int, *, trained: int, needs: Needs) -> TierSizes:
    """Return `sizes` if its RAM share fits, otherwise with the largest multiple of 1/1000 that leaves a margin."""
    if needs(sizes)["ram"] <= have:
        return sizes
    # State on a drive also needs page buffers in RAM, so the bytes are those of a plan without any state in RAM.
    spare = have - left_free(have) - needs(replace(sizes, ram_fraction=0.0))["ram"]
    share = max(0, spare) / (sizes.format.bytes_each * trained)
    return replace(sizes, ram_fraction=int(1000 * min(sizes.ram_fraction, share)) / 1000)


def shares_in_words(shares: dict[str, float]) -> str:
    """Return shares that sum to 1 as text, such as "40.0% gpu, else RAM"."""
    *parts, (last, _) = [(place, share) for place, share in shares.items() if share > 0]
    return ", ".join([*(f"{share:.1%} {place}" for place, share in parts), f"rest {last}" if parts else last])
