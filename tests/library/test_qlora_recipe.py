"""Tests of the QLoRA recipe: the copy runs, resumes with the same bits, trains, and merges."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from compare_trainers import assert_same
from hf_trainers import model_folder
from peft import PeftModel
from safetensors.torch import load_file
from sample_chats import chat_tokenizer, chats
from transformers import AutoModelForCausalLM

from offload_trainer import cli

ADAPTERS = "adapter_model.safetensors"


def test_it_is_copied_and_goes_on(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and two resumed ones equal four; the adapters load over an ordinary base."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", vocab_size=272, max_position_embeddings=128, pad_token_id=0)
    chat_tokenizer().save_pretrained(folder)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()))
    assert cli.main(["cp", "qlora"]) == 0
    words = ["--model", str(folder), "--data", "chat.jsonl", "--nvme", str(drive), "--dtype", "fp32", "--seq-len", "64"]
    words += ["--rows", "2", "--accumulate", "2", "--lr", "1e-2", "--steps", "4", "--save-every", "2", "--merge"]

    def run(output: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", ["qlora.py", *words, "--output", output])
        runpy.run_path("qlora.py", run_name="__main__")
        (state,) = Path(output).glob("checkpoint-4/trainer_state.json")
        return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]

    whole = run("whole")
    Path("parted").mkdir()
    (tmp_path / "whole/checkpoint-2").rename(tmp_path / "parted/checkpoint-2")
    assert run("parted") == whole
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    assert_same(*(load_file(Path(name) / "adapters" / ADAPTERS) for name in ("parted", "whole")))
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = before.model.layers[0].mlp.up_proj.weight.clone()
    PeftModel.from_pretrained(before, "whole/adapters")
    merged = AutoModelForCausalLM.from_pretrained("whole/merged", dtype=torch.float32)
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, weight)
    assert "rounded to nf4" in Path("whole/merged/README.md").read_text()
