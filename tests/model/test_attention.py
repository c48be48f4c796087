"""Tests of attention: documents of packed rows stay apart, and keys are repeated only where a GPU needs it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import model_directory
from seen_calls import calls_of
from small_architectures import ARCHITECTURES, reference
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from offload_trainer.common.errors import UserError
from offload_trainer.config import ModelSection
from offload_trainer.data.rows import IGNORED
from offload_trainer.model import attention, tiny_model
from offload_trainer.model.loader import resolve_model
from offload_trainer.model.loss import CausalLoss
from offload_trainer.model.tiny_model import refuse_crossing
from offload_trainer.settings import load_config


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


@pytest.mark.parametrize(("flash", "cudnn"), [(True, False), (False, True), (False, False)])
def test_torch_decides_which_heads_the_card_supports(flash: bool, cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses both kernels below sm_80, in fp32, and for heads too large for some cards."""
    asked: list[Any] = []
    monkeypatch.setattr(attention.cuda, "SDPAParams", lambda *given: asked.append(given))
    monkeypatch.setattr(attention.cuda, "can_use_flash_attention", lambda _: flash)
    monkeypatch.setattr(attention.cuda, "can_use_cudnn_attention", lambda _: cudnn)
    monkeypatch.setattr(attention, "_WHOLE", {})
    about = {"is_cuda": True, "stride": lambda: (512, 128, 16, 1), "dtype": torch.bfloat16, "requires_grad": True}
    query, key, wider = (SimpleNamespace(shape=(1, heads, 8, 16), **about) for heads in (4, 4, 2))
    for _ in range(2):  # torch is asked once
        needs = attention.needs_whole_heads(query, key, key, dropout=0.1)  # type: ignore[arg-type]
        assert needs == (not flash and not cudnn)
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


REFUSED = ("opt, whose head calls a part of the body", "falcon-h1, whose head reads a scale of the body")
LENGTHS = (7, 11, 6, 16, 8)  # tokens of documents that fill two rows


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REFUSED])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_have_the_loss_and_gradients_of_each_by_itself(name: str, attention: str) -> None:
    """The weights are large, so that any leak shows, windows are shorter than documents, and half the tokens count."""
    config = copy.deepcopy(ARCHITECTURES[name])
    if getattr(config, "sliding_window", None):
        config.sliding_window = 5
    model, generator = reference(config).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    state = torch.get_rng_state()
    refuse_crossing(model)
    assert torch.equal(torch.get_rng_state(), state)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("eager only")
    random, documents = torch.Generator().manual_seed(4), []
    for length in LENGTHS:
        ids = torch.randint(9, 99, (length,), generator=random)
        targets = ids.roll(-1).where(torch.rand(length, generator=random) < 0.5, IGNORED)
        targets[0], targets[-1] = ids[1], IGNORED
        documents.append((ids, targets))
    each = [
        functional.cross_entropy(model(ids[None]).logits[0].float(), targets, reduction="sum", ignore_index=IGNORED)
        for ids, targets in documents
    ]
    inputs, targets = (torch.cat(tensors).view(2, -1) for tensors in zip(*documents, strict=True))
    expected = sum(each) / (targets != IGNORED).sum()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_attn_implementation(attention)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, -1)
    loss = CausalLoss(model, chunk=8)(inputs, targets, None, None, positions)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    for key, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-3, atol=1e-5, msg=key)
    assert abs(CausalLoss(model, chunk=8)(inputs, targets).item() - expected.item()) > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_models_in_which_documents_would_cross_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"data\.packing=on: .*Leave data.packing out"):
        refuse_crossing(reference(ARCHITECTURES[name]))


def test_the_probe_finds_documents_that_transformers_mixes_or_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference(ARCHITECTURES["llama, untied"])
    made = modeling_llama.create_causal_mask
    without = lambda **given: made(**given | {"position_ids": None})  # noqa: E731
    with monkeypatch.context() as patch:
        # Positions restart without a mask, as in an architecture that does not pass them on.
        patch.setattr(modeling_llama, "create_causal_mask", without)
        with pytest.raises(UserError, match=r"LlamaForCausalLM computes something else .* of the largest apart"):
            refuse_crossing(model)
    model.extra = torch.nn.GRU(2, 2)
    with pytest.raises(UserError, match=r"does not run \(it has no GRU\), so whether documents .* is not known"):
        refuse_crossing(model)
    del model.extra
    for found in ((float("nan"), 1.0), (0.0, 0.0)):  # the second could not fail, as it did not exercise attention
        monkeypatch.setattr(tiny_model, "_compare_documents", lambda tiny, found=found: found)
        with pytest.raises(UserError, match="computes something else"):
            refuse_crossing(model)


def test_masks_are_in_the_plan(tmp_path: Path) -> None:
    """A block keeps as many mask bytes on a CPU as autograd saves in a real forward."""
    length, rows = 48, 2
    words = "--model gpt2-mini --dtype fp32 model.activation_checkpointing=off model.overrides.n_layer=2"
    section = load_config(words.split()).model
    apart, crossed = (resolve_model(section, seed=0, packed=on) for on in (True, False))
    module = apart.build(dtype=torch.float32)
    ids = torch.randint(5, 99, (rows, length))
    positions = torch.arange(length).remainder(length // 2).expand(rows, -1)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (length, length):
            saved.append(tensor)
        return tensor

    module.eval()  # dropout would disable fused attention on a CPU
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(ids, ids, None, None, positions)
    masks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    counted, without = apart.shape.on_gpu, crossed.shape.on_gpu
    kept = counted.kinds[0].kept.at(rows, length) - without.kinds[0].kept.at(rows, length)
    assert 2 * kept == sum(masks.values())
    assert counted.before.pair == 1  # one byte for each pair of a row's tokens
