"""Resolution of the data paths that a user names to files; unsuitable files are refused with what to do."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload_trainer.data.decompress import PACKED, kind_of, refuse_without_library
from offload_trainer.data.hub import HUB, hub_files
from offload_trainer.data.tables import TABLES
from offload_trainer.errors import UserError
from offload_trainer.safe_files import file_bytes, one_line, open_given, parsed

BUILTIN_CORPUS = Path(__file__).parent / "builtin" / "corpus.txt"
TEXT_SUFFIXES = (".txt", ".md", ".jsonl")  # also when compressed
_HEAD = 1 << 16  # bytes by which a file's format is judged

_LINES = 'python -c "import csv, json, sys; [print(json.dumps(row)) for row in {rows}]" < FILE > data.jsonl'
_TABLE = "convert the table to lines of JSON: "
_UNPACK = "decompress it"
_NAMED = "it is compressed: give it a name that shows its kind, such as NAME.txt{0} or NAME.jsonl{0}; or decompress it"
_REFUSED = {
    ".json": f"JSON is read line by line. Convert an array to lines with {_LINES.format(rows='json.load(sys.stdin)')}; "
    "if each of its lines is an object already, rename it to .jsonl",
    ".ndjson": "rename it to .jsonl",
    ".csv": _TABLE + _LINES.format(rows="csv.DictReader(sys.stdin)"),
    ".tsv": _TABLE + _LINES.format(rows="csv.DictReader(sys.stdin, dialect='excel-tab')"),
    ".parquet": "rename it to .parquet",
    ".arrow": "rename it to .arrow",
    **{packing: _NAMED.format(packing) for packing in PACKED},
    ".zip": _UNPACK,
    ".tar": _UNPACK,
    ".pdf": "extract its text: pdftotext FILE data.txt",
    ".docx": "save it as text",
    ".npy": "write its ids alone: numpy.load('FILE').tofile('ids.bin')",
}
_MAGIC = {
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\xfd7zXZ": ".xz",
    b"BZh": ".bz2",
    b"PK\x03\x04": ".zip",
    b"%PDF-": ".pdf",
    b"\x93NUMPY": ".npy",
}


def find_sources(paths: Sequence[str], *, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Return the files for `paths`: in the given order, a directory's files sorted by path.

    ``builtin`` is the text that ships with the package. A directory stands for its .txt, .md and .jsonl files, also
    compressed, and its tables (.parquet, .arrow), at any depth. Hidden files and linked directories are skipped. A
    directory written by `datasets` stands for the files that it lists, and ``hub:NAME`` for those that are downloaded.
    A file that is named itself may have any suffix except that of another format. Either all are text, or all are
    ``.bin`` token files. A path that is named twice is read twice.

    Raises UserError for paths that do not exist (naming all of them), a directory without text, .bin files mixed with
    text, and a file that is not text.
    """
    if not paths:
        raise UserError(
            "data.path is empty: name a text file, a jsonl file, a table, a directory, a .bin file, or builtin"
        )
    named = [found for path in paths for found in _named(path)]
    if missing := [str(path) for path in named if not os.path.exists(path)]:
        raise UserError(f"no such file or directory: {', '.join(missing)}; {_hub(missing[0])}")
    sources = []
    for path in named:
        if path.is_dir():
            sources += _text_files(path, say=say)
        else:
            _refuse_other(path)
            sources.append(path)
    for source in sources:
        refuse_without_library(source)
    token_files = [str(file) for file in sources if file.suffix == ".bin"]
    if token_files and len(sources) > len(token_files):
        raise UserError(
            f"{len(sources)} files were given, but {', '.join(token_files[:5])} among them holds tokens: "
            "give only .bin files, or only text"
        )
    return sources


def _named(path: str) -> tuple[Path, ...]:
    if path.startswith(HUB):
        return hub_files(path)
    return (BUILTIN_CORPUS if path == "builtin" else Path(path).expanduser(),)


