"""Convert keyword arguments of `ot.load` and `ot.offload` to command-line words, and error messages back.

The library reuses the parser and planner of the command line. Their errors name flags and keys, which
`translate_errors` replaces by the keywords that the caller used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from offload_trainer.config import RENAMED_KEYS
from offload_trainer.errors import UserError
from offload_trainer.settings import FLAGS, all_keys

_SECTIONS = ("model", "placement", "tiered")  # sections of which all keys are keywords, except those in _NOT
_SINGLE = (
    "optim.moment_dtype",
    "optim.kernel",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "train.seed",
    "data.seq_len",
)
_RULE = "optim.name"  # the keyword is `rule`, since `name` is the model's
_NOT = {  # keys that a session does not accept, and what to do instead
    "model.name": "give it to ot.load",
    "model.loss_chunk": "your code computes the loss",
    "model.mlp_chunk": "a session runs the model's own forward",
    "placement.engine": "a session always uses the tiered engine",
    "placement.gpus": "a session trains with one GPU",
    "placement.threads": "use torch.set_num_threads",
    "placement.hang_timeout": "it applies to several ranks only",
    "tiered.weight_transfer": "a session trains with one GPU",
    "tiered.fetch_granularity": "your code may read all weights of a block at any point",
    "tiered.master_format": "a session stores fp32 masters, since other code can change its weights",
    "optim.lr": "give it to session.adamw",
    "optim.betas": "give them to session.adamw",
    "optim.eps": "give it to session.adamw",
    "optim.weight_decay": "give it to session.adamw",
    "optim.max_grad_norm": "call session.clip_grad_norm_",
}

_Home = Literal["auto", "gpu", "cpu", "nvme"]


class SessionKeys(TypedDict, total=False):
    """The keywords of `ot.load` and `ot.offload`, for type checkers; docs/config.md describes each."""

    random_init: bool
    overrides: Mapping[str, bool | int | float | str]
    dtype: Literal["bf16", "fp32"]
    attention: Literal["auto", "sdpa", "eager"]
    activation_checkpointing: Literal["auto", "on", "off"]
    offload_activations: bool | Literal["cpu", "nvme"]
    freeze: Sequence[str]
    trust_remote_code: bool
    seq_len: int | Literal["auto"]
    moment_dtype: Literal["fp32", "bf16", "8bit"]
    kernel: Literal["auto", "torch", "native"]
    micro_batch_size: int
    gradient_accumulation_steps: int
    seed: int
    params: _Home
    optimizer: _Home
    nvme: str | Path | Sequence[str | Path]
    gradients: _Home
    gpu_fraction: float | Literal["auto"]
    ram_fraction: float | Literal["auto"]
    force: bool
    page_size: int
    page_buffers: int
    weight_buffers: int
    overlap: Literal["auto", "off", "forward"]
    state_copies: Literal["auto", 1, 2]
    io: Literal["threads", "async_io"]
    io_threads: int
    io_block_bytes: int
    checksums: bool
    drive_speeds: Sequence[float]
    rule: Literal["adamw", "lion"]


def known_keys() -> dict[str, str]:
    """Return the configuration key of each keyword."""
    keys = [key for key in all_keys() if key.partition(".")[0] in _SECTIONS or key in _SINGLE]
    return {key.rpartition(".")[2]: key for key in keys if key not in _NOT} | {"rule": _RULE}


def session_words(name: str | None, given: Mapping[str, Any]) -> list[str]:
    """Return the command-line words for the model `name`, or for a module in memory if it is None.

    Without gradient_accumulation_steps, the plan allows for accumulation. Raises UserError for unknown keywords.
    """
    known = known_keys()
    for key in given:
        if key not in known:
            raise UserError(f"{key}={given[key]!r}: {_unknown(key, known)}")
    if given.get("overlap") == "backward":
        raise UserError(
            "overlap='backward': in a session, learning rate and clipping factor are known only after the backward; "
            "use overlap='forward'"
        )
    words = ["--engine", "tiered", "--save-every", "1"]  # makes the plan count memory for saves
    words += ["--model", name] if name is not None else ["model.activation_checkpointing=off"]
    if "gradient_accumulation_steps" not in given:
        words.append("train.gradient_accumulation_steps=2")
    for key, value in given.items():
        words.append(f"{known[key]}={value if isinstance(value, str) else json.dumps(value, default=_listed)}")
    return words


def _listed(value: Any) -> Any:
    """Convert a path or a collection for JSON."""
    return list(value) if isinstance(value, tuple | set | frozenset) else str(value)


def _unknown(key: str, known: Mapping[str, str]) -> str:
    other = {leaf.rpartition(".")[2]: why for leaf, why in _NOT.items()}
    if key in other:
        return other[key]
    renamed = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED_KEYS.items()}
    if renamed.get(key) in known:
        return f"this keyword is now called {renamed[key]}"
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return "a session has no such key" + (f"; did you mean {near[0]}?" if near else "")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Within this context, replace flags and keys in UserError messages by the caller's keywords."""
    try:
        yield
    except UserError as error:
        raise UserError(in_keywords(str(error))) from error


def in_keywords(message: str) -> str:
    """Replace flags and keys in an error message by keywords: `--nvme /a` becomes `nvme=["/a"]`."""
    message = message.replace(_RULE, "rule")
    for flag in sorted(FLAGS, key=len, reverse=True):
        leaf = FLAGS[flag].key.rpartition(".")[2]
        if FLAGS[flag].metavar:
            message = re.sub(rf"{flag}[ =]([\w./][\w./-]*)", partial(_keyword, leaf), message)
        message = re.sub(rf"{flag}\b(?!-)", leaf if FLAGS[flag].metavar else f"{leaf}=True", message)
    return re.sub(
        rf"\b(?:{'|'.join(dict.fromkeys(key.partition('.')[0] for key in all_keys()))})\.([a-z_]+)", r"\1", message
    )


def _keyword(leaf: str, found: re.Match[str]) -> str:
    value = found[1]
    if leaf == "nvme":
        return f'nvme=["{value}"]'
    return f"{leaf}={value}" if re.fullmatch(r"[\d.]+", value) else f'{leaf}="{value}"'
