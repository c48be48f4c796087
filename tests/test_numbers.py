"""Numbers that are printed, each against a count that knows nothing of how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, call
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer.config import ModelSection
from offload_trainer.model.source import ModelSource, resolve_model

# -- floating-point operations: torch's counter ------------------------------------------------------------------------

_SMALL = {"vocab_size": 331, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64}
_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2, tied": {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "n_positions": 64},
    "qwen3, untied, heads of 40 of 24": {
        **_HEADS,
        **{"model_type": "qwen3", "hidden_size": 96, "intermediate_size": 200, "head_dim": 40},
        "tie_word_embeddings": False,
    },
    "gemma2, tied": {**_HEADS, "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "head_dim": 24},
    "mixtral, 2 of 8": {
        **_HEADS,
        **{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    },
    "qwen3-moe, 2 of 16": {
        **_HEADS,
        **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48},
        **{"head_dim": 24, "num_experts": 16, "num_experts_per_tok": 2},
    },
    "deepseek-v3, keys of 32 and values of 20": {
        **_HEADS,
        **{"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48},
        **{"num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20},
    },
}
FROZEN = {
    "gpt2, tied": [
        r"wte|wpe",
        r"wte|wpe|h\.0\.",
        r"mlp",
        r"h\.[12]\.|ln_f",
        r"wpe|h\.|ln_f",
        r"wte|wpe|h\.[01]\.|attn",
    ],
    "qwen3, untied, heads of 40 of 24": [r"embed", r"^model", r"lm_head", r"embed|layers\.[01]\.", r"proj"],
    "mixtral, 2 of 8": [r"embed|gate", r"experts", r"embed|layers\.0\."],
}
CASES = [(name, "") for name in MODELS] + [(name, pattern) for name, some in FROZEN.items() for pattern in some]
ROWS, LENGTH = 2, 48


def source_of(folder: Path, name: str, frozen: str) -> ModelSource:
    (folder / "config.json").write_text(json.dumps(_SMALL | MODELS[name]))
    freeze = (frozen,) if frozen else ()
    return resolve_model(ModelSection(name=str(folder), scratch=True, attention="eager", freeze=freeze), seed=0)


def counted_flops(source: ModelSource) -> tuple[int, int]:
    """Forward and backward of transformers' own model, by torch's counter.

    Attention as plain products: of a fused one the counter takes what its backward computes twice. Experts in a loop,
    as the grouped product of a CPU is not in the counter's table.
    """
    source.config._experts_implementation = "eager"
    module = source.build(dtype=torch.float32)
    trained = [weight.name for weight in source.shape.weights if weight.trainable]
    assert trained == [name for name, parameter in module.model.named_parameters() if parameter.requires_grad]
    for parameter in module.model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    tokens = torch.randint(331, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        loss = module(tokens[:, :-1], tokens[:, 1:])
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("name", "frozen"), CASES)
def test_flops_are_torchs(name: str, frozen: str, tmp_path: Path) -> None:
    """Exactly; also of frozen weights, whose gradients nobody computes, nor what lies before all that is trained."""
    source = source_of(tmp_path, name, frozen)
    shape = source.shape
    forward, backward = counted_flops(source)
    tokens = ROWS * LENGTH
    assert tokens * shape.forward_flops(seq_len=LENGTH) == pytest.approx(forward, rel=1e-6)
    assert tokens * shape.backward_flops(seq_len=LENGTH) == pytest.approx(backward, rel=1e-6)
    assert shape.flops_per_token(seq_len=LENGTH) == shape.forward_flops(seq_len=LENGTH) + shape.backward_flops(
        seq_len=LENGTH
    )


# -- parameters: transformers' own count -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_transformers(name: str, tmp_path: Path) -> None:
    shape = source_of(tmp_path, name, "").shape
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert shape.parameters == shape.trainable == model.num_parameters()
    assert shape.largest == max(parameter.numel() for parameter in model.parameters())


# -- memory: what a run planned against the most that the kernel ever saw resident -------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's configuration for a few steps, with all that a long run does: validations, samples, saves."""
    often = ["--steps", 6, "train.eval_every=3", "train.sample_every=3", "--save-every", 4, "placement.threads=2"]
    configuration = Path(__file__).parent.parent / "configs/demo.yaml"
    return call(configuration, *often, output=tmp_path_factory.mktemp("demo") / "run")


def test_host_memory_is_the_planned_one(demo: Run) -> None:
    """Within 5 % on the machines that it was measured on; processors keep more or less for their products."""
    planned = json.loads((demo.output / "plan.json").read_text())["tiers"]["ram"]["need"]
    assert demo.steps[-1]["host_rss_bytes"] == pytest.approx(planned, rel=0.1)
