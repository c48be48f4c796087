"""Tests that dropout and router noise depend only on the run's seed and on the rows' position."""

from pathlib import Path

import pytest
import torch
from engine_bench import assert_same, batches, engine, masters, model_directory, plain, train
from placements import ALL_ON_DRIVES

NOISY = {
    "llama": {"attention_dropout": 0.2},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("architecture", NOISY)
def test_dropout_is_the_same_in_every_placement(architecture: str, folder: Path, drive: Path) -> None:
    """bf16 with two micro-batches gives the same bits on the drive with recomputed blocks, whatever else draws random
    numbers in between. GPT-2's placements are in test_pairs.py.
    """
    model = model_directory(folder / f"noisy-{architecture}", architecture, **NOISY[architecture])
    expected, weights = plain(model, 3, "--accumulate", "2", "model.activation_checkpointing=off", accumulate=2)
    words = ["--accumulate", "2", *ALL_ON_DRIVES, "model.activation_checkpointing=on"]
    with engine(model, *words, drives=[drive]) as ours:

        def between(step: int) -> None:
            ours.eval_loss(batches(1)[0])
            torch.rand(step)

        assert train(ours, batches(6), accumulate=2, before=between) == expected
        assert_same(masters(ours), weights)
