"""Tests of whole runs on conversations with images: the bits of plain torch, kill and resume, export, the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import HELPERS, KILL, Run, ask, call, whole_and_resumed
from forked_ranks import call_ranks
from image_models import llava, opened, picture, told
from torch.nn import functional
from transformers import AutoProcessor, LlavaProcessor

MICRO, ACCUMULATE, STEPS, LENGTH = 2, 2, 4, 64
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
WORDS = [
    *("--dtype", "fp32", "--seq-len", LENGTH, "--micro-batch", MICRO, "--accumulate", ACCUMULATE, "--steps", STEPS),
    *("--lr", ADAM["lr"], "optim.weight_decay=0", "optim.max_grad_norm=0", "optim.schedule=constant"),
    *("optim.warmup_steps=0", "data.shuffle=false", "data.validation=0", "placement.threads=1", "--save-every", 2),
]
# Conversations of four steps with two micro-batches each. No row of the second step has an image, so the tower gets no
# gradient. In the third step only the first micro-batch has images, in the fourth only the second.
TALKS = [
    *([told("user", f"{n}.png", "What?"), told("assistant", f"A {n}.")] for n in range(3)),
    [told("user", "3.png", "a", "0.png", "b"), told("assistant", "Two of them.")],
    *([told("user", f"Say {n}"), told("assistant", f"{n}, {n}")] for n in range(4)),
    [told("user", "1.png"), told("assistant", "x"), told("user", "2.png"), told("assistant", "yz")],
    [told("user", "0 ", "0.png"), told("assistant", "0!")],
    *([told("user", f"Again {n}"), told("assistant", f"{n}; {n}")] for n in range(4)),
    *([told("user", f"{n} ", f"{n}.png"), told("assistant", f"{n}!" * (n + 1))] for n in (1, 2)),
]
TOWER = "vision_tower"
AWAY = ["--params", "nvme", "--optimizer", "nvme", "tiered.page_size=8192"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, LlavaProcessor]:
    """Return a model's directory, a data file with pictures next to it, and the model's processor."""
    folder = tmp_path_factory.mktemp("images")
    processor = llava(folder / "model")
    for number in range(4):
        picture(folder / "data" / f"{number}.png", seed=number, size=(32 + 8 * number, 40))
    (folder / "data" / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return folder / "model", folder / "data" / "talks.jsonl", processor


@pytest.fixture(scope="module")
def run(
    places: tuple[Path, Path, LlavaProcessor], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """Return a function that returns the words of a run on the data, or on other data."""
    model, ours, _ = places
    cache = tmp_path_factory.mktemp("cache")
    return lambda *words, data=ours: [*WORDS, "--model", model, "--data", data, f"data.cache={cache}", *words]


@pytest.fixture(scope="module")
def expected(places: tuple[Path, Path, LlavaProcessor]) -> Callable[..., tuple[list[float], dict[str, torch.Tensor]]]:
    """Return a function that returns `by_torch` for a "trained" or a "frozen" tower."""
    return cache(lambda tower, count=ACCUMULATE: by_torch(*places, frozen=tower == "frozen", accumulate=count))


def by_torch(
    folder: Path, data: Path, processor: LlavaProcessor, *, frozen: bool, accumulate: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a loop in plain torch over the processor's own batches."""
    model = opened(folder).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and TOWER in name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, fused=True, **ADAM)
    losses = []
    whole = MICRO * accumulate
    for first in range(0, len(TALKS) - whole + 1, whole):
        rows = TALKS[first : first + whole]
        batches = [batch_of(rows[n : n + MICRO], processor, data.parent) for n in range(0, len(rows), MICRO)]
        counts = [int((targets != -100).sum()) for _, targets in batches]
        found = []
        for (batch, targets), count in zip(batches, counts, strict=True):
            logits = model(**batch).logits.float().flatten(0, 1)
            loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum") / count
            weight = count * len(counts) / sum(counts)
            (loss * (weight / len(counts))).backward()
            found.append(loss.detach() * weight)
        labels = torch.nn.functional.pad(batches[0][1][:, :-1], (1, 0), value=-100)
        own = model(**batches[0][0], labels=labels, num_items_in_batch=counts[0]).loss
        assert own.item() == pytest.approx(found[0].item() * sum(counts) / len(counts) / counts[0], rel=1e-5)
        losses.append(float(torch.stack(found).mean()))
        adam.step()
        adam.zero_grad()
    return losses, dict(model.named_parameters())


def batch_of(rows: list[Any], processor: LlavaProcessor, folder: Path) -> tuple[Any, torch.Tensor]:
    """Return a batch of transformers' `apply_chat_template`, and its targets: answers and the tokens that end them."""
    rows = [
        [{"role": m["role"], "content": [_opened(part, folder) for part in m["content"]]} for m in row] for row in rows
    ]
    words = {"padding": "max_length", "max_length": LENGTH, "padding_side": "right"}
    texts = processor.apply_chat_template(rows, tokenize=False)
    images = [[part["path"] for m in row for part in m["content"] if part["type"] == "image"] for row in rows]
    batch = processor(text=texts, images=images if any(images) else None, return_tensors="pt", text_kwargs=words)
    begins, ends = processor.tokenizer.convert_tokens_to_ids(["<assistant>", "<end>"])
    targets = torch.full_like(batch["input_ids"], -100)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        inside = False
        for place, token in enumerate(ids):
            if inside:
                targets[row, place - 1] = token
            inside = (inside or token == begins) and token != ends
    return batch, targets


