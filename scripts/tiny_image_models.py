"""Tiny configurations of every image-text model in transformers, and batches with images for them.

`tiny_models.py` shrinks the language model and the tower; this module makes images small, and moves the tokens that
stand for images into the small vocabulary. Image inputs differ between architectures. `image_batches` tries the
forms that several architectures share until the model's own forward accepts one and its loss depends on the pixels.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCABULARY, tiny_config
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from offload_trainer.model.probes.tiny_model import HIDDEN

Batch = dict[str, torch.Tensor]
ROWS, TEXT, SIDE = 2, 10, 4  # rows of a batch, tokens of text in a row, patches of an image's side
PATCHES = SIDE**2 + 1  # patches of an image, with one for its class
_SPECIAL = range(VOCABULARY - 16, VOCABULARY)  # tokens that no text has
_TEXT = range(5, _SPECIAL.start)
_MARKS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
_TOKEN = re.compile(r"(image|img|video|audio|vision|media|boi|eoi|boa|eoa).*(token_(id|index)|_id|_index)$")
_SMALL = {
    "image_seq_length": SIDE**2,
    "mm_tokens_per_image": SIDE**2 // 4,
    "num_image_tokens": SIDE**2,
    "num_position_embeddings": SIDE**2,
    "num_query_tokens": 4,
    "projection_dim": HIDDEN,
    "resampler_n_latents": 4,
}
_DEPTH = re.compile(r"^(depth|num_layers_(vision|resampler)|resampler_depth|qformer_num_hidden_layers)$")


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an fp32 model with initial weights."""
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def opened(folder: Path) -> PreTrainedModel:
    """Return the fp32 model that transformers finds in a directory."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def loss_of_model(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the loss that the model itself computes from a batch."""
    return model(**batch).loss  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Special:
    """Exceptions of one architecture from the rules of this module; None keeps the rule.

    `config()` returns the tiny configuration, and `inputs(model, random)` a whole batch of `ROWS` rows with `labels`.
    `pixels` names the input that the loss has to depend on. `build(config)`, `load(folder)` and `loss(model, batch)`
    are for an architecture that AutoModelForImageTextToText cannot build or read, or that computes no loss.
    `refused` is part of the error with which `offload_trainer.load` has to refuse the architecture; the module is then
    passed to `offload_trainer.offload`. `tower` is a pattern for the names of weights that are frozen in the end.
    `note` is for the table.
    """

    config: Callable[[], PreTrainedConfig] | None = None
    inputs: Callable[[PreTrainedModel, torch.Generator], Batch] | None = None
    pixels: str = "pixel_values"
    build: Callable[[PreTrainedConfig], PreTrainedModel] = built
    load: Callable[[Path], PreTrainedModel] = opened
    loss: Callable[[PreTrainedModel, Batch], torch.Tensor] = loss_of_model
    refused: str = ""
    tower: str = r"vision|visual|image_|vit|encoder"
    note: str = ""


def kinds() -> dict[str, type[PreTrainedConfig]]:
    """Return the architectures that `AutoModelForImageTextToText` builds, by the name of their configuration."""
    return {kind.__name__.removesuffix("Config"): kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}


def tiny_image_config(kind: type[PreTrainedConfig], special: Special = Special()) -> PreTrainedConfig:
    """Return a `kind` with its defaults shrunk, for images of `SIDE` x `SIDE` patches."""
    if special.config is not None:
        return special.config()
    return with_small_images(tiny_config(kind))


def with_small_images(config: PreTrainedConfig) -> PreTrainedConfig:
    """Make the images of a configuration small, and move its special tokens, in place; return it."""
    free = iter(_SPECIAL)
    for one in _all(config):
        _make_small(one)
        for key, value in list(vars(one).items()):
            if _TOKEN.search(key) and isinstance(value, int) and value >= _TEXT.start:
                setattr(one, key, next(free, _SPECIAL[-1]))
    return config


def changed_config(name: str, changes: Mapping[str, Any]) -> Callable[[], PreTrainedConfig]:
    """Return a function that makes the tiny configuration `name` with `changes`, whose keys have dots."""

    def make() -> PreTrainedConfig:
        config = tiny_image_config(kinds()[name])
        for path, value in changes.items():
            *parts, key = path.split(".")
            owner: Any = config
            for part in parts:
                owner = getattr(owner, part)
            if isinstance(owner, dict):
                owner[key] = value
            else:
                setattr(owner, key, value)
        return config

    return make


