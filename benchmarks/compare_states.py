"""Compare Adam's moments in each stored precision: tables of the largest update and of the loss.

    compare_states.py OUT [STEPS]

The validation loss does not show an update of thousands of times the rate in a few rows of an embedding, so the tables
have both. bitsandbytes' 8-bit AdamW on the CPU is included (on fp32 masters, in plain torch). OUT is the page to write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import torch

from offload_trainer.data.rows import DataState
from offload_trainer.optim import moments
from offload_trainer.optim.kernel_api import ParamRange
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.rules import AdamW
from offload_trainer.optim.torch_adam import TorchKernel
from offload_trainer.plan.tiered.state_formats import state_format
from offload_trainer.run.train import train_run
from offload_trainer.settings import load_config
from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.telemetry.meters import PhaseClock
from offload_trainer.trainer import learning_rate

FORMS = ("fp32", "bf16", "8bit", "bitsandbytes")
LR = 1e-3  # rate for the constructed gradients; the largest update is in units of it

# -- constructed gradients ---------------------------------------------------------------------------------------------


def constructed() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, gradients [steps, elements]) in which one element of each 256, or all, are far smaller
    than others.
    """
    random = torch.Generator().manual_seed(0)
    steps, blocks = 200, 40
    normal = torch.randn(steps, 256 * blocks, generator=random)
    one = torch.arange(256 * blocks) % 256 == 7
    sizes = torch.logspace(-6, 0, blocks)
    slope = torch.logspace(-6, 0, 256).repeat(blocks)
    for name, chosen in (
        ("3e-4 for three steps, else nothing", torch.zeros(steps, blocks)),
        ("1e-6 to 1 every 50th step", torch.zeros(steps, blocks)),
        ("1e-6 to 1 in every step", sizes.expand(steps, blocks)),
    ):
        gradients = normal.clone()
        gradients[:, one] = chosen
        if "three" in name:
            gradients[3:6, one] = 3e-4
        if "50th" in name:
            gradients[::50, one] = sizes
        yield f"one of 256 among N(0, 1): {name}", gradients
    yield "N(0, 1) x 1e-6 to 1 along the block", normal * slope
    seen = torch.rand(normal.shape, generator=random) < 0.03
    yield "the same, each element in 3 % of the steps", normal * slope * seen
    for long in (200, 400, 1000):
        shrinking = 0.01 * torch.randn(long, 256 * blocks, generator=random) * torch.logspace(2, -4, long)[:, None]
        shrinking[:, one] = sizes
        yield f"N(0, 1) that falls to a millionth in {long} steps, one of 256 constant", shrinking


def largest_of_gradients(form: str, gradients: torch.Tensor, *, betas: tuple[float, float]) -> float:
    """Return the largest change of an element in one step, in units of the rate, without weight decay."""
    n = gradients.shape[1]
    weight = torch.nn.Parameter(torch.zeros(n))
    first, second = torch.zeros(n), torch.zeros(n)
    kernel, hyper = TorchKernel(), AdamW(LR, betas, 1e-8, 0.0)
    settings: dict[str, Any] = {"lr": LR, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "min_8bit_size": 1}
    theirs = bitsandbytes.optim.AdamW8bit([weight], **settings)
    largest = 0.0
    for step, gradient in enumerate(gradients, 1):
        before = weight.detach().clone()
        if form == "bitsandbytes":
            weight.grad = gradient.clone()
            theirs.step()
        else:
            fields = {"master": weight.data, "exp_avg": first, "exp_avg_sq": second}
            given = {"format": state_format("adamw", "fp32"), "scale": 1.0, "noise": None}
            kernel.update_page(fields, gradient.contiguous(), None, [ParamRange(0, n, hyper, step)], **given)
            _store(form, first, second, step)
        largest = max(largest, float((weight.detach() - before).abs().max()) / LR)
    return largest


