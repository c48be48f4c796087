"""Test that transformers 4 computes exports as the installed transformers does."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from fresh_environment import installed_environment
from published_models import MODELS, read, write

from offload_trainer.config import ModelSection
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.export.directory import write_model
from offload_trainer.export.sources import Source
from offload_trainer.model.loader import resolve_model
from offload_trainer.run.directory import keep_model

SCRIPT = Path(__file__).resolve().parents[1] / "helpers/published_models.py"


def exported(given: Path, place: Path, *, dtype: str) -> Path:
    """Export the weights of `given` as a run that began from them would, without a step of training."""
    source = resolve_model(ModelSection(name=str(given)), seed=0)
    keep_model(place / "run", source, dtype=torch.float32, tokenizer=load_tokenizer(str(given)), end_of_text=None)
    weights = dict(source.weights())
    whole = Source(
        shapes={name: tuple(tensor.shape) for name, tensor in weights.items()},
        weights=lambda: iter(weights.items()),
        read=weights.__getitem__,
        model=place / "run",
        description="",
        card=lambda _: "",
    )
    write_model(whole.with_buffers(), place / dtype, dtype=dtype)
    return place / dtype


@pytest.mark.slow
@pytest.mark.network
def test_both_releases_of_transformers_read_an_export_alike(tmp_path: Path) -> None:
    """Sources of either release give equal ids and logits in both."""
    there = installed_environment(tmp_path, "transformers==4.57.6", "sympy", "networkx", "jinja2")
    (tmp_path / "old").mkdir()
    python(there, "write", tmp_path / "old")
    for name in MODELS:
        write(tmp_path / "new" / name, name)
    exports = [
        exported(tmp_path / age / name, tmp_path / f"{age}-{name}", dtype=dtype)
        for age in ("old", "new")
        for name in MODELS
        for dtype in ("fp32", "bf16")
    ]
    theirs = json.loads(python(there, "read", *exports))
    for directory, old in zip(exports, theirs, strict=True):
        ours = read(directory)
        logits = torch.tensor(ours.pop("logits"))
        assert logits.std() > 0.5
        assert torch.equal(torch.tensor(old.pop("logits")), logits), directory
        assert old == ours, directory


def python(there: dict[str, str], *words: object) -> str:
    command = ["python", str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-3000:]}"
    return done.stdout
