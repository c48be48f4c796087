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


def case_of(words: tuple[str, ...], name: str, folder: Path, *, steps: int, micro: int) -> Case:
    (folder / "drive").mkdir(exist_ok=True)
    model = str(model_directory(folder / "model", "gpt2", **DROPOUT))
    return Case(model, words, str(folder / name), steps=steps, micro=micro, drives=(str(folder / "drive"),))


def run(cases: list[Case], *, count: int, nodes: int = 1) -> list[Case]:
    """Run the cases with each step's micro-batches divided among `count` ranks."""
    made = [replace(case, words=(*case.words, "--accumulate", str(case.micro // count))) for case in cases]
    run_ranks(made, count=count, folder=Path(cases[0].out + " ranks"), nodes=nodes, script=SCRIPT)
    return made


def begun(case: Case, *, count: int) -> list[list[list[int]]]:
    """Return, for each rank and each speculative step, the number of pages that were kept and that were done."""
    return [json.loads((Path(case.out) / f"ahead-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (4, 2)])
def test_steps_are_one_ranks(count: int, nodes: int, tmp_path: Path) -> None:
    """bf16 with dropout, norms on both sides of the limit, and three steps with NaN in one rank's last gradient.

    All ranks keep their speculative pages, or none does.
    """
    limit, size = 1.5, {"steps": 8, "micro": count}
    words = ("--dtype", "bf16", f"optim.max_grad_norm={limit}")
    alone = case_of((*ON_DRIVES["a third in RAM"], *words, "tiered.overlap=off"), "alone", tmp_path, **size)
    run([alone], count=1)
    several = [case_of((*home, *words, *FULL), name, tmp_path, **size) for name, home in ON_DRIVES.items()]
    norms = [norm for _, norm in alone.left[0]]
    assert [step for step, norm in enumerate(norms) if norm is None] == list(rank_with_speculation.PLANTED)
    clipped = [norm > limit for norm in norms if norm is not None]
    assert set(clipped) == {True, False}
    for case in run(several, count=count, nodes=nodes):
        assert case.left == alone.left, case.words
        for rank in begun(case, count=count):
            assert len(rank) == len(clipped)
            for was, (counted, done) in zip(clipped, rank, strict=True):
                assert counted == (0 if was else done)
                assert done


def test_no_rank_overwrites_what_the_last_record_names(tmp_path: Path) -> None:
    """Rank 0 is late to record a step, and the other one could update pages of the next step meanwhile.

    What a record names stays as it was when the record was written, and is what one rank computes.
    """
    words = (*AWAY, *FULL, "--ram-fraction", "0", "--dtype", "bf16", "optim.max_grad_norm=0")
    steps = rank_with_speculation.LATE + 1
    case, alone = (case_of(words, name, tmp_path, steps=steps, micro=2) for name in ("two", "one"))
    run([case], count=2)
    run([alone], count=1)
    assert len(begun(case, count=2)[0]) == rank_with_speculation.LATE
    ours, theirs = (json.loads((tmp_path / one / "ahead-read.json").read_text()) for one in ("two", "one"))
    assert [step for step, _ in theirs] == sorted([*range(1, steps), *range(1, steps - 1)])
    assert ours == theirs


def test_overflow_and_accumulation(tmp_path: Path) -> None:
    """fp16 finds its scale, with two micro-batches a rank; 8-bit moments are rounded stochastically, by the step's
    number.
    """
    words = (*ON_DRIVES["a third in RAM"], "--dtype", "fp16", "optim.moment_dtype=8bit", "optim.max_grad_norm=0")
    case = case_of((*words, *FULL), "two", tmp_path, steps=10, micro=4)
    alone = case_of((*words, "tiered.overlap=off"), "one", tmp_path, steps=10, micro=4)
    run([alone], count=1)
    run([case], count=2)
    skipped = [norm is None for _, norm in alone.left[0]]
    assert set(skipped) == {True, False}
    assert case.left[0] == alone.left[0]
    ours, theirs = ({name: held for name, held in one.files.items() if "ahead" not in name} for one in (case, alone))
    assert ours == theirs
    assert all(counted == done > 0 for rank in begun(case, count=2) for counted, done in rank)
