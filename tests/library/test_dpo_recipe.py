"""Tests of the preference (DPO) recipe: the copy runs, resumes with the same bits, and trains."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from compare_trainers import assert_same, weights
from hf_trainers import model_folder
from sample_chats import chat_tokenizer, preferences
from transformers import AutoModelForCausalLM

from offload_trainer import cli


def test_it_is_copied_and_goes_on(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and two resumed ones equal four, with the same reference model."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", vocab_size=272, max_position_embeddings=128, pad_token_id=0)
    chat_tokenizer().save_pretrained(folder)
    (tmp_path / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in preferences()))
    assert cli.main(["cp", "dpo"]) == 0
    words = ["--model", str(folder), "--data", "preferences.jsonl", "--nvme", str(drive), "--dtype", "fp32"]
    words += [
        "--seq-len",
        "64",
        "--rows",
        "2",
        "--accumulate",
        "2",
        "--lr",
        "1e-3",
        "--steps",
        "4",
        "--save-every",
        "2",
    ]

    def run(output: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", ["dpo.py", *words, "--output", output])
        runpy.run_path("dpo.py", run_name="__main__")
        (state,) = Path(output).glob("checkpoint-4/trainer_state.json")
        return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]

    whole = run("whole")
    Path("parted").mkdir()
    (tmp_path / "whole/checkpoint-2").rename(tmp_path / "parted/checkpoint-2")
    assert run("parted") == whole
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    assert_same(weights(Path("parted/final")), weights(Path("whole/final")))
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained("whole/final", dtype=torch.float32)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
