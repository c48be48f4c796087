"""Tests of `export --push-to-hub` against a local stand-in for the Hugging Face hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from commands import TINY, ask, call

pytestmark = pytest.mark.slow

TOKEN = "hf_of_this_test"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that an upload of small files uses."""

    created: ClassVar[list[dict[str, object]]] = []
    files: ClassVar[dict[str, bytes]] = {}
    refuses_commits = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self._answer(200, {"url": f"http://{self.headers['Host']}/me/model"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path == "/api/models/me/model/preupload/main":
            paths = [one["path"] for one in json.loads(body)["files"]]
            self._answer(200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif self.path.startswith("/api/models/me/model/commit/main") and not self.refuses_commits:
            lines = [json.loads(line) for line in body.splitlines()]
            found = [line["value"] for line in lines if line["key"] == "file"]
            self.files.update({one["path"]: base64.b64decode(one["content"]) for one in found})
            url = f"http://{self.headers['Host']}/me/model/commit/abc"
            self._answer(200, {"success": True, "commitUrl": url, "commitOid": "abc", "hookOutput": ""})
        else:
            self._answer(403, {"error": "You may not write here."})

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def _answer(self, code: int, told: dict[str, object]) -> None:
        body = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Serve the stand-in; yield the variables with which huggingface_hub finds it."""
    monkeypatch.setattr(Hub, "created", [])
    monkeypatch.setattr(Hub, "files", {})
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    call(*TINY, "--steps", 1, "train.eval_every=0", output=output)
    return output


def test_the_repository_gets_the_bytes_of_the_export(run: Path, hub: dict[str, str], tmp_path: Path) -> None:
    there = tmp_path / "exported"
    done = ask("export", run, there, "--push-to-hub", "me/model", own=True, **hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"pushed to {hub['HF_ENDPOINT']}/me/model/commit/abc"
    (created,) = Hub.created
    assert created["name"] == "model"
    assert created.get("visibility") == "private" or created.get("private") is True  # older versions
    paths = [path for path in there.rglob("*") if path.is_file()]
    assert {path.relative_to(there).as_posix(): path.read_bytes() for path in paths} == Hub.files


def test_without_the_right_nothing_is_written(run: Path, hub: dict[str, str], tmp_path: Path) -> None:
    wrong = {**hub, "HF_TOKEN": "hf_of_somebody"}
    done = ask("export", run, tmp_path / "exported", "--push-to-hub", "me/model", own=True, **wrong)
    assert done.returncode == 2
    assert "--push-to-hub me/model: " in done.stderr
    assert "Nothing was written" in done.stderr
    assert not (tmp_path / "exported").exists()


def test_a_failed_upload_leaves_the_export(
    run: Path, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "refuses_commits", True)
    done = ask("export", run, tmp_path / "exported", "--push-to-hub", "me/model", own=True, **hub)
    assert done.returncode == 1
    assert f"{tmp_path / 'exported'} is complete, but was not pushed to me/model" in done.stderr
    assert f"hf upload me/model {tmp_path / 'exported'}" in done.stderr
    assert (tmp_path / "exported/config.json").exists()
