"""Which rank's end is told where several have ended."""

from __future__ import annotations

import signal

import pytest

from offload_trainer.ranks import LOST
from offload_trainer.run.torchrun import first_failure


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
