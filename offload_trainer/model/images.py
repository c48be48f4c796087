"""Image-text models of transformers: the class that a configuration is built with, and the parts for images.

Some configurations stand for a causal language model and for an image-text model (Qwen3.5, Llama 4): with and without
the parts that read images. Their `architectures` decide, which `settle_class` sets and exports keep.
"""

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from offload_trainer.common.errors import UserError
from offload_trainer.plan.shape import ImageParts, Order, Weight

Patches = int | Literal["auto"]  # patches of a row's images; 0: rows hold text alone
_MERGES = ("spatial_merge_size", "scale_factor", "downsample_factor")  # patches per side that become one token
_SHRINKS = ("downsample_ratio", "pixel_shuffle_ratio")  # tokens per patch of a side
_TOKENS = ("image_seq_length", "mm_tokens_per_image", "num_image_tokens", "num_query_tokens")  # tokens of an image


def class_names(config: Any) -> tuple[str | None, str | None]:
    """Return the names of transformers' image-text class and causal language model for a configuration, or None."""
    if not type(config).__module__.startswith("transformers."):  # code in the model's repository
        return None, None
    mappings = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    found = (mapping.get(type(config), None) for mapping in mappings)
    first = (kinds[0] if isinstance(kinds, list | tuple) else kinds for kinds in found)
    image, text = (None if kind is None else str(kind.__name__) for kind in first)
    return image, text


def auto_class(config: Any) -> Any:
    """Return AutoModelForImageTextToText or AutoModelForCausalLM; of both, the one that its `architectures` name."""
    image, text = class_names(config)
    named = getattr(config, "architectures", None) or ()
    return AutoModelForImageTextToText if image and (not text or image in named) else AutoModelForCausalLM


def settle_class(config: Any, *, image_patches: Patches) -> bool:
    """Set the class that `auto_class` returns for `config`; return whether rows with images are expected.

    With `image_patches` 0 a configuration of both kinds is a causal language model.
    """
    image, text = class_names(config)
    if image is None:
        return False
    # Some that transformers lists as image-text models take text alone.
    found = getattr(transformers, image)
    by_name = "pixel_values" in inspect.signature(found.forward).parameters
    if not by_name and {"image", "video"}.isdisjoint(found.input_modalities):
        return False
    named = getattr(config, "architectures", None) or ()
    text_alone = not image_patches or (text in named and image not in named)
    if text is not None and text != image:
        config.architectures = [text if text_alone else image]
        return not text_alone
    return bool(image_patches)


def refuse_other_losses(config: Any) -> None:
    """Raise UserError for an image-text model that is not trained to predict the next token of each row."""
    image, _ = class_names(config)
    if image is None or auto_class(config) is AutoModelForCausalLM:
        return
    if config.is_encoder_decoder:
        why = "it is an encoder and a decoder"
    elif "labels" not in inspect.signature(getattr(transformers, image).forward).parameters:
        why = "it takes no labels"
    else:
        return
    raise UserError(
        f"{image}: {why}, and this command trains models that predict the next token of each row. offload_trainer.load "
        "trains it with a loop of your own (docs/library.md)"
    )


def image_parts(
    model: PreTrainedModel, weights: Sequence[Weight], order: Order | None, *, patches: Patches
) -> ImageParts:
    """Return the parts of `model` (on the meta device) that only images pass through.

    `order`: the order in which text uses the units; the others are for images. Without it they are those outside the
    language model that transformers' `get_decoder` returns. `patches`: the patches of a row's images. Raises UserError
    if "auto" finds no size of an image in the configuration.
    """
    units = _units(model, weights, order)
    blocks = {one.unit: model.get_submodule(one.unit) for one in weights if one.block and one.unit in units}
    if patches == "auto":
        least, per_token, why = _patches_of(model.config, type(model).__name__)
    else:
        least, per_token, why = patches, 0.0, "as image_patches says"
    sizes = Counter(size for w in weights if w.unit in blocks and len(w.shape) == 2 for size in w.shape)
    widest = max((max(weight.shape) for weight in weights if weight.unit in units), default=0)
    return ImageParts(
        units=units,
        least=least,
        per_token=per_token,
        why=why,
        hidden=sizes.most_common(1)[0][0] if sizes else widest,  # input or output of most matrices
        eager_heads=max(map(_eager_heads, blocks.values()), default=0),
        masked=not any("cu_seqlens" in inspect.signature(type(block).forward).parameters for block in blocks.values()),
        layers=tuple(name for name, block in blocks.items() if isinstance(block, GradientCheckpointingLayer)),
    )


