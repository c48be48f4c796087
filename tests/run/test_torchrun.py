"""Which rank's end is told where several have ended; which ranks do not begin."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from offload_trainer import ranks
from offload_trainer.errors import UserError
from offload_trainer.manifest import MANIFEST
from offload_trainer.ranks import LOST
from offload_trainer.run import torchrun
from offload_trainer.run.left import saying_where
from offload_trainer.run.torchrun import first_failure
from offload_trainer.run.train import _join
from offload_trainer.settings import load_config


class Failure:
    def __init__(self, exitcode: int, timestamp: int) -> None:
        self.exitcode, self.timestamp = exitcode, timestamp


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ([LOST, 2], (1, 2)),  # rank 0 was seen first, and only followed
        ([LOST, -signal.SIGKILL], (1, -signal.SIGKILL)),
        ([-signal.SIGTERM, LOST, 1], (2, 1)),
        ([1, 1], (0, 1)),
        ([-signal.SIGTERM, -signal.SIGTERM], (0, -signal.SIGTERM)),
    ],
)
def test_the_rank_that_the_others_followed_is_told(codes: list[int], first: tuple[int, int]) -> None:
    failures = {rank: Failure(code, timestamp=rank) for rank, code in enumerate(codes)}
    assert first_failure(failures) == first  # type: ignore[arg-type]


def test_ranks_that_cannot_train_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--gpus 3, and the launcher has started 2"):
        _join(load_config(["--gpus", "3"]), world=2)


def test_nodes_have_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun numbers them on each: LOCAL_RANK."""

    def of(*local: int) -> tuple[range, ...]:
        monkeypatch.setattr(ranks, "place_here", lambda: (0, len(local)))
        monkeypatch.setattr(ranks, "gather", lambda _: list(local))
        return ranks.nodes()

    assert of(0) == (range(1),)
    assert of(0, 1, 2) == (range(3),)
    assert of(0, 1, 0, 1) == (range(2), range(2, 4))
    assert of(0, 0, 0) == (range(1), range(1, 2), range(2, 3))
    for uneven in ((0, 0, 1), (0, 1, 2, 0), (1, 0)):
        with pytest.raises(UserError, match="not as many on every node"):
            of(*uneven)


def test_a_launcher_says_what_the_next_start_goes_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that are there decide, and not what there is in most runs."""

    def fails(words: list[str]) -> None:
        raise ChildFailedError("ranks", {1: ProcessFailure(1, pid=1, exitcode=-signal.SIGKILL, error_file="")})

    def stops(words: list[str]) -> None:
        raise SignalException("told to end", signal.SIGTERM)

    monkeypatch.setattr(torchrun, "torchrun", fails)
    monkeypatch.setattr(torchrun, "begin_launchers_watch", lambda say: None)
    words = ["--standalone", "-m", "offload_trainer", "train", "--gpus", "2", "--output", str(tmp_path)]
    for kept, told in (((), "nothing was kept yet"), (("step-00000003", "step-00000012"), "checkpoint step-00000012")):
        for name in kept:
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
            (tmp_path / "checkpoints" / name / MANIFEST).touch()
        assert torchrun.main(words) == 128 + signal.SIGKILL
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("offload-train: rank 1 was killed by SIGKILL, and the run ended with it; ")
        assert told in line
    monkeypatch.setattr(torchrun, "torchrun", stops)
    assert torchrun.main(words) == 128 + signal.SIGTERM
    told = "offload-train: stopped by SIGTERM; the same command goes on from the checkpoint step-00000012\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("told", "whole"),
    [
        (
            "a rank has not come; the same command goes on",
            "a rank has not come; nothing was kept yet: the same command begins anew",
        ),
        (
            "everything saved; the same command goes on from there",
            "everything saved; the same command goes on from there",
        ),
    ],
)
def test_an_error_says_from_where_it_goes_on(told: str, whole: str, tmp_path: Path) -> None:
    """Unless it does itself."""
    assert saying_where(told, ["train", "--output", str(tmp_path)]) == whole
    assert saying_where(told, ["export", str(tmp_path)]) == told
