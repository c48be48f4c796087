"""Tests of Lion: it has the bits of its paper's algorithm in plain torch for every placement and over resumes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, ask, call
from engine_bench import Step, assert_same, batches, engine, masters, model_directory, train
from reference_lion import PlainLion
from safetensors.torch import load_file

import offload_trainer as ot
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.pages.stored_masters import read_store
from offload_trainer.optim.state_files import read_engine_state
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.state_formats import ADAMW, LION, state_format
from offload_trainer.settings import load_config

pytestmark = pytest.mark.usefixtures("nothing_is_small")

RATE = ["--lr", "3e-3"]
HOMES = {
    "in RAM": ["optim.kernel=native"],
    "by torch's kernel": [],
    "on the device": ["--optimizer", "gpu"],
    "on two drives and in RAM": ["--optimizer", "nvme", "--ram-fraction", "0.3"],
    "all on the drives": ["--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "optim.kernel=native"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "one", tmp_path / "two"]
    for drive in made:
        drive.mkdir()
    return made


@cache
def by_hand(model: Path, steps: int, betas: tuple[float, float]) -> tuple[list[Step], dict[str, torch.Tensor]]:
    with engine(model, "--engine", "plain", *RATE) as reference:
        groups = [{**group, "betas": betas, "lr": 3e-3} for group in reference._adam.param_groups]
        reference._adam = PlainLion(groups, betas=betas)
        return train(reference, batches(steps), lr=3e-3), masters(reference)


@pytest.mark.parametrize("home", HOMES)
def test_bits_of_plain_torch_in_every_placement(home: str, model: Path, drives: list[Path]) -> None:
    with engine(model, "optim.name=lion", *RATE, *HOMES[home], drives=drives) as ours:
        steps, weights = train(ours, batches(8), lr=3e-3), masters(ours)
    expected, right = by_hand(model, 8, (0.9, 0.99))
    assert steps == expected
    assert_same(weights, right)
    assert steps[-1][0] < steps[0][0]


def test_betas_are_the_configured_ones(model: Path) -> None:
    with engine(model, "optim.name=lion", "optim.betas=[0.7, 0.8]", *RATE) as ours:
        assert train(ours, batches(8), lr=3e-3) == by_hand(model, 8, (0.7, 0.8))[0]
    assert by_hand(model, 8, (0.7, 0.8))[0] != by_hand(model, 8, (0.9, 0.99))[0]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_checkpoint_has_one_moment_and_resumes_in_another_placement(
    moments: str, model: Path, drives: list[Path], tmp_path: Path
) -> None:
    words = ["optim.name=lion", f"optim.moment_dtype={moments}", *RATE]
    (tmp_path / "half").mkdir()
    with engine(model, *words, *HOMES["on two drives and in RAM"], drives=drives) as ours:
        steps = train(ours, batches(8)[:4], lr=3e-3)
        written = ours.snapshot().write(tmp_path / "half")
        steps += train(ours, batches(8)[4:], lr=3e-3)
        weights = masters(ours)
    assert written.keys() == {"master.safetensors", "exp_avg.safetensors"}
    ratio = written["exp_avg.safetensors"]["bytes"] / written["master.safetensors"]["bytes"]
    assert ratio == pytest.approx(1.0 if moments == "fp32" else 0.5, rel=0.02)
    assert read_engine_state(tmp_path / "half", rule=LION).rule == "lion"
    with engine(model, *words, *HOMES["in RAM"], load_weights=False) as other:
        other.load(tmp_path / "half")
        assert train(other, batches(8)[4:], lr=3e-3) == steps[4:]
        assert_same(masters(other), weights)
    if moments == "fp32":
        assert steps == by_hand(model, 8, (0.9, 0.99))[0]


def test_the_state_of_another_rule_is_refused(model: Path, tmp_path: Path) -> None:
    for rule, other in (("adamw", "lion"), ("lion", "adamw")):
        (tmp_path / rule).mkdir()
        with engine(model, f"optim.name={rule}") as ours:
            train(ours, batches(1))
            ours.snapshot().write(tmp_path / rule)
        with engine(model, f"optim.name={other}") as ours, pytest.raises(UserError, match=f"optim.name={rule}"):
            ours.load(tmp_path / rule)
    with engine(model, "--engine", "plain") as ours, pytest.raises(UserError, match="master, exp_avg of Lion"):
        ours.load(tmp_path / "lion")


def test_a_state_without_a_rule_is_adamws(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text('{"optimizer_steps": 3, "good_steps": 0, "states": "8bit"}')
    assert read_engine_state(tmp_path, rule=ADAMW).format == state_format("adamw", "8bit")
    with pytest.raises(UserError, match=r"of AdamW.* optim.name=adamw"):
        read_engine_state(tmp_path, rule=LION)


def test_masters_of_a_dead_run_are_read_by_its_manifest(model: Path, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    with engine(model, "optim.name=lion", *HOMES["all on the drives"], drives=[tmp_path / "drive"]) as ours:
        ours.offloaded.enable_manifest(model=tmp_path)
        train(ours, batches(2))
        ours.synchronize()  # the update may overlap what follows the step
        (index,) = tmp_path.glob("drive/offload-trainer/run-*/store.json")
        stored, weights = dict(read_store(index.parent).weights()), masters(ours)
        assert_same(stored, weights)
        told = json.loads(index.read_text())
        for wrong in ({"rule": "sgd"}, {"rule": "lion", "states": "8bit"}):
            index.write_text(json.dumps(told | wrong))
            with pytest.raises(UserError):
                read_store(index.parent)


def test_a_state_of_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text('{"optimizer_steps": 3, "rule": "lion", "states": "8bit"}')
    with pytest.raises(UserError, match="Lion has no moments in 8bit"):
        read_engine_state(tmp_path, rule=LION)


def test_the_command_trains_saves_resumes_and_exports(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    words = [*TINY, "optim.name=lion", *RATE, "--steps", 4, "--save-every", 2, "--nvme", tmp_path / "drive"]
    words += ["--optimizer", "nvme", "--ram-fraction", "0.5", "optim.schedule=constant", "train.eval_every=0"]
    whole = call(*words, output=tmp_path / "whole")
    assert "optimizer Lion: betas 0.9 and 0.99" in whole.text
    shutil.copytree(whole.output, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    (tmp_path / "half" / "metrics.jsonl").unlink()
    other = call(*words, "--ram-fraction", "1", output=tmp_path / "half")
    assert other.losses == whole.losses[2:]
    refused = call(*words, "--steps", 6, "optim.name=adamw", output=tmp_path / "half", check=False)
    assert "holds master, exp_avg of Lion, and this run updates by AdamW" in refused.text
    exported = ask("export", tmp_path / "half", tmp_path / "hf", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stderr
    held = load_file(tmp_path / "hf" / "model.safetensors")
    masters = load_file(whole.output / "checkpoints" / "step-00000004" / "master.safetensors")
    assert all(torch.equal(tensor, masters[name]) for name, tensor in held.items() if name in masters)
    assert "Lion, peak rate" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("home", [{"params": "gpu"}, {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}])
def test_a_session_supports_the_rule(home: dict[str, str], tmp_path: Path) -> None:
    def trained(network: torch.nn.Module, make: Any) -> list[float]:
        """Train with two parameter groups, one of which decays, and a scheduler; return the losses."""
        groups = [
            {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in network.parameters() if p.dim() < 2], "lr": 1e-3},
        ]
        optimizer = make(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        losses = []
        for step in range(8):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            loss = (network(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(3)]
    network = torch.nn.Sequential(*blocks)
    expected = copy.deepcopy(network)
    losses = trained(expected, lambda groups: PlainLion(groups, betas=(0.9, 0.99), lr=3e-3))
    (tmp_path / "drive").mkdir()
    keys = {"nvme": [str(tmp_path / "drive")], "dtype": "fp32", "page_size": 4096, "say": lambda line: None, **home}
    with ot.offload(network, rule="lion", **keys) as session:
        with pytest.raises(UserError, match="the session stores Lion's state: call lion"):
            session.adamw()
        assert trained(session.model, lambda groups: session.lion(groups, lr=3e-3)) == losses
        masters = dict(session.named_masters())
    assert all(torch.equal(masters[name], weight) for name, weight in expected.named_parameters())
    with pytest.raises(UserError, match=r"moment_dtype=8bit with rule=lion.* use bf16"):
        ot.offload(copy.deepcopy(expected), rule="lion", **keys | {"moment_dtype": "8bit"})


def state_bytes(*words: str) -> Iterator[int]:
    """Yield the planned bytes of state in RAM, of state elsewhere, and of checkpoints, on a machine with a GPU."""
    config = load_config(["--model", "gpt2-10b", "--dtype", "fp16", "--nvme", "/ssd", "--ram-fraction", "0.25", *words])
    source = resolve_model(config.model, seed=0)
    plan = make_plan(config, source.shape, read_machine("v100-32gb"))
    for name in ("state in RAM", "state", "checkpoints"):
        yield sum(item.bytes for item in plan.items if item.name == name)


def test_the_plan_counts_eight_bytes_a_parameter() -> None:
    shares = ["--gpu-fraction", "0"]
    for lion, adamw in zip(state_bytes("optim.name=lion", *shares), state_bytes(*shares), strict=True):
        assert lion == pytest.approx(adamw * 8 / 12, rel=1e-3)
        assert lion > 1e9


def test_the_plan_names_rule_and_betas() -> None:
    config = load_config(["--model", "gpt2-mini", "optim.name=lion"])
    assert config.optim.betas == (0.9, 0.99)
    plan = make_plan(config, resolve_model(config.model, seed=0).shape, read_machine("h200"))
    text = plan.describe()
    assert "optimizer Lion: betas 0.9 and 0.99" in text
    assert "fp32 master, fp32 moment: 8 B a parameter" in text
    assert "Lion on" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "plain"], "optim.name=lion belongs to --engine tiered, not to plain"),
        (["--engine", "deepspeed"], "optim.name=lion belongs to --engine tiered, not to deepspeed"),
        (["optim.moment_dtype=8bit"], "would undo; use bf16"),
        (["optim.eps=1e-6"], "which has no eps"),
    ],
)
def test_settings_that_lion_lacks_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(["optim.name=lion", *words])