def _units(model: PreTrainedModel, weights: Sequence[Weight], order: Order | None) -> tuple[str, ...]:
    """Return the names of the units for images, in the order of registration."""
    units = tuple(dict.fromkeys(weight.unit for weight in weights))
    if order is not None:
        text = {*order.forward, *order.backward}
        return tuple(unit for unit in units if unit not in text)
    parts = model, model.get_decoder(), model.get_encoder(modality="image")
    every, decoder, encoder = (set(part.parameters()) for part in parts)
    ends = [model.get_output_embeddings()]
    with suppress(NotImplementedError):  # transformers does not find those inside some decoders (PP-FormulaNet)
        ends.append(model.get_input_embeddings())
    text_alone = {parameter for part in ends if part is not None for parameter in part.parameters()}
    inside = every - decoder - text_alone
    if model.config.is_encoder_decoder or not inside:
        inside = encoder - text_alone if encoder < every else set()
    found = {name for name, parameter in model.named_parameters() if parameter in inside}
    return tuple(dict.fromkeys(weight.unit for weight in weights if weight.name in found))


def _eager_heads(block: nn.Module) -> int:
    """Return the heads of a block whose attention is not known to be fused, or 0."""
    found = [0]
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention):  # pools a row of patches with a single query
            continue
        config = getattr(module, "config", None)
        known = hasattr(module, "is_causal")
        if known and getattr(config, "_attn_implementation", None) == "sdpa":
            return 0
        stated = (getattr(one, key, None) for one in (module, config) for key in ("num_heads", "num_attention_heads"))
        heads = next((count for count in stated if isinstance(count, int)), 1)
        if known or hasattr(module, "num_heads"):
            found.append(heads)
    return max(found)


def _patches_of(config: Any, name: str) -> tuple[int, float, str]:
    """Return the patches of one image, the most patches that a token stands for, and a description."""
    configs = list(_vision_configs(config))
    tile = max((_tile(one) for one in configs), default=0)
    sides = [getattr(one, key, None) for one in configs for key in _MERGES]
    sides += [1 / ratio for one in configs for key in _SHRINKS if (ratio := getattr(one, key, None))]
    merged = max((side**2 for side in sides if isinstance(side, int | float) and side > 1), default=1.0)
    tokens = next((n for one in configs for key in _TOKENS if isinstance(n := getattr(one, key, None), int) and n), 0)
    if not tile and merged == 1:
        raise UserError(
            f"{name}: its configuration says neither the size of an image nor how many patches become one token, so "
            "the memory of its images cannot be planned: give image_patches=N, the patches of a row's images"
        )
    each = max(merged, tile / tokens if tokens else 1.0)
    least = tile * max(1, *(getattr(one, "max_num_tiles", None) or 1 for one in configs), 1)
    at_least = f"{least} of one image or " if least else ""
    return least, each, f"{at_least}{each:.3g} for each token of the row, whichever is more"


def _vision_configs(config: Any) -> Iterator[Any]:
    """Yield the configuration and those inside it, without the language model's."""
    text = config.get_text_config()
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig) and value is not text:
            yield from _vision_configs(value)


def _tile(config: Any) -> int:
    """Return the patches of an image of the configuration's size, with one for its class; 0 if it has no size."""
    sizes = [getattr(config, key, None) for key in ("image_size", "patch_size")]
    pairs = [size if isinstance(size, list | tuple) else (size, size) for size in sizes]
    if not all(len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair) for pair in pairs):
        return 0
    return math.prod(-(-whole // patch) for whole, patch in zip(*pairs, strict=True)) + 1


def with_images(order: Order, images: ImageParts, weights: Sequence[Weight]) -> Order:
    """Return the order of a pass with images: their units come before the first block that text passes through.

    The backward reaches them last, down to the first one that is trained.
    """
    blocks = {weight.unit for weight in weights if weight.block}
    first = next((place for place, unit in enumerate(order.forward) if unit in blocks), 0)
    trained = images.units[len(images.frozen(weights)) :]
    return Order((*order.forward[:first], *images.units, *order.forward[first:]), (*order.backward, *trained[::-1]))


def text_alone_requires_grads(model: PreTrainedModel) -> None:
    """Make activation checkpointing set requires_grad for the embeddings of tokens, but not for those of images.

    transformers sets both, so that a frozen tower would be recomputed, and would get gradients that nothing uses. The
    non-reentrant checkpointing needs neither.
    """
    decoder = model.get_decoder()
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        model.enable_input_require_grads = decoder.enable_input_require_grads
        model.disable_input_require_grads = decoder.disable_input_require_grads
