"""Tests of importing DeepSpeed's checkpoints: ZeRO-1, 2 and 3 of 1, 2 and 4 ranks, and universal ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from engine_bench import batches, model_directory
from imported_state import assert_same_state, continued, imported, state_of
from safetensors.torch import load_file
from synthetic_foreign import STEP, STEPS, random_state, write_trainer_state, write_zero
from transformers import AutoModelForCausalLM
from uneven_targets import random_weights
from zero_checkpoint_ranks import AFTER, BEFORE, LR, TAG, zero_checkpoint

from offload_trainer.checkpoint import read_state
from offload_trainer.errors import UserError

ZERO = {  # keyed by ZeRO stage and home of the optimizer
    "1": ["deepspeed.zero_stage=1", "--optimizer", "cpu"],
    "1 gpu": ["deepspeed.zero_stage=1", "--optimizer", "gpu"],
    "2": ["--params", "gpu", "--optimizer", "cpu"],
    "3": ["--params", "cpu", "--optimizer", "cpu"],
    "3 gpu": ["deepspeed.zero_stage=3", "--params", "gpu", "--optimizer", "gpu"],
}


CASES = [(zero, ranks, []) for zero in ZERO for ranks in (1, 2, 4)]
CASES += [(zero, 2, ["model.freeze=['embed_tokens']"]) for zero in ("1", "2", "3")]


@pytest.mark.ops
@pytest.mark.parametrize(("zero", "ranks", "freezing"), CASES)
def test_state_and_next_losses_match_deepspeed(zero: str, ranks: int, freezing: list[str], tmp_path: Path) -> None:
    """The imported state has DeepSpeed's bits, from its files and from its universal files, and goes on as it does."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    words = ["--dtype", "fp32", "model.activation_checkpointing=off", *freezing]
    losses = zero_checkpoint(tmp_path, *ZERO[zero], *words, ranks=ranks)
    expected = state_of(tmp_path / "state")
    masters = load_file(tmp_path / "masters.safetensors")
    assert all(torch.equal(masters[name], tensor) for name, tensor in expected["master"].items())
    given = ["--model", str(model), *words]
    for number, source in enumerate(["zero", f"zero/{TAG}", f"universal/{TAG}"]):
        done = imported(tmp_path / source, tmp_path / f"run{number}", *given)
        assert_same_state(state_of(done.checkpoint), expected)
        assert read_state(done.checkpoint).step == BEFORE
        assert (done.checkpoint / "engine.json").read_bytes() == (tmp_path / "state/engine.json").read_bytes()
        if freezing:
            fixed, held = (load_file(path / "fixed.safetensors") for path in (tmp_path / "state", done.checkpoint))
            assert list(fixed) == list(held) == ["model.embed_tokens.weight"]
            assert all(torch.equal(held[name], tensor) for name, tensor in fixed.items())
    data = batches((BEFORE + AFTER) * ranks)[BEFORE * ranks :]
    told = ["--accumulate", str(ranks), "--engine", "plain", *words]
    found = continued(done.checkpoint, model, data, *told, accumulate=ranks, lr=LR)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    assert done.words.startswith("--output")


def test_a_trainers_directory_of_deepspeed(tmp_path: Path) -> None:
    """The length of the run is the Trainer's; the schedule stands where DeepSpeed's scheduler does."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    names = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    state = random_state({name: p.detach() for name, p in names.items()})
    source = tmp_path / "checkpoint-2"
    write_zero(source, state)
    write_trainer_state(source)
    done = imported(source, tmp_path / "run", "--model", str(model), "--dtype", "fp32")
    assert_same_state(state_of(done.checkpoint), state)
    assert read_state(done.checkpoint).step == STEP
    assert f"--steps {STEPS}" in done.words
    assert "optim.schedule_delay=1" in done.words
    shutil.copy(model / "config.json", source)
    with pytest.raises(UserError, match=r"config\.json and no weights in safetensors, .* --model"):
        imported(source, tmp_path / "run0")
    path = source / f"global_step{STEP}/mp_rank_00_model_states.pt"
    about = torch.load(path)
    # DeepSpeed's schedulers count from -1, and torch's from 0; the second has not counted two steps that overflowed.
    for number, scheduler in enumerate(({"last_batch_iteration": 1}, {"last_epoch": 0, "base_lrs": [1e-3]})):
        torch.save(about | {"lr_scheduler": scheduler}, path)
        done = imported(source, tmp_path / f"run{number}", "--model", str(model))
        assert f"optim.schedule_delay={(2, 3)[number]}" in done.words


@pytest.mark.ops
def test_incomplete_and_other_checkpoints_are_refused(tmp_path: Path) -> None:
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    zero_checkpoint(tmp_path, *ZERO["2"], "--dtype", "fp32", "model.activation_checkpointing=off", ranks=2)
    given = ["--model", str(model)]
    tag = tmp_path / "zero" / TAG

    def without(name: str, why: str, *words: str) -> None:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tag, tmp_path / "copy")
        for path in (tmp_path / "copy").glob(name):
            path.unlink()
        with pytest.raises(UserError, match=why):
            imported(tmp_path / "copy", tmp_path / "run", *(words or given))

    without("*rank_1_*_optim_states.pt", "2 ranks have written it, and the optimizer files here are of ranks 0$")
    without("*_model_states.pt", r"there is no \*_model_states\.pt")
    other = model_directory(tmp_path / "other", "qwen3", tied=False, num_hidden_layers=6, intermediate_size=104)
    words = ["--model", str(other), "--scratch"]
    without("nothing", r"11 missing there: model\.layers\.5\.", *words)
    without("nothing", r"15 of another shape: model\.layers\.0\.mlp\.\S+ \(100, 72\), in the model \(104, 72\)", *words)
    without("nothing", "frozen by model.freeze, with moments there", *given, "model.freeze=['norm']")
    (tmp_path / "zero/latest").write_text("global_step9")
    with pytest.raises(UserError, match="names 'global_step9', which is not there"):
        imported(tmp_path / "zero", tmp_path / "run", *given)
    with pytest.raises(UserError, match=r"there is no config\.json of a model"):
        imported(tag, tmp_path / "run")
    assert not (tmp_path / "run").exists()
