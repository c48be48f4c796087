"""Check the Triton function of the GPU update (triton_adam.py): its compiled code and, on a GPU, its results and speed.

    check_cuda_kernel.py [--elements 4194304] [--json FILE]

    code      for the GPU or, without one, for each supported architecture: the PTX rounds each fp32 operation to
              nearest even and flushes no denormals to zero; it has exactly two FMAs an element, or none for CPUs
              without FMA
    bits      on the GPU: equal to the CPU kernel's, for every state format
    speed     on the GPU: updates pages in rotation that together exceed its caches; GB/s counts the bytes that the
              update must read and write

Exits with 1 if a check failed. Compiling needs Triton alone: no GPU, driver or CUDA build of torch.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload_trainer.optim import triton_adam
from offload_trainer.optim.cuda_adam import CudaKernel, choose_cuda_kernel, constants
from offload_trainer.optim.kernel_api import PageUpdate, ParamRange
from offload_trainer.optim.kernels import choose_kernel, random_page
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.rules import adamw_of
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, StateFormat

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
CARDS = (70, 75, 80, 86, 89, 90, 100, 120)  # V100, T4, A100, RTX 30, RTX 40, H100, B200, RTX 50
# The fp32 instructions allowed in PTX: arithmetic that rounds to nearest even, and instructions without arithmetic.
EXACT = re.compile(
    r"(add|sub|mul|div|sqrt|fma)\.rn\.f32(x2)?|cvt\.rn\.(f32\.[us]32|f16(x2)?\.f32)|cvt\.f32\.f16"
    r"|(ld|st|mov|selp|setp|neg|abs)\b.*"
)
TYPES = {"fp32": "*fp32", "bf16": "*i16", "8bit": "*u8"}  # of moments


def faults_of(ptx: str, *, fuses: bool) -> list[str]:
    """Return the faults in PTX source: inexact fp32 instructions, a wrong number of FMAs, or spilled registers."""
    operations = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*f32[\w.]*)\s", ptx, flags=re.MULTILINE)
    faults = sorted({name for name in operations if not EXACT.fullmatch(name) or "ftz" in name})
    roots = operations.count("sqrt.rn.f32")  # each element takes one
    fused = operations.count("fma.rn.f32") + 2 * operations.count("fma.rn.f32x2")
    if not roots or fused != (2 * roots if fuses else 0):
        faults.append(f"{fused} FMA for {roots} elements")
    if ".local" in ptx:
        faults.append("registers spilled to memory")
    return faults


def ptx_for(card: int, *, moments: str, given: str | None, fuses: bool, whole: bool) -> str:
    """Compile the function for a card; `given` is the type of gradients and new weights (None: fp32, no weights)."""
    signature = dict.fromkeys(triton_adam.adamw.arg_names, "*fp32")
    signature |= dict.fromkeys(("table", "nearest", "lower"), "*i32")
    signature |= dict.fromkeys(("first_moments", "second_moments"), TYPES[moments])
    fixed = constants(fuses=fuses, whole=whole)
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


def check_code(card: int) -> list[dict]:
    """Compile the function for a card with each type once, and return a result row for each format of moments."""
    rows = []
    for moments in TYPES:
        row = {"triton": triton.__version__, "card": f"sm_{card}", "moments": moments, "faults": []}
        for given, fuses, whole in (("*i16", True, True), ("*fp16", False, True), (None, True, False)):
            code = ptx_for(card, moments=moments, given=given, fuses=fuses, whole=whole)
            row["faults"] += faults_of(code, fuses=fuses)
        rows.append(row)
    return rows


def updated(kernel, page, *, form: StateFormat, place: torch.device) -> list[torch.Tensor]:
    fields, grad = page
    n = grad.numel()
    here = {name: tensor.to(place, copy=True) for name, tensor in fields.items()}
    out = torch.zeros(n, dtype=torch.bfloat16, device=place)
    decayed, plain = (adamw_of(HYPER | {"weight_decay": decay}) for decay in (0.1, 0.0))
    parts = [ParamRange(0, n // 512 * 256, decayed, 7), ParamRange(n // 512 * 256 + 256, n, plain, 9)]
    kernel.update_page(PageUpdate(here, grad.bfloat16().to(place), out, parts, **settings(form)))
    return [tensor.cpu().view(torch.uint8) for tensor in (*here.values(), out)]


def settings(form: StateFormat) -> dict:
    noise = None if not form.moments.stochastic else Noise(1, 2)
    return {"format": form, "scale": 0.37, "noise": noise, "unit": 3, "first": 2**32 - 4096}


def different_bytes(kernel: CudaKernel, beside, *, form: StateFormat, n: int, place: torch.device) -> int:
    page = random_page(n, form)
    ours = updated(kernel, page, form=form, place=place)
    theirs = updated(beside, page, form=form, place=torch.device("cpu"))
    return sum(int((one != other).sum()) for one, other in zip(ours, theirs, strict=True))


def speed(kernel: CudaKernel, *, form: StateFormat, n: int, place: torch.device, rounds: int = 20) -> dict:
    """Measure the update of pages in rotation, 1 GiB of state in all, each page in one range.

    The result also has the host's time for a launch.
    """
    fields, grad = random_page(n, form)
    count = max(2, int(2**30 / (form.bytes_each * n)))
    pages = [{name: tensor.to(place, copy=True) for name, tensor in fields.items()} for _ in range(count)]
    grads = [grad.bfloat16().to(place) for _ in range(count)]
    outs = [torch.empty_like(grads[0]) for _ in range(count)]
    part, given = [ParamRange(0, n, adamw_of(HYPER | {"weight_decay": 0.1}), 7)], settings(form)

    def run() -> None:
        for page, gradient, out in zip(pages, grads, outs, strict=True):
            kernel.update_page(PageUpdate(page, gradient, out, part, **given))

    run()
    torch.cuda.synchronize(place)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun = time.perf_counter()
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    hosted = time.perf_counter() - begun
    torch.cuda.synchronize(place)
    seconds = begin.elapsed_time(end) / 1e3
    moved = 2 * form.bytes_each + 2 + 2  # bytes: the state in and out, the gradient in, the weight out
    updates = rounds * count
    return {
        "GB/s": round(updates * n * moved / seconds / 1e9, 1),
        "M parameters/s": round(updates * n / seconds / 1e6),
        "us a page on the GPU": round(seconds / updates * 1e6, 1),
        "us a page on the host": round(hosted / updates * 1e6, 1),
    }


def check_gpu(n: int) -> list[dict]:
    place, (beside, words) = torch.device("cuda", torch.cuda.current_device()), choose_kernel("auto")
    print(words)
    kernel, words = choose_cuda_kernel(place, beside)
    print(words)
    if kernel is None:
        return [{"gpu": torch.cuda.get_device_name(place), "faults": [words]}]
    rows = []
    for form in ADAMW_FORMATS:
        off = different_bytes(kernel, beside, form=form, n=n, place=place)
        row = {"gpu": torch.cuda.get_device_name(place), "state": str(form), "elements": n}
        row["faults"] = [f"{off} bytes differ from the CPU's"] if off else []
        rows.append(row | speed(kernel, form=form, n=n, place=place))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**22)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if here else (0, 0)
    rows = [row for card in ((10 * major + minor,) if here else CARDS) for row in check_code(card)]
    if here:
        rows += check_gpu(options.elements)
    else:
        print("there is no GPU: no bits, no speed", file=sys.stderr)
    for row in rows:
        print("  ".join(f"{key}: {value}" for key, value in row.items() if key != "faults"), end="  ")
        print("; ".join(row["faults"]) or "right")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["faults"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
