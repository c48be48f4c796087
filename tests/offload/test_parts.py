"""Tests of fetching blocks' weights module by module: results match fetching whole blocks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_bench import assert_same, batches, engine, masters, model_directory, plain, train
from forked_ranks import FILES, Case, run_ranks
from late_engines import late_engine
from late_transfers import LateDevice, hasty
from safetensors.torch import load_file

import offload_trainer.offloading.model as offloaded_model
from offload_trainer.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_is_small")

PARTS = "tiered.fetch_granularity=module"
ON, OFF = "model.activation_checkpointing=on", "model.activation_checkpointing=off"
RAM = ("--params", "cpu")
DRIVE = ("--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme")
WAYS: dict[str, tuple[str, ...]] = {
    "kept": (*RAM, OFF),
    "computed again": (*RAM, ON),
    "one buffer": (*RAM, ON, "tiered.weight_buffers=1"),
    "on the drive": (*DRIVE, ON, "tiered.weight_buffers=2"),
    "inputs away": (*DRIVE, ON, "model.offload_activations=nvme", "tiered.weight_buffers=1"),
    "update behind the forward": (*DRIVE, ON, "tiered.overlap=forward"),
    "update behind the backward": (*DRIVE, ON, "tiered.overlap=backward", "optim.max_grad_norm=0"),
    "weights on the device": ("--params", "gpu", ON),
    "three micro-batches": (*DRIVE, ON, "--accumulate", "3"),
}


def model_of(folder: Path, architecture: str) -> Path:
    return model_directory(folder / architecture, architecture, tied=architecture == "gpt2")


def drive(folder: Path) -> Path:
    (folder / "drive").mkdir(exist_ok=True)
    return folder / "drive"


@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        *(("gpt2", way) for way in WAYS),
        *((name, way) for name in ("qwen3", "mixtral", "opt") for way in ("kept", "inputs away")),
    ],
)
def test_parts_of_blocks_have_plain_torchs_bits(architecture: str, way: str, folder: Path) -> None:
    model = model_of(folder, architecture)
    words, accumulate = WAYS[way], 3 if "--accumulate" in WAYS[way] else 1
    same = [word for word in words if word.startswith("optim.")] + ["--accumulate", str(accumulate)]
    with engine(model, *words, PARTS, drives=[drive(folder)]) as ours:
        parts = [unit for unit in ours.offloaded.units if unit.is_part]
        assert len({part.within for part in parts}) < len(parts)  # each block has several
        steps = train(ours, batches(3 * accumulate), accumulate=accumulate)
        expected, weights = plain(model, 3, *same, accumulate=accumulate)
        assert steps == expected
        assert_same(masters(ours), weights)


@pytest.mark.slow
def test_the_placement_of_parts_does_not_change_stored_moments(folder: Path) -> None:
    """The placement does not change stochastic rounding, which draws separate noise for each unit."""
    model, found = model_of(folder, "qwen3"), []
    for words in ((*DRIVE, "tiered.weight_buffers=1", ON), RAM):
        with engine(model, *words, PARTS, "optim.moment_dtype=8bit", drives=[drive(folder)]) as ours:
            found.append((train(ours, batches(4)), masters(ours)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("before", [(PARTS,), ()])
def test_a_snapshot_resumes_with_divided_or_whole_blocks(before: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    model, data = model_of(folder, "qwen3"), batches(4)
    with engine(model, *DRIVE, *before, drives=[drive(folder)]) as ours:
        first = train(ours, data[:2])
        ours.snapshot().write(tmp_path)
    after = () if before else (PARTS,)
    with engine(model, *RAM, ON, *after, drives=[drive(folder)], load_weights=False) as other:
        other.load(tmp_path)
        assert first + train(other, data[2:]) == plain(model, 4)[0]


@pytest.mark.slow
def test_pieces_of_a_row_are_computed_with_a_part_that_stays(folder: Path) -> None:
    model, found = model_of(folder, "qwen3"), []
    for more in ((PARTS,), ()):
        with engine(model, *RAM, ON, "model.mlp_chunk=16", "tiered.weight_buffers=1", *more) as ours:
            names = [unit.name for unit in ours.offloaded.units if unit.is_part]
            assert "model.layers.0.mlp" in names if more else not names
            found.append(train(ours, batches(3)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "way"),
    [("gpt2", "kept"), ("qwen3", "one buffer"), ("gpt2", "on the drive"), ("qwen3", "inputs away")],
)
def test_late_copies_and_reads_change_nothing(
    architecture: str, way: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(folder, architecture)
    with late_engine(monkeypatch, model, *WAYS[way], PARTS, drives=[drive(folder)]) as ours:
        assert train(ours, batches(3)) == plain(model, 3)[0]


def test_a_recomputation_that_keeps_bare_weights_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that calls torch's checkpoint directly keeps all weights of the block, so its modules cannot
    share buffers.
    """
    monkeypatch.setattr(offloaded_model, "keep_weights", lambda *_: None)
    model = model_of(folder, "qwen3")
    with (
        engine(model, *RAM, ON, PARTS, "tiered.weight_buffers=2") as ours,
        pytest.raises(
            UserError,
            match=r"a checkpointed part of the model runs with the weights of 3 .*weight_buffers must be at least",
        ),
    ):
        train(ours, batches(1))


def test_reading_a_weight_of_another_part_gives_nan(folder: Path) -> None:
    """Absent weights are NaN: code that reads one without calling its module stops the run rather than
    use old values.
    """
    model = model_of(folder, "qwen3")
    with engine(model, *RAM, OFF, PARTS, "tiered.weight_buffers=1") as ours:
        mlp = ours.offloaded._module.get_submodule("model.layers.1.mlp")
        gate = mlp.gate_proj.weight
        mlp.down_proj.register_forward_hook(lambda module, given, output: output + gate.sum())
        loss, norm = train(ours, batches(1))[0]
        assert loss != loss
        assert norm is None


@pytest.mark.slow
def test_ranks_with_divided_blocks_have_the_bits_of_one(tmp_path: Path) -> None:
    """Two ranks share reads from the drive, or all-gather parts from RAM, and match one rank."""
    model = model_of(tmp_path, "qwen3")
    drives = (str(drive(tmp_path)),)
    homes = {"drive": (*DRIVE, "model.offload_activations=nvme"), "RAM": (*RAM, "tiered.weight_transfer=all_gather")}

    def by(ranks: int, *more: str) -> list[Case]:
        words = (ON, "--dtype", "bf16", "--accumulate", str(2 // ranks), "tiered.weight_buffers=2", *more)
        return [
            Case(str(model), (*home, *words), str(tmp_path / f"{name}-{ranks}-{len(more)}"), steps=2, drives=drives)
            for name, home in homes.items()
        ]

    alone, whole, several = by(1, PARTS), by(1), by(2, PARTS)
    run_ranks([*alone, *whole], count=1, folder=tmp_path / "one")
    run_ranks(several, count=2, folder=tmp_path / "two")
    for made, one, other in zip(several, alone, whole, strict=True):
        assert made.left == one.left  # compared file by file
        assert made.left[0] == other.left[0]
        for name in FILES:  # The order of units differs, and so do the files.
            one_file, other_file = (load_file(Path(case.out) / f"{name}.safetensors") for case in (one, other))
            assert_same(one_file, other_file)


@pytest.mark.slow
def test_a_missing_wait_would_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty(monkeypatch)
    model = model_of(folder, "qwen3")
    with engine(model, *RAM, ON, PARTS, device=LateDevice()) as ours:
        assert train(ours, batches(3)) != plain(model, 3)[0]
