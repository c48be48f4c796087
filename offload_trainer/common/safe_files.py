"""Read untrusted files safely: size-limited JSON and YAML, validated against a type, from regular files only.

Every file that the program reads is opened here, because opening a pipe or a device could block forever. A file may
be truncated, from another program, or malicious: the result is a value of the requested type, or one error that names
the file, the problem and the remedy.
"""

import errno
import functools
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar, dataclass_transform

import yaml
from pydantic import AfterValidator, ConfigDict, FailFast, Field, Strict, TypeAdapter, ValidationError, with_config

from offload_trainer.common.errors import UserError, reason

Kind = TypeVar("Kind")

MOST_BYTES = 64 << 20  # a manifest of 100,000 weights has 20 MB
_MOST_DIGITS = 100  # transformers writes a 31-digit number for a tokenizer without a length limit
_MOST_YAML = 1 << 20  # bytes, enough for a configuration that names 10,000 files; parsing this much takes seconds


@dataclass_transform(frozen_default=True)
def exact_record(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen dataclass, which pydantic reads; an unknown key is an error, and ignored in others."""
    return with_config(ConfigDict(extra="forbid"))(dataclass(frozen=True)(kind))


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("text of one line that can be printed")
    return text


def _plain_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError("the name of a file, and it lies outside")
    if not name.isprintable() or len(name) > 1000 or any(len(part.encode()) > 255 for part in parts):
        raise ValueError("the name of a file")
    return name


Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
Steps = Annotated[int, Strict(), Field(ge=0, le=10**9)]
Crc32 = Annotated[int, Strict(), Field(ge=0, lt=1 << 32)]
Crc32s = Annotated[list[Crc32], FailFast()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Line = Annotated[str, Field(max_length=10_000), AfterValidator(_printable)]
FileName = Annotated[str, AfterValidator(_plain_name)]  # relative path without "..", inside its directory


def read_back(path: Path, kind: type[Kind], *, fix: str, links: bool = False) -> Kind:
    """Read the JSON file `path` and return it as a `kind`: a dataclass or any other type that pydantic supports.

    `links`: follow a symbolic link at its end. Raises UserError with the problem and `fix`, which says what to do.
    """
    try:
        return parsed(file_bytes(path, links=links), kind)
    except (FileNotFoundError, ValueError) as error:
        why = "it is not there" if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{quoted(str(path))} cannot be read: {why}. {fix}") from error


def file_bytes(
    path: Path, *, most: int = MOST_BYTES, links: bool = False, opener: Callable[[Path], int] | None = None
) -> bytes:
    """Return the content of a regular file, without ever blocking on a pipe or device.

    Raises ValueError if it is no regular file, cannot be read or has more than `most` bytes, and FileNotFoundError.
    `opener` replaces `open_file`.
    """
    descriptor = opener(path) if opener else open_file(path, links=links)
    try:
        with open(descriptor, "rb") as file:
            if (size := os.fstat(descriptor).st_size) > most:
                raise ValueError(f"it has {size} bytes, and at most {most} are read")
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(error.strerror or "reading failed") from error
    if len(data) > most:
        raise ValueError(f"it has more than the {most} bytes that are read")
    return data


def open_file(path: Path, *, links: bool = False) -> int:
    """Return a descriptor to read a regular file. Raises ValueError for anything else, and FileNotFoundError."""
    try:
        if not links and stat.S_ISLNK(os.lstat(path).st_mode):  # before anything opens it
            raise ValueError("it is a link")
        return open_regular(path, os.O_RDONLY | (0 if links else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be opened") from error


def open_regular(path: Path, flags: int, *, directory: int | None = None) -> int:
    """Open a regular file with flags of open(2), perhaps in the open `directory`, and never block. Raises OSError."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=directory)
    except OSError as error:
        kinds = {errno.EISDIR: "it is a directory", errno.ELOOP: "it is a link"}
        raise OSError(error.errno, kinds.get(error.errno or 0, error.strerror), str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return descriptor


def open_given(path: Path) -> FileIO:
    """Open a file that the user named, unbuffered, following links. Raises UserError if it cannot be read."""
    try:
        return open(open_file(path, links=True), "rb", buffering=0)
    except (OSError, ValueError) as error:
        raise UserError(f"{quoted(str(path))} cannot be read: {reason(error)}") from error


def refuse_pipes(directory: Path) -> None:
    """Raise UserError if a directory holds anything but files and directories: a library could block reading it."""
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise UserError(f"{quoted(str(directory))} cannot be read: {error.strerror}") from error
    for path in paths:
        # a dangling link is neither
        if os.path.exists(path) and not path.is_file() and not path.is_dir():
            raise UserError(f"{quoted(str(path))} is not a regular file; move it away")


def parsed(text: bytes | str, kind: type[Kind]) -> Kind:
    """Parse JSON as a `kind`. Raises ValueError, a one-line message, if it is invalid or of another type.

    Only a typed field refuses NaN and infinities (`Number`), and the last of several equal names counts.
    """
    try:
        return adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(_complaint(error)) from error


def as_kind(value: Any, kind: type[Kind]) -> Kind:
    """Validate a parsed JSON value as a `kind`. Raises ValueError that names the first mismatch."""
    try:
        return adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(_complaint(error)) from error


class LimitedYaml(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, tags and very long numbers, so that values are no larger than the text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused("anchors and aliases (& and *) are not read: write the value where it belongs", event)
        if event.tag is not None:
            raise self._refused(f"tags such as {quoted(event.tag)} are not read", event)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if len(node.value) > _MOST_DIGITS and node.tag.endswith((":int", ":float")):
            raise self._refused(f"a number of {len(node.value)} characters", node)
        return node

    def _refused(self, problem: str, at: Any) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, problem, at.start_mark)


def read_yaml(path: Path, loader: type[LimitedYaml] = LimitedYaml) -> Any:
    """Return the value of a YAML file. Raises ValueError if it cannot be read or parsed, and FileNotFoundError."""
    return parsed_yaml(file_bytes(path, most=_MOST_YAML, links=True), loader)


def parsed_yaml(text: bytes | str, loader: type[LimitedYaml] = LimitedYaml) -> Any:
    """Return the value of a YAML text. Raises ValueError, a one-line message, if it is invalid or beyond the limits."""
    try:
        return yaml.load(text.decode("utf-8") if isinstance(text, bytes) else text, loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example, an invalid date
        raise ValueError(f"not YAML: {one_line(error)}") from error


def is_there(path: Path) -> bool:
    """Return True if the path exists, even as a dangling link.

    Raises UserError if that cannot be determined; treating it as absent would silently skip existing data.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(
            f"{quoted(str(path))} cannot be read: {error.strerror}. Let it be read, or move it away"
        ) from error
    return True


def quoted(value: Any) -> str:
    """Return a value from a file in a form safe for messages: one line, at most 300 characters, no control codes."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def one_line(error: Exception) -> str:
    """Return a library's error message on one line, safe for messages."""
    words = " ".join(str(error).split())[:400]
    return quoted(words) if words else type(error).__name__


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"it is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    where = quoted(".".join(str(part) for part in first["loc"] if part != "[key]")) or "it"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is not known to this version"
    wanted = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{where} should be {wanted}, and is {quoted(repr(first['input']))}"
