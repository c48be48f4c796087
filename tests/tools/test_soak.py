"""Tests of the soak: a short one, and a failure of each of its checks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from commands import environment

SCRIPTS = Path(__file__).resolve().parents[2] / "soak"
sys.path.insert(0, str(SCRIPTS))

from soak_world import KINDS, STEPS, Sentinels, Trial, World  # noqa: E402
from trials import Difference, compare_file, verify_checkpoint  # noqa: E402


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """A round without `bench` and `tune`, which take too long, passes."""
    words = ["--seed", "3", "--rounds", "1", "--kinds", "gpt2-fp16-accumulate"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "soak.py", *words, "--without", "bench,tune", "--directory", tmp_path],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "| rounds | 1 |" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["changed", "gone", "of another mode", "moved away", "a link elsewhere"])
def test_a_changed_file_of_the_user_is_found(harm: str, tmp_path: Path) -> None:
    sentinels = Sentinels()
    sentinels.plant(tmp_path, "mine")
    assert sentinels.check() == 8
    file = tmp_path / "mine/nested/.hidden"
    if harm == "changed":
        file.write_text("other")
    elif harm == "gone":
        file.unlink()
    elif harm == "of another mode":
        file.chmod(0o600)
    elif harm == "moved away":
        (tmp_path / "mine").rename(tmp_path / "yours")
    else:
        (tmp_path / "mine/link").unlink()
        (tmp_path / "mine/link").symlink_to("..")
    with pytest.raises(Difference, match="the user's"):
        sentinels.check()


def test_files_renamed_by_the_user_are_followed(tmp_path: Path) -> None:
    sentinels = Sentinels()
    sentinels.plant(tmp_path, "mine")
    sentinels.move(tmp_path / "mine", tmp_path / "yours")
    sentinels.check()
    (tmp_path / "yours/weights.safetensors").unlink()
    with pytest.raises(Difference, match="yours"):
        sentinels.check()


def checkpoint(path: Path, step: int) -> Path:
    """Make a minimal checkpoint."""
    path.mkdir(parents=True)
    texts = {"state.json": json.dumps({"step": step, "tokens": step, "data_position": step}), "engine.json": "{}"}
    for name, text in texts.items():
        (path / name).write_text(text)
    sums = {name: {"bytes": len(text), "crc32": zlib.crc32(text.encode())} for name, text in texts.items()}
    (path / "MANIFEST.json").write_text(json.dumps({"files": sums}))
    return path


@pytest.mark.parametrize("harm", ["a flipped bit", "cut short", "one more file"])
def test_an_incomplete_checkpoint_is_found(harm: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "step-00000001", 1)
    assert verify_checkpoint(made) == 2
    if harm == "a flipped bit":
        (made / "engine.json").write_text("{]")
    elif harm == "cut short":
        (made / "engine.json").write_text("{")
    else:
        (made / "exp_avg.safetensors").write_text("")
    with pytest.raises(Difference):
        verify_checkpoint(made)


def test_a_wrongly_pruned_checkpoint_is_found(tmp_path: Path) -> None:
    world = World(tmp_path)
    trial = Trial(KINDS[0], world.runs / "run", every=1, keep=2, on_disk=False)
    for step in range(1, STEPS + 1):
        checkpoint(world.folder / "alone" / trial.kind.name / f"checkpoints/step-{step:08d}", step)
    for step in (3, 4, 5):
        checkpoint(trial.checkpoints / f"step-{step:08d}", step)
    world.check([trial])
    shutil.rmtree(trial.checkpoints / "step-00000003")  # two newer ones exist
    world.check([trial])
    (trial.checkpoints / "step-00000004/state.json").rename(tmp_path / "state.json")
    with pytest.raises(Difference, match="holds"):
        world.check([trial])
    shutil.rmtree(trial.checkpoints / "step-00000004")
    with pytest.raises(Difference, match=r"\[4, 5\] are the newest 2, and \[5\] are there"):
        world.check([trial])


@pytest.mark.parametrize("other", ["another loss", "a step twice"])
def test_wrong_metrics_are_found(other: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    trial = Trial(KINDS[0], world.runs / "run", every=1, keep=2, on_disk=False)
    keys = {"tokens": 64, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1.0, "skipped": False}
    rows = [json.dumps({"step": step, "loss": 7.0 / step, **keys}) + "\n" for step in range(1, STEPS + 1)]
    alone = world.folder / "alone" / trial.kind.name
    checkpoint(alone / f"checkpoints/step-{STEPS:08d}", STEPS)
    (alone / "metrics.jsonl").write_text("".join(rows))
    trial.output.mkdir()
    (trial.output / "metrics.jsonl").write_text("".join(rows[:3]) + rows[3][:20])  # a torn line does not count
    world.check([trial])
    wrong = rows[0] + rows[1].replace("3.5", "3.5000000000000004") if other == "another loss" else rows[0] * 2
    (trial.output / "metrics.jsonl").write_text(wrong)
    with pytest.raises(Difference, match="and alone"):
        world.check([trial])


def test_a_dead_run_s_directory_on_a_drive(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.check_drives(world.drives, [])
    (world.drives[1] / "offload-trainer/run-77777777").mkdir()
    with pytest.raises(Difference, match="run-77777777"):
        world.check_drives(world.drives, [])


def test_the_order_of_tensors_does_not_matter(tmp_path: Path) -> None:
    def write(name: str, first: bytes, *order: str) -> Path:
        held = {"a": first, "b": b"45"}
        entries, place = {}, 0
        for key in order:
            entries[key] = {"dtype": "U8", "shape": [len(held[key])], "data_offsets": [place, place + len(held[key])]}
            place += len(held[key])
        header = json.dumps(entries).encode()
        data = b"".join(held[key] for key in order)
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
        return tmp_path / name

    one = write("one.safetensors", b"123", "a", "b")
    compare_file(write("two.safetensors", b"123", "b", "a"), one)
    with pytest.raises(Difference, match="in 1 of 2: a"):
        compare_file(write("three.safetensors", b"124", "b", "a"), one)
