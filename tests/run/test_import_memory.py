"""Tests of the memory of `import` and of `export --trainer`: some of the largest weights, not the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import HELPERS, run_script
from engine_bench import model_directory
from imported_state import assert_same_state, state_of
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


def grown(*words: object) -> int:
    done = run_script(HELPERS / "run_and_weigh.py", *words, own=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: int = json.loads(done.stdout.splitlines()[-1])["grown"]
    return found


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
    assert grown("import", source, tmp_path / "run", "--model", folder) < limit
    checkpoint = tmp_path / f"run/checkpoints/step-{STEP:08d}"
    assert_same_state(state_of(checkpoint), held)
    if writer == "trainer":
        assert grown("export", tmp_path / "run", tmp_path / "out") < limit
        written, given = (torch.load(path / "optimizer.pt")["state"] for path in (tmp_path / "out", source))
        assert written.keys() == given.keys()
        for number, moments in given.items():
            assert all(torch.equal(written[number][kind], tensor) for kind, tensor in moments.items())
