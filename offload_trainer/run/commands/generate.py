"""The `sample` and `chat` commands: generate text from saved weights, on the CPU in fp32.

Weights that need more than half of the free RAM are read when their module is called and freed afterwards, so that
every token reads the whole model once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes
from offload_trainer.data.tokenizer import document_marks, load_tokenizer
from offload_trainer.machine.probe import available_ram_bytes
from offload_trainer.model.inference import empty_model, generate, read_as_called
from offload_trainer.model.init_weights import set_buffers
from offload_trainer.run.export import opened, opened_model


@contextmanager
def inference_model(path: Path, *, say: Callable[[str], None]) -> Iterator[tuple[Any, Any]]:
    """Open the model and tokenizer of a run (its newest checkpoint), a checkpoint or an exported directory.

    Raises UserError if `path` is none of these.
    """
    most = available_ram_bytes() // 2
    with opened_model(path) if (path / "config.json").is_file() else opened(path) as source:
        say(f"{source.description}, in fp32 on the CPU")
        model = empty_model(source.model)
        shapes = {name: shape for name, shape in source.shapes.items() if name not in source.buffers}
        size = sum(4 * math.prod(shape) for shape in shapes.values())
        set_buffers(model, source.buffers, "cpu")
        if size <= most:
            for name, tensor in source.each():
                if name in shapes:
                    model.get_parameter(name).data = tensor.float()
        else:
            say(
                f"the weights take {format_bytes(size)}, more than the {format_bytes(most)} that may be used: they are "
                "read from the disk for each token"
            )
            read_as_called(model, shapes, source.read)
        yield model, load_tokenizer(str(source.model))


def sample(path: Path, prompt: str, *, say: Callable[[str], None], **drawn: Any) -> str:
    """Return `prompt`, begun as documents are in training, and its continuation. `drawn`: arguments of `generate`."""
    with inference_model(path, say=say) as (model, tokenizer):
        (begin, _), ids = document_marks(tokenizer), tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = ids if ids[: len(begin)] == begin else begin + ids
        ids = ids or [tokenizer.eos_token_id or 0 if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
        continuation = generate(model, tokenizer, ids, **drawn)
        if not tokenizer.decode(continuation, skip_special_tokens=True):
            hint = "; it has a chat template: `offload-train chat` applies it" if tokenizer.chat_template else ""
            say(f"the model ended the text at once, with {tokenizer.decode(continuation)!r} alone{hint}")
        return str(tokenizer.decode([*ids, *continuation], skip_special_tokens=True))


def chat(path: Path, lines: Iterable[str], *, seed: int, say: Callable[[str], None], **drawn: Any) -> list[str]:
    """Print the model's answer to each line while it is generated, and return the answers.

    All earlier lines and answers are its context. Raises UserError if the tokenizer has no chat template.
    """
    with inference_model(path, say=say) as (model, tokenizer):
        if not tokenizer.chat_template:
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
            asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            answer = generate(model, tokenizer, asked["input_ids"], seed=seed + number, **drawn, show=True)
            answers.append(str(tokenizer.decode(answer, skip_special_tokens=True)).strip())
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers
