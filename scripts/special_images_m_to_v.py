"""Tiny configurations and image inputs of architectures whose names are in SPECIAL: see `special_image_models.py`."""

from __future__ import annotations

from typing import Any

import torch
from tiny_image_models import (
    ROWS,
    SIDE,
    TEXT,
    Batch,
    Special,
    changed_config,
    kinds,
    under,
    with_small_images,
    with_text,
)
from tiny_models import VOCABULARY, tiny_config
from transformers import PreTrainedConfig, PreTrainedModel

from offload_trainer.model.probes.tiny_model import HEADS, HIDDEN

_IMAGE, _START = VOCABULARY - 1, VOCABULARY - 2  # tokens that no text has
_LARGE = 0.2  # initializer_range of towers whose features would be too small for fp32 to show in the loss
_MERGED = SIDE**2 // 4  # tokens of an image of which 2 x 2 patches become one


# -- images as rows of patches ----------------------------------------------------------------------------------------


def _rows(model: PreTrainedModel, random: torch.Generator) -> torch.Tensor:
    """Return the patches of all images, each with its frames."""
    vision = model.config.vision_config
    frames = next((n for key in ("temporal_patch_size", "patch_temporal") if (n := getattr(vision, key, None))), 1)
    return torch.randn(ROWS * SIDE**2, 3 * frames * vision.patch_size**2, generator=random)


def _grid() -> torch.Tensor:
    return torch.tensor([[1, SIDE, SIDE]] * ROWS)


