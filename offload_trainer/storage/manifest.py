"""Read and verify MANIFEST.json: every file of a checkpoint with its size and CRC-32, and the run that wrote it.

It is the last file that `run/checkpoint.py` writes. A run resumes only from a checkpoint of a run with the same seed,
data and model shape.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, FileName, Steps, as_kind, is_there, quoted, read_back
from offload_trainer.storage.atomic_io import StoredFile, crc32_of

FORMAT = 3  # of checkpoints and page files
MANIFEST = "MANIFEST.json"
CONFIG = "config.json"  # identity key: entries of the model's configuration
_MOST = 10  # lines in a message
_TEXT = ("tokens", "training rows", "text")  # identity keys that all change if the training text changes
ENGINE = "engine.json"  # absent from a checkpoint of weights alone
_NEEDED = {"state.json", "run.json", "master.safetensors"}


@dataclass(frozen=True)
class Manifest:
    """Content of a MANIFEST.json. The package versions in the file are informational and not read."""

    format: Count
    step: Steps
    identity: dict[str, Any]
    layout: dict[str, Any]
    files: dict[FileName, StoredFile]


def weights_alone(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds weights without moments, so that no run can resume from it."""
    return not is_there(checkpoint / ENGINE)


def checked_manifest(checkpoint: Path, *, fix: str, moments: bool = True, contents: bool = True) -> Manifest:
    """Return the manifest after checking that every file exists and has the listed size and CRC-32.

    Without `moments`, their files are skipped, without `contents` all. Raises UserError with file, mismatch and `fix`.
    """
    content = read_back(checkpoint / MANIFEST, dict[str, Any], fix=fix)
    if content.get("format") != FORMAT and isinstance(content.get("format"), int):
        raise UserError(f"{checkpoint}: written in format {content['format']}, this version reads {FORMAT}")
    try:
        manifest = as_kind(content, Manifest)
        if contents and (unnamed := _NEEDED - manifest.files.keys()):
            raise ValueError(f"{', '.join(sorted(unnamed))} is not named")
    except ValueError as error:
        raise UserError(f"{checkpoint} is damaged: {MANIFEST}: {error}. {fix}") from error
    if contents and moments and ENGINE not in manifest.files:
        raise UserError(
            f"{checkpoint} holds weights without moments, as --save-every 0 leaves them, so no run can resume from it: "
            f"export it with --dtype fp32, and give that as --model with another --output. {fix}"
        )
    for name, expected in manifest.files.items() if contents else ():
        if (moments or not name.startswith("exp_avg")) and (wrong := _difference(checkpoint, name, expected)):
            raise UserError(f"{checkpoint} is damaged: {wrong}. {fix}")
    return manifest


def _difference(checkpoint: Path, name: str, expected: StoredFile) -> str | None:
    path = checkpoint / name
    try:
        if not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"the manifest names {name}, which lies outside"
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            return f"{name} is not a file"
        if about.st_size != expected.bytes:
            return f"{name} has {about.st_size} bytes, the manifest says {expected.bytes}"
        found = crc32_of(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a cycle of symbolic links
        return f"{name} cannot be read: {getattr(error, 'strerror', error)}"
    return None if found == expected.crc32 else f"{name} has CRC-32 {found}, the manifest says {expected.crc32}"


def refuse_other_run(
    checkpoint: Path, manifest: Manifest, *, identity: Mapping[str, Any], layout: Mapping[str, Any]
) -> None:
    """Raise UserError that lists the `differences` between a checkpoint's identity or layout and this run's."""
    if found := differences(manifest.identity, identity) or differences(manifest.layout, layout):
        lines = "\n".join(f"  {line}" for line in found[:_MOST])
        more = f"\n  and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise UserError(
            f"{checkpoint} belongs to another run:\n{lines}{more}\nTo go on, give what it was made with; to begin "
            f"anew, name another --output, or move {checkpoint.parent} away"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference; a changed text gives a single one. None means not known and is not compared."""
    saved, now = _flat(saved, now), _flat(now, saved)
    unknown = {key for side in (saved, now) for key, value in side.items() if value is None}
    keys = [key for key in {**saved, **now} if key not in unknown and saved.get(key) != now.get(key)]
    lines = []
    if "tokenizer" in keys:
        keys = [key for key in keys if key not in _TEXT]  # another tokenizer changes all token ids
    elif "text" in keys:
        keys = [key for key in keys if key not in _TEXT]
        before, after = saved.get("tokens"), now.get("tokens")
        same = f"as many tokens ({after}), but not the same"
        sizes = same if before == after else f"{quoted(before)} tokens, now {after}"
        lines.append(f"the text of --data is another, or has changed since: {sizes}")
    if (text := "validation text") in keys:
        keys.remove(text)
        lines.append(
            "the text of --validation-data is another, or has changed since; or only one of the two has such a text"
        )
    for key in keys:
        its, ours = (quoted(side[key]) if key in side else "none" for side in (saved, now))
        lines.append(f"{quoted(key)}: it has {its}, this run {ours}")
    return lines


def _flat(side: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with those entries of its model's configuration that the other's transformers has too."""
    configs = [one[CONFIG] if isinstance(one.get(CONFIG), Mapping) else {} for one in (side, other)]
    flat = {f"{CONFIG}'s {key}": value for key, value in configs[0].items() if key in configs[1] and value is not None}
    return {key: value for key, value in side.items() if key != CONFIG} | flat
