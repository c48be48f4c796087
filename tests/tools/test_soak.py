"""Tests of the scripts in soak/: short runs of them, and planted faults that they must find."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import damage
import pytest
import torch
from commands import environment
from damage import KINDS, Violation, made, search
from runs import Difference, compare
from safetensors.torch import save_file
from sample_chats import lines

from offload_trainer.offloading.pages.store import PageCopies

# -- kill and resume ---------------------------------------------------------------------------------------------------


def run_of_two_steps(path: Path) -> Path:
    checkpoint = path / "checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    keys = {"tokens": 64, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1.0, "skipped": False}
    (path / "metrics.jsonl").write_text(lines({"step": n, "loss": 7.0 / n, **keys} for n in (1, 2)))
    (path / "evaluations.jsonl").write_text('{"step": 2, "validation_loss": 3.5}\n')
    save_file({"a": torch.arange(3.0), "b": torch.ones(2)}, checkpoint / "master.safetensors")
    (checkpoint / "state.json").write_text('{"step": 2, "tokens": 128, "data_position": 4}')
    return path


METRICS, MASTERS = "metrics.jsonl", "checkpoints/step-00000002/master.safetensors"
OTHER = {"b": torch.ones(2), "a": torch.tensor([0.0, 1.0, 2.0000002])}
STATE = "checkpoints/step-00000002/state.json"
FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metrics differs .* in 1 of 2: 1: ": (
        METRICS,
        lambda file: file.write_text(file.read_text().replace("3.5", "3.5000000000000004")),
    ),
    "evaluations.jsonl": ("evaluations.jsonl", Path.unlink),
    "tensors differs .* in 1 of 2: .*'a'": (MASTERS, lambda file: save_file(OTHER, file)),
    "tensors differs .* in 2 of 2": (MASTERS, Path.unlink),
    "data_position": (STATE, lambda file: file.write_text(file.read_text().replace(": 4", ": 6"))),
}


@pytest.mark.parametrize("told", FAULTS)
def test_a_run_with_other_bits_is_found(told: str, tmp_path: Path) -> None:
    alone, run = run_of_two_steps(tmp_path / "alone"), run_of_two_steps(tmp_path / "run")
    compare(run, alone)
    name, damage = FAULTS[told]
    damage(run / name)
    with pytest.raises(Difference, match=told):
        compare(run, alone)


@pytest.mark.slow(50)
@pytest.mark.parametrize("words", [[], ["--ranks", "2", "--pages"], ["--ranks", "3", "--pipeline"]], ids=" ".join)
def test_random_kills_change_nothing(words: list[str], seed: int, tmp_path: Path) -> None:
    """Other tests kill one rank with page files and ranks with checkpoints."""
    kills = 2 if "--ranks" in words else 4  # each start of two ranks takes several times as long
    script = Path(__file__).resolve().parents[2] / "soak/kill_and_resume.py"
    argv = [sys.executable, script, "--kills", str(kills), "--seed", str(seed), *words]
    there = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(argv, capture_output=True, text=True, env=there, timeout=1500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(rf"^{kills} kills \(", done.stdout, re.MULTILINE), done.stdout
    assert not list(tmp_path.glob("kills-*"))


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused(kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", "")
    found = search(made(kind, tmp_path), examples=30, number=seed)
    assert found["refused"] > 4


def test_page_files_that_nobody_sums_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a start compared no checksums, damaged pages would be resumed from."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", "")
    files = made("pages", tmp_path)
    monkeypatch.setattr(PageCopies, "differing", lambda *_, **__: None)
    half = len(files.whole["state"]) // 2  # the two copies

    def flip() -> None:
        for at in range(5000, 128 << 10, 16 << 10):
            damage.read_damaged(files, "state", ("flip bits", [(at, 3), (half + at, 3)]), sum_again=False)

    with pytest.raises(Violation, match="what was read is not what was written"):
        flip()
