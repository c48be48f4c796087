"""Resolution of the data paths that a user names to files; unsuitable files are refused with what to do.

docs/data.md has the rules, also for directories with the splits of a data set. Of one of the hub, the downloaded Arrow
files are read.
"""

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from offload_trainer.common.errors import UserError
from offload_trainer.common.packages import is_installed, lacks
from offload_trainer.common.safe_files import file_bytes, one_line, open_given, parsed, parsed_yaml
from offload_trainer.config import STREAM
from offload_trainer.data.documents import COMPRESSED, RECORDS, TABLES, holds_records, kind_of, printable

BUILTIN_CORPUS = Path(__file__).parent / "builtin" / "corpus.txt"
TEXT_SUFFIXES = (".txt", ".md", *RECORDS)  # also when compressed
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.\[\]%:+-]+))?")

# The split that a word in the name of a file or folder means to `datasets`
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_CARD = "README.md"
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.\w+")  # one of several files, by its name
# Licences, what `datasets` writes next to its data, and descriptions of token files
_ABOUT = re.compile(
    r"(licen[cs]e|notice|citation)\.(txt|md)|(config|state|dataset_(infos?|dict)|.*\.bin)\.json|cache-\w+\.arrow", re.I
)


def find_sources(
    paths: Sequence[str], *, say: Callable[[str], None] = lambda _: None, validation: bool = False
) -> list[Path]:
    """Return the files for `paths`: in the given order, a directory's files sorted by path.

    A directory stands for its files of text and tables, at any depth. If it has the splits of a data set, it stands for
    the train split, or with `validation` for the validation split, or else the test split. A stream of the hub has no
    files. `say` receives notes on files that are left out, and on numbered ones that are missing.

    Raises UserError for paths that do not exist (naming all of them), a directory without text or without the split
    among its splits, .bin files mixed with text, and a file that is not text.
    """
    if not paths:
        raise UserError("data.path is empty: name a text file, lines of JSON, a table, a directory, a .bin or builtin")
    refuse_missing_files(paths)
    sources: list[Path] = []
    for entry in paths:
        path = Path(entry.removeprefix(STREAM)).expanduser()
        if entry.startswith("hub:"):
            sources += hub_files(entry)
        elif entry == "builtin":
            sources.append(BUILTIN_CORPUS)
        elif path.is_dir():
            sources += _files_inside(path, ("validation", "test") if validation else ("train",), say=say)
        elif path.exists():
            _refuse_other(path)
            sources.append(path)
        elif re.match(f"{STREAM}[/.~]", entry) or entry.count("/") > 2:
            raise UserError(f"{entry}: no such file or directory; correct the path, or name stream:OWNER/NAME")
        else:
            hub_name(entry)
    packed = [str(source) for source in sources if source.suffix.lower() in (*TABLES, ".zst")]
    if packed and not is_installed("pyarrow"):
        raise UserError(lacks(packed[0], "pyarrow"))
    other = [str(file) for file in sources if not holds_records(file)]
    if other and paths[0].startswith(STREAM):
        raise UserError(f"{paths[0]}: a stream is read from JSON, CSV or tables, and {other[0]} is none of them")
    bin_files = [str(file) for file in sources if file.suffix == ".bin"]
    if bin_files and len(sources) > len(bin_files):
        raise UserError(f"{', '.join(bin_files[:5])} holds tokens, and others text: give only .bin files, or only text")
    return sources


def refuse_missing_files(paths: Sequence[str]) -> None:
    """Raise UserError for entries of data.path that are neither there nor names of something else."""
    files = [entry for entry in paths if entry != "builtin" and not entry.startswith(("hub:", STREAM))]
    named = [str(Path(entry).expanduser()) for entry in files]
    if missing := [path for path in named if not os.path.exists(path)]:
        fix, name = "correct the path", missing[0]
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).parent.exists():
            fix += f"; for a dataset of the hub use --data hub:{name}"
        raise UserError(f"no such file or directory: {', '.join(missing)}; {fix}")