def under(part: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `changes` with keys below `part`."""
    return {f"{part}.{key}": value for key, value in changes.items()}


def tiny_image_model(config: PreTrainedConfig, special: Special = Special(), *, seed: int) -> PreTrainedModel:
    """Return an fp32 model with random weights. Projectors and gates that begin with zeros would hide the images."""
    torch.manual_seed(seed)
    model = special.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if (parameter.dim() > 1 or parameter.numel() == 1) and not parameter.any():
                parameter.normal_(0, 0.1)
    return model


def _all(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _all(value)


def _make_small(one: Any) -> None:
    """Make the images of a configuration small, in place; each value keeps its type."""
    patch, size = getattr(one, "patch_size", None), getattr(one, "image_size", None)
    side = patch[0] if isinstance(patch, list | tuple) else patch
    if isinstance(side, int):
        if isinstance(size, int):
            one.image_size = SIDE * side
        elif isinstance(size, list | tuple) and size:
            one.image_size = type(size)([SIDE * side] * len(size))
        if isinstance(getattr(one, "window_size", None), int):
            one.window_size = SIDE * side
    for key, value in list(vars(one).items()):
        if isinstance(value, int) and not isinstance(value, bool) and _DEPTH.search(key):
            setattr(one, key, min(value, 2))
    for key, value in _SMALL.items():
        if isinstance(vars(one).get(key), int):
            setattr(one, key, value)
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes", "intermediate_layers_indices"):
        if isinstance(held := getattr(one, key, None), list | tuple):
            setattr(one, key, type(held)([1 if key.startswith("full") else 0]))
    if isinstance(getattr(one, "vision_feature_layer", None), list | tuple):
        one.vision_feature_layer = type(one.vision_feature_layer)([-1])
    if "cross_attention_layers" in vars(one):  # Mllama
        one.cross_attention_layers = [1]
    if "vision_output_dim" in vars(one):
        one.vision_output_dim = 2 * one.hidden_size  # the last hidden states and those of one intermediate layer
    rope = getattr(one, "rope_parameters", None)
    sections = "mrope_section" in (getattr(one, "ignore_keys_at_rope_validation", None) or ())
    if isinstance(rope, dict) and (sections or "mrope_section" in rope):
        head = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
        half = int(head * rope.get("partial_rotary_factor", getattr(one, "partial_rotary_factor", None) or 1)) // 2
        section = {"mrope_section": [half - 2, 1, 1]}
        by_layer = {kind: part | section for kind, part in rope.items() if isinstance(part, dict)}
        one.rope_parameters = by_layer or rope | section
    if isinstance(getattr(one, "image_grid_pinpoints", None), list) and isinstance(side := _side(one), int):
        one.image_grid_pinpoints = [[side, side]]


def _vision(config: PreTrainedConfig) -> Any:
    """Return the configuration that has the size of a patch."""
    return next((one for one in _all(config) if getattr(one, "patch_size", None)), config)


def _side(config: PreTrainedConfig) -> int | None:
    """Return the pixels of an image's side."""
    size = getattr(_vision(config), "image_size", None)
    found = size[0] if isinstance(size, list | tuple) and size else size
    return found if isinstance(found, int) else None


# -- batches ----------------------------------------------------------------------------------------------------------


class NoInputs(Exception):
    """No form of image inputs that is tried here runs, or the loss does not depend on the pixels."""


def image_batches(model: PreTrainedModel, count: int, special: Special = Special()) -> list[Batch]:
    """Return `count` batches of `ROWS` rows with one image each. Raises NoInputs."""
    if special.inputs is not None:
        made = [special.inputs(model, torch.Generator().manual_seed(100 + number)) for number in range(count)]
        if not all(_reads_images(model, batch, special.pixels, special.loss) for batch in made):
            raise NoInputs("the loss does not depend on the pixels")
        return made
    errors = []
    for form in _FORMS:
        try:
            made = [_batch(model, form, seed=number) for number in range(count)]
            if all(_reads_images(model, batch, _pixels_of(batch), special.loss) for batch in made):
                return made
            errors.append(f"{form.__name__}: the loss does not depend on the pixels")
        except Exception as error:  # any error of transformers' code, for a form that the architecture does not take
            errors.append(f"{form.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
    raise NoInputs("; ".join(errors))


def _pixels_of(batch: Batch) -> str:
    return next(key for key in ("pixel_values", "flattened_patches") if key in batch)


def _reads_images(model: PreTrainedModel, batch: Batch, key: str, loss: Callable[..., torch.Tensor]) -> bool:
    """Return whether the loss is a number that changes with the pixels."""
    with torch.no_grad():
        losses = [float(loss(model, one)) for one in (batch, batch | {key: batch[key].flip(-1)})]
    return all(map(math.isfinite, losses)) and losses[0] != losses[1]


def _batch(model: PreTrainedModel, form: Callable[..., Batch], *, seed: int) -> Batch:
    random = torch.Generator().manual_seed(100 + seed)
    images = form(model.config, random)
    if missing := [name for name in images if name not in _arguments(model)]:
        raise ValueError(f"takes no {missing[0]}")
    return with_text(model, images, random)


def with_text(model: PreTrainedModel, images: Batch, random: torch.Generator, *, count: int | None = None) -> Batch:
    """Return `images` with rows of text that begin with `count` placeholders, and `labels`.

    None: as many placeholders as the model makes of an image.
    """
    names, batch = _arguments(model), dict(images)
    text = torch.randint(_TEXT.start, _TEXT.stop, (ROWS, TEXT), generator=random)
    labels = text
    if "input_ids" in names:
        ids = _with_placeholders(model, images, text, count)
        if ids.shape != text.shape:
            labels = torch.cat([torch.full((ROWS, ids.shape[1] - TEXT), -100), text], 1)
        batch |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        token = _image_token(model.config)
        marks = ids.eq(-1 if token is None else token).long()
        batch |= {name: marks for name in _MARKS if name in names}
    return batch | {"labels": labels}


def _with_placeholders(model: PreTrainedModel, images: Batch, text: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return rows that begin with `count` placeholder tokens, or with as many as the model makes of an image."""
    token = _image_token(model.config)
    owner = model if hasattr(model, "get_image_features") else model.base_model
    if count is None and hasattr(owner, "get_image_features") and "aspect_ratio_ids" not in images:
        with torch.no_grad():
            found = owner.get_image_features(**images)
        count = _features(getattr(found, "pooler_output", found), _width(model)) // ROWS
    if token is None:
        return text
    return torch.cat([torch.full((ROWS, 1 if count is None else count), token), text], 1)


def _arguments(model: PreTrainedModel) -> Collection[str]:
    return inspect.signature(type(model).forward).parameters


def _width(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[-1])


def _features(found: Any, width: int) -> int:
    """Return how many embeddings a model has made of all images."""
    if isinstance(found, torch.Tensor):
        return found.numel() // width
    return sum(_features(one, width) for one in found)


def _image_token(config: PreTrainedConfig) -> int | None:
    keys = ("image_token_id", "image_token_index", "img_token_id", "media_token_id", "image_pad_token_id")
    stated = (getattr(one, key, None) for one in _all(config) for key in keys)
    return next((token for token in stated if isinstance(token, int)), None)


# -- forms of image inputs --------------------------------------------------------------------------------------------


def _pixels(config: PreTrainedConfig, random: torch.Generator, *between: int) -> torch.Tensor:
    side, vision = _side(config), _vision(config)
    if side is None:
        patch = vision.patch_size
        side = SIDE * (patch[0] if isinstance(patch, list | tuple) else patch)
    channels = getattr(vision, "num_channels", None) or 3
    return torch.randn(ROWS, *between, channels, side, side, generator=random)


def _plain(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    return {"pixel_values": _pixels(config, random)}


def _sized(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    pixels = _pixels(config, random)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([list(pixels.shape[-2:])] * ROWS)}


def _listed(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    return {"pixel_values": _pixels(config, random, 1)}


def _tiles(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    pixels = _pixels(config, random, 2)  # the whole image, and the only tile that image_grid_pinpoints allows
    return {"pixel_values": pixels, "image_sizes": torch.tensor([list(pixels.shape[-2:])] * ROWS)}


def _grid(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    vision = _vision(config)
    patch = vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size
    channels = next((n for key in ("in_channels", "in_chans", "num_channels") if (n := getattr(vision, key, None))), 3)
    frames = getattr(vision, "temporal_patch_size", None) or 1
    frames = frames[0] if isinstance(frames, list | tuple) else frames
    pixels = torch.randn(ROWS * SIDE**2, channels * frames * patch**2, generator=random)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * ROWS)}


def _grid_of_images(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    vision = _vision(config)
    patch = vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size
    pixels = torch.randn(ROWS * SIDE**2, 3, patch, patch, generator=random)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * ROWS)}


def _aspect_ratios(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    tiles = getattr(_vision(config), "max_num_tiles", 4)
    return {
        "pixel_values": _pixels(config, random, 1, tiles),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.tensor([1] + [0] * (tiles - 1)).repeat(ROWS, 1, 1),
    }


def _flat(config: PreTrainedConfig, random: torch.Generator) -> Batch:
    """Return Pix2Struct's patches, which begin with their row and column."""
    vision = _vision(config)
    width = 3 * vision.patch_size**2
    places = torch.stack(torch.meshgrid(torch.arange(1, SIDE + 1), torch.arange(1, SIDE + 1), indexing="ij"), -1)
    places = places.reshape(1, SIDE**2, 2).expand(ROWS, -1, -1).float()
    return {"flattened_patches": torch.cat([places, torch.randn(ROWS, SIDE**2, width, generator=random)], -1)}


_FORMS = (_plain, _sized, _listed, _tiles, _grid, _grid_of_images, _aspect_ratios, _flat)
