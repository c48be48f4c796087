"""Handlers of SIGHUP, SIGINT, SIGTERM and SIGQUIT: stop immediately before training, and after saving during it.

A second signal, or one for which saving would take longer than `train.stop_within`, stops immediately, without saving,
and cleans up; a third has its default action. SIGHUP never counts as a second one, since a terminal that closes often
sends two and systemd sends it after SIGTERM, and stays ignored if it was (nohup). SIGUSR1 requests a checkpoint.
"""

import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from offload_trainer.common.errors import Stopped

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_AGAIN = 0.05  # seconds between attempts to raise Stopped
_Handler = Callable[[int, object], None] | signal.Handlers


@dataclass
class StopRequest:
    stop: int = 0  # number of the first signal that asked the run to stop, or 0
    save: bool = False  # SIGUSR1 asked for a checkpoint
    answer: str = "finishing this step, then saving"  # printed when the first signal arrives
    # Returns why the run cannot finish and save in time, or None. Called from the handler of the first signal.
    too_late: Callable[[], str | None] = lambda: None


def stop_at_once() -> AbstractContextManager[None]:
    """Within this context a signal raises Stopped, a second one kills the process, and SIGUSR1 is ignored."""
    return _handled({**dict.fromkeys(STOPPING, _raise_until_caught), signal.SIGUSR1: signal.SIG_IGN})


@contextmanager
def waiting(*, say: Callable[[str], None] | None, same_within: float = 0.0) -> Iterator[StopRequest]:
    """Within this context, record signals in the returned StopRequest instead of stopping.

    `say` is called from the handler of the first signal, which may interrupt a print, so it must write to the file
    descriptor directly (`stdio.write_now`). Signals within `same_within` seconds of the first one count as the same
    request: systemd and some batch systems signal a launcher and its ranks, and the launcher passes its signal on.
    """
    asked = StopRequest()
    insisted = math.inf  # time of the first signal other than SIGHUP: the next one stops the run immediately

    def stop(number: int, _frame: object) -> None:
        nonlocal insisted
        now, hangup = time.monotonic(), number == signal.SIGHUP
        if 0 <= now - insisted < same_within:
            return
        if now >= insisted and not hangup:
            _raise_until_caught(number, unsaved="the second signal; stopped at once, unsaved")
        first = not asked.stop
        if first and (why := asked.too_late()):
            _raise_until_caught(number, unsaved=f"{why}; stopped at once, unsaved")
        asked.stop = asked.stop or number
        insisted = insisted if hangup else min(insisted, now)
        if first and say:
            say(f"{signal.Signals(number).name}: {asked.answer}; once more ends at once, unsaved")

    def save(_number: int, _frame: object) -> None:
        asked.save = True

    with _handled(dict.fromkeys(STOPPING, stop) | {signal.SIGUSR1: save}):
        yield asked


def _raise_until_caught(number: int, _frame: object = None, *, unsaved: str = "") -> None:
    """Raise Stopped, and again on a timer until it propagates: destructors and C callbacks swallow exceptions."""
    for stopping in STOPPING:
        if signal.getsignal(stopping) != signal.SIG_IGN:
            signal.signal(stopping, signal.SIG_IGN if stopping == signal.SIGHUP else signal.SIG_DFL)

    def again(_number: int, _frame: object) -> None:
        under_way = sys.exception()
        while under_way is not None and not isinstance(under_way, Stopped):
            under_way = under_way.__context__
        if under_way is None:
            raise Stopped(number, unsaved=unsaved)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    raise Stopped(number, unsaved=unsaved)


def _turned_into(error: BaseException | None) -> Stopped | None:
    """Return the Stopped that was converted to this error, or None.

    Python 3.11 wraps anything that `__set_name__` raises in a RuntimeError. A library's `finally` (transformers'
    `no_init_weights`) may raise a NameError or AttributeError after an interruption; in this package that is a bug.
    """
    while error is not None and not isinstance(error, Stopped):
        hid = isinstance(error, NameError | AttributeError)
        if hid:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            hid = str(frame.f_globals.get("__name__")).partition(".")[0] != "offload_trainer"  # raised by others
        error = error.__context__ if hid else error.__cause__
    return error


@contextmanager
def _handled(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Install the handlers within this context, except for SIGHUP if it is ignored (nohup).

    Messages about a swallowed Stopped, which is raised again, are suppressed. One that a library has converted to
    another exception is raised in its place.
    """
    before: dict[signal.Signals, Any] = {}
    hook, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def tell(lost: Any) -> None:
        if not isinstance(lost.exc_value, Stopped):
            hook(lost)

    for number, handler in handlers.items():
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    sys.unraisablehook = tell
    try:
        yield
    except Stopped:
        before.clear()  # keep the default actions, so that the next signal kills the process while it cleans up
        raise
    except Exception as error:
        if (stopped := _turned_into(error)) is None:
            raise
        before.clear()
        raise stopped from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
