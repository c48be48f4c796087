"""Tests of the library: a plain PyTorch loop over an offloaded model gives torch.optim.AdamW's results."""

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import VOCABULARY, assert_same, batches, model_directory
from forked_child import in_a_fork
from late_transfers import late_transfers
from safetensors.torch import load_file
from seen_calls import calls_of, kill_in, run_before, until
from session_loop import (
    ACCUMULATE,
    HOMES,
    ROWS,
    STEPS,
    Spare,
    Tower,
    by_torch,
    clipped,
    loss_of,
    of_rows,
    one_cycle,
    opened,
    trained,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.offloading.model import Activations
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.run import checkpoint as saving
from offload_trainer.session import api
from offload_trainer.session.api import session_config
from offload_trainer.storage import owned_dirs
from offload_trainer.storage.tensorfile import PlacedWriter

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's"),
    pytest.mark.usefixtures("nothing_is_small"),
]


def transformers_model(folder: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(model_directory(folder / "qwen3", "qwen3"))
    config.vocab_size = VOCABULARY + 13  # a multiple of 16, else torch's fused update rounds the last differently
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def tower(_: Path) -> nn.Module:
    torch.manual_seed(3)
    return Tower()


MODELS: dict[str, Callable[[Path], nn.Module]] = {"transformers": transformers_model, "any module": tower}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
    ]


DATA = batches(STEPS * ACCUMULATE)


def loss_at(model: nn.Module, number: int) -> torch.Tensor:
    return loss_of(model, DATA[number])


def in_memory(model: nn.Module) -> tuple[list[Any], dict[str, torch.Tensor]]:
    steps = by_torch(model, loss_at, parameters=groups(model))
    return steps, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("home", [*HOMES, "late"])
