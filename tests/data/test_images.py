"""Tests of conversations with images: the processor's ids, the tokens that are trained on, pixels, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import TEMPLATE, llava, picture, told
from PIL import Image
from sample_chats import chat_tokenizer
from transformers import AutoProcessor, LlavaNextImageProcessor, LlavaNextProcessor

from offload_trainer.config import DataSection
from offload_trainer.data.conversations import hold_images
from offload_trainer.data.images import ImageTokens, load_processor
from offload_trainer.data.prepare import prepare_tokens
from offload_trainer.data.rows import IGNORED, RowReader
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.run.planning import refuse_with_images
from offload_trainer.settings import load_config

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with pictures, and with two processors."""
    place = tmp_path_factory.mktemp("images")
    tokenizer = llava(place / "llava").tokenizer
    tiles = LlavaNextImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    words = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaNextProcessor(tiles, tokenizer, chat_template=TEMPLATE, **words).save_pretrained(place / "llava_next")
    for number, size in enumerate([(40, 32), (16, 32), (32, 24)]):
        picture(place / f"{number}.png", seed=number, size=size)
    return place


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """Return a function that writes records into a file next to the pictures."""

    def written(*records: dict[str, Any]) -> Path:
        path = folder / "talks.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return written


def prepared(path: Path, folder: Path, cache: Path, *, kind: str = "llava", length: int = LENGTH) -> ImageTokens:
    processor = load_processor(folder / kind, trust_remote_code=False)
    made = prepare_tokens(
        DataSection(path=(str(path),)),
        tokenizer=processor,
        vocabulary=300,
        seq_len=length,
        cache=cache,
        say=lambda _: None,
    )
    return ImageTokens(made, processor)


def rows(tokens: ImageTokens, *, length: int = LENGTH) -> Any:
    count = (len(tokens) - 1) // length
    return RowReader(tokens, seq_len=length, rows=range(count), vocabulary=300).rows_at(range(count))


def trained_on(batch: Any, processor: Any) -> list[str]:
    """Return each row's learned text."""
    return [
        processor.tokenizer.decode(targets[targets != IGNORED], skip_special_tokens=False) for targets in batch.targets
    ]


TALKS = [
    [told("user", "0.png", "What?"), told("assistant", "A cat.")],
    [told("user", "1.png", "or", "2.png"), told("assistant", "Both."), told("user", "And?"), told("assistant", "é")],
    [told("user", "a"), told("assistant", "b"), told("user", "2.png"), told("assistant", "c"), told("user", "1.png")],
    [told("user", "No picture"), told("assistant", "None.")],
    [told("user", "0.png"), told("assistant", "b"), told("user", "1.png"), told("assistant", "b")],
]
LEARNED = ["A cat.<end>", "Both.<end>é<end>", "b<end>c<end>", "None.<end>", "b<end>b<end>"]


