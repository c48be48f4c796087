"""Tests of sessions on two ranks, started by torchrun: Trainers, TRL and own loops, compared with the stock ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import HELPERS, run_script
from engine_bench import assert_same
from hf_trainers import weights
from safetensors.torch import load_file
from trainer_rank import ACCUMULATE, LIMIT, STEPS, batch_of
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all kinds in one start of two ranks with one thread each; return the directory of the results."""
    place = tmp_path_factory.mktemp("trained")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HELPERS / "trainer_rank.py")
    words = (folder, place, tmp_path_factory.mktemp("drive"))
    done = run_script(*launch, *words, own=True, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-6000:]
    return place


def told(place: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((place / "told.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["trainer", "adapters", "grpo"])
def test_logs_and_weights_are_those_of_two_stock_ranks(kind: str, trained: Path) -> None:
    """A clipped, evaluated and saved Trainer, DPO of adapters, and GRPO, whose ranks generate, have the same bits."""
    ours, stock = trained / "ours" / kind, trained / "stock" / kind
    assert len(told(ours)) > STEPS
    assert told(ours) == told(stock)
    name = "adapter_model.safetensors" if kind == "adapters" else "model.safetensors"
    assert_same(*(dict(load_file(place / "final" / name)) for place in (ours, stock)))


def test_resumed(trained: Path) -> None:
    again, whole = trained / "ours/again", trained / "ours/trainer"
    assert told(again)[:-1] == told(whole)[:-1]  # the last entry has the mean loss since the start
    assert_same(weights(again / "final"), weights(whole / "final"))


def test_accumulated(trained: Path) -> None:
    """Losses agree within 1e-6 with accumulation: DistributedDataParallel adds each rank's micro-batches first."""
    for one, other in zip(*(told(trained / who / "accumulated") for who in ("ours", "stock")), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_a_loop(folder: Path, trained: Path) -> None:
    """A loop with accumulation, saved and resumed, has the bits of plain torch that adds gradients in rank order."""
    found = [json.loads((trained / f"loop/told-{rank}.json").read_text()) for rank in range(2)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        losses = []
        for number in range(2 * ACCUMULATE):
            loss = model(**batch_of(step, number)).loss
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        for rank, told in enumerate(found):
            assert told[step] == [*losses[rank::2], norm]
        optimizer.step()
        optimizer.zero_grad()
    for told in found:
        assert told[STEPS:] == told[3:STEPS]  # resumed
    assert_same(weights(trained / "loop/final"), dict(model.state_dict()))


def test_settings_that_ranks_lack_are_refused(trained: Path) -> None:
    """Torch's own clipping, which reads gradients, and a backward outside micro_batch are refused on both ranks."""
    for rank in range(2):
        clipping, outside = json.loads((trained / f"loop/refused-{rank}.json").read_text())
        assert "2 ranks" in clipping
        assert "micro_batch(last=True)" in outside
