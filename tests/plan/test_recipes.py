"""Tests of the recipes, whose headers state the plan's bytes and which train scaled down, and of docs/scaling.md."""

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import call
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from offload_trainer.cli import main
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.plan.machine import read_machine
from offload_trainer.run.planning import model_of, planned
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
HEADS = {
    path.stem: dict(re.findall(r"^# (run|plan|memory): +(.*)$", path.read_text(), re.MULTILINE))
    for path in (*RECIPES, *sorted((ROOT / "configs").glob("*.py")))
}

_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
_QWEN = {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_OF_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "max_position_embeddings": 40960}
_MOE = {"hidden_size": 2048, "num_hidden_layers": 48, "moe_intermediate_size": 768, "max_position_embeddings": 40960}
_MOE |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
# The hub's configurations of these models at their release.
NAMED: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B": LlamaConfig(**_LLAMA, **_8B),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(**_LLAMA, **_8B),
    "meta-llama/Llama-3.1-70B": LlamaConfig(**_LLAMA, **_70B),
    "Qwen/Qwen3-8B": Qwen3Config(**_QWEN, **_OF_8B, tie_word_embeddings=False),
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(**_QWEN | _MOE, tie_word_embeddings=False),
}
ROWS = re.findall(r"^\| `(--machine [^`]+)` \| (.+) \|$", (ROOT / "docs" / "scaling.md").read_text(), re.MULTILINE)
assert len(ROWS) >= 8
TINY = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
TINY |= {"num_experts_per_tok": 2}
# One of each kind: fp16, offloaded inputs of blocks, conversations with 8-bit moments, and these with experts. The
# README's test trains `tiny`.
TRAINED = ["gpt2-10b-v100-32gb", "long-rows", "llama-8b-rtx4090-64gb", "qwen3-30b-a3b-a100-80gb"]


def folder_of(config: PretrainedConfig, folder: Path, **changes: object) -> Path:
    kind = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    keys = config.to_dict()
    keys |= {key: value for key, value in changes.items() if key in keys} | {"architectures": [kind[config.model_type]]}
    keys.pop("layer_types", None)  # It has one entry for each layer, and is derived again.
    type(config)(**keys).save_pretrained(folder)
    return folder


def test_each_recipe_says_what_it_needs() -> None:
    assert {"run"} <= set.intersection(*(set(head) for head in HEADS.values()))
    assert {name for name, head in HEADS.items() if "plan" not in head} == {"tiny", "qlora"}
    for path in RECIPES:
        assert load_config(shlex.split(HEADS[path.stem]["run"])[1:])


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if "plan" in head])
def test_memory_is_the_plans(name: str, tmp_path: Path) -> None:
    words = shlex.split(HEADS[name]["plan"])[2:]
    at = words.index("--machine")
    machine, words = read_machine(words[at + 1]), words[:at] + words[at + 2 :]
    model = load_config(words).model.name
    if model in NAMED:
        words += ["--model", str(folder_of(NAMED[model], tmp_path)), "--scratch"]
    config = load_config(words, drives=[drive.directory for drive in machine.drives])
    plan = planned(config, model_of(config), machine, world=config.placement.gpus).plan
    assert plan.fits
    needed = {tier: format_bytes(room["need"]) for tier, room in plan.tiers.items() if room["need"]}
    assert ", ".join(f"{tier} {need}" for tier, need in needed.items()) == HEADS[name]["memory"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_scaled_down(name: str, tmp_path: Path) -> None:
    drive, recipe = tmp_path / "drive", ROOT / f"configs/{name}.yaml"
    drive.mkdir()
    words: list[object] = [recipe, "--nvme", drive, "--ram-fraction", "0.5", "--steps", "2", "--seq-len", "32"]
    words += ["--micro-batch", "1", "--accumulate", "2", "train.eval_rows=1", "--save-every", "1"]
    if (model := load_config([str(recipe)]).model.name) in NAMED:
        small = folder_of(NAMED[model], tmp_path / "model", **TINY)
        words += ["--model", small, "--scratch", "--tokenizer", "builtin"]
    else:
        words += ["--model", "gpt2-mini"]
    if "chat.jsonl" in HEADS[name]["run"]:
        answer = {"role": "assistant", "content": "So."}
        lines = [{"messages": [{"role": "user", "content": f"Why {n}?"}, answer]} for n in range(99)]
        (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
        words += ["--data", tmp_path / "chat.jsonl"]
    run = call(*words, output=tmp_path / "run")
    steps = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert len(list((run.output / "checkpoints").glob("step-*"))) >= 1


@pytest.mark.usefixtures("counted_once")
@pytest.mark.parametrize(("words", "cells"), ROWS, ids=[words for words, _ in ROWS])
def test_rows_of_the_scaling_table(words: str, cells: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMED:
        if name in words:
            words = words.replace(name, f"{folder_of(NAMED[name], tmp_path)} --scratch")
    assert main(["plan", "--parallel", "--json", *shlex.split(words)]) == 0
    found = json.loads(capsys.readouterr().out)

    def told(name: str) -> str:
        """Return the seconds of the fastest mode with that name, or why no mode has any."""
        modes = [mode for mode in found["modes"] if mode["name"].startswith(name)]
        if not modes:
            return "refused"
        if not modes[0]["fits"]:
            return "does not fit"
        way = modes[0]["name"].split(" x ")[0]
        how = [way] if name == "tensor" else way.split(", ")[2:]  # a pipeline, or pieces of rows
        return ", ".join([format_seconds(modes[0]["step"]), *how])

    tokens = format_count(found["tokens_per_step"])
    assert " | ".join([tokens, *map(told, ("tiered", "ZeRO-2", "ZeRO-3", "tensor"))]) == cells