@pytest.mark.parametrize("kind", ["llava", "llava_next"])
def test_ids_and_pixels_are_the_processors(kind: str, folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    """They are those of `apply_chat_template`, also where the size of a picture decides how many tokens it has."""
    path = write(*({"messages": talk} for talk in TALKS))
    tokens = prepared(path, folder, tmp_path, kind=kind)
    batch, processor = rows(tokens), AutoProcessor.from_pretrained(folder / kind)
    assert trained_on(batch, processor) == LEARNED
    named = json.loads(json.dumps(TALKS).replace('"path": "', f'"path": "{folder}/'))
    for number, talk in enumerate(named):
        found = processor.apply_chat_template(talk, tokenize=True, return_dict=True, return_tensors="pt")
        ids = found["input_ids"][0]
        assert torch.equal(batch.inputs[number, : len(ids)], ids)
        assert (batch.inputs[number, len(ids) :] == processor.tokenizer.pad_token_id).all()
        assert int(batch.images["attention_mask"][number].sum()) == len(ids)
    lone = RowReader(tokens, seq_len=LENGTH, rows=range(5), vocabulary=300).rows_at([1])
    stock = processor.apply_chat_template(named[1], tokenize=True, return_dict=True, return_tensors="pt")
    assert lone.images.keys() == stock.keys() - {"input_ids"}
    assert torch.equal(lone.images["pixel_values"], stock["pixel_values"])
    assert "pixel_values" not in RowReader(tokens, seq_len=LENGTH, rows=range(5), vocabulary=300).rows_at([3]).images


def test_paths_in_other_places_are_the_same_row(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    """ "images" next to the messages, and `image` or `url` in place of `path`."""
    answer = {"role": "assistant", "content": "A cat."}
    bare = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    records = [{"messages": TALKS[0]}, {"messages": [bare, answer], "images": ["0.png"]}]
    for key in ("image", "url"):
        part = {"type": "image", key: str(folder / "0.png")}
        records.append({"messages": [bare | {"content": [part, bare["content"][1]]}, answer]})
    batch = rows(prepared(write(*records), folder, tmp_path))
    for other in range(1, 4):
        assert torch.equal(batch.inputs[0], batch.inputs[other])
        assert torch.equal(batch.targets[0], batch.targets[other])
        assert torch.equal(batch.images["pixel_values"][0], batch.images["pixel_values"][other])


def test_text_behind_the_images_is_cut_and_images_are_not(
    folder: Path, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write({"messages": [told("user", "0.png"), told("assistant", "long " * 40)]})
    batch = rows(prepared(path, folder, tmp_path, length=32), length=32)
    assert batch.targets[0, -1] == IGNORED  # the token after the row is not in it
    assert (batch.targets[0, 18:-1] != IGNORED).all()
    assert batch.images["attention_mask"].all()
    path = write({"messages": TALKS[3]}, {"messages": [told("user", "0.png", "1.png"), told("assistant", "x")]})
    with pytest.raises(UserError, match=r"line 2: the images, and the text up to .* take 36 tokens, and a row has 32"):
        prepared(path, folder, tmp_path, length=32)


@pytest.mark.parametrize(
    ("messages", "more", "wrong"),
    [
        ([told("user", "none.png")], {}, r"line 1: the picture .*none\.png cannot be used: No such file"),
        ([told("user", "broken.png")], {}, r"line 1: the picture .*broken\.png cannot be used: it is no picture that"),
        ([told("user", "https://x/a.png")], {}, r"line 1: https://x/a\.png is no path: download the picture"),
        ([told("user", "a")], {"images": ["0.png"]}, r"line 1: 1 paths in 'images', and 0 parts"),
        ([told("user", "0.png")], {"images": ["0.png"]}, r"line 1: 1 paths in 'images', and 0 parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, r"line 1: 0 paths in 'images', and 1 parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], {"images": [{"bytes": ""}]}, r"line 1: an image holds an"),
        ([{"role": "user", "content": [{"type": "video"}]}], {}, r"line 1: message 1 holds something other than text"),
        ([told("user", "a")], {"videos": ["a.mp4"]}, r"line 1: 'videos' is not empty"),
        ([told("user", "<image>")], {}, r"line 1: its text contains <image>, which the processor replaces with an"),
        ([told("user", "0.png", "is <image>?")], {}, r"line 1: its text contains <image>, which"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(
    messages: list[Any], more: dict[str, Any], wrong: str, folder: Path, write: Callable[..., Path], tmp_path: Path
) -> None:
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:200])
    path = write({"messages": [*messages, told("assistant", "x")], **more})
    with pytest.raises(UserError, match=wrong):
        prepared(path, folder, tmp_path)
    assert not list(tmp_path.glob("*.bin*"))


def test_a_template_without_images_is_refused(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    processor = load_processor(folder / "llava", trust_remote_code=False)
    section = DataSection(path=(str(write({"messages": TALKS[0]})),))
    words = {"vocabulary": 300, "seq_len": LENGTH, "cache": tmp_path, "say": lambda _: None}
    processor.tokenizer.chat_template = TEMPLATE.replace("<image>", "")
    with pytest.raises(UserError, match="line 1: the chat template leaves out the images"):
        prepare_tokens(section, tokenizer=processor, **words)
    processor.tokenizer.chat_template = None
    with pytest.raises(UserError, match="processor has no chat template"):
        prepare_tokens(section, tokenizer=processor, **words)
    (folder / "text.txt").write_text("text")
    with pytest.raises(UserError, match=r"text\.txt: with images in the data, all of it is lines of JSON"):
        prepared(folder / "text.txt", folder, tmp_path)


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="processor"):
        load_processor(tmp_path, trust_remote_code=False)


def test_changed_pictures_are_noticed(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    """A run compares their bytes, a start their size and time; sums differ for other pictures."""
    changing = picture(folder / "changing.png", seed=5)
    before = changing.read_bytes()
    path = write({"messages": [told("user", "changing.png"), told("assistant", "x")]})
    tokens = prepared(path, folder, tmp_path)
    assert rows(prepared(path, folder, tmp_path)).images["pixel_values"].shape[0] == 1
    assert len(list(tmp_path.glob("*.bin"))) == 1
    picture(changing, seed=6)
    with pytest.raises(TrainerError, match=r"changing\.png has changed since it was tokenised: restore it"):
        rows(tokens)
    other = prepared(path, folder, tmp_path)
    assert other.sums[:-1] == tokens.sums[:-1]
    assert other.sums != tokens.sums
    changing.write_bytes(before)
    os.utime(changing, ns=(1, 1))
    assert prepared(path, folder, tmp_path).sums == tokens.sums
    changing.unlink()
    with pytest.raises(TrainerError, match=r"changing\.png cannot be read: it is not there"):
        rows(tokens)


def test_pictures_are_upright_and_in_colours(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    """They are loaded as transformers does: turned as their EXIF data say, without transparency."""
    upright = Image.open(picture(folder / "upright.png", seed=7, size=(32, 32)))
    turned, exif = upright.rotate(90, expand=True), Image.Exif()
    exif[0x0112] = 6  # shows the picture turned clockwise
    turned.save(folder / "turned.png", exif=exif)
    upright.convert("RGBA").save(folder / "alpha.png")
    talks = [[told("user", f"{name}.png"), told("assistant", "x")] for name in ("upright", "turned", "alpha")]
    pixels = rows(prepared(write(*({"messages": talk} for talk in talks)), folder, tmp_path)).images["pixel_values"]
    assert torch.equal(pixels[0], pixels[1])
    assert torch.equal(pixels[0], pixels[2])


def test_damaged_lines_of_rows_are_refused(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(*({"messages": talk} for talk in TALKS[:2]))
    tokens = prepared(path, folder, tmp_path)
    (lines,) = tmp_path.glob("*.rows")
    whole = lines.read_bytes()
    lines.write_bytes(whole.replace(b"What?", b"Who??"))
    with pytest.raises(TrainerError, match="makes other ids of rows"):
        rows(prepared(path, folder, tmp_path))
    lines.write_bytes(whole.replace(b'"paths"', b'"pathz"'))
    with pytest.raises(TrainerError, match="line 1 cannot be read: "):
        rows(prepared(path, folder, tmp_path))
    lines.write_bytes(whole.partition(b"\n")[0] + b"\n")
    with pytest.raises(UserError, match=r"has 1 lines, and .* 2 rows: delete both"):
        prepared(path, folder, tmp_path)
    lines.unlink()
    with pytest.raises(UserError, match="and it is made again"):
        prepared(path, folder, tmp_path)
    assert np.array_equal(tokens.read(0, 5), tokens._tokens.read(0, 5))


def test_images_are_seen_in_the_first_lines() -> None:
    talk, text = {"messages": TALKS[0]}, {"messages": TALKS[3]}
    with_images = {"messages": [{"role": "user", "content": "a"}], "images": ["a.png"]}
    for records, expected in (
        ([talk], True),
        ([text, text, talk], True),
        ([text] * 1000 + [talk], False),
        ([with_images], True),
        ([{"messages": "x"}, {"messages": [3, {"role": "user"}]}], False),
        ([{"text": "x"}, talk], False),
        ([], False),
    ):
        assert hold_images(iter([("", record) for record in records])) == expected


def test_settings_that_do_not_go_with_images_are_refused() -> None:
    for words, wrong in (
        (["--engine", "deepspeed"], "--engine deepspeed: not with images"),
        (["data.packing=on", "data.train_on=all"], "data.packing=on and data.train_on=all: not with images"),
        (["data.mixture=[1,2]", "--data", "a", "--data", "b"], "data.mixture: not"),
        (["--tokenizer", "builtin"], "data.tokenizer: not"),
        (["model.mlp_chunk=8"], "model.mlp_chunk: not"),
        (["model.compile=on"], "model.compile=on: not"),
        (["tiered.fetch_granularity=module"], "tiered.fetch_granularity=module: not"),
        (["model.offload_activations=cpu", "model.activation_checkpointing=on"], "model.offload_activations: not"),
    ):
        with pytest.raises(UserError, match=f"^{wrong.replace('[', '.')}"):
            refuse_with_images(load_config(words))
    refuse_with_images(load_config(["--gpus", "2"]))
