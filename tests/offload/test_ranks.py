"""Tests of the tiered engine on several ranks: it has one rank's bits for the same micro-batches, and reports why it
ends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import HELPERS, start
from engine_bench import DROPOUT, model_directory
from forked_ranks import Case, run_ranks

from offload_trainer.errors import LOST

pytestmark = pytest.mark.usefixtures("nothing_is_small")

COUNT = 3
INPUTS = ("model.activation_checkpointing=on", "model.offload_activations=nvme")
AWAY = ("--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme")
AWAY += ("tiered.state_copies=2",)
BEHIND = ("tiered.overlap=forward",)
HALF = ("--optimizer", "nvme", "--ram-fraction", "0.5")


@pytest.mark.slow
def test_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    """Losses, norms, masters and moments match one rank's. All but the first case overlap the update with the forward.

    A checkpoint resumes with a different number of ranks.
    """
    tied = model_directory(tmp_path / "tied", "gpt2", **DROPOUT)
    experts = model_directory(tmp_path / "experts", "mixtral")  # not every micro-batch uses all experts
    (tmp_path / "drive").mkdir()
    drives = (str(tmp_path / "drive"),)
    wishes = [
        Case(
            str(tied), ("--params", "gpu", "--dtype", "bf16", *HALF, *INPUTS), "", steps=2, micro=COUNT, drives=drives
        ),
        Case(str(experts), ("--params", "cpu", "--dtype", "fp32"), "", steps=2, micro=2 * COUNT),
        Case(str(experts), ("--dtype", "bf16", *AWAY), "", steps=2, micro=2 * COUNT, drives=drives),
    ]

    def by(ranks: int, name: str, *, cases: list[Case]) -> list[Case]:
        made = []
        for number, case in enumerate(cases):
            behind = BEHIND if ranks > 1 and number else ()
            words = (*case.words, *behind, "--accumulate", str(case.micro // ranks))
            made.append(replace(case, words=words, out=str(tmp_path / name / str(number))))
        return made

    alone = by(1, "alone", cases=[*wishes, replace(wishes[-1], micro=2)])
    on = replace(wishes[2], load=alone[2].out, skip=2)
    run_ranks(alone, count=1, folder=tmp_path / "one")  # a separate process with as many threads as theirs
    several = by(COUNT, "several", cases=[*wishes, on])
    run_ranks(several, count=COUNT, folder=tmp_path / "ranks")
    for made, expected in zip(several[: len(wishes)], alone, strict=False):
        assert made.left == expected.left, expected
    assert several[2].moved == alone[-1].moved  # the drive bytes of one rank with the micro-batches that each rank has
    (back,) = by(1, "back", cases=[replace(on, load=several[2].out)])
    run_ranks([back], count=1, folder=tmp_path / "one again")
    assert back.left == several[-1].left


@pytest.mark.slow
def test_nodes_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Each of two nodes of two ranks has its own memory and files, with its own ranks' state."""
    model = model_directory(tmp_path / "model", "gpt2", **DROPOUT)
    (tmp_path / "drive").mkdir()
    case = Case(str(model), (), "", steps=2, micro=4, drives=(str(tmp_path / "drive"),))
    homes = [
        ("--params", "gpu", *HALF),
        ("--params", "cpu", *HALF),
        ("--params", "cpu", *HALF, *BEHIND),
        (*AWAY, *BEHIND),
    ]

    def by(count: int) -> list[Case]:
        words = [
            (*one, "--dtype", "bf16", "--accumulate", str(4 // count)) for one in homes[: None if count > 1 else 1]
        ]
        return [replace(case, words=one, out=str(tmp_path / f"{count} {n}")) for n, one in enumerate(words)]

    (alone,), several = by(1), by(4)
    on = [replace(one, out=f"{one.out} on", load=alone.out, skip=2) for one in (alone, several[1], several[-1])]
    run_ranks([alone, on[0]], count=1, folder=tmp_path / "one")
    run_ranks([*several, *on[1:]], count=4, folder=tmp_path / "ranks", nodes=2)
    for made in several:
        assert (made.seen, made.files) == (alone.seen, alone.files), made.words
    for made in on[1:]:
        assert (made.seen, made.files) == (on[0].seen, on[0].files), made.words


@pytest.mark.slow
def test_checkpoints_resume_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Checkpoints move from 3 ranks to 1, 2 and 4, and back, with identical bytes, even if written during training."""
    model = str(model_directory(tmp_path / "model", "gpt2", **DROPOUT))
    (tmp_path / "drive").mkdir()
    frozen = ('model.freeze=["h.1.mlp","wpe"]', "optim.moment_dtype=8bit")
    words = ("--params", "gpu", "--dtype", "bf16", *HALF, *frozen)
    drives = (str(tmp_path / "drive"),)

    def case(ranks: int, name: str, **more: Any) -> Case:
        shared = ("--accumulate", str(12 // ranks))
        return Case(model, (*words, *shared), str(tmp_path / name), steps=1, micro=12, drives=drives, **more)

    first = {ranks: case(ranks, f"first-{ranks}", meanwhile=ranks == 3) for ranks in (1, 2, 3, 4)}
    second = {ranks: case(ranks, f"second-{ranks}", load=first[3].out, skip=1) for ranks in (1, 2, 4)}
    for ranks in (3, 1, 2, 4):
        run_ranks([first[ranks], *filter(None, [second.get(ranks)])], count=ranks, folder=tmp_path / f"ranks-{ranks}")
        assert first[ranks].files == first[3].files
    third = [case(3, f"from-{ranks}", load=first[ranks].out, skip=1) for ranks in (1, 2, 4)]
    run_ranks(third, count=3, folder=tmp_path / "again")
    for other in (second[2], second[4], *third):
        assert (other.left[0], other.files) == (second[1].left[0], second[1].files), other
    assert {"fixed.safetensors", "exp_avg_sq_scales.safetensors"} < first[1].files.keys()


FAULTY = """
import sys, time
from pathlib import Path
import forked_ranks
from offload_trainer import cli, ranks
from offload_trainer.errors import TrainerError

def ends(*_):
    rank, fault = int(sys.argv[1]), sys.argv[2]
    forked_ranks.join(rank, 2, Path(sys.argv[3]))
    ranks.barrier()
    if rank and fault == "stalls":
        time.sleep(600)
    if rank:
        raise TrainerError("the disk is full")
    ranks.barrier(stalled=1.0 if fault == "stalls" else 300.0)

cli._COMMANDS["train"] = ends
sys.exit(cli.main(["train"]))
"""


@pytest.mark.parametrize("fault", ["stalls", "ends"])
def test_a_rank_that_is_lost_ends_the_others(fault: str, tmp_path: Path) -> None:
    """A rank that fails reports its reason, and the others stay silent; a rank that stalls is named."""
    script = tmp_path / "run_with_fault.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n{FAULTY}")
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    forks = [start(script, rank, fault, tmp_path, stdout=told[rank], stderr=told[rank]) for rank in range(2)]
    codes = [forks[0].wait(300)]
    if fault == "stalls":
        forks[1].send_signal(9)
    codes.append(forks[1].wait(300))
    said = [[line for line in path.read_text().splitlines() if line.startswith("offload-train")] for path in told]
    if fault == "ends":
        assert codes == [LOST, 1]
        assert said == [[], ["offload-train: the disk is full"]]
    else:
        assert codes == [1, -9]
        assert "after 1 s another rank has not come" in said[0][0]
        assert "Rank 1" in said[0][0]
