"""run_and_measure.py WHAT FOLDER OUTPUT DRIVE: run a training with weights and state on the drive; print plan and peak
as JSON.

WHAT: `trainer` trains all of the model in FOLDER with a Trainer; `loop` trains adapters on it without one. The peak is
of anonymous memory, sampled every few milliseconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from forked_child import watched_memory
from hf_trainers import Ours, arguments, rows

from offload_trainer.hf import load, session_of


def by_trainer(model: Any, output: str) -> None:
    words = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "warmup_steps": 0}
    trainer = Ours(model, arguments(Path(output), **words), train_dataset=rows(24), eval_dataset=rows(4))
    trainer.train()
    trainer.save_model(output + "/final")


def by_hand(model: Any, output: str) -> None:
    """Train the adapters in a hand-written loop, save them, and export the model merged and the adapters alone."""
    session, data = session_of(model), rows(16)
    optimizer = session.adamw(model.parameters(), lr=1e-2)
    for number in range(0, 16, 2):
        with session.micro_batch(last=number % 4 == 2):
            pair = {key: torch.stack([row[key] for row in data[number : number + 2]]) for key in data[0]}
            (model(**pair).loss / 2).backward()
        if number % 4 == 2:
            session.clip_grad_norm_(1.0)
            optimizer.step()
        if number % 8 == 6:
            session.save(f"{output}/save")
    session.export(f"{output}/merged")
    model.save_pretrained(f"{output}/apart")


def main(what: str, folder: str, output: str, drive: str) -> None:
    keys = {"freeze": ["."]} if what == "loop" else {"ram_fraction": 0.0, "gradients": "nvme", "page_size": 1 << 18}
    peak = watched_memory()
    model = load(
        folder, nvme=drive, params="nvme", seq_len=24, micro_batch_size=2, gradient_accumulation_steps=2, **keys
    )
    session = session_of(model)
    if what == "trainer":
        by_trainer(model, output)
    else:
        from peft import LoraConfig, get_peft_model

        by_hand(get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")), output)
    needs = sum(item.bytes for item in session.plan.items if item.tier == "ram")
    session.close()
    print(json.dumps({"plan": needs, "peak": peak()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
