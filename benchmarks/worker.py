"""A process that builds runs as `offload-train` does, and takes steps; `Worker` is the parent's side of it.

It reads one job a line from stdin, as JSON, and writes one answer a line to stdout. After {"error": ...} it ends. The
job "facts" is answered with `_here`; others have these keys:

    words, output    what configures the run, and its directory
    asked            the answer comes when the engine is built; each further line of stdin is answered with one step
    steps, warm      without `asked`: how many steps are timed, and how many are taken before; the answer has the time,
                     loss and norm of each timed step, peaks of memory, and facts of the plan
    end              fewer steps are timed if they would last beyond this number of the monotonic clock
    fill, peer       weights are filled at memory speed instead of drawn; another library's engine (peers.py)
    product          rows of square matrices in bf16: how many operations a second their products reach
    cap_bytes        limit of GPU memory
    trace            file for two more steps under torch's profiler; the second overlaps the first one's update
    kept             the answer comes when the run's memory is free, and the next job may follow
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offload_trainer.common.errors import explain
from offload_trainer.storage.owned_dirs import scratch

ROOT = Path(__file__).resolve().parent.parent
OUT_OF_TIME = "not run: out of time"


class Failure(Exception):
    """The reason for a missing result, in the words of its row's outcome."""


class Worker:
    """A process of this module, with its own directory in `place`."""

    def __init__(self, place: Path | None = None) -> None:
        self._runs, self._open = 0, ExitStack()
        self.folder = self._open.enter_context(scratch("worker-", directory=place))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, __file__], **pipes, stderr=log)

    def run(self, *, within: float | None = None, **job: Any) -> dict[str, Any]:
        """Send one job, whose output is in this directory, and return the answer, as `ask` does."""
        self._runs += 1
        self.output = self.folder / f"run-{self._runs}"
        return self.ask(job | {"output": str(self.output)}, within=within)

    def ask(self, line: object, *, within: float | None = None) -> dict[str, Any]:
        """Send one line, and return the answer. Raises Failure if there is none, or none `within` so many seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(self.process.stdout, selectors.EVENT_READ)
                if not waiting.select(within):
                    raise Failure(OUT_OF_TIME)
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())  # one write, so the line is complete
        except (BrokenPipeError, json.JSONDecodeError):
            code = self.process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
            said = (self.folder / "log").read_text(errors="replace")
            raise Failure(f"failed: {how}: {' '.join(said.split())[-300:]}") from None
        if error := answer.get("error"):
            raise Failure(f"{'not run' if 'this does not fit' in error else 'failed'}: {error[-400:]}")
        return answer

    def end(self) -> None:
        """Kill the process and remove its directory."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._open.close()


