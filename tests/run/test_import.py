"""Tests of importing checkpoints of the Trainer and of FSDP2: state bit for bit, rates, loss scales, refusals."""

import ctypes
import dataclasses
import io
import json
import os
import pickle
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from commands import ask, call
from engine_bench import VOCABULARY, assert_same, batches, engine, model_directory, train
from forked_child import in_a_fork, watched_memory
from forked_ranks import in_ranks
from safetensors.torch import load_file, save_file
from test_safe import Bomb
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_callback import TrainerState
from uneven_targets import DECAY, LR, random_weights

from offload_trainer.common.errors import UserError
from offload_trainer.optim.state_files import LossScale, read_engine_state
from offload_trainer.plan.tiered.state_formats import ADAMW
from offload_trainer.ranks import join_torch, place_here
from offload_trainer.run.checkpoint import read_manifest, read_state
from offload_trainer.run.commands import import_checkpoint as import_checkpoint_module
from offload_trainer.run.commands.import_checkpoint import Imported, _Chunk, _Stored, import_checkpoint
from offload_trainer.run.loop import learning_rate
from offload_trainer.settings import load_config

STEP, STEPS = 2, 9
KINDS = ("master", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor
GROUP = {"lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def model_and_state(folder: Path, name: str = "qwen3", **sizes: int) -> tuple[Path, State]:
    """Write a small model with random weights; return its directory, and a state of them with random moments."""
    directory = random_weights(model_directory(folder / "model", name, tied=False, **sizes))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {kind: {name: torch.rand_like(p) for name, p in masters.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return directory, {"master": masters, **moments}


def write_trainer(folder: Path, state: State) -> None:
    """Write a Trainer's files; the names of norms contain "norm", as the Trainer's rule for weight decay expects."""
    save_file(state["master"], folder / "model.safetensors", metadata={"format": "pt"})
    order = sorted(state["master"], key=lambda name: "norm" in name)
    count = sum("norm" not in name for name in order)
    groups = [
        GROUP | {"params": list(range(count))},
        GROUP | {"params": list(range(count, len(order))), "weight_decay": 0.0},
    ]
    moments = {number: _moments(state, name) for number, name in enumerate(order)}
    torch.save({"state": moments, "param_groups": groups}, folder / "optimizer.pt")
    write_trainer_state(folder)


def write_trainer_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP, "max_steps": STEPS}))


def write_fsdp(folder: Path, state: State) -> None:
    """Write the two directories of SHARDED_STATE_DICT, and the Trainer's file."""
    weights, optimizer = distributed(state)
    dcp.save({"model": weights}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    write_trainer_state(folder)


def distributed(state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights and optimizer as get_state_dict does."""
    moments = {name: _moments(state, name) for name in state["master"]}
    return state["master"], {"state": moments, "param_groups": [GROUP | {"params": list(moments)}]}


def _moments(state: State, name: str) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(float(STEP))} | {kind: state[kind][name] for kind in ("exp_avg", "exp_avg_sq")}


def imported(source: Path, run: Path, *words: str, notes: list[str] | None = None) -> Imported:
    """Import `source` as the command with `words` does; check the manifest of what it wrote."""
    done = import_checkpoint(source, run, load_config(list(words)), say=(notes if notes is not None else []).append)
    read_manifest(done.checkpoint)
    return done


def state_of(checkpoint: Path) -> State:
    return {kind: load_file(checkpoint / f"{kind}.safetensors") for kind in KINDS}


def assert_same_state(found: State, expected: State) -> None:
    """Assert that both have the same names and bit-identical tensors, none of them all zeros."""
    for kind in KINDS:
        assert_same(found[kind], expected[kind])
        assert any(tensor.any() for tensor in expected[kind].values())


RATE, LENGTH, HALF = 1e-2, 6, 3
SETTINGS = ["optim.betas=[0.8, 0.99]", "optim.eps=1e-07", "optim.weight_decay=0.1", "optim.max_grad_norm=0.5"]
# The frozen weights leave gaps between the numbers that the optimizer gives to weights and the model's order.
MODELS: dict[str, tuple[str, bool, list[str]]] = {
    "gpt2, tied": ("gpt2", True, []),
    "qwen3, frozen": ("qwen3", False, ["embed_tokens", r"layers\.1\."]),
}


def trained(folder: Path, name: str, *, frozen: list[str], tied: bool, **changes: Any) -> Trainer:
    directory = random_weights(model_directory(folder / "model", name, tied=tied))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, parameter_name) for pattern in frozen))
    words: dict[str, Any] = {"max_steps": LENGTH, "save_steps": HALF, "logging_steps": 1, "report_to": "none"}
    words |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "disable_tqdm": True}
    words |= {"learning_rate": RATE, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
    words |= {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-7, "weight_decay": 0.1} | changes
    rows = [{"input_ids": row, "labels": row} for batch in batches(4) for row in batch.inputs]
    trainer = Trainer(model, TrainingArguments(str(folder / "out"), **words), train_dataset=rows)
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
    return Path(shutil.copytree(output / f"checkpoint-{LENGTH}", tmp_path / "copied")), freezing


def test_state_is_the_trainers_bit_for_bit(source: tuple[Trainer, Path, list], tmp_path: Path) -> None:
    trainer, output, freezing = source
    words = [*freezing, "--dtype", "fp32", "optim.moment_dtype=8bit", "optim.master_dtype=bf16"]
    done = imported(output / f"checkpoint-{LENGTH}", tmp_path / "run", *words)
    optim = json.loads((done.checkpoint / "run.json").read_text())["config"]["optim"]
    assert optim["moment_dtype"] == optim["master_dtype"] == "fp32"
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    state = trainer.optimizer.state  # its keys are the parameters themselves
    expected = {kind: {name: state[p][kind] for name, p in trained.items()} for kind in ("exp_avg", "exp_avg_sq")}
    expected["master"] = {name: p.detach() for name, p in trained.items()}
    assert_same_state(state_of(done.checkpoint), expected)
    assert read_state(done.checkpoint).step == LENGTH
    identity = json.loads((done.checkpoint / "MANIFEST.json").read_text())["identity"]
    assert identity["initial weights"] is identity["seed"] is None  # compared with nothing at a resume
    told = json.loads((done.checkpoint / "engine.json").read_text())
    assert (told["optimizer_steps"], told["weight_steps"]) == (LENGTH, {})
    fixed = {name: p.detach() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    if fixed:
        assert_same(load_file(done.checkpoint / "fixed.safetensors"), fixed)
    assert bool(fixed) == bool(freezing)
    assert "optim.lr=0.01" in done.words
    assert "optim.betas=[0.8, 0.99]" in done.words
    assert f"--steps {LENGTH}" in done.words


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
    tokens.with_name("tokens.bin.json").write_text('{"dtype": "uint16", "tokens": 9000}')
    words += ["--model", checkpoint, "--data", tokens, "--tokenizer", "builtin", "--lr", RATE, *SETTINGS]
    words += ["--seq-len", 24, "--micro-batch", 1, "--steps", 5, "placement.threads=1"]
    done = call(*words, output=run)
    assert [step["step"] for step in done.steps] == [4, 5]
    assert f"train.steps is 5; step-{HALF:08d} was saved with {LENGTH}" in done.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_next_rates_are_the_trainers(kind: str, tmp_path: Path) -> None:
    """Runs with the words that the command prints have the rates that the Trainer logged for the same steps."""
    words = {"lr_scheduler_type": kind, "warmup_steps": 2, "logging_steps": 1, "save_steps": 1}
    trainer = trained(tmp_path, "qwen3", frozen=[], tied=False, **words)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    schedule = [f"optim.schedule={kind.split('_')[0]}", "optim.warmup_steps=2", "optim.final_lr_ratio=0"]
    for half in (1, HALF):  # within the warm-up and after it
        folder, checkpoint = tmp_path / str(half), tmp_path / f"out/checkpoint-{half}"
        done = imported(checkpoint, folder / "run", *schedule)
        assert "They differ" not in done.rates
        optim = load_config([*schedule, *shlex.split(done.words)]).optim
        found = [learning_rate(step, optim, steps=LENGTH) for step in range(half, LENGTH)]
        assert found == pytest.approx(logged[half:], rel=1e-9, abs=1e-18)
        done = imported(checkpoint, folder / "other", *schedule, "optim.warmup_steps=5")
        assert "They differ: give this command and the run the source's optim.schedule" in done.rates


def test_overflows_hold_the_schedule_up_there_and_here(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    checkpoint, words = copied
    torch.save(torch.load(checkpoint / "scheduler.pt") | {"last_epoch": LENGTH - 2}, checkpoint / "scheduler.pt")
    assert "optim.schedule_delay=3" in imported(checkpoint, tmp_path / "run", *words).words


def test_other_optimizers_and_other_models_are_refused(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    # What is changed in optimizer.pt's groups and state (those of RAdam have no amsgrad), and the refusal
    refused: list[tuple[Callable[[Any, Any], object], str]] = [
        (lambda groups, _: [group.update(amsgrad=True) for group in groups], "its optimizer has amsgrad=True"),
        (lambda groups, _: [group.pop("amsgrad") for group in groups], "nor AdamW: its groups have no amsgrad"),
        (lambda _, state: state[0].update(exp_avg=torch.zeros(3)), r"1 moments do not have .*: parameter 0 \(3,\)"),
        (
            lambda groups, _: [group.update(weight_decay=0.1, decoupled_weight_decay=False) for group in groups],
            r"Adam with weight_decay=0\.1 added to the gradient",
        ),
        # SGD
        (lambda _, state: state.update({0: {"momentum_buffer": torch.zeros(2)}}), "parameter 0 has momentum_buffer"),
        (lambda groups, _: groups[0]["params"].pop(), r"groups of \[\d+, \d+\] parameters; .* with model\.freeze"),
        (lambda _, state: state[0]["exp_avg_sq"].fill_(-1), r"exp_avg_sq of \S+: \d+ of \d+ values .*negative"),
    ]
    folder, words = copied
    whole = (folder / "optimizer.pt").read_bytes()
    for change, told in refused:
        saved = torch.load(io.BytesIO(whole))
        change(saved["param_groups"], saved["state"])
        torch.save(saved, folder / "optimizer.pt")
        with pytest.raises(UserError, match=told):
            imported(folder, tmp_path / "run", *words)
        assert not (tmp_path / "run").exists()
        assert not list(tmp_path.glob(".run*"))


@pytest.mark.slow
def test_unreadable_checkpoints_are_refused(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, words = copied
    with pytest.raises(UserError, match=r"optim\.name=muon"):
        imported(folder, tmp_path / "run", *words, "optim.name=muon")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    with pytest.raises(UserError, match="already holds something"):
        imported(folder, tmp_path / "taken", *words)
    torch.save(torch.load(folder / "optimizer.pt") | {"extra": SimpleNamespace()}, folder / "optimizer.pt")
    with pytest.raises(UserError, match=r"optimizer\.pt holds a types\.SimpleNamespace, and an import reads"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"optimizer\.pt cannot be read as a file of torch\.save"):
        imported(folder, tmp_path / "run", *words)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint that can be imported.*It holds .*trainer_state\.json"):
        imported(folder, tmp_path / "run", *words)


def test_a_loss_scale_is_the_scalers(copied: tuple[Path, list[str]], tmp_path: Path) -> None:
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
        ctypes.CDLL(None).malloc_trim(0)  # memory that this process has free must not hide what the import takes
        peak = watched_memory()
        before = peak()
        imported(source, tmp_path / "run", "--model", str(folder))
        assert peak() - before < limit

    assert in_a_fork(weighed) == 0
    assert_same_state(state_of(tmp_path / f"run/checkpoints/step-{STEP:08d}"), held)


# -- checkpoints of FSDP2 ----------------------------------------------------------------------------------------------

BEFORE, AFTER = 3, 3  # steps before the checkpoint, and compared with those of the run that resumes from its import


def write_checkpoint(directory: Path, model: Any, adam: Any, scheduler: Any, kind: str) -> None:
    """Write as get_state_dict, "numbered" by groups or "flat" by names, or as a "trainer" does through accelerate."""
    if kind != "trainer":
        options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat")
        weights, state = get_state_dict(model, adam, options=options)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(directory))
        return
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    save_fsdp_model(plugin, accelerator, model, str(directory))
    save_fsdp_optimizer(plugin, accelerator, adam, model, str(directory))
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), directory / "scheduler.pt")
        TrainerState(global_step=BEFORE, max_steps=STEPS).save_to_json(str(directory / "trainer_state.json"))


def train_by_fsdp(folder: Path, kind: str, frozen: str) -> list[float]:
    """Train on the CPU, write FOLDER/checkpoint, and the same state whole, and train on; return the losses after it."""
    join_torch("gloo")
    rank, ranks = place_here()
    PartialState(cpu=True)  # accelerate's loggers ask for it
    mesh = init_device_mesh("cpu", (ranks,))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    scheduler = get_scheduler("constant", adam)
    data = batches((BEFORE + AFTER) * ranks)[rank::ranks]

    def step(number: int) -> float:
        inputs = torch.cat([data[number].inputs, data[number].targets[:, -1:]], 1)
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        scheduler.step()
        adam.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / ranks

    for number in range(BEFORE):
        step(number)
    write_checkpoint(folder / "checkpoint", model, adam, scheduler, kind)
    whole, state = get_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save((whole, state["state"]), folder / "state")
    losses = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    dist.destroy_process_group()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "frozen"), [(1, "numbered", "-"), (2, "flat", "-"), (2, "trainer", "embed_tokens")]
)
def test_state_and_next_losses_are_fsdps(ranks: int, kind: str, frozen: str, tmp_path: Path) -> None:
    """Sizes of the model do not divide by two, so ranks hold unequal chunks."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    losses, *_ = in_ranks(train_by_fsdp, tmp_path, kind, frozen, count=ranks, folder=tmp_path / "ranks", own=True)
    freezing = [] if frozen == "-" else [f"model.freeze=['{frozen}']"]
    done = imported(tmp_path / "checkpoint", tmp_path / "run", "--model", str(model), "--dtype", "fp32", *freezing)
    whole, state = torch.load(tmp_path / "state")
    expected = {kind: {name: its[kind] for name, its in state.items()} for kind in ("exp_avg", "exp_avg_sq")}
    assert_same_state(state_of(done.checkpoint), expected | {"master": {name: whole.pop(name) for name in state}})
    assert bool(whole) == bool(freezing)
    assert_same(load_file(done.checkpoint / "fixed.safetensors") if freezing else {}, whole)
    assert read_state(done.checkpoint).step == BEFORE
    assert "optim.weight_decay=0.1" in done.words
    assert "optim.schedule_delay=1" in done.words
    assert (f"--steps {STEPS}" in done.words) == (kind == "trainer")
    data = batches((BEFORE + AFTER) * ranks)[BEFORE * ranks :]
    words = ["--accumulate", str(ranks), "optim.betas=[0.9, 0.95]", "optim.weight_decay=0.1"]
    with engine(model, "--dtype", "fp32", *words, *freezing) as made:
        made.load(done.checkpoint)
        found = train(made, data, accumulate=ranks, lr=LR)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-6, abs=1e-6)


def test_names_within_a_wrapper(tmp_path: Path) -> None:
    """A script may save a module that holds the model, under words of its own."""
    model, state = model_and_state(tmp_path)
    wrapped = {kind: {f"inner.{name}": tensor for name, tensor in tensors.items()} for kind, tensors in state.items()}
    weights, optimizer = distributed(wrapped)
    dcp.save({"net": weights, "opt": optimizer}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    done = imported(tmp_path / "dcp", tmp_path / "run", "--model", str(model), "--dtype", "fp32")
    assert_same_state(state_of(done.checkpoint), state)


def test_checkpoints_of_other_formats_are_refused_by_their_names(tmp_path: Path) -> None:
    zero = r"a checkpoint of DeepSpeed, .*zero_to_fp32\.py \. DIR --safe_serialization.* start with --model DIR"
    fsdp = r"a checkpoint of FSDP .*SHARDED_STATE_DICT; .* start with --model DIR"
    for names, why in (
        ("latest global_step3/mp_rank_00_model_states.pt zero_to_fp32.py", zero),
        ("trainer_state.json latest model.safetensors config.json", zero),
        ("trainer_state.json pytorch_model_fsdp.bin optimizer.bin", fsdp),
        ("pytorch_model_fsdp_0/.metadata", r"without optimizer_0, .*SHARDED_STATE_DICT"),
    ):
        source = tmp_path / names.replace("/", "-")
        for path in (source / name for name in names.split()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        with pytest.raises(UserError, match=why):
            imported(source, tmp_path / "run")


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
        (((0, 0), (1, 0)), "the checkpoint: the chunks of w hold 9 of 12 elements"),
        (((2, 0), (2, 0)), "the chunks of w hold 6 of 12 elements"),
        (((0, 0), (-2, 0)), r"a chunk of w at \(-2, 0\) does not fit \(4, 3\)"),
        (((0, 0), (3, 0)), r"a chunk of w at \(3, 0\) does not fit \(4, 3\)"),
        (((0, 0),), "the chunks of w hold 6 of 12 elements"),
        ((), "the chunks of w hold 0 of 12 elements"),
    ):
        with pytest.raises(UserError, match=why):
            tensor(*offsets)


@pytest.mark.slow
class ShortReads(io.FileIO):
    """A file of which one read returns little, as of a file with more than 2 GiB."""

    def read(self, size: int = -1, /) -> bytes:
        return super().read(min(size, 1000))

    def readinto(self, into: Any, /) -> int:
        return super().readinto(memoryview(into)[:1000])


def test_a_chunk_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than one system call returns: the embeddings of an 8B model in fp32, say."""
    values = torch.rand(100, 100)
    dcp.save({"a": values}, checkpoint_id=str(tmp_path), no_dist=True)
    stored = _Stored("it", {}, {})
    stored.add(tmp_path)
    monkeypatch.setattr(import_checkpoint_module, "open_given", ShortReads)
    assert torch.equal(stored.tensor("a"), values)


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    model, state = model_and_state(tmp_path)
    weights, optimizer = distributed(state)
    bomb = Bomb(tmp_path / "exploded")
    given = ["--model", str(model)]
    copy = tmp_path / "copy"

    def refused(why: str, *words: str) -> None:
        with pytest.raises(UserError, match=why):
            imported(copy, tmp_path / "run", *(words or given))
        assert not (tmp_path / "run").exists()
        assert not bomb.path.exists()

    dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=str(copy), no_dist=True)
    others: dict[str, dict[str, int]] = {
        r"11 missing there: model\.layers\.5\.": {"num_hidden_layers": 6},
        r"11 not in the model: model\.layers\.\d\.": {"num_hidden_layers": 4},
        r"15 of another shape: \S+mlp\.\S+ \(100, 72\), in the model \(104, 72\)": {"intermediate_size": 104},
    }
    for number, (why, changes) in enumerate(others.items()):
        other = model_directory(tmp_path / f"other{number}", "qwen3", tied=False, **changes)
        refused(why, "--model", str(other), "--scratch")
    refused("frozen by model.freeze, with moments there", *given, "model.freeze=['norm']")
    with pytest.raises(UserError, match=r"there is no config\.json of a model .*--model"):
        imported(copy, tmp_path / "run")
    file = next(copy.glob("*.distcp"))
    with open(file, "r+b") as cut:
        cut.truncate(file.stat().st_size // 2)
    refused(r"\.distcp ends after \d+ bytes; \S+ needs \d+ more")
    file.unlink()
    os.mkfifo(file)
    refused(r"\.distcp cannot be read: it is not a regular file")
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(place, relative_path="../other0/config.json")
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(r"names \.\./other0/config\.json, which lies outside the directory")
    (copy / ".metadata").write_bytes(pickle.dumps(bomb))
    refused(r"\.metadata cannot be read: it holds a pathlib\.Path")
    shutil.rmtree(copy)
    optimizer["param_groups"][0]["eps"] = bomb  # objects are pickled in the same files as the tensors
    dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=str(copy), no_dist=True)
    refused(r"eps holds a getattr, and an import reads tensors and plain data only")
