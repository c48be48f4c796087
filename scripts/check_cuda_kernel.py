"""Check the compiled code of the GPU's update (triton_adam.py) for each supported architecture.

    check_cuda_kernel.py

The PTX rounds each fp32 operation to nearest even and flushes no denormals to zero. The update has exactly two FMAs an
element, the addition of gradients none. Exits with 1 if a check failed. Triton alone is needed: no GPU, driver or CUDA
build of torch. On a GPU `tests/optim/test_adam_kernels.py` compares the bits, and
`offload-train bench` measures the speed.
"""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload_trainer.optim import triton_adam
from offload_trainer.optim.cuda_adam import constants
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS

CARDS = (70, 75, 80, 86, 89, 90, 100, 120)  # V100, T4, A100, RTX 30, RTX 40, H100, B200, RTX 50
# The fp32 instructions allowed in PTX: arithmetic that rounds to nearest even, and instructions without arithmetic.
EXACT = re.compile(
    r"(add|sub|mul|div|sqrt|fma)\.rn\.f32(x2)?|add\.rn\.f32\.f16|cvt\.rn\.(f32\.[us](16|32)|f16(x2)?\.f32)"
    r"|cvt\.(f32\.f16|rzi\.s32\.f32)|(ld|st|mov|selp|setp|neg|abs)\b.*"
)
TYPES = {"fp32": "*fp32", "bf16": "*i16", "8bit": "*u8"}  # pointer types of moments and masters


def faults_of(ptx: str, *, fuses: bool) -> list[str]:
    """Return the faults in PTX source: inexact fp32 instructions, a wrong number of FMAs, or spilled registers."""
    operations = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*f32[\w.]*)\s", ptx, flags=re.MULTILINE)
    faults = sorted({name for name in operations if not EXACT.fullmatch(name) or "ftz" in name})
    roots = operations.count("sqrt.rn.f32")  # each element takes one
    fused = operations.count("fma.rn.f32") + 2 * operations.count("fma.rn.f32x2")
    if fused != (2 * roots if fuses else 0) or (fuses and not roots):
        faults.append(f"{fused} FMA for {roots} elements")
    if ".local" in ptx:
        faults.append("registers spilled to memory")
    return faults


def ptx_for(card: int, *, masters: str, moments: str, given: str | None, whole: bool) -> str:
    """Compile the function for a card; `given` is the type of gradients and new weights (None: fp32, no weights)."""
    signature = dict.fromkeys(triton_adam.adamw.arg_names, "*fp32") | {"table": "*i32"}
    signature |= dict.fromkeys(("first_moments", "second_moments"), TYPES[moments]) | {"master": TYPES[masters]}
    fixed = constants(whole=whole)
    if moments != "8bit":
        fixed |= {"first_scales": None, "second_scales": None}
    if given is None:
        fixed["out"] = None
    else:
        signature |= {"grad": given, "out": given}
    signature |= dict.fromkeys(fixed, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type != "constexpr"}
    source = ASTSource(triton_adam.adamw, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options).asm["ptx"]


def ptx_of_addition(card: int, *, given: str) -> str:
    """Compile `add_gradient` for a card, where it adds gradients of type `given` and squares the sums."""
    fixed = {"SQUARES": True, "ROWS": 32, "LANES": 256}
    signature = dict.fromkeys(triton_adam.add_gradient.arg_names, "*fp32") | {"values": given}
    signature |= dict.fromkeys(("count", "width"), "i32") | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(triton_adam.add_gradient, signature=signature, constexprs=fixed)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options).asm["ptx"]


def main() -> int:
    """Compile the functions for each card with each type once, and print a line for each format of state."""
    wrong = False
    for card in CARDS:
        added = [ptx_of_addition(card, given=given) for given in ("*i16", "*fp16", "*fp32")]
        faults = [fault for code in added for fault in faults_of(code, fuses=False)]
        wrong |= bool(faults)
        print(f"triton {triton.__version__}  sm_{card}  gradients: {'; '.join(faults) or 'right'}")
        for format in ADAMW_FORMATS:
            types = {"masters": format.masters.name, "moments": format.moments.name}
            faults = []
            for given, whole in (("*i16", True), ("*fp16", True), (None, False)):
                faults += faults_of(ptx_for(card, **types, given=given, whole=whole), fuses=True)
            wrong |= bool(faults)
            print(f"triton {triton.__version__}  sm_{card}  {format.name}: {'; '.join(faults) or 'right'}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
