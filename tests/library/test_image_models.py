"""Tests of image-text models in the library: a loop with images has the bits of plain torch, wherever weights are."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from engine_bench import assert_same
from hf_trainers import Ours, arguments, loaded, told, weights
from image_models import PATCHES, ROWS, Batch, image_model, opened
from sample_chats import chat_tokenizer
from session_loop import ACCUMULATE, by_torch, one_cycle, trained
from tiny_models import tiny_config
from torch.utils.data import default_collate
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    IdeficsConfig,
    LlavaConfig,
    Qwen3_5Config,
    ShieldGemma2Config,
    ShieldGemma2ForImageClassification,
    Trainer,
    UdopConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.config import ModelSection
from offload_trainer.model.images import refuse_other_losses
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.memory import image_part
from offload_trainer.plan.planner import workload
from offload_trainer.run.export import export
from offload_trainer.run.planning import model_of
from offload_trainer.settings import load_config

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's"),
    pytest.mark.usefixtures("nothing_is_small"),
]
STEPS = 2
HOMES: dict[str, dict[str, Any]] = {
    "in RAM": {"params": "cpu", "ram_fraction": 1.0},
    "on the drive": {"params": "nvme", "optimizer": "nvme", "page_size": 8192},
    "checkpointed": {"params": "nvme", "ram_fraction": 1.0, "activation_checkpointing": "on"},
}
MODELS = {
    "Llava": r"vision_tower",
    "Qwen2_5_VL": r"\.visual\.",
    "Idefics3": r"vision_model",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Batch]]]:
    """Return a function that returns the directory of a small model and batches for it."""

    @cache
    def of(name: str) -> tuple[Path, list[Batch]]:
        folder = tmp_path_factory.mktemp(name) / "model"
        return folder, image_model(folder, name, batches=STEPS * ACCUMULATE)

    return of


def by_session(session: ot.Session, loss_of: Callable[[Any, int], torch.Tensor]) -> list[Any]:
    session.model.train()
    optimizer = session.adamw(lr=1e-2)
    return list(trained(session.model, optimizer, one_cycle(optimizer), loss_of, session=session, steps=STEPS))


def session_keys(data: Sequence[Batch], drive: Path, **keys: Any) -> dict[str, Any]:
    rows, length = data[0]["input_ids"].shape
    sizes = {"micro_batch_size": rows, "seq_len": length, "image_patches": PATCHES}
    return {"nvme": drive, "dtype": "fp32", "kernel": "torch", "say": lambda _: None, **sizes, **keys}


PROCESSOR = {
    "preprocessor_config.json": '{"image_processor_type": "CLIPImageProcessor"}',
    "processor_config.json": '{"processor_class": "LlavaProcessor"}',
    "chat_template.jinja": "{{ messages }}",
    "chat_template.json": '{"chat_template": "{{ messages }}"}',
}


@pytest.mark.parametrize(
    ("name", "tower", "home"),
    [
        ("Llava", "trained", "on the drive"),
        ("Llava", "frozen", "checkpointed"),
        ("Qwen2_5_VL", "trained", "checkpointed"),
        ("Qwen2_5_VL", "frozen", "in RAM"),
        ("Idefics3", "trained", "in RAM"),
        ("Idefics3", "frozen", "on the drive"),
    ],
)
def test_a_loop_with_images_has_the_bits_of_torch(
    name: str, tower: str, home: str, models: Callable[[str], Any], drive: Path, tmp_path: Path
) -> None:
    """Exports of sessions and saves have logits, class and processor's files; a module in memory is trained too."""
    folder, data = models(name)
    for file, text in PROCESSOR.items():
        (folder / file).write_text(text)
    freeze = [MODELS[name]] if tower == "frozen" else []
    model = opened(folder).train()
    for weight, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, weight) for pattern in freeze))

    def loss_of(model: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = model(**data[number]).loss
        return loss

    expected = by_torch(model, loss_of, steps=STEPS)
    with ot.load(folder, freeze=freeze, **session_keys(data, drive, **HOMES[home])) as session:
        assert by_session(session, loss_of) == expected
        parameters, before = dict(model.named_parameters()), dict(opened(folder).named_parameters())
        assert_same(dict(session.named_masters()), parameters)
        session.save(tmp_path / "save")
        session.export(tmp_path / "out", dtype="fp32")
    moved = {weight for weight in parameters if not torch.equal(parameters[weight], before[weight])}
    of_tower = {weight for weight in moved if re.search(MODELS[name], weight)}
    assert bool(of_tower) == (tower == "trained")
    assert moved > of_tower
    export(tmp_path / "save", tmp_path / "of the command", dtype="fp32", check=True)
    with torch.no_grad():
        logits = model.eval()(**data[0]).logits
        for place in (tmp_path / "out", tmp_path / "of the command"):
            assert torch.equal(opened(place).eval()(**data[0]).logits, logits)
            assert json.loads((place / "config.json").read_text())["architectures"] == [type(model).__name__]
            for file, text in PROCESSOR.items():
                assert (place / file).read_text() == text
    if name == "Llava":  # the layout on the hub, which other programs expect
        names = {key.partition(".")[0]: key for key in weights(tmp_path / "out")}
        assert names["vision_tower"].startswith("vision_tower.vision_model.")
        assert names["language_model"].startswith(("language_model.model.", "language_model.lm_head."))
    if name == "Llava" and not freeze:
        keys: dict[str, Any] = {"nvme": drive, "say": lambda _: None, "kernel": "torch", **HOMES[home]}
        with ot.offload(opened(folder), **keys) as session:
            assert by_session(session, loss_of) == expected
            session.export(tmp_path / "of a module", dtype="fp32")
        assert_same(dict(opened(tmp_path / "of a module").named_parameters()), parameters)


@pytest.mark.slow
def test_weights_of_a_classifier_around_an_image_text_model(drive: Path, tmp_path: Path) -> None:
    """ShieldGemma 2's weights are read as its classifier reads them, and the classifier reads an export."""
    model = AutoModelForImageTextToText.from_config(tiny_config(ShieldGemma2Config), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    expected = dict(model.named_parameters())
    keys = {"nvme": drive, "dtype": "fp32", "say": lambda _: None, "image_patches": PATCHES}
    with ot.load(tmp_path / "model", micro_batch_size=1, seq_len=16, **keys) as session:
        assert_same(dict(session.named_masters()), expected)
        session.export(tmp_path / "out", dtype="fp32")
    for folder in (tmp_path / "model", tmp_path / "out"):
        classifier, info = ShieldGemma2ForImageClassification.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same(dict(classifier.model.named_parameters()), expected)


@pytest.mark.slow
def test_a_trainer_with_a_collator_of_images(models: Callable[[str], Any], drive: Path, tmp_path: Path) -> None:
    folder, data = models("Idefics3")
    rows = [{key: values[number] for key, values in batch.items()} for batch in data for number in range(ROWS)]
    words = {"train_dataset": rows, "eval_dataset": rows[:ROWS], "data_collator": default_collate}
    steps = {"max_steps": 6, "save_steps": 3, "eval_steps": 3}
    stock = Trainer(opened(folder), arguments(tmp_path / "stock", **steps), **words)
    stock.train()
    stock.save_model()
    with loaded(folder, drive, seq_len=data[0]["input_ids"].shape[1], image_patches=PATCHES) as model:
        trainer = Ours(model, arguments(tmp_path / "ours", **steps), **words)
        trainer.train()
        assert told(trainer) == told(stock)
        trainer.save_model()
    for name in (".", "checkpoint-3"):
        assert_same(weights(tmp_path / "ours" / name), weights(tmp_path / "stock" / name))
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_same(dict(saved.named_parameters()), dict(stock.model.named_parameters()))


@pytest.mark.slow
def test_which_class_a_name_stands_for(tmp_path: Path) -> None:
    """A configuration of both kinds is what its checkpoint says, and with no images only its language model."""
    for folder, kind in (("both", Qwen3_5Config), ("images", LlavaConfig)):
        AutoModelForImageTextToText.from_config(tiny_config(kind)).save_pretrained(tmp_path / folder)

    def resolved(folder: Path, **words: Any) -> Any:
        return resolve_model(ModelSection(name=str(folder), random_init=True), seed=0, **words)

    def name(folder: str, **words: Any) -> str:
        return type(resolved(tmp_path / folder, **words).build(dtype=torch.float32).model).__name__

    assert name("both", image_patches="auto") == "Qwen3_5ForConditionalGeneration"
    assert name("both", image_patches=0) == "Qwen3_5ForCausalLM"
    assert name("images", image_patches="auto") == name("images", image_patches=0) == "LlavaForConditionalGeneration"
    assert resolved(tmp_path / "images", image_patches=0).shape.images is None
    # Mistral 4 is a causal language model, which transformers lists among the image-text models only.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral4"}))
    assert resolved(tmp_path, image_patches="auto").shape.images is None


@pytest.mark.slow
def test_models_that_cannot_be_planned_are_refused(models: Callable[[str], Any], drive: Path) -> None:
    folder, data = models("Llava")
    keys = session_keys(data, drive)
    for wrong in (-1, 1.5, "many", True):
        with pytest.raises(UserError, match=r"image_patches=.*: must be a number of patches"):
            ot.load(folder, **keys | {"image_patches": wrong})
    with pytest.raises(UserError, match="offload_activations: the inputs of a vision tower's blocks"):
        ot.load(folder, offload_activations=True, activation_checkpointing="on", **keys)


@pytest.mark.slow
def test_weights_that_a_class_freezes_are_trained(tmp_path: Path) -> None:
    """transformers' from_pretrained trains what Idefics' constructor freezes, and so does this program."""
    config = tiny_config(IdeficsConfig)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    assert not all(parameter.requires_grad for parameter in built.parameters())
    assert all(parameter.requires_grad for parameter in opened(tmp_path).parameters())
    keys: dict[str, Any] = {"params": "cpu", "dtype": "fp32", "seq_len": 16, "image_patches": PATCHES}
    with ot.load(tmp_path, say=lambda _: None, **keys) as session:
        assert all(parameter.requires_grad for parameter in session.model.parameters())


@pytest.mark.slow
def test_what_the_command_does_not_train_is_refused(tmp_path: Path) -> None:
    refused = {}
    for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        config = kind()
        try:
            refuse_other_losses(config)
        except UserError as error:
            refused[kind.__name__.removesuffix("Config")] = str(error).partition(",")[0].partition(": ")[2]
    both = dict.fromkeys(
        ("Florence2", "PPFormulaNet", "Pix2Struct", "T5Gemma2", "Udop", "VisionEncoderDecoder"),
        "it is an encoder and a decoder",
    )
    assert refused == both | {"DiffusionGemma": "it takes no labels", "PI0": "it takes no labels"}
    tiny_config(UdopConfig).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="UdopForConditionalGeneration: it is an encoder and a decoder, and this"):
        model_of(load_config(["--model", str(tmp_path), "--scratch"]))


@pytest.mark.slow
def test_the_command_trains_on_text_alone(models: Callable[[str], Any], drive: Path, tmp_path: Path) -> None:
    """The tower gets no gradient and does not change; the export has the class. Images in the data are refused."""
    folder, _ = models("Llava")
    chat_tokenizer().save_pretrained(folder)
    (tmp_path / "text.txt").write_text("No pictures here. " * 20)
    words = ["--model", folder, "--dtype", "fp32", "--seq-len", 16, "--micro-batch", 2, "--steps", 1, "--lr", 1e-2]
    words += ["optim.warmup_steps=0", "placement.threads=1", "--nvme", drive, "--params", "nvme", "--optimizer", "nvme"]
    ours = call(*words, "--data", tmp_path / "text.txt", output=tmp_path / "run")
    export(ours.output, tmp_path / "out", dtype="fp32", check=False)
    before, after = opened(folder), opened(tmp_path / "out")
    assert type(after) is type(before)
    for (name, one), two in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(one, two) == bool(re.search("vision_tower|multi_modal_projector", name)), name
    talk = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, {"role": "assistant", "content": "a"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    refused = call(*words, "--data", tmp_path / "talk.jsonl", output=tmp_path / "refused", check=False)
    assert refused.code == 2
    assert "line 1: message 1 holds something other than text: this command trains on text alone" in refused.text


@pytest.mark.slow
def test_images_are_counted(models: Callable[[str], Any], drive: Path) -> None:
    """More patches need more memory, a trained tower more than a frozen one, and the plan says how many are counted."""
    folder, data = models("Llava")
    counted, notes = [], []
    for patches, freeze in ((0, ()), (1000, ()), (4000, ("vision_tower",)), (4000, ()), ("auto", ())):
        with ot.load(folder, freeze=freeze, **session_keys(data, drive, image_patches=patches)) as session:
            items = [item for item in session.plan.items if "activations" in item.name or item.name == "block inputs"]
            counted.append(sum(item.bytes for item in items))
            notes.append([note for note in session.plan.notes if note.startswith("images:")])
    assert counted[:4] == sorted(set(counted[:4]))
    assert notes[0] == []
    assert notes[3][0].startswith("images: 4000 patches a row are counted, as image_patches says")
    assert "17 of one image or 1.06 for each token" in notes[4][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_tower_is_not_underestimated(name: str, models: Callable[[str], Any]) -> None:
    """Autograd keeps at most what is counted for the images of a batch, and at least a quarter of it."""
    folder, data = models(name)
    model, batch = opened(folder).train(), data[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    words = ("pixel_values", "image_sizes", "image_grid_thw")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = model.get_image_features(**{key: batch[key] for key in words if key in batch})  # noqa: F841
    rows, length = batch["input_ids"].shape
    section = ["--model", str(folder), "--dtype", "fp32", "--seq-len", str(length), "--micro-batch", str(rows)]
    config = load_config([*section, "model.activation_checkpointing=off"])
    shape = resolve_model(config.model, seed=0, image_patches=PATCHES).shape
    counted = image_part(workload(config, shape)).kept.row * rows
    assert sum(held.values()) <= counted <= 4 * sum(held.values())
