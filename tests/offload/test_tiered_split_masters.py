"""Tests of masters stored as rounding remainders: they have the bits of fp32 masters in every placement, with fewer
bytes.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import engine_bench
import pytest
import torch
from engine_bench import Step, batches, engine, masters, model_directory, train
from late_engines import engine_on_streams, late_engine
from test_overlap import BEHIND, HOMES, saved
from test_tiered import skip_last_block

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.errors import UserError
from offload_trainer.export.sources import opened
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.storage.scratch_dir import DriveLease
from offload_trainer.telemetry.meters import read_io

pytestmark = pytest.mark.usefixtures("nothing_is_small")

REMAINDERS = "tiered.master_format=split"
STATES = [
    ["optim.moment_dtype=fp32"],
    ["optim.moment_dtype=bf16"],
    ["optim.moment_dtype=8bit"],
    ["optim.name=lion", "optim.moment_dtype=bf16"],
]


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def gpt2(folder: Path) -> Path:
    return model_directory(folder / "gpt2", "gpt2")


def plant_ties(ours: TieredEngine) -> None:
    """Set every third master exactly halfway between two bf16 weights; others round either way."""
    for name, value in masters(ours).items():
        words = value.view(torch.int32)
        words[..., ::3] &= ~0xFFFF
        words[..., ::3] |= 0x8000
        ours.offloaded.put([(name, value.bfloat16(), value)])


@cache
def whole(folder: Path, *words: str, steps: int) -> tuple[list[Step], dict[str, bytes]]:
    """Return steps and checkpoint files of a run with fp32 masters, all in RAM."""
    with engine(gpt2(folder), "--ram-fraction", "1", "tiered.overlap=off", *words) as ours:
        plant_ties(ours)
        place = folder / "-".join(["whole", str(steps), *words])
        return train(ours, batches(steps)), saved(ours, place)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tiered.overlap=off", BEHIND])
@pytest.mark.parametrize("home", HOMES)
def test_forty_steps_have_the_bits_of_masters_in_fp32(
    home: str, how: str, folder: Path, drive: Path, tmp_path: Path
) -> None:
    expected, state = whole(folder, steps=40)
    with engine(gpt2(folder), *HOMES[home], how, REMAINDERS, drives=[drive]) as ours:
        assert list(ours.offloaded.store.format.fields) == ["remainder", "ties", "exp_avg", "exp_avg_sq"]
        plant_ties(ours)
        assert (
            sum(int(ours.offloaded.store.get("ties", u.index, 0, u.trained).sum()) for u in ours.offloaded.units) > 99
        )
        assert train(ours, batches(40)) == expected
        assert saved(ours, tmp_path / "ours") == state


@pytest.mark.parametrize("states", STATES[1:])
@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_other_moments_and_rules(kernel: str, states: list[str], folder: Path, drive: Path, tmp_path: Path) -> None:
    expected, state = whole(folder, *states, steps=6)
    words = [*states, f"optim.kernel={kernel}", REMAINDERS]
    with engine(gpt2(folder), *HOMES["a third in RAM"], *words, drives=[drive]) as ours:
        plant_ties(ours)
        assert train(ours, batches(6)) == expected
        assert saved(ours, tmp_path / "ours") == state


@pytest.mark.parametrize("states", STATES)
def test_runs_resume_in_either_format(states: list[str], folder: Path, drive: Path, tmp_path: Path) -> None:
    """A checkpoint of either form, written during training, resumes in the other."""
    expected, state = whole(folder, *states, steps=6)
    home = HOMES["weights and gradients on the drive"]
    for before, after in (([REMAINDERS], []), ([], [REMAINDERS])):
        place = tmp_path / f"to {after}"
        place.mkdir()
        with engine(gpt2(folder), *HOMES["a third in RAM"], *states, *before, drives=[drive]) as ours:
            plant_ties(ours)
            steps = train(ours, batches(6)[:3])
            snapshot = ours.snapshot()
            writing = threading.Thread(target=snapshot.write, args=[place])
            writing.start()
            train(ours, batches(6)[3:])
            ours.synchronize()
            writing.join()
            snapshot.close()
        with engine(gpt2(folder), *home, *states, *after, drives=[drive], load_weights=False) as other:
            other.load(place)
            assert steps + train(other, batches(6)[3:]) == expected
            assert saved(other, tmp_path / f"{after}") == state


@pytest.mark.parametrize("home", ["a third in RAM", "weights and gradients on the drive", "all on the device"])
def test_weights_without_a_gradient_and_frozen_ones_are_unchanged(
    home: str, folder: Path, drive: Path, tmp_path: Path
) -> None:
    found = []
    for words in ([], [REMAINDERS]):
        words = ['model.freeze=["wpe","h.1.mlp"]', *words]
        with engine(gpt2(folder), *HOMES[home], *words, drives=[drive]) as ours:
            steps = train(ours, batches(6), before=skip_last_block(ours, {2, 3, 5}))
            found.append((steps, saved(ours, tmp_path / str(len(found)))))
    assert found[0] == found[1]


@pytest.mark.parametrize("home", HOMES)
def test_late_copies_and_reads_change_nothing(
    home: str, folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, state = whole(folder, steps=6)
    with late_engine(monkeypatch, gpt2(folder), *HOMES[home], BEHIND, REMAINDERS, drives=[drive]) as ours:
        plant_ties(ours)
        assert train(ours, batches(6)) == expected
        assert saved(ours, tmp_path / "late") == state


@pytest.mark.parametrize("home", HOMES)
def test_streams_that_run_late_change_nothing(
    home: str, folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On simulated CUDA streams, old weights come down from the device and go up to its pages in time."""
    expected, state = whole(folder, steps=6)
    with engine_on_streams(monkeypatch, gpt2(folder), *HOMES[home], REMAINDERS, drives=[drive]) as ours:
        plant_ties(ours)
        assert train(ours, batches(6)) == expected
        assert saved(ours, tmp_path / "streams") == state


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "read", "written"),
    [
        ([], 10.0, 10.0),
        (["optim.moment_dtype=8bit"], 4.1, 4.1),
        (["--params", "nvme"], 12.0, 12.0),
    ],
    ids=["fp32 moments", "8-bit moments", "weights on the drive"],
)
def test_bytes_are_the_planned_ones(
    words: list[str], read: float, written: float, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's counters match the plan except for prefetched weights; the update moves the stated bytes a
    parameter.
    """
    plans: list[Plan] = []
    monkeypatch.setattr(engine_bench, "make_plan", lambda *a, **k: plans.append(make_plan(*a, **k)) or plans[0])
    model = model_directory(folder / "large", "gpt2", n_embd=256, n_layer=2)  # fields are padded to whole sectors
    words = [*words, "--optimizer", "nvme", "tiered.page_size=1048576", "tiered.weight_buffers=2", REMAINDERS]
    with engine(model, *words, drives=[drive]) as ours:
        trained = sum(unit.trained for unit in ours.offloaded.units)
        train(ours, batches(2))
        ours.synchronize()
        before = read_io()
        train(ours, batches(4)[2:])
        ours.synchronize()
        moved = read_io() - before
    traffic = [one for one in plans[0].traffic if one.place == str(drive)]
    # weights prefetched for the step after the measured ones, at either end
    ahead = 0 if "--params" not in words else 2 * trained
    assert abs(moved.read_bytes - 2 * sum(one.read for one in traffic)) <= ahead
    assert moved.written_bytes == 2 * sum(one.written for one in traffic)
    (update,) = (one for one in traffic if one.phase == "update")
    assert update.read / trained == pytest.approx(read, abs=0.05)
    assert update.written / trained == pytest.approx(written, abs=0.05)


def test_a_dead_runs_page_files_hold_no_masters(drive: Path) -> None:
    with DriveLease(drive) as lease:
        (lease.path / "state").write_bytes(bytes(8192))
        with pytest.raises(UserError, match=r"no masters can be read .* has tiered.master_format=split"):
            opened(lease.path, mixed=True).__enter__()


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "fp16"], "--dtype fp16: split masters need bf16 weights"),
        (["--dtype", "fp32"], "--dtype fp32"),
        (["tiered.state_copies=2"], "tiered.state_copies=2: weights have only one copy"),
        (
            ["--ram-fraction", "0", "tiered.overlap=backward"],
            "tiered.overlap=backward: a clipped step needs its old weights again",
        ),
        (["tiered.overlap=backward"], "tiered.overlap=backward: a clipped step needs its old weights again"),
    ],
)
def test_settings_without_split_masters_are_refused(words: list[str], message: str, folder: Path, drive: Path) -> None:
    asked = engine(gpt2(folder), *words, REMAINDERS, drives=[drive])
    with pytest.raises(UserError, match=f"tiered.master_format=split with {message}"):
        asked.__enter__()
