"""Tests of docs/scaling.md: its table has the seconds of `plan --parallel`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from offload_trainer.cli import main
from offload_trainer.units import format_count, format_seconds

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
ROWS = re.findall(r"^\| `(--machine [^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("words", "cells"), ROWS, ids=[words for words, _ in ROWS])
def test_a_row_of_the_table_is_what_the_plan_says(
    words: str, cells: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    words = words.replace("--model Qwen/Qwen3-8B", f"--model {tmp_path} --scratch")
    assert main(["plan", "--parallel", "--json", *shlex.split(words)]) == 0
    found = json.loads(capsys.readouterr().out)

    def told(name: str) -> str:
        """Return the seconds of the fastest mode with that name, or why there is none."""
        modes = [mode for mode in found["modes"] if mode["name"].startswith(name)]
        if not modes:
            return "refused"
        if not modes[0]["fits"]:
            return "does not fit"
        ranks = f", {modes[0]['name'].split(' x ')[0]}" * name.startswith("tensor")
        return format_seconds(modes[0]["step"]) + ranks

    tokens = format_count(found["tokens_per_step"])
    assert " | ".join([tokens, *map(told, ("tiered", "ZeRO-2", "ZeRO-3", "tensor"))]) == cells


def test_the_page_has_rows() -> None:
    assert len(ROWS) >= 8
