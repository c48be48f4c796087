"""Tests of telemetry: meters, records, files that survive kills, the terminal, trackers, report.html, and `report`."""

import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from xml.etree.ElementTree import Element, fromstring

import pytest
from commands import TINY, call, run_script
from sample_plans import SHAPES

from offload_trainer import cli
from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.packages import OPTIONAL
from offload_trainer.common.safe_files import parsed
from offload_trainer.common.units import format_bytes, format_seconds
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import make_plan, resolved
from offload_trainer.run.commands.runs import compared, comparison
from offload_trainer.settings import dump_config, load_config
from offload_trainer.telemetry import meters, sinks
from offload_trainer.telemetry.meters import IoCount, PhaseClock, read_io
from offload_trainer.telemetry.metrics import (
    EvalRecord,
    StepRecord,
    median_phases,
    median_speed,
    read_evaluations,
    read_metrics,
)
from offload_trainer.telemetry.report import RELOAD, Series, comparison_page, predicted_row, report_page
from offload_trainer.telemetry.sinks import JsonLines, Screen, Started, Telemetry, Trackers, refuse_missing

CONTRACT = (
    "step tokens loss grad_norm lr loss_scale seconds tokens_per_second mfu phases nvme_read_bytes nvme_written_bytes "
    "host_rss_bytes device_peak_bytes skipped"
)
MIB = 1 << 20


def a_step(step: int = 1, **changes) -> StepRecord:
    record = StepRecord(
        step=step,
        tokens=512 * step,
        loss=4.0 - 0.01 * step,
        grad_norm=1.5,
        lr=3e-4,
        loss_scale=1.0,
        seconds=0.5,
        tokens_per_second=1024.0,
        mfu=None,
        phases={"data": 0.1, "forward": 0.1, "backward": 0.2, "update": 0.1},
        nvme_read_bytes=4096,
        nvme_written_bytes=0,
        host_rss_bytes=10**9,
        device_peak_bytes=0,
        skipped=False,
    )
    return replace(record, **changes)


def test_phases_wait_for_the_device_at_both_edges_and_add_up_over_micro_batches(monkeypatch):
    # The device has 3 s of earlier work when a phase opens, and 6 s of the phase's work when it closes.
    now, waits = [100.0], [6.0, 3.0] * 2
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now[0])

    def synchronize() -> None:
        now[0] += waits.pop()

    clock = PhaseClock(synchronize)
    for _ in range(2):
        with clock.phase("backward"):
            now[0] += 1.0  # launching kernels
    assert clock.take() == {"data": 0.0, "forward": 0.0, "backward": 14.0, "update": 0.0}
    assert clock.take() == {"data": 0.0, "forward": 0.0, "backward": 0.0, "update": 0.0}