def _store(form: str, first: torch.Tensor, second: torch.Tensor, step: int) -> None:
    """Replace the moments with what remains of them after being stored in `form`."""
    for values, signed in ((first, True), (second, False)):
        noise = Noise(0, step).bits(str(signed), 0, 0)
        if form == "bf16":
            small = torch.empty(values.numel(), dtype=torch.bfloat16)
            moments.encode_bf16(values, small, noise=noise)
            moments.decode_bf16(small, values)
        if form == "8bit":
            codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(-(-values.numel() // 256))
            moments.encode_8bit(values, codes, scales, signed=signed, noise=None if signed else noise)
            moments.decode_8bit(codes, scales, values, signed=signed)


# -- runs ------------------------------------------------------------------------------------------------------------


def models(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, words) of models on the text that the package includes, whose ids range from frequent to rare."""
    for hidden in (64, 256):
        directory = folder / f"qwen3-{hidden}"
        directory.mkdir()
        shape = {
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
            "vocab_size": 2048, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(shape))
        yield f"Qwen3, untied, {hidden} wide", ["--model", str(directory), "--scratch", "--tokenizer", "builtin"]
    yield "GPT-2, tied, 256 wide", ["model.overrides.n_layer=2"]


def run(form: str, words: list[str], *, steps: int) -> dict[str, Any]:
    """Return the largest update in units of its step's rate, the largest embedding weight, and validation losses."""
    engine = ["--engine", "plain"] if form == "bitsandbytes" else ["--engine", "tiered", f"optim.moment_dtype={form}"]
    found: dict[str, Any] = {}
    with scratch("states-") as folder:
        wished = [*words, *engine, "--steps", str(steps), "--output", f"{folder}/run", "--save-every", "0"]
        config = load_config([*wished, "--seq-len", "64", "--micro-batch", "4", "placement.threads=1"])
        train_run(config, instead=lambda job: found.update(_measure(job, theirs=form == "bitsandbytes")))
    return found


def _measure(job: Any, *, theirs: bool) -> dict[str, Any]:
    engine, optim, train = job.engine, job.optim, job.train
    if theirs:
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in engine._adam.param_groups]
        engine._adam = bitsandbytes.optim.AdamW8bit(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    batches = job.train_rows.train_batches(DataState(0), micro_batch=train.micro_batch_size)
    before = {name: tensor.clone() for name, tensor in engine.named_master_parameters()}
    largest, losses = 0.0, []
    for step in range(train.steps):
        rate = learning_rate(step, optim, steps=train.steps)
        engine.train_step([next(batches)], lr=rate, clock=PhaseClock())
        for name, tensor in engine.named_master_parameters():
            largest = max(largest, float((tensor - before[name]).abs().max()) / rate)
            before[name].copy_(tensor)
        if (step + 1) % (train.steps // 3) == 0:
            rows = list(job.validation_rows.validation_batches(micro_batch=8, limit=32))
            losses.append(sum(engine.eval_loss(batch) for batch in rows) / len(rows))
    embedding = next(name for name in before if "embed_tokens" in name or "wte" in name)
    return {"largest": largest, "embedding": float(before[embedding].abs().max()), "losses": losses}


def main() -> int:
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    lines = ["Largest update in units of the rate, gradients made for it, 200 steps where no number is given:", ""]
    lines += [" | ".join(["gradients", "betas", *FORMS]), " | ".join(["---"] * (2 + len(FORMS)))]
    for name, gradients in constructed():
        for betas in ((0.9, 0.95), (0.9, 0.999)):
            each = [f"{largest_of_gradients(form, gradients, betas=betas):.3g}" for form in FORMS]
            lines.append(" | ".join([name, f"{betas[0]}, {betas[1]}", *each]))
    lines += ["", f"Runs of {steps} steps of 256 tokens of the shipped text, default keys but for the rate:", ""]
    columns = ["model", "--lr", "moments", "B a parameter", "largest update / rate", "largest embedding"]
    third = steps // 3
    columns += [f"validation loss, step {step}" for step in range(third, 3 * third + 1, third)]
    lines += [" | ".join(columns), " | ".join(["---"] * len(columns))]
    with scratch("states-") as folder:
        for name, words in models(folder):
            for rate in ("3e-4", "1e-3"):
                for form in FORMS:
                    got = run(form, [*words, "--lr", rate], steps=steps)
                    each = 6.03 if form == "bitsandbytes" else state_format("adamw", form).bytes_each
                    size = f"{each:.2f}"
                    each = [f"{got['largest']:.3g}", f"{got['embedding']:.3f}", *(f"{x:.4f}" for x in got["losses"])]
                    lines.append(" | ".join([name, rate, form, size, *each]))
                    print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
