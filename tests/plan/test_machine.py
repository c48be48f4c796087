"""Tests of machine profiles: hardware and the links between ranks are probed, timed, stored, and described in files."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from update_ranges import form

from offload_trainer.config import PlacementSection
from offload_trainer.engine import timed_updates
from offload_trainer.engine.timed_updates import TimedUpdate, available_updates, make_pages
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine import bench, rate_cache
from offload_trainer.machine.probe import probe_machine
from offload_trainer.optim.kernel_api import PageUpdate, TorchKernel
from offload_trainer.plan.machine import (
    Latency,
    Links,
    MachineProfile,
    Rate,
    Rates,
    describe_rates,
    layer_key,
    read_machine,
)
from offload_trainer.run import machine_rates, process_setup
from offload_trainer.run.commands.plan import described
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.safe_files import parsed
from offload_trainer.settings import load_config

CLUSTERS = ["4xa100-80gb-100gbe", "4xrtx4090-10gbe", "8xa100-80gb", "8xh100-80gb"]
NAMED = [*CLUSTERS, "a100-40gb", "a100-80gb", "h200", "rtx4090-64gb", "v100-32gb"]


def _a_few(work: Callable[[], object], *, seconds: float, least: int = 3) -> list[float]:
    for _ in range(least):
        work()
    return [0.01] * least


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    """Return this machine's profile, timed with a tiny budget."""
    drive = tmp_path_factory.mktemp("drive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_PIECE", 1 << 20)
        patch.setattr(bench, "_repeat", _a_few)
        return bench.bench_machine(
            probe_machine(PlacementSection(nvme=(str(drive),)), output=str(drive)),
            [TimedUpdate(TorchKernel())],
            dtypes=["fp32"],
            matrices=False,
            budget=bench.Budget(
                drive_bytes=24 << 20,
                contention_seconds=0.2,
                layer_seconds=0,
                update_elements=100_000,
                update_page=32_768,
            ),
            say=lambda line: None,
            layer=bench.LayerSizes((256, 1024, 4096), tokens=32, width=64),
        )


def test_a_bench_times_everything_and_leaves_nothing(timed: MachineProfile) -> None:
    rates = timed.rates
    assert set(rates.matmul) == {"fp32"}
    parts = [*itertools.product(("attention", "values", "loss", "weights"), ("forward", "backward"))]
    assert set(rates.layers) == {layer_key("fp32", *part) for part in [*parts, ("tables", "backward")]}
    assert all(rate.value > 0 for rate in rates.layers.values())
    assert rates.update["torch"].value > 0
    assert "in pages of 0.0328 M" in rates.update["torch"].source
    assert rates.memory
    assert rates.memory.origin == "measured"
    found = timed.drives[0].rates
    assert found
    for name in ("read", "write", "mixed_read", "mixed_write"):
        assert getattr(found, name).value > 0
    assert found.computation_lost
    assert found.computation_lost.value > 0
    assert not list(Path(timed.drives[0].directory, "offload-trainer").glob("run-*"))
    for told in ("computation lost to transfers", "products, fp32", "attention, forward, fp32", "loss, backward, fp32"):
        assert told in describe_rates(timed)


