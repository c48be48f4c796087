"""Tests of the GPU suite, whose calls are rehearsed without a GPU, and of the folder for a machine without network."""

import gzip
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_folder
import gpu_suite
import peers
import pytest
import torch
import worker
from commands import TINY, environment
from gpu_folder import CARRIED, LEVELS, THERE, command, pinned
from gpu_stages import speed
from gpu_stages.stage import Record, Stage
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from seen_calls import calls_of
from torch.utils._python_dispatch import TorchDispatchMode
from worker import OUT_OF_TIME, Failure, Worker

from offload_trainer.config import ModelSection
from offload_trainer.data.rows import Batch
from offload_trainer.model.loader import ModelSource, resolve_model
from offload_trainer.model.loss import CausalLoss
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.settings import load_config
from offload_trainer.telemetry.meters import PhaseClock

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def suite(command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command of gpu_suite.sh as a machine without HOME does."""
    env = environment(PYTHON=sys.executable, **extra)
    env.pop("HOME", None)
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=env, cwd=ROOT, timeout=500, check=False
    )


# -- the two calls -----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/benchmarks/gpu.md").read_text()
COMMANDS = {call: line for line, call in re.findall(r"^ {4}(scripts/gpu_suite\.sh (\w+) .*)$", PAGE, re.MULTILINE)}


def rehearse(call: str, folder: Path, drive: Path) -> None:
    """Run a call without a GPU, as the page says, and unpack its archive in `folder`; check what all stages promise."""
    done = suite(f"{COMMANDS[call]} --rehearse --drive {drive}", OUT=str(folder))
    said = f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    with tarfile.open(folder / f"{call}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    for stage in gpu_suite.CALLS[call][1]:
        found = json.loads((folder / f"{stage}.json").read_text())
        assert (found["done"], found["rehearsal"]) == (True, True), said
        wrong = {row["outcome"] for row in found["rows"]} - {"ok"}
        assert found["rows"], said
        assert all(re.match(r"not run: (torchao|deepspeed|it takes a minute)", outcome) for outcome in wrong), said
        page = (folder / f"{stage}.md").read_text().splitlines()
        assert page[0].startswith("# rehearsal: ")
        assert next(line for line in page if line.startswith("|")).startswith("| rehearsal: ")
        assert sum(line.startswith("| ") for line in page) == len(found["rows"]) + 2
    assert done.returncode == 0, said
    assert not list(drive.iterdir())


def rows_of(folder: Path, stage: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{stage}.json").read_text())["rows"]


def test_the_page_has_both_calls_and_they_fit_in_fifteen_minutes() -> None:
    assert COMMANDS.keys() == gpu_suite.CALLS.keys() == {"first", "second"}
    assert all(len(command) < 2000 for command in COMMANDS.values())
    assert [seconds for seconds, _ in gpu_suite.CALLS.values()] == [480, 230]
    assert sorted(gpu_suite.STAGES) == sorted(name for _, stages in gpu_suite.CALLS.values() for name in stages)


@pytest.mark.slow
def test_the_first_call(tmp_path: Path, drive: Path) -> None:
    rehearse("first", tmp_path, drive)
    timed = rows_of(tmp_path, "speed")
    assert [row["case"] for row in timed] == [case.name for case in speed.GROUPS["speed"].cases]
    assert timed[0]["of the floor"] == 1
    assert all(row["of the floor"] > 0 for row in timed)
    ours = [row for row in timed if row["case"].startswith("ours")]
    assert len({row["steps"][-1]["loss"] for row in ours}) == 1
    for row in ours:
        assert len(row["steps"]) == 2
        # Every step is announced, the two that are not timed too.
        assert row["early"]["steps"] == (4 if "backward" in row["case"] else 0)
    for case in ("planned", "ram"):
        assert json.loads(gzip.decompress((tmp_path / speed.TRACE.format(case)).read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_the_second_call(tmp_path: Path, drive: Path) -> None:
    """A timed step that overlaps the backward keeps its early pages, and other libraries have the same losses."""
    rehearse("second", tmp_path, drive)
    rows = [row for row in rows_of(tmp_path, "drive") if "overlap backward" in row["case"]]
    assert len(rows) == 2
    for row in rows:
        assert row["early"]["valid"] == row["early"]["pages"] > 0
        assert all(step["grad_norm"] < 1000 for step in row["steps"])
    losses = {row["case"]: row["steps"][-1]["loss"] for row in rows_of(tmp_path, "rivals") if "steps" in row}
    ours = next(loss for name, loss in losses.items() if name.startswith("ours"))
    assert losses["FSDP2, CPU offload"] == pytest.approx(ours, abs=1e-3)


def test_the_command_line_accepts_every_case(tmp_path: Path) -> None:
    for words in (case.words for group in speed.GROUPS.values() for case in group.cases):
        named = [word for one in words for word in (["--nvme", str(tmp_path)] if one == "{drive}" else [one])]
        load_config([*named, speed.UNCLIPPED])


@pytest.mark.slow
def test_files_with_tests_for_a_gpu_are_named_and_need_no_other_packages() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").glob("*/test_*.py")}
    marks = re.compile(r"^[^#\n]*mark\.gpu\b", re.MULTILINE)
    marked = {name for name, path in files.items() if path != Path(__file__) and marks.search(path.read_text())}
    assert marked == set(gpu_suite.MARKED)
    for name in gpu_suite.COMPUTING:  # run on a GPU too, and start no commands
        assert not re.search(r"^pytestmark = .*skipif|from commands import", files[name].read_text(), re.MULTILINE)
    lacking = ["deepspeed", "bitsandbytes", "datasets", "trl", "tensorboard", "PIL", "pyarrow"]
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", *gpu_suite.MARKED, *gpu_suite.COMPUTING]
    code = f"import sys, pytest; sys.modules.update(dict.fromkeys({lacking})); sys.exit(pytest.main({words}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# -- other libraries ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model(ModelSection(overrides={"n_layer": 2, "n_embd": 64}), seed=3)


def two_batches() -> list[Batch]:
    tokens = torch.randint(1000, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    return [Batch(inputs=rows[:, :-1], targets=rows[:, 1:]) for rows in tokens]


class FloatsRead(TorchDispatchMode):
    """Count the floats that are read from tensors, each of which would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return function(*args, **(kwargs or {}))


def test_the_floor_waits_for_the_gpu_once_a_step(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = calls_of(monkeypatch.setattr, CausalLoss, "of", lambda *given: given[3])
    of_fp32 = SimpleNamespace(source=source, config=SimpleNamespace(model=SimpleNamespace(dtype="fp32")))
    engine = peers.native_engine(of_fp32)
    with FloatsRead() as floats:
        result = engine.train_step(two_batches(), lr=0.0, clock=PhaseClock())
    assert (counts, floats.count) == ([32, 32], 1)  # targets that count are known on the host
    assert result.loss > 0


def test_torchao_is_not_clipped_after_its_gradients_were_copied(source: ModelSource) -> None:
    module, norms = peers._filled(source, torch.float32), list[torch.Tensor]()
    adam = torch.optim.SGD(module.parameters())
    adam.step = lambda: norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    rival = peers.engine_of(module, torch.device("cpu"), adam)
    assert rival.train_step(two_batches(), lr=1.0, clock=PhaseClock()).grad_norm is None
    assert norms[0] > 1.0


# -- without a GPU, without time ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_run_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "8b", f"{tmp_path}/folder"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert gpu_suite.main() == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


def outcome(kernel: str, *, engine: str = "tiered", pages: int | None = None, **sizes: float) -> str:
    """Return the outcome of a row whose plan has these sizes, and which updated `pages` early, if any were to be."""
    sizes = {"gpu_fraction": 0.0, "ram_fraction": 1.0, "shadow_fraction": 0.0, "ahead": pages is not None} | sizes
    chosen = {"engine": engine, "sizes": sizes if engine == "tiered" else None}
    early = {"steps": 7, "pages": pages, "valid": pages}
    return speed.outcome_of({"plan": {"chosen": chosen}, "kernel": kernel, "early": early}, steps=7)


def test_rows_that_must_not_be_quoted_are_marked() -> None:
    """No compiler, or an overlap that updates no page early, makes a row another one."""
    built = "The update on the CPU: the native kernel, built for this machine and checked to give torch's bits."
    slow = "The update on the CPU: torch's kernel; the faster native one is not used: adam.cpp needs a C++ compiler"
    assert outcome(slow, gpu_fraction=0.5) == f"not comparable: {slow}"
    assert outcome(built) == outcome(slow, gpu_fraction=1.0) == outcome("", engine="deepspeed") == "ok"
    chosen, words = choose_kernel("auto")
    assert (outcome(words) == "ok") == (chosen.name == "native")
    for sizes in ({"shadow_fraction": 1.0}, {"ram_fraction": 0.5}):
        assert outcome(built, pages=5, **sizes) == "ok"
        none = "not comparable: no page was updated before its step was decided"
        assert outcome(built, pages=0, **sizes) == none
    assert outcome(built, pages=0) == "ok"  # a CPU has no shadow memory


def test_what_a_call_has_no_time_for_is_listed(tmp_path: Path) -> None:
    start = time.monotonic()
    done = suite(f"scripts/gpu_suite.sh second {tmp_path} --rehearse --seconds 1")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    for stage in gpu_suite.CALLS["second"][1]:
        outcomes = [row["outcome"] for row in rows_of(tmp_path, stage)]
        assert OUT_OF_TIME in outcomes
        assert all(outcome.startswith("not run: ") for outcome in outcomes)
        assert OUT_OF_TIME in (tmp_path / f"{stage}.md").read_text()
    assert [row["check"] for row in rows_of(tmp_path, "machine")] == ["bench"]


def test_a_stage_that_is_killed_leaves_every_row_it_had(tmp_path: Path) -> None:
    record = a_record(tmp_path, tar=tmp_path / "out/all.tar.gz")
    record.add(case="one", speed=1.5)
    kept = json.loads((tmp_path / "8b.json").read_text())
    assert (kept["done"], kept["rows"]) == (False, [{"outcome": "ok", "case": "one", "speed": 1.5}])
    page = (tmp_path / "8b.md").read_text()
    assert "| one | 1.5 | ok |" in page
    assert "not at its end yet, or killed" in page
    with tarfile.open(tmp_path / "out/all.tar.gz") as tar:
        packed = tar.extractfile("8b.md")
        assert packed
        assert packed.read().decode() == page
    assert record.close()
    record.add("failed: a kernel", case="two")
    assert not record.close()


def a_record(folder: Path, *, tar: Path | None = None) -> Record:
    return Record(folder, "8b", title="t", about={"gpu": None}, rehearsal=True, tar=tar)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(folder: Path) -> Iterator[Stage]:
    """Yield a stage of a rehearsal, whose process serves all tests that let it live."""
    with Stage(drive=folder, rehearsal=True) as made:
        yield made


@pytest.fixture
def stage(begun: Stage, tmp_path: Path) -> Stage:
    """Return the stage with a record and time of this test's own."""
    begun.begin(a_record(tmp_path), seconds=300)
    return begun


@pytest.mark.slow
def test_a_clipped_row_is_marked_and_selected_cases_are_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that saves nothing needs no room for it. With --only nothing is compared with a row that is not run."""
    case = speed.ours("clipped", "0", "0.5", "backward", "{drive}", "optim.max_grad_norm=1e-3")
    speed.Group("t", speed.gpt2, [case]).carry_out(stage)
    monkeypatch.setattr(stage, "_only", "half in RAM, half on the drive, overlap off")
    speed.GROUPS["drive"].carry_out(stage)
    clipped, selected = stage.record.rows
    assert clipped["outcome"].startswith("not comparable: 3 of 4 steps were updated early, and 0 of their")
    assert not [item for item in clipped["plan"]["items"] if item["name"] in ("final weights", "checkpoints")]
    assert (selected["outcome"], selected["of the floor"]) == ("ok", None)


@pytest.mark.slow
def test_a_process_that_dies_costs_only_its_own_row(stage: Stage) -> None:
    for words, why in (
        (["--model", "gpt2-10b", "--optimizer", "cpu"], "not run: this does not fit"),
        (["--no-such-flag", "1"], r"(?s)failed: .*unknown flag"),
    ):
        with pytest.raises(Failure, match=why):
            stage.run(words, steps=1)
    stage._kept = Worker(stage.drive)
    os.kill(stage._kept.process.pid, signal.SIGKILL)
    with pytest.raises(Failure, match="failed: killed by signal 9"):
        stage.run(TINY, steps=1)


def test_a_process_without_an_answer_is_ended_and_reported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage._kept = slow = Worker(stage.drive)
    slow.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stage, "left", iter([60.0, 0.0]).__next__)  # enough to start, nothing to wait
    with pytest.raises(Failure, match=OUT_OF_TIME):
        stage.run(TINY, steps=1)
    assert slow.process.returncode == -9
    assert not slow.folder.exists()


STAGE = "import gpu_suite; assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(7)"
WORKER = """import worker
from offload_trainer.run import process_setup
process_setup.prepare_process = lambda config: sys.exit(1 if 'torch' in sys.modules else 7)
worker.carry_out(print, words=[], output='out', steps=1, product=128)"""


@pytest.mark.parametrize("code", [STAGE, WORKER], ids=["stage", "worker"])
def test_torch_is_not_imported(code: str) -> None:
    """A stage must survive a GPU's failure; a worker sets the environment that CUDA reads when it is first used."""
    there = environment(PYTHONPATH=":".join(map(str, (ROOT, SCRIPTS, ROOT / "benchmarks"))))
    run = [sys.executable, "-c", f"import sys\n{code}"]
    assert subprocess.run(run, cwd=SCRIPTS, env=there, check=False).returncode == 7


def test_a_memory_cap_applies_to_the_plan_and_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions, GB = list[float](), 10**9
    for name, value in {
        "mem_get_info": lambda device=None: (130 * GB, 140 * GB),
        "get_device_properties": lambda n: SimpleNamespace(total_memory=140 * GB),
        "set_per_process_memory_fraction": fractions.append,
        "memory_reserved": lambda: GB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    worker.limit_memory(34 * GB)
    assert torch.cuda.mem_get_info() == (32.5 * GB, 34 * GB)
    assert fractions == [pytest.approx(33.5 / 140)]


# -- the folder for a machine without network: it has all dependencies, and its versions are pinned --------------------

LINUX = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64", "extra": ""}


def test_every_need_of_the_package_is_carried_or_there() -> None:
    known = {canonicalize_name(one) for one in (*CARRIED, *THERE)}
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(line).name) for line in own} <= known
    for need in (Requirement(text) for name in CARRIED for text in requires(name) or ()):
        assert (need.marker and not need.marker.evaluate(LINUX)) or canonicalize_name(need.name) in known, need


def test_versions_and_levels_of_kernels_are_pinned_and_for_one_machine(tmp_path: Path) -> None:
    words = command(tmp_path, python="3.12", more=["transformers==5.23.0"])
    assert {"--only-binary=:all:", "--no-deps", "cp312", "manylinux_2_28_x86_64", "transformers==5.23.0"} <= set(words)
    assert all("==" in pin for pin in pinned())
    assert not any(word.startswith(("torch==", "nvidia")) for word in words)
    # The first levels require every feature of the later ones.
    needed = [flags for _, flags in LEVELS.values()]
    assert all(more > fewer for more, fewer in pairwise(needed))
    assert [options[0] for options, _ in LEVELS.values()][-1] == "-march=x86-64-v3"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the folder is for x86-64")
def test_a_machine_without_a_compiler_uses_the_folders_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no libstdc++ there. Kernels of other sources, or for another CPU, are not used."""
    monkeypatch.setattr(gpu_folder, "LEVELS", {"x86-64-v3": LEVELS["x86-64-v3"]})
    (made,) = gpu_folder.build_kernels(tmp_path / "kernels")
    assert b"libstdc++.so" not in made.read_bytes()
    assert made.stat().st_size < 2_000_000
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose_kernel("auto")[0].name == "torch"
    if not (placed := gpu_folder.place_kernel(tmp_path / "kernels")):
        pytest.skip("this CPU is older than those that kernels are built for")
    assert placed == "x86-64-v3"
    assert choose_kernel("native")[0].name == "native"
    for name, change in (("line_of_features", lambda: "flags: avx"), ("texts_of", lambda source: ["other"])):
        with monkeypatch.context() as patch:
            patch.setattr(gpu_folder.kernel_cache, name, change)
            assert gpu_folder.place_kernel(tmp_path / "kernels") == ""


@pytest.mark.network
def test_the_folder_is_small_and_its_packages_are_importable(tmp_path: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    no_kernels = environment(CXX="no-such-compiler")  # each takes seconds; the test above builds one
    script = [sys.executable, str(SCRIPTS / "gpu_folder.py"), str(tmp_path), "--python", here]
    done = subprocess.run(script, capture_output=True, text=True, env=no_kernels)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no index here")
    assert done.returncode == 0, done.stderr  # 1 if it is larger than 40 MiB
    assert "no kernel for x86-64-v3: " in done.stderr
    site = str(tmp_path / "site")
    code = f"import pydantic, torchao; assert pydantic.__file__.startswith({site!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(PYTHONPATH=site))
