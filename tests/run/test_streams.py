"""Tests of standard streams that are closed, or never existed."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
from forked_child import GONE, in_a_fork, lose_streams
from tqdm import tqdm

from offload_trainer.cli import main
from offload_trainer.run.directory import Log
from offload_trainer.stdio import lasting_streams, write_now


def say_much() -> None:
    """Write to the streams in every way: print, progress bar, log, a library's warning and logger, C, a handler."""
    for _ in range(2):
        print("a line")
        print("a line", file=sys.stderr, flush=True)
        with tqdm(total=2, file=sys.stderr, mininterval=0) as bar:
            bar.update()
        warnings.warn("of a library", stacklevel=1)
        logging.getLogger("a library").error("said")
        Log(loud=True).say("a line")
        write_now("a line")
        os.write(2, b"as from C\n")


@pytest.mark.parametrize("kind", GONE)
def test_output_without_a_reader(kind: str) -> None:
    """Once a line is lost, no later write fails, even one to the bare descriptor."""

    def work() -> None:
        with lasting_streams():
            print("the first", file=sys.stderr)
            say_much()

    assert in_a_fork(work, streams=lambda: lose_streams(kind)) == 0


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["--print-config"], 0), (["trian"], 2), (["export", "/nowhere", "b"], 2)]
)
def test_commands_without_a_reader(kind: str, words: list[str], code: int) -> None:
    assert in_a_fork(lambda: main(words), streams=lambda: lose_streams(kind)) == code


def test_the_log_continues_without_a_terminal(tmp_path: Path) -> None:
    """The log file gets each line before the screen, also without the command's stream replacement."""

    def work() -> None:
        with open(tmp_path / "log.txt", "ab", buffering=0) as file:
            log = Log(loud=True, file=file)
            log.say_now("one")
            log.say("two")

    assert in_a_fork(work, streams=lambda: lose_streams("a closed pipe")) == 0
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]


def test_output_that_was_asked_for_must_arrive() -> None:
    """On a full disk, lost progress messages are ignored, and lost results are an error."""

    def to_full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    assert in_a_fork(lambda: main(["--print-config"]), streams=to_full) == 1

    def stderr_to_full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

    def work() -> None:
        with lasting_streams():
            print("a line", file=sys.stderr)

    assert in_a_fork(work, streams=stderr_to_full) == 0


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
