"""Tests of fetching blocks module by module in selected architectures; scripts/every_architecture.py tests all of
them. Results have the bits of whole blocks, and modules are fetched as often as planned.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offload_trainer.model.probes import submodules

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import every_architecture

pytestmark = pytest.mark.slow

SELECTED = {
    "Bloom": "attention that is given what is added to its result",
    "Blt": "blocks of one class that run without gradients, and some that are not checkpointed",
    "FalconH1": "attention beside a mixer",
    "Gemma3nText": "blocks with several streams",
    "GptOss": "experts with biases, sinks",
    "Mamba": "a convolution, and a projection, whose weights are read",
    "Qwen3Next": "a shared expert before the router",
    "Zaya": "weights of modules that have children",
}


def examine(name: str, folder: Path) -> every_architecture.Result:
    return every_architecture.examine(name, folder, "modules")["modules"]


@pytest.mark.parametrize("name", SELECTED)
def test_parts_have_the_bits_of_whole_blocks_and_are_fetched_as_planned(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path)
    assert (result.outcome, result.why) == ("right", "")
    assert result.modules > result.blocks > 0


def test_models_that_are_not_divided_say_why(tmp_path: Path) -> None:
    result = examine("XLNet", tmp_path)
    assert result.outcome == "whole"
    assert "tiered.fetch_granularity=module" in result.why


def test_a_module_that_cannot_be_divided_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submodules, "_proven", lambda tiny: {kind for kind, _, _ in submodules._with_children(tiny)})
    result = examine("Mamba", tmp_path)
    assert result.outcome == "wrong"
    assert "a loss is NaN" in result.why


def test_another_order_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = submodules._inside
    monkeypatch.setattr(submodules, "_inside", lambda block, names: tuple(dict.fromkeys(inside(block, names))))
    result = examine("Llama", tmp_path)
    assert result.outcome == "wrong"
    assert "planned: model.layers" in result.why
