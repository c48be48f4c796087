"""Tests of memory that is full: a run on an emulated GPU continues with the same bits; in a cgroup plans are right."""

import gc
import json
import os
import random
import re
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import KILL, LIMIT, Run, command, environment, results
from counted_once import cached_counts
from emulated_gpu import emulated_gpu
from engine_bench import model_directory
from late_transfers import QueuedKernel

from offload_trainer.common.errors import GpuFull, Interrupted, TrainerError, fills_gpu
from offload_trainer.engine.protocol import Engine
from offload_trainer.machine.rate_cache import cache_file
from offload_trainer.run.build import build_engine
from offload_trainer.run.train import _full, train_run
from offload_trainer.settings import load_config

GPU_BYTES = 1_030_000_000  # plans take 1,000 MB for CUDA and as a reserve
SAVED = ["--save-every", "3", "train.eval_every=2"]


def run(
    folder: Path,
    *words: str,
    fails: Callable[[int], bool] = lambda number: False,
    size: int = GPU_BYTES,
    share: float = 0.002,
    seed: int = 0,
) -> int:
    """Train in `folder`/run on an emulated GPU of `size` bytes, full at some allocations; return their number.

    `share` more of it stays free then; 2 MB, a third of this model's state.
    """
    folder.mkdir(exist_ok=True)
    (folder / "drive").mkdir(exist_ok=True)
    model, text = model_directory(folder / "model", "gpt2", vocab_size=4096, n_layer=2), folder / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(1500)))
    given = ["--model", str(model), "--scratch", "--data", str(text), "--output", str(folder / "run")]
    given += ["--steps", "4", "--seq-len", "16", "--micro-batch", "2", "train.eval_rows=4"]
    given += ["data.tokenizer=builtin", "tiered.page_size=8192", "optim.kernel=torch", "--nvme", str(folder / "drive")]
    engines: list[weakref.ref[Engine]] = []
    old = torch.ones((), requires_grad=True).clone()  # autograd runs the newest nodes first

    def build(*setup: Any, **more: Any) -> Engine:
        # On a CPU a backward that failed leaves nodes in this thread's queue, and one of older nodes drops them. A GPU
        # has a thread of autograd's, which drops them immediately.
        old.backward(retain_graph=True)
        gc.collect()
        assert not [engine for engine in engines if engine()], "the engine of the failed attempt keeps its memory"
        made = build_engine(*setup, **more)
        engines.append(weakref.ref(made))
        return made

    with pytest.MonkeyPatch.context() as patch, emulated_gpu(patch, seed=seed, haste=0.3) as gpu:
        os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder / "cache")
        gpu.bytes, gpu.fails = size, fails
        patch.setattr("offload_trainer.run.train._MORE_FREE", share)
        patch.setattr("offload_trainer.run.build.build_engine", build)
        patch.setattr("offload_trainer.optim.cuda_adam.choose_cuda_kernel", lambda place: (gpu, ""))
        patch.setattr("offload_trainer.engine.tiered._device_kernel", lambda *_, **__: QueuedKernel(gpu))
        with cached_counts():
            train_run(load_config([*given, *words]))
        return gpu.allocations


