"""Whether a checkpoint belongs to a run: its seed, data and shape, compared, and what differs told in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import shown

_MOST = 10  # lines
_TEXT = ("tokens", "training rows", "text")  # what another text changes


def refuse_other_run(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UserError in words where `saved`, a checkpoint's, is not what this run is; None on a side: not known there."""
    told = differences(saved, now)
    if told:
        lines = "\n".join(f"  {line}" for line in told[:_MOST])
        more = f"\n  and {len(told) - _MOST} more" if len(told) > _MOST else ""
        raise UserError(
            f"{checkpoint} belongs to another run:\n{lines}{more}\nTo go on, give what it was made with; to begin "
            f"anew, name another --output, or move {checkpoint.parent} away"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each thing that differs, but one for a text, of which several numbers follow."""
    keys = [key for key in {**saved, **now} if _differ(key, saved, now)]
    told = []
    if "tokenizer" in keys:
        keys = [key for key in keys if key not in _TEXT]  # with another tokenizer the ids are others anyway
    elif "text" in keys:
        keys = [key for key in keys if key not in _TEXT]
        told.append(_changed_text(saved.get("tokens"), now.get("tokens")))
    if "validation text" in keys:
        keys.remove("validation text")
        told.append(_changed_validation("validation text" in saved, "validation text" in now))
    return told + [f"{shown(key)}: it has {_said(saved, key)}, this run {_said(now, key)}" for key in keys]


def _differ(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    unknown = any(key in side and side[key] is None for side in (saved, now))
    return not unknown and saved.get(key) != now.get(key)


def _said(side: Mapping[str, Any], key: str) -> str:
    return shown(side[key]) if key in side else "none"


def _changed_text(before: Any, after: Any) -> str:
    sizes = f"as many tokens ({after}), but not the same" if before == after else f"{shown(before)} tokens, now {after}"
    return f"the text of --data is another, or has changed since: {sizes}"


def _changed_validation(before: bool, after: bool) -> str:
    if before and after:
        return "the text of --validation-data is another, or has changed since"
    with_or_not, one_or_none = ("with", "none") if before else ("without", "one")
    return f"it was made {with_or_not} --validation-data, and this run has {one_or_none}"
