"""Tests of resuming from page files after a kill: the bits are those of an undisturbed run, without a checkpoint."""

import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import COMMAND, FAULTY, KILL, TINY, Run, call, faulty, results, start
from dead_run_files import dead_lease
from forked_ranks import call_ranks
from sample_plans import timed
from seen_calls import until

from offload_trainer.common.errors import RERUN_HINT, UserError
from offload_trainer.offloading.pages.manifest import read_description, read_newest
from offload_trainer.run import resume
from offload_trainer.run.checkpoint import TrainState
from offload_trainer.run.export import opened
from offload_trainer.run.planning import as_page_files
from offload_trainer.run.resume import STARTS_OVER, earlier_run, resume_hint
from offload_trainer.settings import load_config
from offload_trainer.storage.retention import complete_checkpoints
from offload_trainer.storage.scratch_dir import dead_runs, folders_in, hold, leased
from offload_trainer.telemetry.report import RELOAD

STEPS = 6
ALL = [*TINY, "--ram-fraction", "0", "tiered.state_copies=2", "--steps", STEPS, "--save-every", 0, "train.eval_every=2"]
ALL += ["tiered.page_size=16384"]


def killed(moment: str, *words: object, output: Path, **extra: str) -> None:
    run = faulty(f"kill@{moment}", *words, output=output, **extra)
    assert run.code == -KILL, run.text


def gone_on(run: Run) -> int | None:
    """Return the step of the page files from which a run says that it resumes."""
    printed = [line for line in run.text.splitlines() if "resuming from the page files" in line]
    return int(printed[0].split(" step ")[1].split(";")[0]) if printed else None


