"""Tiny configurations and image inputs of architectures whose names are in SPECIAL: see `special_image_models.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_image_models import ROWS, SIDE, TEXT, Batch, Special, changed_config
from tiny_models import VOCABULARY
from transformers import PreTrainedConfig, PreTrainedModel, ShieldGemma2ForImageClassification

from offload_trainer.model.probes.tiny_model import HEADS, HIDDEN

_SHIELD_GEMMA2 = "read by ShieldGemma2ForImageClassification, whose rules for names transformers applies"
_IMAGE = VOCABULARY - 1  # the placeholder of configurations that name none
_TOKENS = (5, VOCABULARY - 16)  # tokens that are not special
_STD = {"vision_config.initializer_range": 0.02}  # instead of 1e-10, with which the loss would not depend on pixels


# -- configurations ---------------------------------------------------------------------------------------------------


def _tiled(name: str, changes: Mapping[str, Any] = {}) -> Callable[[], PreTrainedConfig]:
    """Return a function that makes a configuration whose images are the whole image and a single tile."""

    def make() -> PreTrainedConfig:
        config: Any = changed_config(name, changes)()
        config.image_grid_pinpoints = [[config.vision_config.image_size] * 2]
        return config

    return make


_GOT_OCR2 = _STD | {
    "vision_config.global_attn_indexes": [1],
    "vision_config.window_size": 2,
    "vision_config.mlp_dim": 48,
    "vision_config.output_channels": 16,
}
_GRANITE4_VISION = {
    "vision_config.hidden_size": 64,  # the configuration gives the resampler a head for each 64
    "qformer_config.hidden_size": 64,
    "qformer_config.encoder_hidden_size": 64,
    "qformer_config.num_attention_heads": 1,
    "text_config.num_hidden_layers": 5,
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-2, 0]],
    "spatial_target_layers": [1, 2, 3, 4],
}
_INKLING = {  # transformers needs scipy if there are fewer layers than factors of the patch
    "vision_config.patch_size": 2,
    "vision_config.num_hidden_layers": 3,
    "audio_config.n_mel_bins": 4,
}
_INKLING2 = {
    "vision_config.patch_size": 4,
    "vision_config.posemb_grid_size": SIDE,
    "vision_config.projection_hidden_dim": HIDDEN,
}
_JANUS = {
    "vq_config.base_channels": 32,
    "vq_config.latent_channels": 32,
    "vq_config.channel_multiplier": [1],
    "vq_config.num_res_blocks": 1,
}
_LFM2_VL = {
    "vision_config.num_patches": SIDE**2,
    "text_config.num_hidden_layers": 2,
    "text_config.layer_types": ["conv", "full_attention"],
}
_LLAMA4 = {
    "vision_config.intermediate_size": 4 * HIDDEN,  # also the width of four patches that become one token
    "vision_config.projector_input_dim": HIDDEN,
    "vision_config.projector_output_dim": HIDDEN,
    "vision_config.vision_output_dim": HIDDEN,
}
_MINICPM = {"image_token_id": _IMAGE, "insert_layer_id": 0, "vision_config.insert_layer_id": 0}


# -- batches ----------------------------------------------------------------------------------------------------------


def _rows(model: PreTrainedModel, images: Batch, random: torch.Generator, *, count: int) -> Batch:
    """Return `images` with rows of one token, `count` placeholders, which have no labels, and more tokens."""
    stated = (getattr(model.config, key, None) for key in ("image_token_id", "video_token_id"))
    token = next((one for one in stated if one is not None), _IMAGE)
    text = torch.randint(*_TOKENS, (ROWS, TEXT), generator=random)
    ids = torch.cat([text[:, :1], torch.full((ROWS, count), token), text[:, 1:]], 1)
    labels = ids.masked_fill(ids == token, -100)
    return images | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _pixels(model: PreTrainedModel, random: torch.Generator, *between: int) -> torch.Tensor:
    side = model.config.vision_config.image_size
    return torch.randn(ROWS, *between, 3, side, side, generator=random)


def _square(count: int) -> Callable[[PreTrainedModel, torch.Generator], Batch]:
    """Return inputs with an image in each row that becomes `count` tokens."""
    return lambda model, random: _rows(model, {"pixel_values": _pixels(model, random)}, random, count=count)


def _granite4_vision(model: PreTrainedModel, random: torch.Generator) -> Batch:
    pixels = _pixels(model, random, 2)
    images = {"pixel_values": pixels, "image_sizes": torch.tensor([list(pixels.shape[-2:])] * ROWS)}
    side = SIDE // 2
    return _rows(model, images, random, count=side**2 + side * (side + 1))  # each row of the tile ends with a token


def _granite_docling(model: PreTrainedModel, random: torch.Generator) -> Batch:
    images = {
        "pixel_values": _pixels(model, random, 1),
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),  # all tiles are whole
    }
    return _rows(model, images, random, count=SIDE**2 // 4)


def _idefics(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return rows whose first token comes before the image, and does not attend to it."""
    batch = _rows(model, {"pixel_values": _pixels(model, random, 1)}, random, count=1)
    return batch | {"image_attention_mask": batch["input_ids"].eq(_IMAGE).cumsum(1).unsqueeze(-1)}


def _inkling(model: PreTrainedModel, random: torch.Generator) -> Batch:
    vision = model.config.vision_config
    size = vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3
    pixels = torch.randn(ROWS * SIDE, *size, generator=random)
    return _rows(model, {"pixel_values": pixels}, random, count=SIDE)