def _opened(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    return part | {"path": str(folder / part["path"])} if "path" in part else part


@pytest.mark.parametrize("home", ["plain", "drive"])
def test_a_run_has_the_bits_of_plain_torch(
    home: str, run: Callable[..., list[Any]], expected: Any, drive: Path, tmp_path: Path
) -> None:
    """Losses and exported weights are those of the loop, and the export loads with its processor."""
    words = ["--nvme", drive, *AWAY] if home == "drive" else ["--engine", "plain"]
    found = call(*run(*words), output=tmp_path / "run")
    losses, weights = expected("trained")
    assert found.losses == losses
    assert "conversations: 16 conversations, " in found.text
    assert_weights(found, weights, tmp_path / "out")
    assert type(AutoProcessor.from_pretrained(tmp_path / "out")) is LlavaProcessor


def assert_weights(run: Run, weights: dict[str, torch.Tensor], out: Path) -> None:
    """Export a run to `out`, and assert that its weights are these."""
    done = ask("export", run.output, out, "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    for name, parameter in opened(out).named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize("home", ["RAM", "drive"])
@pytest.mark.parametrize(("tower", "count"), [("trained", 2), ("frozen", 2), ("trained", 3)])
def test_several_ranks_have_the_bits_of_plain_torch(
    tower: str, count: int, home: str, run: Callable[..., list[Any]], expected: Any, drive: Path, tmp_path: Path
) -> None:
    """Each rank has one micro-batch, so there are steps in which only some ranks have images."""
    words = ["--nvme", drive, *AWAY] if home == "drive" else []
    words += [f"model.freeze=['{TOWER}']"] if tower == "frozen" else []
    words += ["--accumulate", 1, "--steps", len(TALKS) // (MICRO * count)]
    ended = call_ranks(*run(*words), output=tmp_path / "run", count=count)
    assert [one.code for one in ended] == [0] * count, ended
    losses, weights = expected(tower, count)
    assert ended[0].losses == losses
    assert_weights(ended[0], weights, tmp_path / "out")


def test_two_killed_ranks_resume_with_the_bits_of_one(
    places: Any, run: Callable[..., list[Any]], drive: Path, tmp_path: Path
) -> None:
    """One of two ranks is killed in the middle of a run, which the command resumes. Another file is for validation."""
    _, data, _ = places
    held_out = data.with_name("held_out.jsonl")
    held_out.write_text("".join(data.read_text().splitlines(keepends=True)[6:11]))
    words = run("--nvme", drive, *AWAY, "data.shuffle=true", "--validation-data", held_out, "train.eval_every=2")
    alone = call(*words, output=tmp_path / "alone")
    words += ["--accumulate", 1]
    ended = call_ranks(*words, output=tmp_path / "two", count=2, script=[HELPERS / "run_and_kill.py", "1:flip", 4])
    assert [one.code for one in ended] == [69, -KILL], ended
    again = call(*words, "--gpus", 2, output=tmp_path / "two")
    assert "resumed from" in again.text
    for key in ("step", "loss", "grad_norm", "tokens"):
        assert [step[key] for step in again.steps] == [step[key] for step in alone.steps], key
    last = f"checkpoints/step-{STEPS:08}"
    for path in (alone.output / last).glob("*.safetensors"):
        assert (again.output / last / path.name).read_bytes() == path.read_bytes(), path.name
    losses = [
        [json.loads(line)["validation_loss"] for line in (one.output / "evaluations.jsonl").read_text().splitlines()]
        for one in (alone, again)
    ]
    assert len(losses[0]) == 2
    assert losses[1] == losses[0]


def test_a_killed_run_resumes_bit_for_bit_with_its_rows(
    run: Callable[..., list[Any]], drive: Path, tmp_path: Path
) -> None:
    """The rows are shuffled, and some are for validation."""
    words = run("--nvme", drive, "data.shuffle=true", "data.validation=0.2", "--steps", 6)
    whole, again = whole_and_resumed(*words, folder=tmp_path)
    read = [(one / "evaluations.jsonl").read_text().splitlines()[-1] for one in (whole.output, again.output)]
    assert len({json.loads(line)["validation_loss"] for line in read}) == 1


def test_another_picture_is_another_run(places: Any, run: Callable[..., list[Any]], tmp_path: Path) -> None:
    """A checkpoint is not continued with other pixels, although the text and the ids are the same."""
    _, data, _ = places
    copy = tmp_path / "data"
    copy.mkdir()
    for file in data.parent.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    words = run("--engine", "plain", data=copy / data.name)
    call(*words, "--steps", 2, output=tmp_path / "run")
    picture(copy / "2.png", seed=9, size=(48, 40))
    refused = call(*words, output=tmp_path / "run", check=False)
    assert refused.code == 2
    assert "the text of --data is another, or has changed since" in refused.text
    picture(copy / "2.png", seed=2, size=(48, 40))
    assert "resumed from" in call(*words, output=tmp_path / "run").text


def test_the_plan_counts_the_patches(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    plans = [ask("plan", *run(), *words).stdout for words in ([], ["model.image_patches=4000"])]
    assert "images: 68 patches a row are counted, 17 of one image or 1.06 for each token of the row" in plans[0]
    assert "images: 4000 patches a row are counted, as image_patches says" in plans[1]
    modes = ask("plan", *run(), "--gpus", 2, "--parallel").stdout
    assert "sequence 2: parallel.sequence: not with images" in modes
    assert "ZeRO-3 over 2, tensor 2: --engine deepspeed: not with images" in modes
    (tmp_path / "text.txt").write_text("No pictures here. " * 40)
    text = run(data=tmp_path / "text.txt")
    refused = ask("plan", *text)
    assert refused.returncode == 2
    assert "LlavaForConditionalGeneration reads images, and the first lines of --data have none" in refused.stderr
    alone = call(*text, "model.image_patches=0", "--steps", 1, output=tmp_path / "run")
    assert "patches" not in alone.text
    assert alone.losses[0] > 0
