"""Keyword arguments of `ot.load` and `ot.offload`: keys of the configuration without their sections.

Errors of the configuration and of the planner name flags and keys, which `translate_errors` replaces by keywords.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

from offload_trainer.config import RuleName, TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.settings import FLAGS, all_keys, refuse_unwritable, validated

_Home = Literal["auto", "gpu", "cpu", "nvme"]


class SessionKeys(TypedDict, total=False):
    """The keywords of `ot.load` and `ot.offload`: keys of the configuration, which docs/config.md describes.

    A keyword is the last part of its key, except `rule`, which is optim.name, since `name` is the model's.
    """

    random_init: bool
    overrides: Mapping[str, bool | int | float | str]
    dtype: Literal["bf16", "fp32"]
    attention: Literal["auto", "sdpa", "eager"]
    activation_checkpointing: int | Literal["auto", "on", "off"]
    offload_activations: bool | Literal["cpu", "nvme"]
    freeze: Sequence[str]
    base: Literal["model", "nf4", "int8"]
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
    rule: RuleName


_LAST_PARTS = {key.rpartition(".")[2]: key for key in all_keys()} | {"rule": "optim.name"}
KEYS = {keyword: _LAST_PARTS[keyword] for keyword in SessionKeys.__annotations__}  # the key of each keyword
INSTEAD = {  # other keys that a caller may try, and what to do instead
    "name": "give it to ot.load",
    "image_patches": "ot.load takes it; of a module in memory all weights are counted for each token of a row",
    "loss_chunk": "your code computes the loss",
    "mlp_chunk": "a session runs the model's own forward",
    "engine": "a session always uses the tiered engine",
    "gpus": "start the script with torchrun --nproc-per-node N",
    "threads": "use torch.set_num_threads",
    "weight_transfer": "the plan chooses it",
    "micro_batch_order": "your code runs the micro-batches",
    "fetch_granularity": "your code may read all weights of a block at any point",
    "lr": "give it to session.adamw",
    "betas": "give them to session.adamw",
    "eps": "give it to session.adamw",
    "weight_decay": "give it to session.adamw",
    "max_grad_norm": "call session.clip_grad_norm_",
}
_OF_LOAD = dict.fromkeys(
    ("random_init", "overrides", "attention", "trust_remote_code", "base"),
    "ot.load takes it; a module in memory stays as is",
) | {"freeze": "call requires_grad_(False) of the module's parameters instead, before it is offloaded"}


def session_config(name: str | None, given: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration for the model `name`, or for a module in memory if it is None.

    Without gradient_accumulation_steps, the plan allows for accumulation. Raises UserError for wrong keywords.
    """
    for key, value in given.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1, cutoff=0.5)
            hint = "a session has no such key" + (f"; did you mean {near[0]}?" if near else "")
            raise UserError(f"{key}={value!r}: {INSTEAD.get(key, hint)}")
        if name is None and key in _OF_LOAD and value and value not in ("auto", "model"):
            raise UserError(f"{key}={value!r}: {_OF_LOAD[key]}")
    if given.get("overlap") == "backward":
        raise UserError(
            "overlap='backward': in a session, learning rate and clipping factor are known only after the backward; "
            "use overlap='forward'"
        )
    refuse_unwritable([name or ""])
    values: dict[str, dict[str, Any]] = {
        "model": {"activation_checkpointing": "off"} if name is None else {"name": name},
        "placement": {"engine": "tiered"},
        "save": {"every": 1},  # makes the plan count memory for saves
        "train": {"gradient_accumulation_steps": 2},
    }
    for key, value in given.items():
        if key in ("nvme", "freeze") and (value is None or isinstance(value, str | Path | Iterable)):
            value = [value] if isinstance(value, str | Path) else list(value or ())
            refuse_unwritable(list(map(str, value)))
        section, _, leaf = KEYS[key].partition(".")
        values.setdefault(section, {})[leaf] = value
    with translate_errors():
        return validated(values)


_FLAGS = {valued: "|".join(flag for flag in FLAGS if bool(FLAGS[flag].metavar) == valued) for valued in (True, False)}
_SPELLED = re.compile(
    rf"(?P<flag>{_FLAGS[True]})(?![\w-])(?:[ =](?P<value>[\w./][\w./-]*))?|(?P<switch>{_FLAGS[False]})(?![\w-])"
    rf"|\b(?P<key>{'|'.join(map(re.escape, all_keys()))})\b"
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Within this context, replace flags and keys in UserError messages by the caller's keywords."""
    try:
        yield
    except UserError as error:
        raise UserError(_SPELLED.sub(_keyword, str(error))) from error


def _keyword(found: re.Match[str]) -> str:
    """Return the keyword for a flag, with its value if one follows, or for a key: `--nvme /a` is `nvme=["/a"]`."""
    key = found["key"] or FLAGS[found["flag"] or found["switch"]].key
    leaf, value = "rule" if key == KEYS["rule"] else key.rpartition(".")[2], found["value"]
    if found["switch"]:
        return f"{leaf}=True"
    if value is None:
        return leaf
    if leaf == "nvme":
        return f'nvme=["{value}"]'
    return f"{leaf}={value}" if re.fullmatch(r"[\d.]+", value) else f'{leaf}="{value}"'