def test_lost_computation_is_what_products_alone_would_have_done_more(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [10**9, 2 * 10**9], 2.0
    for of_product, lost in ((0.0, 2.0), (1e6, 0.002)):
        monkeypatch.setattr(bench, "_repeat", lambda work, seconds, its=of_product: [its])
        begun = threading.Event()
        monkeypatch.setattr(bench.torch, "randn", lambda *shape, its=begun: _Product(its))
        found = bench._computation_lost(lambda its=begun: (its.wait(60), moved)[1], seconds=1.0)
        assert found.value == pytest.approx(3e9 / lost)
        assert "3 GB read and written in 2.0 s" in found.source


class _Product:
    """A matrix whose product says that it has begun."""

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun

    def __matmul__(self, other: object) -> None:
        self.begun.set()


def test_rates_that_are_known_are_not_measured_again(timed: MachineProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_drive", None)
    monkeypatch.setattr(bench, "_triad", None)
    monkeypatch.setattr(bench, "_repeat", _a_few)
    how: dict[str, Any] = {"matrices": False, "budget": bench.Budget(layer_seconds=0), "say": lambda line: None}
    again = bench.bench_machine(timed, [TimedUpdate(TorchKernel())], dtypes=["fp32"], **how)
    assert again == timed
    layer = bench.LayerSizes((8, 8, 8), 8, 64)
    more = bench.bench_machine(timed, [], dtypes=["bf16"], layer=layer, **how)
    assert set(more.rates.matmul) == {"fp32", "bf16"}
    assert more.rates.matmul["fp32"] == timed.rates.matmul["fp32"]


def test_each_form_of_moments_is_timed_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the cache of all tests has compiled kernels
    made = {update.name: update for update in available_updates(say=lambda line: None)}
    assert {"native", "native.bf16", "native.8bit", "torch"} <= set(made)
    pages = make_pages(70_000, page=32_768, format=form("8bit"))
    assert [(page.first, page.grad.numel()) for page in pages] == [(0, 32_768), (32_768, 32_768), (65_536, 4464)]
    for name in ("native", "native.bf16", "native.8bit"):
        kept: list[PageUpdate] = []

        def pages_of(*size: int, kept: list[PageUpdate] = kept, **how: Any) -> list[PageUpdate]:
            kept += make_pages(*size, **how)
            return kept

        monkeypatch.setattr(timed_updates, "make_pages", pages_of)
        step = made[name].begin(70_000, 32_768)
        before = [page.fields["master"].clone() for page in kept]
        step(1)
        for page, old in zip(kept, before, strict=True):  # Every number changes, and none becomes NaN.
            assert (page.fields["master"] != old).float().mean() > 0.99
            assert (page.fields["master"] - old).abs().max() < 1e-3


def test_a_profile_round_trips_through_json(timed: MachineProfile) -> None:
    assert parsed(json.dumps(timed.to_json()), MachineProfile) == timed


def test_cached_rates_are_used_on_the_same_machine_only(
    timed: MachineProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bare = probe_machine(PlacementSection(nvme=(timed.drives[0].directory,)), output=str(tmp_path))
    assert rate_cache.with_cached_rates(bare).rates == Rates()
    rate_cache.keep_rates(timed)
    known = rate_cache.with_cached_rates(bare)
    assert known.rates == timed.rates
    assert known.drives[0].rates == timed.drives[0].rates
    assert rate_cache.with_cached_rates(replace(bare, cores=bare.cores + 1)).rates == Rates()
    boxed = replace(bare, drives=(replace(bare.drives[0], throttle="read_bps_device 254:0 1000"),))
    assert rate_cache.with_cached_rates(boxed).drives[0].rates is None


def test_threads_that_were_not_timed_are_named(
    timed: MachineProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user's program sets no thread count and has all cores; torchrun's ranks have one thread each."""
    machine = replace(probe_machine(PlacementSection(), output=str(tmp_path)), cores=6)
    monkeypatch.setattr(rate_cache.os, "cpu_count", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    rate_cache.keep_rates(replace(machine, rates=timed.rates))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert rate_cache.with_cached_rates(machine).rates == timed.rates
    assert rate_cache.with_cached_rates(machine).notes == ()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = rate_cache.with_cached_rates(machine)
    assert found.rates == Rates()
    (note,) = found.notes
    assert "timed with 6 CPU threads, and is unknown with the 2 used now" in note
    assert "`offload-train bench placement.threads=2`" in note
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    of_rank = replace(machine, cores=3)  # on its own NUMA node
    assert rate_cache.with_cached_rates(of_rank).rates == timed.rates


def test_ratios_of_earlier_runs_add_up_to_one_correction(timed: MachineProfile) -> None:
    rate_cache.keep_rates(timed)
    key = "tiered.update.drive"
    rate_cache.keep_ratios(timed, {key: 1.2})
    # a single run may have shared the machine
    assert rate_cache.with_cached_rates(timed).rates.corrections == {key: 1.0}
    rate_cache.keep_ratios(timed, {key: 1.2})
    twice = rate_cache.with_cached_rates(timed)
    assert twice.rates.corrections == {key: 1.2}
    # The second run was planned with 1.2 and measured as planned, so the true ratio is still 1.2. One run that shares
    # the machine changes nothing.
    rate_cache.keep_ratios(twice, {key: 1.0})
    rate_cache.keep_ratios(twice, {key: 3.0})
    assert rate_cache.with_cached_rates(timed).rates.corrections == {key: pytest.approx(1.2)}
    rate_cache.cache_file().write_text("{torn")
    assert rate_cache.with_cached_rates(timed).rates == Rates()


def test_named_machines() -> None:
    for name in NAMED:
        machine = read_machine(name)
        assert machine.gpu
        assert machine.drives[0].rates
        every = [*machine.rates.matmul.values(), *machine.rates.update.values(), machine.rates.to_device]
        every += [machine.rates.from_device, machine.rates.both_ways]
        assert all(isinstance(rate, Rate) for rate in every)
        links = [machine.links.network, machine.links.message] if name in CLUSTERS else []
        assert (machine.gpus in (4, 8)) == bool(links)
        assert all(one and one.source for one in (*every, *links))
        cited = ["github.com/" in rate.source for rate in every if rate and rate.origin == "measured"]
        assert all(cited)
        assert len(cited) >= 2
    with pytest.raises(
        UserError, match=re.escape(f"neither a file nor a known machine ({', '.join(NAMED)}); did you mean")
    ):
        read_machine("v100")


def test_drives_of_a_named_machine_are_where_nvme_says() -> None:
    """A named machine's drive figures apply to the user's directory; a probed machine has only its own drives."""
    named = read_machine("v100-32gb")
    machine, words = described(named, ["--nvme", "/my/path"])
    assert words == ["--nvme", "/my/path"]
    assert machine.drives == (replace(named.drives[0], directory="/my/path"),)
    assert machine.notes == ("--nvme /my/path stands for /mnt/nvme of that machine",)
    assert described(named, ["--nvme=/mnt/nvme"]) == (named, ["--nvme=/mnt/nvme"])
    assert described(named, []) == (named, ["--nvme", "/mnt/nvme"])
    two = replace(named, drives=(*named.drives, replace(named.drives[0], directory="/mnt/b")))
    assert [drive.directory for drive in described(two, ["--nvme", "/x", "--nvme", "/mnt/nvme"])[0].drives] == [
        "/mnt/nvme",
        "/x",
    ]
    for other, words in ((named, ["--nvme", "/a", "--nvme", "/b"]), (replace(named, origin="measured"), ["--nvme=/a"])):
        with pytest.raises(UserError, match="--nvme /a: the machine has /mnt/nvme"):
            described(other, words)


@pytest.mark.parametrize("words", [(), ("placement.threads=3",)])
def test_ranks_plan_with_what_was_timed_for_as_many(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has its share of the cores, and rates are stored for all ranks' threads together."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(process_setup, "end_without_launcher", lambda say: None)
    monkeypatch.setattr(process_setup.os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(process_setup.numa, "nodes", list)
    machine = probe_machine(PlacementSection(), output=str(tmp_path))

    def prepared(*more: str, **environment: str) -> int:
        of_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        for name in (*of_rank, "MASTER_ADDR", "MASTER_PORT", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
            monkeypatch.setenv(name, "")  # monkeypatch then restores it at the end
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return prepare_process(load_config([*words, *more]))

    each = 3 if words else 64 // 6
    assert prepared("--gpus", "6") == 6 * each
    rate_cache.keep_rates(replace(machine, rates=Rates(matmul={"bf16": Rate(1e12, "measured", "six ranks' threads")})))
    rank = {"RANK": "1", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "6"}
    assert prepared("--gpus", "6", **rank) == each
    assert "bf16" in rate_cache.with_cached_rates(machine).rates.matmul
    assert prepared("--gpus", "5") == (15 if words else 60)
    # 5 ranks have 12 threads each, 60 as 6 ranks with 10
    assert ("bf16" in rate_cache.with_cached_rates(machine).rates.matmul) == (not words)
    assert prepared() == (3 if words else 64)
    assert "bf16" not in rate_cache.with_cached_rates(machine).rates.matmul


# -- links between ranks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_time_their_link_and_cache_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found for any number of threads, since ranks have fewer threads each than the process that timed."""
    known = Links(message=Latency(1e-4, "specified", "of a data sheet"))
    messages: list[str] = []
    found = bench.bench_links(known, ranks=2, say=messages.append)
    assert messages == ["bench: links between 2 ranks"]
    assert (found.ranks, found.message) == (2, known.message)
    timed = (found.to_device_at_once, found.from_device_at_once, found.all_gather, found.all_to_all)
    for one in timed:
        assert one.origin == "measured"
        assert "2 ranks" in one.source
    here = probe_machine(PlacementSection(), output=str(tmp_path))
    rate_cache.keep_rates(replace(here, links=found))
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert rate_cache.with_cached_rates(here).links == found
    rate_cache.keep_rates(here)  # timed again without ranks
    assert rate_cache.with_cached_rates(here).links == found
    assert rate_cache.with_cached_rates(replace(here, gpu="another")).links == Links()
    again = parsed(json.dumps(replace(here, links=found).to_json()), MachineProfile)
    assert again.links == found
    assert "all gather" in describe_rates(again)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for it in vain."""
    monkeypatch.setattr(bench, "get_context", lambda _: SimpleNamespace(Process=without_a_second))
    with pytest.raises(TrainerError, match=r"between 2 ranks could not be timed: rank 1: OSError: no second rank"):
        bench.bench_links(Links(), ranks=2, say=lambda line: None)


def without_a_second(*, target: Any, args: tuple[int, int, Path, Path], daemon: bool) -> Any:
    rank, *_, answer = args
    given = (answer,) if rank else args
    return get_context("spawn").Process(target=second if rank else target, args=given, daemon=daemon)


def second(answer: Path) -> None:
    answer.write_text("OSError: no second rank")
    sys.exit(1)


@pytest.mark.slow
def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "probe_machine", lambda *_, **__: read_machine("v100-32gb"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    how = {"output": str(tmp_path), "dtype": "fp32", "page": 1, "drive_bytes": None, "say": lambda line: None}
    with pytest.raises(UserError, match="--gpus 4: there are 2"):
        machine_rates.bench_here(PlacementSection(), ranks=4, **how)
