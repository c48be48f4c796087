"""Train as one of several ranks with stock and offloaded Trainers of transformers and TRL, and a loop over a session.

torchrun starts it, for test_session_ranks.py:

    trainer_rank.py FOLDER OUTPUT DRIVE

The model is in FOLDER. Rank 0 writes the log of each of `KINDS` to OUTPUT/WHO/KIND/told.json, and the trained model to
OUTPUT/WHO/KIND/final. WHO is stock or ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hf_trainers import arguments, loaded, rows, told
from peft import LoraConfig
from sample_chats import chat_tokenizer, preferences, prompts
from transformers import AutoModelForCausalLM, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded, session_of

STEPS, ACCUMULATE, LIMIT = 6, 2, 0.5
QUIET = {"max_steps": STEPS, "save_steps": 3, "use_cpu": True, "ddp_backend": "gloo"}


def _trainer(model: Any, output: Path, base: type, **changes: Any) -> Any:
    words = QUIET | {"eval_steps": 3, "max_grad_norm": LIMIT, "warmup_steps": 1} | changes
    return base(model, arguments(output, **words), train_dataset=rows(48), eval_dataset=rows(8))


def _words(output: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments of TRL's trainers without bf16, which is their default."""
    words = {"output_dir": str(output), "bf16": False, "per_device_train_batch_size": 2, "logging_steps": 1}
    return QUIET | words | {"report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3} | changes


def _adapters(model: Any, output: Path, base: type) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))  # adapters of the other rank must be replaced by those of rank 0
    return base(
        model,
        args=DPOConfig(**_words(output)),
        train_dataset=preferences(),
        processing_class=chat_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )


def _grpo(model: Any, output: Path, base: type) -> Any:
    args = GRPOConfig(**_words(output, num_generations=2, max_completion_length=8, beta=0.0))
    return base(
        model,
        args=args,
        reward_funcs=lambda completions, **_: [float(len(str(one)) % 7) for one in completions],
        train_dataset=prompts(),
        processing_class=chat_tokenizer(),
    )


# The stock trainer, the function that makes one, and where the weights are. `again` resumes from a checkpoint of
# `trainer`.
KINDS: dict[str, tuple[type, Callable[..., Any], str]] = {
    "trainer": (Trainer, partial(_trainer, gradient_accumulation_steps=1), "drive"),
    "again": (Trainer, partial(_trainer, gradient_accumulation_steps=1), "drive"),
    "accumulated": (Trainer, partial(_trainer, gradient_accumulation_steps=ACCUMULATE), "resident"),
    "adapters": (DPOTrainer, _adapters, "resident"),
    "grpo": (GRPOTrainer, _grpo, "resident"),
}


def batch_of(step: int, number: int) -> dict[str, torch.Tensor]:
    """Return the rows of a step's micro-batch, counted over all ranks."""
    at = 2 * (2 * ACCUMULATE * step + number)
    chosen = rows(64)[at : at + 2]
    return {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}


def _loop(model: Any, output: Path) -> None:
    """Train as docs/library.md does; save after three steps, train the rest, then resume and train the rest again.

    Then try what ranks refuse.
    """
    session, told_here = session_of(model), []
    optimizer = session.adamw(lr=1e-2, weight_decay=0.1)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            losses = []
            for number in range(ACCUMULATE):
                with session.micro_batch(last=number + 1 == ACCUMULATE):
                    loss = model(**batch_of(step, number * session.world + session.rank)).loss
                    (loss / ACCUMULATE).backward()
                losses.append(loss.item())
            told_here.append([*losses, session.clip_grad_norm_(LIMIT).item()])
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 3)
    session.save(output / "save")
    steps(3, STEPS)
    assert session.resume(output / "save") == 3
    steps(3, STEPS)
    (output / f"told-{session.rank}.json").write_text(json.dumps(told_here))
    session.export(output / "final", dtype="fp32")
    with session.micro_batch(last=True):
        model(**batch_of(0, session.rank)).loss.backward()
    said = []

    def backward_outside() -> None:
        optimizer.zero_grad()
        model(**batch_of(0, session.rank)).loss.backward()
        session.clip_grad_norm_(1.0)

    for refused in (partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0), backward_outside):
        try:
            refused()
        except UserError as error:
            said.append(str(error))
    (output / f"refused-{session.rank}.json").write_text(json.dumps(said))


def main(folder: Path, output: Path, drive: Path) -> None:
    for who, (kind, (stock, make, home)) in product(("stock", "ours"), KINDS.items()):
        if (who, kind) == ("stock", "again"):
            continue
        place = output / who / kind
        place.mkdir(parents=True, exist_ok=True)
        keys: dict[str, Any] = {"freeze": ["."]} if kind == "adapters" else {}
        with (
            nullcontext(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
            if who == "stock"
            else loaded(folder, drive, home=home, seq_len=64, micro_batch_size=4, **keys)
        ) as model:
            trainer = make(model, place, stock if who == "stock" else type("Ours", (Offloaded, stock), {}))
            trainer.train(resume_from_checkpoint=f"{output}/{who}/trainer/checkpoint-3" if kind == "again" else None)
            trainer.save_model(str(place / "final"))
            if trainer.is_world_process_zero():
                (place / "told.json").write_text(json.dumps(told(trainer)))
            trainer.accelerator.wait_for_everyone()
    (output / "loop").mkdir(exist_ok=True)
    with loaded(folder, drive, seq_len=64, micro_batch_size=4) as model:
        _loop(model, output / "loop")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
