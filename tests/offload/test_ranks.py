"""Tests of the tiered engine on several ranks: it has one rank's bits, and reports why it ends."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dead_run_files import stored_masters
from engine_bench import DROPOUT, engine, model_directory
from forked_ranks import in_ranks, start_ranks
from placements import ALL_ON_DRIVES, BEHIND, FIRST, ON, digest, hold_up, record_kept
from rank_cases import Case, Result, assert_no_open_port, run_ranks

from offload_trainer import cli, ranks
from offload_trainer.common.errors import LOST, PeerFailed, TrainerError
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.optim import state_files

pytestmark = pytest.mark.usefixtures("nothing_is_small")

AWAY = (*ALL_ON_DRIVES, "tiered.state_copies=2")
HALF = ("--optimizer", "nvme", "--ram-fraction", "0.5")
GATHERED = ("--params", "cpu", "tiered.weight_transfer=all_gather")
STORED = ('model.freeze=["h.1.mlp","wpe"]', "optim.moment_dtype=8bit")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # model, words
    "half, inputs away": ("gpt2", ("--params", "gpu", *HALF, ON, "model.offload_activations=true")),
    "half, 8-bit, frozen": ("gpt2", ("--params", "gpu", *HALF, *STORED)),
    "half, bf16 masters": ("gpt2", ("--params", "gpu", *HALF, "optim.master_dtype=bf16")),
    "experts": ("mixtral", ("--params", "cpu", "--dtype", "fp32", BEHIND)),
    "experts on the drive": ("mixtral", (*AWAY, BEHIND)),
    "gathered": ("gpt2", (*GATHERED, BEHIND)),
    "gathered, layers are dropped": ("opt", (*GATHERED, BEHIND, "--dtype", "fp32")),
    "all on the drive, inputs away": ("qwen3", (*ALL_ON_DRIVES, ON, "model.offload_activations=true")),
    "gathered, in two buffers": ("qwen3", (*GATHERED, ON, "tiered.weight_buffers=2")),
    "Muon": ("gpt2", (*HALF, "optim.name=muon", "--dtype", "fp32", "optim.max_grad_norm=0.3")),
}
RESUMED = ("half, 8-bit, frozen", "half, bf16 masters", "experts on the drive", "Muon")
ON_NODES = ("half, inputs away", "gathered", *RESUMED)  # also run on two nodes
MODELS: dict[str, dict[str, Any]] = {"gpt2": DROPOUT, "mixtral": {}, "opt": {}, "qwen3": {"tied": False}}
MICRO = 12  # micro-batches of a step on all ranks together


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    models = {name: model_directory(folder / name, name, **changes) for name, changes in MODELS.items()}
    shared = {"steps": 2, "micro": MICRO, "drives": (folder / "drive",)}
    return {
        name: Case(models[model], words, folder, meanwhile=int(name in RESUMED), evaluate="gathered" in name, **shared)
        for name, (model, words) in CASES.items()
    }


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], folder: Path) -> dict[str, list[Result]]:
    first = on_ranks(cases, 1, folder / "first")
    return first | on_ranks(resumed(cases, folder / "first"), 1, folder / "on")


def on_ranks(cases: dict[str, Case], count: int, folder: Path, *, nodes: int = 1) -> dict[str, list[Result]]:
    """Run the cases on `count` ranks, and save each one's state in a directory of `folder`."""
    shared = ("--accumulate", str(MICRO // count))
    made = [replace(case, words=(*case.words, *shared), out=folder / name) for name, case in cases.items()]
    return dict(zip(cases, run_ranks(made, count=count, folder=folder / "ranks", nodes=nodes), strict=True))


def resumed(cases: dict[str, Case], folder: Path) -> dict[str, Case]:
    """Return two more steps from the states that cases of `RESUMED` have saved in directories of `folder`."""
    return {f"{name}, resumed": replace(cases[name], load=folder / name, skip=2, meanwhile=0) for name in RESUMED}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (4, 2)])
