"""A process that builds runs as `offload-train` does, and takes steps on request.

    worker.py '{"cap_bytes": 34359738368}'       limit of GPU memory; {}: all of it

It reads one JSON object a line from stdin and writes one answer a line to stdout. After {"error": ...} it ends.

    build   words, fill, peer, product    build the run that `words` configure; answers facts and the plan, and the
                                          operations a second of a bf16 product of matrices with `product` rows
    steps   count                         take steps; answers the time, loss and norm of each, and peaks of memory
    trace   path                          take one more step under torch's profiler
    early                                 wait for the last update; count steps since `build` whose pages were updated
                                          during the backward, those pages, and how many of them were valid
    digest                                hash names and bytes of all master weights
    close                                 end the run and free its memory; another may be built then
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # has bench_step
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # has the package gpu_stages

from offload_trainer.errors import explain

_ALWAYS = ["--steps", "1000", "train.eval_every=0", "--save-every", "0", "--resume", "never"]
_CONTEXT = 500_000_000  # bytes of GPU memory that plans count for the driver


class Served:
    """The loop that reads requests and writes their answers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # libraries print to stdout, which is moved to stderr
        self._ready = False

    def serve(self) -> None:
        for line in sys.stdin:
            wish = json.loads(line)
            what = wish.pop("do")
            assert what == "build", f"{what}, and no run is open"
            self._build(**wish)
            self._give_back()
            self.answer({})

    def answer(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._answers)

    # -- a run ---------------------------------------------------------------------------------------------------------

    def _build(
        self, words: list[str], output: str, fill: bool = False, peer: str | None = None, product: int = 0
    ) -> None:
        """Build the engine for a configuration and serve requests on it; return at `close`.

        The process is prepared before anything imports torch, since CUDA reads its settings when it is first used.
        """
        from offload_trainer.optim import loss_scale
        from offload_trainer.run.process_setup import prepare_process
        from offload_trainer.settings import load_config

        loss_scale.INITIAL_SCALE = 1024.0  # fewer of the first steps overflow
        config = load_config([*_ALWAYS, *words, "--output", output])
        prepare_process(config)
        self._prepare_torch()
        rate = self._product(product) if product else None
        from gpu_stages import peers
        from gpu_stages.fill import filled_for_benchmarks
        from offload_trainer.model.loader import ModelSource
        from offload_trainer.plan import planner
        from offload_trainer.run import train

        start = time.perf_counter()
        with ExitStack() as replaced:
            if fill:
                replaced.enter_context(patch.object(ModelSource, "weights", filled_for_benchmarks))
            # `instead` replaces the loop that would write an export and checkpoints: the plan counts no room for them.
            replaced.enter_context(patch.object(planner, "saved_items", lambda *_, **__: []))
            self._early = replaced.enter_context(_early_updates())
            served = partial(self._serve_run, output=Path(output), start=start, product=rate)
            train.train_run(config, instead=served, build=peers.builder(peer))

    def _serve_run(self, job: Any, output: Path, *, start: float, product: float | None) -> None:
        from offload_trainer.trainer import timed_steps

        seconds = time.perf_counter() - start
        self.answer(self._about(job, output) | {"build_seconds": seconds, "product": product})
        running = timed_steps(job, steps=sys.maxsize)
        deeds: dict[str, Callable[..., dict[str, Any]]] = {
            "steps": lambda count: self._steps(running, count),
            "trace": lambda path: self._trace(running, path),
            "early": lambda: self._count_early(job),
            "digest": lambda: {"digest": digest_of(job.engine.named_master_parameters())},
        }
        for line in sys.stdin:
            wish = json.loads(line)
            what = wish.pop("do")
            if what == "close":
                return
            self.answer(deeds[what](**wish))

    def _about(self, job: Any, output: Path) -> dict[str, Any]:
        import torch

        from offload_trainer.telemetry.meters import peak_rss_bytes

        on_gpu, log = torch.cuda.is_available(), (output / "log.txt").read_text()
        plan = json.loads((output / "plan.json").read_text())
        about = {
            "plan": plan,
            "log": log,
            "kernel": next((line for line in log.splitlines() if "The update on the CPU:" in line), ""),
            "parameters": job.checkpoints.record.identity["parameters"],
            "tokens_per_step": plan["chosen"]["tokens_per_step"],
            "flops_per_step": job.flops_per_step,
            "build_rss": peak_rss_bytes(),
            "build_device_peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # the peak after this point is that of the steps
        return about

    def _steps(self, running: Iterator[dict[str, Any]], count: int) -> dict[str, Any]:
        import torch

        steps = [next(running) for _ in range(count)]
        if not torch.cuda.is_available():
            return {"steps": steps, "reserved": 0, "in_use": 0}
        free, total = self._driver_says()
        return {"steps": steps, "reserved": torch.cuda.max_memory_reserved(), "in_use": total - free}

    def _count_early(self, job: Any) -> dict[str, Any]:
        job.engine.synchronize()  # the update thread decides about the last step
        return self._early

    def _trace(self, running: Iterator[dict[str, Any]], path: str) -> dict[str, Any]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=kinds) as seen:
            step = next(running)
        seen.export_chrome_trace(path)  # the suffix of the name selects gzip
        return {"bytes": os.path.getsize(path), "step": step}

    # -- torch ---------------------------------------------------------------------------------------------------------

    def _prepare_torch(self) -> None:
        """Apply the memory cap once, before any computation."""
        if self._ready:
            return
        self._ready = True
        import torch

        self._driver_says = torch.cuda.mem_get_info
        cap = self._settings.get("cap_bytes")
        if cap and torch.cuda.is_available():
            self._cap(cap)

    def _cap(self, cap: int) -> None:
        """Limit memory to that of a smaller card, less the driver's share; its speed stays."""
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - _CONTEXT) / total))

        def within_cap(device: Any = None) -> tuple[int, int]:
            free, _ = self._driver_says(device)
            return max(0, min(free, cap - _CONTEXT - torch.cuda.memory_reserved())), cap

        torch.cuda.mem_get_info = within_cap

    def _product(self, size: int) -> float:
        """Return the operations a second of one product of bf16 matrices of random values, as the median of ten."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        taken = []
        for _ in range(13):
            wait()
            start = time.perf_counter()
            one @ other
            wait()
            taken.append(time.perf_counter() - start)
        del one, other
        self._give_back()
        return 2 * size**3 / sorted(taken[3:])[5]

    def _give_back(self) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextmanager
def _early_updates() -> Iterator[dict[str, int]]:
    """Yield counts of the steps, pages and valid pages that engines update before their step is decided."""
    from offload_trainer.offloading.update.step_params import SpeculativeStep

    counts, kept = {"steps": 0, "pages": 0, "valid": 0}, SpeculativeStep.kept

    def counting(step: Any, *given: Any) -> set[int]:
        valid = kept(step, *given)
        for key, more in (("steps", 1), ("pages", len(step.written)), ("valid", len(valid))):
            counts[key] += more
        return valid

    with patch.object(SpeculativeStep, "kept", counting):
        yield counts


def digest_of(weights: Iterator[tuple[str, Any]]) -> str:
    """Return the SHA-256 over names and bytes, sorted by name, so that every engine's weights hash alike."""
    import hashlib

    import torch

    total = hashlib.sha256()
    for name, value in sorted(weights):
        total.update(name.encode() + b"\0")
        total.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return total.hexdigest()


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped worker must not outlive its stage
    served = Served(json.loads(sys.argv[1]))
    try:
        served.serve()
    except Exception as error:
        traceback.print_exc()
        served.answer({"error": explain(error) or f"{type(error).__name__}: {error}"})
        os._exit(1)  # skips cleanup that memory or threads in use might block


if __name__ == "__main__":
    main()
