"""A page in headless Chromium, driven by its DevTools protocol over two pipes, which needs no library and no port."""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0  # seconds for an answer
_QUIET = ("no-first-run", "no-default-browser-check", "disable-background-networking", "disable-component-update")


class Page:
    """One page. `events` holds everything that the browser has reported, in its order."""

    def __init__(self, commands: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._commands, self._answers, self._rest, self._number = commands, answers, b"", 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (told := self._hear()).get("id") != self._number:
            self.events.append(told)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def _hear(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as ready:
            ready.register(self._answers, selectors.EVENT_READ)
            while b"\0" not in self._rest:
                assert ready.select(end - time.monotonic()), f"the browser has not answered for {PATIENCE:.0f} s"
                data = os.read(self._answers, 1 << 20)
                assert data, "the browser has ended"
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript condition is true and what it sees has been painted."""
        found = self.evaluate(
            "new Promise(done => {"
            f"const end = Date.now() + {1000 * PATIENCE / 2}, painted = () => requestAnimationFrame(() => done(true));"
            f"const look = () => ({condition}) ? requestAnimationFrame(painted)"
            " : Date.now() > end ? done(false) : setTimeout(look, 20); look(); })"
        )
        assert found, f"{condition} has not become true in {PATIENCE / 2:.0f} s:\n{self.text()}"

    def text(self) -> str:
        """Return what a reader sees."""
        return str(self.evaluate("document.body.innerText"))

    def open(self, address: str, *, width: int) -> None:
        """Open an address and wait until it is loaded."""
        self.resize(width)
        seen = len(self.events)
        self.send("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[seen:]):
            self.events.append(self._hear())

    def resize(self, width: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def press(self, element: str) -> None:
        """Press the mouse button in the middle of an element, which a JavaScript expression names."""
        self._mouse("mousePressed", element)

    def release(self, element: str) -> None:
        self._mouse("mouseReleased", element)

    def click(self, element: str) -> None:
        self.press(element)
        self.release(element)

    def _mouse(self, what: str, element: str) -> None:
        middle = "[place.x + place.width / 2, place.y + place.height / 2]"
        x, y = self.evaluate(
            f"(() => {{ const found = {element}; found.scrollIntoView({{block: 'nearest'}});"
            f"const place = found.getBoundingClientRect(); return {middle}; }})()"
        )
        self.send("Input.dispatchMouseEvent", type=what, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.send("Input.insertText", text=text)

    def photograph(self, file: Path) -> None:
        """Write a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def problems(self) -> list[Any]:
        """Return exceptions, and the errors and warnings that the browser has logged."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        told = [event["params"] for event in self.events if event["method"] in kinds]
        return [one for one in told if one.get("entry", {}).get("level") not in ("verbose", "info")]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile in `folder`, and yield a page; skip the test where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    words = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-dev-shm-usage"]
    words += [f"--{word}" for word in _QUIET]
    if os.geteuid() == 0:
        words.append("--no-sandbox")  # Chromium does not start as root without it
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", *words]
    with subprocess.Popen(
        shell, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        for descriptor in (from_us, to_us):
            os.close(descriptor)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)  # it ends then
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.close(answers)
