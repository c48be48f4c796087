"""Corrupt files that the program reads back, in many ways, and check that reading them is safe.

    python soak/fuzz_files.py --each 2000 --seed 1 [KIND ...]

Whatever a file contains, the program accepts it or rejects it with a clean message, opens nothing outside the file's
directory, and uses only seconds of CPU time and limited memory. Kinds: manifest, run, state, store, sidecar, machine,
index.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_kinds import KINDS, Kind

from offload_trainer.errors import TrainerError
from offload_trainer.storage.owned_dirs import scratch

SECONDS = 20.0  # CPU seconds for one file, so that a busy machine does not matter
HANGING = 600.0  # elapsed seconds for one file, since waiting uses no CPU time
MEMORY = 1 << 30  # bytes above the initial peak
NOBODY = 65534
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 0.5, 1e308, -1e-320, float("nan"),
    float("inf"), "", "x", ".", "..", "/", "../secret", "/etc/passwd", "/proc/self/mem", "a/../../b", "a\0b", "\n",
    "\x1b[2J", "\udcff", "é" * 300, "x" * 100_000, "1", "nan", "fp32", [], {}, [[]], [None], {"": None}, [1] * 1000,
    {"a": {"b": {"c": []}}},
]  # fmt: skip
WORDS = [
    b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"9" * 5000, b"-" + b"9" * 400, b"1" + b"0" * 90, b"-0",
    b"1.5", b"0x10", b"true", b"null", b'"', b"[" * 2000, b"{}", b'{"a":' * 500,
]  # fmt: skip


class Violation(Exception):
    """A broken guarantee, and the file that broke it."""


# -- mutations: each takes the file's path and a random generator, and changes the file in place -----------------------


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8) if data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.choice([0, 1, draw.randint(0, len(data)), max(0, len(data) - 1)])])


def insert(path: Path, draw: random.Random) -> None:
    data, place = path.read_bytes(), draw.random()
    at = int(place * len(data))
    new = draw.choice([*WORDS, b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b",", b"]", b"}", b"\xef\xbb\xbf"])
    path.write_bytes(data[:at] + new + data[at:])


def number(path: Path, draw: random.Random) -> None:
    """Replace one number with another word."""
    data = path.read_bytes()
    places = [i for i in range(1, len(data)) if data[i : i + 1].isdigit() and not data[i - 1 : i].isalnum()]
    if places:
        start = draw.choice(places)
        end = next((i for i in range(start, len(data)) if not data[i : i + 1].isdigit()), len(data))
        path.write_bytes(data[:start] + draw.choice(WORDS) + data[end:])


def odd(draw: random.Random) -> Any:
    """Return a copy of a random odd value, since it may be mutated again."""
    return copy.deepcopy(draw.choice(ODD))


def tree(path: Path, draw: random.Random) -> None:
    """Replace, delete, rename or duplicate one to three places of the JSON tree."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            value = odd(draw)
            break
        holder, key = draw.choice(places)
        _change(holder, key, draw)
    text = json.dumps(value)
    path.write_text(text)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield value, key
        yield from _places(inner)


def _change(holder: Any, key: Any, draw: random.Random) -> None:
    kind = draw.choice(["odd", "odd", "odd", "gone", "named", "more", "near", "swapped"])
    held = holder[key]
    if kind == "gone":
        del holder[key]
    elif kind == "named" and isinstance(holder, dict):
        holder[str(odd(draw))[:300]] = holder.pop(key)
    elif kind == "more" and isinstance(holder, dict):
        holder[str(odd(draw))[:300]] = odd(draw)
    elif kind == "more":
        holder.append(odd(draw))
    elif kind == "near" and isinstance(held, (int, float)):
        holder[key] = draw.choice([held + 1, held - 1, -held, held * 2, held * 4096, str(held), [held], bool(held)])
    elif kind == "swapped":
        other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], held
    else:
        holder[key] = odd(draw)


def twice(path: Path, draw: random.Random) -> None:
    """Duplicate the first key of the first object."""
    data = path.read_bytes()
    first = data.find(b"{")
    end = data.find(b":", first)
    if 0 <= first < end:
        key, value = data[first + 1 : end], draw.choice([b": 1,", b": null,"])
        path.write_bytes(data[: first + 1] + key + value + data[first + 1 :])


def deep(path: Path, draw: random.Random) -> None:
    times = draw.choice([60, 70, 990, 1100, 100_000])
    begin, end = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    path.write_bytes(begin * times + b"1" + end * (times if draw.random() < 0.5 else 0))