def test_phases_of_a_stream_are_timed_by_events_that_nothing_waits_for_before_the_step_ends(monkeypatch):
    """The device computes 2 s of a forward and 5 s of a backward, which are launched together."""
    waits, marks = [], iter([10.0, 12.0, 12.0, 17.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(marks)

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, end: "Event") -> float:
            assert end.at in waits, "the event is not known to be over"
            return 1000 * (end.at - self.at)

    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = PhaseClock(stream=True)
    for phase in ("forward", "backward"):
        with suppress(MemoryError), clock.phase(phase):
            raise MemoryError  # a phase that fails is closed
    assert not waits
    clock.move(0.5, from_="forward", to="wait")
    assert clock.take() == {"data": 0.0, "forward": 1.5, "backward": 5.0, "update": 0.0, "wait": 0.5}
    assert waits == [12.0, 17.0]


def test_io_is_what_the_kernel_counted(tmp_path, monkeypatch):
    fake = tmp_path / "io"
    fake.write_text("rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 5\nwrite_bytes: 4\ncancelled_write_bytes: 0\n")
    monkeypatch.setattr(meters, "_IO", fake)
    assert read_io() == IoCount(5, 4)
    assert read_io() - IoCount(2, 3) == IoCount(3, 1)
    fake.unlink()
    assert read_io() == IoCount(None, None)
    assert IoCount(1, 1) - read_io() == IoCount(None, None)


def test_memory_is_in_bytes_and_the_peak_outlives_the_buffer(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from offload_trainer.telemetry.meters import current_rss_bytes, peak_rss_bytes\n"
        "before = current_rss_bytes(); block = b'x' * (64 << 20); held = current_rss_bytes(); del block\n"
        "print(before, held, current_rss_bytes(), peak_rss_bytes())"
    )
    before, held, after, peak = map(int, run_script(script).stdout.split())
    assert 63 * MIB < held - before < 80 * MIB
    assert after < before + 16 * MIB
    assert before + 63 * MIB < peak < before + 96 * MIB
    monkeypatch.setattr(meters, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    512 kB\n")
    assert meters.peak_rss_bytes() == 512 * 1024  # a system without a peak


def test_memory_of_a_device_is_torchs_once_cuda_runs(monkeypatch, tmp_path):
    (tmp_path / "page").write_bytes(b"x" * 8192)
    for initialized, peak, retries in ((False, 0, 0), (True, 12345, 2)):
        facts = {"is_initialized": lambda i=initialized: i, "max_memory_allocated": lambda: 12345}
        facts |= {"memory_allocated": lambda: 678, "memory_stats": lambda: {"num_alloc_retries": 2}}
        monkeypatch.setattr(meters, "torch", SimpleNamespace(cuda=SimpleNamespace(**facts)))
        found = meters.memory_of_step([tmp_path])
        assert (found["device_peak_bytes"], found["allocation_retries"]) == (peak, retries)
        held = found["memory"]
        assert held["ram"] == pytest.approx(meters.current_rss_bytes(), rel=0.2)
        assert held["ram"] <= 1.01 * found["host_rss_bytes"]
        assert held.get("gpu") == (678 if initialized else None)
        assert held["drives"] == (tmp_path / "page").stat().st_blocks * 512


def test_a_line_has_the_contract_s_keys_in_order_and_comes_back():
    for more in ({}, {"hidden": 0.5}, {"memory": {"ram": 5, "drives": 7}}, {"allocation_retries": 2}):
        record = a_step(7, mfu=0.31, **more)
        line = record.to_json()
        assert list(json.loads(line)) == [*CONTRACT.split(), *more]
        assert "\n" not in line
        assert parsed(line, StepRecord) == record
    evaluation = EvalRecord(step=3, validation_loss=1.0, perplexity=2.5)
    assert parsed(evaluation.to_json(), EvalRecord) == evaluation
    # values that JSON lacks are null
    line = a_step(loss=math.nan, grad_norm=-math.inf, phases={"forward": math.nan}).to_json()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert (found["loss"], found["grad_norm"], found["phases"]["forward"]) == (None, None, None)
    assert parsed(a_step(loss=math.inf).to_json(), StepRecord).loss is None


def test_a_full_drive_is_reported(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "m.jsonl", done=0)
    with open("/dev/full", "wb", buffering=0) as device:
        os.dup2(device.fileno(), lines._fd)
    with pytest.raises(TrainerError, match="No space left"):
        lines.write("{}")
    monkeypatch.setattr(sinks.os, "write", lambda fd, data: 3)
    with pytest.raises(TrainerError, match="3 of 12 bytes"):
        lines.write('{"step": 1}')
    lines.close()


def test_tails(tmp_path):
    path = tmp_path / "m.jsonl"
    for tail, kept in (
        (b'{"step": 2', [1]),  # torn
        (b'{"step": 2}', [1, 2]),  # complete except for its line end: the next line must not join it
        (b"\0\0\0\0", [1]),  # a power cut
        (b'"step"\n[1]\n{"other": 1}\n{"step": null}\n', [1]),
    ):
        path.write_bytes(b'{"step": 1}\n' + tail)
        lines = JsonLines(path, done=5)
        lines.write('{"step": 6}')
        lines.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 6]
    path.write_bytes(a_step(1).to_json().encode() + b"\n\xff\xfe\n\n" + a_step(2).to_json()[:-4].encode())
    assert read_metrics(path) == [a_step(1)]
    assert read_metrics(tmp_path / "none.jsonl") == []


def outputs_in(folder: Path, said: list[str], *, total: int = 4, done: int = 0) -> Telemetry:
    """Return the outputs of a run without trackers in `folder`; the lines that they print go to `said`."""
    screen = Screen(total, initial=done, say=said.append, bounds={}, drives=True)
    return Telemetry(folder, done=done, screen=screen, trackers=(), config={})


def test_telemetry_writes_both_files_and_resumes(tmp_path):
    messages = []
    first = outputs_in(tmp_path, messages)
    for step in (1, 2, 3):
        first.step(a_step(step))
    first.evaluation(EvalRecord(step=3, validation_loss=2.0, perplexity=math.exp(2.0)))
    first.close()
    assert messages[-1] == "validation after step 3: loss 2.0000  perplexity 7.3891"

    again = outputs_in(tmp_path, messages, done=2)
    for step in (3, 4):
        again.step(a_step(step, loss=1.0))
    again.evaluation(EvalRecord(step=4, validation_loss=1.0, perplexity=math.exp(1.0)))
    again.close()
    assert messages[-1] == "validation after step 4: loss 1.0000  perplexity 2.7183"
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row.step, row.loss) for row in metrics] == [(1, 3.99), (2, 3.98), (3, 1), (4, 1)]
    assert [e.step for e in read_evaluations(tmp_path / "evaluations.jsonl")] == [4]


