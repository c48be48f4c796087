"""Tests of the links that `bench` times between ranks and stores for later plans."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer.config import PlacementSection
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine import bench, rate_cache
from offload_trainer.machine.probe import probe_machine
from offload_trainer.plan.machine import Latency, Links, MachineProfile, Rate, describe_rates, read_machine
from offload_trainer.run import machine_rates
from offload_trainer.safe_files import parsed

pytestmark = pytest.mark.slow


def test_two_ranks_time_their_link_and_cache_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found for any number of threads, since ranks have fewer threads each than the process that timed."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    known = Links(message=Latency(1e-4, "specified", "of a data sheet"))
    messages: list[str] = []
    found = bench.bench_links(known, ranks=2, say=messages.append)
    assert messages == ["bench: links between 2 ranks"]
    assert (found.ranks, found.message) == (2, known.message)
    timed = (found.to_device_at_once, found.from_device_at_once, found.all_gather, found.all_to_all)
    for one in timed:
        assert one is not None
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


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for it in vain."""
    monkeypatch.setattr(bench, "get_context", lambda _: SimpleNamespace(Process=without_a_second))
    with pytest.raises(TrainerError, match=r"between 2 ranks could not be timed: rank 1: OSError: no second rank"):
        bench.bench_links(Links(), ranks=2, say=lambda line: None)


def without_a_second(*, target: Any, args: tuple[int, int, str, Path], daemon: bool) -> Any:
    rank, *_, answer = args
    given = (answer,) if rank else args
    return get_context("spawn").Process(target=second if rank else target, args=given, daemon=daemon)


def second(answer: Path) -> None:
    answer.write_text("OSError: no second rank")
    sys.exit(1)


def test_files_may_leave_out_links() -> None:
    machine = read_machine("8xh100-80gb")
    old = machine.to_json()
    old["links"] = {name: old["links"][name] for name in ("between_gpus", "network", "message")}
    assert parsed(json.dumps(old), MachineProfile) == machine
    assert machine.links.all_gather is None
    assert isinstance(machine.links.between_gpus, Rate)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_rates, "probe_machine", lambda *_, **__: read_machine("v100-32gb"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    how = {"output": str(tmp_path), "dtype": "fp32", "page": 1, "drive_bytes": None, "say": lambda line: None}
    with pytest.raises(UserError, match="--gpus 4: there are 2"):
        machine_rates.bench_here(PlacementSection(), ranks=4, **how)
