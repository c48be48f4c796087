"""Sample conversations and a tokenizer with a chat template, for tests."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from commands import start  # noqa: F401 - sets what forks need
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload_trainer.config import DataSection, ModelSection
from offload_trainer.data.packing import TokenSpec, records_in
from offload_trainer.data.run_data import prepare_data, prepare_tokens
from offload_trainer.data.tokenizer import tokenizer_fingerprint

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    (f"What follows {word}?", f"{word} and {word[::-1]}.") for word in ("one", "two", "three", "four", "five", "six")
]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(*texts: str) -> list[dict[str, Any]]:
    """Return messages that alternate between user and assistant."""
    return [message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def chat_tokenizer(template: str = TEMPLATE, *, eos: str = "<end>", special: Sequence[str] = ()) -> Any:
    """Return a byte-level tokenizer with a chat template. `special` are more special tokens."""
    tokens = list(dict.fromkeys(["<pad>", "<s>", "<end>", "<user>", "<assistant>", eos, *special]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*tokens, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token=eos, model_max_length=128
    )
    tokenizer.chat_template = template
    return tokenizer


def token_spec(
    *paths: object,
    tokenizer: Any = None,
    vocabulary: int = 300,
    seq_len: int = 64,
    say: Callable[[str], None] = lambda line: None,
    **section: Any,
) -> TokenSpec:
    tokenizer = tokenizer or chat_tokenizer()
    read = DataSection(path=tuple(map(str, paths)), **section)
    return TokenSpec(read, tokenizer, tokenizer_fingerprint(tokenizer), vocabulary, seq_len, say)


def prepared(*paths: Path, cache: Path | None = None, **given: Any) -> Any:
    """Return the token file of these paths, by default with `chat_tokenizer`; its cache is next to the first path."""
    return prepare_tokens(token_spec(*paths, cache=str(cache or paths[0].parent / "cache"), **given))


def run_data(
    *paths: Path, vocabulary: int = 2048, seq_len: int = 8, directory: Any = None, say: Any = print, **section: Any
) -> Any:
    """Return the data of a run of a model with this vocabulary and directory, of these paths as in `prepared`."""
    source = SimpleNamespace(directory=directory, shape=SimpleNamespace(vocabulary=vocabulary), section=ModelSection())
    read = DataSection(path=tuple(map(str, paths)), cache=str(paths[0].parent / "cache"), **section)
    return prepare_data(read, source, seq_len=seq_len, say=say)


def documents_of(*files: Path) -> list[str]:
    encoder = token_spec().encoder("text")
    return ["".join(blocks) for file in files for blocks in records_in(file, encoder)]


def chats() -> Dataset:
    return Dataset.from_list([{"messages": turns(asked, told)} for asked, told in CHATS])


def preferences() -> Dataset:
    pairs = [(turns(asked), message("assistant", told), message("assistant", told[::-1])) for asked, told in CHATS]
    return Dataset.from_list([{"prompt": asked, "chosen": [good], "rejected": [bad]} for asked, good, bad in pairs])


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": turns(asked)} for asked, _ in CHATS])
