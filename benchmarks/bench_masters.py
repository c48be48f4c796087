"""Train a model with fp32 masters, with bf16 ones, and with bf16 ones that are rounded to nearest; print the losses.

    bench_masters.py MODEL --data TEXT [--steps 300] [--lr 2e-5] [--json FILE]

MODEL is a directory or a name, such as demo-run/SmolLM2-135M-Instruct, which `scripts/demo.py` makes. All three see the
same rows. The package has no rounding to nearest: this script replaces the update's kernel. State is in RAM.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import offload_trainer as ot
from offload_trainer.optim.kernel_api import PageUpdate, TorchKernel

VARIANTS = {"fp32": ("fp32", False), "bf16": ("bf16", False), "bf16, rounded to nearest": ("bf16", True)}
WINDOW = 20  # steps over which a loss of the table is the mean


class Nearest:
    """torch's kernel without random bits: fields are rounded to nearest."""

    name = "nearest"

    def __init__(self) -> None:
        self._kernel = TorchKernel()

    def update_page(self, page: PageUpdate) -> None:
        self._kernel.update_page(replace(page, noise=None))


def rows_of(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of each step, and those of the validation, which come last in the text."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = torch.tensor(tokenizer(Path(options.data).read_text(), verbose=False)["input_ids"])
    rows = tokens[: len(tokens) // options.seq_len * options.seq_len].view(-1, options.seq_len)
    trained, held = rows[: -options.held], rows[-options.held :]
    random = torch.Generator().manual_seed(options.seed)
    count = options.steps * options.batch
    order = [torch.randperm(len(trained), generator=random) for _ in range(-(-count // len(trained)))]
    return trained[torch.cat(order)[:count]].view(options.steps, options.batch, -1), held.view(-1, 1, options.seq_len)


def trained(
    options: argparse.Namespace, steps: torch.Tensor, held: torch.Tensor, *, masters: str, nearest: bool
) -> Any:
    """Return the losses of all steps, the validation loss, the seconds, and the masters."""
    sizes = {"micro_batch_size": options.batch, "seq_len": options.seq_len, "optimizer": "cpu", "seed": options.seed}
    with ot.load(options.model, dtype="bf16", master_dtype=masters, **sizes) as session:
        if nearest:
            session._offloaded.updater._kernel = Nearest()
        optimizer, losses, begun = session.adamw(lr=options.lr, weight_decay=0.1), [], time.perf_counter()
        for number, rows in enumerate(steps, 1):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * min(1.0, number / options.warmup)
            batch = rows.to(session.device)
            loss = session.model(input_ids=batch, labels=batch).loss
            loss.backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        seconds = time.perf_counter() - begun
        with torch.no_grad():
            rated = [session.model(input_ids=row, labels=row).loss for row in held.to(session.device)]
        return losses, float(torch.stack(rated).mean()), seconds, dict(session.named_masters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--json")
    parser.add_argument("--lr", type=float, default=2e-5)
    for name, default in (("steps", 300), ("batch", 4), ("seq-len", 256), ("held", 64), ("warmup", 6), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    steps, held = rows_of(options)
    found: dict[str, Any] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, (masters, nearest) in VARIANTS.items():
        losses, validation, seconds, values = trained(options, steps, held, masters=masters, nearest=nearest)
        reference = reference or values
        apart = sum(float((values[key] - reference[key]).square().sum()) for key in values) ** 0.5
        found[name] = {"losses": losses, "validation": validation, "seconds": seconds, "distance": apart}
    print("| step | " + " | ".join(found) + " |\n| --- |" + " --- |" * len(found))
    for end in range(WINDOW, options.steps + 1, WINDOW):
        means = [sum(one["losses"][end - WINDOW : end]) / WINDOW for one in found.values()]
        print(f"| {end} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    for words, key in (("validation", "validation"), ("distance of the masters from fp32's", "distance")):
        print(f"| {words} | " + " | ".join(f"{one[key]:.4f}" for one in found.values()) + " |")
    print("| seconds | " + " | ".join(f"{one['seconds']:.0f}" for one in found.values()) + " |")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), **found}, indent=1))


if __name__ == "__main__":
    main()
