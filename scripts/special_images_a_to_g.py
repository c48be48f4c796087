"""Tiny configurations and image inputs of architectures whose names are in SPECIAL: see `special_image_models.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tiny_image_models import (
    ROWS,
    SIDE,
    TEXT,
    Batch,
    Special,
    changed_config,
    under,
    with_small_images,
    with_text,
)
from tiny_models import VOCABULARY, tiny_config
from torch.nn import functional
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
    EvollaForProteinText2Text,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from offload_trainer.model.probes.tiny_model import HIDDEN

Inputs = Callable[[PreTrainedModel, torch.Generator], Batch]
_IMAGE = VOCABULARY - 1
_CODES = range(VOCABULARY - 16, VOCABULARY - 8)  # tokens for a small codebook; no text has them
_STD = {"initializer_range": 0.02}  # instead of 1e-10, with which a loss would not depend on the pixels


def _square(side: int) -> Inputs:
    """Return inputs with images of `side` x `side` pixels."""
    return lambda model, random: with_text(model, _pixels(side, random), random)


def _pixels(side: int, random: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, side, side, generator=random)}


# -- images as codes of a small codebook ------------------------------------------------------------------------------

_CODEBOOK = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
_CHAMELEON = {
    "vocabulary_map": {"<image>": _IMAGE} | {f"IMGIMG{chr(ord('A') + n)}Z": code for n, code in enumerate(_CODES)},
    "image_token_id": _IMAGE,
    **under("vq_config", _CODEBOOK | {"num_embeddings": len(_CODES), "latent_channels": HIDDEN}),
}
_EMU3 = {
    "vocabulary_map": {"<image>": _IMAGE, "<|extra_200|>": _IMAGE - 1}
    | {f"<|visual token {n:06d}|>": code for n, code in enumerate(_CODES)},
    "image_token_id": _IMAGE,
    **under("vq_config", _CODEBOOK | {"codebook_size": len(_CODES), "temporal_downsample_factor": 2}),
}


def _emu3(model: PreTrainedModel, random: torch.Generator) -> Batch:
    return with_text(model, _pixels(8, random) | {"image_sizes": torch.tensor([[8, 8]] * ROWS)}, random)


# -- towers -----------------------------------------------------------------------------------------------------------

_SAM = _STD | {"output_channels": 8, "window_size": 2, "global_attn_indexes": [1]}
_OCR2 = {
    "text_config.mlp_layer_types": ["dense", "sparse"],
    "text_config.num_experts_per_tok": 2,
    "text_config.max_position_embeddings": 256,
    **under(
        "vision_config.sam_config", _SAM | {"downsample_channels": [16, HIDDEN], "image_size": 32, "patch_size": 4}
    ),
}
_FASTVIT = {
    "architecture": "fastvit_t8",
    "initializer_range": 0.2,  # its convolutions have no norms, and would make features of almost 0
    "model_args": {
        "layers": [1, 1],
        "embed_dims": [8, HIDDEN],
        "mlp_ratios": [2, 2],
        "token_mixers": ["repmixer", "attention"],
        "cls_ratio": 1.0,
        "inference_mode": True,
    },
}
_FLORENCE2 = {
    "depths": [1, 1],
    "patch_size": [3, 3],
    "patch_stride": [2, 2],
    "patch_padding": [1, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [8, 16],
    "num_heads": [2, 2],
    "num_groups": [2, 2],
    "window_size": 4,
}

_GEMMA3N = {
    "vision_config.model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": SIDE},
    "vision_config.hidden_size": 2048,  # MobileNetV5's encoder has no other
    "vision_soft_tokens_per_image": SIDE**2,
    "audio_config.conf_num_hidden_layers": 1,
}


def _two_resolutions(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = _pixels(4 * 16, random)
    return with_text(model, images | {"high_res_pixel_values": images["pixel_values"].flip(1)}, random)


# -- images as rows of patches ----------------------------------------------------------------------------------------

_WIDTH = 3 * 4**2  # values of a patch


def _patches(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = {"pixel_values": torch.randn(ROWS, SIDE**2, _WIDTH, generator=random)}
    return with_text(model, images, random, count=SIDE**2)


def _places(random: torch.Generator) -> Batch:
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).repeat(ROWS, 1, 1)
    return {"pixel_values": torch.rand(ROWS, SIDE**2, _WIDTH, generator=random), "image_position_ids": places}


def _patches_with_places(model: PreTrainedModel, random: torch.Generator) -> Batch:
    return with_text(model, _places(random), random)


def _gemma4() -> PreTrainedConfig:
    vision = tiny_config(Gemma4VisionConfig, patch_size=4, pooling_kernel_size=2)
    return with_small_images(tiny_config(Gemma4Config, vision_config=vision))


def _gemma4_unified() -> PreTrainedConfig:
    sizes = {"patch_size": 2, "pooling_kernel_size": 2, "mm_posemb_size": SIDE, "output_proj_dims": HIDDEN}
    vision = tiny_config(Gemma4UnifiedVisionConfig, **sizes)
    return with_small_images(tiny_config(Gemma4UnifiedConfig, vision_config=vision))


# -- other inputs and losses ------------------------------------------------------------------------------------------

_CANVAS = 4  # tokens that a step of diffusion predicts


def _diffusion_gemma() -> PreTrainedConfig:
    vision = tiny_config(Gemma4VisionConfig, patch_size=4, pooling_kernel_size=2)
    text = tiny_config(DiffusionGemmaTextConfig, num_experts=4, top_k_experts=2, moe_intermediate_size=24)
    sizes = {"vision_config": vision, "text_config": text, "canvas_length": _CANVAS}
    return with_small_images(tiny_config(DiffusionGemmaConfig, **sizes))


def _with_canvas(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return images and text with a canvas of random tokens, and the tokens that have to replace them as labels."""
    canvas, labels = (torch.randint(5, _CODES.start, (ROWS, _CANVAS), generator=random) for _ in range(2))
    batch = with_text(model, _places(random), random, count=SIDE**2 // 4)
    return batch | {"decoder_input_ids": canvas, "labels": labels}


def _loss_of_canvas(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return functional.cross_entropy(model(**inputs).logits.flatten(0, 1), batch["labels"].flatten())


def _proteins(model: PreTrainedModel, random: torch.Generator) -> Batch:
    proteins = torch.randint(5, 20, (ROWS, TEXT), generator=random)
    inputs = {"protein_input_ids": proteins, "protein_attention_mask": torch.ones_like(proteins)}
    return with_text(model, inputs, random, count=0)


_EVOLLA = {
    "aligner_num_add_layers": 1,
    "initializer_range": 0.2,  # smaller weights would hide the proteins behind the gates
    "resampler_depth": 1,
    "resampler_num_latents": 4,
    "pad_token_id": 1,
}
_QUERIES = {"projector_patch_to_query_dict": {SIDE**2: 4}, "max_value_projector_patch_to_query_dict": 4}
_ERNIE = {"text_config.moe_intermediate_size": [48, 24], "text_config.rope_parameters.mrope_section": [1, 1, 2]}

SPECIAL: dict[str, Special] = {
    "Aria": Special(changed_config("Aria", _QUERIES)),
    "Blip": Special(changed_config("Blip", under("vision_config", _STD))),
    "Blip2": Special(changed_config("Blip2", {"image_token_index": _IMAGE, **under("vision_config", _STD)})),
    "Chameleon": Special(changed_config("Chameleon", _CHAMELEON), _square(8)),
    "DeepseekOcr2": Special(changed_config("DeepseekOcr2", _OCR2)),
    "DeepseekVLHybrid": Special(
        changed_config("DeepseekVLHybrid", under("high_res_vision_config", _SAM)), _two_resolutions
    ),
    "DiffusionGemma": Special(
        _diffusion_gemma,
        _with_canvas,
        loss=_loss_of_canvas,
        tower="vision",
        note="the loop computes the loss from the logits",
    ),
    "Emu3": Special(changed_config("Emu3", _EMU3), _emu3),
    "Ernie4_5_VLMoe": Special(changed_config("Ernie4_5_VLMoe", _ERNIE)),
    "Evolla": Special(
        changed_config("Evolla", _EVOLLA),
        _proteins,
        pixels="protein_input_ids",
        build=lambda config: EvollaForProteinText2Text(config).float(),
        load=partial(EvollaForProteinText2Text.from_pretrained, dtype=torch.float32),
        refused="auto classes build no EvollaConfig model",
        note="proteins, no images",
    ),
    "FastVlm": Special(changed_config("FastVlm", under("vision_config", _FASTVIT)), _square(32)),
    "Florence2": Special(changed_config("Florence2", under("vision_config", _FLORENCE2)), _square(16)),
    "Fuyu": Special(changed_config("Fuyu", {"patch_size": 4, "image_size": 4 * SIDE}), _patches),
    "Gemma3n": Special(changed_config("Gemma3n", _GEMMA3N), _square(64)),
    "Gemma4": Special(_gemma4, _patches_with_places),
    "Gemma4Unified": Special(_gemma4_unified, _patches_with_places),
}
