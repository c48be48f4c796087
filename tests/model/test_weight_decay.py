"""Tests that matrices and embeddings decay, as in transformers' Trainer for every architecture."""

from __future__ import annotations

import pytest
from small_architectures import small
from transformers import AutoConfig, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from offload_trainer.model.shape import no_weight_decay_names


@pytest.mark.parametrize(
    ("config", "spared"),
    [
        (AutoConfig.for_model("gpt_oss"), {"gate_up_proj_bias", "down_proj_bias"}),
        (AutoConfig.for_model("cohere", use_qk_norm=True), {"q_norm.weight", "k_norm.weight"}),
        (AutoConfig.for_model("mamba"), {"A_log"}),
        (AutoConfig.for_model("gpt2"), set()),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_biases_and_norms_of_two_dimensions_do_not_decay(config: object, spared: set[str]) -> None:
    found = no_weight_decay_names(small(config))
    assert {ending for ending in spared for name in found if name.endswith(ending)} == spared
    assert all(name.endswith(tuple(spared)) for name in found)


@pytest.mark.slow
def test_every_architecture_decays_what_transformers_decays() -> None:
    """The exceptions are vectors, which never decay here (sinks, residual scales, Mamba's D), and A_log."""
    differences, built = [], 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            model = small(kind())
        except Exception:  # The defaults build no model: a package is missing, or keys do not fit each other.
            continue
        built += 1
        weights = {name: tensor for name, tensor in model.named_parameters() if tensor.dim() > 1}
        theirs = set(Trainer.get_decay_parameter_names(None, model)) & weights.keys()  # type: ignore[arg-type]
        ours = weights.keys() - no_weight_decay_names(model)
        differences += [(kind.__name__, name) for name in ours ^ theirs if not name.endswith(".A_log")]
    assert built > 150
    assert not differences
