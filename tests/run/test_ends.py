"""Tests of a run's end: signals in each phase; runs without checkpoints; faults of disks and drives; Slurm's file."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import COMMAND, TINY, Run, assert_same_run, call, environment, everything, faulty, results, run_script
from dead_run_files import died
from safetensors.torch import load_file
from test_runs import finished  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM

from offload_trainer.run.checkpoint import complete_checkpoints, read_manifest
from offload_trainer.storage.manifest import weights_alone
from offload_trainer.storage.owned_dirs import ScratchDirectory
from offload_trainer.storage.retention import WORK

pytestmark = pytest.mark.slow

SMALL = ["model.overrides.n_layer=1", "model.overrides.n_embd=32", "model.overrides.n_head=2", "--seq-len", 16]
SMALL += ["--micro-batch", 1, "placement.threads=1"]
SAVING = [*SMALL, "--steps", 6, "--save-every", 2, "save.keep=1", "train.eval_every=3", "train.eval_rows=1"]
NEVER = [*SMALL, "--steps", 5, "--save-every", 0, "train.eval_every=0"]


@pytest.mark.parametrize(
    ("fault", "code", "outcome"),
    [
        ("TERM@start", 143, "nothing"),
        ("lose~pipe+INT@plan", 130, "nothing"),
        ("lose~terminal+HUP+HUP@plan", 129, "nothing"),
        ("QUIT+QUIT@compile", -signal.SIGQUIT, "killed"),
        ("USR1@plan", 0, "saved"),
        ("lose~terminal+HUP+HUP@step=3", 129, "saved"),
        ("INT@save", 130, "saved"),
        ("lose~pipe+TERM+TERM@save", 143, "either"),
        ("lose~pipe+TERM@prune=2", 143, "saved"),
        ("QUIT@evaluation", 131, "saved"),
        ("HUP@weights", 129, "weights"),
        ("lose~pipe+USR1@weights", 0, "weights"),
        ("TERM+TERM@weights", 143, "nothing"),
    ],
)
def test_signals_in_each_phase(fault: str, code: int, outcome: str, drive: Path, tmp_path: Path) -> None:
    """Exit code and what is saved are those of docs/faults.md; nothing is left over, and log.txt has the reason."""
    words = [*(NEVER if fault.endswith("weights") else SAVING), "--nvme", drive, "--optimizer", "nvme"]
    words += ["--ram-fraction", "0.5", "tiered.page_size=16384"]
    own_cache = {"OFFLOAD_TRAINER_CACHE": str(tmp_path / "cache")} if "compile" in fault else {}
    run = faulty(fault, *words, output=tmp_path / "out", **own_cache)
    assert run.code == code, run.text
    assert "Traceback" not in run.text, run.text
    checkpoints = complete_checkpoints(run.output / "checkpoints")
    for checkpoint in checkpoints:
        read_manifest(checkpoint, moments=not weights_alone(checkpoint))
    steps = len(run.steps) if (run.output / "metrics.jsonl").exists() else 0
    saved = bool(steps) and steps in [int(path.name.removeprefix("step-")) for path in checkpoints]
    kept = ("weights" if weights_alone(checkpoints[-1]) else "saved") if saved else "nothing"
    assert outcome == "either" or kept == outcome.replace("killed", "nothing"), run.text
    log = run.output / "log.txt"
    if outcome != "killed":
        assert not list(drive.glob("offload-trainer/run-*"))
        assert not list(run.output.glob("checkpoints/.*"))
        assert not log.exists() or log.read_text().splitlines()[-1][20:].startswith("ended: " if code else "done:")
    assert not list(run.output.glob(".*.tmp"))


def test_a_stop_that_does_not_fit_ends_at_once_and_resumes(tmp_path: Path) -> None:
    always = [*TINY, "--steps", 6, "--save-every", 2, "train.eval_every=0"]
    whole = call(*always, output=tmp_path / "whole")
    for within, saved, told in ((0.5, 2, "stopped at once, unsaved"), (600, 3, "everything saved")):
        words = [*always, f"train.stop_within={within}"]
        output = tmp_path / f"within-{within}"
        run = faulty(f"pause~{output}/checkpoints/step-00000002/MANIFEST.json+TERM@line=3", *words, output=output)
        assert run.code == 128 + signal.SIGTERM, run.text
        assert told in run.text
        assert complete_checkpoints(output / "checkpoints")[-1].name == f"step-{saved:08d}"
        assert "train.stop_within=0.5" in run.text or within == 600
        again = call(*words, output=output)
        assert f"step {saved}" in again.text
        assert_same_run(again, whole)


def test_a_run_without_checkpoints_is_done_once(tmp_path: Path) -> None:
    """It saves its last weights. Repeating the command changes nothing; one that would train them on is refused."""
    output = tmp_path / "out"
    call(*NEVER, output=output)
    before = everything(output)
    for words in ([], ["optim.kernel=torch", "train.eval_every=3", "--ram-fraction", "1"]):
        told = call(*NEVER, *words, output=output).text
        assert "is already at step 5 of 5, so nothing is changed" in told
        assert "extends it" not in told
    for words, told in (
        (["--steps", 7], "holds weights without moments"),
        (["--steps", 7, "--save-every", 2], "Move step-00000005 away, and the same command starts from step 0"),
        (["--resume", "never"], "holds checkpoints of an earlier run"),
    ):
        refused = call(*NEVER, *words, output=output, check=False)
        assert (refused.code, told in refused.text) == (2, True), refused.text
    assert everything(output) == before
    weights = "step-00000005/master.safetensors"
    (output / "checkpoints").rename(tmp_path / "away")
    assert "step 1" in call(*NEVER, output=output).text
    assert (tmp_path / "away" / weights).read_bytes() == (output / "checkpoints" / weights).read_bytes()


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    """Repeating it with another setting, or resuming from it elsewhere, writes nothing, and says how to continue."""
    output, other = tmp_path / "out", tmp_path / "other"
    words = [*SAVING, "--lr", "0.01"]
    call(*words, output=output)
    before = everything(tmp_path)
    died(ScratchDirectory(output / "checkpoints/.step-00000002.tmp", what=WORK))  # a start removes it
    for again, told in (
        (words, "is already at step 6 of 6, so nothing is changed; --steps N extends it"),
        ([*SAVING, "--lr", "0.02"], "so nothing is changed"),
        ([*SMALL, "train.epochs=0.0001", "save.every=0"], "is already at step 6 of 6"),
    ):
        printed = call(*again, output=output).text
        assert told in printed
        assert "ended without a message" not in printed
    refused = call(*words, "--resume", output, output=other, check=False)
    assert refused.code == 2
    assert "so nothing would be trained or saved in" in refused.text
    refused = call(*words, "--seed", 5, output=output, check=False)
    assert (refused.code, "seed: it has 0, this run 5" in refused.text) == (2, True), refused.text
    with open(output / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run is using this directory" in call(*words, output=output, check=False).text
    assert everything(tmp_path) == before


def test_an_export_of_a_run_without_checkpoints_has_its_final_weights(tmp_path: Path) -> None:
    """Not those of an older checkpoint that a user had requested, which stays, and whose own export says so."""
    output, whole, last = tmp_path / "out", tmp_path / "whole", "checkpoints/step-00000005"
    words = [*NEVER, 'model.freeze=["wpe"]', "save.keep=1"]
    assert faulty("USR1@step=2", *words, output=output).code == 0
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000002", "step-00000005"]
    done = run_script(COMMAND, "export", output, tmp_path / "hf", "--dtype", "fp32", "--check")
    assert (done.returncode, "step-00000005" in done.stdout + done.stderr) == (0, True), done.stderr
    assert "in fp32, from the masters of step-00000005." in " ".join((tmp_path / "hf/README.md").read_text().split())
    call(*words, "--save-every", 5, output=whole)
    masters, frozen = (load_file(whole / last / f"{kind}.safetensors") for kind in ("master", "fixed"))
    given = masters | frozen
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    for held in (load_file(output / last / "master.safetensors"), exported):
        assert given.keys() <= held.keys()
        assert all(held[name].equal(given[name]) for name in given)
    older = run_script(COMMAND, "export", output / "checkpoints/step-00000002", tmp_path / "older", "--check")
    assert "in fp16 to" in older.stdout, older.stderr
    assert "read back: every header, and a sample of " in older.stdout
    card = (tmp_path / "older/README.md").read_text()
    assert "Weights in fp16, from the masters of step-00000002." in card
    assert 'optim.master_dtype: "fp32"\n' in card
    assert "already holds something" in run_script(COMMAND, "export", output, tmp_path / "older").stderr


def test_a_signal_without_checkpoints_saves_one(tmp_path: Path) -> None:
    whole = call(*NEVER, output=tmp_path / "whole")
    stopped = faulty("TERM@step=3", *NEVER, output=tmp_path / "out")
    assert stopped.code == 128 + signal.SIGTERM
    assert "SIGTERM: finishing this step, then saving" in stopped.text
    assert "stopped after step 3, everything saved" in stopped.text
    assert not weights_alone(stopped.output / "checkpoints/step-00000003")
    again = call(*NEVER, output=stopped.output)
    assert "resumed from" in again.text
    assert results(again.output)["metrics"] == results(whole.output)["metrics"]
    weights = "checkpoints/step-00000005/master.safetensors"
    assert (again.output / weights).read_bytes() == (whole.output / weights).read_bytes()


def test_no_room_for_a_checkpoint_at_a_signal(tmp_path: Path) -> None:
    """Only the weights are kept then. The run says so, and the next start does not overwrite them."""
    output = tmp_path / "out"
    stopped = faulty("INT@step=3;EIO@room", *NEVER, output=output)
    assert stopped.code == 128 + signal.SIGINT
    assert "no checkpoint was made" in stopped.text
    assert "stopped after step 3; only the weights could be saved" in stopped.text
    kept = everything(output)
    refused = call(*NEVER, output=output, check=False)
    assert (refused.code, "holds weights without moments" in refused.text) == (2, True), refused.text
    assert everything(output) == kept
    (export,) = re.findall(r"export them \((.*?)\)", stopped.text)
    assert run_script(COMMAND, *shlex.split(export)[1:]).returncode == 0
    held, given = map(load_file, (f"{output}-hf/model.safetensors", saved(output, 3).parent / "master.safetensors"))
    assert all(held[name].equal(given[name]) for name in given)
    words = [word for word in NEVER if "overrides" not in str(word)]
    assert "done: 5 steps" in call(*words, "--model", f"{output}-hf", output=tmp_path / "on").text


# -- faults of disks and drives: a message, no loss, and a rerun with the bits of an undisturbed run -------------------


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


def assert_goes_on(words: list, output: Path, alone: Run) -> None:
    for checkpoint in complete_checkpoints(output / "checkpoints"):
        read_manifest(checkpoint)
    run = call(*words, output=output)
    assert "resumed from" in run.text
    assert_same_run(run, alone)
    assert not [path for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a 40 MB filesystem from a file; skip the test if this user may not mount."""
    folder, image = tmp_path / "disk", tmp_path / "disk.image"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(40 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-b", "1024", image], capture_output=True, check=False)
    if made.returncode or not mount(image, folder):
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
        ("pause~{saved}+sh~truncate -s 65536 {state}@line=6", "state: cut short|does not have the CRC-32"),
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


# -- the file for Slurm, with stand-ins for Slurm's programs -----------------------------------------------------------

BATCH = Path(__file__).resolve().parents[2] / "configs/slurm.sbatch"
# Runs the command of srun once for each rank, one after the other; $ENDS also tells the batch shell to end.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && count=${1#--ntasks=}
  shift
done
for ((rank = 0; rank < count; rank++)); do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@"; done
[ -z "$ENDS" ] || kill -TERM $PPID
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo one; echo two; else echo "$@" >>requeued; fi
"""
TRAIN = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $*" >>ranks
"""


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, "", False), (2, "", False), (143, "", True), (143, "yes", False)]
)
def test_the_batch_file_requeues_only_preempted_jobs(code: int, ends: str, requeued: bool, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("offload-train", TRAIN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodes", "SLURM_CPUS_PER_TASK": "1"}
    env = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_NTASKS_PER_NODE="2", **job)
    env |= {"CODE": str(code), "ENDS": ends}
    done = subprocess.run(["bash", BATCH, "--data", "a b.jsonl"], cwd=tmp_path, env=env)
    assert done.returncode == code
    ranks = [f"{rank} {rank % 2} 4 2 one --data a b.jsonl train.stop_within=100" for rank in range(4)]
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)\b", BATCH.read_text(), re.MULTILINE)
    assert int(seconds) > 100
    assert (tmp_path / "ranks").read_text().splitlines() == ranks
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 123\n"
