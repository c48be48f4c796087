"""Tests of signals, of standard streams that are gone, and of the loop's stops; test_ends.py has whole runs."""

import logging
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from forked_child import in_a_fork, lose_streams
from test_telemetry import a_step

from offload_trainer.cli import main
from offload_trainer.common.errors import Stopped, exit_code
from offload_trainer.common.stdio import lasting_streams, write_now
from offload_trainer.ranks import all_gather_json
from offload_trainer.run import loop
from offload_trainer.run.checkpoint import TrainState
from offload_trainer.run.directory import Log
from offload_trainer.run.signals import StopRequest, stop_at_once, waiting
from offload_trainer.telemetry.meters import IoCount
from offload_trainer.telemetry.sinks import Screen

STOPPING = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]


@pytest.fixture(autouse=True)
def as_at_a_terminal() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGUSR1)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int, *, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_while_a_line_is_printed(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with waiting(say=write_now) as asked:
        assert asked.stop == 0
        monkeypatch.setattr(sys, "stderr", Mock(**{"write.side_effect": RuntimeError("reentrant call")}))
        send(number)
        assert asked.stop == number
    monkeypatch.undo()
    assert signal.getsignal(number) is before
    assert f"{number.name}: finishing this step" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPPING[1:])
def test_a_second_signal_ends_immediately_and_a_third_kills(number: signal.Signals) -> None:
    """One within `same_within` counts as the first: systemd signals a launcher, which passes it on, and its ranks."""
    with waiting(say=None, same_within=600) as asked:
        send(number, times=2)
        assert asked.stop == number

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with pytest.raises(Stopped, match="unsaved") as caught, stop_at_once(), waiting(say=None):
            send(number, times=2)
        assert exit_code(caught.value) == 128 + number
        send(signal.SIGHUP)  # the terminal closes meanwhile
        send(number)
        return 0

    assert in_a_fork(work) == -number


@pytest.mark.slow
@pytest.mark.parametrize("first", STOPPING)
def test_a_hangup_is_never_the_second(first: signal.Signals) -> None:
    """A closing terminal sends several, and systemd sends one after SIGTERM. Under nohup it is ignored."""
    for sent in ((first, signal.SIGHUP, signal.SIGHUP), (signal.SIGHUP, signal.SIGHUP, first)):
        with waiting(say=None) as asked:
            for number in sent:
                send(number)
            assert asked.stop == sent[0]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_at_once(), waiting(say=None) as asked:
        send(signal.SIGHUP)
        assert asked.stop == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_sigusr1_requests_a_checkpoint() -> None:
    with stop_at_once():
        send(signal.SIGUSR1)
        with waiting(say=None) as asked:
            assert not asked.save
            send(signal.SIGUSR1, times=2)
            assert (asked.save, asked.stop) == (True, 0)
        send(signal.SIGUSR1)


@pytest.mark.parametrize("number", STOPPING)
def test_a_stop_that_is_swallowed_is_raised_again(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        deadline = time.monotonic() + 300
        type("Swallows", (), {"__del__": lambda self: send(number)})()  # a destructor's exceptions are swallowed
        while time.monotonic() < deadline:
            pass

    with pytest.raises(Stopped), stop_at_once():
        work()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert capfd.readouterr().err == ""


def _in_set_name(number: int) -> None:
    """Send a signal while a class is created, as in importing dataclasses; Python 3.11 turns it into RuntimeError."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            send(number)

    type("Owner", (), {"field": Named()})


def _in_a_library(number: int, *, package: str = "offload_trainers") -> None:
    """Send a signal in code whose `finally` uses a name that is not set yet, as transformers' `no_init_weights`."""
    code = "try:\n    send(number)\n    before = 1\nfinally:\n    before\n"
    exec(code, {"__name__": package, "send": send, "number": number})


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [_in_set_name, _in_a_library])
def test_a_stop_converted_to_another_error_is_a_stop(interrupted: Callable[[int], None]) -> None:
    with pytest.raises(Stopped, match="stopped by SIGTERM") as caught, stop_at_once():
        interrupted(signal.SIGTERM)
    assert exit_code(caught.value) == 143
    with waiting(say=None):
        send(signal.SIGINT)
        with pytest.raises(Stopped, match="stopped by SIGTERM"), stop_at_once():
            interrupted(signal.SIGTERM)


@pytest.mark.slow
def test_errors_after_a_stop_that_are_reported() -> None:
    """A NameError in this package is a bug. Cleanup is not interrupted, and may fail."""
    with pytest.raises(NameError), stop_at_once():
        _in_a_library(signal.SIGTERM, package="offload_trainer.run")

    def cleaned(error: OSError | None) -> None:
        try:
            send(signal.SIGTERM)
        finally:
            time.sleep(0.3)
            closed.append(error)
            if error:
                raise error

    closed, full = list[OSError | None](), OSError("no space")
    with pytest.raises(Stopped), stop_at_once():
        cleaned(None)
    with pytest.raises(OSError, match="no space"), stop_at_once():
        cleaned(full)
    assert closed == [None, full]


