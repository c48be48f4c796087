"""Tests of resuming several ranks from page files: no bit depends on the rank that is killed, or on the moment."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND, FAULTY, call, results, start
from forked_ranks import call_ranks
from placements import until
from test_page_files import ALL, gone_on, place  # noqa: F401  # a fixture
from test_page_files import killed as killed_alone

from offload_trainer.offloading.pages.manifest import read_description, read_newest
from offload_trainer.storage.scratch_dir import folders_in, hold

pytestmark = pytest.mark.slow

TIERED = [*ALL, "--engine", "tiered"]
MOMENTS = [  # rank and moment of the kill, and by how many steps the files may advance
    ("1:kill@page=3", [0]),
    ("0:kill@flip=2", [1]),
    ("1:kill@flip=1", [0, 1]),
    ("0:kill@half", [0]),
    ("0:kill@record", [1]),
    ("0:kill@line=5", [0, 1, 2]),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Return the results of one rank, by micro-batches a step."""
    folder, drive = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("drive")

    @cache
    def made(count: int) -> dict[str, Any]:
        return results(call("--nvme", drive, *ALL, "--accumulate", count, output=folder / str(count)).output)

    return made


def killed(fault: str, *words: object, output: Path, count: int) -> None:
    """Kill one rank, and check that the others end without a message."""
    rank = int(fault.split(":")[0])
    ended = call_ranks(*words, output=output, count=count, script=[FAULTY, fault])
    codes = [run.code for run in ended]
    assert codes == [-9 if one == rank else 69 for one in range(count)], [run.text[-2000:] for run in ended]


def test_whichever_rank_is_killed(
    place: Path,  # noqa: F811
    tmp_path: Path,
    alone: Callable[[int], dict[str, Any]],
) -> None:
    words = ["--nvme", place, *TIERED, "tiered.overlap=backward"]
    output, before = tmp_path / "run", 0
    for fault, expected in MOMENTS:
        killed(fault, *words, output=output, count=3)
        (folder,) = folders_in(output / "pages")
        assert list((place / "offload-trainer").iterdir()) == [folder]
        newest = read_newest(read_description(folder))
        step = newest.step if newest else 0
        assert step - before in expected
        before = step
    ended = call_ranks(*words, output=output, count=2)
    assert [run.code for run in ended] == [2] * 2, ended
    assert "3 rank(s), and this run has 2: use --gpus 3" in ended[0].text
    assert folders_in(output / "pages") == [folder]
    said_nothing_of_places = [word for word in words if word != "tiered.state_copies=2"]
    ended = call_ranks(*said_nothing_of_places, output=output, count=3)
    assert [run.code for run in ended] == [0] * 3, ended
    assert gone_on(ended[0]) == before == 4
    assert results(output) == alone(3)
    assert not list((place / "offload-trainer").iterdir())


def test_pages_that_do_not_depend_on_ranks_resume_with_another_number(
    place: Path,  # noqa: F811
    tmp_path: Path,
    alone: Callable[[int], dict[str, Any]],
) -> None:
    words, output = ["--nvme", place, *TIERED, "tiered.page_size=4096"], tmp_path / "run"
    killed("1:kill@flip=3", *words, output=output, count=2)
    killed_alone("record=2", *words, "--accumulate", 2, output=output)
    (ended, _) = call_ranks(*words, output=output, count=2)
    assert gone_on(ended) in (4, 5)
    assert results(output) == alone(2)


def test_a_rank_that_still_lives_is_waited_for(place: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["--nvme", place, *ALL, "--output", tmp_path / "run"]
    killed_alone("record=2", *words[:-2], output=tmp_path / "run")
    (folder,) = folders_in(tmp_path / "run/pages")
    rank, told = hold(folder), tmp_path / "told"
    told.touch()  # the child process opens it
    command = start(COMMAND, *words, stdout=told, stderr=told)
    until(lambda: "waiting for" in told.read_text())  # it does so for 60 s
    assert "resuming from" not in told.read_text()
    os.close(rank)
    assert command.wait(600) == 0
    assert f"waiting for {folder}/.ranks" in told.read_text()
    assert "resuming from the page files" in told.read_text()
