"""Which rank's end is told where several have ended; which ranks do not begin."""

from __future__ import annotations

import signal

import pytest

from offload_trainer import ranks
from offload_trainer.errors import UserError
from offload_trainer.ranks import LOST
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
