"""Tests that code of docs, README, notebook and recipes runs unchanged on small models and a local drive."""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from engine_bench import VOCABULARY, assert_same, batches, model_directory
from hf_trainers import model_folder, weights
from image_models import image_model
from peft import PeftModel
from safetensors.torch import load_file
from sample_chats import chat_tokenizer, chats, preferences, prompts
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BatchFeature

import offload_trainer as ot
import offload_trainer.hf as hf
from offload_trainer import cli

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHORT, LOOP, OWN, ADAPTERS, IMAGES = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
README = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)


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


def changed(kind: Any, before: str, after: str, *, dtype: torch.dtype = torch.float32) -> set[str]:
    """Return the names of the weights in which two directories differ."""
    one, two = (kind.from_pretrained(place, dtype=dtype) for place in (before, after))
    return {name for name, weight in one.named_parameters() if not torch.equal(weight, two.get_parameter(name))}


def test_the_first_loop_is_short_and_trains(here: Path) -> None:
    assert len(SHORT.strip().splitlines()) <= 8
    rows = [one for step in micro_batches_from(0) for one in step][:4]
    run(SHORT.replace("1024", "48"), batches=rows)
    exported = AutoModelForCausalLM.from_pretrained(here / "trained", dtype=torch.bfloat16)
    before = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        losses = [sum(float(one(**row).loss) for row in rows) for one in (before, exported)]
    assert losses[1] < losses[0]


def test_the_loops_resume_from_their_saves(here: Path) -> None:
    """The loop for adapters saves them in PEFT's format, and merges them into the adapted weights only."""
    assert len(LOOP.strip().splitlines()) <= 25
    for code, out in ((LOOP, "trained"), (ADAPTERS, "merged")):
        for start, name in ((0, out), (12, f"{out} again")):
            names = {"ot": ot, "torch": torch, "STEPS": 12, "batches_from": micro_batches_from}
            done = run(code.replace(f'"{out}"', f'"{name}"').replace('"saves"', f'"saves of {out}"'), **names)
            assert (done["start"], done.get("step", 12)) == (start, 12)
        files = [(here / name / "model.safetensors").read_bytes() for name in (out, f"{out} again")]
        assert files[0] == files[1]
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    adapted = {name for name, _ in model.named_parameters() if "q_proj" in name or "v_proj" in name}
    assert changed(AutoModelForCausalLM, "model", "merged") == adapted
    assert PeftModel.from_pretrained(model, here / "adapters").peft_config["default"].r == 16


def test_a_module_of_the_users(here: Path) -> None:
    module = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    data = [(batch.inputs.flatten(), batch.targets.flatten()) for batch in batches(20)]

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(module(data[0][0]), data[0][1]).item()

    before = loss()
    names = run(OWN + "    after = loss()\n", module=module, data=data, ot=ot, torch=torch, loss=loss)
    assert names["after"] < before


def test_the_loop_with_images(here: Path) -> None:
    loader = [BatchFeature(batch) for batch in image_model(here / "images", "Qwen2_5_VL", batches=3)]
    length = loader[0]["input_ids"].shape[1]
    code = IMAGES.replace("Qwen/Qwen2.5-VL-7B-Instruct", "images").replace("2048", str(length)).replace("1e-5", "0.1")
    run(code, loader=loader, ot=ot)
    names = [name for name, _ in AutoModelForImageTextToText.from_pretrained("images").named_parameters()]
    found = changed(AutoModelForImageTextToText, "images", "trained", dtype=torch.bfloat16)
    assert found == {name for name in names if ".visual." not in name}


@pytest.mark.parametrize("code", README)
def test_the_readmes_code(code: str, here: Path) -> None:
    rows = [{"input_ids": batch.inputs, "labels": batch.inputs} for batch in batches(3)]
    names = run(code, batches=rows)
    assert names["optimizer"].param_groups[0]["lr"] == 1e-5


PAGE = (DOCS / "integrations.md").read_text()
BLOCKS = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DATA = {
    "Salesforce/wikitext": lambda: datasets.Dataset.from_list(
        [{"text": f"row {number} of some text"} for number in range(40)]
    ),
    "trl-lib/Capybara": chats,
    "trl-lib/ultrafeedback_binarized": preferences,
    "trl-lib/ultrafeedback-prompt": prompts,
}


@pytest.mark.parametrize("title", BLOCKS)
def test_block(title: str, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == PAGE.count("```python")  # each section has one
    folder = model_folder(tmp_path / "model", max_position_embeddings=1024)
    chat_tokenizer().save_pretrained(folder)
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
            assert changed(AutoModelForCausalLM, str(folder), f"out/{saved}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's")
def test_the_notebook_runs_and_trains_as_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are AdamW's bit for bit, also after a resume; the notebook has no outputs, which would be outdated."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads((DOCS / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    expected = []
    for batch in names["batches"]:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert names["losses"] == names["uninterrupted"] == expected
    assert expected[-1] < expected[0]
    for (name, exported), trained in zip(names["trained"].named_parameters(), model.parameters(), strict=True):
        assert torch.equal(exported.float(), trained.bfloat16().float()), name
    assert names["written"].startswith(b"It was the ")
    assert b" of times" in names["written"]  # it has learned the text


def copy_and_run(
    name: str, data: datasets.Dataset, here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Copy the recipe; run four steps into `whole`, and two and two resumed ones, with equal losses, into `parted`."""
    monkeypatch.chdir(here)
    chat_tokenizer().save_pretrained(model_folder(here / "model"))
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    assert cli.main(["cp", name]) == 0
    words = ["--model", "model", "--data", "data.jsonl", "--nvme", ".", "--dtype", "fp32", *words]
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


def test_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_and_run("dpo", preferences(), tmp_path, monkeypatch, ["--learning_rate", "1e-3"])
    assert_same(weights(Path("parted/final")), weights(Path("whole/final")))
    assert "lm_head.weight" in changed(AutoModelForCausalLM, "model", "whole/final")


def test_qlora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_and_run("qlora", chats(), tmp_path, monkeypatch, ["--learning_rate", "1e-2", "--merge"])
    assert_same(*(load_file(f"{name}/adapters/adapter_model.safetensors") for name in ("parted", "whole")))
    assert "model.layers.0.mlp.up_proj.weight" in changed(AutoModelForCausalLM, "model", "whole/merged-4")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32), "whole/adapters")
    assert "rounded to nf4" in Path("whole/merged-4/README.md").read_text()
