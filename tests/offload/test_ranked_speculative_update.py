"""Tests of the speculative update with several ranks: it has the bits of one rank, whatever the decision about a step
is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import rank_with_speculation
from engine_bench import DROPOUT, model_directory
from forked_ranks import Case, run_ranks
from test_ranks import AWAY

pytestmark = pytest.mark.slow

SCRIPT = rank_with_speculation.__file__
FULL = ("tiered.overlap=backward", "tiered.weight_buffers=2")
ON_DRIVES = {
    "weights on the device": ("--params", "gpu", "--optimizer", "nvme"),
    "a third in RAM": ("--params", "cpu", "--optimizer", "nvme", "--ram-fraction", "0.3"),
    "all on the drive": AWAY,
}


def begun(case: Case, *, count: int) -> list[list[list[int]]]:
    """Return, for each rank and each speculative step, the number of pages that were kept and that were done."""
    return [json.loads((Path(case.out) / f"ahead-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize(("count", "nodes", "steps"), [(3, 1, 12), (4, 2, 10)])
def test_steps_are_one_ranks(count: int, nodes: int, steps: int, tmp_path: Path) -> None:
    """bf16 with dropout, norms on both sides of the limit, and three steps with NaN in one rank's last gradient.

    All ranks keep their speculative pages, or none does.
    """
    model = str(model_directory(tmp_path / "model", "gpt2", **DROPOUT))
    (tmp_path / "drive").mkdir()
    words = ("--dtype", "bf16", "optim.max_grad_norm=2", "--accumulate", "1")
    several = [
        Case(
            model,
            (*home, *words, *FULL),
            str(tmp_path / name),
            steps=steps,
            micro=count,
            drives=(str(tmp_path / "drive"),),
        )
        for name, home in ON_DRIVES.items()
    ]
    in_line = (*ON_DRIVES["a third in RAM"], "--dtype", "bf16", "optim.max_grad_norm=2", "--accumulate", str(count))
    alone = replace(several[0], words=(*in_line, "tiered.overlap=off"), out=str(tmp_path / "alone"))
    run_ranks([alone], count=1, folder=tmp_path / "one", script=SCRIPT)
    run_ranks(several, count=count, folder=tmp_path / "ranks", nodes=nodes, script=SCRIPT)
    norms = [norm for _, norm in alone.left[0]]
    assert [step for step, norm in enumerate(norms) if norm is None] == list(rank_with_speculation.PLANTED)
    clipped = [norm > 2 for norm in norms if norm is not None]
    assert set(clipped) == {True, False}
    for case in several:
        assert case.left == alone.left, case.words
        for rank in begun(case, count=count):
            assert len(rank) == len(clipped)
            for was, (counted, done) in zip(clipped, rank, strict=True):
                assert counted == (0 if was else done)
                assert done


@pytest.mark.parametrize("home", ["weights on the device", "all on the drive"])
def test_no_rank_overwrites_what_the_last_record_names(home: str, tmp_path: Path) -> None:
    """Rank 0 is late to record a step, and the other one could update pages of the next step meanwhile.

    What a record names stays as it was when the record was written, and is what one rank computes.
    """
    model = str(model_directory(tmp_path / "model", "gpt2", **DROPOUT))
    (tmp_path / "drive").mkdir()
    words = (*ON_DRIVES[home], *FULL, "--ram-fraction", "0", "--dtype", "bf16", "optim.max_grad_norm=0", "--accumulate")
    drives = (str(tmp_path / "drive"),)
    steps = rank_with_speculation.LATE + 1
    case = Case(model, (*words, "1"), str(tmp_path / "two"), steps=steps, micro=2, drives=drives)
    alone = replace(case, words=(*words, "2"), out=str(tmp_path / "one"))
    run_ranks([case], count=2, folder=tmp_path / "ranks", script=SCRIPT)
    run_ranks([alone], count=1, folder=tmp_path / "alone", script=SCRIPT)
    assert len(begun(case, count=2)[0]) == rank_with_speculation.LATE
    ours, theirs = (json.loads((tmp_path / one / "ahead-read.json").read_text()) for one in ("two", "one"))
    assert [step for step, _ in theirs] == sorted([*range(1, steps), *range(1, steps - 1)])
    assert ours == theirs


def test_overflow_and_accumulation(tmp_path: Path) -> None:
    """fp16 finds its scale, with two micro-batches a rank; 8-bit moments are rounded stochastically, by the step's
    number.
    """
    model = str(model_directory(tmp_path / "model", "gpt2", **DROPOUT))
    (tmp_path / "drive").mkdir()
    words = ("--dtype", "fp16", "optim.moment_dtype=8bit", "optim.max_grad_norm=0")
    home = ON_DRIVES["a third in RAM"]
    case = Case(
        model,
        (*home, *words, *FULL, "--accumulate", "2"),
        str(tmp_path / "two"),
        steps=16,
        micro=4,
        drives=(str(tmp_path / "drive"),),
    )
    alone = replace(case, words=(*home, *words, "tiered.overlap=off", "--accumulate", "4"), out=str(tmp_path / "one"))
    run_ranks([alone], count=1, folder=tmp_path / "alone", script=SCRIPT)
    run_ranks([case], count=2, folder=tmp_path / "ranks", script=SCRIPT)
    skipped = [norm is None for _, norm in alone.left[0]]
    assert set(skipped) == {True, False}
    assert case.left[0] == alone.left[0]
    ours, theirs = ({name: held for name, held in one.files.items() if "ahead" not in name} for one in (case, alone))
    assert ours == theirs
    assert all(counted == done > 0 for rank in begun(case, count=2) for counted, done in rank)
