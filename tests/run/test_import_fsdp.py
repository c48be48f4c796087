"""Tests of importing torch.distributed.checkpoint's directories of FSDP2, also a Trainer's, and of refusing others."""

import dataclasses
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from engine_bench import assert_same, batches, engine, model_directory, train
from forked_ranks import in_ranks
from safetensors.torch import load_file
from synthetic_foreign import STEPS, assert_same_state, distributed, imported, model_and_state, state_of
from test_safe import Bomb
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.trainer_callback import TrainerState
from uneven_targets import DECAY, LR, random_weights

from offload_trainer.errors import UserError
from offload_trainer.ranks import join_torch, place_here
from offload_trainer.run.checkpoint import read_state
from offload_trainer.run.commands.import_checkpoint import _Chunk, _Stored

BEFORE, AFTER = 3, 3  # steps before the checkpoint, and compared with those of the run that goes on from its import
# Ranks; how they write the checkpoint: by get_state_dict, with settings by number of the group or by name of the
# weight, or as accelerate's two directories with the other files of a Trainer; and a part of frozen weights' names.
CASES = [(1, "numbered", "-"), (2, "flat", "-"), (2, "trainer", "embed_tokens")]

# -- on a rank ---------------------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, model: Any, adam: Any, scheduler: Any, kind: str) -> None:
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


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind", "frozen"), CASES)
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
    words = ["--accumulate", str(ranks), "--engine", "plain", "optim.betas=[0.9, 0.95]", "optim.weight_decay=0.1"]
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
    for number, (why, changes) in enumerate(
        (
            (r"11 missing there: model\.layers\.5\.", {"num_hidden_layers": 6}),
            (r"11 not in the model: model\.layers\.\d\.", {"num_hidden_layers": 4}),
            (r"15 of another shape: \S+mlp\.\S+ \(100, 72\), in the model \(104, 72\)", {"intermediate_size": 104}),
        )
    ):
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