def test_ranks_have_the_bits_of_one(
    count: int, nodes: int, cases: dict[str, Case], alone: dict[str, list[Result]], folder: Path, tmp_path: Path
) -> None:
    """Losses, norms, evaluations, masters and saved states match one rank's, also where ranks need different units."""
    chosen = {name: case for name, case in cases.items() if nodes == 1 or name in ON_NODES}
    found = on_ranks(chosen | resumed(cases, folder / "first"), count, tmp_path, nodes=nodes)
    for name, of_ranks in found.items():
        assert of_ranks == alone[name] * count, name
    assert {"fixed.safetensors", "exp_avg_sq_scales.safetensors"} < found["half, 8-bit, frozen"][0].files.keys()


# -- updates that begin before the step is decided --------------------------------------------------------------------

FULL = ("tiered.overlap=backward", "tiered.weight_buffers=2")
ON_DRIVES = {
    "weights on the device": ("--params", "gpu", "--optimizer", "nvme"),
    "a third in RAM": ("--params", "cpu", "--optimizer", "nvme", "--ram-fraction", "0.3"),
    "all on the drive": AWAY,
}
PIPELINE = "parallel.pipeline=3"
LATE = 3  # updates that rank 0 is late to record
PLANTED = (3, 5, 6)  # steps, counted from 0, whose last micro-batch has NaN in its last gradient


@dataclass(frozen=True)
class Speculated:
    result: Result
    kept: list[tuple[int, int]]  # numbers of pages kept and of all pages updated, for each speculative step
    # On rank 0, recorded steps and digests of the masters that the record names, computed twice: when the record has
    # been written, and before the next one is.
    read: list[tuple[int, str]]


def speculate(cases: Sequence[Case]) -> list[Speculated]:
    """Train the cases as a rank whose updates begin early; the last rank is late to roll back, rank 0 to record."""
    patch, (rank, world), undo = pytest.MonkeyPatch(), ranks.place_here(), Updater._undo
    patch.setattr(state_files, "INITIAL_SCALE", 2.0**20)  # the first steps in fp16 overflow
    patch.setattr(TieredEngine, "_as_expected", True)
    late = 0.2 if rank == world - 1 > 0 else 0.0
    patch.setattr(Updater, "_undo", lambda *given: (time.sleep(late), undo(*given)))
    kept, read, found = record_kept(patch), list[tuple[int, str]](), []

    @contextmanager
    def build(model: Path, *words: str, **more: Any) -> Iterator[Any]:
        with engine(model, *words, shadows=0.6, **more) as made:
            hold_up(made)
            plant_in_last(made, accumulate=int(words[words.index("--accumulate") + 1]))
            store = made.offloaded.store
            if rank == 0 and store.copies.count == 2 and all(page.home >= 0 for page in store.pages):
                record_late(made, model, read)
            yield made

    for case in cases:
        found.append(Speculated(case.run(build), [*kept], [*read]))
        kept.clear()
        read.clear()
    return found


def plant_in_last(ours: Any, *, accumulate: int) -> None:
    """Plant the NaN in the last micro-batch of all ranks."""
    calls = count()

    def last(gradient: torch.Tensor) -> torch.Tensor:
        step, number = divmod(next(calls), accumulate)
        ours_is_last = number * ours.world + ours.rank == accumulate * ours.world - 1
        return gradient.fill_(float("nan")) if step in PLANTED and ours_is_last else gradient

    ours.offloaded.parameters[FIRST][0].register_hook(last)


def record_late(ours: Any, model: Path, read: list[tuple[int, str]]) -> None:
    """Record updates as a run does, the first ones late; read what a record names, and again before the next one."""
    ours.offloaded.enable_manifest(model=model)
    manifest = ours.offloaded.manifest
    note, directory = manifest.note, ours.offloaded._drives.directories[0]

    def read_masters() -> None:
        if found := stored_masters(directory):
            step, held = found
            read.append((step, digest(held[name] for name in sorted(held))))

    def noted(step: int, *, updating: bool) -> None:
        if not updating:
            time.sleep(0.5 if step <= LATE else 0.0)
            read_masters()
        note(step, updating=updating)
        if not updating:
            manifest.commit(step, {})
            read_masters()

    manifest.note = noted


