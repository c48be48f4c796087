"""How the optimizer state is divided where that is left open: as much on the GPU as fits, then in RAM, then drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offload_trainer.config import PlacementSection
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import gpu_reserve
from offload_trainer.plan.tiered.spec import TierSizes

_LARGE = 64 * 10**9  # bytes of RAM
_GRADIENT = 4  # bytes of an element at most; they stay on the GPU where the state does

Needs = Callable[[TierSizes], Mapping[str, int]]  # bytes needed of "gpu" and "ram"


def shares_that_fit(
    wish: PlacementSection, sizes: TierSizes, machine: MachineProfile, *, trained: int, needs: Needs
) -> TierSizes:
    """`sizes` with the shares that are left open filled; `trained` elements have a state."""
    if wish.optimizer != "auto":
        return sizes
    if wish.gpu_fraction == "auto" and machine.gpu is not None and not machine.no_state_on_gpu:
        room = machine.gpu_bytes - gpu_reserve(machine)
        sizes = _fill_gpu(wish, sizes, room, trained=trained, needs=needs)
    if wish.ram_fraction == "auto" and wish.nvme:
        sizes = _fill_ram(sizes, machine.ram_bytes, trained=trained, needs=needs)
    return sizes


def left_free(ram: int) -> int:
    """Bytes of RAM that stay free where the rest of the state goes to drives: 5 %, and 2 % of what is above 64 GB.

    They are for what a plan is off by. That is the process and its libraries, and hardly the state, whose bytes are
    exact but for the kernel's page tables, 0.2 % of them.
    """
    return ram // 20 if ram <= _LARGE else _LARGE // 20 + (ram - _LARGE) // 50


def _fill_gpu(wish: PlacementSection, sizes: TierSizes, have: int, *, trained: int, needs: Needs) -> TierSizes:
    """The largest share, in thousandths or all that is left, with which the GPU needs at most `have` bytes."""
    in_ram = 0.0 if wish.ram_fraction == "auto" else wish.ram_fraction
    share, each = round(1 - in_ram, 9), trained * sizes.format.bytes_each

    def shared(share: float) -> TierSizes:
        left = round(1 - share, 9) if wish.ram_fraction == "auto" else in_ram
        return replace(sizes, gpu_fraction=share, ram_fraction=left)

    while share > 0:
        over = needs(shared(share))["gpu"] - have
        if over <= 0:
            return shared(share)
        # No step is too long: a byte more of the state needs a byte more of the GPU, at most a gradient's with it.
        share = max(0.0, int(1000 * (share - over / (each + _GRADIENT * trained))) / 1000)
    return sizes


def _fill_ram(sizes: TierSizes, have: int, *, trained: int, needs: Needs) -> TierSizes:
    """The share that was meant for RAM where it fits, else the largest, in thousandths, that leaves the margin free."""
    if needs(sizes)["ram"] <= have:
        return sizes
    # With a share on a drive there are page buffers too: the bytes without any state in RAM count.
    spare = have - left_free(have) - needs(replace(sizes, ram_fraction=0.0))["ram"]
    share = max(0, spare) / (sizes.format.bytes_each * trained)
    return replace(sizes, ram_fraction=int(1000 * min(sizes.ram_fraction, share)) / 1000)


def shares_in_words(shares: dict[str, float]) -> str:
    """Shares that make 1, by their place."""
    *parts, (last, _) = [(place, share) for place, share in shares.items() if share > 0]
    return ", ".join([*(f"{share:.1%} {place}" for place, share in parts), f"rest {last}" if parts else last])
