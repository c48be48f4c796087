"""Tests of sessions that offload the tensors kept by gradient checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_bench import assert_same
from seen_calls import calls_of
from session_loop import ACCUMULATE, ROWS, by_torch, of_rows, one_cycle, opened, trained
from transformers import AutoModelForCausalLM

import offload_trainer as ot
from offload_trainer.offloading.activation_offload import Activations

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_small")]

BLOCKS, STEPS = 3, 3


@pytest.mark.parametrize(
    ("home", "away", "anew", "count"),
    [("resident", "cpu", True, BLOCKS), ("on the drive", "nvme", False, 2)],
)
def test_offloaded_inputs_change_no_bit_and_are_in_the_plan(
    home: str, away: str, anew: bool, count: int, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded activations change no bit and match the plan, also if the Trainer turns checkpointing on again
    (`anew`), and if only two blocks are checkpointed.
    """
    kept = calls_of(monkeypatch.setattr, Activations, "pack_input", lambda _, tensor: tensor.nbytes)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    expected = by_torch(reference, steps=STEPS)
    keys = {"offload_activations": away, "activation_checkpointing": count, "freeze": [], "micro_batch_size": 1}
    with opened(folder, drive, home=home, **keys) as session:
        session.model.train()
        if anew:
            session.model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = session.adamw(lr=1e-2)
        assert list(trained(session.model, optimizer, one_cycle(optimizer), session=session, steps=STEPS)) == expected
        assert_same(dict(session.named_masters()), dict(reference.named_parameters()))
        tier = "ram" if away == "cpu" else str(drive)
        planned = [i.bytes for i in session.plan.items if i.name == "block inputs" and i.tier.startswith(tier)]
    assert kept == [24 * 64 * 4] * STEPS * ACCUMULATE * count
    assert max(planned) == 2 * 4096 * count  # each in whole sectors


def test_unsupported_activations_are_refused(folder: Path, drive: Path) -> None:
    with opened(folder, drive, offload_activations="cpu", activation_checkpointing="on", freeze=[]) as session:
        session.model.train()
        with session.micro_batch():
            first, second = of_rows(session.model, 0), of_rows(session.model, 1)
            second.backward()
            with pytest.raises(ot.UserError, match="another forward came between"):
                first.backward()
        ids = ROWS[0]["input_ids"]
        with session.micro_batch():
            whole, direct = session.model(ids).logits, session.model.forward(ids).logits
        assert torch.equal(whole, direct)
        with session.micro_batch(), pytest.raises(ot.UserError, match="was called by itself"):
            session.model.base_model(ids)
    with pytest.raises(ot.UserError, match="needs checkpointed activations"):
        ot.offload(torch.nn.Linear(3, 3), offload_activations="cpu", say=lambda _: None)
