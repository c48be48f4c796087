"""The transformers class that a configuration is built with: a causal language model or an image-text model.

Some configurations stand for both (Qwen3.5, Llama 4): with and without the parts that read images. Their
`architectures` decide, which `settle_class` sets and exports keep.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from offload_trainer.errors import UserError

Patches = int | Literal["auto"]  # patches of a row's images; 0: rows hold text alone


def class_names(config: Any) -> tuple[str | None, str | None]:
    """Return the names of transformers' image-text class and causal language model for a configuration.

    They are None if there is no such class, and for a model whose repository has Python code.
    """
    if not type(config).__module__.startswith("transformers."):
        return None, None
    image, text = (
        mapping.get(type(config), None)
        for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    return _name(image), _name(text)


def _name(found: Any) -> str | None:
    first = found[0] if isinstance(found, list | tuple) else found
    return None if first is None else str(first.__name__)


def auto_class(config: Any) -> Any:
    """Return AutoModelForImageTextToText or AutoModelForCausalLM.

    A configuration of both is an image-text model if its `architectures` name that class.
    """
    image, text = class_names(config)
    named = getattr(config, "architectures", None) or ()
    return AutoModelForImageTextToText if image and (not text or image in named) else AutoModelForCausalLM


def settle_class(config: Any, *, image_patches: Patches) -> bool:
    """Set the class that `auto_class` returns for `config`; return whether rows with images are expected.

    With `image_patches` 0 a configuration of both kinds is a causal language model.
    """
    image, text = class_names(config)
    if image is None or not _reads_images(image):
        return False
    named = getattr(config, "architectures", None) or ()
    text_alone = not image_patches or (text in named and image not in named)
    if text is not None and text != image:
        config.architectures = [text if text_alone else image]
        return not text_alone
    return bool(image_patches)


def _reads_images(name: str) -> bool:
    """Return whether a class takes images; some that transformers lists as image-text models take text alone."""
    found = getattr(transformers, name)
    by_name = "pixel_values" in inspect.signature(found.forward).parameters
    return by_name or not {"image", "video"}.isdisjoint(found.input_modalities)


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
