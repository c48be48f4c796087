"""Tests of the recipes that are scripts, DPO and QLoRA: the copy runs, resumes with the same bits, and trains."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from compare_trainers import assert_same, weights
from datasets import Dataset
from hf_trainers import model_folder
from peft import PeftModel
from safetensors.torch import load_file
from sample_chats import chat_tokenizer, chats, preferences
from transformers import AutoModelForCausalLM

from offload_trainer import cli

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a directory with a model."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", vocab_size=272, max_position_embeddings=128, pad_token_id=0)
    chat_tokenizer().save_pretrained(folder)


def copy_and_run(name: str, data: Dataset, drive: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Copy the recipe; run four steps into `whole`, and two and two resumed ones, with equal losses, into `parted`."""
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    assert cli.main(["cp", name]) == 0
    words = ["--model", "model", "--data", "data.jsonl", "--nvme", str(drive), "--dtype", "fp32", *words]
    words += ["--max_length", "64", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    words += ["--max_steps", "4", "--save_steps", "2", "--warmup_steps", "0"]

    def run(output: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--output_dir", output])
        runpy.run_path(f"{name}.py", run_name="__main__")
        (state,) = Path(output).glob("checkpoint-4/trainer_state.json")
        return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]

    whole = run("whole")
    Path("parted").mkdir()
    Path("whole/checkpoint-2").rename("parted/checkpoint-2")
    assert run("parted") == whole
    assert len(whole) == 4
    assert whole[-1] < whole[0]


def test_dpo(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs have the same reference model."""
    copy_and_run("dpo", preferences(), drive, monkeypatch, ["--learning_rate", "1e-3"])
    assert_same(weights(Path("parted/final")), weights(Path("whole/final")))
    before, after = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("model", "whole/final")
    )
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


def test_qlora(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters load over an ordinary base, and the merged model says how its base was rounded."""
    copy_and_run("qlora", chats(), drive, monkeypatch, ["--learning_rate", "1e-2", "--merge"])
    assert_same(*(load_file(f"{name}/adapters/adapter_model.safetensors") for name in ("parted", "whole")))
    before, merged = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("model", "whole/merged")
    )
    weight = before.model.layers[0].mlp.up_proj.weight.clone()
    PeftModel.from_pretrained(before, "whole/adapters")
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, weight)
    assert "rounded to nf4" in Path("whole/merged/README.md").read_text()
