"""Tests of the links that `bench` times between ranks and stores for later plans."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from offload_trainer.config import PlacementSection
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine import link_rates, rate_cache
from offload_trainer.machine.probe import probe_machine
from offload_trainer.plan.machine import Latency, Links, MachineProfile, Rate, describe_rates, read_machine
from offload_trainer.run.machine_rates import _ranks_to_time
from offload_trainer.safe_files import parsed

pytestmark = pytest.mark.slow


def test_two_ranks_time_their_link_and_cache_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found for any number of threads, since ranks have fewer threads each than the process that timed."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    known = Links(message=Latency(1e-4, "specified", "of a data sheet"))
    messages: list[str] = []
    found = link_rates.bench_links(known, ranks=2, say=messages.append)
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


def fails(rank: int, *_: object) -> None:
    if rank:
        raise OSError("no second rank")
    time.sleep(300)


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "run_rank", fails)
    with pytest.raises(TrainerError, match=r"between 2 ranks could not be timed: rank 1: OSError: no second rank"):
        link_rates.bench_links(Links(), ranks=2, say=lambda line: None)


def test_files_may_leave_out_links() -> None:
    machine = read_machine("8xh100-80gb")
    old = machine.to_json()
    old["links"] = {name: old["links"][name] for name in ("between_gpus", "network", "message")}
    assert parsed(json.dumps(old), MachineProfile) == machine
    assert machine.links.all_gather is None
    assert isinstance(machine.links.between_gpus, Rate)


def test_as_many_ranks_as_there_are_gpus() -> None:
    assert _ranks_to_time(1, gpus=8) == 8
    assert _ranks_to_time(2, gpus=8) == 2
    assert [_ranks_to_time(count, gpus=None) for count in (1, 3)] == [1, 3]
    with pytest.raises(UserError, match="--gpus 4: there are 2"):
        _ranks_to_time(4, gpus=2)
