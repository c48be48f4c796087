"""Tests of sessions on two ranks, started by torchrun: Trainers, TRL and own loops, compared with the stock ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import HELPERS, run_script
from compare_trainers import assert_same, weights
from hf_trainers import model_folder
from safetensors.torch import load_file
from sample_chats import preferences
from trainer_rank import ACCUMULATE, LIMIT, STEPS, batch_of
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), vocab_size=272, max_position_embeddings=128, pad_token_id=0)


def start_two(*words: object) -> subprocess.CompletedProcess[str]:
    """Run trainer_rank.py as two ranks with one thread each."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HELPERS / "trainer_rank.py")
    done = run_script(*launch, *words, own=True, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-6000:]
    return done


def trained(kind: str, who: str, home: str, *words: object, output: Path) -> Told:
    """Train as two ranks; return the log."""
    output.mkdir(exist_ok=True)
    preferences().save_to_disk(output / "pairs")
    start_two(kind, who, home, *words)
    found: Told = json.loads((output / "told.json").read_text())
    return found


def compared(kind: str, home: str, *, folder: Path, drive: Path, tmp_path: Path) -> None:
    """Check that two ranks of our trainer give the log and the weights of two ranks of the stock one."""
    stock = trained(kind, "stock", home, folder, tmp_path / "stock", drive, output=tmp_path / "stock")
    ours = trained(kind, "ours", home, folder, tmp_path / "ours", drive, output=tmp_path / "ours")
    assert len(ours) > STEPS
    assert ours == stock
    name = "adapter_model.safetensors" if kind == "adapters" else "model.safetensors"
    assert_same(*(dict(load_file(tmp_path / who / "final" / name)) for who in ("ours", "stock")))


def test_trainer(folder: Path, drive: Path, tmp_path: Path) -> None:
    """The log and the weights have the bits of the stock Trainer, clipped, evaluated and saved; a resumed run too."""
    compared("trainer", "drive", folder=folder, drive=drive, tmp_path=tmp_path)
    whole, before = json.loads((tmp_path / "ours" / "told.json").read_text()), weights(tmp_path / "ours" / "final")
    checkpoint = tmp_path / "ours" / "checkpoint-3"
    again = trained(
        "trainer", "ours", "drive", folder, tmp_path / "again", drive, checkpoint, output=tmp_path / "again"
    )
    assert again[:-1] == whole[:-1]  # the last entry has the mean loss since the start
    assert_same(weights(tmp_path / "again" / "final"), before)


@pytest.mark.parametrize("kind", ["adapters", "grpo"])
def test_others(kind: str, folder: Path, drive: Path, tmp_path: Path) -> None:
    """DPO of adapters over a frozen base, and GRPO, whose ranks generate, have the same bits."""
    compared(kind, "resident", folder=folder, drive=drive, tmp_path=tmp_path)


def test_accumulated(folder: Path, drive: Path, tmp_path: Path) -> None:
    """Losses agree within 1e-6 with accumulation: DistributedDataParallel adds each rank's micro-batches first."""
    stock = trained("accumulated", "stock", "resident", folder, tmp_path / "stock", drive, output=tmp_path / "stock")
    ours = trained("accumulated", "ours", "resident", folder, tmp_path / "ours", drive, output=tmp_path / "ours")
    for one, other in zip(ours, stock, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_a_loop(folder: Path, drive: Path, tmp_path: Path) -> None:
    """A loop with accumulation, saved and resumed, has the bits of plain torch that adds gradients in rank order."""
    start_two("loop", "ours", "drive", folder, tmp_path, drive)
    found = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
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
    assert_same(weights(tmp_path / "final"), dict(model.state_dict()))


@pytest.mark.parametrize(("kind", "message"), [("outside", "micro_batch(last=True)"), ("grads", "2 ranks")])
def test_settings_that_ranks_lack_are_refused(
    kind: str, message: str, folder: Path, drive: Path, tmp_path: Path
) -> None:
    """A backward outside micro_batch, and torch's own clipping, which reads gradients, are refused on both ranks."""
    done = start_two(kind, "ours", "resident", folder, tmp_path, drive)
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert len(refused) == 2
    assert all(message in line for line in refused)
