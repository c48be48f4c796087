"""Tests that ranks that differ are refused before anything is written, with the difference named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload_trainer.errors import PeerFailed, UserError
from offload_trainer.run import checks
from offload_trainer.run.checks import refuse_other_data, refuse_other_programs
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow


def others(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, **changed: Any) -> None:
    """Pretend that there are three ranks, of which the last reports `changed` facts."""
    monkeypatch.setattr(checks, "all_gather_json", lambda mine: [mine, mine, mine | changed])
    monkeypatch.setattr(checks, "place_here", lambda: (rank, 3))


def wishes(*words: str) -> dict[str, Any]:
    return load_config([*words]).model_dump(mode="json")


def test_equal_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_programs(wishes())  # a single rank
    others(monkeypatch)
    refuse_other_programs(wishes())
    refuse_other_data({"tokens": 5, "validation text": None}, {"a": {"shape": [2]}})


def test_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, **{"torch": "2.1", "CPU instruction set (torch)": "Z80", "optim.lr": 0.5})
    with pytest.raises(UserError, match="every rank with the same command") as refused:
        refuse_other_programs(wishes("--lr", "1e-3"))
    for told in (
        f"torch: rank 2 has 2.1, rank 0 {torch.__version__}",
        "CPU instruction set (torch): rank 2 has Z80, rank 0 ",
        "optim.lr: rank 2 has 0.5, rank 0 0.001",
    ):
        assert told in str(refused.value)


def test_other_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    identity, layout = {"tokens": 5, "text": 1234}, {"a": {"shape": [2], "trained": True}}
    others(monkeypatch, text=77)
    with pytest.raises(UserError, match="text: rank 2 has 77, rank 0 1234"):
        refuse_other_data(identity, layout)
    others(monkeypatch, **{"the model's weights": 3})
    with pytest.raises(UserError, match="the model's weights: rank 2 has 3"):
        refuse_other_data(identity, layout)


def test_only_rank_0_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, rank=2, torch="2.1")
    with pytest.raises(PeerFailed) as silent:
        refuse_other_programs(wishes())
    assert silent.value.exit_code == UserError.exit_code
