"""Tests that every Python block of docs/integrations.md runs, on a small model with little data and a local drive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hf_trainers import model_folder
from sample_chats import chat_tokenizer, chats, preferences, prompts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import offload_trainer.hf as hf

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs/integrations.md").read_text()
BLOCKS = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DATA = {
    "Salesforce/wikitext": lambda: datasets.Dataset.from_list(
        [{"text": f"row {number} of some text"} for number in range(40)]
    ),
    "trl-lib/Capybara": chats,
    "trl-lib/ultrafeedback_binarized": preferences,
    "trl-lib/ultrafeedback-prompt": prompts,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


def test_every_section_has_a_block() -> None:
    assert len(BLOCKS) == PAGE.count("```python")


@pytest.mark.parametrize("title", BLOCKS)
def test_block(
    title: str,
    tokenizer: PreTrainedTokenizerFast,
    drive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model_folder(tmp_path / "model", vocab_size=272, max_position_embeddings=1024, pad_token_id=0)
    tokenizer.save_pretrained(folder)
    sessions: list[Any] = []

    def load(name: str, **keys: Any) -> Any:
        sessions.append(hf.session_of(model := loading(name, **keys)))
        return model

    loading = hf.load
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf, "load", load)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: DATA[name]())
    block = BLOCKS[title].replace("Qwen/Qwen3-8B", str(folder)).replace("/mnt/ssd", str(drive))
    block = block.replace("max_completion_length=256", "max_completion_length=8")
    try:
        exec(compile(block, title, "exec"), {})
    finally:
        for session in sessions:
            session.close()
    for saved in ("final", "merged"):
        if f"out/{saved}" in block:
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / saved, dtype=torch.float32)
            before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert any(
                not torch.equal(one, two) for one, two in zip(model.parameters(), before.parameters(), strict=True)
            )