def test_a_loop_has_the_bits_of_torch(
    home: str, kind: str, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, home = (late_transfers(monkeypatch), "on the drive") if home == "late" else (nullcontext(), home)
    model = MODELS[kind](tmp_path)
    expected, weights = in_memory(copy.deepcopy(model))
    objects = dict(model.named_parameters())
    with late, ot.offload(model, nvme=drive, page_size=8192, **HOMES[home]) as session:
        optimizer = session.adamw(groups(model), lr=1e-2)
        found = list(trained(model, optimizer, one_cycle(optimizer), loss_at, session=session))
        assert found == expected
        assert_same(dict(session.named_masters()), weights)
        assert all(parameter is objects[name] for name, parameter in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("home", "explicit"), [("on the drive", False), ("in RAM", True)])
def test_the_update_overlaps_the_loop(home: str, explicit: bool, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights read after `step` are new, although the update is slow; a backward waits for a unit that was skipped."""

    def sleep(updater: Updater, memory: Any, _: Any) -> None:
        time.sleep(0.2 if memory.route.number == len(updater._store.pages) - 1 else 0.001)

    def loop(model: nn.Module, optimizer: Any, inside: Callable[[], Any]) -> Iterator[list[float]]:
        names = [name for name, _ in model.named_parameters()]
        for step, batch in enumerate(batches(6)):
            with inside():
                loss = loss_of(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read = [model.get_parameter(names[-1 - step % 3]).sum().item()] if step % 2 else []
            yield [loss.item(), *read]

    run_before(monkeypatch.setattr, Updater, "_update_page", sleep)
    torch.manual_seed(3)
    model = Spare()
    other = copy.deepcopy(model)
    expected = list(loop(other, torch.optim.AdamW(groups(other), lr=1e-2, fused=True), nullcontext))
    keys = {"optimizer": "nvme"} | HOMES[home]
    with ot.offload(model, nvme=drive, page_size=4096, overlap="forward", **keys) as session:
        inside = session.micro_batch if explicit else nullcontext
        assert list(loop(model, session.adamw(groups(model), lr=1e-2), inside)) == expected
        assert_same(dict(session.named_weights()), dict(other.named_parameters()))


@pytest.mark.parametrize("more", [{}, {"dtype": "bf16", "master_dtype": "bf16"}])
def test_8bit_moments_resume_in_another_placement(more: dict[str, Any], tmp_path: Path, drive: Path) -> None:
    """Rounding depends on the seed and the step alone, so a session that resumes continues with the same bits."""
    after = []
    keys: dict[str, Any] = {"nvme": drive, "moment_dtype": "8bit", "seed": 5, **more}
    for stops in (False, True):
        model = tower(tmp_path)
        session = ot.offload(model, optimizer="nvme", **keys)
        optimizer = session.adamw(lr=1e-2)
        for step, batch in enumerate(batches(4), 1):
            loss_of(model, batch).backward()
            optimizer.step()
            if stops and step < 3:
                session.save(tmp_path / "saves" / str(step))
            if stops and step == 2:
                session.close()
                session = ot.offload(model := tower(tmp_path), optimizer="cpu", **keys)
                optimizer = session.adamw()
                assert session.resume(tmp_path / "saves") == 2
        after.append({name: master.clone() for name, master in session.named_masters()})
        session.close()
    assert_same(after[1], after[0])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((128, 128), 1.5, dtype=torch.bfloat16)) for _ in "12")

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x + self.get_parameter(name).sum()


def test_weights_that_train_after_others_are_rounded_by_new_noise_each_step() -> None:
    """Their counts of steps are lower than the others', in the same unit."""
    steps, rate, place = 40, 3e-4, 2**-7
    model = nn.ModuleDict({"blocks": nn.ModuleList([Pair(), Pair()])})
    with ot.offload(model, dtype="bf16", master_dtype="bf16", optimizer="cpu") as session:
        optimizer = session.adamw(lr=rate, weight_decay=0.0)
        for name in ["first"] * (steps + 1) + ["second"] * steps:
            x = torch.zeros((), dtype=torch.bfloat16)
            for block in model["blocks"]:
                x = block(x, name)
            x.backward()
            optimizer.step()
        for name, master in session.named_masters():
            moved = (1.5 - master) / place
            expected = (steps + name.endswith("first")) * rate / place
            assert abs(moved.mean() - expected) < 5 * (expected / 128**2) ** 0.5
            assert 0.9 < moved.var() / expected < 1.1  # a pattern that repeats moves some elements in every step


MOMENTS: dict[str, tuple[Any, str, int, int]] = {  # patched object, function, fatal call, remaining save
    "between two files' tensors": (PlacedWriter, "put", 7, 2),
    "before the manifest": (saving, "finish_checkpoint", 1, 2),
    "before the new name": (os, "rename", 3, 2),
    "before the new name, among saves": (os, "rename", 3, 2),
    "with the new name": (owned_dirs, "_empty", 1, 4),
    "in the middle of an update": (UnitStore, "write", 3, 2),
}


def killed(moment: str, folder: Path, drive: Path) -> None:
    """Save after two steps, and die in the middle of the next operation."""
    model = tower(folder)
    session = ot.offload(model, nvme=drive, page_size=4096, **HOMES["on the drive"])
    optimizer = session.adamw(groups(model), lr=1e-2)
    scheduler = one_cycle(optimizer)
    steps = trained(model, optimizer, scheduler, loss_at, session=session)
    for number, _ in enumerate(steps, 1):
        if number in (2, 4):
            session.save(folder / "saves/last", scheduler)
        if number == 2:
            where, name, nth, _ = MOMENTS[moment]
            kill_in(where, name, nth=nth)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_session_killed_at_any_moment_resumes_from_a_complete_save(moment: str, tmp_path: Path, drive: Path) -> None:
    assert in_a_fork(partial(killed, moment, tmp_path, drive)) == -signal.SIGKILL
    model = tower(tmp_path)
    expected, weights = in_memory(copy.deepcopy(model))
    left = MOMENTS[moment][3]
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with ot.offload(model, nvme=drive, page_size=8192, **HOMES["on the drive"]) as session:
        optimizer = session.adamw(groups(model), lr=1e-2)
        scheduler = one_cycle(optimizer)
        loss_at(model, 0).backward()  # gradients that the resume drops
        start = session.resume(tmp_path / ("saves" if "among" in moment else "saves/last"), scheduler)
        assert start == left
        found = list(trained(model, optimizer, scheduler, loss_at, session=session, start=start))
        assert found == expected[start:]
        assert_same(dict(session.named_masters()), weights)
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["last"]
    assert list((drive / "offload-trainer").iterdir()) == []


@pytest.mark.parametrize("home", HOMES)
def test_weights_for_a_server_are_held_one_at_a_time(home: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def streamed(stream: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
        """Return each weight in 16 bits, as a server would take it; assert that no other one is in memory meanwhile."""
        seen, taken = list[StorageWeakRef](), dict[str, torch.Tensor]()
        for name, weight in stream():
            seen.append(StorageWeakRef(weight.untyped_storage()))
            until(lambda: all(one.expired() for one in seen[:-1]))  # a thread may hold one for a moment
            assert not seen[-1].expired()
            taken[name] = weight.half()
        return taken

    model, before = Tower(), dict[str, torch.Tensor]()
    with ot.offload(model, nvme=drive, **HOMES[home]) as session:
        optimizer = session.adamw(lr=1e-2)
        for batch in batches(2):
            loss_of(model, batch).backward()
            optimizer.step()
            with monkeypatch.context() as patch:
                read = calls_of(patch.setattr, PlacedWeights, "get", lambda _, unit, start, count: (unit, start))
                taken = streamed(session.named_weights)
            assert len(read) == len(set(read)) == len(taken)
            assert taken.keys() == {name for name, _ in model.named_parameters()}
            assert_same(streamed(session.named_masters), taken)
            assert not any(torch.equal(weight, taken[name]) for name, weight in before.items())
            before = taken


class Checkpointed(Tower):
    """A model that recomputes two blocks at a time, and the head, whose weight is read directly."""

    reentrant = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        def two(x: torch.Tensor, at: int) -> torch.Tensor:
            for floor in self.floors[at : at + 2]:
                x = x + floor(x)
            return x

        def head(x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x, 0.1) * self.scale @ self.head.weight.t()

        x = self.table(input_ids)
        for at in (0, 2):
            x = checkpoint(two, x, at, use_reentrant=self.reentrant)
        return checkpoint(head, x, use_reentrant=self.reentrant)


@pytest.mark.slow
def test_checkpointed_parts_of_several_blocks(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, around: Any, clip: Callable[[float], Any]) -> tuple[float, float]:
        torch.manual_seed(7)
        with around():
            loss = loss_of(model, batches(1)[0])
            loss.backward()
        return loss.item(), float(clip(1.0))

    torch.manual_seed(1)
    model = Checkpointed()
    reference, small = copy.deepcopy(model), copy.deepcopy(model)
    expected = step(reference, nullcontext, partial(clipped, reference))
    with ot.offload(model, nvme=drive, params="nvme", weight_buffers=2) as session:
        clip = session.clip_grad_norm_
        # The second step prefetches, since the order is known.
        for around, reentrant in ((nullcontext, False), (session.micro_batch, False), (session.micro_batch, True)):
            monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
            assert step(model, around, clip) == expected
            session._clear()
        with pytest.raises(ot.UserError, match="use_reentrant=False"):
            step(model, nullcontext, clip)
    monkeypatch.setattr(Checkpointed, "reentrant", False)
    few = ot.offload(small, nvme=drive, params="nvme", weight_buffers=1)
    with few as session, pytest.raises(ot.UserError, match="weight_buffers must be at least 2"):
        step(small, nullcontext, session.clip_grad_norm_)


def test_changes_that_would_be_lost_are_refused(drive: Path) -> None:
    model = Tower()
    with ot.offload(model, nvme=drive, **HOMES["in RAM"]) as session:
        session.adamw()
        weight = model.floors[0][1].weight
        for refused, words in (
            (lambda: weight.mul_(2), "the next step would undo it"),
            (model.half, "neither moved nor converted"),
            (lambda: model.to(torch.bfloat16), "neither moved nor converted"),
            (lambda: copy.deepcopy(model), "cannot be copied"),
            (lambda: model.floors[1](torch.zeros(1, 32)), "session.micro_batch"),
            (lambda: setattr(weight, "grad", torch.zeros_like(weight)), "cannot be set"),
            (lambda: session.adamw(), "one optimizer"),
            (lambda: session.clip_grad_norm_(0), "above 0"),
        ):
            with pytest.raises(ot.UserError, match=words):
                refused()
        assert model.to("cpu", torch.float32) is model
    for refused in (weight.sum, lambda: model(torch.zeros(1, 2, dtype=torch.int64))):
        with pytest.raises(ot.UserError, match="closed"):
            refused()


def test_another_default_dtype_is_refused_before_it_rounds_an_update(drive: Path) -> None:
    torch.manual_seed(1)
    model, refused = Tower(), "set_default_dtype.*bfloat16.* set it to torch.float32"
    torch.set_default_dtype(torch.bfloat16)
    with pytest.raises(UserError, match=refused):
        ot.offload(copy.deepcopy(model), nvme=drive)
    torch.set_default_dtype(torch.float32)
    with ot.offload(model, nvme=drive, **HOMES["on the drive"]) as session:
        optimizer = session.adamw()
        loss_of(model, batches(1)[0]).backward()
        torch.set_default_dtype(torch.bfloat16)
        with pytest.raises(UserError, match=refused):
            optimizer.step()
        assert all(master.dtype is torch.float32 for _, master in session.named_masters())
        torch.set_default_dtype(torch.float32)
        optimizer.step()


@pytest.mark.slow
def test_frozen_and_left_out_parameters(drive: Path, tmp_path: Path) -> None:
    """Frozen parameters have no state; parameters in no group stay unchanged and count in the norm, as in torch."""
    torch.manual_seed(1)
    model = Tower()
    model.table.requires_grad_(False)
    reference = copy.deepcopy(model)
    usual = torch.optim.AdamW(reference.floors.parameters(), fused=True)
    with ot.offload(model, nvme=drive, **HOMES["on the drive"]) as session:
        optimizer = session.adamw(model.floors.parameters())
        for batch in batches(4):
            loss_of(model, batch).backward()
            loss_of(reference, batch).backward()
            assert session.clip_grad_norm_(0.1) == clipped(reference, 0.1)
            optimizer.step()
            usual.step()
            reference.zero_grad()
        for name, master in session.named_masters():
            assert torch.equal(master, reference.get_parameter(name)), name
        session.save(tmp_path / "save")
        assert "table.weight" not in session._offloaded.steps
        with pytest.raises(ot.UserError, match=r"table\.weight was frozen"):
            model.table.requires_grad_(True)


@pytest.mark.slow
def test_exports_and_saves_of_any_module_have_its_buffers(drive: Path, tmp_path: Path) -> None:
    """The file is the module's state_dict, buffers in their own dtypes included; a buffer it cannot hold is named."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    model, plain, again, odd = made(), made(), made(), nn.Linear(16, 16)
    with ot.offload(model, nvme=drive, **HOMES["on the drive"]) as session:
        optimizer = session.adamw(lr=1e-2)
        model(torch.arange(128.0).view(8, 16)).square().sum().backward()
        optimizer.step()
        session.export(tmp_path / "out", dtype="fp32")
        session.save(tmp_path / "saves/last")
        torch.save(model.state_dict(), tmp_path / "out.pt")
        expected = dict(session.named_weights()) | {name: one.clone() for name, one in model.named_buffers()}
    plain.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert all(torch.equal(expected[name], tensor) for name, tensor in plain.state_dict().items())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert_same(found, expected)
    with ot.offload(again, nvme=drive, **HOMES["on the drive"]) as session:
        session.adamw(lr=1e-2)
        assert session.resume(tmp_path / "saves") == 1
        assert all(torch.equal(expected[name], buffer) for name, buffer in again.named_buffers())
    odd.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    said = r"buffer phase is torch\.complex64.*persistent=False"
    with ot.offload(odd, nvme=drive, **HOMES["on the drive"]) as session, pytest.raises(UserError, match=said):
        session.export(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


@pytest.mark.slow
def test_sums_of_16_bits_take_one_micro_batch(drive: Path) -> None:
    model = Tower().bfloat16()
    with ot.offload(model, nvme=drive, gradient_accumulation_steps=1, **HOMES["in RAM"]) as session:
        optimizer = session.adamw()
        for _ in range(2):
            loss_of(model, batches(1)[0]).backward()
            optimizer.step()
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(ot.UserError, match="gradient_accumulation_steps=2"):
            loss_of(model, batches(1)[0]).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "anew", "count"),
    [("resident", True, 3), ("on the drive", False, 2)],
)
def test_offloaded_inputs_change_no_bit_and_are_in_the_plan(
    home: str, anew: bool, count: int, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the Trainer turns checkpointing on again (`anew`), and if only two blocks are checkpointed."""
    kept = calls_of(monkeypatch.setattr, Activations, "pack_input", lambda _, tensor: tensor.nbytes)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    expected = by_torch(reference, steps=3)
    keys = {"offload_activations": True, "activation_checkpointing": count, "freeze": [], "micro_batch_size": 1}
    with opened(folder, drive, home=home, **keys) as session:
        session.model.train()
        if anew:
            session.model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = session.adamw(lr=1e-2)
        assert list(trained(session.model, optimizer, one_cycle(optimizer), session=session, steps=3)) == expected
        assert_same(dict(session.named_masters()), dict(reference.named_parameters()))
        planned = [i.bytes for i in session.plan.items if i.name == "block inputs" and i.tier == "ram"]
    assert kept == [24 * 64 * 4] * 3 * ACCUMULATE * count
    assert max(planned) == 2 * 4096 * count  # each in whole sectors


@pytest.mark.slow
def test_unsupported_activations_are_refused(folder: Path, drive: Path) -> None:
    with opened(folder, drive, offload_activations=True, activation_checkpointing="on", freeze=[]) as session:
        session.model.train()
        with session.micro_batch():
            first, second = of_rows(session.model, 0), of_rows(session.model, 1)
            second.backward()
            with pytest.raises(ot.UserError, match="another forward came between"):
                first.backward()
        ids = ROWS[0]["input_ids"]
        with session.micro_batch():
            whole, direct = session.model(ids).logits, session.model.forward(ids).logits
        assert torch.equal(whole, direct)
        with session.micro_batch(), pytest.raises(ot.UserError, match="was called by itself"):
            session.model.base_model(ids)
    with pytest.raises(ot.UserError, match="needs checkpointed activations"):
        ot.offload(torch.nn.Linear(3, 3), offload_activations=True, say=lambda _: None)


def test_errors_name_the_callers_keywords() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtpye": "fp32"}, "dtpye='fp32': a session has no such key; did you mean dtype?"),
        ({"lr": 1e-3}, "give it to session.adamw"),
        ({"freeze": ["."]}, r"freeze=\['\.'\]: call requires_grad_\(False\)"),
        ({"attention": "eager"}, "attention='eager': ot.load takes it"),
        ({"dtype": "fp16"}, "no loss scale, so no fp16"),
        ({"params": "nvme"}, 'params="nvme" needs a drive: add nvme='),
        ({"page_size": 7}, "page_size: 7 is not allowed"),
        ({"overlap": "backward"}, r"overlap='backward': .* use overlap='forward'"),
        ({"blocks": ["flors"]}, "no submodule of that name; it has table, floors"),
        ({"micro_batch_size": 10**9}, r"this does not fit: .* \(force=True runs it anyway\)"),
    ]
    for keys, words in cases:
        with pytest.raises(ot.UserError, match=words) as refused:
            ot.offload(Tower(), say=lambda line: None, **keys)
        assert "--" not in str(refused.value)


def test_keywords_take_several_names_and_blocks_are_found() -> None:
    for several in ("wte", ["wte"], {"wte"}):
        config = session_config("gpt2", {"freeze": several, "nvme": Path("/ssd")})
        assert (config.model.freeze, config.placement.nvme) == (("wte",), ("/ssd",))
    for blocks, names in ((None, [f"floors.{number}" for number in range(4)]), (["floors.1"], ["floors.1"])):
        units = {weight.unit for weight in api.shape_of(Tower(), blocks=blocks).weights if weight.block}
        assert sorted(units) == names
