"""Tests of the page of `offload-train serve` in a browser: it draws a new step soon, asks no other server for anything,
and its buttons save and stop a run.

    pytest --basetemp DIR tests/run/test_live_page.py

leaves pictures of the page in DIR, 1200 and 400 pixels wide.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from browser import Page, browser
from commands import COMMAND, TINY, start
from forked_ranks import held_port
from test_compare import a_run
from test_serve import append, holding
from test_telemetry import a_step

pytestmark = pytest.mark.browser

WIDTHS = (1200, 400)
SAVE, STOP = (f"document.querySelectorAll('button')[{number}]" for number in range(2))


@contextmanager
def serving(*words: object, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Run `offload-train serve WORDS`; yield its process, the page's address, and the token with --allow-control."""
    told = folder / "served"
    bound, port = held_port()
    with bound:
        process = start(COMMAND, "serve", "--port", port, *words, stdout=told, stderr=told, own=True)
        assert isinstance(process, subprocess.Popen)
        try:
            until = time.monotonic() + 60
            last = r"token for the buttons: (\S+)\n" if "--allow-control" in words else "Ctrl-C()"
            while not (found := re.search(last, told.read_text())):
                assert process.poll() is None, told.read_text()
                assert time.monotonic() < until
                time.sleep(0.02)
            yield process, f"http://127.0.0.1:{port}/", found[1]
        finally:
            process.terminate()
            process.wait(20)


def fits(page: Page) -> bool:
    """Return whether the page needs no horizontal scrolling."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def points(page: Page, run: int) -> int:
    """Return the number of points of a run's losses that are drawn."""
    return int(page.evaluate(f"document.querySelectorAll('[aria-label=\"loss\"] polyline')[{run}].points.length"))


def test_a_step_is_drawn_within_two_seconds_and_nothing_else_is_asked(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "one", steps=3), a_run(tmp_path / "two", steps=40, loss=3.5)]
    took = []
    with (
        holding(runs[0]),
        serving(*runs, folder=tmp_path) as (server, address, _),
        browser(tmp_path / "profile") as page,
    ):
        page.open(address, width=WIDTHS[0])
        page.until("document.querySelectorAll('.card').length === 2")
        assert "is running" in page.text()
        assert (points(page, 0), points(page, 1)) == (3, 40)
        process, begun = psutil.Process(server.pid), time.monotonic()
        used = sum(process.cpu_times()[:2])
        for step in range(4, 9):
            time.sleep(0.37)  # not in time with the page, which asks each second
            start_of_step = time.monotonic()
            append(runs[0], a_step(step, loss=5.0 / step).to_json() + "\n")
            page.until(f"document.querySelector('.card').textContent.includes('step {step} of')")
            took.append(time.monotonic() - start_of_step)
            assert points(page, 0) == step
        share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - begun)
        print(f"drawn after {', '.join(f'{one:.2f}' for one in took)} s; {share:.2%} of a core")
        assert max(took) < 2
        assert share < 0.05
        for width in WIDTHS:
            page.resize(width)
            page.until(f"innerWidth === {width}")
            assert fits(page)
            page.photograph(tmp_path / f"runs-{width}.png")
        assert "1.00 TB" in page.text()  # of the planned machine's drive
        assert not re.search(r"\de\+|NaN|undefined|null", page.text())
        assert page.evaluate("document.querySelectorAll('button').length") == 0  # the server has no token
        assert {one.partition("?")[0] for one in page.requests()} - {"data:,"} == {address, f"{address}data"}
        assert page.problems() == []


def test_the_browser_stops_what_would_leave_the_page(tmp_path: Path) -> None:
    """Even a script in the page reaches no other server: the page's policy forbids it."""
    with (
        serving(a_run(tmp_path / "run"), folder=tmp_path) as (_, address, _),
        socket.create_server(("127.0.0.1", 0)) as other,
        browser(tmp_path / "profile") as page,
    ):
        page.open(address, width=WIDTHS[0])
        elsewhere = f"http://127.0.0.1:{other.getsockname()[1]}/"
        refused = page.evaluate(
            "new Promise(done => { const seen = [];"
            "document.addEventListener('securitypolicyviolation', event => {"
            "  seen.push(event.effectiveDirective); if (seen.length === 3) done(seen.sort()); });"
            f"fetch('{elsewhere}').catch(() => 0); new Image().src = '{elsewhere}';"
            f"const script = document.createElement('script'); script.src = '{elsewhere}';"
            "document.body.append(script); setTimeout(() => done(seen), 10000); })"
        )
        assert refused == ["connect-src", "img-src", "script-src-elem"]
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_the_buttons_save_and_stop_a_run(tmp_path: Path, drive: Path) -> None:
    """A checkpoint is saved for a click at each width, and the run ends with its last step saved."""
    output, told = tmp_path / "run", tmp_path / "told"
    words = [*TINY, "--nvme", drive, "--steps", 1_000_000, "--save-every", 1_000_000, "train.eval_every=0"]
    run = start(COMMAND, *words, "--output", output, stdout=told, stderr=told)

    def wait_for(what: str, count: int) -> None:
        end = time.monotonic() + 120
        while len(list(output.glob(what))) < count:
            assert run.poll() is None, told.read_text()
            assert time.monotonic() < end, told.read_text()
            time.sleep(0.05)

    try:
        wait_for("metrics.jsonl", 1)
        with (
            serving(output, "--allow-control", folder=tmp_path) as (_, address, token),
            browser(tmp_path / "profile") as page,
        ):
            page.open(address, width=WIDTHS[0])
            page.until(f"{SAVE} && !{SAVE}.disabled")
            page.click(SAVE)
            page.until("document.body.innerText.includes('the token is missing or wrong')")
            assert "step\t-\t" in page.text()  # nothing was timed, so the plan knows no seconds
            page.click("document.querySelector('#token')")
            page.type(token)
            for count, width in enumerate(WIDTHS, start=1):
                page.resize(width)
                page.until(f"innerWidth === {width}")
                page.click(SAVE)
                page.until("document.body.innerText.includes('a checkpoint follows after this step')")
                wait_for("checkpoints/step-*/MANIFEST.json", count)
                assert fits(page)
                page.photograph(tmp_path / f"saved-{width}.png")
            step = page.evaluate("document.querySelector('.card p').textContent")
            page.press(STOP)
            page.until(f"document.querySelector('.card p').textContent !== '{step}'")
            page.release(STOP)  # the page was drawn anew meanwhile
            page.until("document.body.innerText.includes('the run finishes this step, saves and stops')")
            assert run.wait(120) in (129, 143), told.read_text()  # 143 where SIGHUP is ignored
            assert "everything saved; the same command resumes from there" in told.read_text()
            last = sorted((output / "checkpoints").glob("step-*/MANIFEST.json"))[-1]
            number = int(last.parent.name.removeprefix("step-"))
            page.until(f"document.body.innerText.includes('resumes from step {number}')")
            assert page.evaluate(f"{SAVE}.disabled && {STOP}.disabled")
            page.photograph(tmp_path / "stopped-400.png")
            assert token not in page.evaluate("document.documentElement.outerHTML")
    finally:
        run.send_signal(signal.SIGKILL)
