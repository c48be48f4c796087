"""A signal may arrive while a line is being printed: its handler must not touch Python's files."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from offload_trainer.trainer import _signals


class _InUse:
    """As a file that is entered twice."""

    def write(self, text: str) -> int:
        raise RuntimeError("reentrant call")

    flush = write


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_line_is_printed(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with _signals(loud=True) as asked:
        assert asked.stop == 0
        monkeypatch.setattr(sys, "stderr", _InUse())
        os.kill(os.getpid(), number)
        assert asked.stop == number
    monkeypatch.undo()
    assert signal.getsignal(number) is before
    assert f"{number.name}: finishing this step" in capfd.readouterr().err
