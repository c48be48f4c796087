"""Tests of the Trainer's switches over an offloaded model: each has the stock result, or is refused with a remedy."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare_trainers import assert_same, told, weights
from hf_trainers import arguments, loaded, model_folder, ours, rows, stock
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, Trainer

from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded, session_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def test_neftune(folder: Path, drive: Path, tmp_path: Path) -> None:
    """Noise on the embeddings is drawn as in the stock Trainer, not in evaluations, and its hook is removed."""
    words: dict[str, Any] = {"max_steps": 6, "eval_steps": 3, "save_strategy": "no"}
    without = stock(folder, tmp_path / "without", **words)
    without.train()
    words["neftune_noise_alpha"] = 5.0
    expected = stock(folder, tmp_path / "stock", **words)
    expected.train()
    assert told(expected)[0]["loss"] != told(without)[0]["loss"]
    with loaded(folder, drive) as model:
        embeddings = model.get_input_embeddings()
        before = len(embeddings._forward_hooks)
        trainer = ours(model, tmp_path / "ours", **words)
        trainer.train()
        assert told(trainer) == told(expected)
        assert len(embeddings._forward_hooks) == before
        assert not hasattr(embeddings, "neftune_noise_alpha")
        trainer.save_model()
    expected.save_model()
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "stock"))


class Hub:
    """A hub that keeps each push as a directory, without the files that the caller ignores."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pushes: list[tuple[str, Path]] = []  # (path in the repository, copy of what was pushed)

    def create_repo(self, name: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=name)

    def upload_folder(
        self,
        *,
        folder_path: str,
        path_in_repo: str = "",
        ignore_patterns: list[str] | None = None,
        run_as_future: bool = False,
        **_: Any,
    ) -> Future[None] | None:
        copy = self.root / str(len(self.pushes))
        source = Path(folder_path)
        names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, copy / name)
        self.pushes.append((path_in_repo, copy))
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: made)
    return made


PUSHES = {"push_to_hub": True, "hub_model_id": "someone/model", "eval_strategy": "no", "save_steps": 2, "max_steps": 4}


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_pushes_hold_a_model_and_no_state(folder: Path, drive: Path, hub: Hub, tmp_path: Path) -> None:
    """Each save and the end push the stock Trainer's model, which transformers loads, and nothing of the session."""
    with loaded(folder, drive) as model:
        trainer = ours(model, tmp_path / "ours", **PUSHES)
        trainer.train()
        trainer.push_to_hub()
        assert (tmp_path / "ours/checkpoint-2/offload").is_dir()
    expected = stock(folder, tmp_path / "stock", **(PUSHES | {"push_to_hub": False}))
    expected.train()
    files = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
    assert [place for place, _ in hub.pushes] == ["", "", ""]
    assert [names_in(copy) for _, copy in hub.pushes] == [files, files, files | {"README.md"}]
    for (_, copy), step in zip(hub.pushes, (2, 4, 4), strict=True):
        assert_same(weights(copy), weights(tmp_path / f"stock/checkpoint-{step}"))
        AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)


@pytest.mark.parametrize(
    ("strategy", "place"), [("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-2")]
)
def test_pushes_of_checkpoints(strategy: str, place: str, folder: Path, drive: Path, hub: Hub, tmp_path: Path) -> None:
    """Checkpoints with the session's state are not pushed; those without it are."""
    words = PUSHES | {"hub_strategy": strategy, "max_steps": 2}
    said = rf"hub_strategy='{strategy}': .*'every_save' or 'end'.*save_only_model=True"
    with loaded(folder, drive) as model:
        with pytest.raises(UserError, match=said):
            ours(model, tmp_path / "ours", **words)
        ours(model, tmp_path / "ours", **words, save_only_model=True).train()
    found = {name: names_in(copy) for name, copy in hub.pushes}
    assert found.keys() == {"", place}
    assert "trainer_state.json" in found[place]
    assert not any("offload" in name for name in found[place])


class Foreign(Trainer):
    """A Trainer as other projects have them: it takes the model by name only, and may make its optimizer."""

    def __init__(self, note: str, **words: Any) -> None:
        self.note = note
        super().__init__(**words)

    def create_optimizer(self, *positional: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return super().create_optimizer(*positional)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.create_scheduler(num_training_steps, self.optimizer)


class OverForeign(Offloaded, Foreign):
    pass


class WithOwnOptimizer(Offloaded, Foreign):
    def create_optimizer(self, *positional: Any) -> torch.optim.Optimizer:
        return super().create_optimizer(*positional)


def test_the_mixin_works_over_another_projects_trainer(folder: Path, drive: Path, tmp_path: Path) -> None:
    """An optimizer behind the mixin is refused, unless the user's class returns the session's in its place."""
    words: dict[str, Any] = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
    expected = stock(folder, tmp_path / "stock", **words)
    expected.train()
    with loaded(folder, drive) as model:
        given = {"model": model, "args": arguments(tmp_path / "ours", **words), "train_dataset": rows(48)}
        with pytest.raises(UserError, match=r"create_optimizer of Foreign would not be called"):
            OverForeign(note="kept", **given)
        trainer = WithOwnOptimizer(note="kept", **given)
        assert trainer.note == "kept"
        trainer.create_optimizer_and_scheduler(4)  # transformers 5.23 does not call it, other projects do
        assert trainer.optimizer is session_of(model).optimizer
        trainer.train()
        assert told(trainer) == told(expected)
