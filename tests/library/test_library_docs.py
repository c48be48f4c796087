"""Tests that the code of docs/library.md and of the README runs unchanged, on a small model and a local drive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import VOCABULARY, batches, model_directory
from image_models import image_model
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BatchFeature

import offload_trainer as ot

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHORT, LOOP, OWN, ADAPTERS, IMAGES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL
)
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory with a model and a drive; return it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drive").mkdir()
    folder = model_directory(tmp_path / "model", "qwen3")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    return tmp_path


def run(code: str, **names: Any) -> dict[str, Any]:
    code = code.replace("Qwen/Qwen3-8B", "model").replace("/mnt/ssd", "drive").replace("% 100", "% 4")
    exec(compile(code, "library.md", "exec"), names)
    return names


def micro_batches_from(start: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    rows = [{"input_ids": batch.inputs, "labels": batch.inputs} for batch in batches(2 * 12, rows=1)]
    for step in range(start, 12):
        yield rows[2 * step : 2 * step + 2]


def test_the_first_loop_is_short_and_trains(here: Path) -> None:
    assert len(SHORT.strip().splitlines()) <= 8
    rows = [one for step in micro_batches_from(0) for one in step][:4]
    run(SHORT.replace("1024", "48"), batches=rows)
    exported = AutoModelForCausalLM.from_pretrained(here / "trained", dtype=torch.bfloat16)
    before = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        losses = [sum(float(one(**row).loss) for row in rows) for one in (before, exported)]
    assert losses[1] < losses[0]


def test_the_loop_trains_and_resumes_from_its_save(here: Path) -> None:
    assert len(LOOP.strip().splitlines()) <= 25
    first = run(LOOP, STEPS=12, batches_from=micro_batches_from)
    assert (first["start"], first["step"]) == (0, 12)
    assert first["scheduler"].last_epoch == 12
    AutoModelForCausalLM.from_pretrained(here / "trained")
    again = run(LOOP.replace('"trained"', '"again"'), STEPS=12, batches_from=micro_batches_from)
    assert again["start"] == 12
    files = [(here / name / "model.safetensors").read_bytes() for name in ("trained", "again")]
    assert files[0] == files[1]


def test_the_loop_of_adapters(here: Path) -> None:
    """The loop saves adapters in PEFT's format, resumes, and merges them into the adapted weights only."""
    first = run(ADAPTERS, ot=ot, torch=torch, STEPS=12, batches_from=micro_batches_from)
    assert (first["start"], first["step"]) == (0, 12)
    again = run(ADAPTERS.replace('"merged"', '"again"'), ot=ot, torch=torch, STEPS=12, batches_from=micro_batches_from)
    assert again["start"] == 12
    names = ("model", "merged", "again")
    before, merged, resumed = (AutoModelForCausalLM.from_pretrained(here / name) for name in names)
    for (name, one), two, plain in zip(
        merged.named_parameters(), resumed.parameters(), before.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        assert torch.equal(one, plain) == ("q_proj" not in name and "v_proj" not in name), name
    assert PeftModel.from_pretrained(before, here / "adapters").peft_config["default"].r == 16


def test_a_module_of_the_users(here: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    data = [(batch.inputs.flatten(), batch.targets.flatten()) for batch in batches(20)]

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(module(data[0][0]), data[0][1]).item()

    before = loss()
    names = run(OWN + "    after = loss()\n", module=module, data=data, ot=ot, torch=torch, loss=loss)
    assert names["after"] < before


def test_the_loop_with_images(here: Path) -> None:
    """The tower of the model is unchanged, and the rest is trained."""
    loader = [BatchFeature(batch) for batch in image_model(here / "images", "Qwen2_5_VL", batches=3)]
    length = loader[0]["input_ids"].shape[1]
    code = IMAGES.replace("Qwen/Qwen2.5-VL-7B-Instruct", "images").replace("2048", str(length)).replace("1e-5", "0.1")
    run(code, loader=loader, ot=ot)
    before, after = (AutoModelForImageTextToText.from_pretrained(here / name) for name in ("images", "trained"))
    for (name, one), two in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), two.bfloat16()) == (".visual." in name), name


@pytest.mark.parametrize("code", README)
def test_the_readmes_code(code: str, here: Path) -> None:
    rows = [{"input_ids": batch.inputs, "labels": batch.inputs} for batch in batches(3)]
    names = run(code, batches=rows)
    assert names["optimizer"].param_groups[0]["lr"] == 1e-5
