"""Test that the update matches, bit for bit, a loop of torch and transformers that uses nothing of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_bench import batches, engine, masters, model_directory, train
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM
from uneven_targets import random_weights

LR, DECAY = 1e-2, 0.1
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the loop is the CPU's, and so are its bits")


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


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("words", "clip"),
    [(["--engine", "plain"], 0.3), (["optim.kernel=torch"], 0.3), (["optim.kernel=native"], 0.3), ([], 1000.0)],
)
def test_clipped_steps_are_torchs_clip_grad_norm(words: list[str], clip: float, dtype: str, pretrained: Path) -> None:
    """Losses, norms and masters match, and start from the stored fp32 values whatever the run's dtype is.

    Gradients below the limit keep their scale.
    """
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    wished = ["model.random_init=false", "--dtype", dtype, f"optim.max_grad_norm={clip}", *words]
    with engine(pretrained, *wished) as ours:
        steps = train(ours, batches(6), lr=LR)
        expected, weights = plain_loop(pretrained, dtype=torch_dtype, clip=clip, steps=6)
        assert all((norm > clip) == (clip < 1) for _, norm in expected)
        assert steps == expected
        for name, tensor in masters(ours).items():
            assert torch.equal(tensor, weights[name]), name
