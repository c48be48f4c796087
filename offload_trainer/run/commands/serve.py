"""The `serve` command: a web page on this machine that follows runs through their metrics.jsonl.

    metrics.jsonl ── appended bytes ──> Follower ── /data, as JSON ──> the page, which asks each second
    a button, with the token ──> `save` file in the run directory, or a stop signal to the process that has its lock

The server listens on the loopback address only. It refuses a Host header of another name, because a web
site's name may resolve to this machine. It controls runs only for a token that the browser sends in a header.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from offload_trainer.errors import UserError, reason
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.run.commands.runs import is_alive, state_of
from offload_trainer.safe_files import file_bytes, open_file, parsed, read_yaml
from offload_trainer.storage.locks import open_lock, try_lock
from offload_trainer.telemetry.metrics import StepRecord

ADDRESS, PORT = "127.0.0.1", 8765
TOKEN_HEADER = "X-Offload-Token"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")  # any port, because ssh may forward another one
_STEP = re.compile(rb'\{"step": (\d{1,10}),')
_MOST_POINTS = 2000  # steps kept of a run; beyond it only every 2nd, 4th, ... step stays
_CHUNK, _LONGEST = 1 << 20, 16 << 10  # bytes of one read, and of the longest line that is parsed
_TAIL = 64  # bytes before the offset that are compared, to notice that the file was rewritten
_TIMEOUT = 10.0  # seconds that a connection may be idle
_ASKED_ALREADY = "the run was asked to stop already"


class Follower:
    """Steps of one run, read from its metrics.jsonl as it grows. Memory is bounded: long runs are thinned out."""

    def __init__(self, directory: Path) -> None:
        if not any((directory / name).is_file() for name in ("config.yaml", ".lock")):
            raise UserError(
                f"{directory} holds no run: it has neither config.yaml nor .lock; `offload-train runs` lists runs"
            )
        self.directory = directory
        self.lock = threading.Lock()  # several pages may ask at the same time
        self.generation = 0  # changes when points are removed, so that a page fetches all of them again
        self.points: list[StepRecord] = []
        self.last: StepRecord | None = None
        self._stride = 1
        self._offset, self._tail, self._inode = 0, b"", 0
        self._known: dict[str, tuple[int, Any]] = {}  # file: its time of change, and what was read

    def read(self) -> None:
        """Read the complete lines that were appended since the last call. A partial last line waits for its rest."""
        try:
            descriptor = open_file(self.directory / "metrics.jsonl", links=True)
        except FileNotFoundError:
            self._clear()
            return
        except ValueError as error:
            raise UserError(f"{self.directory / 'metrics.jsonl'} cannot be read: {error}") from error
        with open(descriptor, "rb") as file:
            inode = os.fstat(descriptor).st_ino
            file.seek(self._offset - len(self._tail))
            if inode != self._inode or file.read(len(self._tail)) != self._tail:
                self._clear()
                file.seek(0)
            self._inode = inode
            while data := file.read(_CHUNK):
                end = data.rfind(b"\n") + 1
                if not end and len(data) < _CHUNK:
                    break
                end = end or len(data)  # no line of a run is that long
                self._take(data[:end].splitlines())
                self._offset += end
                self._tail = (self._tail + data[max(0, end - _TAIL) : end])[-_TAIL:]
                file.seek(self._offset)

    def _clear(self) -> None:
        if self._offset:
            self.generation += 1
        self.points, self.last, self._stride, self._offset, self._tail = [], None, 1, 0, b""

    def _take(self, lines: Sequence[bytes]) -> None:
        for number, line in enumerate(lines):
            head = _STEP.match(line)
            if not head or len(line) > _LONGEST:
                continue
            step = int(head[1])
            if self.points and step <= self.points[-1].step:  # resumed: later lines replace earlier ones
                self.points = [point for point in self.points if point.step < step]
                self.generation += 1
            if step % self._stride and number + 1 < len(lines):
                continue
            try:
                self.last = StepRecord.from_json(line.decode(errors="replace"))
            except ValueError:  # torn by a kill
                continue
            if step % self._stride == 0:
                self.points.append(self.last)
            if len(self.points) > _MOST_POINTS:
                self._stride *= 2
                self.points = [point for point in self.points if point.step % self._stride == 0]
                self.generation += 1

    def plan(self) -> dict[str, Any] | None:
        """Return what the page shows of plan.json, or None if it cannot be read. A run may replace its plan."""

        def read(path: Path) -> dict[str, Any]:
            whole = parsed(file_bytes(path), dict)
            return {name: whole.get(name) for name in ("tiers", "seconds", "hidden", "traffic")}

        return self._unless_unchanged("plan.json", read)

    def state(self) -> tuple[int | None, str]:
        """Return the steps of the whole run, None if unknown, and a short description of its state."""
        steps = self._unless_unchanged("config.yaml", lambda path: read_yaml(path)["train"]["steps"])
        steps = steps if isinstance(steps, int) else None
        checkpoints = complete_checkpoints(self.directory / "checkpoints")
        saved = step_of(checkpoints[-1]) if checkpoints else None
        return steps, state_of(self.directory, steps=steps, saved=saved)

    def _unless_unchanged(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Return what `read` makes of a file, or None if it cannot be read. An unchanged file is not read again."""
        path = self.directory / name
        try:
            changed = path.stat().st_mtime_ns
            if name not in self._known or self._known[name][0] != changed:
                self._known[name] = changed, read(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return self._known[name][1]

    def answer(self, seen: str) -> dict[str, Any]:
        """Return the JSON for the page, which has `seen` "generation.points" already."""
        with self.lock:
            error = None
            try:
                self.read()
                steps, state = self.state()
            except UserError as problem:
                steps, state, error = None, "cannot be read", str(problem)
            generation, _, count = seen.partition(".")
            start = int(count) if generation == str(self.generation) and count.isdecimal() else 0
            return {
                "name": str(self.directory),
                "steps": steps,
                "state": state,
                "error": error,
                "running": state == "is running",
                "plan": self.plan(),
                "seen": f"{self.generation}.{len(self.points)}",
                "from": start,
                "points": [_brief(point) for point in self.points[start:]],
                "last": _brief(self.last) if self.last else None,
            }

    def save(self) -> str:
        """Ask the run for a checkpoint. Raises UserError if it is not running."""
        if not is_alive(self.directory):
            raise UserError(f"{self.directory} is not running")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(self.directory / "save", flags, 0o666))
        except FileExistsError:
            return "a checkpoint was asked for already"
        return "a checkpoint follows after this step"

    def stop(self) -> str:
        """Ask the run to stop after its step. Raises UserError if no process of this user has its lock.

        A second SIGTERM would end the run unsaved. SIGHUP never does, so SIGTERM is sent only where SIGHUP is ignored
        (nohup). A run gets one signal from all servers together: the file `.stop` names the last run that got one.
        """
        with self.lock:
            pid, process, run = _holder(self.directory)
            try:
                mark = open_lock(self.directory / ".stop", create=True)
                try:
                    try_lock(mark)
                    if os.pread(mark, len(run), 0) == run:
                        return _ASKED_ALREADY
                    number = signal.SIGTERM if _ignores_hangup(pid) else signal.SIGHUP
                    signal.pidfd_send_signal(process, 0)  # raises if this user may not send the run a signal
                    os.pwrite(mark, run, 0)  # comes first, so that no server sends again if this one dies in between
                    signal.pidfd_send_signal(process, number)
                finally:
                    os.close(mark)
            except BlockingIOError:  # another server is sending it
                return _ASKED_ALREADY
            except OSError as error:
                raise UserError(f"{self.directory}: process {pid} cannot be stopped: {reason(error)}") from error
            finally:
                os.close(process)
        return "the run finishes this step, saves and stops"