# -- standard streams that are closed, or never existed ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a closed pipe", "a terminal that is gone"])
def test_output_without_a_reader(kind: str, tmp_path: Path) -> None:
    """Once a line is lost, no later write fails, even one to the bare descriptor. log.txt gets each line first."""

    def work() -> None:
        with open(tmp_path / "log.txt", "ab", buffering=0) as file:
            log = Log(loud=True, file=file)
            log.say_now("one")
            log.say("two")  # also without the command's stream replacement
        with lasting_streams():
            print("the first", file=sys.stderr)
            for _ in range(2):
                print("a line")
                print("a line", file=sys.stderr, flush=True)
                Screen(2, initial=0, say=print, bounds={}, drives=False).step(a_step(2))
                warnings.warn("of a library", stacklevel=1)
                logging.getLogger("a library").error("said")
                Log(loud=True).say("a line")
                write_now("a line")
                os.write(2, b"as from C\n")

    assert in_a_fork(work, streams=lambda: lose_streams(kind)) == 0
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]
    for words, code in ((["--help"], 0), (["--print-config"], 0), (["trian"], 2), (["export", "/nowhere", "b"], 2)):
        assert in_a_fork(lambda words=words: main(words), streams=lambda: lose_streams(kind)) == code


def test_output_that_was_asked_for_must_arrive() -> None:
    """On a full disk, lost progress messages are ignored, and lost results are an error."""

    def to_full(number: int) -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)

    assert in_a_fork(lambda: main(["--print-config"]), streams=lambda: to_full(1)) == 1

    def work() -> None:
        with lasting_streams():
            print("a line", file=sys.stderr)

    assert in_a_fork(work, streams=lambda: to_full(2)) == 0


def test_closed_streams_are_not_reused_by_files(tmp_path: Path) -> None:
    """The next file opened after `2>&-` does not become descriptor 2 and receive messages."""

    def work() -> None:
        with lasting_streams(), open(tmp_path / "weights", "wb"):
            os.write(2, b"as from C\n")
            print("a line", file=sys.stderr, flush=True)

    def close() -> None:
        os.close(1)
        os.close(2)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None

    assert in_a_fork(work, streams=close) == 0
    assert (tmp_path / "weights").read_bytes() == b""


def test_names_that_are_not_utf8(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with lasting_streams():
            print("/out/\udcff", flush=True)

    assert in_a_fork(work) == 0
    assert capfd.readouterr().out == "/out/\\udcff\n"


# -- the training loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
def test_a_signal_that_comes_while_the_ranks_agree_is_not_forgotten(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, agreed, saved = StopRequest(), [], []

    def slowly(said: Any) -> Any:
        answers = all_gather_json(said)
        agreed.append(said)
        if len(agreed) == at:
            asked.stop = signal.SIGTERM  # the handler sets it
        return answers

    monkeypatch.setattr(loop, "all_gather_json", slowly)
    monkeypatch.setattr(loop, "_save_if_due", lambda job, state, **why: saved.append((state.step, why["stopping"])))
    monkeypatch.setattr(loop, "_step", lambda job, state, batches: replace(state, step=state.step + 1))
    monkeypatch.setattr(loop, "_evaluate", lambda job, step: None)
    job: Any = SimpleNamespace(
        train=SimpleNamespace(steps=9, micro_batch_size=1, eval_every=0),
        train_rows=SimpleNamespace(train_batches=lambda *_, **__: iter(())),
        engine=SimpleNamespace(rank=0, world=1),
        checkpoints=type("Unsaved", (nullcontext,), {"ended": False})(),
        to_save=loop.TimeToSave(step=None, save=0.0),
        commit=None,
        telemetry=None,
    )
    state = loop.train(job, asked, begins=None, checkpoint=None)
    assert state.step == at + 1
    assert saved[-1] == (at + 1, True)
    assert asked.stop == signal.SIGTERM


@pytest.mark.parametrize("unknown", [False, True])
def test_traffic_of_all_ranks_is_summed_and_rows_that_they_share_count_once(
    unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traffic is unknown if one rank cannot measure its own; two ranks that report one row's tokens are one group."""
    monkeypatch.setattr(loop, "all_gather_json", lambda said: [said, (1, None if unknown else 2, 30)])
    for world, tokens in ((2, 40), (1, 20)):
        job: Any = SimpleNamespace(engine=SimpleNamespace(world=world))
        assert loop._of_all_ranks(job, IoCount(4, 5), tokens=10) == (IoCount(5, None if unknown else 7), tokens)


def test_a_checkpoint_on_request_that_cannot_be_made_is_said_and_a_directory_requests_none(tmp_path: Path) -> None:
    messages: list[str] = []
    job: Any = SimpleNamespace(train=SimpleNamespace(steps=9), save_every=0, cannot_save="no moments", checkpoints=None)
    job.say = messages.append
    loop._save_if_due(job, TrainState(step=3, tokens=0, data_position=0), stopping=False, wished=True, ended=False)
    assert messages == ["no checkpoint was made: no moments"]
    (tmp_path / "save").mkdir()
    job.telemetry, job.save_request_file = True, tmp_path / "save"
    job.checkpoints = SimpleNamespace(ended=False)
    assert loop._agree(job, StopRequest()) == (0, False, False)


def test_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    left = loop.TimeToSave(step=None, save=4.0)
    left.begin("step", "validation", "save")
    assert left.seconds is None  # the seconds of a first step are unknown
    now[0] = 10.0
    left.begin("validation", "save")
    now[0] = 13.0
    left.begin("save")
    assert left.seconds == 4.0
    now[0] = 15.0
    assert left.seconds == 2.0
    left.begin("step", "validation", "save")
    now[0] = 16.0
    assert left.seconds == 9 + 3 + 4
    left.save = 6.0
    now[0] = 26.0  # the step takes longer than the one before
    assert left.seconds == 0 + 3 + 6
    left.begin("save")
    left.begin("step", "save")
    assert left.seconds == 11 + 6  # the longest of the latest steps