def said_before(*words: object, output: Path) -> str:
    """Return the launcher's message about the next start with these arguments."""
    return resume_hint([*map(str, words), "--output", str(output)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of an undisturbed run with one copy of the state."""
    output, drive = tmp_path_factory.mktemp("alone") / "run", tmp_path_factory.mktemp("drive")
    return results(call("--nvme", drive, *ALL, "tiered.state_copies=1", output=output).output)


@pytest.mark.parametrize(
    ("moment", "step", "words"),
    [
        ("page=110", None, ["tiered.overlap=off"]),
        ("half=3", 2, ["tiered.overlap=forward"]),
        ("record=3", 3, ["tiered.overlap=backward"]),
        ("line=1", None, ["tiered.overlap=forward"]),
        ("line=6", 5, ["tiered.overlap=off"]),
        ("record=2", 2, ["--params", "nvme"]),
    ],
)
def test_a_kill_at_any_moment_changes_no_bit(
    moment: str, step: int | None, words: list[str], drive: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    words = ["--nvme", drive, *ALL, *words]
    killed(moment, *words, output=tmp_path / "run")
    told = said_before(*words, output=tmp_path / "run")
    run = call(*words, output=tmp_path / "run")
    assert results(run.output) == alone
    found = gone_on(run)
    if not moment.startswith("page"):
        assert found == step
    assert told == (f"{RERUN_HINT} from its page files, step {found}" if found else STARTS_OVER)
    assert not list((drive / "offload-trainer").iterdir())
    assert "note: page files" not in run.text


@pytest.mark.slow
def test_repeated_kills_also_during_the_start(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    """They keep the same directory; one without a step is removed by a start. So are a killed run's temporary files."""
    words, output, page = ["--nvme", drive, *ALL], tmp_path / "run", tmp_path / "run/report.html"
    for moment in ("step", "build", "record=2"):
        killed(moment, *words, output=output)
    assert RELOAD in page.read_text()
    (lease,) = (drive / "offload-trainer").iterdir()
    died = 2**22 + 1  # larger than any process id
    for folder, name in ((output, "metrics.jsonl"), (output, "config.yaml"), (lease, "store.json")):
        (folder / f".{name}.{died}.tmp").write_text("half of it")
    theirs = [output / ".notes.txt.tmp", output / f".metrics.jsonl.{os.getpid()}.tmp"]
    for path in theirs:
        path.write_text("not left by a kill")
    for moment in ("takeover", "page=3", "record", "half=2", "line=5"):
        killed(moment, *words, output=output)
        assert list((drive / "offload-trainer").iterdir()) == [lease]
        assert sorted(path for folder in (output, lease) for path in folder.glob(".*.tmp")) == sorted(theirs)
    run = call(*words, output=output)
    assert gone_on(run) == 4
    assert results(run.output) == alone
    assert "refresh" not in page.read_text()


@pytest.mark.slow
def test_a_loss_scale_and_skipped_steps_are_resumed(drive: Path, tmp_path: Path) -> None:
    (drive / "other").mkdir()
    words = ["--nvme", drive, "--nvme", drive / "other", *ALL]
    words += ["--dtype", "fp16", "optim.moment_dtype=8bit", "--steps", 40]
    alone, begun = tmp_path / "alone", {"LOSS_SCALE": f"{2**40},2"}
    done = faulty("none", *words, "tiered.state_copies=1", output=alone, **begun)
    assert done.code == 0, done.text
    whole = results(alone)
    skipped = [row[-1] for row in whole["metrics"]]
    assert {True, False} == set(skipped)
    first = skipped.index(False)
    killed(f"line={first - 3}", *words, output=tmp_path / "run", **begun)
    killed(f"line={first + 8}", *words, output=tmp_path / "run")
    run = call(*words, output=tmp_path / "run")
    assert gone_on(run) == first + 7
    assert results(run.output) == whole


@pytest.mark.slow
def test_the_newer_of_page_files_and_checkpoint(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    words = ["--nvme", drive, *ALL, "--save-every", 2]
    killed("saved=4", *words, output=tmp_path / "run")
    killed("line=6", *words, output=tmp_path / "run")
    assert said_before(*words, output=tmp_path / "run") == f"{RERUN_HINT} from its page files, step 5"
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    named = said_before(*words, "--resume", checkpoint, output=tmp_path / "run")
    assert named == f"{RERUN_HINT} from the checkpoint step-00000004"
    assert said_before(*words, "--no-such-flag", output=tmp_path / "run") == RERUN_HINT
    killed("manifest", *words, output=tmp_path / "run")
    killed("saved=6", *words, output=tmp_path / "run")
    assert said_before(*words, output=tmp_path / "run") == f"{RERUN_HINT} from the checkpoint step-00000006"
    named = said_before(*words, "--resume", checkpoint, output=tmp_path / "run")
    assert named == "the same command without --resume resumes from the checkpoint step-00000006"
    run = call(*words, "--steps", 7, output=tmp_path / "run")
    assert gone_on(run) is None  # it resumed from the checkpoint, although there are page files of step 5
    assert "step-00000006, step 6" in run.text
    assert results(run.output)["metrics"][:6] == alone["metrics"]


@pytest.mark.slow
def test_a_run_that_is_complete_keeps_its_page_files(drive: Path, tmp_path: Path) -> None:
    """If fewer steps are requested than the page files have, they become a checkpoint before they are removed."""
    words = ["--nvme", drive, *ALL, "--save-every", 100]
    killed("record=4", *words, output=tmp_path / "run")
    for steps in (3, 4):
        call(*words, "--steps", steps, output=tmp_path / "run")
        assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000004"]
    assert not list((drive / "offload-trainer").iterdir())
    # The checkpoint has all steps that are requested, and the page files have more.
    words += ["--save-every", 3]
    killed("record=5", *words, output=tmp_path / "other")
    assert gone_on(call(*words, "--steps", 3, output=tmp_path / "other")) == 5
    assert [path.name for path in complete_checkpoints(tmp_path / "other/checkpoints")][-1] == "step-00000005"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".ranks"}  # a lock


def refused(*words: object, output: Path) -> str:
    """Return the message of a start that cannot use the page files."""
    run = call(*words, output=output, check=False)
    assert run.code == 2, run.text
    printed = [line for line in run.text.splitlines() if "the page files that this run has left" in line]
    assert printed, run.text
    assert "cannot be resumed from, and are kept" in printed[0]
    return printed[0]


def test_page_files_on_a_drive_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint takes their place, also where this machine has older ones; a drive mounted elsewhere is named."""
    said: list[str] = []
    (tmp_path / "pages").write_text("/gone/run-1\n")
    setup: Any = SimpleNamespace(drives=[tmp_path], listed=tmp_path / "pages", log=SimpleNamespace(say=said.append))
    begins, here = TrainState(4, 0, 0), [tmp_path / "run-0"]
    monkeypatch.setattr(resume.scratch_dir, "kept_for", lambda *_: here)
    assert resume._folders(setup, begins=begins) == []
    assert said == ["note: page files were in /gone/run-1, which no longer exists; resuming from the checkpoint"]
    here.append(tmp_path / "run-1")
    with pytest.raises(ValueError, match=rf"is its drive mounted, where it was: it is at {here[1]} now"):
        resume._folders(setup, begins=begins)


@pytest.mark.slow
def test_a_start_that_cannot_use_them_is_refused(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    """The same command resumes later. A missing drive or list of directories is named, and so is damage."""
    words, output = ["--nvme", drive, *ALL], tmp_path / "run"
    killed("page=150", *words, output=output)
    (lease,) = (drive / "offload-trainer").iterdir()
    newest = read_newest(read_description(lease))
    assert newest is not None
    assert newest.train is not None
    step, whole = newest.train["step"], contents(lease)
    for more, why in (
        (["tiered.state_copies=1"], "have only one copy"),
        (["--ram-fraction", "0.5"], "stores some of its state in memory"),
        (["tiered.page_size=65536"], "layout differs .*pages"),
        (["optim.moment_dtype=bf16"], "layout differs .*optim.moment_dtype"),
        (["optim.master_dtype=bf16"], "layout differs .*optim.master_dtype"),
        (["--seed", "1"], "another run: seed: it has 0, this run 1"),
        (["model.freeze=wpe"], "not trained"),
    ):
        said = refused(*words, *more, output=output)
        assert re.search(f"of step {step}, newer than any checkpoint, .*{why}", said), said
        assert "start without them with --resume never" in said
        assert contents(lease) == whole
    (drive / "offload-trainer").rename(drive / "away")
    assert "does not exist; is its drive mounted?" in refused(*words, output=output)
    (drive / "away").rename(drive / "offload-trainer")
    (output / "pages").rename(tmp_path / "pages")
    assert f"{output}/pages, which listed {lease}, no longer exists" in refused(*words, output=output)
    (tmp_path / "pages").rename(output / "pages")
    state, record = whole["state"], whole["record"]
    half = len(record) // 2
    numbers = [int.from_bytes(record[start : start + 8], "little") for start in (0, half)]
    at = numbers.index(max(numbers)) * half + 60  # a byte of the newest slot
    older = f"of step {step - 1}, newer .*of another step"
    for name, content, why, resumes in (
        ("state", state[::-1], "state: page 0, .* of another step or run", True),
        ("state", state[:-4096], "state is not there, or is shorter", False),
        ("record", bytes(len(record)), "record cannot be read: neither of its two slots is whole", False),
        ("record", record[:at] + b"~" + record[at + 1 :], older, None),
        (
            "store.json",
            whole["store.json"].replace(b'"file_format": 3', b'"file_format": 2'),
            "written in format 2",
            False,
        ),
        ("run.json", None, "run.json cannot be read: it is not there", True),
    ):
        (lease / name).unlink() if content is None else (lease / name).write_bytes(content)
        told = said_before(*words, output=output)
        assert resumes is None or told == RERUN_HINT + f" from its page files, step {step}" * resumes
        assert re.search(why, refused(*words, output=output)), (name, why)
        assert contents(lease).get(name) == content
        assert contents(lease) | {name: b""} == whole | {name: b""}
        (lease / name).write_bytes(whole[name])
    run = call(*words, output=output)
    assert gone_on(run) == step
    assert results(run.output) == alone


@pytest.mark.slow
def test_an_older_checkpoint_and_never_discard_page_files(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    words = ["--nvme", drive, *ALL, "--save-every", 2]
    killed("line=6", *words, output=tmp_path / "run")  # the save of step 4 has waited for that of step 2
    said = refused(*words, "--ram-fraction", "0.5", output=tmp_path / "run")
    assert "of step 5, newer than any checkpoint, cannot" in said
    checkpoint = complete_checkpoints(tmp_path / "run/checkpoints")[-1]
    assert f"start without them with --resume {checkpoint}" in said
    for moment in ("load", "loaded"):
        killed(moment, *words, "--ram-fraction", "0.5", "--resume", checkpoint, output=tmp_path / "run")
    run = call(*words, "--ram-fraction", "0.5", "--resume", checkpoint, output=tmp_path / "run")
    assert f"{checkpoint.name}, step " in run.text
    assert "removed what 1 run(s) left that died" in run.text
    assert results(run.output)["metrics"] == alone["metrics"]
    killed("record=2", "--nvme", drive, *ALL, output=tmp_path / "other")
    run = call("--nvme", drive, *ALL, "--ram-fraction", "0.5", "--resume", "never", output=tmp_path / "other")
    assert gone_on(run) is None
    assert "removed what 1 run(s) left that died" in run.text
    assert "a kill will leave no page files to resume from" in run.text
    assert len(run.steps) == STEPS
    assert not list((drive / "offload-trainer").iterdir())


# -- ends, settings, and what else looks at page files -----------------------------------------------------------------


@pytest.mark.slow
def test_a_stop_without_room_keeps_the_page_files(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    """A kill while the last weights are saved keeps them too."""
    words, output = ["--nvme", drive, *ALL], tmp_path / "run"
    stopped = faulty("INT@step=3;EIO@room", *words, output=output)
    assert stopped.code == 128 + signal.SIGINT
    assert "stopped after step 3, everything in page files; the same command resumes from there" in stopped.text
    assert not list((output / "checkpoints").glob("*"))
    killed("weights", *words, output=output)
    assert gone_on(call(*words, output=output)) == STEPS - 1
    assert results(output) == alone


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["end", "dropped"])
def test_killed_after_its_end_nothing_stays_on_the_drive(moment: str, drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *ALL]
    killed(moment, *words, output=tmp_path / "run")
    (lease,) = (drive / "offload-trainer").iterdir()
    run = call(*words, output=tmp_path / "run")
    assert "is already at step 6 of 6" in run.text
    assert f"{lease.parent}: removed what 1 run(s) left that died" in run.text
    assert not list((drive / "offload-trainer").iterdir())
    assert folders_in(tmp_path / "run/pages") == []


@pytest.mark.slow
def test_settings_of_the_page_files(drive: Path, tmp_path: Path) -> None:
    """A resumed run keeps choices of `auto` that page files have, and a setting that differs is named."""
    words = [word for word in ["--nvme", drive, *ALL] if word != "tiered.state_copies=2"]
    killed("record=3", *words, "tiered.state_copies=2", output=tmp_path / "run")
    for engine, places in (("deepspeed", "auto"), ("tiered", 2)):
        wish = load_config(["--engine", engine, "--output", str(tmp_path / "run")])
        assert as_page_files(wish, timed())[0].tiered.state_copies == places
    wish = load_config(["--output", str(tmp_path / "run")])
    before, from_pages = earlier_run(wish.save)
    assert (from_pages, before["train"]["micro_batch_size"]) == (True, 2)
    assert earlier_run(wish.save.model_copy(update={"resume": "never"})) == ({}, False)
    first = timed().drives[0]
    then, now = (
        replace(timed(), drives=(first, replace(timed(mixed=speed).drives[0], directory="/other")))
        for speed in (1e8, 2e8)
    )
    known = (tmp_path / "run/machine.json").read_bytes()
    (tmp_path / "run/machine.json").write_text(json.dumps(asdict(then)))
    assert as_page_files(wish, now)[1].drives == then.drives
    (tmp_path / "run/machine.json").write_bytes(known)
    run = call(*words, "--lr", "5e-3", output=tmp_path / "run")
    assert gone_on(run) == 3
    assert "note: optim.lr is 0.005; the page files' run was saved with" in run.text


def test_only_their_own_run_takes_page_files_which_are_not_exported(drive: Path, tmp_path: Path) -> None:
    """Another run removes what dead runs left, except page files; those of a lost run directory stay and are named."""
    killed("record=3", "--nvme", drive, *ALL, output=tmp_path / "run")
    (lease,) = (drive / "offload-trainer").iterdir()
    for source in (lease, tmp_path / "run"):
        with pytest.raises(UserError, match="repeat its command, which resumes from them"):
            opened(source).__enter__()
    stranger = dead_lease(drive / "offload-trainer")
    assert dead_runs(drive) == [stranger]
    assert dead_runs(drive, listed=tmp_path / "run/pages") == sorted([stranger, lease])
    with leased(drive) as living:
        assert lease.exists()
        assert not stranger.exists()
        (living / "state").write_bytes(bytes(8192))
        with pytest.raises(UserError, match="its run is alive"):
            opened(living).__enter__()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert dead_runs(drive) == []
    messages: list[str] = []
    with leased(drive, say=messages.append):
        pass
    (line,) = messages
    assert f"{lease} stays: it has the page files of the run in {tmp_path}/run" in line
    assert lease.exists()


@pytest.mark.slow
def test_page_files_stay_after_an_error(drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    words = ["--nvme", drive, *ALL]
    failed = faulty("EIO@page=110", *words, output=tmp_path / "run")
    assert failed.code == 1, failed.text
    run = call(*words, output=tmp_path / "run")
    assert f"; {RERUN_HINT} from its page files, step {gone_on(run)}, there or with another --nvme" in failed.text
    assert results(run.output) == alone


# -- several ranks -----------------------------------------------------------------------------------------------------


TIERED = [*ALL, "--engine", "tiered"]


def one_killed(fault: str, *words: object, output: Path, count: int) -> None:
    """Kill one rank, and check that the others end without a message."""
    rank = int(fault.split(":")[0])
    ended = call_ranks(*words, output=output, count=count, script=[FAULTY, fault])
    codes = [run.code for run in ended]
    assert codes == [-9 if one == rank else 69 for one in range(count)], [run.text[-2000:] for run in ended]


@pytest.mark.slow
def test_whichever_rank_is_killed(drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *TIERED, "tiered.overlap=backward"]
    output, before = tmp_path / "run", 0
    for fault, expected in (  # rank and moment of the kill, and by how many steps the files may advance
        ("1:kill@page=3", [0]),
        ("0:kill@flip=2", [1]),
        ("1:kill@flip=1", [0, 1]),
        ("0:kill@half", [0]),
        ("0:kill@record", [1]),
        ("0:kill@line=5", [0, 1, 2]),
    ):
        one_killed(fault, *words, output=output, count=3)
        (folder,) = folders_in(output / "pages")
        assert list((drive / "offload-trainer").iterdir()) == [folder]
        newest = read_newest(read_description(folder))
        step = newest.step if newest else 0
        assert step - before in expected
        before = step
    ended = call_ranks(*words, output=output, count=2)
    assert [run.code for run in ended] == [2] * 2, ended
    assert "3 rank(s), and this run has 2: use --gpus 3" in ended[0].text
    assert folders_in(output / "pages") == [folder]
    ended = call_ranks(*(word for word in words if word != "tiered.state_copies=2"), output=output, count=3)
    assert [run.code for run in ended] == [0] * 3, ended
    assert gone_on(ended[0]) == before == 4
    assert results(output) == results(call("--nvme", drive, *ALL, "--accumulate", 3, output=tmp_path / "alone").output)
    assert not list((drive / "offload-trainer").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("masters", [[], ["--dtype", "bf16", "optim.master_dtype=bf16"]])
def test_small_pages_resume_with_another_number_of_ranks(masters: list[str], drive: Path, tmp_path: Path) -> None:
    output, words = tmp_path / "run", ["--nvme", drive, *TIERED, *masters, "tiered.page_size=4096"]
    one_killed("1:kill@flip=3", *words, output=output, count=2)
    killed("record=2", *words, "--accumulate", 2, output=output)
    (ended, _) = call_ranks(*words, output=output, count=2)
    assert gone_on(ended) in (4, 5)
    alone = call("--nvme", drive, *ALL, *masters, "--accumulate", 2, output=tmp_path / "alone")
    assert results(output) == results(alone.output)


@pytest.mark.slow
def test_a_rank_that_still_lives_is_waited_for(drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *ALL, "--output", tmp_path / "run"]
    killed("record=2", *words[:-2], output=tmp_path / "run")
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