def _holder(directory: Path) -> tuple[int, int, bytes]:
    """Return the run's pid, a pidfd of it, and a name of this run: its pid, and the time at which it wrote that.

    The pidfd is opened before the check, so that the signal cannot reach a later process of the same number. Raises
    UserError unless the process has the lock file open.
    """
    if not is_alive(directory):
        raise UserError(f"{directory} is not running")
    try:
        lock = open_lock(directory / ".lock")
        try:
            pid, about = int(os.pread(lock, 20, 0)), os.fstat(lock)
        finally:
            os.close(lock)
        process = os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: its .lock names no process of this machine ({error})") from error
    try:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            try:
                if os.path.samestat(descriptor.stat(), about):
                    return pid, process, f"{pid:>10} {about.st_mtime_ns:>20}\n".encode()
            except OSError:  # closed meanwhile
                continue
    except OSError as error:
        os.close(process)
        raise UserError(f"{directory}: process {pid} belongs to another user ({error.strerror})") from error
    os.close(process)
    raise UserError(f"{directory}: process {pid} does not hold its .lock, so it is not this run")


def _ignores_hangup(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = re.search(r"^SigIgn:\s*([0-9a-f]+)", status, re.MULTILINE)
    return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGHUP - 1) & 1)


def _brief(point: StepRecord) -> dict[str, Any]:
    drives = (point.nvme_read_bytes, point.nvme_written_bytes)
    return {
        "step": point.step,
        "loss": point.loss,
        "norm": point.grad_norm,
        "speed": point.tokens_per_second,
        "seconds": point.seconds,
        "phases": point.phases,
        "drive": None if None in drives else sum(filter(None, drives)),
        "memory": point.memory,
        "rss": point.host_rss_bytes,
        "device": point.device_peak_bytes,
    }


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _TIMEOUT
    server_version, sys_version = "offload-train", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._local():
            return
        if url.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = files("offload_trainer.telemetry").joinpath("live.html").read_text(encoding="utf-8")
            page = page.replace("$nonce", nonce).replace("$control", "yes" if self.server.token else "no")
            self._send(200, page, kind="text/html", nonce=nonce)
        elif url.path == "/data":
            seen = parse_qs(url.query).get("seen", [""])[0].split(",")
            seen += [""] * len(self.server.runs)
            answers = [run.answer(have) for run, have in zip(self.server.runs, seen, strict=False)]
            self._send(200, json.dumps(answers), kind="application/json")
        else:
            self._send(404, "there is no such page")

    def do_POST(self) -> None:
        if not self._local():
            return
        given, token = self.headers.get(TOKEN_HEADER, ""), self.server.token
        if token is None:
            self._send(403, "this server only shows runs; start it with --allow-control")
        elif not hmac.compare_digest(given.encode(), token.encode()):
            self._send(403, "the token is missing or wrong; `serve` printed it at its start")
        elif not (asked := re.fullmatch(r"/run/(\d{1,4})/(save|stop)", self.path)):
            self._send(404, "there is no such action")
        elif int(asked[1]) >= len(self.server.runs):
            self._send(404, "there is no such run")
        else:
            run = self.server.runs[int(asked[1])]
            try:
                self._send(200, run.save() if asked[2] == "save" else run.stop())
            except (UserError, OSError) as error:
                self._send(409, str(error))

    def _local(self) -> bool:
        if _HOSTS.fullmatch(self.headers.get("Host", "")):
            return True
        self._send(421, "this server answers to 127.0.0.1 and localhost only")
        return False

    def _send(self, status: int, text: str, *, kind: str = "text/plain", nonce: str = "") -> None:
        body = text.encode()
        own = f"'nonce-{nonce}'"
        inline = f"; script-src {own}; style-src {own}; connect-src 'self'; img-src data:" if nonce else ""
        policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{inline}"
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        for name, value in (
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the page asks each second."""


class Server(ThreadingHTTPServer):
    """HTTP server of the page and its data. Port 0 chooses a free one."""

    daemon_threads = True

    def __init__(self, directories: Sequence[Path], *, port: int = PORT, token: str | None = None) -> None:
        self.runs = [Follower(directory) for directory in directories]
        self.token = token
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port} cannot be used: {error}; name another --port") from error

    def handle_error(self, *_: Any) -> None:
        """Print nothing when a browser closes its connection early."""


def serve(directories: Sequence[Path], *, port: int, control: bool, say: Callable[[str], None]) -> None:
    """Serve the page until a signal. `control`: print a new token, with which the page can save and stop the runs."""
    token = secrets.token_urlsafe(24) if control else None
    with Server(directories, port=port, token=token) as server:
        say(f"http://{ADDRESS}:{server.server_port}/ shows the runs; Ctrl-C ends this server, not the runs")
        if token:
            say(f"token for the buttons: {token}")
        server.serve_forever()
