"""Text from what a run has saved: `sample` and `chat`, on the CPU.

    Source ── all weights in memory, in fp32, where they take at most half of what is free
           └─ else a module's weights are read as it is called, and let go behind it: each token reads the model once

The model's configuration and tokenizer are the run's own, and so is what ends a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.export.sources import opened
from offload_trainer.machine.probe import available_ram_bytes
from offload_trainer.model.speaker import Speaker, empty_model, exported_model, read_as_called, set_weight
from offload_trainer.run.draw import Draw
from offload_trainer.units import format_bytes


@contextmanager
def speaker(path: Path, *, say: Callable[[str], None], most_bytes: int | None = None) -> Iterator[Speaker]:
    """The model of a run (its newest checkpoint), of a checkpoint, or of an export's directory.

    `most_bytes` of weights are kept in memory: half of what is free where nothing is said. UserError for a source that
    is none, or an export that is larger, since its files are laid out for other readers.
    """
    most = available_ram_bytes() // 2 if most_bytes is None else most_bytes
    if (path / "config.json").is_file():
        yield _of_export(path, most=most, say=say)
        return
    with opened(path, mixed=False) as source:
        say(f"{source.told}, in fp32 on the CPU")
        model = empty_model(source.model)
        size = sum(4 * math.prod(shape) for shape in source.shapes.values())
        for name, buffer in source.buffers.items():
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
        if size <= most:
            for name, tensor in source.weights():
                if name not in source.buffers:
                    set_weight(model, name, tensor.float())
            model.tie_weights()
        else:
            say(
                f"the weights take {format_bytes(size)}, more than the {format_bytes(most)} that may be used: they are "
                "read anew for each token"
            )
            read_as_called(model, source.shapes, source.read)
        yield Speaker(model, load_tokenizer(str(source.model)))


def _of_export(path: Path, *, most: int, say: Callable[[str], None]) -> Speaker:
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if size > most:
        raise UserError(
            f"{path}: its weights take {format_bytes(size)}, and {format_bytes(most)} of memory may be used: give the "
            "run or the checkpoint that it was exported from, which are read a module at a time"
        )
    say(f"{path}, on the CPU")
    return Speaker(exported_model(path), load_tokenizer(str(path)))


def sample(path: Path, prompt: str, draw: Draw, *, say: Callable[[str], None], most_bytes: int | None = None) -> str:
    """`prompt` and what the model goes on with."""
    with speaker(path, say=say, most_bytes=most_bytes) as found:
        ids = found.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            first = found.tokenizer.bos_token_id
            ids = [found.tokenizer.eos_token_id or 0 if first is None else first]
        return str(found.tokenizer.decode([*ids, *found.go_on(ids, **asdict(draw))], skip_special_tokens=True))


def chat(path: Path, lines: Iterable[str], draw: Draw, *, say: Callable[[str], None], show: bool = True) -> list[str]:
    """Answers to the lines, each with all that was said before; `show`: on the terminal, as they come."""
    with speaker(path, say=say) as found:
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
            told = found.go_on(asked["input_ids"], **asdict(draw) | {"seed": draw.seed + number}, show=show)
            answers.append(str(found.tokenizer.decode(told, skip_special_tokens=True)).strip())
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers
