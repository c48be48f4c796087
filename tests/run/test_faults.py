"""Tests of faults of disks and drives: a message, no loss, and a rerun with the bits of an undisturbed run."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import COMMAND, TINY, Run, assert_same_run, call, faulty, run_script
from test_runs import finished  # noqa: F401  # a fixture

from offload_trainer.run.checkpoint import complete_checkpoints, read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def alone(finished: Callable[[str], Run]) -> Run:  # noqa: F811
    return finished("tiered")


@pytest.fixture
def words(drive: Path, tmp_path: Path) -> list:
    (tmp_path / "drive").mkdir()
    length = ["--steps", 20, "train.eval_every=0", "--lr", "1e-3", "--save-every", 4, "save.keep=2"]
    places = ["--optimizer", "nvme", "--ram-fraction", "0.5", "tiered.overlap=forward"]
    return ["--nvme", tmp_path / "drive", *TINY, *length, *places]


def saved(output: Path, step: int) -> Path:
    """Return the file that is there once the checkpoint of that step is complete."""
    return output / f"checkpoints/step-{step:08d}/MANIFEST.json"


def assert_told(run: Run, *texts: str) -> None:
    assert run.code == 1, run.text[-3000:]
    assert "Traceback" not in run.text, run.text[-3000:]
    for text in texts:
        assert re.search(text, run.text), run.text[-3000:]


def assert_goes_on(words: list, output: Path, alone: Run) -> Run:
    for checkpoint in complete_checkpoints(output / "checkpoints"):
        read_manifest(checkpoint)
    run = call(*words, output=output)
    assert "resumed from" in run.text
    assert_same_run(run, alone)
    assert not [path for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]
    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a 40 MB filesystem from a file; skip the test if this user may not mount."""
    folder, image = tmp_path / "disk", tmp_path / "disk.image"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(40 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-b", "1024", image], capture_output=True, check=False)
    mounted = made.returncode == 0 and mount(image, folder)
    if not mounted:
        pytest.skip("no filesystem can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], capture_output=True)


def mount(image: Path, folder: Path) -> bool:
    return subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        # The first is noticed when a line of metrics needs a new block, every second line or so; the second fills up
        # after the check of free space.
        ("pause~{saved}+full~{disk}@metrics=5", "metrics.jsonl"),
        ("full~{disk}@save=2", "step-00000008.*No space left on device"),
        ("low~{disk}@room=2", "are free; older checkpoints are untouched"),
    ],
)
def test_a_full_disk(fault: str, told: str, disk: Path, words: list, alone: Run) -> None:
    """A step or a save that fails leaves nothing, and the checkpoint before it stays."""
    output = disk / "out"
    assert_told(faulty(fault.format(disk=disk, saved=saved(output, 4)), *words, output=output), told)
    assert [path.name for path in complete_checkpoints(output / "checkpoints")] == ["step-00000004"]
    assert not list((output / "checkpoints").glob(".*"))
    (disk / "filler").unlink()
    assert_goes_on(words, output, alone)


def test_a_full_disk_in_an_export(disk: Path, alone: Run) -> None:
    export = ["export", alone.output, disk / "hf", "--dtype", "fp32"]
    assert_told(faulty(f"full~{disk}@export", *export), "No space left on device", "model.safetensors")
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "lost+found"]
    refused = run_script(COMMAND, *export)
    assert refused.returncode == 2
    assert "are needed there, and" in refused.stderr
    (disk / "filler").unlink()
    assert run_script(COMMAND, *export).returncode == 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("EIO@read=32", "could not be read: Input/output error.* the same command resumes from the checkpoint step-"),
        # A write beyond the cut extends the file again; then the page's checksum fails.
        (
            "pause~{saved}+sh~truncate -s 65536 {state}@line=6",
            "state: cut short|does not have the CRC-32 that it was written with",
        ),
    ],
)
def test_a_drive_that_fails(fault: str, told: str, words: list, alone: Run, tmp_path: Path) -> None:
    """After an error within an update, the run resumes from a checkpoint without half an update."""
    output, state = tmp_path / "out", tmp_path / "drive/offload-trainer/run-*/state"
    run = faulty(fault.format(saved=saved(output, 4), state=state), *words, output=output)
    assert_told(run, told)
    assert 4 < len(run.steps) < 20
    assert_goes_on(words, output, alone)


def test_the_output_s_mount_vanishes(disk: Path, words: list, alone: Run) -> None:
    output = disk / "out"
    run = faulty(f"pause~{saved(output, 8)}+sh~umount -l {disk}@line=11", *words, output=output)
    assert_told(run, "is not the directory that this run began in", "Mount it")
    assert list(disk.iterdir()) == []
    assert mount(disk.with_name("disk.image"), disk)
    assert_goes_on(words, output, alone)
