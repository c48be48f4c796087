"""Tests of `export --push-to-hub` with a stand-in for huggingface_hub that has its signatures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
from commands import TINY, call

from offload_trainer import cli

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    call(*TINY, "--steps", 1, "train.eval_every=0", output=output)
    return output


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Return the stand-in; its repository is me/model."""
    made = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    made.create_repo.return_value = SimpleNamespace(repo_id="me/model")
    made.upload_folder.return_value = SimpleNamespace(commit_url="https://hub/me/model/commit/abc")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    return made


def test_the_whole_export_is_one_commit(
    run: Path, hub: mock.Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "exported"
    hub.upload_folder.side_effect = lambda **words: mock.DEFAULT if list(there.glob("*.safetensors")) else None
    assert cli.main(["export", str(run), str(there), "--push-to-hub", "me/model"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "pushed to https://hub/me/model/commit/abc"
    hub.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    (words,) = (upload.kwargs for upload in hub.upload_folder.call_args_list)
    assert (words.pop("repo_id"), words.pop("folder_path"), words.pop("repo_type")) == ("me/model", there, "model")
    assert words.keys() == {"commit_message"}  # nothing leaves files out


def test_without_the_right_nothing_is_written(
    run: Path, hub: mock.Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.create_repo.side_effect = OSError("Invalid username or password.")
    assert cli.main(["export", str(run), str(tmp_path / "exported"), "--push-to-hub", "me/model"]) == 2
    assert "--push-to-hub me/model: Invalid username or password. Nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_a_failed_upload_leaves_the_export(
    run: Path, hub: mock.Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.upload_folder.side_effect = OSError("You may not write here.")
    there = tmp_path / "exported"
    assert cli.main(["export", str(run), str(there), "--push-to-hub", "me/model"]) == 1
    said = capsys.readouterr().err
    assert f"{there} is complete, but was not pushed to me/model" in said
    assert f"hf upload me/model {there}" in said
    assert (there / "config.json").exists()
