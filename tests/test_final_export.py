"""The weights that a run leaves in its own directory: what is there is what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer.export import final
from offload_trainer.export.final import write_final
from offload_trainer.export.sources import final_export


def test_a_kill_while_they_are_written_leaves_an_earlier_run_s_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the new ones is written first; it must not be taken for that of the old ones."""
    record: Any = SimpleNamespace(identity={}, run={"config": {}})

    def written(source: Any, destination: Path, **_: Any) -> None:
        new = destination.with_name("new")
        new.mkdir()
        if destination.exists():
            destination.rename(destination.with_name("old"))
        new.rename(destination)

    def killed(source: Any, destination: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(final, "write_model", written)
    write_final(iter(()), [], tmp_path, record=record, step=10)
    found = final_export(tmp_path)
    assert found is not None
    assert found.step == 10
    monkeypatch.setattr(final, "write_model", killed)
    with pytest.raises(KeyboardInterrupt):
        write_final(iter(()), [], tmp_path, record=record, step=20)
    assert final_export(tmp_path) is None
    monkeypatch.setattr(final, "write_model", written)
    write_final(iter(()), [], tmp_path, record=record, step=20)
    found = final_export(tmp_path)
    assert found is not None
    assert found.step == 20
