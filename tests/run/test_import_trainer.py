"""Tests of importing checkpoints of transformers' Trainer: its state bit for bit, its rates and its loss scales."""

import ctypes
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ask, call
from engine_bench import VOCABULARY, assert_same, batches, model_directory
from forked_child import in_a_fork, watched_memory
from hf_trainers import arguments
from safetensors.torch import load_file
from synthetic_foreign import (
    STEP,
    State,
    assert_same_state,
    imported,
    model_and_state,
    state_of,
    write_fsdp,
    write_trainer,
)
from transformers import AutoModelForCausalLM, Trainer
from uneven_targets import random_weights

from offload_trainer.errors import UserError
from offload_trainer.optim.loss_scale import LossScale
from offload_trainer.optim.state_files import read_engine_state
from offload_trainer.plan.tiered.state_formats import ADAMW
from offload_trainer.run.checkpoint import read_state
from offload_trainer.run.loop import learning_rate
from offload_trainer.settings import load_config

LR, STEPS, HALF = 1e-2, 6, 3
SETTINGS = ["optim.betas=[0.8, 0.99]", "optim.eps=1e-07", "optim.weight_decay=0.1", "optim.max_grad_norm=0.5"]
# The frozen weights leave gaps between the numbers that the optimizer gives to weights and the model's order.
MODELS: dict[str, tuple[str, bool, list[str]]] = {
    "gpt2, tied": ("gpt2", True, []),
    "qwen3, frozen": ("qwen3", False, ["embed_tokens", r"layers\.1\."]),
}


def trained(folder: Path, name: str, *, frozen: list[str], tied: bool, **changes: Any) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(
        random_weights(model_directory(folder / "model", name, tied=tied)), dtype=torch.float32
    )
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, parameter_name) for pattern in frozen))
    words = {"max_steps": STEPS, "save_steps": HALF, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    words |= {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-7, "eval_strategy": "no"} | changes
    rows = [{"input_ids": row, "labels": row} for batch in batches(4) for row in batch.inputs]
    trainer = Trainer(model, arguments(folder / "out", **words), train_dataset=rows)
    trainer.train()
    return trainer


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path, list]:
    name, tied, frozen = MODELS[request.param]
    folder = tmp_path_factory.mktemp("source")
    freezing = [f"model.freeze={json.dumps(frozen)}"] if frozen else []
    return trained(folder, name, frozen=frozen, tied=tied), folder / "out", freezing


@pytest.fixture
def copied(source: tuple[Trainer, Path, list], tmp_path: Path) -> tuple[Path, list[str]]:
    """Return a copy of the last checkpoint, and the words that freeze what it did not train."""
    _, output, freezing = source
    return Path(shutil.copytree(output / f"checkpoint-{STEPS}", tmp_path / "copied")), freezing


