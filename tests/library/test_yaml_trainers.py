"""Tests that the YAML of docs/integrations.md trains as the project that it is for does, in pinned versions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_bench import assert_same
from fresh_environment import installed_environment, shell
from hf_trainers import model_folder, weights
from sample_chats import chat_tokenizer, chats

pytestmark = pytest.mark.slow(75)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/integrations.md").read_text()
(LLAMA_FACTORY,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
SAME = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 4}
SAME |= {"save_steps": 2, "logging_steps": 1, "report_to": "none", "dataloader_num_workers": 0, "max_grad_norm": 0.5}


def installed(place: Path, *requirements: str, alone: tuple[str, ...]) -> dict[str, str]:
    return installed_environment(place, *requirements, alone=alone, only_torch=False) | {"PYTHONPATH": str(ROOT)}


def model_and_data(folder: Path) -> Path:
    (folder / "drive").mkdir()
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = 256
    model = model_folder(folder / "model", max_position_embeddings=256)
    tokenizer.save_pretrained(model)
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()))
    return model


def compare(folder: Path) -> None:
    """Assert equal logs and weights in `ours` and `theirs`, and that only `ours` has a session's state."""
    logs = {}
    for name in ("ours", "theirs"):
        state = json.loads((folder / name / "checkpoint-4/trainer_state.json").read_text())
        logs[name] = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in state["log_history"]]
        assert (folder / name / "checkpoint-4/offload").is_dir() == (name == "ours")
    assert len(logs["ours"]) == 4
    assert logs["ours"] == logs["theirs"]
    assert_same(*(weights(folder / name / "checkpoint-4") for name in ("ours", "theirs")))


@pytest.mark.network
def test_llama_factory(tmp_path: Path) -> None:
    versions = ("transformers==5.8.0", "trl==0.24.0", "peft==0.18.1", "datasets==4.0.0", "accelerate==1.11.0")
    projects = ("llamafactory==0.9.5", "torchaudio==2.11.0")
    there = installed(tmp_path, *versions, "omegaconf", alone=projects) | {"DISABLE_VERSION_CHECK": "1"}
    for compiled in tmp_path.glob("venv/lib/*/site-packages/torchaudio/lib/*.so"):
        compiled.unlink()  # it needs a torch with CUDA; text needs no more than the import
    told = {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    told["tags"] = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": told}))
    changes: dict[str, Any] = {"model_name_or_path": str(model_and_data(tmp_path)), "template": "default"}
    changes |= {"dataset_dir": str(tmp_path), "cutoff_len": 128, "pure_bf16": False}
    for name in ("ours", "theirs"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(LLAMA_FACTORY | SAME | changes | {"output_dir": name}))
    shell("python -m offload_trainer cp llama_factory", there, tmp_path)
    shell(f"python llama_factory.py ours.yaml --nvme {tmp_path / 'drive'} --params nvme", there, tmp_path)
    shell("llamafactory-cli train theirs.yaml", there, tmp_path)
    compare(tmp_path)
