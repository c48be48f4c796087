"""Tests of the tiered engine against plain torch: every placement gives the same numbers, for every kind of model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from engine_bench import ON_GPU, REENTRANT, assert_same, batches, drives, engine, masters, model_directory, plain, train
from late_engines import late_engine
from late_transfers import LateDevice, hasty
from plain_engine import PlainEngine
from safetensors.torch import load_file

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.offloading.pages.store import DamagedPage
from offload_trainer.optim import loss_scale
from offload_trainer.plan.tiered.state_formats import state_format
from offload_trainer.telemetry.meters import PhaseClock

pytestmark = pytest.mark.usefixtures("nothing_is_small")


HOMES = {
    "resident": ["--params", "gpu"],
    "in RAM": ["--params", "cpu", "tiered.weight_buffers=2"],
    "sums on the device": ["--params", "cpu", "placement.gradients=gpu", "tiered.weight_buffers=2"],
    "on the drive": ["--params", "nvme", "tiered.weight_buffers=2"],
    "all on the drive": [
        "--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "tiered.weight_buffers=2",
    ],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="on a CPU every home is held against plain torch's bits")
def test_on_a_gpu_plain_torch_is_followed_closely(folder: Path) -> None:
    """The engine's AdamW has the CPU's bits, and CUDA's fused AdamW differs in the last ones at each step."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    expected, _ = plain(model, 5, "--dtype", "fp32")
    with engine(model, "--engine", "plain", "--dtype", "fp32") as reference:
        for (loss, norm), (right_loss, right_norm) in zip(train(reference, batches(5)), expected, strict=True):
            assert loss == pytest.approx(right_loss, rel=1e-3)
            assert norm == pytest.approx(right_norm, rel=1e-2)


PLACES = {
    "share 0": ["--optimizer", "nvme"],
    "share 0.25": ["--optimizer", "nvme", "--ram-fraction", "0.25"],
    "share 0.5": ["--optimizer", "nvme", "--ram-fraction", "0.5"],
    "share 1": ["--ram-fraction", "1"],
    "weights in RAM": ["--params", "cpu"],
    "weights on the drive": ["--params", "nvme", "--optimizer", "nvme", "tiered.page_buffers=2"],
    "gradients on the device": ["--optimizer", "nvme", "--ram-fraction", "0.5", "placement.gradients=gpu"],
    "all on the drive": HOMES["all on the drive"],
}


