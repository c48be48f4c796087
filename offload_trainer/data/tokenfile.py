"""Token files: ``NAME.bin`` (little-endian ids without a header, as nanoGPT's) and NAME.bin.json, which describes them.

The sidecar is written last, so after a kill a pair is either complete or has no sidecar; the next writer removes the
scratch directory that is left. Ids are read with pread: truncation of a mapped file kills the process silently.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import Field

from offload_trainer.common import safe_files
from offload_trainer.common.errors import RERUN_HINT, TrainerError, UserError, reason
from offload_trainer.common.units import format_bytes
from offload_trainer.storage import owned_dirs
from offload_trainer.storage.atomic_io import sync_directory, write_bytes
from offload_trainer.storage.owned_dirs import MODE, open_owned

BLOCK = 1 << 20  # bytes covered by one CRC-32
# Marks in the upper bits of an id in a file of rows of conversations (packing.py)
NOT_LEARNED = 1 << 31
BEGINS = 1 << 30  # a conversation or the padding begins here
IDS = BEGINS - 1

_SCAN_TOKENS = 1 << 24
_SCRATCH = "offload-trainer-tokens-"
_ELSEWHERE = "Delete both it and its sidecar, or use another cache with data.cache=DIR"


def sidecar_path(path: Path) -> Path:
    """Return the sidecar's path: ``NAME.bin`` -> ``NAME.bin.json``."""
    return path.with_name(path.name + ".json")