def test_state_is_the_trainers_bit_for_bit(source: tuple[Trainer, Path, list], tmp_path: Path) -> None:
    trainer, output, freezing = source
    words = [*freezing, "--dtype", "fp32", "optim.moment_dtype=8bit", "optim.master_dtype=bf16"]
    done = imported(output / f"checkpoint-{STEPS}", tmp_path / "run", *words)
    optim = json.loads((done.checkpoint / "run.json").read_text())["config"]["optim"]
    assert optim["moment_dtype"] == optim["master_dtype"] == "fp32"
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    state = trainer.optimizer.state  # by the parameters' identity
    expected = {kind: {name: state[p][kind] for name, p in trained.items()} for kind in ("exp_avg", "exp_avg_sq")}
    expected["master"] = {name: p.detach() for name, p in trained.items()}
    assert_same_state(state_of(done.checkpoint), expected)
    assert read_state(done.checkpoint).step == STEPS
    identity = json.loads((done.checkpoint / "MANIFEST.json").read_text())["identity"]
    assert identity["initial weights"] is identity["seed"] is None  # compared with nothing at a resume
    told = json.loads((done.checkpoint / "engine.json").read_text())
    assert (told["optimizer_steps"], told["weight_steps"]) == (STEPS, {})
    fixed = {name: p.detach() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    if fixed:
        assert_same(load_file(done.checkpoint / "fixed.safetensors"), fixed)
    assert bool(fixed) == bool(freezing)
    assert "optim.lr=0.01" in done.words
    assert "optim.betas=[0.8, 0.99]" in done.words
    assert f"--steps {STEPS}" in done.words


@pytest.mark.slow
def test_the_command_resumes_from_an_import(source: tuple[Trainer, Path, list], tmp_path: Path) -> None:
    _, output, freezing = source
    checkpoint, run = output / f"checkpoint-{HALF}", tmp_path / "run"
    words = ["--dtype", "fp32", "optim.schedule=constant", "optim.warmup_steps=0", *freezing]
    asked = ask("import", checkpoint, run, *words)
    assert asked.returncode == 0, asked.stderr
    assert f"{checkpoint} (transformers' Trainer), step {HALF}" in asked.stdout
    assert f"learning rate of step {HALF + 1}: 0.01 in the source; 0.01 here" in asked.stdout
    assert "go on with: offload-train --dtype fp32" in asked.stdout
    assert f"--output {run}" in asked.stdout
    assert "has no tokenizer: name one for the run with --tokenizer" in asked.stderr
    tokens = tmp_path / "tokens.bin"
    (torch.arange(9000) % VOCABULARY).to(torch.int16).numpy().tofile(tokens)
    words += ["--model", checkpoint, "--data", tokens, "--tokenizer", "builtin", "--lr", LR, *SETTINGS]
    words += ["--seq-len", 24, "--micro-batch", 1, "--steps", 5, "placement.threads=1"]
    done = call(*words, output=run)
    assert [step["step"] for step in done.steps] == [4, 5]
    assert f"train.steps is 5; step-{HALF:08d} was saved with {STEPS}" in done.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_next_rates_are_the_trainers(kind: str, tmp_path: Path) -> None:
    """With the words that the command prints, steps 3 to 6 have the rates that the Trainer has logged for them."""
    words = {"lr_scheduler_type": kind, "warmup_steps": 2, "logging_steps": 1, "save_steps": 1}
    trainer = trained(tmp_path, "qwen3", frozen=[], tied=False, **words)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    schedule = [f"optim.schedule={kind.split('_')[0]}", "optim.warmup_steps=2", "optim.final_lr_ratio=0"]
    for half in (1, HALF):  # within the warm-up and after it
        folder, checkpoint = tmp_path / str(half), tmp_path / f"out/checkpoint-{half}"
        done = imported(checkpoint, folder / "run", *schedule)
        assert "They differ" not in done.rates
        optim = load_config([*schedule, *shlex.split(done.words)]).optim
        found = [learning_rate(step, optim, steps=STEPS) for step in range(half, STEPS)]
        assert found == pytest.approx(logged[half:], rel=1e-9, abs=1e-18)
        done = imported(checkpoint, folder / "other", *schedule, "optim.warmup_steps=5")
        assert "They differ: give this command and the run the source's optim.schedule" in done.rates


def test_overflows_hold_the_schedule_up_there_and_here(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    checkpoint, words = copied
    scheduler = torch.load(checkpoint / "scheduler.pt")
    torch.save(scheduler | {"last_epoch": STEPS - 2}, checkpoint / "scheduler.pt")
    assert "optim.schedule_delay=3" in imported(checkpoint, tmp_path / "run", *words).words


# -- what is refused ---------------------------------------------------------------------------------------------------


# What is changed in optimizer.pt's groups and state, and the refusal
REFUSED: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda groups, _: [group.update(amsgrad=True) for group in groups], "its optimizer has amsgrad=True"),
    (lambda groups, _: [group.pop("amsgrad") for group in groups], "nor AdamW: its groups have no amsgrad"),  # RAdam
    (
        lambda _, state: state[0].update(exp_avg=torch.zeros(3)),
        r"1 moments do not have the shapes of the model's weights, the first: parameter 0 \(3,\)",
    ),
    (
        lambda groups, _: [group.update(weight_decay=0.1, decoupled_weight_decay=False) for group in groups],
        r"Adam with weight_decay=0\.1 added to the gradient",
    ),
    (
        lambda _, state: state.update({0: {"momentum_buffer": torch.zeros(2)}}),  # SGD
        "neither torch's Adam nor its AdamW: parameter 0 has momentum_buffer, expected exp_avg, exp_avg_sq, step",
    ),
    (
        lambda groups, _: groups[0]["params"].pop(),
        r"groups of \[\d+, \d+\] parameters; the model has .* Freeze with model\.freeze",
    ),
    (
        lambda _, state: state[0]["exp_avg_sq"].fill_(-1),
        r"exp_avg_sq of \S+: \d+ of \d+ values are NaN, infinite or negative",
    ),
]