def _inkling2(model: PreTrainedModel, random: torch.Generator) -> Batch:
    side = 2 * model.config.vision_config.patch_size  # four patches become one token
    images = {
        "pixel_values": torch.randn(ROWS * 4, side, side, 3, generator=random),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * ROWS),
    }
    return _rows(model, images, random, count=4)


def _instruct_blip(*frames: int) -> Callable[[PreTrainedModel, torch.Generator], Batch]:
    """Return inputs with an image, or a video of `frames`, in each row, and text for the resampler."""

    def inputs(model: PreTrainedModel, random: torch.Generator) -> Batch:
        images = {
            "pixel_values": _pixels(model, random, *frames),
            "qformer_input_ids": torch.randint(*_TOKENS, (ROWS, TEXT), generator=random),
        }
        return _rows(model, images, random, count=model.config.num_query_tokens * math.prod(frames))

    return inputs


def _kosmos2(model: PreTrainedModel, random: torch.Generator) -> Batch:
    return _with_mask(_square(model.config.latent_query_num)(model, random))


def _kosmos2_5(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return patches that begin with their row and column.

    Pixels are from 0 to 1, so that a reversed patch, with which the loss has to differ, begins with a place too.
    """
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).expand(ROWS, -1, -1)
    width = model.config.vision_config.patch_embed_hidden_size
    patches = torch.cat([places, torch.rand(ROWS, SIDE**2, width, generator=random)], -1)
    return _with_mask(_rows(model, {"flattened_patches": patches}, random, count=model.config.latent_query_num))


def _with_mask(batch: Batch) -> Batch:
    return batch | {"image_embeds_position_mask": batch["input_ids"].eq(_IMAGE)}


def _lfm2_vl(model: PreTrainedModel, random: torch.Generator) -> Batch:
    width = 3 * model.config.vision_config.patch_size**2
    images = {
        "pixel_values": torch.randn(ROWS, SIDE**2, width, generator=random),
        "spatial_shapes": torch.tensor([[SIDE, SIDE]] * ROWS),
        "pixel_attention_mask": torch.ones(ROWS, SIDE**2, dtype=torch.int64),
    }
    return _rows(model, images, random, count=SIDE**2 // 4)


def _minicpm(model: PreTrainedModel, random: torch.Generator) -> Batch:
    """Return images whose patches lie side by side in a single row."""
    patch = model.config.vision_config.patch_size
    images = {
        "pixel_values": torch.randn(1, 3, patch, patch * ROWS * SIDE**2, generator=random),
        "target_sizes": torch.tensor([[SIDE, SIDE]] * ROWS),
    }
    return _rows(model, images, random, count=SIDE**2 // int(model.config.downsample_mode.removesuffix("x")))


def _minicpm_v_4_7(model: PreTrainedModel, random: torch.Generator) -> Batch:
    batch = _minicpm(model, random)
    return batch | {"mm_token_type_ids": batch["input_ids"].eq(_IMAGE).long()}


def _shield_gemma2(folder: Path) -> PreTrainedModel:
    """Return the model inside the classifier, whose rules for the names of weights transformers applies to both."""
    return ShieldGemma2ForImageClassification.from_pretrained(folder, dtype=torch.float32).model  # type: ignore[no-any-return]


SPECIAL: dict[str, Special] = {
    "GotOcr2": Special(changed_config("GotOcr2", _GOT_OCR2)),
    "Granite4Vision": Special(_tiled("Granite4Vision", _GRANITE4_VISION), _granite4_vision),
    "GraniteDocling": Special(changed_config("GraniteDocling", {"vision_config.scale_factor": 2}), _granite_docling),
    "HunYuanVL": Special(
        changed_config(
            "HunYuanVL", {"text_config.head_dim": HIDDEN // HEADS, "vision_config.max_image_size": 16 * SIDE}
        )
    ),
    "Idefics": Special(changed_config("Idefics", {"alpha_initializer": "ones"}), _idefics),
    "Inkling": Special(changed_config("Inkling", _INKLING), _inkling),
    "Inkling2": Special(changed_config("Inkling2", _INKLING2), _inkling2),
    "InstructBlip": Special(changed_config("InstructBlip", _STD | {"image_token_index": _IMAGE}), _instruct_blip()),
    "InstructBlipVideo": Special(
        changed_config("InstructBlipVideo", _STD | {"video_token_index": _IMAGE}), _instruct_blip(2)
    ),
    "Janus": Special(changed_config("Janus", _JANUS), _square(SIDE**2)),
    "Kosmos2": Special(changed_config("Kosmos2", {"text_config.layers": 2, "latent_query_num": 4}), _kosmos2),
    "Kosmos2_5": Special(
        changed_config(
            "Kosmos2_5", {"text_config.layers": 2, "latent_query_num": 4, "vision_config.max_num_patches": SIDE**2}
        ),
        _kosmos2_5,
        pixels="flattened_patches",
    ),
    "Lfm2Vl": Special(changed_config("Lfm2Vl", _LFM2_VL), _lfm2_vl),
    "Llama4": Special(changed_config("Llama4", _LLAMA4), _square(SIDE**2 // 4)),
    "LlavaNext": Special(_tiled("LlavaNext")),
    "LlavaNextVideo": Special(_tiled("LlavaNextVideo")),
    "LlavaOnevision": Special(_tiled("LlavaOnevision")),
    "MiniCPMOcr": Special(changed_config("MiniCPMOcr", _MINICPM), _minicpm),
    "MiniCPMV4_6": Special(changed_config("MiniCPMV4_6", _MINICPM), _minicpm),
    "MiniCPMV4_7": Special(changed_config("MiniCPMV4_7", _MINICPM), _minicpm_v_4_7),
    "ShieldGemma2": Special(load=_shield_gemma2, note=_SHIELD_GEMMA2),
}
