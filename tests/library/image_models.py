"""Make small image-text models with random weights, and batches with images for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, PreTrainedModel

Batch = dict[str, torch.Tensor]
ROWS, TEXT, HIDDEN, VOCABULARY = 2, 10, 32, 272  # rows of a batch, tokens of text in a row, width, ids
SIDE, PATCH = 32, 8  # pixels of an image's side, and of a patch's
GRID = SIDE // PATCH
PATCHES = GRID**2 + 1  # patches of an image, with one for its class

# The sizes of all weights are multiples of 16, for the reason in test_against_torch.py.
_LAYERS: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
_LAYERS |= {"intermediate_size": 48}
_LANGUAGE = _LAYERS | {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
_TOWER = _LAYERS | {"image_size": SIDE, "patch_size": PATCH}
_QWEN = {"depth": 2, "hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "intermediate_size": 48, "num_heads": 4}
_QWEN |= {"patch_size": PATCH, "window_size": SIDE // 2, "fullatt_block_indexes": [1]}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
_IDS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    # The last layer but one gives the features, one token for each patch.
    "Llava": lambda: AutoConfig.for_model(
        "llava",
        vision_config=CLIPVisionConfig(**_TOWER),
        text_config=LlamaConfig(**_LANGUAGE),
        image_token_index=VOCABULARY - 1,
        image_seq_length=GRID**2,
    ),
    # Images of any size, with windows of attention, and positions in three dimensions
    "Qwen2_5_VL": lambda: AutoConfig.for_model(
        "qwen2_5_vl",
        vision_config=_QWEN,
        text_config=_LANGUAGE | {"rope_parameters": _ROPE},
        **{name: VOCABULARY - number for name, number in _IDS.items()},
    ),
    # Of the tower's layers only a part is named as not to be split; four patches become one token.
    "Idefics3": lambda: AutoConfig.for_model(
        "idefics3",
        vision_config=_TOWER,
        text_config=LlamaConfig(**_LANGUAGE),
        image_token_id=VOCABULARY - 1,
        scale_factor=2,
    ),
}


def image_model(folder: Path, family: str, *, batches: int) -> list[Batch]:
    """Write a small fp32 model of one of `CONFIGS` with random weights; return batches whose images change the loss."""
    config, token = CONFIGS[family](), VOCABULARY - 1
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = opened(folder)
    made = []
    for number in range(batches):
        random = torch.Generator().manual_seed(100 + number)
        images = pixels_of(family, random)
        with torch.no_grad():
            features = model.get_image_features(**images).pooler_output
        count = sum(one.numel() for one in features) // HIDDEN // ROWS
        text = torch.randint(5, token, (ROWS, TEXT), generator=random)
        ids = torch.cat([torch.full((ROWS, count), token), text], 1)
        batch = images | {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(ids == token, -100),
        }
        if family == "Qwen2_5_VL":
            batch["mm_token_type_ids"] = (ids == token).long()
        with torch.no_grad():
            assert model(**batch).loss != model(**batch | {"pixel_values": batch["pixel_values"].flip(-1)}).loss
        made.append(batch)
    return made


def pixels_of(family: str, random: torch.Generator) -> Batch:
    """Return a family's inputs for one random image in each of `ROWS` rows."""
    if family == "Qwen2_5_VL":
        patches = torch.randn(ROWS * GRID**2, 3 * 2 * PATCH**2, generator=random)  # two frames of three channels
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, GRID, GRID]] * ROWS)}
    images = (1,) if family == "Idefics3" else ()  # a list of images in each row
    return {"pixel_values": torch.randn(ROWS, *images, 3, SIDE, SIDE, generator=random)}


def opened(folder: Path) -> PreTrainedModel:
    """Return the fp32 model that transformers finds in a directory."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
