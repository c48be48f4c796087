"""Tests of whole runs whose update overlaps the next forward: their records, and a resumed kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import TINY, call, call_and_kill

from offload_trainer.telemetry.metrics import median_phases, read_metrics

ALL = ["--params", "gpu", "--ram-fraction", "0", "train.eval_every=2", "train.eval_rows=4"]


def told(output: Path, *keys: str) -> list[list[float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [[line.get(key, 0.0) for key in keys] for line in lines]  # `hidden` is recorded only if it is not zero


@pytest.mark.slow
def test_lines_match_those_of_a_run_without_overlap(drive: Path, tmp_path: Path) -> None:
    """Overlap changes no loss or norm, and without it no time is hidden."""
    found = {}
    for how in ("off", "forward", "backward"):
        words = ["--nvme", drive, *TINY, *ALL, "--steps", 5, "--save-every", 0, f"tiered.overlap={how}"]
        run = call(*words, output=tmp_path / how)
        assert ("update overlap with the next forward" in run.text) <= (how == "forward")
        assert ("update overlap with the backward" in run.text) <= (how == "backward")
        found[how] = told(run.output, "loss", "grad_norm", "hidden", "phases")
        plan = json.loads((run.output / "plan.json").read_text())
        assert plan["chosen"]["sizes"]["overlap"] == (how != "off")
        waited = median_phases(read_metrics(run.output / "metrics.jsonl")).get("wait", 0.0)
        assert waited == 0 or "<td>wait</td>" in (run.output / "report.html").read_text()
    off = found.pop("off")
    assert all(line[2] == 0.0 and "wait" not in line[3] for line in off)
    for on in found.values():
        assert [line[:2] for line in on] == [line[:2] for line in off]
        assert on[0][2] == 0.0
        assert all(line[2] + line[3]["wait"] > 0 for line in on[1:])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_killed_overlapped_run_resumes_bit_for_bit(how: str, drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *TINY, *ALL, "--steps", 6, "--save-every", 2, f"tiered.overlap={how}"]
    whole = call(*words, output=tmp_path / "whole")
    output = tmp_path / "killed"
    saved = output / "checkpoints/step-00000002"
    killed = call_and_kill(*words, output=output, when=lambda _: saved.exists(), number=signal.SIGKILL, hold=3)
    assert killed.code == -signal.SIGKILL
    again = call(*words, output=output)
    assert "resumed from" in again.text
    assert told(again.output, "loss", "grad_norm") == told(whole.output, "loss", "grad_norm")
