"""Make small image-text models with random weights, and batches and rows with images for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sample_chats import chat_tokenizer
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from tiny_image_models import PATCHES, Batch, image_batches, kinds, opened, tiny_image_config, tiny_image_model

__all__ = ["PATCHES", "Batch", "image_model", "image_rows", "llava", "opened", "picture", "stacked", "told"]

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}{% if part.type == 'image' %}"
    "<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIDE, PATCH = 32, 8  # pixels of an image's side for `llava`, and of a patch's


def llava(folder: Path) -> LlavaProcessor:
    """Write a small fp32 LLaVA with its processor, which makes 16 tokens of each image; return the processor."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            vocab_size=272,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # larger weights let pictures change the loss
    model.save_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_center_crop=True
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return processor


def picture(path: Path, *, seed: int, size: tuple[int, int] = (40, 32)) -> Path:
    """Write a picture of random pixels."""
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)
    return path


def told(role: str, *parts: str) -> dict[str, Any]:
    """Return a message; a part that ends in .png is the path of a picture, any other one is text."""
    return {
        "role": role,
        "content": [
            {"type": "image", "path": part} if part.endswith(".png") else {"type": "text", "text": part}
            for part in parts
        ],
    }


def image_model(folder: Path, name: str, *, batches: int, seed: int = 1, **changes: Any) -> list[Batch]:
    """Write a small fp32 model, with random weights large enough that images change the loss; return batches for it.

    `changes` are made in the configuration. The sizes of its weights are multiples of 16, for the reason in
    test_against_torch.py.
    """
    config = tiny_image_config(kinds()[name])
    for key, value in changes.items():
        setattr(config, key, value)
    tiny_image_model(config, seed=seed).save_pretrained(folder)
    return image_batches(opened(folder), batches)


def image_rows(batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
    """Return the rows of batches whose tensors have one entry a row, as a data set has them."""
    return [
        {key: values[number] for key, values in batch.items()}
        for batch in batches
        for number in range(len(batch["input_ids"]))
    ]


def stacked(rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
    """Collate rows into a batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
