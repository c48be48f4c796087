"""Train as one of several ranks with transformers' or TRL's Trainer, stock or offloaded, or with a loop over a session.

torchrun starts it, for test_session_ranks.py:

    trainer_rank.py WHO FOLDER OUTPUT DRIVE KIND:HOME ...

WHO is stock or ours; the model is in FOLDER, data for TRL in OUTPUT/pairs; each KIND is trained in turn. It is a key of
`KINDS`, with `again` a run that resumes from the trainer's checkpoint, or `loop`, `outside` or `grads`. HOME is a key
of `HOMES`. Rank 0 writes the log to OUTPUT/KIND/told.json, and the trained model to OUTPUT/KIND/final.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from compare_trainers import told
from datasets import load_from_disk
from hf_trainers import arguments, loaded, rows
from peft import LoraConfig
from sample_chats import chat_tokenizer, prompts
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
        train_dataset=load_from_disk(str(output.parent / "pairs")),
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


Made = Callable[..., Any]
KINDS: dict[str, tuple[type, Made]] = {
    "trainer": (Trainer, lambda *given: _trainer(*given, gradient_accumulation_steps=1)),
    "again": (Trainer, lambda *given: _trainer(*given, gradient_accumulation_steps=1)),
    "accumulated": (Trainer, lambda *given: _trainer(*given, gradient_accumulation_steps=ACCUMULATE)),
    "adapters": (DPOTrainer, _adapters),
    "grpo": (GRPOTrainer, _grpo),
}


def _opened(kind: str, who: str, home: str, folder: str, drive: str) -> AbstractContextManager[Any]:
    if who == "stock":
        return nullcontext(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    keys: dict[str, Any] = {"freeze": ["."]} if kind == "adapters" else {}
    return loaded(Path(folder), Path(drive), home=home, seq_len=64, micro_batch_size=4, **keys)


def batch_of(step: int, number: int) -> dict[str, torch.Tensor]:
    """Return the rows of a step's micro-batch, counted over all ranks."""
    at = 2 * (2 * ACCUMULATE * step + number)
    chosen = rows(64)[at : at + 2]
    return {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}


def _loop(model: Any, output: Path, kind: str) -> None:
    """Train as docs/library.md does; save after three steps, train the rest, then resume and train the rest again."""
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

    if kind in ("outside", "grads"):
        try:
            if kind == "outside":
                model(**batch_of(0, session.rank)).loss.backward()
                session.clip_grad_norm_(1.0)
            else:
                with session.micro_batch(last=True):
                    model(**batch_of(0, session.rank)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except UserError as error:
            (output / f"refused-{session.rank}").write_text(str(error))
        return
    steps(0, 3)
    session.save(output / "save")
    steps(3, STEPS)
    assert session.resume(output / "save") == 3
    steps(3, STEPS)
    (output / f"told-{session.rank}.json").write_text(json.dumps(told_here))
    session.export(output / "final", dtype="fp32")


def main(who: str, folder: str, output: str, drive: str, *asked: str) -> None:
    for kind, _, home in (words.partition(":") for words in asked):
        place = Path(output, kind)
        place.mkdir(exist_ok=True)
        with _opened(kind, who, home, folder, drive) as model:
            if kind not in KINDS:
                _loop(model, place, kind)
                continue
            stock, make = KINDS[kind]
            base = stock if who == "stock" else type("Ours", (Offloaded, stock), {})
            trainer = make(model, place, base)
            trainer.train(resume_from_checkpoint=f"{output}/trainer/checkpoint-3" if kind == "again" else None)
            trainer.save_model(str(place / "final"))
            if trainer.is_world_process_zero():
                (place / "told.json").write_text(json.dumps(told(trainer)))
            trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
