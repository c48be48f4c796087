"""Tests of which architectures can split rows among ranks, and of the pieces of a batch."""

from __future__ import annotations

import copy

import pytest
import torch
from small_architectures import ARCHITECTURES
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from offload_trainer.data.rows import IGNORED, Batch, DataState
from offload_trainer.errors import UserError
from offload_trainer.model.attention import DividedAttention
from offload_trainer.model.probes.rows import refuse_pieces

CUT = ("gpt2", "llama, untied", "qwen3, tied", "granite, scaled", "mixtral, experts", "qwen2moe, shared expert")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "a recurrence": (ARCHITECTURES["falcon-h1, whose head reads a scale of the body"], "in 2 pieces"),
    "chunks": (Llama4TextConfig(**SMALL, num_key_value_heads=2, head_dim=8), "in 2 pieces .* Leave it out"),
    "soft-capped": (ARCHITECTURES["gemma2, soft-capped"], "runs with eager attention, and it needs sdpa"),
    "slopes": (BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4), "eager attention"),
    "its own": (FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4), "its own"),
    "of length": (LlamaConfig(**SMALL, rope_parameters=DYNAMIC), r"rotary positions \(dynamic\) depend on the length"),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config._attn_implementation = None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", [MistralConfig, Gemma3TextConfig])
def test_attention_windows_cover_whole_rows(kind: type[PreTrainedConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=16))
    refuse_pieces(model)
    monkeypatch.setattr(DividedAttention, "_seen", lambda *_: None)
    with pytest.raises(UserError, match="in 2 pieces"):
        refuse_pieces(model)


@pytest.mark.parametrize("name", CUT)
def test_models_that_mix_tokens_only_in_attention_can_be_divided(name: str) -> None:
    refuse_pieces(model_of(ARCHITECTURES[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str) -> None:
    config, told = REFUSED[name]
    model = model_of(config)
    with pytest.raises(UserError, match=f"parallel.sequence: .*{type(model).__name__}.*{told}"):
        refuse_pieces(model)


def test_the_routers_loss_is_refused() -> None:
    model = model_of(ARCHITECTURES["mixtral, experts"])
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="set it to false"):
        refuse_pieces(model)


def test_a_probe_that_could_not_fail_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    """If separate pieces match whole rows, the trial did not exercise attention."""
    monkeypatch.setattr("offload_trainer.model.probes.rows._compare_pieces", lambda tiny: (0.0, 0.0))
    with pytest.raises(UserError, match="computes something else"):
        refuse_pieces(model_of(ARCHITECTURES["gpt2"]))


def test_pieces_of_a_batch_are_its_rows_and_positions_once() -> None:
    tokens = torch.arange(2 * 13).view(2, 13)
    targets = tokens[:, 1:].clone()
    targets[:, 8:] = IGNORED
    whole = Batch(inputs=tokens[:, :-1], targets=targets, state=DataState(7), seed=3)
    pieces = [whole.piece(number, of=3) for number in range(3)]
    assert torch.equal(torch.cat([piece.inputs for piece in pieces], 1), whole.inputs)
    assert torch.equal(torch.cat([piece.targets for piece in pieces], 1), whole.targets)
    places = [piece.positions.tolist() for piece in pieces if piece.positions is not None]
    assert places == [[list(range(first, first + 4))] * 2 for first in (0, 4, 8)]
    assert [piece.counted for piece in pieces] == [8, 8, 0]
    assert {piece.state for piece in pieces} == {whole.state}
    assert len({piece.seed for piece in pieces} | {whole.seed}) == 4  # each piece has its own dropout
    assert whole.piece(0, of=1) is whole
