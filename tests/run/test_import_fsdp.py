"""Tests of importing what training with FSDP has saved: torch.distributed.checkpoint's directories and accelerate's."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import accelerate_fsdp_ranks as accelerated
import pytest
import torch
from engine_bench import batches, model_directory
from fsdp2_ranks import AFTER, BEFORE, LR, fsdp2_checkpoint
from imported_state import assert_same_state, continued, imported, state_of
from safetensors.torch import load_file
from uneven_targets import random_weights

from offload_trainer.checkpoint import read_state
from offload_trainer.errors import UserError
from offload_trainer.run.foreign.distributed_checkpoint import _Chunk, _Stored


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


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
TRAINERS = [(2, 2, SHARDED, "-"), (2, 2, FULL, "embed_tokens"), (2, 1, SHARDED, "embed_tokens"), (2, 1, FULL, "-")]
TRAINERS += [(1, 2, SHARDED, "layers.1."), (2, 2, SHARDED, "embed_tokens")]


@pytest.mark.parametrize(("ranks", "version", "kind", "frozen"), TRAINERS)
def test_a_trainers_checkpoint_of_fsdp(ranks: int, version: int, kind: str, frozen: str, tmp_path: Path) -> None:
    """State, frozen weights and next losses are those of FSDP; steps and schedule are those of the Trainer's files."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    losses = accelerated.fsdp_checkpoint(tmp_path, ranks=ranks, version=version, kind=kind, frozen=frozen)
    freezing = [] if frozen == "-" else [f"model.freeze=['{frozen}']"]
    source = tmp_path / f"checkpoint-{accelerated.BEFORE}"
    done = imported(source, tmp_path / "run", "--model", str(model), "--dtype", "fp32", *freezing)
    expected = tmp_path / "state"
    assert_same_state(state_of(done.checkpoint), state_of(expected))
    fixed = load_file(expected / "fixed.safetensors")
    held = load_file(done.checkpoint / "fixed.safetensors") if freezing else {}
    assert bool(fixed) == bool(freezing)
    assert held.keys() == fixed.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in fixed.items())
    assert read_state(done.checkpoint).step == accelerated.BEFORE
    assert f"--steps {accelerated.STEPS}" in done.words
    assert "optim.schedule_delay=1" in done.words
    data = batches((accelerated.BEFORE + accelerated.AFTER) * ranks)[accelerated.BEFORE * ranks :]
    words = ["--accumulate", str(ranks), "--engine", "plain", "optim.betas=[0.9, 0.95]", "optim.weight_decay=0.1"]
    found = continued(done.checkpoint, model, data, *words, *freezing, accumulate=ranks, lr=accelerated.LR)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-6, abs=1e-6)


def test_files_of_single_ranks_and_half_checkpoints_are_refused(tmp_path: Path) -> None:
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    source = tmp_path / "checkpoint-3"

    def refused(why: str) -> None:
        with pytest.raises(UserError, match=why):
            imported(source, tmp_path / "run", "--model", str(model))

    source.mkdir()
    (source / "pytorch_model_fsdp_rank0.bin").touch()
    refused(r"pytorch_model_fsdp_rank0\.bin holds parts of one rank.*SHARDED_STATE_DICT or FULL_STATE_DICT")
    torch.save({"model.norm.weight": torch.zeros(3)}, source / "pytorch_model_fsdp.bin")
    refused(r"optimizer\.bin is missing")
    torch.save({"state": {"model.norm.weight": {"momentum_buffer": torch.zeros(3)}}}, source / "optimizer.bin")
    refused("neither torch's Adam nor its AdamW, .* has momentum_buffer, expected exp_avg, exp_avg_sq, step")
    (source / "pytorch_model_fsdp_0").mkdir()
    refused("there is no optimizer_0, which holds the moments")


def test_chunks_of_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    """Chunks that overlap leave as many elements unset, although their number is right."""

    def tensor(*offsets: tuple[int, int]) -> torch.Tensor:
        chunks = []
        for number, offset in enumerate(offsets):
            path = tmp_path / f"{number}.distcp"
            torch.save(torch.full((2, 3), float(number)), path)
            chunks.append(_Chunk(offset, path, 0, path.stat().st_size))
        return _Stored("the checkpoint", {"w": (4, 3)}, {"w": chunks}).tensor("w")

    assert tensor((2, 0), (0, 0)).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    for offsets, why in (
        (((0, 0), (1, 0)), "the checkpoint: chunks of w overlap"),
        (((2, 0), (2, 0)), "the checkpoint: chunks of w overlap"),
        (((0, 0), (-2, 0)), r"a chunk of w ends at \[0, 3\], and its shape is \(4, 3\)"),
        (((0, 0), (3, 0)), r"a chunk of w ends at \[5, 3\]"),
        (((0, 0),), "the chunks of w have 6 elements"),
    ):
        with pytest.raises(UserError, match=why):
            tensor(*offsets)


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
