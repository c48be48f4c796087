"""Test that steps match loops of torch and transformers that use nothing of this package."""

from pathlib import Path

import pytest
import torch
from engine_bench import assert_near, assert_same, batches, engine, masters, model_directory, train
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM
from uneven_targets import DECAY, EPS, LR, masked, random_weights, transformers_alone

from offload_trainer.common.errors import TrainerError
from offload_trainer.data.rows import weights_in_step


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> Path:
    """Write a model's directory with fp32 weights that bf16 cannot represent."""
    # torch's fused update rounds the last elements differently unless the vocabulary is a multiple of 16.
    return random_weights(model_directory(folder, "qwen3", tied=False, vocab_size=224))


def plain_loop(folder: Path, *, dtype: torch.dtype, clip: float, steps: int) -> tuple[list, dict[str, torch.Tensor]]:
    """Return (loss, norm) of each step and the fp32 masters, with model weights in `dtype` and torch's clipping."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = dict(model.named_parameters())
    held = {name: torch.nn.Parameter(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    groups = [
        {"params": [held[name] for name in weights if (held[name].dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)
    done = []
    for batch in batches(steps):
        logits = model(batch.inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
        (loss / batch.targets.numel()).backward()
        for name, parameter in weights.items():
            held[name].grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_([held[name] for name in weights], clip)
        optimizer.step()
        done.append((float(loss.detach() / batch.targets.numel()), float(norm)))
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(held[name])
    return done, {name: parameter.detach() for name, parameter in held.items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the loop is the CPU's, and so are its bits")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("words", "clip"),
    [(["--engine", "plain"], 0.3), (["optim.kernel=torch"], 0.3), (["optim.kernel=native"], 0.3), ([], 1000.0)],
)
def test_clipped_steps_are_torchs_clip_grad_norm(words: list[str], clip: float, dtype: str, pretrained: Path) -> None:
    """Losses, norms and masters match, and start from the stored fp32 values whatever the run's dtype is."""
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    wished = ["model.random_init=false", "--dtype", dtype, f"optim.max_grad_norm={clip}", *words]
    with engine(pretrained, *wished) as ours:
        steps = train(ours, batches(6), lr=LR)
        expected, weights = plain_loop(pretrained, dtype=torch_dtype, clip=clip, steps=6)
        assert all((norm > clip) == (clip < 1) for _, norm in expected)
        assert steps == expected
        assert_same(masters(ours), weights)


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
