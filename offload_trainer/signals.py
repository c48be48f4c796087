"""What SIGHUP, SIGINT, SIGTERM and SIGQUIT do: end at once while nothing can be lost, else once everything is saved.

    start, build     stop_at_once    Stopped is raised where the program stands; what is open is closed
    training, end    waiting         noted; the step, the save or the export under way is finished first
                     a second        at once, unsaved, and tidied up
                     a third         the kernel's own way

A terminal that closes sends SIGHUP, often twice (the kernel and the shell), and systemd sends it after SIGTERM: it
never counts as a second. Where it was ignored from the start (nohup) it stays ignored. SIGUSR1 asks for a checkpoint.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offload_trainer.errors import Stopped

_STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_AGAIN = 0.05  # seconds
_Handler = Callable[[int, object], None] | signal.Handlers


@dataclass
class StopRequest:
    """What signals have asked for."""

    stop: int = 0  # the first signal that ends a run, or 0
    save: bool = False  # SIGUSR1
    insisted: bool = False  # the next but SIGHUP ends at once
    answer: str = "finishing this step, then saving"  # what the first is told


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Inside, a signal raises Stopped; a second one kills, also where Python does not get to run."""

    def stop(number: int, _frame: object) -> None:
        _restore_defaults()
        _raise_until_heard(number)

    with _handled(dict.fromkeys(_STOPPING, stop)), _quiet_where_lost():
        yield


@contextmanager
def no_checkpoint_yet() -> Iterator[None]:
    """Inside, SIGUSR1 asks for nothing: there is no state."""
    with _handled({signal.SIGUSR1: signal.SIG_IGN}):
        yield


@contextmanager
def waiting(*, say: Callable[[str], None] | None) -> Iterator[StopRequest]:
    """Inside, signals are only noted. `say` is told of the first; it is called in the handler.

    A handler may interrupt a line that is being printed: `say` must write to descriptors (`streams.write_now`).
    """
    asked = StopRequest()

    def stop(number: int, _frame: object) -> None:
        hangup = number == signal.SIGHUP
        if asked.insisted and not hangup:
            _restore_defaults()
            _raise_until_heard(number, unsaved=True)
        first = not asked.stop
        asked.stop = asked.stop or number
        asked.insisted = asked.insisted or not hangup
        if first and say:
            say(f"{signal.Signals(number).name}: {asked.answer}; once more ends at once, unsaved")

    def save(_number: int, _frame: object) -> None:
        asked.save = True

    with _handled(dict.fromkeys(_STOPPING, stop) | {signal.SIGUSR1: save}), _quiet_where_lost():
        yield asked


def _raise_until_heard(number: int, *, unsaved: bool = False) -> None:
    """Raise Stopped, and again unless it is on its way out: in a destructor or a library's callback it is lost."""

    def again(_number: int, _frame: object) -> None:
        under_way = sys.exception()
        while under_way is not None and not isinstance(under_way, Stopped):
            under_way = under_way.__context__
        if under_way is None:
            raise Stopped(number, unsaved=unsaved)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    raise Stopped(number, unsaved=unsaved)


@contextmanager
def _quiet_where_lost() -> Iterator[None]:
    """Inside, nothing is printed of a Stopped that got lost, since it is raised again; after it, none is.

    What was made another error on its way out is itself again.
    """
    told, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def tell(lost: Any) -> None:
        if not isinstance(lost.exc_value, Stopped):
            told(lost)

    sys.unraisablehook = tell
    try:
        yield
    except Exception as error:
        stopped = _turned_into(error)
        if stopped is None:
            raise
        raise stopped from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = told


def _turned_into(error: BaseException | None) -> Stopped | None:
    """The Stopped that was made this error: Python 3.11 makes a RuntimeError of all that `__set_name__` raises.

    Or that a library's `finally` hid, which asks for a name that its interrupted set-up had not got to yet: so does
    transformers' `no_init_weights`. Where a line of ours asks for it, that is a bug, and shown.
    """
    while error is not None and not isinstance(error, Stopped):
        hid = isinstance(error, NameError | AttributeError) and not _is_ours(error)
        error = error.__context__ if hid else error.__cause__
    return error


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised by a line of this package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __package__


def _restore_defaults() -> None:
    for number in _STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)


@contextmanager
def _handled(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """The handlers are in place inside; only SIGHUP may have been ignored on purpose."""
    before = {}
    for number, handler in handlers.items():
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    except Stopped:
        raise  # on the way out the next signal kills
    except BaseException:
        _put_back(before)
        raise
    _put_back(before)


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