def facts() -> dict[str, Any]:
    """Return the facts that numbers depend on and no setting contains: sources, machine and versions.

    A separate process collects those of torch, since that initialises CUDA.
    """
    describe = ["git", "describe", "--always", "--dirty"] if shutil.which("git") else ["true"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    total = hashlib.sha256()  # also identifies a copy without git history
    for path in sorted((ROOT / "offload_trainer").rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    worker = Worker()
    try:
        return {"commit": commit or "unknown", "source": total.hexdigest()[:12]} | worker.ask("facts", within=300.0)
    except Failure as failure:
        raise SystemExit(f"torch does not start here: {failure}") from failure
    finally:
        worker.end()


# -- in the process ----------------------------------------------------------------------------------------------------

_ALWAYS = ["--steps", "1000", "train.eval_every=0", "--save-every", "0", "--resume", "never"]
_PACKAGES = ("transformers", "pydantic", "safetensors", "deepspeed", "bitsandbytes", "triton", "torchao")
_CONTEXT = 500_000_000  # bytes of GPU memory that plans count for the driver


def carry_out(
    answer: Callable[[dict[str, Any]], None],
    *,
    words: list[str],
    output: str,
    asked: bool = False,
    steps: int = 0,
    warm: int = 0,
    end: float = 0.0,
    fill: bool = False,
    peer: str | None = None,
    product: int = 0,
    cap_bytes: int | None = None,
    trace: str = "",
    kept: bool = False,
) -> None:
    """Build the engine for a configuration, measure it, and answer.

    The process is prepared before anything imports torch, since CUDA reads its settings when it is first used.
    """
    from offload_trainer.run.process_setup import prepare_process
    from offload_trainer.settings import load_config

    config = load_config([*_ALWAYS, *words, "--output", output])
    prepare_process(config)
    import torch

    on_gpu, driver_says = torch.cuda.is_available(), torch.cuda.mem_get_info
    if cap_bytes and on_gpu:
        limit_memory(cap_bytes)
    found: dict[str, Any] = {"reserved": 0, "in_use": 0, "early": {}}
    import peers

    from offload_trainer.machine.bench import LayerSizes, _matmul
    from offload_trainer.model.loader import ModelSource
    from offload_trainer.optim import state_files
    from offload_trainer.plan import planner
    from offload_trainer.plan.tiered.engine import Tiered
    from offload_trainer.run import build, train
    from offload_trainer.run.loop import timed_steps
    from offload_trainer.telemetry.meters import PhaseClock, peak_rss_bytes

    state_files.INITIAL_SCALE = 1024.0  # fewer of the first steps overflow
    if product:
        square = LayerSizes((product, product, product), tokens=product, width=product)
        found["product"] = _matmul(torch.bfloat16, square, gpu=on_gpu, seconds=0.3).value
        _give_back()
    start = time.perf_counter()

    def measure(job: Any) -> None:
        plan = json.loads(Path(output, "plan.json").read_text())
        told = (line for line in Path(output, "log.txt").read_text().splitlines() if "The update on the CPU:" in line)
        found.update(build_seconds=time.perf_counter() - start, plan=plan, kernel=next(told, ""))
        found.update(flops_per_step=job.flops_per_step, build_peak=peak_rss_bytes())
        found["parameters"] = job.checkpoints.record.identity["parameters"]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # the peak after this point is that of the steps
        if peer is not None and on_gpu:  # their streams do not wait for each other at a phase's end
            job.clock = PhaseClock(torch.cuda.synchronize)
        running, early["seconds"] = timed_steps(job, steps=sys.maxsize), 0.0
        if asked:
            answer(found)
            for _ in sys.stdin:
                answer(next(running))
            return
        before = [next(running) for _ in range(warm)]
        count = min(steps, int((end - time.monotonic()) / (2 * before[-1]["step"]))) if before and end else steps
        found["steps"] = [next(running) for _ in range(max(1, count))]
        if on_gpu:
            free, total = driver_says()
            found.update(reserved=torch.cuda.max_memory_reserved(), in_use=total - free)
        if peer is None:
            job.engine.synchronize()  # the update thread decides about the last step
            found["early"] = dict(early)
        if trace:
            with torch.profiler.profile() as seen:  # records all kinds of devices
                for _ in range(2):
                    next(running)
            seen.export_chrome_trace(trace)  # the suffix of the name selects gzip
        if not kept:
            answer(found)

    with ExitStack() as replaced:
        if fill:
            replaced.enter_context(patch.object(ModelSource, "weights", filled_for_benchmarks))
        if kept:  # the next run has the same model, and counting takes longer than its steps
            sys.path.append(str(ROOT / "tests/helpers"))
            from counted_once import cached_counts

            replaced.enter_context(cached_counts())
        # `instead` replaces the loop that would write an export and checkpoints: the plan counts no room for them.
        replaced.enter_context(patch.object(planner, "saved_items", lambda *_, **__: []))
        if peer is not None:  # plain torch and other libraries need no kernel of ours
            replaced.enter_context(patch.object(Tiered, "refuse", lambda *_: None))
            replaced.enter_context(patch.object(build, "set_malloc_threshold", lambda *_, **__: None))
        early = replaced.enter_context(_early_updates())
        replaced.enter_context(patch.object(build, "build_engine", peers.builder(peer)))
        train.train_run(config, instead=measure)
    _give_back()
    if kept:
        answer(found)


def filled_for_benchmarks(source: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, fp32 tensor on the CPU) in the model's order; the same shapes and seed give the same values.

    They are no real initialisation, since drawing 10e9 normal values on one thread takes minutes. Matrices repeat the
    same 2^24 + 43 normal values with the model's standard deviation, each from a different offset; norms are ones,
    biases zeros. Speed, bytes and finiteness match a freshly initialised model's; losses do not. Matrices are views of
    one buffer, so that 8e9 parameters need the memory and the time of the largest.
    """
    import torch

    assert source.random
    largest = max(weight.numel for weight in source.shape.weights if len(weight.shape) > 1)
    count = min((1 << 24) + 43, largest | 1)  # coprime to every width, so that no two rows of a matrix are equal
    deviation = float(getattr(source.config, "initializer_range", 0.02))
    pattern = torch.randn(count, generator=torch.Generator().manual_seed(source.seed)) * deviation
    repeated = pattern.repeat(largest // count + 2)
    for weight in source.shape.weights:
        if len(weight.shape) == 1:
            yield weight.name, torch.full(weight.shape, 0.0 if weight.name.endswith("bias") else 1.0)
        else:
            yield weight.name, repeated[zlib.crc32(weight.name.encode()) % count :][: weight.numel].view(weight.shape)


def limit_memory(cap: int) -> None:
    """Limit GPU memory to that of a smaller card, less the driver's share; its speed stays."""
    import torch

    driver_says, total = torch.cuda.mem_get_info, torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - _CONTEXT) / total))

    def within_cap(device: Any = None) -> tuple[int, int]:
        free, _ = driver_says(device)
        return max(0, min(free, cap - _CONTEXT - torch.cuda.memory_reserved())), cap

    torch.cuda.mem_get_info = within_cap


