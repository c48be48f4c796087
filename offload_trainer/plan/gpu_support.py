"""Check from a GPU's compute capability whether it supports a dtype and whether the installed torch has kernels for it.

A binary for sm_XY runs on GPUs of the same major version from XY on. compute_XY is PTX, which the driver compiles for
any GPU from XY on. The suffix `a` restricts code to that capability, `f` to its family (CUDA's programming guide,
"Compute capabilities"). AMD GPUs have no capability here and are not checked.
"""

from __future__ import annotations

import re

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile

BF16_FROM = (8, 0)  # Ampere; older GPUs emulate bf16
_CU126_UP_TO = (7, 5)  # since torch 2.11 only CUDA 12.6 wheels support Volta and older (pytorch #172352, #175253)
_CU126 = "pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"
_NEWER = "install a newer torch: https://pytorch.org/get-started/locally"


def with_dtype_of_card(section: ModelSection, machine: MachineProfile) -> ModelSection:
    """Return the section with fp16 as dtype if none was set and the GPU has no bf16 units."""
    if "dtype" in section.model_fields_set or has_bf16(machine):
        return section
    return section.model_copy(update={"dtype": "fp16"})


def refuse_card(machine: MachineProfile, *, dtype: str) -> None:
    """Raise UserError if the GPU cannot train in `dtype`, or not with the installed torch."""
    for told, fix in card_mistakes(machine, dtype=dtype):
        raise UserError(f"{told}: {fix}")


def card_mistakes(machine: MachineProfile, *, dtype: str) -> list[tuple[str, str]]:
    """Return pairs (what is wrong, what to do); none if the capability is unknown."""
    capability, built = machine.capability, machine.built_for
    if machine.gpu is None or capability is None:
        return []
    name = f"{machine.gpu} (sm_{capability[0]}{capability[1]})"
    found = []
    if built and not any(runs(code, capability) for code in built):
        fix = _CU126 if capability < _CU126_UP_TO else _NEWER
        found.append((f"the installed torch has no kernels for {name}; it has {', '.join(built)}", fix))
    if dtype == "bf16" and capability < BF16_FROM:
        found.append((f"{name} has no bf16 units, which need sm_80 or newer", "use --dtype fp16"))
    return found


def runs(code: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this capability can run `code`, an entry of torch.cuda.get_arch_list()."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)
    if not found:
        return True  # an unknown kind of entry is not a reason to refuse the GPU
    kind, major, minor, only = found[1], int(found[2]), int(found[3]), found[4]
    if only == "a":
        return capability == (major, minor)
    if kind == "compute" and not only:
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def has_bf16(machine: MachineProfile) -> bool:
    """Return whether the device computes in bf16; True if its capability is unknown."""
    return machine.capability is None or machine.capability >= BF16_FROM
