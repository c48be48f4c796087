"""Damage files that the program reads back, in ways that hypothesis draws: they are refused, or read as they were.

    python soak/damage.py [KIND ...] --examples 2000 --seed 1

Kinds: pages (page files of a killed run, between two updates or in one), checkpoint, tokens (a token file), config (a
configuration, a machine and its stored rates). Whatever a file holds, reading it ends within a minute: with one clean
message, or with the right content where checksums protect it. It opens nothing outside the file's directory, and starts
no code, process or connection. A failure is hypothesis's: it prints the smallest damage that fails (`Draw 2: ...`), and
the exception: a Violation, or an error of the program that no user should see; the script then exits with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from offload_trainer.common.errors import TrainerError
from offload_trainer.config import ModelSection, TrainConfig
from offload_trainer.data.rows import Batch, RowReader, split_rows
from offload_trainer.data.tokenfile import TokenFile, write_tokens
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.machine import rate_cache
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import ModelSource, resolve_model, save_model_config
from offload_trainer.offloading.pages.manifest import files_of, read_description, read_newest, refuse_outside
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.run import checkpoint as saved
from offload_trainer.run.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.run.export import finite_weights, opened
from offload_trainer.settings import load_config
from offload_trainer.storage.retention import find_resume
from offload_trainer.telemetry.meters import PhaseClock

SECONDS = 60.0  # time limit for one damaged file
TINY = ["model.overrides.n_layer=1", "model.overrides.n_embd=16", "model.overrides.vocab_size=64"]
TINY += ["model.overrides.n_head=2", "--seq-len", "16", "--micro-batch", "2"]


class Violation(Exception):
    """A file's content had an effect that no content may have."""


