"""Tests of stops with a deadline (`train.stop_within`) and of warnings that the machine will be taken away."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from commands import TERMINATE, TINY, call, call_and_kill

from offload_trainer.run import preemption
from offload_trainer.run.launcher import LAUNCHER, stop_target
from offload_trainer.telemetry import time_to_save
from offload_trainer.telemetry.time_to_save import TimeToSave

WORDS = [*TINY, "--steps", 6, "--save-every", 2, "train.eval_every=0"]


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if path.name.startswith("step-"))


def test_a_stop_that_does_not_fit_ends_at_once_and_resumes(tmp_path: Path) -> None:
    """A deadline that is too short for a save leaves the last checkpoint; a long one is kept to. Both resume."""
    whole = call(*WORDS, output=tmp_path / "whole")
    for within, saved, told in ((0.5, 2, "stopped at once, unsaved"), (600, 3, "everything saved")):
        words = [*WORDS, f"train.stop_within={within}"]
        output = tmp_path / f"within-{within}"
        first = output / "checkpoints/step-00000002"
        run = call_and_kill(*words, output=output, when=lambda _, first=first: first.exists(), number=TERMINATE, hold=3)
        assert run.code == 128 + signal.SIGTERM, run.text
        assert told in run.text
        assert checkpoints(output)[-1] == f"step-{saved:08d}"
        assert "train.stop_within=0.5" in run.text or within == 600
        again = call(*words, output=output)
        assert f"step {saved}" in again.text
        assert again.losses == whole.losses


def test_a_file_stops_a_run(tmp_path: Path) -> None:
    """A run that is between two steps when the file appears finishes and saves its step."""
    warning, output = tmp_path / "evicted", tmp_path / "out"

    def appears(lines: list[str]) -> bool:
        if len(lines) < 3:
            return False
        warning.touch()
        time.sleep(3 * preemption._EVERY)
        return True

    words = [*WORDS, f"train.stop_on=[{warning}]"]
    run = call_and_kill(*words, output=output, when=appears, number=0, hold=3)
    assert run.code == 128 + signal.SIGTERM, run.text
    assert f"warning of {warning}: the file exists" in run.text
    assert checkpoints(output)[-1] == "step-00000003"


def test_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time_to_save.time, "monotonic", lambda: now[0])
    left = TimeToSave(step=None, save=4.0)
    left.begin_step(validates=True)
    assert left.seconds is None  # nobody knows the seconds of a first step
    now[0] = 10.0
    left.begin_validation()
    now[0] = 13.0
    left.begin_save()
    assert left.seconds == 4.0
    now[0] = 15.0
    assert left.seconds == 2.0
    left.begin_step(validates=True)
    now[0] = 16.0
    assert left.seconds == 9 + 3 + 4
    left.save = 6.0
    now[0] = 26.0  # the step takes longer than the one before
    assert left.seconds == 0 + 3 + 6
    left.begin_save()
    left.begin_step(validates=False)
    assert left.seconds == 11 + 6  # the longest of the latest steps


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ({}, "this process"),
        ({LAUNCHER: "77"}, "77"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, "its parent"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}, "this process"),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, "this process"),
    ],
)
def test_a_warning_goes_to_a_launcher_that_would_restart_or_misjudge_the_ranks(
    place: dict[str, str], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    known = {"this process": os.getpid(), "its parent": os.getppid()}
    assert stop_target() == known.get(target, 77)


# -- metadata services -------------------------------------------------------------------------------------------------


class Metadata(BaseHTTPRequestHandler):
    """A stand-in for the metadata services of AWS and GCP."""

    warns = False
    asked: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self._answer(200, "secret")

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/computeMetadata/v1/instance/preempted":
            assert self.headers["Metadata-Flavor"] == "Google"
            self._answer(200, "TRUE" if self.warns else "FALSE")
        elif self.headers["X-aws-ec2-metadata-token"] != "secret":
            self._answer(401, "")
        elif self.path == "/latest/meta-data/spot/instance-action" and self.warns:
            self._answer(200, json.dumps({"action": "terminate", "time": "2030-09-18T08:22:00Z"}))
        else:
            self._answer(404, "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve both services; yield HOST:PORT."""
    monkeypatch.setattr(Metadata, "warns", False)
    monkeypatch.setattr(Metadata, "asked", [])
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the signals that are sent instead of SIGTERM to this process; looks are 10 ms apart."""
    sent: list[int] = []
    monkeypatch.setattr(preemption, "_EVERY", 0.01)
    monkeypatch.setattr(preemption.os, "kill", lambda _, number: sent.append(number))
    return sent


def until(condition: object, *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "told"), [("aws", '"action": "terminate"'), ("gcp", "this instance is being preempted")]
)
def test_a_metadata_service_stops_a_run(
    source: str, told: str, service: str, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{service}/")
    monkeypatch.setenv("GCE_METADATA_HOST", service)
    said: list[str] = []
    with preemption.stopping_on_warnings([source], say=said.append):
        until(lambda: len(Metadata.asked) > 2)
        assert not stops
        assert not said
        monkeypatch.setattr(Metadata, "warns", True)
        until(lambda: stops)
    assert stops == [signal.SIGTERM]
    (line,) = said
    assert line.startswith(f"warning of {source}: ")
    assert told in line


def test_a_service_that_does_not_answer_is_told_once(stops: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    said: list[str] = []
    with preemption.stopping_on_warnings(["gcp"], say=said.append):
        until(lambda: said)
        time.sleep(0.1)
    (line,) = said
    assert line.startswith("note: train.stop_on: gcp does not answer (")
    assert not stops
