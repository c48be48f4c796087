"""Stock DeepSpeed where it would be silently wrong: masters that begin rounded, and weights without a gradient."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_of_engines import model_directory
from conftest import environment
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.mark.ops
@pytest.mark.parametrize(("params", "optimizer"), [("gpu", "cpu"), ("cpu", "cpu"), ("cpu", "nvme")])
def test_masters_begin_unrounded_and_weights_without_a_gradient_are_refused(
    params: str, optimizer: str, tmp_path: Path
) -> None:
    """A bf16 run from an fp32 directory; later its last block is left out in one of two micro-batches."""
    model = model_directory(tmp_path / "model", "qwen3", tied=False)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32).save_pretrained(model)
    words = ["--params", params, "--optimizer", optimizer, "--accumulate", "2", "model.checkpointing=off"]
    script = Path(__file__).parent.with_name("deepspeed_alone.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, *words], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begun"]
    assert "11 of 58 weights got no gradient (model.layers.4." in found["refused"]
    assert "--engine tiered" in found["refused"]
    assert found["kept"]
