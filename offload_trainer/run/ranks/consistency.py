"""Check that all ranks have the same versions, hardware, configuration, data and model, before anything is written.

The error lists each difference with its values on rank 0 and on the other rank.
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from offload_trainer import __version__
from offload_trainer.engine.cpu_matmul import has_native_16bit
from offload_trainer.errors import PeerFailed, UserError
from offload_trainer.ranks import all_gather_json, place_here
from offload_trainer.safe_files import shown

_MOST = 10  # lines in a message


def refuse_other_programs(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError if ranks differ in versions, configuration, or hardware that changes results in the last bits.

    Collective.
    """
    facts: dict[str, Any] = {
        "offload_trainer": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "CPU instruction set (torch)": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
        facts["CUDA"] = torch.version.cuda
    else:
        for dtype in (torch.bfloat16, torch.float16):
            facts[f"products of {str(dtype).removeprefix('torch.')} in hardware"] = has_native_16bit(dtype)
    wishes = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    _refuse_different(
        facts | wishes, fix="Install the same software on every node, and start every rank with the same command"
    )


def refuse_other_data(identity: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise UserError if ranks have different training data, or weights of different names or shapes. Collective."""
    weights = zlib.crc32(json.dumps(layout, sort_keys=True).encode())
    _refuse_different(
        {**identity, "the model's weights": weights}, fix="Every node must see the same data and the same model"
    )


def _refuse_different(mine: Mapping[str, Any], *, fix: str) -> None:
    first, *others = all_gather_json(dict(mine))
    told = [
        f"  {shown(key)}: rank {rank} has {shown(its.get(key))}, rank 0 {shown(first.get(key))}"
        for rank, its in enumerate(others, 1)
        for key in {**first, **its}
        if first.get(key) != its.get(key)
    ]
    if told:
        more = [f"  and {len(told) - _MOST} more"] if len(told) > _MOST else []
        words = "\n".join(["the ranks of this run differ:", *told[:_MOST], *more, fix])
        raise UserError(words) if place_here()[0] == 0 else PeerFailed(words, code=UserError.exit_code)
