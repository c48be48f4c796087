"""Build what `OffloadedModel` needs from a plan: the layout, the device, the drives and the update kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.allocation import Drives, EngineParts
from offload_trainer.offloading.device import CpuDevice, CudaDevice, Device
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.gradient_kernel import NativeGradients, gradient_kernel
from offload_trainer.optim.kernel_api import Kernel
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.native_adam import NativeKernel
from offload_trainer.plan.tiered.layout import TierMap, Unit
from offload_trainer.plan.tiered.spec import TierSizes, gradient_ring, layouts_of
from offload_trainer.plan.tiers import DEVICE, Placement, TierKind
from offload_trainer.plan.workload import Workload
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import Transfers

Say = Callable[[str], None]
_SWITCH_SECONDS = 0.0005


def open_parts(
    work: Workload,
    placement: Placement,
    sizes: TierSizes,
    directories: Sequence[Path],
    *,
    stack: ExitStack,
    say: Say,
    device: Device | None = None,
) -> EngineParts:
    """Open the device, drives and kernels of a run; `stack` closes them.

    Args:
        work: the workload. Its ranks are those of this process's group.
        placement: tiers of weights and optimizer state.
        sizes: buffer sizes, and each tier's share of the state.
        directories: private directories on drives, the same ones for all ranks of a node.
        say: receives a sentence about the chosen kernel.
        device: the device to use; by default the GPU if there is one, else the CPU.

    Raises:
        UserError: pages are on the GPU, and it has no update kernel.
    """
    layouts, dtype = layouts_of(work), DTYPES[work.dtype]
    units = layouts.units
    device = device or _device(units, placement, itemsize=dtype.itemsize)
    stack.callback(device.close)
    node = Node(together=work.world > 1, by_parts=sizes.by_parts)
    assert node.world == work.world == sizes.ranks, "pages are laid out for other ranks than there are"
    assert len(node.nodes) == work.nodes == sizes.nodes, "and for other nodes"
    drives = Drives(directories, Transfers(drives=len(directories)))
    stack.callback(drives.close)
    homes = layouts.homes(placement, sizes, node=node.number)
    kernel, why = choose_kernel(work.kernel)
    say(why)
    sums = gradient_kernel(kernel)
    if isinstance(kernel, NativeKernel) and not isinstance(sums, NativeGradients):
        say("Adding gradients in host memory: torch's slower operations, since the compiled ones differ here.")
    return EngineParts(
        units=units,
        homes=homes,
        sizes=sizes,
        dtype=dtype,
        gradient_dtype=torch.float32 if work.gradient_bytes == 4 else dtype,
        ring_bytes=gradient_ring(
            units, homes.gradients, item_bytes=work.item_bytes, several=work.added > 1, gpu=device.is_cuda
        ),
        node=node,
        device=device,
        drives=drives,
        kernels=(kernel, _device_kernel(homes, device, kernel, say=say)),
        gradient_kernel=sums,
    )


def _device(units: Sequence[Unit], placement: Placement, *, itemsize: int) -> Device:
    if not torch.cuda.is_available():
        return CpuDevice()
    # Threads of copies and of the update hand the interpreter over to the launching thread sooner than after 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    largest = max(unit.stored_bytes(itemsize) for unit in units)
    return CudaDevice(
        torch.device("cuda", torch.cuda.current_device()),
        staging_bytes=largest if placement.params == TierKind.DRIVES else 0,
        stagings=2,
    )


def _device_kernel(homes: TierMap, device: Device, kernel: Kernel, *, say: Say) -> Kernel:
    """Return the kernel that updates pages on the device with the bits of `kernel`.

    Raises:
        UserError: the GPU has no such kernel.
    """
    if device.place.type != "cuda" or not any(page.home == DEVICE for page in homes.pages):
        return kernel
    found, why = choose_cuda_kernel(device.place, kernel)
    say(why)
    if found is None:
        raise UserError(f"{why}. Use --gpu-fraction 0, so that the state is in RAM and on drives")
    return found
