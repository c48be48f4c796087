"""Tests of the memory plan: a Trainer, and adapters in a loop, hold no more than planned.

Each training is a process of its own, which runs this file: test_hf_memory.py WHAT FOLDER OUTPUT DRIVE. WHAT: `trainer`
trains all of the model in FOLDER with a Trainer; `loop` trains adapters on it without one. Its peak is of anonymous
memory, sampled every few milliseconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import environment
from forked_child import watched_memory
from hf_trainers import model_folder, ours, rows
from peft import LoraConfig, get_peft_model

from offload_trainer.hf import load, session_of

pytestmark = pytest.mark.slow


def train_by_hand(model: Any, output: str) -> None:
    """Train adapters in a hand-written loop, save them, and export the model merged and the adapters alone."""
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
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


def measure(what: str, folder: str, output: str, drive: str) -> None:
    keys = {"freeze": ["."]} if what == "loop" else {"ram_fraction": 0.0, "gradients": "nvme", "page_size": 1 << 18}
    sizes = {"seq_len": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    peak = watched_memory()
    model = load(folder, nvme=drive, params="nvme", **sizes, **keys)
    session = session_of(model)
    if what == "loop":
        train_by_hand(model, output)
    else:
        trainer = ours(model, Path(output), max_steps=4, save_steps=2, eval_steps=2, warmup_steps=0)
        trainer.train()
        trainer.save_model(output + "/final")
    needs = sum(item.bytes for item in session.plan.items if item.tier == "ram")
    session.close()
    print(json.dumps({"plan": needs, "peak": peak()}))


@pytest.mark.parametrize("what", ["trainer", "loop"])
def test_memory_is_at_most_the_plans(what: str, tmp_path: Path) -> None:
    """The model has 118 MB in bf16; training all of it takes 940 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    model_folder(tmp_path / "model", **sizes, num_key_value_heads=8, vocab_size=8192)
    (tmp_path / "drive").mkdir()
    words = [sys.executable, __file__, what, tmp_path / "model", tmp_path / "output", tmp_path / "drive"]
    env = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.6 * found["plan"] < found["peak"] <= found["plan"], found


if __name__ == "__main__":
    measure(*sys.argv[1:])
