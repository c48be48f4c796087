"""Tests of grouped heads on GPUs whose fast kernels lack them: keys are repeated only there, with the same results."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import model_directory
from seen_calls import calls_of
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from offload_trainer.config import ModelSection
from offload_trainer.model import attention
from offload_trainer.model.loader import resolve_model


@pytest.fixture(autouse=True)
def _transformers_own_afterwards() -> Iterator[None]:
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_repeated_heads_give_the_same_losses_and_gradients(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_gqa` is never set, since cards before sm_80 would then materialise the whole score matrix."""
    config = AutoConfig.from_pretrained(model_directory(tmp_path, "qwen3", num_key_value_heads=2))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.arange(48).view(2, 24)
    note = lambda query, key, *_, **more: (key.shape[1], more.get("enable_gqa", False))  # noqa: E731
    seen = calls_of(monkeypatch.setattr, functional, "scaled_dot_product_attention", note)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach(), [weight.grad.clone() for weight in model.parameters()]

    loss, gradients = run()
    attention.repeat_keys_where_needed()
    same = run()  # on a CPU, transformers' own attention runs, with the same bits
    assert torch.equal(same[0], loss)
    assert all(map(torch.equal, same[1], gradients))
    seen.clear()
    monkeypatch.setattr(attention, "needs_whole_heads", lambda *_, **__: True)
    repeated = run()
    assert set(seen) == {(4, False)}
    torch.testing.assert_close(repeated[0], loss)
    for one, other in zip(repeated[1], gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("flash", "cudnn", "needs"), [(True, False, False), (False, True, False), (False, False, True)]
)
def test_torch_decides_which_heads_the_card_supports(
    flash: bool, cudnn: bool, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses both kernels below sm_80, in fp32, and for heads too large for some cards."""
    asked: list[Any] = []
    monkeypatch.setattr(attention.cuda, "SDPAParams", lambda *given: asked.append(given))
    monkeypatch.setattr(attention.cuda, "can_use_flash_attention", lambda _: flash)
    monkeypatch.setattr(attention.cuda, "can_use_cudnn_attention", lambda _: cudnn)
    monkeypatch.setattr(attention, "_WHOLE", {})
    about = {"is_cuda": True, "stride": lambda: (512, 128, 16, 1), "dtype": torch.bfloat16, "requires_grad": True}
    query, key, wider = (SimpleNamespace(shape=(1, heads, 8, 16), **about) for heads in (4, 4, 2))
    for _ in range(2):  # torch is asked once
        assert attention.needs_whole_heads(query, key, key, dropout=0.1) == needs  # type: ignore[arg-type]
    assert asked == [(query, key, key, None, 0.1, True, True)]
    attention.needs_whole_heads(query, wider, key, dropout=0.1)  # type: ignore[arg-type]
    assert len(asked) == 2


def test_torch_accepts_the_arguments() -> None:
    """The arguments match the installed torch version, which answers no without a GPU."""
    query, key = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    asked = attention.cuda.SDPAParams(query, key, key, None, 0.0, True, True)
    assert not attention.cuda.can_use_cudnn_attention(asked)
    assert isinstance(attention.cuda.can_use_flash_attention(asked), bool)
    assert not attention.needs_whole_heads(query, key, key, dropout=0.0)


@pytest.mark.parametrize("gpu", [True, False])
def test_key_heads_are_repeated_only_for_a_gpu(gpu: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    model_directory(tmp_path, "qwen3")
    source = resolve_model(ModelSection(name=str(tmp_path), random_init=True, activation_checkpointing="off"), seed=0)
    source.build(dtype=torch.float32)
    chosen = AttentionInterface._global_mapping["sdpa"]
    assert (chosen is attention._attention) == gpu
