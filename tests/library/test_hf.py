"""Tests of transformers' Trainer over an offloaded model: results have the stock Trainer's bits, with each switch."""

import json
import shutil
import signal
import warnings
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
from engine_bench import assert_same
from forked_child import in_a_fork
from hf_trainers import HOMES, STEPS, Ours, arguments, loaded, ours, rows, stock, told, weights
from huggingface_hub.utils import filter_repo_objects
from plain_engine import MuonWithAdamW
from seen_calls import calls_of, kill_in
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from offload_trainer import hf, offload
from offload_trainer.common.errors import UserError
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.hf import Offloaded, attach, session_of

Reference = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Train with the stock Trainer and clipping; return its logs and its output directory."""
    output = tmp_path_factory.mktemp("stock")
    trainer = stock(folder, output)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == STEPS
    assert max(norms) > 0.5
    trainer.save_model(str(output / "final"))
    return told(trainer), output


@pytest.mark.parametrize("home", HOMES)
def test_logs_and_weights_are_stock(home: str, folder: Path, reference: Reference, drive: Path, tmp_path: Path) -> None:
    expected, theirs = reference
    with loaded(folder, drive, home=home) as model:
        trainer = ours(model, tmp_path)
        trainer.train()
        assert told(trainer) == expected
        trainer.save_model(str(tmp_path / "final"))
    for name in ("final", "checkpoint-5", "checkpoint-20"):
        assert_same(weights(tmp_path / name), weights(theirs / name))
    state = json.loads((tmp_path / "checkpoint-20/trainer_state.json").read_text())
    assert state["global_step"] == STEPS


@pytest.mark.slow
def test_muon(folder: Path, drive: Path, tmp_path: Path) -> None:
    """The bits are those of a Trainer with torch's Muon; the gradient norm is logged without clipping too."""
    use_fp32_products(torch.bfloat16)  # Newton-Schulz multiplies bf16 matrices in an fp32 run, too
    words = {"max_steps": 8, "save_strategy": "no", "max_grad_norm": 0.0}
    expected = stock(folder, tmp_path / "stock", **words)
    named, decays = dict(expected.model.named_parameters()), expected.get_decay_parameter_names(expected.model)
    adamw = {"lr": expected.args.learning_rate, "betas": (0.9, 0.999), "eps": 1e-8}
    groups = [
        {"params": [p for name, p in named.items() if (name in decays) == decaying], "weight_decay": decay, **adamw}
        for decaying, decay in ((True, expected.args.weight_decay), (False, 0.0))
    ]
    matrices = [p for name, p in named.items() if ".layers." in name and p.dim() == 2]
    muon = {"lr": expected.args.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    expected.optimizer = MuonWithAdamW(groups, matrices, **muon)
    expected.train()
    with loaded(folder, drive, rule="muon") as model:
        trainer = ours(model, tmp_path / "ours", **words)
        trainer.train()
        assert told(trainer) == told(expected)
        assert all("grad_norm" in entry for entry in told(trainer) if "loss" in entry)
        trainer.save_model()
    expected.save_model()
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "stock"))


@pytest.mark.slow
# `log` is called after each step and each of the evaluations at 5 and 10; a state of RNGs is saved at 5 and 10.
@pytest.mark.parametrize(("name", "nth", "whole"), [("log", 12 + 2, 10), ("_save_rng_state", 2, 5)])
def test_killed_and_resumed(
    name: str, nth: int, whole: int, folder: Path, reference: Reference, drive: Path, tmp_path: Path
) -> None:
    def die() -> None:
        with loaded(folder, drive) as model:
            trainer = ours(model, tmp_path / "run")
            kill_in(trainer, name, nth=nth)
            trainer.train()

    assert in_a_fork(die) == -signal.SIGKILL
    assert (tmp_path / "run/checkpoint-10").is_dir()
    expected, theirs = reference
    with loaded(folder, drive, home="resident") as model:
        trainer = ours(model, tmp_path / "run")
        if whole != 10:
            with pytest.raises(UserError, match=r"checkpoint-10 cannot be resumed: its trainer_state\.json is missing"):
                trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-10"))
        began = calls_of(setattr, trainer, "training_step", lambda *_, **__: trainer.state.global_step)
        trainer.train(resume_from_checkpoint=True)
        assert began[0] == whole
        assert told(trainer)[:-1] == expected[:-1]  # the last line's train_loss covers this process's steps only
    assert_same(weights(tmp_path / "run/checkpoint-20"), weights(theirs / "checkpoint-20"))


