"""Tests of selected image-text architectures against plain torch; scripts/every_image_model.py tests all of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import every_image_model

SELECTED = {
    "AyaVision": "a projector that gates its features",
    "DiffusionGemma": "no labels: the loop computes the loss",
    "Evolla": "proteins, and a class that transformers' auto classes do not build",
    "Gemma3": "a mask that is not causal between the tokens of an image",
    "Glm4v": "a tower without a fixed size of images",
    "HunYuanVL": "a module that reads weights of its own between others, and several in one operation",
    "Idefics": "attention to images in layers between those of the text",
    "Idefics2": "a resampler, whose blocks cannot be checkpointed, after a tower whose blocks are",
    "Idefics3": "a list of images in each row",
    "InternVL": "a tower with a scale for each layer",
    "Llava": "hidden states of a layer before the last",
    "Mistral3": "a tower that packs images of any size into one row",
    "PI0": "actions of a robot: no tokens are predicted",
    "PPFormulaNet": "embeddings of tokens that transformers does not find inside the decoder",
    "Qwen2VL": "positions in three dimensions",
    "Qwen2_5_VL": "windows of attention",
    "Qwen3VL": "features of several layers, added inside the language model",
    "ShieldGemma2": "names of weights by the rules of another class",
    "SmolVLM": "only the attention of a layer named as not to be split",
}


@pytest.mark.parametrize("name", SELECTED)
def test_losses_norms_and_weights_are_those_of_transformers_and_torch(name: str, tmp_path: Path) -> None:
    result = every_image_model.examine(name, tmp_path)
    assert (result.outcome, result.why) == ("right", "")
    assert result.frozen.endswith("weights")


def test_a_wrong_loss_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rate than the reference's is reported as wrong."""
    reference = every_image_model.reference

    def faster(*given: object, **named: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(every_image_model.ADAM, "lr", 1.1e-3)
            return reference(*given, **named)

    monkeypatch.setattr(every_image_model, "reference", faster)
    result = every_image_model.examine("Llava", tmp_path)
    assert result.outcome == "wrong"
    assert "weights" in result.why


def test_text_alone(tmp_path: Path) -> None:
    """Mistral 4 is a causal language model, which transformers lists among the image-text models."""
    result = every_image_model.examine("Mistral4", tmp_path)
    assert (result.outcome, result.frozen) == ("right", "no tower by name")


def test_what_is_not_refused_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that `load` has to refuse is not right if it does not."""
    special = replace(every_image_model.SPECIAL["Mistral4"], refused="reads no images")
    monkeypatch.setitem(every_image_model.SPECIAL, "Mistral4", special)
    result = every_image_model.examine("Mistral4", tmp_path)
    assert (result.outcome, result.why) == ("wrong", "load does not say: reads no images")


def test_the_table_names_all() -> None:
    """Architectures that transformers cannot build are listed with the reason, separately, and notes are shown."""
    results = [
        every_image_model.Result("FastVlm", "transformers", "timm is missing"),
        every_image_model.Result("Evolla", "right", form="pixel_values"),
    ]
    page = every_image_model.table(results)
    assert "1 of 1 right, 0 refused, 0 wrong, 0 traceback; 1 were not tried" in page
    assert "proteins, no images |" in page
    assert "| FastVlm | timm is missing |" in page
