"""Text from what a run has saved: `sample` and `chat`, on the CPU, in fp32.

    run, checkpoint ─┐
    export          ─┴─ _Weights ── all in memory, where they take at most half of what is free
                                 └─ else a module's are read as it is called, and let go behind it: each token reads
                                    the model once

The model's configuration and tokenizer are the run's own, and so is what ends a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.export.sources import NamedTensor, opened
from offload_trainer.machine.probe import available_ram_bytes
from offload_trainer.model.inference import InferenceModel, empty_model, read_as_called, set_weight
from offload_trainer.model.pretrained import opened_weights, persistent_buffers
from offload_trainer.run.commands.sampling import SamplingOptions
from offload_trainer.units import format_bytes


@dataclass(frozen=True)
class _Weights:
    """A model without memory, and where its weights are."""

    model: Any
    directory: Path  # its configuration and tokenizer
    told: str
    shapes: Mapping[str, tuple[int, ...]]  # of the parameters, by the model's own names
    weights: Callable[[], Iterator[NamedTensor]]
    read: Callable[[str], torch.Tensor]  # any of them
    buffers: Mapping[str, torch.Tensor]  # that were saved with them


@contextmanager
def inference_model(
    path: Path, *, say: Callable[[str], None], most_bytes: int | None = None
) -> Iterator[InferenceModel]:
    """The model of a run (its newest checkpoint), of a checkpoint, or of an export's directory.

    `most_bytes` of weights are kept in memory: half of what is free where nothing is said. UserError for a source that
    is none.
    """
    most = available_ram_bytes() // 2 if most_bytes is None else most_bytes
    with _of_export(path) if (path / "config.json").is_file() else _of_run(path) as found:
        say(f"{found.told}, in fp32 on the CPU")
        model = found.model
        size = sum(4 * math.prod(shape) for shape in found.shapes.values())
        for name, buffer in found.buffers.items():
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
        if size <= most:
            for name, tensor in found.weights():
                if name in found.shapes:
                    set_weight(model, name, tensor.float())
            model.tie_weights()
        else:
            say(
                f"the weights take {format_bytes(size)}, more than the {format_bytes(most)} that may be used: they are "
                "read from the disk for each token"
            )
            read_as_called(model, found.shapes, found.read)
        yield InferenceModel(model, load_tokenizer(str(found.directory)))


@contextmanager
def _of_run(path: Path) -> Iterator[_Weights]:
    with opened(path, mixed=False) as source:
        shapes = {name: shape for name, shape in source.shapes.items() if name not in source.buffers}
        model = empty_model(source.model)
        yield _Weights(model, source.model, source.told, shapes, source.weights, source.read, source.buffers)


@contextmanager
def _of_export(path: Path) -> Iterator[_Weights]:
    """As transformers lays them out, so that some are made of several in the files."""
    model = empty_model(path)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with opened_weights(path, model) as found:
        buffers = {name: found.read(name) for name in persistent_buffers(model)}
        yield _Weights(model, path, str(path), shapes, lambda: found.each(shapes.keys()), found.read, buffers)


def sample(
    path: Path, prompt: str, draw: SamplingOptions, *, say: Callable[[str], None], most_bytes: int | None = None
) -> str:
    """`prompt` and what the model goes on with."""
    with inference_model(path, say=say, most_bytes=most_bytes) as found:
        ids = found.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            first = found.tokenizer.bos_token_id
            ids = [found.tokenizer.eos_token_id or 0 if first is None else first]
        return str(found.tokenizer.decode([*ids, *found.generate(ids, **asdict(draw))], skip_special_tokens=True))


def chat(
    path: Path, lines: Iterable[str], draw: SamplingOptions, *, say: Callable[[str], None], show: bool = True
) -> list[str]:
    """Answers to the lines, each with all that was said before; `show`: on the terminal, as they come."""
    with inference_model(path, say=say) as found:
        if not found.tokenizer.chat_template:
            raise UserError(
                f"{path}: its tokenizer has no chat template, so it was not trained on conversations: use "
                "`offload-train sample`"
            )
        messages: list[dict[str, str]] = []
        answers = []
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line.strip()})
            asked = found.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            told = found.generate(asked["input_ids"], **asdict(draw) | {"seed": draw.seed + number}, show=show)
            answers.append(str(found.tokenizer.decode(told, skip_special_tokens=True)).strip())
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers
