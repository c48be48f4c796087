"""torchrun with words of its own: the reason that the rank tells which failed first stays the last thing said.

    python -m offload_trainer.run.torchrun TORCHRUN'S WORDS

A rank that ends because another has gone tells nothing (`ranks.LOST`). The exit code is that of the rank that failed
first, or 128 and the number of the signal that killed it.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from offload_trainer.ranks import LOST
from offload_trainer.run.watch import begin_launchers_watch


def main(words: list[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    begin_launchers_watch(lambda line: print(f"offload-train: {line}", file=sys.stderr, flush=True))
    of_ranks = words[words.index("offload_trainer") + 1 :]
    try:
        torchrun(words)
    except SignalException as stopped:
        print(f"offload-train: stopped by {stopped.sigval.name}; {_goes_on(of_ranks)}", file=sys.stderr)
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        return _told(first_failure(error.failures), of_ranks)
    return 0


def _goes_on(words: list[str]) -> str:
    """From where a run of these words would."""
    from offload_trainer.run.left import goes_on  # nothing that a launcher needs while its ranks train

    return goes_on(words)


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, int]:
    """(rank, exit code, negative for a signal) of the one that the others only followed.

    The launcher ends those that are left with SIGTERM, which is nobody's reason where there is another.
    """
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    own = [rank for rank in codes if codes[rank] not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)]
    rank = min(own or codes, key=lambda rank: failures[rank].timestamp)
    return rank, codes[rank]


def _told(failure: tuple[int, int], words: list[str]) -> int:
    """Say which rank failed first, unless it has, and what a run of these `words` would go on from; the exit code."""
    rank, code = failure
    if code < 0:
        name = signal.Signals(-code).name
        killed = f"offload-train: rank {rank} was killed by {name}, and the run ended with it"
        print(f"{killed}; {_goes_on(words)}", file=sys.stderr)
        return 128 - code
    if code == LOST:
        print(f"offload-train: the ranks lost each other; {_goes_on(words)}", file=sys.stderr)
        return 1
    if code > 128:
        name = signal.Signals(code - 128).name
        print(f"offload-train: rank {rank} was told to end by {name}, and the run ended with it", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