def large(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        os.truncate(path, 1 << draw.choice([27, 40]))  # a sparse file
    else:
        path.write_bytes(draw.choice([b" ", b"[", b"[],", b'"a",', b"1,"]) * draw.choice([10**5, 10**6]))


def encoded(path: Path, draw: random.Random) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    path.write_bytes(text.encode(draw.choice(["utf-16", "utf-8-sig", "utf-32", "utf-7"])))


def other_kind(path: Path, draw: random.Random) -> None:
    """Remove the file, or replace it with something that is not a regular file."""
    path.unlink()
    kind = draw.choice(["gone", "directory", "pipe", "link outside", "link to itself", "link to nothing", "memory"])
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        targets = {"link outside": SECRET, "link to itself": path.name, "link to nothing": "nothing"}
        path.symlink_to(targets.get(kind, "/proc/self/mem"))


def unreadable(path: Path, draw: random.Random) -> None:
    """Make the file, or its directory, unreadable for everyone but root."""
    (path if draw.random() < 0.5 else path.parent).chmod(0)


SECRET = "../../secret.json"  # an irrelevant file outside the directory
MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    flip, cut, insert, number, number, tree, tree, tree, tree, tree, tree, twice, deep, large, encoded, other_kind,
    unreadable,
]  # fmt: skip


# -- one file after another --------------------------------------------------------------------------------------------


class Watch:
    """An audit hook that records every file opened outside the directory while it is active."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.links = False  # links inside the directory may lead out of it
        self.outside: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None or event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        inside, self.inside = self.inside, None  # the calls below open nothing of interest
        named = os.fsdecode(arguments[0])
        path = os.path.abspath(named) if self.links else os.path.realpath(named)
        code = (sys.prefix, sys.base_prefix, os.path.dirname(sys.modules["offload_trainer"].__path__[0]))
        known = path.startswith(code) or path == "/proc/sys/kernel/random/boot_id"
        if not known and not Path(path).is_relative_to(inside):
            self.outside.append(path)
        self.inside = inside


@contextmanager
def bounded() -> Iterator[None]:
    """Raise Violation after SECONDS of CPU time, or HANGING elapsed seconds."""
    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS, f"took more than {SECONDS:.0f} s of CPU time"),
        (signal.SIGALRM, signal.ITIMER_REAL, HANGING, f"waited for more than {HANGING:.0f} s"),
    )
    with ExitStack() as stack:
        for number, timer, seconds, told in limits:
            stack.callback(signal.signal, number, signal.signal(number, partial(_late, told)))
            signal.setitimer(timer, seconds)
            stack.callback(signal.setitimer, timer, 0)
        yield


def _late(told: str, *_: object) -> None:
    raise Violation(told)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run without root's permission to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def fuzz_one(kind: Kind, draw: random.Random, watch: Watch) -> str:
    """Change one file, read it, and restore it; return "taken" or "refused". Raises Violation."""
    name = draw.choice(kind.files)
    path = kind.folder / name
    mutation = draw.choice(MUTATIONS)
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    mutation(path, draw)
    kind.synchronize(name, draw)
    said = ""
    try:
        with bounded(), as_nobody() if mutation is unreadable else bounded():
            watch.inside, watch.links = kind.folder.resolve(), kind.links
            kind.use()
    except TrainerError as error:
        said = str(error)
    except Violation as error:
        raise Violation(f"{name}, {mutation.__name__}: {error}") from error
    except BaseException as error:
        raise Violation(f"{name}, {mutation.__name__}: {type(error).__name__}: {error}") from error
    finally:
        watch.inside = None
        path.parent.chmod(mode)
        kind.restore()
    if watch.outside:
        raise Violation(f"{name}, {mutation.__name__}: opened {watch.outside.pop()}")
    if not all(line.isprintable() for line in said.split("\n")) or len(said) > 5000 or said.count("\n") > 12:
        raise Violation(f"{name}, {mutation.__name__}: not one clean line: {said!r}")
    return "refused" if said else "taken"


def made(name: str, place: Path) -> Kind:
    """Create a kind's valid files below `place`, and a file outside them that links and names may try to reach."""
    (place / "secret.json").write_text('{"secret": 1}')
    return KINDS[name](place / "kinds" / name)


def fuzz(kind: Kind, *, each: int, seed: int, watch: Watch) -> tuple[Counter[str], list[str]]:
    """Fuzz `each` files of a kind, drawn from the seed; return counts of outcomes, and the violations."""
    came: Counter[str] = Counter()
    wrong = []
    kind.use()  # The unchanged files are accepted, and late imports happen now.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(each):
        try:
            came[fuzz_one(kind, random.Random(f"{seed} {kind.name} {index}"), watch)] += 1
        except Violation as error:
            watch.outside.clear()
            wrong.append(f"{kind.name} {index}: {error}")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > MEMORY:
        wrong.append(f"{kind.name}: {grown} bytes of memory more than before")
    return came, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all where none is named")
    parser.add_argument("--each", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    wish = parser.parse_args()
    watch, found = Watch(), []
    for name in wish.kinds or KINDS:
        with scratch("fuzz-") as place:
            place.chmod(0o755)
            start = time.perf_counter()
            came, wrong = fuzz(made(name, place), each=wish.each, seed=wish.seed, watch=watch)
            seconds = time.perf_counter() - start
        found += wrong
        told = f"{came['refused']} refused, {came['taken']} taken, {len(wrong)} wrong; {seconds:.0f} s"
        print(f"{name}: {sum(came.values()) + len(wrong)} files: {told}", flush=True)
        print("".join(f"  {line[:500]}\n" for line in wrong[:40]), end="", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