def test_other_optimizers_and_other_models_are_refused(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, words = copied
    whole = (folder / "optimizer.pt").read_bytes()
    for change, told in REFUSED:
        saved = torch.load(io.BytesIO(whole))
        change(saved["param_groups"], saved["state"])
        torch.save(saved, folder / "optimizer.pt")
        with pytest.raises(UserError, match=told):
            imported(folder, tmp_path / "run", *words)
        assert not (tmp_path / "run").exists()
        assert not list(tmp_path.glob(".run*"))


class Other:
    """A class that no checkpoint needs."""


@pytest.mark.slow
def test_unreadable_checkpoints_are_refused(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, words = copied
    with pytest.raises(UserError, match=r"optim\.name=muon"):
        imported(folder, tmp_path / "run", *words, "optim.name=muon")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    with pytest.raises(UserError, match="already holds something"):
        imported(folder, tmp_path / "taken", *words)
    torch.save(torch.load(folder / "optimizer.pt") | {"extra": Other()}, folder / "optimizer.pt")
    with pytest.raises(UserError, match=r"optimizer\.pt holds a test_import_trainer\.Other, and an import reads"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"optimizer\.pt cannot be read as a file of torch\.save"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint that can be imported.*It holds .*trainer_state\.json"):
        imported(folder, tmp_path / "run", *words)


def test_a_loss_scale_is_the_scalers(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A run in fp16 goes on with the scale, the window, and the good steps in it, that torch's scaler has."""
    folder, words = copied
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
    scaler.scale(torch.ones(1))  # makes the counters that an untouched scaler does not have
    for changes, told in (({"scale": float("inf")}, "scale should .* and is inf"), ({"growth_interval": 0}, "growth")):
        torch.save(scaler.state_dict() | changes, folder / "scaler.pt")
        with pytest.raises(UserError, match=rf"scaler\.pt has no loss scale to go on with: {told}"):
            imported(folder, tmp_path / "run", *words, "--dtype", "fp16")
    torch.save({}, folder / "scaler.pt")  # the state of one that is switched off
    imported(folder, tmp_path / "switched off", *words, "--dtype", "fp16")
    torch.save(scaler.state_dict() | {"_growth_tracker": 3}, folder / "scaler.pt")
    notes: list[str] = []
    done = imported(folder, tmp_path / "run", *words, "--dtype", "fp16", notes=notes)
    assert read_engine_state(done.checkpoint, rule=ADAMW).loss_scale == LossScale(2.0**14, 5, good_steps=3)
    assert any("the loss scale goes on at 16384, after 3 steps without overflow" in note for note in notes)


# -- memory: some of the largest weights, not the model ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_trainer, write_fsdp])
def test_an_import_holds_a_few_weights(write: Callable[[Path, State], None], tmp_path: Path) -> None:
    """Anonymous memory grows by less than six of the largest weights and a constant, a quarter of the state."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
    folder, held = model_and_state(tmp_path, "llama", **sizes)  # a state of 230 MB
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((folder / "config.json").read_bytes())
    write(source, held)
    largest = max(tensor.nbytes for tensor in held["master"].values())
    whole = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())
    limit = 6 * largest + (40 << 20)  # readers, models on the meta device and buffers of files
    assert limit < whole / 3

    def weighed() -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what is free in this process must not hide what the import takes
        peak = watched_memory()
        before = peak()
        imported(source, tmp_path / "run", "--model", str(folder))
        assert peak() - before < limit

    assert in_a_fork(weighed) == 0
    checkpoint = tmp_path / f"run/checkpoints/step-{STEP:08d}"
    assert_same_state(state_of(checkpoint), held)
