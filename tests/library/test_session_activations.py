"""Tests of sessions that offload the tensors kept by gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import assert_same
from hf_trainers import model_folder, rows

import offload_trainer as ot
from offload_trainer.offloading.activation_offload import Activations

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_small")]

BLOCKS = 7
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu"},
    "on the drive": {"params": "nvme", "optimizer": "nvme", "weight_buffers": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=BLOCKS)


def opened(folder: Path, drive: Path, *, home: str = "on the drive", **keys: Any) -> ot.Session:
    words: dict[str, Any] = {"dtype": "fp32", "activation_checkpointing": "on", "seq_len": 24, "micro_batch_size": 1}
    return ot.load(folder, nvme=drive, say=lambda _: None, **(words | HOMES[home] | keys))


def loss_of(session: ot.Session, number: int) -> torch.Tensor:
    loss: torch.Tensor = session.model(**{key: value[None] for key, value in rows(8)[number].items()}).loss
    return loss


def trained(session: ot.Session, *, anew: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    session.model.train()
    if anew:
        session.model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = session.adamw(lr=1e-2)
    found = []
    for number in range(8):
        with session.micro_batch(last=number % 2 == 1):
            loss = loss_of(session, number)
            loss.backward()
        found.append(loss.item())
        if number % 2:
            found.append(float(session.clip_grad_norm_(0.5)))
            optimizer.step()
    return found, dict(session.named_masters())


@pytest.mark.parametrize("away", ["cpu", "nvme"])
@pytest.mark.parametrize("home", HOMES)
def test_offloaded_inputs_change_no_bit_and_are_in_the_plan(
    home: str, away: str, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded activations change no bit and match the plan, also if the Trainer turns checkpointing on again, and if
    only two blocks are checkpointed.
    """
    kept: list[int] = []
    keep = Activations.pack_input
    monkeypatch.setattr(
        Activations, "pack_input", lambda self, tensor: (kept.append(tensor.nbytes), keep(self, tensor))[1]
    )
    with opened(folder, drive, home=home) as session:
        expected, weights = trained(session)
    assert not kept
    for anew, count in ((False, BLOCKS), (True, BLOCKS), (False, 2)):
        kept.clear()
        keys = {"offload_activations": away, "activation_checkpointing": count}
        with opened(folder, drive, home=home, **keys) as session:
            found, masters = trained(session, anew=anew)
            tier = "ram" if away == "cpu" else str(drive)
            planned = [i.bytes for i in session.plan.items if i.name == "block inputs" and i.tier.startswith(tier)]
        assert found == expected
        assert_same(masters, weights)
        assert kept == [24 * 64 * 4] * 8 * count
        assert max(planned) == 2 * 4096 * count  # each in whole sectors


def test_unsupported_activations_are_refused(folder: Path, drive: Path) -> None:
    with opened(folder, drive, offload_activations="cpu") as session:
        session.model.train()
        with session.micro_batch():
            first, second = loss_of(session, 0), loss_of(session, 1)
            second.backward()
            with pytest.raises(ot.UserError, match="another forward came between"):
                first.backward()
        ids = rows(1)[0]["input_ids"][None]
        with session.micro_batch():
            whole, direct = session.model(ids).logits, session.model.forward(ids).logits
        assert torch.equal(whole, direct)
        with session.micro_batch(), pytest.raises(ot.UserError, match="was called by itself"):
            session.model.base_model(ids)
    with pytest.raises(ot.UserError, match="needs checkpointed activations"):
        ot.offload(torch.nn.Linear(3, 3), offload_activations="cpu", say=lambda _: None)
