"""Tests of the memory of `import`: some of the largest weights, not the model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_bench import model_directory
from forked_child import in_a_fork, watched_memory
from imported_state import assert_same_state, imported, state_of
from synthetic_foreign import STEP, State, random_state, write_fsdp, write_trainer
from transformers import AutoModelForCausalLM
from uneven_targets import random_weights

pytestmark = pytest.mark.slow

WRITERS = {"trainer": write_trainer, "fsdp": write_fsdp}
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
OWN = 40 << 20  # bytes for readers, models on the meta device and buffers of files


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A model directory and a state of 230 MB."""
    folder = model_directory(tmp_path_factory.mktemp("memory") / "model", "llama", tied=False, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(random_weights(folder), dtype=torch.float32)
    return folder, random_state({name: p.detach() for name, p in model.named_parameters()})


def grown(work: Callable[[], object], folder: Path) -> int:
    """Return by how much anonymous memory grows in a fork that does this work."""

    def weighed() -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what is free in this process must not hide what the work takes
        peak = watched_memory()
        before = peak()
        work()
        (folder / "grown").write_text(str(peak() - before))

    assert in_a_fork(weighed) == 0
    return int((folder / "grown").read_text())


@pytest.mark.parametrize("writer", WRITERS)
def test_an_import_holds_a_few_weights(writer: str, state: tuple[Path, State], tmp_path: Path) -> None:
    """Anonymous memory grows by less than six of the largest weights and a constant, a quarter of the state."""
    folder, held = state
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((folder / "config.json").read_bytes())
    WRITERS[writer](source, held)
    largest = max(tensor.nbytes for tensor in held["master"].values())
    whole = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())
    limit = 6 * largest + OWN
    assert limit < whole / 3
    assert grown(lambda: imported(source, tmp_path / "run", "--model", str(folder)), tmp_path) < limit
    checkpoint = tmp_path / f"run/checkpoints/step-{STEP:08d}"
    assert_same_state(state_of(checkpoint), held)