@cache
def hub_files(entry: str) -> tuple[Path, ...]:
    """Return the files in `datasets`' cache that hold the split, downloaded if needed, or raise UserError."""
    name = hub_name(entry)[0]
    try:
        loaded = load_from_hub(entry)
    except Exception as error:  # the hub, the network and the content fail in many ways, all for the user to fix
        raise UserError(
            f"{entry} could not be loaded: {one_line(error)}. Check the name, configuration, split and network, or "
            f"download it elsewhere with hf download --repo-type dataset {name} --local-dir data, then --data data"
        ) from error
    return tuple(Path(one["filename"]) for one in loaded.cache_files)


def load_from_hub(entry: str, *, streaming: bool = False) -> Any:
    """Return a dataset of the hub as `datasets` loads it, downloaded unless it is `streaming`."""
    name, configuration, split = hub_name(entry)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets

    return datasets.load_dataset(name, configuration, split=split or "train", streaming=streaming)


def hub_name(entry: str) -> tuple[str, str | None, str | None]:
    """Return name, configuration and split of a dataset of the hub. Raises UserError if it is written otherwise."""
    prefix, _, written = entry.partition(":")
    found = _HUB_NAME.fullmatch(written)
    if found is None:
        raise UserError(f"{entry}: a dataset is written {prefix}:OWNER/NAME, with /CONFIGURATION and :SPLIT if several")
    if not is_installed("datasets"):
        raise UserError(lacks(entry, "datasets"))
    name, configuration, split = found.groups()
    return name, configuration, split


def _is_read(path: Path) -> bool:
    return kind_of(path) in TEXT_SUFFIXES or path.suffix.lower() in TABLES


def _files_inside(directory: Path, wanted: Sequence[str], *, say: Callable[[str], None]) -> list[Path]:
    """Return a directory's files of text and tables, sorted by path; of several splits the first of `wanted`."""

    def first(paths: list[Path]) -> str:
        names = [printable(path.relative_to(directory)) for path in paths[:3]]
        return ", ".join(names) + (", ..." if len(paths) > 3 else "")

    inside = [path for path in sorted(directory.rglob("*")) if "/." not in f"/{path.relative_to(directory)}"]
    if linked := [path for path in inside if path.is_symlink() and path.is_dir()]:
        say(f"note: {len(linked)} linked directories in {directory} are not followed ({first(linked)}); name them too")
    known = [path for path in inside if path.is_file()]
    files = [path for path in known if _is_read(path) and not _ABOUT.fullmatch(path.name)]
    listed = {folder: _data_files(folder) for folder in {path.parent for path in files}}
    files = [path for path in files if not listed[path.parent] or path.name in listed[path.parent]]
    front = _front_matter(directory / _CARD)
    has_records = any(map(holds_records, files))  # a README.md next to them describes them; others may be the text
    files = [path for path in files if path.name != _CARD or not (has_records or (front and path == directory / _CARD))]
    if not files:
        token_files = sorted(str(file) for file in directory.glob("*.bin"))
        flags = " ".join(f"--data {printable(name)}" for name in token_files[:3]) + " ..." * (len(token_files) > 3)
        hint = f"name the token files themselves, in their order: {flags}" if token_files else "correct the path"
        raise UserError(f"{directory} holds no {', '.join((*TEXT_SUFFIXES, *TABLES))} file: {hint}")
    split, chosen = _configured(directory, front, files, wanted)
    if not chosen:
        texts = [path for path in files if not holds_records(path)]
        if texts:
            files = [path for path in files if path in texts or kind_of(path) not in (".json", ".csv", ".tsv")]
        saved = (directory / "dataset_dict.json").is_file()  # `datasets` saved it, with a folder for each split
        splits = {path: path.parent.name if saved else _split_of(path.relative_to(directory)) for path in files}
        if not front and not all(splits[path] for path in texts):  # pages and chapters may have such names too
            splits |= dict.fromkeys(texts, "")
        named = set(splits.values())
        if "train" not in named:
            wanted = (*wanted, "")  # files that are named like no split
        split = next(filter(named.__contains__, wanted), None)
        chosen = [path for path in files if splits[path] == split]
    if not chosen:
        there = " and ".join(sorted(named - {""}))
        raise UserError(
            f"{directory} holds no {' or '.join(filter(None, wanted))} split, only files named {there} "
            f"({first(files)}): name the files themselves to read them"
        )
    shards = Counter(found.groups() for found in map(_SHARD.fullmatch, map(str, chosen)) if found)
    for (name, count), number in shards.items():
        if number < int(count):
            say(f"note: only {number} of the {int(count)} files {printable(name)}-*-of-{count} are there")
    taken = set(chosen)
    if left := [path for path in known if path not in taken and not _ABOUT.fullmatch(path.name)]:
        what = f", the {split} split" if split else ""
        say(
            f"data: {directory}: {len(chosen)} of {len(known)} files are read{what} ({first(chosen)}), and not "
            f"{first(left)}; name one of those to read it too, with --data or --validation-data"
        )
    return chosen


