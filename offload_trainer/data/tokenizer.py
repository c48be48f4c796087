"""Loading and saving of transformers tokenizers, and the facts about them that a token file records."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from offload_trainer.errors import UserError
from offload_trainer.safe_files import file_bytes, refuse_pipes

_OTHERS_READ = (
    *("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
BUILTIN_TOKENIZER = Path(__file__).parent / "builtin" / "tokenizer"


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer: ``builtin`` (without network), a directory's, or that of a hub id.

    Raises UserError if it does not exist or cannot be loaded.
    """
    directory = BUILTIN_TOKENIZER if name == "builtin" else Path(name).expanduser()
    is_directory = directory.is_dir()
    if not is_directory and (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1):
        raise UserError(f"no such directory: {name}; set data.tokenizer to builtin, a directory or a hub id")
    if is_directory:
        refuse_pipes(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory if is_directory else _downloaded(name), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizer files fail in many ways, all of them for the user to fix
        raise UserError(_why_not(name, is_directory=is_directory, error=error)) from error
    # From a directory with only a model's config.json, transformers makes a tokenizer without a vocabulary.
    if vocabulary_size(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(_why_not(name, is_directory=is_directory, error=None))
    return tokenizer


def _downloaded(name: str) -> str:
    """Download the tokenizer files of a hub id and return their directory.

    One request suffices: without a network, transformers would try file after file.
    """
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", "*.py"])


def _why_not(name: str, *, is_directory: bool, error: Exception | None) -> str:
    reason = f" ({str(error).strip().splitlines()[0]})" if error and str(error).strip() else ""
    if "trust_remote_code" in str(error):
        return f"the tokenizer of {name} has its own Python code: model.trust_remote_code=true allows it to run"
    if is_directory:
        return (
            f"{name} holds no tokenizer that can be loaded{reason}; put its tokenizer.json there, "
            "or set data.tokenizer=builtin or another directory"
        )
    return (
        f"the tokenizer {name} is neither a directory here nor available from the hub{reason}; "
        "check the name and the network, or set data.tokenizer=builtin or a directory"
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits that differ whenever two tokenizers could give different ids for the same text.

    Truncation and padding are excluded: they are settings of a call that transformers stores in the backend.
    """
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["truncation"] = content["padding"] = None
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab()]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the files that load this tokenizer again, and copy the source directory's other tokenizer files.

    tokenizer.json is written by transformers: with some config.json files it loads another tokenizer than the
    directory's tokenizer.json describes, and the loaded one is what the model is trained with. The copied files are for
    other programs.
    """
    tokenizer.save_pretrained(directory)
    for name in _OTHERS_READ if tokenizer.name_or_path else ():
        given = Path(tokenizer.name_or_path) / name
        if given.is_file() and not (directory / name).exists():
            shutil.copyfile(given, directory / name)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one; this exceeds `len(tokenizer)` if the vocabulary has gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def read_template(path: Path) -> str:
    """Return the text of a chat template file. Raises UserError if it cannot be read."""
    try:
        return file_bytes(path, links=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path} is not UTF-8, so it is not a Jinja template") from error
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"data.chat_template: {path} cannot be read: {told}") from error


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id that ends a document, or None for a tokenizer without one."""
    return tokenizer.eos_token_id
