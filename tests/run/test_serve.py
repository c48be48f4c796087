"""Tests of `offload-train serve`: the page's data, the hosts that the server answers, and control of a run."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_compare import a_run
from test_telemetry import a_step

from offload_trainer import cli
from offload_trainer.errors import UserError
from offload_trainer.run.commands.serve import TOKEN_HEADER, Follower, Server

TOKEN = "the-token-of-this-test"
HOLDER = """
import fcntl, os, signal, sys
def heard(number, _):
    print(signal.Signals(number).name, flush=True)
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "nohup" else heard)
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.pwrite(lock, f"{os.getpid()}\\n".encode(), 0)
print("ready", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def served(*runs: Path, token: str | None = None) -> Iterator[Server]:
    with Server(runs, port=0, token=token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Server, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def data(server: Server, seen: str = "") -> Any:
    return json.loads(ask(server, f"/data?seen={seen}")[1])


@contextmanager
def holding(run: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks the run directory as a run does, and prints the signals that it receives."""
    words = [sys.executable, "-c", HOLDER, str(run / ".lock"), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def steps_of(run: Follower) -> list[int]:
    run.read()
    return [point.step for point in run.points]


def test_an_appended_step_is_sent_within_two_seconds_and_only_once(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=3)
    with served(run) as server:
        (first,) = data(server)
        assert [point["step"] for point in first["points"]] == [1, 2, 3]
        assert first["plan"]["tiers"] == json.loads((run / "plan.json").read_text())["tiers"]
        append(run, a_step(4, loss=2.5).to_json() + "\n")
        start = time.monotonic()
        (second,) = data(server, first["seen"])
        assert time.monotonic() - start < 2
        assert (second["from"], [point["loss"] for point in second["points"]]) == (3, [2.5])
        assert data(server, second["seen"])[0]["points"] == []


def test_a_partial_line_waits_for_its_rest(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=2)
    line = a_step(3).to_json()
    follower = Follower(run)
    append(run, line[:40])
    assert steps_of(follower) == [1, 2]
    append(run, line[40:])
    assert steps_of(follower) == [1, 2]
    append(run, "\nnonsense\n" + a_step(4).to_json() + "\n")
    assert steps_of(follower) == [1, 2, 3, 4]


def test_repeated_steps_replace_earlier_ones(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=5)
    follower = Follower(run)
    assert steps_of(follower) == [1, 2, 3, 4, 5]
    append(run, a_step(3, loss=9.0).to_json() + "\n")
    assert steps_of(follower) == [1, 2, 3]
    assert follower.points[-1].loss == 9.0
    text = "".join(a_step(step, loss=7.0).to_json() + "\n" for step in range(1, 9))
    (run / "metrics.jsonl").write_text(text)  # the same inode, and longer than what was read
    assert steps_of(follower) == list(range(1, 9))
    assert {point.loss for point in follower.points} == {7.0}
    (run / "metrics.jsonl").unlink()
    assert steps_of(follower) == []


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=0)
    line = a_step(7).to_json().partition(",")[2]
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step},{line}\n' for step in range(1, 50_002))
    follower = Follower(run)
    steps = steps_of(follower)
    assert 1000 <= len(steps) <= 2000
    assert len({after - before for before, after in itertools.pairwise(steps)}) == 1
    assert follower.last
    assert follower.last.step == 50_001


def test_other_hosts_and_paths_are_refused(tmp_path: Path) -> None:
    with served(a_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "0.0.0.0", ""):
            for path in ("/", "/data"):
                status, text, _ = ask(server, path, Host=host)
                assert (status, "points" in text) == (421, False)
        assert ask(server, "/", Host="localhost:9999")[0] == 200
        for path in ("/../config.yaml", "/%2e%2e/config.yaml", "/config.yaml", "//etc/passwd", "/run/0/save"):
            assert ask(server, path)[0] == 404


def test_the_page_loads_nothing_and_escapes_names(tmp_path: Path) -> None:
    run = a_run(tmp_path / "<img src=x onerror=alert(1)>")
    with served(run) as server:
        _, page, headers = ask(server, "/")
        _, told, about = ask(server, "/data")
    assert not re.search(r"https?://|innerHTML|@import|url\(", page)
    policy = headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)
    assert nonce
    assert f'<script nonce="{nonce[1]}">' in page
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<img" not in page
    assert "<img" in told
    assert (about["Content-Type"], about["X-Content-Type-Options"]) == ("application/json; charset=utf-8", "nosniff")


def test_control_needs_the_token(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with holding(run), served(run) as readonly, served(run, token=TOKEN) as server:
        header = {TOKEN_HEADER: TOKEN}
        assert ask(readonly, "/run/0/save", method="POST", **header)[0] == 403
        assert ask(server, "/run/0/save", method="POST")[0] == 403
        assert ask(server, "/run/0/save", method="POST", **{TOKEN_HEADER: TOKEN + "x"})[0] == 403
        assert ask(server, f"/run/0/save?token={TOKEN}", method="POST")[0] == 403
        assert ask(server, "/run/0/save", method="POST", **header, Host="evil.example")[0] == 421
        assert not (run / "save").exists()
        assert ask(server, "/run/1/save", method="POST", **header)[0] == 404
        assert ask(server, "/run/0/save", method="POST", **header)[0] == 200
        assert (run / "save").read_bytes() == b""


@pytest.mark.parametrize(("how", "signal_name"), [("", "SIGHUP"), ("nohup", "SIGTERM")])
def test_a_run_gets_one_stop_signal_from_all_servers(tmp_path: Path, how: str, signal_name: str) -> None:
    """A second SIGTERM would end a run unsaved. The next run in the directory gets a signal again."""
    run = a_run(tmp_path / "run")
    for _ in range(2):
        with (
            holding(run, how) as process,
            served(run, token=TOKEN) as first,
            served(run, token=TOKEN) as second,
        ):
            assert process.stdout
            assert data(first)[0]["running"]
            answers = []
            for number, server in enumerate((first, second, first)):
                answers.append(ask(server, "/run/0/stop", method="POST", **{TOKEN_HEADER: TOKEN})[:2])
                if number == 0:
                    assert process.stdout.readline() == f"{signal_name}\n"
            assert answers[0] == (200, "the run finishes this step, saves and stops")
            assert answers[1:] == [(200, "the run was asked to stop already")] * 2
            time.sleep(0.2)
            os.kill(process.pid, signal.SIGKILL)
            assert process.stdout.read() == ""


def test_a_pid_that_does_not_hold_the_lock_is_not_signalled(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with holding(run), subprocess.Popen(["sleep", "60"]) as other:
        (run / ".lock").write_text(f"{other.pid}\n")
        with pytest.raises(UserError, match=r"does not hold its \.lock"):
            Follower(run).stop()
        assert other.poll() is None
        other.kill()


def test_runs_that_are_not_running(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / ".lock").write_text("")
    for action in (Follower(run).save, Follower(run).stop):
        with pytest.raises(UserError, match="is not running"):
            action()
    assert not (run / "save").exists()
    (run / "metrics.jsonl").unlink()
    with served(run) as server:
        assert data(server)[0]["last"] is None


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([str(tmp_path)], "holds no run"),
        ([], "at least one RUN"),
        ([str(tmp_path), "--host", "0.0.0.0"], "127.0.0.1 only"),
        ([str(a_run(tmp_path / "run")), "--port", "99999"], "--port 99999"),
    ):
        assert cli.main(["serve", *words]) == 2
        assert message in capsys.readouterr().err