@dataclass
class Files:
    """Valid files in a directory of their own, and a function that reads them as a command does."""

    folder: Path
    names: Sequence[str]  # files that are damaged
    use: Callable[[], object]
    others: Mapping[str, Sequence[bytes]] = field(default_factory=dict)  # the same file of other runs and steps
    summed: Sequence[str] = ()  # files with checksums: any change must be noticed
    right: Callable[[Any], bool] = lambda result: True  # True if `use` may return this result
    manifest: str = ""  # holds the checksums of `summed`, which a damage may update
    links: bool = False  # links are followed, since these files belong to the user

    def __post_init__(self) -> None:
        names = dict.fromkeys([*self.names, *([self.manifest] if self.manifest else [])])
        self.whole = {name: (self.folder / name).read_bytes() for name in names}
        self.damages = {name: damages(self.whole[name], self.others.get(name, ())) for name in self.names}

    def restore(self) -> None:
        for name, data in self.whole.items():
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(data)

    def sum_again(self, name: str, data: bytes) -> None:
        """Put the changed file's size and checksum into the manifest."""
        told = json.loads(self.whole[self.manifest])
        told["files"][Path(name).name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        (self.folder / self.manifest).write_text(json.dumps(told))


# -- damage ------------------------------------------------------------------------------------------------------------

PICKLE = b"cos\nsystem\n(S'true'\ntR."
WORDS = [
    b"1e999", b"NaN", b"Infinity", b"9" * 5000, b"1" + b"0" * 90, b"-0", b"1.5", b"true", b"null", b'"', b"[",
    b"]", b"{}", b",", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b'{"a":' * 500, b"\n", b"&a [*a]",
    b"\n? !!python/object/apply:os.system [true]\n: 1\n",
]  # fmt: skip
ODD = [
    2**31, 2**63 - 1, 2**63, 10**30, ".", "..", "/", "../secret", "/etc/passwd", "/proc/self/mem", "a/../../b", "a\0b",
    "\n", "\x1b[2J", "\udcff", "x" * 100_000, "1", "nan", "fp32", [1] * 1000,
]  # fmt: skip
WHAT = {
    "a pickle": PICKLE,
    "nested": b"[" * 100_000,
    "many": b'"a",' * 1_000_000,
    "empty": b"",
    "a huge file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),  # a sparse one
    "nothing": lambda path: None,
    "a directory": os.mkdir,
    "a pipe": os.mkfifo,
    "a link outside": lambda path: os.symlink("../../secret.json", path),
    "a link to itself": lambda path: os.symlink(path.name, path),
    "a link to nothing": lambda path: os.symlink("nothing", path),
    "a link to memory": lambda path: os.symlink("/proc/self/mem", path),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def damages(whole: bytes, others: Sequence[bytes]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return the damages of a file with this content: what `damaged` does to it, and with which arguments."""
    at = st.integers(0, max(0, len(whole.rstrip(b"\0")) - 1))
    size = st.sampled_from([1, 64, 4096, 16384, len(whole)])
    sources = [(whole, at), *((of, st.none()) for of in others)]  # parts of others stay where they were
    kinds = [
        st.tuples(st.just("cut at"), at),
        st.tuples(st.just("flip bits"), st.lists(st.tuples(at, st.integers(0, 7)), min_size=1, max_size=8)),
        st.tuples(st.just("overwrite"), at, st.builds(bytes, size)),
        *(st.builds(_overwrite, st.just(of), at, place, size) for of, place in sources),
        st.tuples(st.just("insert"), at, st.sampled_from(WORDS) | st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("become"), st.sampled_from([*WHAT])),
    ]
    if numbers := _numbers(whole):
        kinds.append(st.tuples(st.just("replace"), st.sampled_from(numbers), st.sampled_from(WORDS)))
    try:
        places = [*_places(json.loads(whole))]
    except ValueError:
        return st.one_of(kinds)
    changes = st.sampled_from(["set", "delete", "rename"])
    return st.one_of(st.one_of(kinds), st.tuples(changes, st.sampled_from(places), VALUES))


def _overwrite(source: bytes, at: int, place: int | None, size: int) -> tuple[Any, ...]:
    place = at if place is None else place
    return "overwrite", at, source[place : place + size]


def damaged(damage: tuple[Any, ...], whole: bytes) -> bytes:
    data = bytearray(whole)
    match damage:
        case "cut at", at:
            del data[at:]
        case "flip bits", bits:
            for at, bit in bits if data else ():
                data[at] ^= 1 << bit
        case "overwrite", at, part:
            data[at : at + len(part)] = part[: len(data) - at]
        case "insert", at, word:
            data[at:at] = word
        case "replace", (start, end), word:
            data[start:end] = word
        case how, (*above, key), value:
            tree = holder = json.loads(whole)
            for step in above:
                holder = holder[step]
            if how == "set":
                holder[key] = value
            elif (held := holder.pop(key)) and how == "rename" and isinstance(holder, dict):
                holder[str(value)] = held
            return json.dumps(tree).encode()
    return bytes(data)


def _numbers(data: bytes) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(rb"(?<![\w.])\d+", data[: 1 << 16])]


def _places(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*above, key)
        yield from _places(inner, *above, key)


# -- reading -----------------------------------------------------------------------------------------------------------


class Watch:
    """An audit hook that notes files opened outside a directory, and what starts code, while a file is read."""

    STARTS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")

    def __init__(self) -> None:
        self.files: Files | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        files = self.files
        if files is None:
            return
        if event in self.STARTS or event == "pickle.find_class":
            self.seen.append(f"{event} {arguments}")
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        self.files = None  # the calls below open nothing of interest
        path = os.fsdecode(arguments[0])
        follows = not (files.links or (arguments[2] or 0) & os.O_NOFOLLOW)
        path = os.path.realpath(path) if follows else os.path.abspath(path)
        code = (sys.prefix, sys.base_prefix, os.path.dirname(sys.modules["offload_trainer"].__path__[0]))
        machine = ("/proc/sys/kernel/random/boot_id", "/sys/devices/system/node/")  # read once by each process
        known = path.startswith((*code, *machine))
        inside = files.folder.resolve()
        if not known and not Path(path).is_relative_to(inside) and not inside.is_relative_to(path):
            self.seen.append(f"open {path}")
        self.files = files


def late(*_: object) -> None:
    raise Violation(f"took more than {SECONDS:g} s")


watch = Watch()


def read_damaged(files: Files, name: str, damage: tuple[Any, ...], *, sum_again: bool) -> str:
    """Damage one file, read it, and restore it; return "refused" or "taken". Raises Violation."""
    path, said = files.folder / name, ""
    try:
        data = WHAT[damage[1]] if damage[0] == "become" else damaged(damage, files.whole[name])
        path.unlink()
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            data(path)
        if sum_again and isinstance(data, bytes):
            files.sum_again(name, data)
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        watch.files, watch.seen = files, []
        result = files.use()
    except TrainerError as error:
        said = str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.files = None
        files.restore()
    if watch.seen:
        raise Violation(watch.seen[0])
    if said:
        if not all(line.isprintable() for line in said.split("\n")) or len(said) > 5000 or said.count("\n") > 12:
            raise Violation(f"not one clean message: {said!r}")
        return "refused"
    if name in files.summed and data != files.whole[name] and not sum_again:
        raise Violation("taken, and its content differs from what its checksums say")
    if not files.right(result):
        raise Violation("taken, and what was read is not what was written")
    return "taken"


def search(files: Files, *, examples: int, number: int) -> Counter[str]:
    """Let hypothesis damage the files in so many ways; return the counts of outcomes. Raises what a damage led to."""
    found = Counter[str]()
    files.use()  # the unchanged files are taken, and late imports happen now

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    @given(st.data())
    def damage_one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(files.names))
        damage = data.draw(files.damages[name])
        # mostly, since a checksum would reject every change otherwise
        again = bool(files.manifest) and name != files.manifest and data.draw(st.sampled_from([True, True, False]))
        found[read_damaged(files, name, damage, sum_again=again)] += 1

    damage_one()
    return found


# -- kinds -------------------------------------------------------------------------------------------------------------


def _engine_of(folder: Path, *words: str) -> tuple[TrainConfig, ModelSource, Callable[..., TieredEngine]]:
    """Keep a small model's configuration in `folder`/model; return how a run with these words builds its engine."""
    (folder / "model").mkdir(parents=True)
    config = load_config([*TINY, "--engine", "tiered", "placement.threads=1", *words])
    source = resolve_model(config.model, seed=0)
    save_model_config(source, folder / "model", dtype=torch.bfloat16, end_of_text=0)
    plan = make_plan(config, source.shape, probe_machine(config.placement, output=str(folder)))
    given = {"placement": plan.placement, "sizes": plan.sizes}
    return config, source, partial(TieredEngine, source, plan.work, config.optim, **given)


def pages(folder: Path) -> Files:
    """Create page files of a run that was killed after step 3, and those of its other steps and of another run.

    An update writes copies of pages that the record of the step before does not name. A run that was killed in an
    update therefore leaves the page files of step 3 with parts of step 4's.
    """
    lease, drive = folder / "run-0000dead", folder / "drive"
    for path in (lease, drive):
        path.mkdir(parents=True)
    state = ["--optimizer", "nvme", "--ram-fraction", "0", "tiered.state_copies=2", "tiered.page_size=8192"]
    _, _, build = _engine_of(folder, "model.overrides.vocab_size=8192", *state, "--nvme", str(drive))

    def engine(*, new: bool) -> TieredEngine:
        ours = build(drives=[lease], load_weights=new)
        ours.offloaded.enable_manifest(model=folder / "model")
        return ours

    def content(engine: TieredEngine) -> str:
        with tempfile.TemporaryDirectory(dir=lease) as place:
            snapshot = engine.snapshot()
            snapshot.write(Path(place))
            snapshot.close()
            saved = sorted(Path(place).rglob("*.safetensors"))
            assert saved
            return hashlib.sha256(b"".join(path.read_bytes() for path in saved)).hexdigest()

    names, kept, right = ("store.json", "record", "state"), {}, {}
    for run in ("another", "this"):
        if run == "this":
            for path in lease.iterdir():
                path.unlink()
        ours = engine(new=True)
        for step in range(1, 5):
            tokens = torch.full((2, 17), step) if run == "this" else torch.full((2, 17), 9)
            batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], seed=step)
            ours.train_step([batch], lr=1e-2, clock=PhaseClock())
            ours.commit({"step": step, "tokens": 32 * step, "data_position": 2 * step})
            ours.synchronize()
            kept[run, step] = {name: (lease / name).read_bytes() for name in names}
            if run == "this" and step in (2, 3):  # a start may find either
                right[step] = content(ours)
        ours.close()
    killed = kept["this", 3]
    for name, data in killed.items():
        (lease / name).write_bytes(data)

    def resume() -> tuple[int, str]:
        manifest = read_description(lease)
        try:
            refuse_outside(lease, manifest)
            files_of(manifest)
            if json.loads((lease / "store.json").read_text()) != json.loads(killed["store.json"]):
                raise ValueError("their layout differs from this run's")
            newest = read_newest(manifest)
            if newest is None or newest.train is None or newest.engine is None:
                raise ValueError("the run was killed before it completed a step")
        except (ValueError, OSError) as error:  # a start gives them as one message (run/resume.py)
            raise TrainerError(str(error)) from error
        ours = engine(new=False)
        try:
            ours.offloaded.resume_from_pages(newest.engine, *newest.pages)
            return newest.train["step"], content(ours)
        finally:
            ours.close()

    others = [("this", 2), ("this", 4), ("another", 3)]
    return Files(
        lease,
        names,
        resume,
        others={name: [kept[other][name] for other in others] for name in names},
        right=lambda result: result[1] == right.get(result[0]),
    )


def checkpoint(folder: Path) -> Files:
    """Create the second checkpoint of a run with a one-layer model, which is resumed from and exported."""
    config, source, build = _engine_of(folder)
    engine = build(drives=[])
    layout = {w.name: {"shape": list(w.shape), "trained": w.trainable} for w in source.shape.weights}
    packages = {"torch": torch.__version__, "bitsandbytes": None}
    run = {"config": config.model_dump(mode="json"), "environment": {"packages": packages}}
    identity = {"seed": 0, "text": None, "tokens": 99}
    record = RunRecord(identity=identity, layout=layout, run=run, model=folder / "model")
    root = folder / "checkpoints"
    with Checkpoints(root, record=record, keep=2, need_bytes=10, say=lambda _: None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(engine, TrainState(step=step, tokens=64 * step, data_position=4 * step))
    _write_tokens(folder / "t.bin", 400, vocabulary=64)
    tokens = TokenFile.open(folder / "t.bin")

    def resume_and_export() -> None:
        found = find_resume("auto", output=folder)
        assert found is not None, "started anew"
        with saved.reading(found):
            saved.check_resume(found, record)
        engine.load(found)
        state = saved.read_state(found)
        rows = split_rows(len(tokens), seq_len=16, validation=0.0).train
        reader = RowReader(tokens, rows=rows, seq_len=16, vocabulary=64, seed=0, shuffle=True)
        next(iter(reader.train_batches(state.data_position, micro_batch=2)))
        with opened(folder) as weights:
            for _ in finite_weights(weights):
                pass

    step = "checkpoints/step-00000002"
    held = [f"{step}/{path.name}" for path in sorted((folder / step).iterdir()) if path.is_file()]
    summed = [name for name in held if not name.endswith("MANIFEST.json")]
    return Files(folder, held, resume_and_export, summed=summed, manifest=f"{step}/MANIFEST.json")


def _write_tokens(path: Path, tokens: int, *, vocabulary: int) -> None:
    ids = [number % (vocabulary - 12) for number in range(tokens)]
    write_tokens(path, [ids], tokenizer="0123456789abcdef", vocabulary=vocabulary, end_of_text=1)


def tokens(folder: Path) -> Files:
    """Create a token file of two blocks, with its sidecar."""
    _write_tokens(folder / "t.bin", 600_000, vocabulary=512)

    def use() -> None:
        held = TokenFile.open(folder / "t.bin")
        with held.file:
            held.read(0, len(held))
            held.largest_id()

    return Files(folder, ["t.bin", "t.bin.json"], use=use, summed=["t.bin"], links=True)


def config(folder: Path) -> Files:
    """Create a configuration, and a machine's description and stored rates, from which a plan is made."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("model: {name: gpt2}\nplacement: {nvme: [/mnt/a]}\ntrain:\n  steps: 30\n")
    machine = read_machine("v100-32gb")
    (folder / "profile.json").write_text(json.dumps(asdict(machine)))
    os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder)
    rate_cache.keep_rates(machine)
    shape = resolve_model(ModelSection(name="gpt2"), seed=0).shape

    def use() -> None:
        os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder)
        load_config([str(folder / "run.yaml")])
        planned = load_config(["--model", "gpt2", "--nvme", machine.drives[0].directory])
        for found in (rate_cache.with_cached_rates(machine), read_machine(str(folder / "profile.json"))):
            assert all(note.isprintable() for note in found.notes), found.notes
            plan = make_plan(planned, shape, found)
            plan.describe(full=True)
            json.dumps(plan.to_json())

    return Files(folder, ["run.yaml", "machine.json", "profile.json"], use=use, links=True)


KINDS: dict[str, Callable[[Path], Files]] = {
    "pages": pages,
    "checkpoint": checkpoint,
    "tokens": tokens,
    "config": config,
}


def made(kind: str, place: Path) -> Files:
    """Create a kind's valid files below `place`, and a file outside them that links and names may try to reach."""
    (place / "secret.json").write_text('{"secret": 1}')
    (place / "kinds").mkdir()
    return KINDS[kind](place / "kinds" / kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all where none is named")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    wish = parser.parse_args()
    for kind in wish.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="damage-") as place:
            files, begun = made(kind, Path(place)), time.monotonic()
            found = search(files, examples=wish.examples, number=wish.seed)
            told = f"{found['refused']} refused, {found['taken']} taken"
            print(f"{kind}: {found.total()} damaged files: {told}; {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