@pytest.mark.parametrize(("place", "count"), [*zip(PLACES, [1, 3] * 4, strict=True)])
def test_placement_does_not_change_a_bit(place: str, count: int, folder: Path) -> None:
    """Eight bf16 steps give the losses, norms and masters of plain torch's AdamW bit for bit."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    with engine(model, *PLACES[place], drives=drives(folder, count)) as ours:
        steps = train(ours, batches(8))
        expected, weights = plain(model, 8)
        assert steps == expected
        assert_same(masters(ours), weights)
    _, initial = plain(model, 0)
    assert not [name for name, tensor in weights.items() if torch.equal(tensor, initial[name])]  # all have changed


@pytest.mark.parametrize("home", ["resident", "sums on the device", "all on the drive"])
def test_sums_in_the_models_dtype(home: str, folder: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    wished = ["--accumulate", "3", "optim.accumulate_dtype=model"]
    with engine(model, *HOMES[home], *wished, drives=drives(folder, 1)) as ours:
        steps = train(ours, batches(9), accumulate=3)
        expected, weights = plain(model, 3, *wished, accumulate=3)
        assert steps == expected
        assert_same(masters(ours), weights)


@pytest.mark.parametrize("home", ["resident", "in RAM", "all on the drive"])
@pytest.mark.parametrize(
    "words",
    [
        ['model.freeze=["wte","h.1.mlp"]'],
        ['model.freeze=["wte","wpe","h.0."]', "model.activation_checkpointing=on", REENTRANT],
    ],
    ids=["some", "embeddings, reentrant"],
)
def test_frozen_weights_are_unchanged_and_the_others_follow_plain_torch(
    home: str, words: list[str], folder: Path
) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    with engine(model, *HOMES[home], *words, drives=drives(folder, 1)) as ours:
        before = masters(ours)
        steps = train(ours, batches(3))
        expected, weights = plain(model, 3, *words)
        assert steps == expected
        after = masters(ours)
        assert_same(after, weights)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved == set(ours.offloaded.trained)


@pytest.mark.parametrize("home", ["in RAM", "all on the drive"])
def test_experts(home: str, folder: Path) -> None:
    """Eight experts share a few tokens, so that some get none."""
    model = model_directory(folder / "mixtral", "mixtral", tied=False)
    with engine(model, *HOMES[home], drives=drives(folder, 1)) as ours:
        steps = train(ours, batches(4, rows=1, length=3))
        with engine(model, "--engine", "plain") as reference:
            assert steps == train(reference, batches(4, rows=1, length=3))
            assert_same(masters(ours), masters(reference))


def skip_last_block(trained: PlainEngine | TieredEngine, steps: set[int]):
    """Return a `before` hook that removes the last block in these steps, so that its weights get no gradient."""
    body = trained._module.model.transformer
    whole = body.h

    def before(step: int) -> None:
        body.h = whole[:-1] if step in steps else whole

    return before


@pytest.mark.parametrize("home", ["resident", "sums on the device", "all on the drive"])
def test_weights_without_a_gradient_do_not_move_and_keep_their_own_count(home: str, folder: Path) -> None:
    """Such weights get no decay and no bias-correction step, as in torch, also after a checkpoint and with
    accumulation.
    """
    model = model_directory(folder / "gpt2-True", "gpt2")
    unused = {2, 3, 6}
    with engine(model, "--engine", "plain") as reference:
        expected = train(reference, batches(6), before=skip_last_block(reference, unused))
        weights = masters(reference)
    with engine(model, *HOMES[home], drives=drives(folder, 1)) as ours:
        first = train(ours, batches(6)[:4], before=skip_last_block(ours, unused))
        (folder / f"saved-{home}").mkdir()
        ours.snapshot().write(folder / f"saved-{home}")
    with engine(model, *HOMES[home], drives=drives(folder, 1), load_weights=False) as ours:
        ours.load(folder / f"saved-{home}")
        second = train(ours, batches(6)[4:], before=skip_last_block(ours, {step - 4 for step in unused}))
        assert first + second == expected
        assert_same(masters(ours), weights)


def test_a_block_unused_in_the_last_micro_batch_counts_in_the_norm(folder: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    results = []
    homes = ("resident", "sums on the device", "all on the drive")
    for words in (["--engine", "plain"], *(HOMES[home] for home in homes)):
        with engine(model, "--accumulate", "2", *words, drives=drives(folder, 1)) as trained:
            skip, whole = skip_last_block(trained, {1}), trained._module.forward

            def forward(*args: torch.Tensor, skip=skip, whole=whole) -> torch.Tensor:
                forward.calls += 1
                skip(forward.calls % 2)
                return whole(*args)

            forward.calls = 1
            trained._module.forward = forward
            results.append(train(trained, batches(4), accumulate=2))
    assert results[1:] == [results[0]] * len(homes)


# -- fp16 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["resident", "sums on the device", "all on the drive"])
def test_fp16_overflow_skips_the_step_and_halves_the_scale(
    home: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinity at step 5 of 9 changes nothing, and the scale follows torch's GradScaler."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    words = ["--dtype", "fp16"]
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 1024.0)
    monkeypatch.setattr(loss_scale, "WINDOW", 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with engine(model, *HOMES[home], *words, drives=drives(folder, 1)) as ours:
        for step, batch in enumerate(batches(9), 1):
            scale, before = ours._scale.value, masters(ours) if step == 5 else {}
            assert scale == scaler.get_scale()
            planted = ours.offloaded.parameters["transformer.h.2.mlp.c_fc.weight"][0].register_hook(
                lambda grad, step=step: grad.fill_(float("inf")) if step == 5 else grad
            )
            result = ours.train_step([batch], lr=1e-2, clock=PhaseClock())
            planted.remove()
            assert result.loss_scale == scale
            parameter.grad = torch.full((1,), float("inf") if step == 5 else 1.0)
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
            assert (result.grad_norm is None) == result.skipped == (step == 5)
            if step == 5:
                assert_same(masters(ours), before)
                assert ours._scale.value == scale / 2
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**30)  # the first steps overflow in plain torch too
    expected, _ = plain(model, 20, *words)
    assert {norm is None for _, norm in expected} == {True, False}
    with engine(model, *HOMES[home], *words, drives=drives(folder, 1)) as ours:
        assert train(ours, batches(20)) == expected


def test_a_loss_scale_is_resumed_in_fp16_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    fp16 = ["--dtype", "fp16"]
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 1024.0)
    monkeypatch.setattr(loss_scale, "WINDOW", 2)
    scales = {}
    for before in ("bf16", "fp16"):
        place = folder / f"from {before}"
        place.mkdir()
        with engine(model, *(fp16 if before == "fp16" else ["--dtype", "bf16"])) as ours:
            train(ours, batches(3))
            ours.snapshot().write(place)
        for after, words in (("bf16", ["--dtype", "bf16"]), ("fp16", fp16)):
            with engine(model, *words, load_weights=False) as ours:
                ours.load(place)
                scales[before, after] = ours._scale.value
    assert scales == {("bf16", "bf16"): 1, ("bf16", "fp16"): 1024, ("fp16", "bf16"): 1, ("fp16", "fp16"): 2048}


@pytest.mark.parametrize("home", ["resident", "sums on the device", "all on the drive"])
def test_a_nan_changes_nothing_and_training_continues(home: str, folder: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    data = batches(4)
    with engine(model, *HOMES[home], drives=drives(folder, 1)) as ours:
        first = train(ours, data[:2])
        before = masters(ours)
        name = "transformer.h.0.ln_1.bias"
        planted = ours.offloaded.parameters[name][0].register_hook(lambda grad: grad * float("nan"))
        assert train(ours, data[:1])[0][1] is None
        planted.remove()
        assert_same(masters(ours), before)
        assert first + train(ours, data[2:]) == plain(model, 4)[0]


# -- every wait is needed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        HOMES["in RAM"],
        HOMES["sums on the device"],
        HOMES["all on the drive"],
        [*HOMES["all on the drive"], "model.activation_checkpointing=on"],
    ],
)
def test_late_copies_and_reads_change_nothing(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transfer finishes late and out of order, as on a GPU and a busy drive."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    with late_engine(monkeypatch, model, *words, drives=drives(folder, 2)) as ours:
        assert train(ours, batches(4)) == plain(model, 4)[0]


def test_a_missing_wait_would_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail without the wait for a unit."""
    hasty(monkeypatch)
    model = model_directory(folder / "gpt2-True", "gpt2")
    with engine(model, *HOMES["in RAM"], drives=drives(folder, 1), device=LateDevice()) as ours:
        assert train(ours, batches(4)) != plain(model, 4)[0]


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "states"),
    [("share 1", "fp32"), ("share 0.5", "8bit"), ("all on the drive", "fp32"), ("partly frozen", "8bit")],
)
def test_a_snapshot_is_consistent_while_training_continues(
    place: str, states: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    put = TieredSnapshot._put
    monkeypatch.setattr(TieredSnapshot, "_put", lambda *args: (put(*args), time.sleep(0.03)))
    frozen = [*PLACES["all on the drive"], 'model.freeze=["h.1.mlp","wpe"]']
    words = [*PLACES.get(place, frozen), f"optim.moment_dtype={states}", "tiered.page_size=8192"]
    with engine(model, *words, drives=drives(folder, 1)) as ours:
        train(ours, batches(8)[:4])
        (tmp_path / "at once").mkdir()
        ours.snapshot().write(tmp_path / "at once")
        (tmp_path / "behind").mkdir()
        snapshot = ours.snapshot()
        writing = threading.Thread(target=snapshot.write, args=[tmp_path / "behind"])
        writing.start()
        train(ours, batches(8)[4:6])
        writing.join()
    for path in (tmp_path / "at once").iterdir():
        assert (tmp_path / "behind" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_closed_snapshot_blocks_no_update(folder: Path, tmp_path: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    with engine(model, *PLACES["share 0.5"], drives=drives(folder, 1)) as ours:
        snapshot = ours.snapshot()
        snapshot.close()
        assert train(ours, batches(4)) == plain(model, 4)[0]
        with pytest.raises(TrainerError, match="let go of before it was written"):
            snapshot.write(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("share 0.25", ["--optimizer", "nvme", "--ram-fraction", "0.75"]),
        ("all on the drive", ["--params", "gpu"]),
        ("share 1", PLACES["all on the drive"]),
        ("share 0.5", ["--engine", "plain"]),
    ],
)
def test_state_resumes_in_another_placement_bit_for_bit(before: str, after: list[str], folder: Path) -> None:
    """State saved from one drive resumes on three drives, with another share, or in plain torch."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    place = folder / f"state {before}"
    place.mkdir()
    with engine(model, *PLACES[before], drives=drives(folder, 1)) as ours:
        first = train(ours, batches(6)[:3])
        ours.snapshot().write(place)
        assert train(ours, batches(6)[3:]) == plain(model, 6)[0][3:]  # saving does not change the run
    extra = {} if "plain" in after else {"load_weights": False}
    with engine(model, *after, drives=drives(folder, 3), **extra) as other:
        other.load(place)
        assert first + train(other, batches(6)[3:]) == plain(model, 6)[0]
        assert_same(masters(other), plain(model, 6)[1])


def test_8bit_moments_resume_exactly_in_another_placement(folder: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    place = folder / "8-bit states"
    place.mkdir()
    wished = ["optim.moment_dtype=8bit"]
    with engine(model, *PLACES["share 0.25"], *wished, drives=drives(folder, 1)) as ours:
        steps = train(ours, batches(4)[:2])
        ours.snapshot().write(place)
        steps += train(ours, batches(4)[2:])
        weights = masters(ours)
    with engine(model, *PLACES["share 1"], *wished, load_weights=False) as other:
        other.load(place)
        assert train(other, batches(4)[2:]) == steps[2:]
        assert_same(masters(other), weights)


def test_stored_moments_without_a_gradient_do_not_drift(folder: Path) -> None:
    """Converting 8-bit moments to fp32 and back would change them."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    stored = []
    with engine(model, *HOMES["all on the drive"], "optim.moment_dtype=8bit", drives=drives(folder, 1)) as ours:
        before = skip_last_block(ours, {2, 3, 4})
        for steps in (range(2), range(2, 5), range(5, 6)):
            for step in steps:
                train(ours, [batches(6)[step]], before=lambda _, step=step: before(step))
            place = folder / f"drift {steps.stop}"
            place.mkdir()
            ours.snapshot().write(place)
            read = [load_file(place / f"{field}.safetensors") for field in state_format("adamw", "8bit").fields]
            stored.append([tensors[name] for tensors in read for name in tensors if ".h.4." in name])
    assert stored[0]
    assert all(torch.equal(one, other) for one, other in zip(stored[0], stored[1], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(stored[1], stored[2], strict=True) if one.numel() > 9)


@pytest.mark.slow
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_stored_precision_trains_like_fp32(states: str, folder: Path) -> None:
    """Forty steps on the same two rows end near the loss of fp32 moments."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    losses = []
    for wished in ([f"optim.moment_dtype={states}"], []):
        with engine(model, *wished) as ours:
            losses.append([loss for loss, _ in train(ours, batches(1) * 40, lr=2e-3)])
    assert losses[0] != losses[1]
    assert losses[1][-1] < losses[1][0] / 4
    assert losses[0] == pytest.approx(losses[1], abs=0.05)  # ten times the observed difference


# -- drives ----------------------------------------------------------------------------------------------------------


def test_bytes_are_the_planned_ones_and_no_more(folder: Path) -> None:
    """The kernel's counters show that state is read and written once each step, or half of it with half in RAM.

    Gradients on the drive are written once and read once: a step does not read the sums of the step before.
    """
    from offload_trainer.telemetry.meters import read_io

    model = model_directory(folder / "gpt2-True", "gpt2")
    for share, gradients in ((0.0, "cpu"), (0.5, "cpu"), (0.0, "nvme")):
        words = ["--optimizer", "nvme", "--ram-fraction", str(share), f"placement.gradients={gradients}"]
        with engine(model, *words, drives=drives(folder, 1)) as ours:
            trained = sum(page.elements for page in ours.offloaded.store.pages)
            data = batches(4)
            train(ours, data[:2])
            ours.synchronize()
            before = read_io()
            train(ours, data[2:])
            ours.synchronize()
            moved = read_io() - before
            wanted = 2 * 12 * (trained - layout.aligned(int(trained * share)))
            if gradients == "nvme":
                wanted += 2 * ours.offloaded.gradients.dtype.itemsize * trained
            assert moved.read_bytes == wanted
            assert moved.written_bytes == wanted


def test_a_file_cut_short_stops_the_run_with_the_numbers(folder: Path) -> None:
    model = model_directory(folder / "gpt2-True", "gpt2")
    (drive,) = drives(folder, 1)
    with engine(model, "--optimizer", "nvme", drives=[drive]) as ours:
        train(ours, batches(1))
        ours.synchronize()
        file = next(drive.glob("offload-trainer/run-*/state"))
        with open(file, "r+b") as opened:
            opened.truncate(8192)
        with pytest.raises(TrainerError, match=r"state: cut short: .* the file has 8192 of \d+"):
            train(ours, batches(2))  # The second step fails at the latest, since it waits for the first one's update.


def change(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("words", [["tiered.state_copies=2"], ["optim.moment_dtype=8bit"]])
def test_a_changed_page_of_state_is_always_found(words: list[str], folder: Path) -> None:
    """The next update finds it, and so does reading a single weight."""
    model = model_directory(folder / "gpt2-True", "gpt2")
    (drive,) = drives(folder, 1)
    with engine(model, "--optimizer", "nvme", *words, drives=[drive]) as ours:
        train(ours, batches(2))
        ours.synchronize()
        store = ours.offloaded.store
        file, offset = store._where(0, store.copies.valid(0))
        change(file.path, offset + 40)
        name = next(iter(ours.offloaded.state.pieces(0)))[0]
        wrong = rf"state: page 0, \d+ bytes at {offset}, is damaged.*its master does not have the CRC-32"
        with pytest.raises(DamagedPage, match=wrong):
            ours.offloaded.master(name)
        with pytest.raises(DamagedPage, match=wrong):
            # The second step fails at the latest, since it waits for the first one's update.
            train(ours, batches(4)[2:])
