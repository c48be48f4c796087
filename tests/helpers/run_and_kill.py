"""run_and_kill.py [RANK:]WHERE NUMBER WORDS...: run the command, or only its rank RANK, and kill it (SIGKILL) at
an exact moment. WHERE and NUMBER may be lists, separated by commas: the next entry counts after each restart by
torchrun, and after the last one nothing is killed. The variable LOSS_SCALE=VALUE,WINDOW replaces those of fp16.

step N     before the Nth step of this process
page N     before the Nth write into page files
flip N     before the Nth commit of a rank's pages, after all ranks have written theirs
half N     halfway through writing the Nth record of a step
record N   after the Nth record of a step
line N     after the line of step N in metrics.jsonl
saving N   before the Nth checkpoint is complete: its tensors are written, its manifest is not
saved N    once the checkpoint of step N has its final name
build N    before the Nth engine is built
load N     before the Nth load of a checkpoint into an engine
loaded N   after it
start N    once this run has taken over the page files of an earlier run
ended N    after the export, before the run deletes its resume state
dropped N  after that, before it removes its directories on drives
"""

import itertools
import os
import signal
import sys
from typing import Any

from offload_trainer.cli import main
from offload_trainer.optim import loss_scale

if "LOSS_SCALE" in os.environ:
    loss_scale.INITIAL_SCALE, loss_scale.WINDOW = map(int, os.environ["LOSS_SCALE"].split(","))
places, numbers = (word.split(",") for word in sys.argv[1:3])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
if attempt >= len(places):
    raise SystemExit(main(sys.argv[3:]))
(rank, _, where), number = places[attempt].rpartition(":"), int(numbers[attempt])
if rank not in ("", os.environ.get("RANK")):
    raise SystemExit(main(sys.argv[3:]))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(call: Any, seen: Any, then: Any = die, nth: int = number) -> Any:
    counted = itertools.count(1)

    def dying(*given: Any, **words: Any) -> Any:
        if seen(*given) and next(counted) == nth:
            then(*given)
        return call(*given, **words)

    return dying


def of(name: str) -> Any:
    return lambda descriptor, *_: os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{name}")


def of_step(content: bytes) -> bool:
    """Return True unless this is the initial record, written before any step."""
    return b'"newest": ""' not in content


def half(descriptor: int, data: bytes, at: int) -> None:
    os.pwrite.__wrapped__(descriptor, data[: len(data) // 2], at)  # type: ignore[attr-defined]
    die()


if where == "step":
    from offload_trainer.engine.tiered import TieredEngine

    TieredEngine.train_step = before(TieredEngine.train_step, lambda *_: True)  # type: ignore[method-assign]
elif where == "page":
    os.pwritev = before(os.pwritev, of("state"))
elif where == "flip":
    from offload_trainer.offloading.pages.store import PageStore

    PageStore.flip = before(PageStore.flip, lambda *_: True)  # type: ignore[method-assign]
elif where == "half":
    pwrite = os.pwrite
    os.pwrite = before(pwrite, lambda file, data, at: of("record")(file) and of_step(data), half)
    os.pwrite.__wrapped__ = pwrite  # type: ignore[attr-defined]
elif where == "record":
    from offload_trainer.storage.ab_record import Record

    close, write = Record.close, Record.write
    written = itertools.count(1)

    def then_die(self: Any, content: bytes, **words: Any) -> None:
        write(self, content, **words)
        if of_step(content) and next(written) == number:
            die()

    Record.write = then_die  # type: ignore[method-assign]
elif where == "line":
    from offload_trainer.telemetry.sinks import Telemetry

    step = Telemetry.step

    def and_die(self: Any, record: Any) -> None:
        step(self, record)
        if record.step == number:
            die()

    Telemetry.step = and_die  # type: ignore[method-assign]
elif where == "saved":
    from offload_trainer.checkpoint import Checkpoints

    Checkpoints._report_save = before(
        Checkpoints._report_save, lambda _, final, *__, **___: final.name.endswith(f"{number:08d}"), nth=1
    )  # type: ignore[method-assign]
elif where == "saving":
    from offload_trainer import checkpoint

    checkpoint.finish_checkpoint = before(checkpoint.finish_checkpoint, lambda *_: True)
elif where == "build":
    from offload_trainer.engine.tiered import TieredEngine

    TieredEngine.__init__ = before(TieredEngine.__init__, lambda *_: True)  # type: ignore[method-assign]
elif where in ("load", "loaded"):
    from offload_trainer.engine.tiered import TieredEngine

    if where == "load":
        TieredEngine.load = before(TieredEngine.load, lambda *_: True)  # type: ignore[method-assign]
    else:
        load, loads = TieredEngine.load, itertools.count(1)

        def load_and_die(self: Any, directory: Any) -> None:
            load(self, directory)
            if next(loads) == number:
                die()

        TieredEngine.load = load_and_die  # type: ignore[method-assign]
elif where == "start":
    from offload_trainer.engine.tiered import TieredEngine

    TieredEngine.resume_from_pages = before(TieredEngine.resume_from_pages, lambda *_: True)  # type: ignore[method-assign]
elif where in ("ended", "dropped"):
    from offload_trainer.run import resume

    drop = resume.drop

    def drop_and_die(setup: Any) -> None:
        if where == "dropped":
            drop(setup)
        die()

    resume.drop = drop_and_die
raise SystemExit(main(sys.argv[3:]))
