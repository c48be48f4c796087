"""Checkpoints: directories that are either whole or not there.

    checkpoints/step-00000100/
        MANIFEST.json      written last: format, step, what the state belongs to, every file's bytes and CRC-32
        state.json         TrainState
        *.safetensors      masters and moments by name (engine/state.py)
        engine.json        Adam's step count, the loss scale

A checkpoint is written under a temporary name, synced, and renamed; the oldest go only after that.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer import __version__
from offload_trainer.engine.protocol import Engine
from offload_trainer.engine.ranks import gather, wait_for_all
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.tiers.durable import exchange, sync_directory, write_text
from offload_trainer.units import format_bytes

FORMAT = 1
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class TrainState:
    """Where a run stands between two steps. Plain JSON."""

    step: int  # steps done
    tokens: int  # trained on, all ranks
    data_position: int  # rows consumed, all ranks
    random: tuple[str, ...] = ()  # each rank's generators, base64


def random_state() -> str:
    """This process's torch generators, the device's behind the CPU's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return ",".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def restore_random_state(text: str) -> None:
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split(",")]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


# -- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    engine: Engine, state: TrainState, root: Path, *, identity: dict[str, Any], keep: int, need_bytes: int
) -> Path:
    """Write ``root/step-N`` and remove the oldest beyond `keep`. All ranks call it; rank 0 writes.

    `identity` says what the state belongs to (seed, data, ...) and is compared at resume. `need_bytes` is the size
    to expect. Raises TrainerError, the older checkpoints untouched, where the disk is too full.
    """
    first = engine.rank == 0
    final = root / f"step-{state.step:08d}"
    temporary = root / f".{final.name}.tmp"
    if first:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".step-*"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(root).free
        if free < need_bytes:
            raise TrainerError(
                f"{root}: a checkpoint takes {format_bytes(need_bytes)} and {format_bytes(free)} are free; "
                "older checkpoints are untouched. Free space there, or set --save-every 0"
            )
        temporary.mkdir()
    try:
        _write(engine, state, temporary, final, identity=identity)
    except BaseException as error:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise TrainerError(
                f"{final} could not be written: {error.strerror or error}; older checkpoints are untouched. Free space "
                "there, and the same command goes on from the newest of them"
            ) from error
        raise
    if first:
        for old in complete_checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    wait_for_all()
    return final


def _write(engine: Engine, state: TrainState, temporary: Path, final: Path, *, identity: dict[str, Any]) -> None:
    """All files into `temporary`, the manifest last, then the name."""
    states = gather(random_state())
    wait_for_all()
    files = engine.save(temporary)
    if engine.rank != 0:
        return
    write_text(temporary / "state.json", json.dumps(asdict(state) | {"random": states}, indent=1))
    for name in ("state.json", "engine.json"):
        data = (temporary / name).read_bytes()
        files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest = {
        "format": FORMAT,
        "offload_trainer": __version__,
        "torch": torch.__version__,
        "step": state.step,
        "identity": identity,
        "files": files,
    }
    write_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    _put_in_place(temporary, final)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Give it its name, also over a checkpoint of the same step: at no moment is there none."""
    if not final.exists():
        os.rename(temporary, final)
    elif exchange(temporary, final):
        shutil.rmtree(temporary)
    else:
        replaced = final.with_name(f".{final.name}.replaced")
        os.rename(final, replaced)
        os.rename(temporary, final)
        shutil.rmtree(replaced)
    sync_directory(final.parent)


# -- reading ---------------------------------------------------------------------------------------------------------


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints with a manifest, the oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def find_resume(wish: str, *, output: Path) -> Path | None:
    """The checkpoint that `--resume` means, or None to start anew. UserError if it names none."""
    if wish == "never":
        return None
    if wish == "auto":
        found = complete_checkpoints(output / "checkpoints")
        return found[-1] if found else None
    return find_checkpoint(Path(wish))


def find_checkpoint(path: Path) -> Path:
    """`path` if it is a checkpoint, or the newest one of the run that it is."""
    if (path / MANIFEST).exists():
        return path
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    if not found:
        raise UserError(f"{path}: neither a checkpoint ({MANIFEST}) nor a run directory that holds one")
    return found[-1]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, its files checked against it: existence, size and CRC-32.

    Raises UserError with the file and the number that does not match, and the checkpoint before it, if any.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files: dict[str, dict[str, int]] = manifest["files"]
        if manifest["format"] != FORMAT:
            raise UserError(f"{checkpoint}: written in format {manifest['format']}, this version reads {FORMAT}")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damaged(checkpoint, f"{MANIFEST} cannot be read ({error})") from error
    for name, expected in files.items():
        path = checkpoint / name
        if path.parent != checkpoint:
            raise _damaged(checkpoint, f"the manifest names {name}, which lies outside")
        if not path.exists():
            raise _damaged(checkpoint, f"{name} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(checkpoint, f"{name} has {size} bytes, the manifest says {expected['bytes']}")
        crc = _crc32(path)
        if crc != expected["crc32"]:
            raise _damaged(checkpoint, f"{name} has CRC-32 {crc}, the manifest says {expected['crc32']}")
    return manifest


def _damaged(checkpoint: Path, what: str) -> UserError:
    earlier = [path for path in complete_checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    offer = f"; the one before it: --resume {earlier[-1]}" if earlier else "; --resume never starts anew"
    return UserError(f"{checkpoint} is damaged: {what}{offer}")


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def check_resume(checkpoint: Path, identity: dict[str, Any]) -> None:
    """UserError if the checkpoint is damaged, or belongs to another seed, data or shape. Writes nothing."""
    _compare(read_manifest(checkpoint)["identity"], identity, checkpoint=checkpoint)


def load_checkpoint(engine: Engine, checkpoint: Path) -> TrainState:
    """Set the engine and this rank's generators to a checkpoint that was checked. All ranks call it."""
    fields = json.loads((checkpoint / "state.json").read_text())
    state = TrainState(**fields | {"random": tuple(fields["random"])})
    engine.load(checkpoint)
    # With another number of ranks there is no generator for each; then they only matter for dropout.
    if len(state.random) == engine.world:
        restore_random_state(state.random[engine.rank])
    return state


def _compare(saved: dict[str, Any], now: dict[str, Any], *, checkpoint: Path) -> None:
    differs = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if differs:
        told = "\n".join(f"  {key}: it has {saved.get(key)}, this run {now.get(key)}" for key in differs)
        raise UserError(
            f"{checkpoint} belongs to another run:\n{told}\nUse its values, another --output, or --resume never"
        )
