"""What a card can compute, from its compute capability, and whether the installed torch has kernels for it.

A binary for sm_XY runs on cards of the same major version from XY on; compute_XY is PTX, which the driver compiles for
any card from XY on. `a` at the end is for that card alone, `f` for its family (CUDA's programming guide, "Compute
capabilities"). AMD's cards have no such number here and are not judged.
"""

from __future__ import annotations

import re

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile

BF16_FROM = (8, 0)  # Ampere; before it bf16 is emulated
_CU126_UP_TO = (7, 5)  # pytorch #172352, #175253: from 2.11 on Volta and older are in the wheels for CUDA 12.6 alone
_CU126 = "pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"
_NEWER = "install a newer torch: https://pytorch.org/get-started/locally"


def with_dtype_of_card(section: ModelSection, machine: MachineProfile) -> ModelSection:
    """fp16 in place of the default, where no dtype was asked for and the card has no bf16 units."""
    if "dtype" in section.model_fields_set or has_bf16(machine):
        return section
    return section.model_copy(update={"dtype": "fp16"})


def refuse_card(machine: MachineProfile, *, dtype: str) -> None:
    """UserError where this card cannot train in this dtype, or not with the installed torch."""
    for told, fix in card_mistakes(machine, dtype=dtype):
        raise UserError(f"{told}: {fix}")


def card_mistakes(machine: MachineProfile, *, dtype: str) -> list[tuple[str, str]]:
    """(what is wrong, what to do); nothing of a card whose capability is not known."""
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
    """Whether a card of this capability runs `code`, as torch.cuda.get_arch_list() names it."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)
    if not found:
        return True  # a word of another kind: nothing is known of it
    kind, major, minor, only = found[1], int(found[2]), int(found[3]), found[4]
    if only == "a":
        return capability == (major, minor)
    if kind == "compute" and not only:
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def has_bf16(machine: MachineProfile) -> bool:
    """Whether the device has units for it, as far as is known."""
    return machine.capability is None or machine.capability >= BF16_FROM