# -- screen and medians ------------------------------------------------------------------------------------------------


def test_a_line_each_twentieth_each_minute_and_the_last(monkeypatch):
    messages, now = [], [100.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    shown = Screen(45, initial=40, say=messages.append, bounds={"backward": "compute"}, drives=True)
    for step in range(41, 46):  # a line for every two steps
        now[0] += 0.5 if step < 43 else 62.0
        last = {"skipped": True, "loss": None, "grad_norm": None, "phases": {}}
        shown.step(a_step(step, **(last if step == 45 else {"loss": 1.0})))
    assert messages == [
        "step 42/45  loss 1.0000  1.02 k tokens/s  1.5 s left  backward 40% (compute)  norm 1.5  rate 0.0003",
        "step 43/45  loss 1.0000  1.02 k tokens/s  42 s left  backward 40% (compute)  norm 1.5  rate 0.0003",
        "step 44/45  loss 1.0000  1.02 k tokens/s  31 s left  backward 40% (compute)  norm 1.5  rate 0.0003",
        "step 45/45  loss -  1.02 k tokens/s  0 s left  backward 32% (compute)  norm -  rate 0.0003  skipped",
    ]


def test_speed_is_of_the_last_steps_together():
    """Only the number of long steps among the last 20 varies: one of 7 s, which waits for a drive, follows six."""
    shown = Screen(1000, initial=0, say=(said := []).append, bounds={}, drives=True)
    for step in range(1, 1001):
        wait = 6.9 if step % 7 == 0 else 0.0
        times = {"seconds": 0.1 + wait, "tokens_per_second": 512 / (0.1 + wait)}
        shown.step(a_step(step, **times, phases={"forward": 0.1, "wait": wait}))
    speeds = [float(line.split(" tokens/s")[0].split()[-1]) for line in said[1:]]
    assert len(speeds) == 19
    assert max(speeds) / min(speeds) < 1.6
    assert all(re.search(r"wait (8|9)\d%", line) for line in said[1:])  # also when the last step did not wait


def test_a_drive_is_mentioned_if_it_stores_more_than_logs():
    """No drive speed is shown without state on drives, although checkpoints and logs move bytes."""
    for drives, moved, shown in ((True, 10**9, True), (True, 4096, False), (True, None, False), (False, 10**9, False)):
        screen = Screen(1, initial=0, say=(said := []).append, bounds={}, drives=drives)
        screen.step(a_step(nvme_read_bytes=moved, nvme_written_bytes=moved and moved // 2))
        assert ("  drive 3 GB/s  " in said[0]) == shown  # 1.5 GB in half a second
        assert shown or "drive" not in said[0]


def test_medians_leave_out_the_first_two_steps_of_more_than_four():
    def phased(step: int, forward: float, **more) -> StepRecord:
        return a_step(step, phases={"data": 0.0, "forward": forward, "backward": 0.0, "update": 0.0, **more})

    assert median_phases([]) == {}
    assert median_phases([phased(1, 9.0), phased(2, 8.0), phased(3, 1.0), phased(4, 2.0)])["forward"] == 5.0
    five = [phased(1, 9.0), phased(2, 8.0), phased(3, 1.0), phased(4, 4.0), phased(5, 2.0)]
    assert median_phases(five) == {"data": 0.0, "forward": 2.0, "backward": 0.0, "update": 0.0}
    assert median_phases([phased(1, 1.0), phased(2, 1.0, save=4.0)])["save"] == 2.0
    # Two medians, of seconds and of tokens per second, would have different middles.
    rows = [a_step(step, seconds=s, tokens_per_second=512 / s) for step, s in enumerate([0.1, 0.1, 7.0, 7.0], 1)]
    assert median_speed(rows) * 3.55 == pytest.approx(512)


# -- trackers ----------------------------------------------------------------------------------------------------------


CONFIG = {"train.steps": 4, "data.path": ["a", "b"]}


def run(directory: Path, *names: str, steps: tuple[int, ...] = (1, 2), done: int = 0) -> list[str]:
    """Log steps and an evaluation to these trackers, and close them; return the messages."""
    messages: list[str] = []
    sink = Trackers(names, directory, CONFIG, done=done, say=messages.append)
    for step in steps:
        sink.put("train", a_step(step, grad_norm=None if step == 2 else 1.5))
    sink.put("validation", EvalRecord(step=2, validation_loss=2.5, perplexity=None))
    sink.close()
    return messages


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run(tmp_path, "tensorboard", steps=(1, 2, 3)) == []
    assert run(tmp_path, "tensorboard", steps=(3, 4), done=2) == []
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [
        (step, pytest.approx(4.0 - 0.01 * step)) for step in (1, 2, 3, 4)
    ]
    assert [e.step for e in found.Scalars("train/grad_norm")] == [1, 3, 4]
    assert [e.value for e in found.Scalars("train/tokens")] == [512, 1024, 1536, 2048]
    assert found.Scalars("phases/backward")[0].value == pytest.approx(0.2)
    assert found.Scalars("validation/loss")[0].value == 2.5
    command = call(*TINY, "save.trackers=tensorboard", "--steps", 3, "--save-every", 0, output=tmp_path / "out")
    found = accumulator.EventAccumulator(str(command.output / "tensorboard")).Reload()
    told = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert told == [(step["step"], pytest.approx(step["loss"])) for step in command.steps]
    assert len(told) == 3


def test_wandb_offline_has_the_numbers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "a project")
    assert run(tmp_path, "wandb", steps=(1, 2, 3)) == []
    time.sleep(1.1)  # wandb's file names have a resolution of a second
    assert run(tmp_path, "wandb", steps=(3, 4), done=2) == []
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    until = time.monotonic() + 300  # its service may still write after `finish`
    expected = [{b"3.99", b"3.98", b"3.97"}, {b"3.97", b"3.96"}]
    while True:
        files = [path.read_bytes() for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
        found = [Counter(re.findall(rb"train/loss.{1,4}(3\.9\d)", data)) for data in files]
        # some versions write each twice
        if [set(counts) for counts in found] == expected and all(len({*counts.values()}) == 1 for counts in found):
            break
        assert time.monotonic() < until, found
        time.sleep(0.1)
    for data in files:
        assert all(name in data for name in (b"a project", identity.encode(), tmp_path.name.encode()))


def test_wandb_without_an_account_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"save.trackers=wandb cannot begin: there is no API key.*WANDB_MODE=offline"):
        Trackers(["wandb"], tmp_path, CONFIG, done=0, say=print)
    assert os.listdir(tmp_path) == []


def test_trackio_has_the_numbers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read on import
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert run(tmp_path, "trackio", steps=(1, 2, 3)) == []
    assert run(tmp_path, "trackio", steps=(3, 4), done=2) == []
    name = json.loads((tmp_path / "trackers.json").read_text())["trackio"]
    logs = SQLiteStorage.get_logs("offload-trainer", name)
    losses = [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
    assert sorted(losses) == [(step, pytest.approx(4.0 - 0.01 * step)) for step in (1, 2, 3, 3, 4)]


def put(monkeypatch: pytest.MonkeyPatch, name: str, log: Any = lambda *_: None, close: Any = lambda: None) -> list:
    """Register a tracker `name` of these functions; return the ids that it is started with."""
    begun: list[str | None] = []

    def begin(*given: Any) -> Started:
        begun.append(given[-1])
        return given[-1] or "a new one", log, close

    monkeypatch.setitem(sinks._KINDS, name, (begin, "Mend it"))
    return begun


def test_trackers_that_fail_or_never_end_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing one is reported once; one that cannot start or is not installed refuses the run."""
    assert sinks._KINDS.keys() <= OPTIONAL.keys()
    taken: list[int | str] = []
    put(monkeypatch, "bad", Mock(side_effect=ConnectionError("the network\nis gone")))
    put(monkeypatch, "good", lambda numbers, step: taken.append(step), lambda: taken.append("end"))
    said = run(tmp_path, "bad", "good", steps=(1, 2, 3))
    assert said == ["note: bad gets nothing more of this run, metrics.jsonl has it all: the network is gone"]
    assert taken == [1, 2, 3, 2, "end"]
    go = threading.Event()
    monkeypatch.setattr(sinks, "_LAST", 0.05)
    put(monkeypatch, "slow", close=lambda: go.wait(300))
    assert run(tmp_path, "slow") == ["note: slow: not all was taken within 0 s; metrics.jsonl has it"]
    go.set()
    monkeypatch.setitem(sinks._KINDS, "far", (Mock(side_effect=OSError("no route to host")), "Go nearer"))
    with pytest.raises(UserError, match=r"^save.trackers=far cannot begin: no route to host. Go nearer$"):
        Trackers(["far"], tmp_path, CONFIG, done=0, say=print)
    (tmp_path / "none").mkdir()  # a directory has the module's name
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"save.trackers=none needs none, which is not installed: pip install none"):
        refuse_missing(["none"])


def test_a_resumed_run_continues_the_trackers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = put(monkeypatch, "one")
    for done in (0, 2, 0):
        run(tmp_path, "one", done=done)
    assert begun == [None, "a new one", None]
    (tmp_path / "trackers.json").write_text('{"one": 7}')
    with pytest.raises(UserError, match=r"trackers.json cannot be read: .*Remove it"):
        run(tmp_path, "one", done=2)


# -- the page ----------------------------------------------------------------------------------------------------------


def full_step(step: int) -> StepRecord:
    memory = {"ram": 123 * 10**9, "gpu": 31 * 10**9, "drives": 987 * 10**9}
    row = a_step(step, memory=memory, nvme_written_bytes=10**9, device_peak_bytes=33 * 10**9, tokens=10**6 * step)
    return replace(row, loss=11.2 - step / 2000, phases={**row.phases, "wait": 0.4})


def elements(page: str) -> list[Element]:
    return list(fromstring(re.sub("<!doctype html>|<meta[^>]*>", "", page)).iter())


def rows_of(page: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in elements(page) if row.tag == "tr"]


def small_page(rows: Sequence[StepRecord], **changes: Any) -> str:
    content = {"title": "a run", "evaluations": [], "predicted": [], "progress": (10_000, None)}
    return report_page(**{**content, "rows": rows, **changes})  # type: ignore[arg-type]


def test_the_page_stands_alone_and_escapes() -> None:
    rows = [a_step(step) for step in range(1, 3001)]
    rows[5] = replace(rows[5], loss=None, skipped=True)
    evaluations = [EvalRecord(step=s, validation_loss=3.0, perplexity=20.1) for s in (10, 3000)]
    text = small_page(rows, title="<b>$x & co", evaluations=evaluations, notes=["<script>alert(1)</script>"])
    assert not {"script", "link", "img", "iframe", "b"} & {element.tag for element in elements(text)}
    attributes = [pair for element in elements(text) for pair in element.items()]
    assert not [value for name, value in attributes if name in ("src", "href")]
    assert "http" not in text.lower()
    assert "prefers-color-scheme: dark" in text
    assert "&lt;b&gt;$x &amp; co" in text
    assert "nan" not in [value for _, value in attributes]
    assert len(text) < 60_000
    lines = [[point.split(",") for point in value.split()] for name, value in attributes if name == "points"]
    assert 700 <= len(lines[0]) <= 800
    assert len(lines[1]) == 2
    # The loss falls, and SVG's y axis points down.
    assert all(float(first) < float(last) for first, last in zip(lines[0][0], lines[0][-1], strict=True))


@pytest.mark.parametrize("rows", [[], [a_step(1)], [a_step(1, loss=None, grad_norm=None)]])
def test_a_run_that_hardly_began_has_a_page_of_its_values_alone(rows: list[StepRecord]) -> None:
    page = small_page(rows)
    assert elements(page)
    assert "NaN" not in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["Loss"]
    assert "GPU memory" not in page


def test_predicted_and_measured_numbers() -> None:
    """None and 0 are dashes: a phase without a prediction is not shown as predicted to take 0 s. Wear is counted."""
    assert predicted_row("gpu", 2e9, 3e9, format_bytes, 8e9) == [("gpu", "8 GB", "2 GB", "3 GB", "1.50")]
    assert predicted_row("save", None, 5.0, format_seconds) == [("save", "-", "-", "5 s", "-")]
    assert predicted_row("gpu", 0, 0, format_bytes, 0) == []
    page = small_page([], predicted=predicted_row("/mnt/<ssd>", 1e12, None, format_bytes))
    assert ["/mnt/<ssd>", "-", "1 TB", "-", "-"] in rows_of(page)
    facts = facts_of(small_page([a_step(step, nvme_written_bytes=2 * 10**9) for step in (1, 2, 3)]))
    assert facts["written to drives, a step"] == "2 GB"
    assert facts["steps that wear 1 TB of a drive&#x27;s endurance (TBW)"] == "500"
    for few in (4096, None):
        assert "written" not in small_page([a_step(1, nvme_written_bytes=few)])


def test_memory_is_drawn_by_tier() -> None:
    rows = [a_step(step, memory={"ram": 10**8 * step, "drives": 5 * 10**9}, host_rss_bytes=10**9) for step in (1, 2, 3)]
    page = small_page(rows)
    assert re.findall('aria-label="(.*?) over steps"', page) == ["loss", "RAM", "drives"]
    curves = re.findall('points="(.*?)"', page)[1:]
    now, most, drives = ([float(point.split(",")[1]) for point in curve.split()] for curve in curves)
    assert now[0] - now[1] == pytest.approx(now[1] - now[2], abs=0.15)  # steps of 0.1 GB
    assert len({*most}) == len({*drives}) == 1


# -- while a run is active ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock for Telemetry and Screen whose `now` moves only when told."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(sinks.time, "monotonic", lambda: made.now)
    return made


def telemetry(folder: Path, *, total: int) -> tuple[Telemetry, list[str]]:
    """Return the outputs of a run in `folder`, with its page, and the lines that they print."""
    said: list[str] = []
    outputs = outputs_in(folder, said, total=total)
    outputs.page = lambda left: small_page(read_metrics(folder / "metrics.jsonl", most=800), progress=(100_000, left))
    return outputs, said


def facts_of(page: str) -> dict[str, str]:
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def test_the_page_follows_the_run(clock: SimpleNamespace, tmp_path: Path) -> None:
    """It is written after the first step and then once in ten seconds, and shows what a reader wants to know."""
    (outputs, _), shown = telemetry(tmp_path, total=100_000), []
    for step in range(1, 61):
        clock.now += 0.5
        outputs.step(full_step(step))
        page = (tmp_path / "report.html").read_text()
        if not shown or page != shown[-1]:
            shown.append(page)
    assert [facts_of(page)["steps"] for page in shown] == [f"{step} of 100000" for step in (1, 21, 41)]
    facts = {"training loss": "11.1795", "a step": "0.5 s", "tokens a second": "1.02 k", "time left": "13 h 53 min"}
    assert facts.items() <= facts_of(shown[-1]).items()
    assert RELOAD in shown[-1]
    assert len(re.findall("<svg", shown[-1])) == 4
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "metrics.jsonl", "report.html"]
    outputs.end()
    ended = (tmp_path / "report.html").read_text()
    assert "refresh" not in ended
    assert "time left" not in facts_of(ended)
    outputs.close()


def test_a_long_run_stays_cheap(tmp_path: Path) -> None:
    """The page of 20,000 steps is made of a bounded number of them, long and short ones alike, and of the last one."""
    row, path = full_step(1), tmp_path / "metrics.jsonl"
    made = (replace(row, step=step, seconds=1.0 + step % 2) for step in range(1, 20_001))
    path.write_text("".join(record.to_json() + "\n" for record in made))
    found = read_metrics(path, most=800)
    steps = [one.step for one in found]
    assert 700 < len(steps) < 900
    assert (steps[0], steps[-1]) == (1, 20_000)
    stretch = round(20_000 / (len(steps) - 1))
    assert len({(step - 1) // stretch for step in steps[:-1]}) == len(steps) - 1
    assert fmean(one.seconds for one in found) == pytest.approx(1.5, abs=0.02)


def test_slow_pages_are_fewer(clock: SimpleNamespace, tmp_path: Path) -> None:
    """At most a hundredth of the time goes into pages, however long one takes."""
    (outputs, said), written = telemetry(tmp_path, total=1000), []

    def page(*_: object) -> str:
        clock.now += 2.0
        written.append(clock.now)
        return ""

    outputs.page = page
    outputs.end(failed=True)
    assert not written  # no step was finished
    for step in range(1, 1001):
        clock.now += 1.0
        outputs.step(full_step(step))
    outputs.close()
    assert not [line for line in said if "report.html" in line]
    assert [after - before for before, after in pairwise(written)] == [202.0] * 4


def test_a_page_that_cannot_be_written_does_not_end_the_run(clock: SimpleNamespace, tmp_path: Path) -> None:
    outputs, said = telemetry(tmp_path, total=1000)
    (tmp_path / "report.html").mkdir()
    for step in range(1, 4):
        clock.now += 60
        outputs.step(replace(full_step(step), loss=math.nan))
    outputs.end()
    told = [line for line in said if "report.html" in line]
    assert told == [f"note: {tmp_path}/report.html cannot be written, and the run does not need it: Is a directory"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "metrics.jsonl", "report.html"]
    (tmp_path / "report.html").rmdir()
    clock.now += 60
    outputs.step(replace(full_step(4), loss=math.nan))
    assert "training loss" not in facts_of((tmp_path / "report.html").read_text())
    outputs.close()


# -- `offload-train report RUN...`: the differences of runs and their effects ------------------------------------------


def test_runs_have_different_lines_and_their_names_below() -> None:
    names = [f"run-{number}-{'x' * number}" for number in range(20)]
    losses = [Series(name, [(1.0, 4.0), (100.0, 2.0 + number % 3 / 1000)]) for number, name in enumerate(names)]
    page = comparison_page(losses, [("", *names)])
    chart = page.partition('aria-label="loss over steps"')[2].partition("</svg>")[0]
    drawn = re.findall(r'<polyline class="line" style="stroke: ([^"]*)" [^>]*><title>(.*?)</title>', chart)
    assert [name for _, name in drawn] == names
    assert len({colour for colour, _ in drawn}) == len(names)
    assert re.findall(r'<span style="color: ([^"]*)">(.*?)</span>', page) == drawn


def a_run(directory: Path, *words: str, steps: int = 6, **row: Any) -> Path:
    wished = load_config(["--model", "gpt2-xl", *words])
    plan = make_plan(wished, SHAPES["gpt2-xl"], read_machine("h200"))
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(resolved(wished, plan)))
    (directory / "plan.json").write_text(json.dumps(plan.to_json()))
    lines = [a_step(step, **row).to_json() for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def rows(*runs: Path) -> dict[str, tuple[str, ...]]:
    head, *rest = comparison(compared(runs))
    assert head == ("", *(run.name for run in runs))
    return {row[0]: row[1:] for row in rest}


def test_differing_settings_and_their_results(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", "--lr", "1e-3")
    evaluation = EvalRecord(step=6, validation_loss=3.5, perplexity=33.1)
    (one / "evaluations.jsonl").write_text(evaluation.to_json() + "\n")
    slow = {"seconds": 2.0, "tokens_per_second": 256.0, "phases": {"forward": 0.5, "update": 1.5}, "skipped": True}
    two = a_run(tmp_path / "two", "--lr", "2e-3", "--accumulate", "4", steps=3, hidden=0.25, **slow)
    told = rows(one, two)
    expected = {
        "optim.lr": ("0.001", "0.002"),
        "model.name": ("gpt2-xl", "gpt2-xl"),  # equal, but always shown
        "train.gradient_accumulation_steps": ("1", "4"),
        "tokens a step": ("4.1 k", "16.4 k"),
        "training loss": ("3.9400", "3.9700"),
        "validation loss": ("3.5000", "-"),
        "a step": ("0.5 s", "2 s"),
        "a step, backward": ("0.2 s", "-"),
        "a step, update": ("0.1 s", "1.5 s"),
        "tokens a second": ("1.02 k", "256"),
        "a step, update hidden": ("-", "0.25 s"),
        "steps skipped": ("-", "3"),
    }
    assert expected.items() <= told.items()
    assert not {"optim.max_grad_norm", "save.output"} & told.keys()  # equal, and a place
    plan = json.loads((one / "plan.json").read_text())
    assert told["placement"][0] == plan["chosen"]["homes"]
    assert plan["hidden"] or told["a step, predicted"][0] == f"{sum(plan['seconds'].values()):.2g} s"
    told = rows(a_run(tmp_path / "three", steps=1, loss=None, nvme_written_bytes=0))
    assert not {"training loss", "validation loss", "GPU memory, peak", "on drives"} & told.keys()
    assert "written to drives, a step" not in told
    assert told["steps"] == ("1",)
    assert not [cells for cells in told.values() if set(cells) == {"-"}]


def test_in_columns_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Directories without a run are named."""
    runs = [str(a_run(tmp_path / name, "--lr", rate)) for name, rate in (("one", "1e-3"), ("another", "2e-3"))]
    assert cli.main(["report", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    (rate,) = [line for line in lines if line.startswith("optim.lr ")]
    assert rate[lines[0].index("another") :] == "0.002"
    assert cli.main(["report", runs[0], "--json", *runs[1:]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["directory"] for one in found] == runs
    assert [one["optim.lr"] for one in found] == [1e-3, 2e-3]
    assert "GPU memory, peak" not in found[0]
    assert cli.main(["report", *runs, "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert ["", "one", "another"] in rows_of(text)
    assert ["optim.lr", "0.001", "0.002"] in rows_of(text)
    assert text.count("<polyline") == 2
    with pytest.raises(UserError, match=r"holds no run: .*config\.yaml: No such file"):
        compared([tmp_path])
    (tmp_path / "one/plan.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by a run"):
        compared([tmp_path / "one"])
