"""Tests under a cgroup's memory limit: runs that the plan allows succeed, and others are refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import KILL, LIMIT, Run, command, environment

pytestmark = [pytest.mark.slow(40), pytest.mark.box]

LLAMA = {"model_type": "llama", "vocab_size": 2048, "num_hidden_layers": 2, "tie_word_embeddings": False}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 0}
# Two steps of a model with random weights that `model_of` writes.
TWO_STEPS = ["--scratch", "--tokenizer", "builtin", "--steps", "2", "--save-every", "0", "train.eval_every=0"]
TWO_STEPS += ["--engine", "tiered", "--micro-batch", "1", "--dtype", "fp32", "data.validation=0"]
TWO_STEPS += ["model.activation_checkpointing=on", "placement.threads=2"]


def inside(box: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = f'echo $$ > {box}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "box", *command(*words)], capture_output=True, text=True, env=environment(), timeout=500
    )


def model_of(folder: Path, **shape: int) -> list[str]:
    """Write the configuration of a Llama of this shape; return the words that name it and keep its tokens apart."""
    (folder / "config.json").write_text(json.dumps(LLAMA | shape))
    return ["--model", str(folder), f"data.cache={folder}/cache"]


def finished(done: subprocess.CompletedProcess[str], output: Path) -> tuple[Run, dict]:
    assert done.returncode == 0, done.stderr[-2000:]
    return Run(done.returncode, done.stderr, output), json.loads((output / "plan.json").read_text())


def test_a_row_that_is_refused_would_be_killed(box: Path, tmp_path: Path) -> None:
    """A row of 8k tokens is refused, and killed if it runs all the same."""
    # A wide MLP and one narrow head, since the attention of a longer row would take most of the time.
    shape = {"hidden_size": 64, "intermediate_size": 16384, "num_attention_heads": 1, "head_dim": 16}
    words = [*TWO_STEPS, *model_of(tmp_path, **shape, max_position_embeddings=8192), "--seq-len", "8192"]
    refused = inside(box, *words, "--output", tmp_path / "refused")
    assert refused.returncode == 2
    assert "ram needs" in refused.stderr
    assert not (tmp_path / "refused").exists()
    assert inside(box, *words, "--force", "--output", tmp_path / "forced").returncode == -KILL


def test_a_model_runs_in_one_weight_buffer_where_two_do_not_fit(box: Path, drive: Path, tmp_path: Path) -> None:
    """The plan lowers the number without an argument."""
    shape = {"hidden_size": 1024, "intermediate_size": 14336, "num_attention_heads": 8, "max_position_embeddings": 1024}
    words = [*TWO_STEPS, *model_of(tmp_path, **shape), "--seq-len", "128", "--nvme", drive, "--ram-fraction", "0"]
    words += ["placement.gradients=nvme", "tiered.overlap=off", "tiered.page_size=1048576"]
    run, plan = finished(inside(box, *words, "--output", tmp_path / "run"), tmp_path / "run")
    assert (plan["chosen"]["params"], plan["chosen"]["sizes"]["unit_buffers"]) == ("nvme", 1)
    assert run.steps[-1]["host_rss_bytes"] <= LIMIT
    assert len(run.losses) == 2
    assert run.losses[1] < run.losses[0]