def cached(path: Path) -> TokenFile | None:
    """Open a token file of the cache, if its writer has finished it: the sidecar is written last."""
    there = [one for one in (path, sidecar_path(path)) if safe_files.is_there(one)]
    for one in there:  # a single one of another user could not be replaced at the end
        _opened(one, owned=True).close()
    return TokenFile.open(path, owned=True) if len(there) == 2 else None


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Ids of uint16 or uint32 in a file. An attribute that the sidecar does not state is None."""

    path: Path
    file: BinaryIO
    dtype: np.dtype
    tokens: int
    sums: tuple[int, ...]  # CRC-32 of each BLOCK bytes, from the sidecar or computed when the file was opened
    tokenizer: str | None = None  # fingerprint
    vocabulary: int | None = None
    end_of_text: int | None = None
    row_length: int | None = None  # if set, the file holds rows of this many marked ids (packing.py)
    packed: bool = False  # a row may hold several conversations, which do not attend to each other
    summary: str | None = None  # statistics of the conversations in it
    _checked: set[int] = field(default_factory=set, repr=False)  # blocks whose CRC-32 has been checked

    def __len__(self) -> int:
        return self.tokens

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @classmethod
    def open(cls, path: Path, *, owned: bool = False) -> TokenFile:
        """Open a token file. If its sidecar has no checksums, all of it is read once.

        Raises UserError for a missing or unreadable sidecar and a size that it does not say, and for an `owned` file,
        one of the cache, unless it is this user's (storage/owned_dirs.py).
        """
        sidecar = sidecar_path(path)
        stated = stated_facts(path, owned=owned)
        file = _opened(path, owned=owned)
        size = os.fstat(file.fileno()).st_size
        if not stated:
            raise UserError(
                f"{path} does not say how wide its ids are. For raw ids of 16 bits, without a header, write "
                f'{{"dtype": "uint16", "tokens": {size // 2}}} into {sidecar}; for those of 32 bits "uint32" and '
                f"{size // 4}"
            )
        dtype, count, sums = np.dtype(stated.pop("dtype")), stated.pop("tokens"), tuple(stated.pop("crc32"))
        if size == 0 or size % dtype.itemsize:
            raise UserError(f"{path}: {size} bytes are not a whole number of {dtype} ids; create the file again")
        if count != size // dtype.itemsize:
            raise UserError(
                f"{path}: {sidecar.name} says {count} {dtype} ids, and the file holds {size // dtype.itemsize} "
                f"({size} bytes); delete both and create them again"
            )
        found = cls(path, file, dtype.newbyteorder("<"), count, sums, **stated)
        if sums:
            return found
        blocks = (found._bytes(at, min(BLOCK, size - at)) for at in range(0, size, BLOCK))
        return replace(found, sums=tuple(map(zlib.crc32, blocks)))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from `start` on, in the file's dtype.

        Raises TrainerError if the file was truncated since it was opened, or its bytes do not match their CRC-32.
        """
        assert 0 <= start <= start + count <= self.tokens, (start, count, self.tokens)
        first, last = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        for block in range(first // BLOCK, -(-last // BLOCK)):
            if block in self._checked:
                continue
            at = block * BLOCK
            crc = zlib.crc32(self._bytes(at, min(BLOCK, self.tokens * self.dtype.itemsize - at)))
            if block >= len(self.sums) or crc != self.sums[block]:
                raise TrainerError(
                    f"{self.path}: the block at byte {at} differs from what was written (CRC-32 {crc}); restore it, or "
                    "in a cache delete the file and its sidecar, and the same command creates them again"
                )
            self._checked.add(block)
        return np.frombuffer(self._bytes(first, last - first), dtype=self.dtype)

    def _bytes(self, start: int, count: int) -> bytes:
        try:
            data = os.pread(self.file.fileno(), count, start)
        except OSError as error:
            raise TrainerError(f"{self.path}: {count} bytes at {start} cannot be read: {error.strerror}") from error
        if len(data) != count:
            size = self.tokens * self.dtype.itemsize
            raise TrainerError(
                f"{self.path}: cut short: {count} bytes at {start} expected, {len(data)} are left of {size} bytes; "
                f"create it again, and {RERUN_HINT}"
            )
        return data

    def largest_id(self) -> int:
        """Return the largest id; reads the whole file, 16 M ids at a time."""
        starts, bits = range(0, self.tokens, _SCAN_TOKENS), IDS if self.row_length else np.iinfo(self.dtype).max
        return max(int((self.read(i, min(_SCAN_TOKENS, self.tokens - i)) & bits).max()) for i in starts)


@dataclass(frozen=True)
class _Sidecar:
    dtype: Literal["uint16", "uint32"]
    tokens: Annotated[safe_files.Count, Field(gt=0)]
    tokenizer: safe_files.Line | None = None
    vocabulary: Annotated[safe_files.Count, Field(gt=0)] | None = None
    end_of_text: safe_files.Count | None = None
    row_length: Annotated[safe_files.Count, Field(gt=0)] | None = None
    packed: bool = False
    summary: safe_files.Line | None = None
    crc32: safe_files.Crc32s = field(default_factory=list)


def stated_facts(path: Path, *, owned: bool = False) -> dict[str, Any]:
    """Return what the sidecar of a token file says; {} without one. Raises UserError if it cannot be read."""
    sidecar = sidecar_path(path)
    if not safe_files.is_there(sidecar):
        return {}
    try:
        content = safe_files.file_bytes(sidecar, links=True, opener=open_owned if owned else None)
        return asdict(safe_files.parsed(content, _Sidecar))
    except (OSError, ValueError) as error:
        fix = _ELSEWHERE if owned else "Correct it, or delete it and its .bin and make them again"
        raise UserError(f"{sidecar} cannot be read: {reason(error)}. {fix}") from error


def _opened(path: Path, *, owned: bool) -> BinaryIO:
    try:
        return open(open_owned(path) if owned else safe_files.open_file(path, links=True), "rb", buffering=0)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there") from error
    except ValueError as error:
        fix = f". {_ELSEWHERE}" if owned else "; a token file is a file of ids"
        raise UserError(f"{path} cannot be read: {error}{fix}") from error


def write_tokens(
    path: Path,
    arrays: Iterable[Sequence[int] | np.ndarray],
    *,
    vocabulary: int,
    row_length: int | None = None,
    summary: Callable[[], str | None] = lambda: None,
    **stated: Any,
) -> None:
    """Write a token file and its sidecar with the `stated` facts. If `arrays` raises, no file is left.

    Ids are below `vocabulary`; with `row_length` they are in rows of that length, and marked in their upper bits.
    `summary` is called at the end for the sidecar's statistics. Raises TrainerError, with the free space, if the drive
    refuses, and UserError if nothing can be written there.
    """
    # the narrower one that holds the ids; rows have marks in the upper bits
    dtype: Any = np.dtype("<u4" if row_length or vocabulary > 1 << 16 else "<u2")
    folder, tokens, sums, block = path.parent, 0, list[int](), b""  # block: bytes not yet covered by a CRC-32
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f".{_SCRATCH}*"):
                with contextlib.suppress(OSError, TrainerError):  # it is gone, its writer lives, or another user's
                    owned_dirs.remove_dead(left, what=owned_dirs.SCRATCH)
            made = stack.enter_context(owned_dirs.scratch(f".{_SCRATCH}", directory=folder)) / "ids"
            file = stack.enter_context(open(made, "xb", buffering=0, opener=partial(os.open, mode=MODE)))
        except OSError as error:
            raise UserError(
                f"cannot write in {folder}: {error.strerror}; choose another directory with data.cache=DIR"
            ) from error
        try:
            for ids in arrays:
                data = memoryview(np.asarray(ids, dtype=dtype).tobytes())
                tokens += len(ids)
                block += data
                while data:
                    data = data[file.write(data) :]
                while len(block) >= BLOCK:
                    sums.append(zlib.crc32(block[:BLOCK]))
                    block = block[BLOCK:]
            sums += [zlib.crc32(block)] if block else []  # one for each MiB
            stated |= {"vocabulary": vocabulary, "row_length": row_length, "summary": summary(), "crc32": sums}
            facts = asdict(_Sidecar(dtype.name, tokens, **stated))
            fields = {name: value for name, value in facts.items() if value is not None and value is not False}
            os.fsync(file.fileno())
            _commit(path, made, (json.dumps(fields) + "\n").encode())
        except OSError as error:
            stack.close()  # remove the file first, so that the free space includes it
            size, free = format_bytes(tokens * dtype.itemsize), format_bytes(shutil.disk_usage(folder).free)
            raise TrainerError(
                f"{folder}: tokens could not be written: {reason(error)}. They had {size}, at {dtype.itemsize} bytes a "
                f"token, and there are {free} free now. Free more, or choose another directory with data.cache=DIR"
            ) from error


def _commit(path: Path, ids: Path, content: bytes) -> None:
    """Move the file `ids` to `path`, and then put a sidecar with this content next to it."""
    sidecar = sidecar_path(path)
    # A sidecar with other content must never exist next to the new ids, even for a moment. An equal one may:
    # another process is preparing the same text, and its finished pair must not be lost.
    try:
        is_stale = safe_files.file_bytes(sidecar) != content
    except (OSError, ValueError):
        is_stale = safe_files.is_there(sidecar)
    if is_stale:
        sidecar.unlink()
    os.replace(ids, path)
    write_bytes(ids.with_name("sidecar"), content, mode=MODE)
    os.replace(ids.with_name("sidecar"), sidecar)
    sync_directory(path.parent)
