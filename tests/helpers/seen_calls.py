"""Note the calls of a function, act before each of them, or wait. `replace` is setattr, or that of a MonkeyPatch."""

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Any


def run_before(replace: Callable[[Any, str, Any], None], owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call `act` with the arguments of each call of `owner.name`, before it."""
    call = getattr(owner, name)

    def acting(*args: Any, **words: Any) -> Any:
        act(*args, **words)
        return call(*args, **words)

    replace(owner, name, acting)


def calls_of(
    replace: Callable[[Any, str, Any], None],
    owner: Any,
    name: str,
    note: Callable[..., Any] = lambda *_, **__: True,
    *,
    seen: list[Any] | None = None,
) -> list[Any]:
    """Return a list, by default a new one, that receives what `note` returns before each call of `owner.name`."""
    seen = [] if seen is None else seen
    run_before(replace, owner, name, lambda *args, **words: seen.append(note(*args, **words)))
    return seen


def kill_in(owner: Any, name: str, *, nth: int) -> None:
    """Let this process be killed at the `nth` call of `owner.name` from now."""
    calls = count(1)
    run_before(setattr, owner, name, lambda *_, **__: next(calls) == nth and os.kill(os.getpid(), signal.SIGKILL))


def until(true: Callable[[], bool]) -> None:
    """Wait until `true` returns True; fail after five minutes."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.0005)
