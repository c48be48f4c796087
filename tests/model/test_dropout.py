"""Tests that dropout and router noise depend only on the run's seed and on the rows' position."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_bench import ON_GPU, REENTRANT, assert_same, batches, engine, masters, model_directory, plain, train

from offload_trainer.data.rows import Batch, RowReader
from offload_trainer.data.tokenfile import TokenFile

DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
NOISY = {
    "gpt2": DROPOUT,
    "llama": {"attention_dropout": 0.2},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}
ON_THE_DRIVE = ["--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "tiered.weight_buffers=2"]
WAYS = {
    "plain, recomputed": ["--engine", "plain", "model.activation_checkpointing=on"],
    "plain, recomputed reentrantly": [*("--engine", "plain", "model.activation_checkpointing=on", REENTRANT)],
    "plain, loss in chunks": ["--engine", "plain", "model.loss_chunk=7"],
    "tiered": ["--params", "gpu"],
    "tiered, on the drive, one block recomputed": [*ON_THE_DRIVE, "model.activation_checkpointing=1"],
    "tiered, on the drive, recomputed reentrantly": [*(*ON_THE_DRIVE, "model.activation_checkpointing=on", REENTRANT)],
}


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(
    ("architecture", "way"),  # half of the pairs
    [(name, way) for n, way in enumerate(WAYS) for m, name in enumerate(NOISY) if (n + m) % 2],
)
def test_dropout_is_the_same_in_every_placement(architecture: str, way: str, folder: Path, drive: Path) -> None:
    """bf16 with two micro-batches gives the same bits in every placement, whatever else draws random numbers in
    between.
    """
    if ON_GPU and "plain" in way:
        pytest.skip("plain torch's AdamW is CUDA's here, with other last bits")
    model = model_directory(folder / f"noisy-{architecture}", architecture, **NOISY[architecture])
    expected, weights = plain(model, 3, "--accumulate", "2", "model.activation_checkpointing=off", accumulate=2)
    with engine(model, "--accumulate", "2", *WAYS[way], drives=[] if "plain" in way else [drive]) as ours:

        def between(step: int) -> None:
            ours.eval_loss(batches(1)[0])
            torch.rand(step)

        steps = train(ours, batches(6), accumulate=2, before=between)
        if "chunks" in way:  # Sums over chunks round differently, and bf16 weights soon diverge.
            assert steps[0][0] == pytest.approx(expected[0][0], rel=1e-5)
            return
        assert steps == expected
        assert_same(masters(ours), weights)


@pytest.mark.parametrize("architecture", NOISY)
def test_each_micro_batch_draws_other_numbers(architecture: str, folder: Path) -> None:
    """The same rows have another loss under another seed."""
    model = model_directory(folder / f"noisy-{architecture}", architecture, **NOISY[architecture])
    rows = batches(1)[0]
    with engine(model, "--engine", "plain") as reference:
        inputs, targets = rows.inputs.to(reference._device), rows.targets.to(reference._device)
        losses = {float(reference._module.train()(inputs, targets, seed).detach()) for seed in (1, 2, 3, 1, 2, 3)}
    assert len(losses) == 3


def test_ranks_draw_what_one_rank_draws(tmp_path: Path) -> None:
    """Micro-batch m of rank r of 2 equals micro-batch 2 m + r of one rank, also after resuming."""
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    reader = RowReader(
        TokenFile.open(tmp_path / "ids.bin"), seq_len=10, rows=range(390), vocabulary=4000, seed=3, shuffle=True
    )

    def taken(count: int, position: int = 0, **ranks: int) -> list[Batch]:
        return list(islice(reader.train_batches(position, micro_batch=3, **ranks), count))

    alone = taken(12)
    assert len({batch.seed for batch in alone}) == 12
    for rank in (0, 1):
        for batch, same in zip(taken(6, rank=rank, world=2), alone[rank::2], strict=True):
            assert batch.seed == same.seed
            assert torch.equal(batch.inputs, same.inputs)
    assert [batch.seed for batch in taken(8, alone[3].data_position)] == [batch.seed for batch in alone[4:]]