def _hub(name: str) -> str:
    """Return advice for a path that does not exist; it may be meant as the name of a data set on the hub."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).parent.exists():
        return f"correct the path; for a dataset of the hub use --data hub:{name}"
    return "correct the path"


def is_read(path: Path) -> bool:
    """Return whether files of this name in a directory are read."""
    return kind_of(path) in TEXT_SUFFIXES or path.suffix.lower() in TABLES


def _saved_by_datasets(directory: Path) -> list[Path] | None:
    """Return the files of a directory written by `save_to_disk`, in their order, or None for any other directory."""
    if (directory / "dataset_dict.json").is_file():
        splits = _object_in(directory / "dataset_dict.json").get("splits")
        told = " or ".join(f"--data {printable(directory / str(name))}" for name in splits or ["SPLIT"])
        raise UserError(f"{directory} holds several datasets: choose one, {told}")
    if not (directory / "state.json").is_file() or not (directory / "dataset_info.json").is_file():
        return None
    named = _object_in(directory / "state.json").get("_data_files") or []
    files = [str(one["filename"]) for one in named if isinstance(one, dict) and "filename" in one]
    if not files or any(Path(name).name != name for name in files):
        raise UserError(f"{directory / 'state.json'} names no files of a dataset; save it again with save_to_disk")
    if missing := [name for name in files if not (directory / name).is_file()]:
        raise UserError(
            f"{directory / missing[0]} does not exist, but {directory / 'state.json'} names it; copy it again"
        )
    return [directory / name for name in files]


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError for anything else."""
    try:
        return parsed(file_bytes(path, links=True), dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _text_files(directory: Path, *, say: Callable[[str], None]) -> list[Path]:
    """Return a directory's text files, sorted by their path inside it."""
    if (saved := _saved_by_datasets(directory)) is not None:
        return saved
    inside = [
        path
        for path in sorted(directory.rglob("*"))
        if not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    if linked := [str(path) for path in inside if path.is_symlink() and path.is_dir()]:
        say(f"note: {len(linked)} linked directories are not followed ({_first(linked)}); name them too if wanted")
    if other := [
        str(path) for path in inside if path.suffix.lower() in _REFUSED and not is_read(path) and path.is_file()
    ]:
        say(f"note: {len(other)} files in {directory} are not read ({_first(other)}); name one to see why")
    files = [path for path in inside if is_read(path) and path.is_file()]
    if not files:
        token_files = sorted(str(file) for file in directory.glob("*.bin"))
        flags = " ".join(f"--data {printable(name)}" for name in token_files[:3]) + " ..." * (len(token_files) > 3)
        hint = f"name the token files themselves, in their order: {flags}" if token_files else "correct the path"
        raise UserError(f"{directory} holds no {', '.join((*TEXT_SUFFIXES, *TABLES))} file: {hint}")
    return files


def printable(path: Path | str) -> str:
    """Return a path for a message, escaped if it has unprintable characters, which could control a terminal."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def _first(names: list[str]) -> str:
    return ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")


def _refuse_other(path: Path) -> None:
    """Raise UserError if a named file is not text, or is in a form that is not meant to be trained on."""
    suffix = path.suffix.lower()
    if suffix == ".bin":
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: a pipe or a device can be read only once: write the text into a file")
        with open_given(path) as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), suffix)
    as_named = is_read(path) and kind in (suffix, *TABLES * (suffix in TABLES))
    if kind in _REFUSED and not as_named:
        raise UserError(f"{path}: {_REFUSED[kind].replace('FILE', str(path))}")
    if is_read(path):
        return
    if b"\0" in head:
        raise UserError(f"{path}: holds zero bytes, so it is not UTF-8 text (UTF-16? a binary file?); convert it")
    if _is_json_object(head.partition(b"\n")[0]):
        raise UserError(
            f"{path}: its first line is a JSON object; rename it to .jsonl, or to .txt to train on it as it is"
        )


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