HALF = 1_006_000_000  # bytes of a GPU on which half of the state fits
CASES = {
    "on the GPU": (GPU_BYTES, SAVED),
    "updated during the backward": (HALF, [*SAVED, "--ram-fraction", "0", "tiered.overlap=backward"]),
    "fp16, during the forward": (HALF, [*SAVED, "--dtype", "fp16", "tiered.overlap=forward"]),
    "block by block, inputs away": (
        HALF + 4_000_000,
        [
            *SAVED, "--params", "cpu", "--accumulate", "2", "tiered.micro_batch_order=breadth_first",
            "model.activation_checkpointing=on", "model.offload_activations=true",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tries"), [("on the GPU", 1), *(pytest.param(case, 7, marks=pytest.mark.slow(25)) for case in CASES)]
)
def test_a_run_goes_on_with_the_same_bits(
    case: str, tries: int, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU is full at a random allocation of the start, a forward, a backward, an update or a validation."""
    size, words = CASES[case]
    allocations = run(tmp_path / "alone", *words, size=size)
    expected, draw = results(tmp_path / "alone/run"), random.Random(seed)
    kept = 0
    for number in range(tries):
        at, here = draw.randrange(1, allocations + 1), tmp_path / str(number)
        capsys.readouterr()
        run(here, *words, fails=lambda count, at=at: count == at, size=size, seed=number)
        said = capsys.readouterr().err
        assert results(here / "run") == expected, at
        assert said.count("the GPU ran out of memory") == 1
        assert re.search(r"on the GPU: (state|weights|gradients)", said)
        assert "the GPU ran out of memory" in (here / "run/log.txt").read_text()
        kept += "no checkpoint of step" not in said and "resumed from" in said
        told = json.loads((here / "cache" / cache_file().name).read_text())
        assert told["kept free of Emulated GPU"] == int(0.002 * size)
    assert kept or tries < 7 or case == "updated during the backward"  # one try may draw a start


def test_a_full_forward_goes_on_from_the_step_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not from an older checkpoint, which would give the same bits: here step 3, and checkpoints are made at 4 only."""
    words = ["--save-every", "4", "data.validation=0"]
    allocations = run(tmp_path / "alone", *words)
    run(tmp_path / "full", *words, fails=lambda number: number == allocations - 150)
    said = capsys.readouterr().err
    assert "resumed from" in said
    assert "step-00000003" in said
    assert results(tmp_path / "full/run") == results(tmp_path / "alone/run")


def test_a_gpu_that_stays_full_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"asked for.*with less on it this does not fit: gpu needs .* has 1.03 GB"):
        run(tmp_path, *SAVED, fails=lambda number: number > 300, share=0.02)


def test_errors_of_a_full_gpu_are_recognised() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 15.77 GiB of which 512.00 MiB is free. Including"
    attempt = Mock(side_effect=torch.OutOfMemoryError(text))
    told = _full(attempt)
    assert told
    assert told.missing == 2 << 30
    assert "2.50 GiB were asked for, 512.00 MiB were free" in str(told)
    alone = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    outer, stopped = TrainerError("the update failed"), Interrupted("asked to stop", code=143)
    outer.__cause__, stopped.__cause__ = alone, GpuFull(alone)
    assert [fills_gpu(error) for error in (alone, outer, stopped)] == [True, True, False]
    assert not GpuFull(alone).missing
    for other in (MemoryError(), RuntimeError("CUDA error: an illegal memory access was encountered")):
        assert not fills_gpu(other)
        attempt.side_effect = other
        with pytest.raises(type(other)):
            _full(attempt)


# -- host memory under a cgroup's limit --------------------------------------------------------------------------------


def inside(box: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = f'echo $$ > {box}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "box", *command(*words)], capture_output=True, text=True, env=environment(), timeout=500
    )


def two_steps(folder: Path, **shape: int) -> list[str]:
    """Write a Llama's configuration; return the words of two steps of it with random weights and tokens of its own."""
    llama = {"model_type": "llama", "vocab_size": 2048, "num_hidden_layers": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(llama | {"bos_token_id": 0, "eos_token_id": 0} | shape))
    words = ["--model", str(folder), f"data.cache={folder}/cache", "--scratch", "--tokenizer", "builtin"]
    words += ["--steps", "2", "--save-every", "0", "train.eval_every=0", "data.validation=0", "placement.threads=2"]
    words += ["--engine", "tiered", "--micro-batch", "1", "--dtype", "fp32", "model.activation_checkpointing=on"]
    return words


@pytest.mark.slow(40)
@pytest.mark.box
def test_a_row_that_is_refused_would_be_killed(box: Path, tmp_path: Path) -> None:
    # A wide MLP and one narrow head, since the attention of a longer row would take most of the time.
    shape = {"hidden_size": 64, "intermediate_size": 16384, "num_attention_heads": 1, "head_dim": 16}
    words = [*two_steps(tmp_path, **shape, max_position_embeddings=8192), "--seq-len", "8192"]
    refused = inside(box, *words, "--output", tmp_path / "refused")
    assert refused.returncode == 2
    assert "ram needs" in refused.stderr
    assert not (tmp_path / "refused").exists()
    assert inside(box, *words, "--force", "--output", tmp_path / "forced").returncode == -KILL


@pytest.mark.slow(40)
@pytest.mark.box
def test_a_model_runs_in_one_weight_buffer_where_two_do_not_fit(box: Path, drive: Path, tmp_path: Path) -> None:
    """The plan lowers the number without an argument."""
    shape = {"hidden_size": 1024, "intermediate_size": 14336, "num_attention_heads": 8, "max_position_embeddings": 1024}
    words = [*two_steps(tmp_path, **shape), "--seq-len", "128", "--nvme", drive, "--ram-fraction", "0"]
    words += ["placement.gradients=nvme", "tiered.overlap=off", "tiered.page_size=1048576"]
    done = inside(box, *words, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    found, plan = Run(0, done.stderr, tmp_path / "run"), json.loads((tmp_path / "run/plan.json").read_text())
    assert (plan["chosen"]["params"], plan["chosen"]["sizes"]["unit_buffers"]) == ("nvme", 1)
    assert found.steps[-1]["host_rss_bytes"] <= LIMIT
    assert len(found.losses) == 2
    assert found.losses[1] < found.losses[0]