@pytest.mark.slow
def test_the_best_model_is_loaded(folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the last one, as the metric is reversed. A checkpoint is on the disk before older ones are removed."""
    order: list[str] = []
    sync, rotate = hf.sync_tree, hf.rotate_checkpoints
    monkeypatch.setattr(hf, "sync_tree", lambda folder: (order.append(folder.name), sync(folder)))
    monkeypatch.setattr(hf, "rotate_checkpoints", lambda *a, **k: (order.append("rotate"), rotate(*a, **k)))
    words = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    words |= {"max_steps": 6, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}
    expected = stock(folder, tmp_path / "stock", **words)
    expected.train()
    with loaded(folder, drive) as model:
        trainer = ours(model, tmp_path / "ours", **words)
        trainer.train()
        assert Path(trainer.state.best_model_checkpoint).name == Path(expected.state.best_model_checkpoint).name
        assert not trainer.state.best_model_checkpoint.endswith("-6")
        assert order == [what for step in (2, 4, 6) for what in (f"checkpoint-{step}", "rotate")]
        kept = [{path.name for path in run.glob("checkpoint-*")} for run in (tmp_path / "ours", tmp_path / "stock")]
        assert kept[0] == kept[1]
        assert trainer.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]
        trainer.save_model()
    expected.save_model()
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "stock"))


def _with_sgd(trainer: Any, *_: Any) -> Any:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    return trainer.optimizer


class Foreign(Trainer):
    """A Trainer as other projects have them: it takes the model by name only, and may make its optimizer."""

    create_optimizer = _with_sgd

    def __init__(self, note: str = "", **words: Any) -> None:
        self.note = note
        super().__init__(**words)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_scheduler(num_training_steps, _with_sgd(self))


class WithRates(Offloaded, Foreign):
    def create_optimizer(self, *positional: Any) -> torch.optim.Optimizer:
        self.optimizer = super().create_optimizer(*positional)
        self.optimizer.param_groups[1]["lr"] = 1e-3
        return self.optimizer


@pytest.mark.slow
def test_a_trainer_that_makes_its_optimizer(folder: Path, drive: Path, tmp_path: Path) -> None:
    """One that modifies the session's optimizer makes it once; another is refused, also behind the mixin."""
    words = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
    given = {"train_dataset": rows(48)}
    with loaded(folder, drive) as model:
        for wrong, said in (
            (type("Own", (Ours,), {"create_optimizer": _with_sgd}), "create_optimizer of Own makes SGD"),
            (
                type("Kind", (Ours,), {"get_optimizer_cls_and_kwargs": None}),
                "cls_and_kwargs of Kind would not be called",
            ),
            (type("Over", (Offloaded, Foreign), {}), "create_optimizer of Foreign would not be called"),
        ):
            with pytest.raises(UserError, match=said):
                wrong(model=model, args=arguments(tmp_path / "none", **words), **given)
        trainer = WithRates(note="kept", model=model, args=arguments(tmp_path / "ours", **words), **given)
        assert trainer.note == "kept"
        assert trainer.optimizer.param_groups[1]["lr"] == 1e-3
        trainer.create_optimizer_and_scheduler(4)  # transformers 5.23 does not call it, other projects do
        assert trainer.optimizer is session_of(model).optimizer
        trainer.train()
        trainer.save_model()
        found = told(trainer)
        trainer.train()  # continues with the same optimizer
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = Trainer(plain, arguments(tmp_path / "stock", **words), **given)
    expected.create_optimizer()
    expected.optimizer.param_groups[1]["lr"] = 1e-3
    expected.train()
    assert found == told(expected)
    expected.save_model()
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "stock"))


@pytest.mark.slow
def test_state_dict_and_saves_have_the_weights(folder: Path, drive: Path, tmp_path: Path) -> None:
    """The state_dict holds no weights, and can be hashed, saved and compared. A second save replaces the first."""
    out, expected = tmp_path / "out", weights(folder)
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").touch()
    (out / "notes.txt").write_text("mine")
    with loaded(folder, drive) as model:
        found = model.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
            assert found[name].cpu().numpy().tobytes() == tensor.numpy().tobytes()
            assert torch.equal(found[name], tensor)
            assert found[name].is_contiguous()
        with pytest.raises(UserError, match=r"data_ptr of an offloaded tensor"):
            found["model.layers.0.mlp.up_proj.weight"].data_ptr()
        torch.save(found, tmp_path / "whole.pt")
        for _ in range(2):
            model.save_pretrained(out)
        with pytest.raises(UserError, match=r"not variant='fp16'"):
            model.save_pretrained(out, variant="fp16")
    assert_same(torch.load(tmp_path / "whole.pt"), expected)
    assert names_in(out) == {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}
    assert_same(weights(out), expected)
    config = json.loads((out / "config.json").read_text())  # transformers 4 reads it too
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bf16": True, "use_cpu": True}, r"bf16=True: .*autocast.*bf16=False"),
    ({"optim": "adafactor"}, r"optim='adafactor': AdamW alone, adamw_torch or adamw_torch_fused"),
    ({"torch_compile": True}, r"torch_compile=True: compiled code keeps weights that have moved"),
    ({"per_device_train_batch_size": 5}, r"5 rows in a micro-batch, .* counts 4: load\(\.\.\., micro_batch_size=5\)"),
    ({"use_liger_kernel": True}, r"use_liger_kernel=True: .*apply liger_kernel to the module before ot\.offload"),
    ({"auto_find_batch_size": True}, r"auto_find_batch_size=True: .*load\(\.\.\., micro_batch_size=N\)"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "gradient_checkpointing_kwargs: use_reentrant=True"),
    ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model with load_best_model_at_end"),
]