def _patches(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = {"pixel_values": _rows(model, random), "image_grid_thw": _grid()}
    return with_text(model, images, random, count=_MERGED)


def _omni(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return rows that begin with the token by which the model finds an image and computes its positions."""
    batch = _patches(model, random)
    ids = torch.cat([torch.full((ROWS, 1), model.config.vision_start_token_id), batch["input_ids"]], 1)
    labels = torch.cat([torch.full((ROWS, 1), -100), batch["labels"]], 1)
    return batch | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _nemotron_h_omni_config() -> PreTrainedConfig:
    kind = kinds()["NemotronH_Omni_Reasoning_V3_"]
    vision = tiny_config(type(kind().vision_config), video_temporal_patch_size=2, max_img_size=16 * SIDE)
    return with_small_images(tiny_config(kind, vision_config=vision, image_token_id=_IMAGE))


def _nemotron_h_omni(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = {"pixel_values": _rows(model, random), "image_grid_hw": _grid()[:, 1:]}
    return with_text(model, images, random, count=_MERGED)


def _video_llama3(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = {"pixel_values": _rows(model, random), "image_grid_thw": _grid()}
    return with_text(model, images | {"image_merge_sizes": torch.full((ROWS,), 2)}, random, count=_MERGED)


def _molmo2_config() -> PreTrainedConfig:
    kind = kinds()["Molmo2"]
    adapter = tiny_config(type(kind().adapter_config), vision_feature_layer=[-1], initializer_range=_LARGE)
    return with_small_images(tiny_config(kind, adapter_config=adapter))


def _molmo2(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return images of which each token pools four patches."""
    patch = model.config.vision_config.patch_size
    images = {
        "pixel_values": torch.randn(ROWS, SIDE**2, 3 * patch**2, generator=random),
        "image_token_pooling": torch.arange(ROWS * SIDE**2).reshape(-1, 4),
        "image_grids": torch.tensor([[SIDE // 2, SIDE // 2, 0, 0]] * ROWS),
    }
    return with_text(model, images, random, count=_MERGED)


# -- encoders whose decoder attends to the image ----------------------------------------------------------------------

_T5 = {"d_kv": HIDDEN // HEADS, "d_ff": 48}
_PATCH = 3 * 4**2  # values of a patch
_PIX2STRUCT = {
    **under("text_config", _T5),
    **under("vision_config", _T5 | {"patch_embed_hidden_size": _PATCH, "seq_len": 2 * SIDE}),
}


def _pix2struct(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return patches that begin with their row and column; the other values are indices of rows too if flipped."""
    places = torch.cartesian_prod(torch.arange(1.0, SIDE + 1), torch.arange(1.0, SIDE + 1)).repeat(ROWS, 1, 1)
    patches = torch.cat([places, torch.rand(ROWS, SIDE**2, _PATCH, generator=random)], -1)
    return with_text(model, {"flattened_patches": patches}, random)


_UDOP = _T5 | {"decoder_start_token_id": 0, "relative_attention_num_buckets": 32}  # its 2-D positions have 32 buckets


def _udop(model: PreTrainedModel, random: torch.Generator) -> Batch:
    side = model.config.image_size
    images = {
        "pixel_values": torch.randn(ROWS, 3, side, side, generator=random),
        "bbox": torch.rand(ROWS, TEXT, 4, generator=random).sort(-1).values,  # a box for each token of text
    }
    return with_text(model, images, random)


# -- towers -----------------------------------------------------------------------------------------------------------

# A tower from SAM. With its own initializer_range, 1e-10, a loss would not depend on the pixels.
_SAM = {"initializer_range": _LARGE, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48}
_POST = {f"post_conv_{part}_channels": 8 for part in ("in", "mid", "out")}
_UNLIMITED = {
    **under("vision_config.sam_config", _SAM | {"downsample_channels": [8, HIDDEN]}),
    "vision_config.encoder_config.image_size": 14,  # SAM's output is a single patch
}


_PALIGEMMA = {"text_config.num_key_value_heads": 1, "vision_config.vision_use_head": False}


def _paligemma(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return rows with token types of 0 for the image, whose tokens attend to each other, and 1 for the text."""
    side = model.config.vision_config.image_size
    batch = with_text(model, {"pixel_values": torch.randn(ROWS, 3, side, side, generator=random)}, random)
    return batch | {"token_type_ids": batch["input_ids"].ne(model.config.image_token_id).long()}


def _perception_lm_config() -> PreTrainedConfig:
    """Return a configuration with a tower of timm."""
    side = 14 * SIDE
    sizes = {
        "embed_dim": HIDDEN,
        "depth": 2,
        "num_heads": HEADS,
        "img_size": [side, side],
        "ref_feat_shape": [SIDE, SIDE],
    }
    args = sizes | {"global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1}
    tower = {"model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": args}
    return with_small_images(tiny_config(kinds()["PerceptionLM"], vision_config=tower))


def _perception_lm(model: PreTrainedModel, random: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 1, 3, 14 * SIDE, 14 * SIDE, generator=random)
    return with_text(model, {"pixel_values": pixels}, random, count=SIDE**2)


# -- other inputs and losses ------------------------------------------------------------------------------------------


def _text_alone(model: PreTrainedModel, random: torch.Generator) -> Batch:
    return with_text(model, {}, random, count=0)


def _pi0_config() -> PreTrainedConfig:
    """Return a language model and a model of actions, whose layers attend to the keys of the former."""
    kind = kinds()["PI0"]
    language = changed_config("PaliGemma", _PALIGEMMA)()
    actions = tiny_config(type(kind().dit_config), num_key_value_heads=1)
    sizes = {"chunk_size": 3, "max_state_dim": 8, "max_action_dim": 8}
    return kind(vlm_config=language, dit_config=actions, **sizes)


def _pi0(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return a camera's image, a robot's state and actions, and the noise and time that the model would draw."""
    config: Any = model.config
    side = config.vlm_config.vision_config.image_size
    ids = torch.cat(
        [
            torch.full((ROWS, SIDE**2), config.vlm_config.image_token_id),
            torch.randint(5, 20, (ROWS, TEXT), generator=random),
        ],
        1,
    )
    actions, noise = torch.randn(2, ROWS, config.chunk_size, config.max_action_dim, generator=random)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(ROWS, 1, 3, side, side, generator=random),
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
        "state": torch.randn(ROWS, config.max_state_dim, generator=random),
        "actions": actions,
        "noise": noise,
        "timestep": torch.rand(ROWS, generator=random),
    }


SPECIAL: dict[str, Special] = {
    "Mistral4": Special(
        changed_config("Mistral4", {"rope_parameters.partial_rotary_factor": 1.0}),
        _text_alone,
        pixels="input_ids",
        note="a causal language model: no images",
    ),
    "Molmo2": Special(config=_molmo2_config, inputs=_molmo2),
    "MuseGlimmer": Special(config=changed_config("MuseGlimmer", {"out_hidden_size": 4 * HIDDEN}), inputs=_patches),
    "MuseSpark": Special(config=changed_config("MuseSpark", {"out_hidden_size": 4 * HIDDEN}), inputs=_patches),
    "NemotronH_Omni_Reasoning_V3_": Special(config=_nemotron_h_omni_config, inputs=_nemotron_h_omni),
    "PI0": Special(_pi0_config, _pi0, refused="predicts no tokens", note="labels are the actions of a robot"),
    "PPChart2Table": Special(config=changed_config("PPChart2Table", under("vision_config", _SAM))),
    "PPFormulaNet": Special(config=changed_config("PPFormulaNet", under("vision_config", _SAM | _POST))),
    "PaddleOCRVL": Special(
        config=changed_config("PaddleOCRVL", {"text_config.rope_parameters.mrope_section": [2, 1, 1]}),
    ),
    "PaliGemma": Special(
        config=changed_config("PaliGemma", _PALIGEMMA),
        inputs=_paligemma,
    ),
    "PerceptionLM": Special(config=_perception_lm_config, inputs=_perception_lm),
    "Pix2Struct": Special(
        config=changed_config("Pix2Struct", _PIX2STRUCT), inputs=_pix2struct, pixels="flattened_patches"
    ),
    "Qwen2_5OmniThinker": Special(
        config=changed_config("Qwen2_5OmniThinker", {"vision_start_token_id": _START}), inputs=_omni
    ),
    "Qwen3OmniMoeThinker": Special(
        config=changed_config("Qwen3OmniMoeThinker", {"vision_start_token_id": _START}), inputs=_omni
    ),
    "Step3p7": Special(config=changed_config("Step3p7", {"text_config.sliding_window": 8})),
    "Udop": Special(config=changed_config("Udop", _UDOP), inputs=_udop),
    "UnlimitedOcr": Special(config=changed_config("UnlimitedOcr", _UNLIMITED)),
    "VideoLlama3": Special(inputs=_video_llama3),
    "VisionEncoderDecoder": Special(
        config=changed_config(
            "VisionEncoderDecoder",
            {
                "pad_token_id": 0,
                "decoder_start_token_id": 1,
                **under("decoder", {"is_decoder": True, "add_cross_attention": True}),
            },
        )
    ),
}
