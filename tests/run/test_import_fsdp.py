"""Tests of importing directories of torch.distributed.checkpoint that training with FSDP2 has saved."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from engine_bench import batches, model_directory
from fsdp2_ranks import AFTER, BEFORE, LR, fsdp2_checkpoint
from imported_state import assert_same_state, continued, imported, state_of
from uneven_targets import random_weights

from offload_trainer.checkpoint import read_state
from offload_trainer.errors import UserError


@pytest.mark.parametrize(("ranks", "flat"), [(2, False), (2, True), (1, False)])
def test_state_and_next_losses_are_fsdps(ranks: int, flat: bool, tmp_path: Path) -> None:
    """Sizes of the model do not divide by two, so ranks hold unequal chunks."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    losses = fsdp2_checkpoint(tmp_path, ranks=ranks, flat=flat)
    done = imported(tmp_path / "dcp", tmp_path / "run", "--model", str(model), "--dtype", "fp32")
    assert_same_state(state_of(done.checkpoint), state_of(tmp_path / "state"))
    assert read_state(done.checkpoint).step == BEFORE
    assert "optim.weight_decay=0.1" in done.words
    data = batches((BEFORE + AFTER) * ranks)[BEFORE * ranks :]
    words = ["--accumulate", str(ranks), "--engine", "plain", "optim.betas=[0.9, 0.95]", "optim.weight_decay=0.1"]
    found = continued(done.checkpoint, model, data, *words, accumulate=ranks, lr=LR)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-6, abs=1e-6)


class Bomb:
    """An object whose pickle creates a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    fsdp2_checkpoint(tmp_path, ranks=1)
    given = ["--model", str(model)]

    def refused(why: str, *words: str) -> None:
        with pytest.raises(UserError, match=why):
            imported(tmp_path / "copy", tmp_path / "run", *(words or given))
        assert not (tmp_path / "run").exists()

    shutil.copytree(tmp_path / "dcp", tmp_path / "copy")
    other = model_directory(tmp_path / "other", "qwen3", tied=False, num_hidden_layers=6)
    refused(r"11 missing there: model\.layers\.5\.", "--model", str(other), "--scratch")
    refused("frozen by model.freeze, with moments there", *given, "model.freeze=['norm']")
    file = next((tmp_path / "copy").glob("*.distcp"))
    with open(file, "r+b") as cut:
        cut.truncate(file.stat().st_size // 2)
    refused(r"\.distcp ends after \d+ bytes; \S+ needs \d+ more")
    file.unlink()
    refused(r"\.distcp cannot be read")
    (tmp_path / "copy/.metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refused(r"\.metadata cannot be read: it holds a pathlib\.Path")
    assert not (tmp_path / "exploded").exists()
