"""Tests that a step's loss is one mean over all counted targets of its micro-batches, as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_bench import assert_near, batches, engine, masters, model_directory, train
from uneven_targets import EPS, masked, random_weights, transformers_alone

from offload_trainer.config import ModelSection
from offload_trainer.data.rows import weights_in_step
from offload_trainer.errors import TrainerError
from offload_trainer.model.loader import resolve_model


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_weights(model_directory(tmp_path_factory.mktemp("model"), "qwen3", tied=False))


@pytest.mark.parametrize("words", [("--engine", "plain"), ("--ram-fraction", "1", "model.loss_chunk=10")], ids=str)
def test_the_mean_is_over_all_targets_of_a_step(words: tuple[str, ...], pretrained: Path) -> None:
    data = masked(batches(9))
    expected, weights = transformers_alone(pretrained, data, at_a_time=3)
    always = ("model.random_init=false", "--dtype", "fp32", "--accumulate", "3", f"optim.eps={EPS}")
    with engine(pretrained, *always, *words) as ours:
        steps = train(ours, data, accumulate=3)
        assert_near(steps, expected, rel=1e-6)
        for name, master in masters(ours).items():
            torch.testing.assert_close(master, weights[name], rtol=1e-5, atol=1e-6)
        assert ours.eval_loss(data[1]) == 0.0


def test_equal_counts_have_weights_of_exactly_one_and_a_step_that_counts_nothing_is_refused() -> None:
    for count in (1, 3, 48, 1023, 4096):
        for batches_of_a_step in (1, 2, 3, 5, 7, 64):
            assert weights_in_step([count] * batches_of_a_step) == [1.0] * batches_of_a_step
    assert weights_in_step([3, 0, 9]) == [0.75, 0.0, 2.25]
    with pytest.raises(TrainerError, match="a step of 2 micro-batches has no target in the loss: all are -100"):
        weights_in_step([0, 0])


def test_targets_are_counted_where_the_caller_does_not(pretrained: Path) -> None:
    source = resolve_model(ModelSection(name=str(pretrained), dtype="fp32"), seed=0)
    ours = source.build(dtype=torch.float32)
    batch = masked(batches(1))[0]
    with torch.no_grad():
        for name, value in source.weights():
            ours.model.get_parameter(name).copy_(value)
        assert torch.equal(ours(batch.inputs, batch.targets), ours(batch.inputs, batch.targets, None, batch.counted))