def _give_back() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def _early_updates() -> Iterator[dict[str, float]]:
    """Yield counts of the steps, pages and valid pages that engines update before their step is decided.

    `seconds` is the time in which the native kernel updates pages, early or not.
    """
    from offload_trainer.offloading.update.updater import SpeculativeStep
    from offload_trainer.optim.native_kernel import NativeKernel

    counts, kept = {"steps": 0, "pages": 0, "valid": 0, "seconds": 0.0}, SpeculativeStep.kept
    update_page = NativeKernel.update_page

    def counting(step: Any, *given: Any) -> set[int]:
        valid = kept(step, *given)
        for key, more in (("steps", 1), ("pages", len(step.written)), ("valid", len(valid))):
            counts[key] += more
        return valid

    def timed(kernel: Any, page: Any) -> None:
        start = time.perf_counter()
        update_page(kernel, page)
        counts["seconds"] += time.perf_counter() - start

    with patch.object(SpeculativeStep, "kept", counting), patch.object(NativeKernel, "update_page", timed):
        yield counts


def _here() -> dict[str, Any]:
    """Return the facts about this machine and its libraries; a missing one is null."""
    import torch

    about: dict[str, Any] = {"gpu": None, "GiB": 0.0}
    if torch.cuda.is_available():
        card: Any = torch.cuda.get_device_properties(0)
        about = {"gpu": f"{card.name}, sm_{card.major}{card.minor}", "GiB": round(card.total_memory / 2**30, 1)}
    if shutil.which("nvidia-smi"):  # not on machines with AMD cards
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        about["driver"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    units = " ".join({"avx512_bf16", "amx_bf16", "amx_fp16"}.intersection(cpu.get("flags", "").split()))
    name = cpu.get("model name", "unknown")
    about["CPU"] = f"{name}, 16-bit units {units or 'none'}, {len(os.sched_getaffinity(0))} cores"
    about["RAM"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    about |= {"system": platform.platform(), "Python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    about |= {found.name: found.version for found in reversed([*distributions()]) if found.name in _PACKAGES}
    about["torch"] = f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'the CPU alone'}"
    return about | {"compiler": shutil.which(os.environ.get("CXX", "g++"))}


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped worker must not outlive its stage
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout, which is moved to stderr

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers)

    try:
        for line in sys.stdin:
            job = json.loads(line)
            if job == "facts":
                answer(_here())
            else:
                carry_out(answer, **job)
    except Exception as error:
        traceback.print_exc()
        answer({"error": explain(error) or f"{type(error).__name__}: {error}"})
        os._exit(1)  # skips cleanup that memory or threads in use might block


if __name__ == "__main__":
    main()
