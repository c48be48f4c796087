"""Check that a checkpoint belongs to a run: compare seed, data and model shape, and describe the differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import shown

_MOST = 10  # lines in a message
_TEXT = ("tokens", "training rows", "text")  # identity keys that all change if the training text changes


def refuse_other_run(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError that lists the differences between a checkpoint's identity, `saved`, and this run's, `now`.

    A value of None on either side means not known and is not compared.
    """
    told = differences(saved, now)
    if told:
        lines = "\n".join(f"  {line}" for line in told[:_MOST])
        more = f"\n  and {len(told) - _MOST} more" if len(told) > _MOST else ""
        raise UserError(
            f"{checkpoint} belongs to another run:\n{lines}{more}\nTo go on, give what it was made with; to begin "
            f"anew, name another --output, or move {checkpoint.parent} away"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference. A changed text gives a single line, although several values change with it."""
    keys = [key for key in {**saved, **now} if _differ(key, saved, now)]
    told = []
    if "tokenizer" in keys:
        keys = [key for key in keys if key not in _TEXT]  # another tokenizer changes all token ids
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