def _data_files(folder: Path) -> set[str]:
    """Return the names of the files that `datasets` lists for a data set that it saved in a folder."""
    try:
        state = parsed(file_bytes(folder / "state.json", links=True), dict[str, Any])
    except (FileNotFoundError, ValueError):
        return set()
    return {str(one.get("filename")) for one in state.get("_data_files") or () if isinstance(one, dict)}


def _split_of(path: Path) -> str:
    words = [word.lower() for part in path.parts for word in re.split(r"[-._ 0-9]+", part)]
    # a data set's text is never in .md
    return "" if kind_of(path) == ".md" else next((_SPLITS[word] for word in words if word in _SPLITS), "")


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        found = re.match(rb"---\s*\n(.*?\n)---\s", file_bytes(card, links=True), re.DOTALL)
        front = parsed_yaml(found[1]) if found else None
    except (FileNotFoundError, ValueError):
        return {}
    return front if isinstance(front, dict) else {}


def _configured(
    directory: Path, front: dict[str, Any], files: list[Path], wanted: Sequence[str]
) -> tuple[str | None, list[Path]]:
    """Return the first of the `wanted` splits that a card names in its default configuration, and those of its `files`.

    Returns none if the card names none. Raises UserError if it leaves a choice, and if no file that it names is there.
    """

    def refuse(what: str, names: Iterable[object]) -> NoReturn:
        listing = ", ".join(printable(str(name)) for name in [*names][:20])
        raise UserError(f"{directory / _CARD} lists {what} {listing}: name the files or the folder to train on instead")

    listed = front["configs"] if isinstance(front.get("configs"), list) else []
    configs = {str(one.get("config_name", "default")): one for one in listed if isinstance(one, dict)}
    default = [one for name, one in configs.items() if one.get("default") or name == "default"] or [*configs.values()]
    named = default[0].get("data_files") if len(default) == 1 else None
    if len(configs) > 1 and not named:
        refuse("the configurations", configs)
    if isinstance(named, list) and all(isinstance(one, dict) for one in named):
        named = {str(one.get("split")): one.get("path") for one in named}
    if not named:
        return None, []
    splits = named if isinstance(named, dict) else {"train": named}
    split = next(filter(splits.__contains__, wanted), "")
    if not split:
        refuse("the splits", splits)
    patterns = splits[split] if isinstance(splits[split], list) else [splits[split]]
    found = {directory / path for one in patterns for path in glob.glob(str(one), root_dir=directory, recursive=True)}
    chosen = [path for path in files if path in found]
    if not chosen:
        refuse(f"as its {split} split, of which no text or table is there,", patterns)
    return split, chosen


def _refuse_other(path: Path) -> None:
    """Raise UserError if a named file is not text, or is in a form that is not meant to be trained on."""
    suffix = path.suffix.lower()
    if suffix == ".bin":
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: a pipe or a device can be read only once: write the text into a file")
        with open_given(path) as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    is_packed = suffix in (*TABLES, *COMPRESSED)
    is_text = not head.startswith(b"%PDF-") and (_is_read(path) or b"\0" not in head)  # readers name what is not UTF-8
    if not (_is_read(path) if is_packed else is_text):
        raise UserError(
            f"{path}: neither UTF-8 text nor what its name says. Convert it, decompress it, or give it a name that "
            f"shows its kind: {', '.join(TEXT_SUFFIXES)}, these compressed (NAME.jsonl"
            f"{suffix if is_packed else '.gz'}), {', '.join(TABLES)}, or .bin for ids of tokens"
        )
    if not _is_read(path) and re.match(rb'\s*\{\s*"', head):
        raise UserError(
            f"{path}: its first line is a JSON object; rename it to .jsonl, or to .txt to train on it as it is"
        )
