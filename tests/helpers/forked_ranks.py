"""Run functions, trainings or commands on several ranks of this machine, each in a fork that runs this script."""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import COMMAND, Fork, Run, start
from seen_calls import run_before

import offload_trainer.plan.tiered.layout as layout
from offload_trainer import ranks
from offload_trainer.common.errors import STORE

Process = Fork | subprocess.Popen[bytes]


def _start(scripts: Sequence[Sequence[object]], folder: Path, *, nodes: int = 1, **how: bool) -> list[Process]:
    """Start scripts as ranks of `nodes` simulated nodes that share `folder`; rank N prints to its file `told-N`."""
    count, processes = str(len(scripts)), []
    (folder / "store").write_bytes(b"")
    for rank, argv in enumerate(scripts):
        local = rank % (len(scripts) // nodes)
        place = {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "LOCAL_RANK": str(local)}
        out = folder / f"told-{rank}"
        processes.append(start(*argv, stdout=out, stderr=out, **how, **place, **{STORE: f"{folder}/store"}))
    return processes


def start_ranks(work: Callable[..., Any], *given: Any, count: int, folder: Path, **how: Any) -> list[Process]:
    """Start ranks that call `work(*given)`. `how`: see `_start`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "work", "wb") as file:
        pickle.dump(sys.path, file)
        pickle.dump((work, given), file)
    return _start([[__file__, folder]] * count, folder, **how)


def in_ranks(work: Callable[..., Any], *given: Any, count: int, folder: Path, **how: Any) -> list[Any]:
    """Call `work(*given)` on each rank, all successful; return what each returned. `how`: see `_start`."""
    codes = [process.wait(400) for process in start_ranks(work, *given, count=count, folder=folder, **how)]
    assert not any(codes), "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("told-*"))
    return [pickle.loads((folder / f"returned-{rank}").read_bytes()) for rank in range(count)]


def call_ranks(
    *words: object, output: Path, count: int = 3, script: Sequence[object] = (COMMAND,), last: Sequence[object] = ()
) -> list[Run]:
    """Run `offload-train WORDS --output OUTPUT` on `count` ranks without a launcher; `last` follows the last one's."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = [[*script, *words, "--output", output, *(last if n + 1 == count else ())] for n in range(count)]
        codes = [process.wait(300) for process in _start(scripts, Path(folder))]
        told = [Path(folder, f"told-{rank}").read_text(errors="replace") for rank in range(count)]
        return [Run(code, text, output) for code, text in zip(codes, told, strict=True)]


counts: Counter[str] = Counter()  # totals of `count_calls` since the last case began
_counting = threading.Lock()


def count_calls(owner: Any, name: str, counted: Callable[..., Mapping[str, int]]) -> None:
    """Add to `counts`, from now on, what `counted` returns for the arguments of each call of `owner.name`."""

    def count(*args: Any, **words: Any) -> None:
        with _counting:
            counts.update(counted(*args, **words))

    run_before(setattr, owner, name, count)


if __name__ == "__main__":  # one of the ranks of `start_ranks`
    folder = Path(sys.argv[1])
    with open(folder / "work", "rb") as file:
        sys.path[:] = pickle.load(file)
        work, given = pickle.load(file)
    layout.SMALL = 0  # Offload embeddings and norms of small models too, as those of large models are.
    torch.set_num_threads(1)
    ranks.join()
    returned = work(*given)
    (folder / f"returned-{os.environ['RANK']}").write_bytes(pickle.dumps(returned))
    ranks.wait_for_all()
