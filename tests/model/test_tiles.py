"""Tests of MLPs that run on a piece of the row at a time: which modules can, and that results match transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import batches, engine, model_directory, train
from seen_calls import calls_of
from small_architectures import ARCHITECTURES
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from offload_trainer.model.probes.blocks import tileable
from offload_trainer.model.shape import block_names
from offload_trainer.model.tiled_mlp import Tiled
from offload_trainer.offloading.device import CpuDevice

pytestmark = pytest.mark.usefixtures("nothing_is_small")

TILED = {  # the module of each block that is found
    "gpt2": "mlp",
    "llama, untied": "mlp",
    "gemma2, soft-capped": "mlp",
    "falcon-h1, whose head reads a scale of the body": "feed_forward",
    "mixtral, experts": "mlp",
    "qwen2moe, shared expert": "mlp",
}
AGAIN = {"gemma2, soft-capped"}  # a recomputation stops at the input of an MLP that ends its block


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(copy.deepcopy(ARCHITECTURES[name]), dtype=dtype).train()


@pytest.mark.parametrize("name", TILED)
def test_tiled_models_have_the_loss_and_gradients_of_whole_ones(name: str) -> None:
    model = model_of(name)
    found, again = tileable(model)
    assert found == [f"{block}.{TILED[name]}" for block in block_names(model)]
    assert again == (found if name in AGAIN else [])
    tokens = torch.randint(99, (2, 31))
    expected = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    for checkpointing in (False, True):
        tiled = model_of(name)
        if checkpointing:
            tiled.gradient_checkpointing_enable({"use_reentrant": False})
        for part in map(tiled.get_submodule, found):
            part.forward = Tiled(part, 13)
        loss = tiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        assert float((loss - expected).detach().abs()) < 1e-5
        loss.backward()
        for (weight, one), other in zip(tiled.named_parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), weight
            if one.grad is not None:
                assert torch.allclose(one.grad, other.grad, atol=1e-6, rtol=1e-4), weight


def test_a_weight_gets_one_gradient_and_only_pieces_are_in_memory() -> None:
    part = LlamaMLP(ARCHITECTURES["llama, untied"])
    part.forward = Tiled(part, 10)
    gradients, sizes = [], []
    for weight in part.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.shape))
    part.gate_proj.register_forward_hook(lambda *given: sizes.append(tuple(given[2].shape)))
    part(torch.randn(2, 16, 32, requires_grad=True)).sum().backward()
    assert sizes == 2 * [(1, 10, 48), (1, 10, 48), (1, 10, 48), (1, 2, 48)]
    assert sorted(gradients) == sorted(weight.shape for weight in part.parameters())


def test_gradients_of_pieces_are_rounded_once() -> None:
    """bf16 gradients are as near to fp32 as untiled ones; adding 64 pieces in bf16 would not be."""
    wide = LlamaMLP(ARCHITECTURES["llama, untied"])
    torch.manual_seed(1)
    for weight in wide.parameters():
        nn.init.normal_(weight, 0, 0.2)
    x, weighed = torch.randn(1, 1024, 32).bfloat16(), (1 + torch.randn(1, 1024, 32)).bfloat16()

    def gradients(part: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        (part(x.to(dtype)) * weighed.to(dtype)).sum().backward()
        return [weight.grad.float() for weight in part.parameters()]

    narrow = copy.deepcopy(wide).bfloat16()
    exact = copy.deepcopy(narrow).float()
    tiled, added = copy.deepcopy(narrow), copy.deepcopy(narrow)
    tiled.forward = Tiled(tiled, 16)
    given = list(zip(x.split(16, 1), weighed.split(16, 1), strict=True))
    for piece, weight in given:
        (added(piece) * weight).sum().backward()
    reference = gradients(exact, torch.float32)

    def apart(found: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True))

    whole, pieces = apart(gradients(narrow, torch.bfloat16)), apart(gradients(tiled, torch.bfloat16))
    assert pieces < 1.5 * whole
    assert apart([weight.grad.float() for weight in added.parameters()]) > 1.5 * whole


def test_the_backward_draws_the_dropout_of_the_forward() -> None:
    """The reference runs the pieces one after the other and keeps all of them."""
    torch.manual_seed(2)
    part = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.4), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.2))
    expected, x = copy.deepcopy(part), torch.randn(3, 9, 8, requires_grad=True)
    torch.manual_seed(3)
    kept = torch.cat([expected(piece) for piece in x.view(1, 27, 8).split(5, 1)], 1).view(3, 9, 8)
    after = torch.rand(1)
    kept.square().sum().backward()
    wanted, x.grad = x.grad, None
    part.forward = Tiled(part, 5)
    torch.manual_seed(3)
    output = part(x)
    assert torch.equal(output, kept)
    assert torch.equal(torch.rand(1), after)
    state = torch.get_rng_state()
    output.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.allclose(x.grad, wanted, atol=1e-6)
    for one, other in zip(part.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


# -- which modules -----------------------------------------------------------------------------------------------------


class Looks(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * nn.functional.pad(x, (0, 0, 1, -1)))


class Capacity(LlamaMLP):
    """An MLP that drops tokens beyond the first 100 similar ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        alike = (nn.functional.normalize(flat) @ nn.functional.normalize(flat[:1]).T > 0.99).squeeze(1)
        return super().forward(x) * ~(alike & (alike.cumsum(0) > 100)).view(*x.shape[:-1], 1)


class Draws(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class InEights(LlamaMLP):
    """An MLP that mixes each eight tokens, which pieces of multiples of eight would not reveal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        eights = nn.functional.pad(flat, (0, 0, 0, -len(flat) % 8)).view(-1, 8, x.shape[-1])
        return super().forward(x + eights.mean(1).repeat_interleave(8, 0)[: len(flat)].view_as(x))


@pytest.mark.parametrize("kind", [Looks, Capacity, Draws, InEights, LlamaMLP])
def test_modules_that_are_not_position_wise_are_found(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", kind)
    model = model_of("llama, untied")
    assert type(model.model.layers[0].mlp) is kind
    assert bool(tileable(model)[0]) == (kind is LlamaMLP)


def test_routers_whose_logits_are_a_loss_are_not_tiled() -> None:
    """Their logits are collected in addition to the output, which a trial of the module alone would not reveal."""
    model = model_of("mixtral, experts")
    for asked in (False, True):
        model.config.output_router_logits = asked
        assert bool(tileable(model)[0]) != asked


# -- in the engine; tests/offload/test_pairs.py compares its bits in all placements ------------------------------------


def test_a_piece_fetches_no_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = model_directory(tmp_path / "qwen3", "qwen3"), {}
    always = ["model.activation_checkpointing=on", "--params", "cpu", "tiered.weight_buffers=2"]
    fetched = calls_of(monkeypatch.setattr, CpuDevice, "fetch")
    for chunk in ("off", "5"):
        fetched.clear()
        with engine(model, f"model.mlp_chunk={chunk}", *always, device=CpuDevice()) as ours:
            assert ("forward" in vars(ours._module.model.model.layers[0].mlp)) == (chunk != "off")
            train(ours, batches(3))
        counts[chunk] = len(fetched)
    assert counts["off"] == counts["5"] > 3 * 5
