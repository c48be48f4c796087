"""Tests of importing checkpoints of transformers' Trainer: its state bit for bit, and its next losses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ask, call
from engine_bench import VOCABULARY, model_directory
from imported_state import LENGTH, Recording, assert_same_state, continued, imported, same_batch, same_rows, state_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from uneven_targets import random_weights

from offload_trainer.checkpoint import read_state
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.settings import load_config
from offload_trainer.trainer import learning_rate

LR, STEPS, HALF = 1e-2, 6, 3
SETTINGS = ["optim.betas=[0.8, 0.99]", "optim.eps=1e-07", "optim.weight_decay=0.1", "optim.max_grad_norm=0.5"]
# The frozen weights leave gaps between the numbers that the optimizer gives to weights and the model's order.
MODELS: dict[str, tuple[str, bool, list[str]]] = {
    "gpt2, tied": ("gpt2", True, []),
    "qwen3, frozen": ("qwen3", False, ["embed_tokens", r"layers\.1\."]),
}


def trained(folder: Path, name: str, *, frozen: list[str], tied: bool, **changes: Any) -> Recording:
    """Train a small model with a Trainer, all of whose rows are the same, so that their order changes nothing."""
    model = AutoModelForCausalLM.from_pretrained(
        random_weights(model_directory(folder / "model", name, tied=tied)), dtype=torch.float32
    )
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, parameter_name) for pattern in frozen))
    words: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": HALF,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.8,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Recording(model, TrainingArguments(str(folder / "out"), **(words | changes)), train_dataset=same_rows())
    trainer.train()
    return trainer


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Path, list]:
    name, tied, frozen = MODELS[request.param]
    folder = tmp_path_factory.mktemp("source")
    return trained(folder, name, frozen=frozen, tied=tied), folder / "out", frozen


def state_in(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the live optimizer's state by name; parameters and moments are matched by identity."""
    found: dict[str, dict[str, torch.Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            found["master"][name] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[kind][name] = trainer.optimizer.state[parameter][kind]
    return found


def freezing(frozen: list[str]) -> list[str]:
    return [f"model.freeze={json.dumps(frozen)}"] if frozen else []


def test_state_is_the_trainers_bit_for_bit(source: tuple[Recording, Path, list], tmp_path: Path) -> None:
    trainer, output, frozen = source
    done = imported(output / f"checkpoint-{STEPS}", tmp_path / "run", *freezing(frozen), "--dtype", "fp32")
    assert_same_state(state_of(done.checkpoint), state_in(trainer))
    assert read_state(done.checkpoint).step == STEPS
    told = json.loads((done.checkpoint / "engine.json").read_text())
    assert (told["optimizer_steps"], told["weight_steps"]) == (STEPS, {})
    fixed = {name: p.detach() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    if fixed:
        held = load_file(done.checkpoint / "fixed.safetensors")
        assert held.keys() == fixed.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in fixed.items())
    assert bool(fixed) == bool(frozen)
    assert "optim.lr=0.01" in done.words
    assert "optim.betas=[0.8, 0.99]" in done.words
    assert f"--steps {STEPS}" in done.words


def test_the_next_losses_are_the_trainers(source: tuple[Recording, Path, list], tmp_path: Path) -> None:
    """An engine that loads the checkpoint of step 3 has the losses that the Trainer had in steps 4 to 6."""
    trainer, output, frozen = source
    checkpoint = output / f"checkpoint-{HALF}"
    done = imported(checkpoint, tmp_path / "run", *freezing(frozen), "--dtype", "fp32")
    told = [*SETTINGS, *freezing(frozen), "--accumulate", "2", "--ram-fraction", "1"]
    found = continued(done.checkpoint, checkpoint, [same_batch()] * 2 * (STEPS - HALF), *told, accumulate=2, lr=LR)
    expected = [sum(trainer.losses[2 * step : 2 * step + 2]) for step in range(HALF, STEPS)]
    assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_the_command_resumes_from_an_import(tmp_path: Path) -> None:
    """`import` and then the training command: its losses are those of torch's AdamW going on from the same files."""
    tokenizer = load_tokenizer("builtin")
    trainer = trained(
        tmp_path, "gpt2", frozen=[], tied=True, max_steps=2, save_steps=2, adam_beta1=0.9, adam_beta2=0.95
    )
    checkpoint = tmp_path / "out/checkpoint-2"
    text = tmp_path / "text.txt"
    text.write_text(("The quick brown fox jumps over the lazy dog. " * 40 + "\n") * 4)
    ids = torch.tensor([id_ % VOCABULARY for id_ in tokenizer(text.read_text())["input_ids"]])
    tokens = tmp_path / "tokens.bin"
    ids.to(torch.int16).numpy().tofile(tokens)
    run = tmp_path / "run"
    asked = ask("import", checkpoint, run, "--dtype", "fp32", "optim.schedule=constant", "optim.warmup_steps=0")
    assert asked.returncode == 0, asked.stderr
    assert f"{checkpoint} (transformers' Trainer), step 2" in asked.stdout
    assert "learning rate of step 3: 0.01 in the source; 0.01 here" in asked.stdout
    assert "go on with: offload-train --dtype fp32" in asked.stdout
    assert f"--output {run}" in asked.stdout
    assert "has no tokenizer: name one for the run with --tokenizer" in asked.stderr
    words = ["--model", checkpoint, "--dtype", "fp32", "--data", tokens, "--tokenizer", "builtin", "--lr", LR]
    words += ["optim.schedule=constant", "optim.warmup_steps=0", "data.shuffle=false"]
    words += ["optim.eps=1e-07", "optim.weight_decay=0.1", "optim.max_grad_norm=0.5", "placement.threads=1"]
    words += ["--seq-len", LENGTH, "--micro-batch", 1, "--steps", 5, "optim.kernel=torch"]
    done = call(*words, output=run)
    assert [step["step"] for step in done.steps] == [3, 4, 5]
    assert "train.steps is 5; step-00000002 was saved with 2" in done.text
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    decays = trainer.get_decay_parameter_names(model)
    named = dict(model.named_parameters())
    groups = [{"params": [p for name, p in named.items() if (name in decays) == wanted]} for wanted in (True, False)]
    adam = torch.optim.AdamW(groups)
    adam.load_state_dict(torch.load(checkpoint / "optimizer.pt"))
    expected = []
    for step in range(3):
        inputs = ids[step * LENGTH : (step + 1) * LENGTH + 1][None]
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        expected.append(float(loss.detach()))
    assert done.losses == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_next_rates_are_the_trainers(kind: str, tmp_path: Path) -> None:
    """With the words that the command prints, steps 3 to 6 have the rates that the Trainer has logged for them."""
    for half in (1, HALF):  # within the warm-up and after it
        folder = tmp_path / str(half)
        words = {"lr_scheduler_type": kind, "warmup_steps": 2, "logging_steps": 1, "save_steps": half}
        trainer = trained(folder, "qwen3", frozen=[], tied=False, **words)
        logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        schedule = [f"optim.schedule={kind.split('_')[0]}", "optim.warmup_steps=2", "optim.final_lr_ratio=0"]
        done = imported(folder / f"out/checkpoint-{half}", folder / "run", *schedule)
        assert "They differ" not in done.rates
        optim = load_config([*schedule, *shlex.split(done.words)]).optim
        found = [learning_rate(step, optim, steps=STEPS) for step in range(half, STEPS)]
        assert found == pytest.approx(logged[half:], rel=1e-9, abs=1e-18)
        done = imported(folder / f"out/checkpoint-{half}", folder / "other", *schedule, "optim.warmup_steps=5")
        assert "They differ: give this command and the run the source's optim.schedule" in done.rates


def copy_of(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_overflows_hold_the_schedule_up_there_and_here(source: tuple[Recording, Path, list], tmp_path: Path) -> None:
    _, output, frozen = source
    checkpoint = copy_of(output / f"checkpoint-{HALF}", tmp_path / "held up")
    scheduler = torch.load(checkpoint / "scheduler.pt")
    torch.save(scheduler | {"last_epoch": HALF - 2}, checkpoint / "scheduler.pt")
    assert "optim.schedule_delay=3" in imported(checkpoint, tmp_path / "run", *freezing(frozen)).words


# -- what is refused ---------------------------------------------------------------------------------------------------


def changed(folder: Path, change: Any) -> None:
    saved = torch.load(folder / "optimizer.pt")
    change(saved)
    torch.save(saved, folder / "optimizer.pt")


def all_groups(saved: dict[str, Any], **values: Any) -> None:
    for group in saved["param_groups"]:
        group |= values


REFUSED: dict[str, tuple[Any, str]] = {
    "amsgrad": (lambda saved: all_groups(saved, amsgrad=True), "its optimizer has amsgrad=True"),
    "RAdam": (
        lambda saved: [group.pop("amsgrad") for group in saved["param_groups"]],
        "neither Adam nor AdamW: its groups have no amsgrad",
    ),
    "another shape": (
        lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)),
        r"1 moments do not have the shapes of the model's weights, the first: parameter 0 \(3,\)",
    ),
    "L2 decay": (
        lambda saved: all_groups(saved, weight_decay=0.1, decoupled_weight_decay=False),
        r"Adam with weight_decay=0\.1 added to the gradient",
    ),
    "SGD": (
        lambda saved: (saved.update(state={0: {"momentum_buffer": torch.zeros(2)}}), all_groups(saved))[0],
        "neither torch's Adam nor its AdamW: parameter 0 has momentum_buffer, expected exp_avg, exp_avg_sq, step",
    ),
    "fewer parameters": (
        lambda saved: saved["param_groups"][0]["params"].pop(),
        r"groups of \[\d+, \d+\] parameters; the model has \d+ with weight decay and \d+ without",
    ),
    "a negative second moment": (
        lambda saved: saved["state"][0]["exp_avg_sq"].fill_(-1),
        r"exp_avg_sq of \S+: \d+ of \d+ values are NaN, infinite or negative",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_optimizers_and_other_models_are_refused(
    case: str, source: tuple[Recording, Path, list], tmp_path: Path
) -> None:
    _, output, frozen = source
    folder = copy_of(output / f"checkpoint-{STEPS}", tmp_path / "changed")
    change, told = REFUSED[case]
    changed(folder, change)
    with pytest.raises(UserError, match=told):
        imported(folder, tmp_path / "run", *freezing(frozen))
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".run*"))


class Other:
    """A class that no checkpoint needs."""


@pytest.mark.slow
def test_unreadable_checkpoints_are_refused(source: tuple[Recording, Path, list], tmp_path: Path) -> None:
    _, output, frozen = source
    folder = copy_of(output / f"checkpoint-{STEPS}", tmp_path / "changed")
    changed(folder, lambda saved: saved.update(extra=Other()))
    words = freezing(frozen)
    with pytest.raises(UserError, match=r"optimizer\.pt holds a test_import_trainer\.Other, and an import reads"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"optimizer\.pt cannot be read as a file of torch\.save"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint that can be imported.*It holds .*trainer_state\.json"):
        imported(folder, tmp_path / "run", *words)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine").touch()
    with pytest.raises(UserError, match="already holds something"):
        imported(output / f"checkpoint-{STEPS}", tmp_path / "run", *words)
    with pytest.raises(UserError, match=r"optim\.name=muon"):
        imported(output / f"checkpoint-{STEPS}", tmp_path / "other", *words, "optim.name=muon")


def test_freezing_that_does_not_fit_is_refused(source: tuple[Recording, Path, list], tmp_path: Path) -> None:
    _, output, frozen = source
    words = [] if frozen else ["model.freeze=['mlp']"]
    with pytest.raises(UserError, match=r"groups of \[\d+, \d+\] parameters; .* Freeze with model\.freeze"):
        imported(output / f"checkpoint-{STEPS}", tmp_path / "run", *words)