def run(
    folder: Path, words: tuple[str, ...], *, count: int, nodes: int = 1, tied: bool = True, **size: int
) -> list[Speculated]:
    """Train one case, whose steps have `micro` micro-batches on all ranks; return what each rank has seen."""
    name = f"{len([*folder.iterdir()])}"
    model = model_directory(folder / f"model {tied}", "gpt2", tied=tied, **DROPOUT)
    case = Case(model, words, folder / name, **size, drives=(folder / "drive",))
    together = count if PIPELINE in words else 1  # ranks that compute the same micro-batches
    case = replace(case, words=(*words, "--accumulate", str(case.micro * together // count)))
    found = in_ranks(speculate, [case], count=count, nodes=nodes, folder=folder / f"{name} ranks")
    return [of_rank for (of_rank,) in found]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (4, 2)])
def test_steps_are_one_ranks(count: int, nodes: int, tmp_path: Path) -> None:
    """bf16 with dropout, norms on both sides of the limit, and three steps with NaN in one rank's last gradient."""
    limit = 1.5
    train, words = partial(run, tmp_path, steps=8, micro=count), ("--dtype", "bf16", f"optim.max_grad_norm={limit}")
    (alone,) = train((*ON_DRIVES["a third in RAM"], *words, "tiered.overlap=off"), count=1)
    norms = [norm for _, norm in alone.result.steps]
    assert [step for step, norm in enumerate(norms) if norm is None] == list(PLANTED)
    clipped = [norm > limit for norm in norms if norm is not None]
    assert set(clipped) == {True, False}
    for home in ON_DRIVES.values():
        for rank in train((*home, *words, *FULL), count=count, nodes=nodes):
            assert rank.result == alone.result, home
            assert len(rank.kept) == len(clipped)
            for was, (counted, done) in zip(clipped, rank.kept, strict=True):
                assert counted == (0 if was else done)
                assert done


@pytest.mark.slow
@pytest.mark.parametrize(("count", "more"), [(2, ()), (3, (PIPELINE,))])
def test_no_rank_overwrites_what_the_last_record_names(count: int, more: tuple[str, ...], tmp_path: Path) -> None:
    """Rank 0 is late to record a step; what its record names is unchanged, and is what one rank computes."""
    words, steps = (*AWAY, *FULL, "--ram-fraction", "0", "--dtype", "bf16", "optim.max_grad_norm=0"), LATE + 1
    train = partial(run, tmp_path, steps=steps, micro=2, tied=False)
    first, *_ = train((*words, *more), count=count)
    (alone,) = train(words, count=1)
    assert len(first.kept) == LATE
    assert [step for step, _ in alone.read] == sorted([*range(1, steps), *range(1, steps - 1)])
    assert first.read == alone.read


# -- ranks that are lost -----------------------------------------------------------------------------------------------


class EndsSlowly:
    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(1)


def train_with(fault: str) -> None:
    """Run as a rank whose command has a fault instead of training."""
    ranks.UNANSWERED = 2
    cli.COMMANDS["train"] = replace(cli.COMMANDS["train"], run=partial(meet, fault))
    sys.exit(cli.main(["train"]))


def meet(fault: str, *_: Any) -> None:
    rank, _ = ranks.place_here()
    ranks.wait_for_all()
    assert_no_open_port()
    if fault.startswith("stops"):
        ranks.end_if_rank_vanishes(say=lambda line: print(f"offload-train: {line}", flush=True))
        if fault.endswith(str(rank)):
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.wait_for_all()
    if fault == "dies":
        ranks._GONE = 1.0
        ranks.end_if_rank_vanishes(say=print)
        group, values = ranks.group_of(), torch.zeros(1 << 28, dtype=torch.uint8)
        wait = group.begin([(0, values)], []) if rank else group.begin([], [(1, values)])
        if rank:  # this rank dies in the middle of the message
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        wait()
    if fault == "leaves":
        group = ranks.group_of()
        threading.Thread(target=wait_in, args=(group,), daemon=True).start() if rank else None
        sys.ending = EndsSlowly() if rank else None  # type: ignore[attr-defined]
        time.sleep(0.5 if rank else 0.8)  # rank 0 closes its connections while rank 1 ends
        return
    if fault == "watches":
        ranks._BEAT = 0.005
        ranks.end_if_rank_vanishes(say=print)
        time.sleep(0.1)
        ranks._close_all()  # also runs at the interpreter's end, as threads that enter gloo then may abort the process
        assert not any(thread.name == "ranks" for thread in threading.enumerate())
        with pytest.raises(PeerFailed, match="this rank ends"):
            ranks.wait_for_all()
        return
    if fault.startswith("stalls"):
        ranks.STALLED = ranks._LATER = 1
        time.sleep(600 * fault.endswith(str(rank)))
        ranks.exchange_numbers(0, group=ranks.everybody())
    if rank:
        raise TrainerError("the disk is full")
    ranks.wait_for_all()


def wait_in(group: ranks.Group) -> None:
    with suppress(TrainerError):
        group.all_gather_numbers(0)


NO_ANSWER = "no answer from rank {} for 2 s, and the run ends. The same command resumes"
ENDS = {  # exit codes of the two ranks, and a part of what each says
    "stalls 0": ((-9, 1), ("", "after 1 s another rank has not come .*Rank 0")),
    "stalls 1": ((1, -9), ("after 1 s another rank has not come .*Rank 1", "")),
    "ends": ((LOST, 1), ("", "^the disk is full$")),
    "dies": ((LOST, -9), ("", "")),
    "leaves": ((0, 0), ("", "")),
    "watches": ((0, 0), ("", "")),
    "stops 0": ((-9, 1), ("", f"^{NO_ANSWER.format(0)}$")),
    "stops 1": ((1, -9), (f"^{NO_ANSWER.format(1)}$", "")),
}


@pytest.mark.parametrize("fault", ENDS)
def test_a_rank_that_is_lost_ends_the_others(fault: str, tmp_path: Path) -> None:
    """A rank that fails reports its reason, and the others stay silent; a rank that stalls or is stopped is named."""
    forks = start_ranks(train_with, fault, count=2, folder=tmp_path)
    left = int(fault.endswith(" 0"))
    codes = {left: forks[left].wait(300)}
    if fault not in ("ends", "dies", "leaves", "watches"):
        forks[1 - left].send_signal(9)
    codes[1 - left] = forks[1 - left].wait(300)
    printed = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    expected, texts = ENDS[fault]
    assert (codes[0], codes[1]) == expected, printed
    for text, wanted in zip(printed, texts, strict=True):
        said = re.findall("^offload-train: (.*)", text, re.MULTILINE)
        assert len(said) == bool(wanted), text
        assert re.search(wanted, "".join(said)), text


def test_a_message_of_another_size_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the receiver, which gloo alone would not raise, and its tensor is unchanged."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()

    def connect(rank: int) -> ranks.Group:
        return ranks._connect("both", [0, 1], patience=0.5, rank=rank, store=store)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(connect, range(2))
        assert [*threads.map(lambda group: group.all_gather_json(group.rank), (first, second))] == [[0, 1]] * 2
    received = torch.zeros(4)
    wait = first.begin([(1, torch.ones(3))], [])
    with pytest.raises(PeerFailed):
        second.begin([], [(0, received)])()
    with pytest.raises(PeerFailed):
        wait()
    assert not received.any()


def test_values_between_ranks_are_json() -> None:
    """A value without a JSON form is an error for its sender; a malformed message is an error for its receiver."""
    told = ranks.to_json({"nan": float("nan"), "inf": float("-inf"), "tuple": (1, 2), "path": Path("/a")})
    assert str(ranks._decode(told, dict)) == "{'nan': nan, 'inf': -inf, 'tuple': [1, 2], 'path': '/a'}"
    with pytest.raises(ValueError, match="object"):
        ranks.to_json(object())
    for wrong in (b"cos\nsystem\n(S'true'\ntR.", b"[1, 2", b"\xff", b"[" * 100_000):
        with pytest.raises(TrainerError, match="cannot read"):
            ranks._decode(wrong, list)
