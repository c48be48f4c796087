"""Tests that NaN in a gradient never reaches the master weights, for any engine and placement."""

from pathlib import Path

import pytest
import torch
from commands import TINY, Run, call, faulty
from safetensors.torch import load_file

CASES = {
    "tiered": ["--engine", "tiered", "--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"],
    "zero-2 cpu": ["--engine", "deepspeed", "--params", "gpu", "--optimizer", "cpu"],
    "zero-3 cpu, fp32": ["--engine", "deepspeed", "--params", "cpu", "--optimizer", "cpu", "--dtype", "fp32"],
    "zero-3 nvme": ["--engine", "deepspeed", "--params", "nvme", "--optimizer", "nvme"],
}
STILL = ["optim.schedule=constant", "optim.warmup_steps=0", "train.eval_every=0"]


def planted(step: int, *words: object, output: Path) -> Run:
    """Run the command with NaN as the loss, thus in every gradient, of one step; in fp16 no overflow can halve 1."""
    return faulty(f"nan@loss={step}", *words, output=output, LOSS_SCALE="1,2000")


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.output / f"checkpoints/step-{step:08d}/master.safetensors")


@pytest.mark.ops
@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_changes_nothing(name: str, drive: Path, tmp_path: Path) -> None:
    args = ["--nvme", drive, *TINY, *STILL, *CASES[name], "optim.on_nonfinite_grad=skip"]
    if name == "zero-3 nvme":  # it saves only its final weights
        args += ["--save-every", 0]
        runs = {step: planted(3, *args, "--steps", step, output=tmp_path / str(step)) for step in (3, 5)}
        runs[2] = call(*args, "--steps", 2, output=tmp_path / "2")
    else:
        run = planted(3, *args, "--save-every", 1, "save.keep=9", "--steps", 5, output=tmp_path / "out")
        runs = dict.fromkeys((2, 3, 5), run)
    after = runs[5]
    assert after.code == 0, after.text[-3000:]
    assert "step 3 skipped: NaN or infinity" in after.text
    assert [step["skipped"] for step in after.steps] == [False, False, True, False, False]
    assert [step["grad_norm"] is None for step in after.steps] == [step["skipped"] for step in after.steps]
    assert all(step["loss"] is not None for step in after.steps if not step["skipped"])
    expected, given, later = (weights(runs[step], step) for step in (2, 3, 5))
    assert all(torch.equal(given[key], expected[key]) for key in expected)
    assert all(later[key].isfinite().all() and not torch.equal(later[key], given[key]) for key in given)


@pytest.mark.ops
def test_stop_names_the_weight_and_keeps_the_last_checkpoint(drive: Path, tmp_path: Path) -> None:
    args = [*TINY, *STILL, "--save-every", 2, "--steps", 5, *CASES["zero-2 cpu"]]
    run = planted(4, *args, output=tmp_path / "out")
    assert run.code == 1
    assert "step 4: NaN or infinity in the gradient" in run.text
    assert "the weights are those of step 3" in run.text
    assert "Traceback" not in run.text
    assert call(*args, output=tmp_path / "out").losses == call(*args, output=tmp_path / "clean").losses


def test_a_nan_in_fp16_stops_where_no_scale_can_help(tmp_path: Path) -> None:
    """Its report ends with the step that stopped it, and no longer reloads itself."""
    run = planted(3, *TINY, *STILL, "--dtype", "fp16", "--steps", 5, output=tmp_path)
    assert run.code == 1
    assert "step 3: NaN or infinity in the gradient" in run.text
    page = (tmp_path / "report.html").read_text()
    assert "<dd>3 of 5</dd>" in page
    assert "refresh" not in page