def test_wrong_arguments_are_refused(untrained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in REFUSED:
        with pytest.raises(UserError, match=message):
            ours(untrained, tmp_path, **words)
    # `accelerate launch --mixed_precision bf16` sets the variable, and the arguments' bf16 stays False.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match=r"ACCELERATE_MIXED_PRECISION=bf16: .*autocast"):
        ours(untrained, tmp_path, use_cpu=True)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_bf16_is_the_dtype_of_the_weights(folder: Path, drive: Path, tmp_path: Path) -> None:
    use_fp32_products(torch.bfloat16)
    logs = []
    for asked in (False, True):
        with loaded(folder, drive, dtype="bf16") as model, warnings.catch_warnings(record=True) as caught:
            trainer = ours(model, tmp_path, bf16=asked, use_cpu=True, max_steps=2, save_strategy="no")
            assert any("bf16=True changes nothing" in str(one.message) for one in caught) == asked
            trainer.train()
            logs.append(told(trainer))
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_saving_a_model_that_is_not_transformers_is_refused(drive: Path, tmp_path: Path) -> None:
    """The Trainer would write such a model's weights from memory, so it is refused before the first step."""
    module = nn.Linear(16, 16)
    with offload(module, nvme=drive, say=lambda line: None, **HOMES["drive"]) as session:
        attach(session)
        words: dict[str, Any] = {"eval_strategy": "no", "per_device_train_batch_size": 1}
        with pytest.raises(UserError, match=r"save_strategy='steps': .* session\.export"):
            Ours(module, arguments(tmp_path, **words), train_dataset=rows(4)).train()


@pytest.mark.slow
def test_pushes_hold_no_state(folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and the end push the stock Trainer's model; checkpoints, with state, only by `save_only_model`."""
    pushes: list[tuple[str, Path]] = []  # path in the repository, and a copy of what was pushed

    def upload(*, folder_path: str, path_in_repo: str = "", ignore_patterns: Any = None, **_: Any) -> Future[None]:
        source, copy = Path(folder_path), tmp_path / f"hub-{len(pushes)}"
        for name in filter_repo_objects(sorted(names_in(source)), ignore_patterns=ignore_patterns):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, copy / name)
        pushes.append((path_in_repo, copy))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    if not hasattr(transformers.trainer, "hf_api"):
        pytest.skip(f"transformers {transformers.__version__} pushes by other functions")
    hub = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name), upload_folder=upload)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    words = {"hub_model_id": "someone/model", "eval_strategy": "no", "save_steps": 2, "max_steps": 4}
    expected = stock(folder, tmp_path / "stock", **words)
    expected.train()
    words["push_to_hub"] = True
    with loaded(folder, drive) as model:
        trainer = ours(model, tmp_path / "ours", **words)
        trainer.train()
        trainer.push_to_hub()
        assert (tmp_path / "ours/checkpoint-2/offload").is_dir()
    files = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
    assert [place for place, _ in pushes] == ["", "", ""]
    assert [names_in(copy) for _, copy in pushes] == [files, files, files | {"README.md"}]
    for (_, copy), step in zip(pushes, (2, 4, 4), strict=True):
        assert_same(weights(copy), weights(tmp_path / f"stock/checkpoint-{step}"))
        AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    for strategy, place in (("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-2")):
        words |= {"hub_strategy": strategy, "max_steps": 2}
        pushes.clear()
        with loaded(folder, drive) as model:
            said = rf"hub_strategy='{strategy}': .*'every_save' or 'end'.*save_only_model=True"
            with pytest.raises(UserError, match=said):
                ours(model, tmp_path / strategy, **words)
            ours(model, tmp_path / strategy, **words, save_only_model=True).train()
        found = {name: names_in(copy) for name, copy in pushes}
        assert found.keys() == {"", place}
        assert "trainer_state.json" in found[place]
        assert not any("offload" in name for name in found[place])


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
