"""Load, save and describe transformers tokenizers; the encoders (packing.py, loss_mask.py) use them."""

import hashlib
import json
import shutil
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from offload_trainer.common.errors import UserError, reason
from offload_trainer.common.safe_files import file_bytes, read_back, refuse_pipes
from offload_trainer.storage.atomic_io import write_text

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"),
)
_PROBE = "It's  the\n\n\tBEST of 12345 times, a.b--c: naïve 東京 🙂\u00a0(x) "
BUILTIN_TOKENIZER = Path(__file__).parent / "builtin" / "tokenizer"


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, chat_template: str = "auto"
) -> PreTrainedTokenizerBase:
    """Load ``builtin``, a directory's or a hub id's tokenizer, and a chat template. Raises UserError if it cannot."""
    directory = BUILTIN_TOKENIZER if name == "builtin" else Path(name).expanduser()
    is_directory = directory.is_dir()
    if not is_directory and (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1):
        raise UserError(f"no such directory: {name}; set data.tokenizer to builtin, a directory or a hub id")
    if is_directory:
        refuse_pipes(directory)
    try:
        if not is_directory:
            # One request suffices: without a network, transformers would try file after file.
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", "*.py"]))
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        # From a directory with only a model's config.json, transformers makes a tokenizer without a vocabulary.
        if vocabulary_size(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError
    except Exception as error:  # tokenizer files fail in many ways, all of them for the user to fix
        told = str(error).strip()
        if "trust_remote_code" in told:
            raise UserError(
                f"the tokenizer of {name} has its own Python code: model.trust_remote_code=true allows it to run"
            ) from error
        told = f" ({told.splitlines()[0]})" if told else ""
        wrong, fix = "is no directory here, nor available from the hub", "check the name and the network"
        if is_directory:
            wrong, fix = "holds no tokenizer that can be loaded", "put its tokenizer.json there"
        raise UserError(f"{name} {wrong}{told}; {fix}, or set data.tokenizer=builtin or a directory") from error
    if chat_template != "auto":
        path = Path(chat_template).expanduser()
        try:
            tokenizer.chat_template = file_bytes(path, links=True).decode("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"data.chat_template: {path} cannot be read: {reason(error)}") from error
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits that differ whenever two tokenizers could give different ids for the same text.

    Truncation and padding are excluded: they are settings of a call that transformers stores in the backend.
    """
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["truncation"] = content["padding"] = None
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab(), document_marks(tokenizer)]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the files that load this tokenizer again, in transformers 4 too, next to the config.json in `directory`.

    Files of the tokenizer's own directory are copied if they describe this tokenizer. With some config.json files
    transformers loads another tokenizer than a directory's tokenizer.json describes. The loaded one is what the model
    is trained with, so it is then written instead. The remaining files are for other programs.
    """
    source, template = Path(tokenizer.name_or_path or directory), tokenizer.chat_template
    settings = _json(source / "tokenizer_config.json")
    kept = (
        tokenizer.is_fast
        and "tokenizer_class" in settings
        and "backend" not in settings  # else transformers 5 wrote it, with names that transformers 4 refuses
        and not isinstance(template, dict)  # several templates have a directory of their own
        and _json(source / "config.json").get("model_type") == _json(directory / "config.json").get("model_type")
        and _encodes_alike(tokenizer, source / "tokenizer.json")
    )
    if not kept:
        tokenizer.save_pretrained(directory)
        settings |= _json(directory / "tokenizer_config.json")
        settings.pop("backend", None)
        ids = tokenizer("a")["input_ids"]
        settings.setdefault("add_bos_token", ids[:1] == [tokenizer.bos_token_id])
        settings.setdefault("add_eos_token", ids[-1:] == [tokenizer.eos_token_id])
        if tokenizer.is_fast:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # it is as tokenizer.json says, in both releases
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for name in _FILES if source.absolute() != directory.absolute() else ():
        if (source / name).is_file() and (kept or not (directory / name).exists()):
            shutil.copyfile(source / name, directory / name)
    if not kept or template != tokenizer.init_kwargs.get("chat_template"):
        if isinstance(template, str):
            write_text(directory / "chat_template.jinja", template)
            settings.pop("chat_template", None)
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
        write_text(directory / "tokenizer_config.json", text + "\n")


def _encodes_alike(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    if not file.is_file():
        return False
    read = Tokenizer.from_file(str(file))
    read.no_truncation()
    read.no_padding()
    texts = [_PROBE, *(f"{token}the {token} The\n{token}" for token in tokenizer.all_special_tokens)]
    return all(read.encode(text).ids == tokenizer(text)["input_ids"] for text in texts)


def _json(file: Path) -> dict[str, Any]:
    return read_back(file, dict[str, Any], links=True, fix="Download it again") if file.exists() else {}


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one; this exceeds `len(tokenizer)` if the vocabulary has gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def document_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that begin and that end a document: those that the tokenizer itself adds, and its EOS once."""
    bare, whole = (
        tokenizer(string.printable, add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True)
    )
    start = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    behind, eos = whole[start + len(bare) :], tokenizer.eos_token_id
    return whole[:start], behind if eos is None or behind[-1:] == [eos] else [*behind, eos]
