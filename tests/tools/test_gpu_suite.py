"""Tests of the GPU suite's stages, rehearsed without a GPU, and of their reports of failures."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import environment, in_turn

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_stages import gpt2_10b, llama_8b, llama_8b_plain, parity, saves, speed, ways, worker  # noqa: E402
from gpu_stages import tests as the_tests  # noqa: E402
from gpu_stages.fill import filled_for_benchmarks  # noqa: E402
from gpu_stages.record import OUT_OF_TIME, Record  # noqa: E402
from gpu_stages.stage import Failure, Stage, outcome_of  # noqa: E402

from offload_trainer.errors import UserError  # noqa: E402
from offload_trainer.optim.kernels import choose_kernel  # noqa: E402
from offload_trainer.run.train import use_deterministic_algorithms  # noqa: E402
from offload_trainer.settings import load_config  # noqa: E402

STAGES = ("check", "tests", "parity", "speed", "tokens", "ways", "8b", "8b-plain", "10b", "saves")
TINY = ["model.overrides.n_layer=2", "model.overrides.n_embd=64", "--seq-len", "32", "--micro-batch", "2"]


def suite(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / "gpu_suite.sh", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(PYTHON=sys.executable),
        cwd=cwd,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def rehearsed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that rehearses a stage, once for all of pytest's workers.

    Its folder also has the suite's output and a list of what it left on the drive.
    """

    def rehearse(stage: str) -> Path:
        folder = shared / f"rehearsed-{stage}"
        with in_turn(folder):
            if not (folder / "left").exists():
                folder.mkdir(exist_ok=True)
                drive = tmp_path_factory.mktemp("drive")
                done = suite(stage, folder, "--rehearse", "--drive", drive)
                (folder / "said").write_text(f"exit {done.returncode}\n{done.stdout}{done.stderr}")
                (folder / "left").write_text(" ".join(path.name for path in drive.iterdir()))
        return folder

    return rehearse


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_passes_its_rehearsal_and_says_so(rehearsed: Callable[[str], Path], stage: str) -> None:
    folder = rehearsed(stage)
    said = (folder / "said").read_text()
    found = json.loads((folder / f"{stage}.json").read_text())
    assert (found["done"], found["rehearsal"]) == (True, True), said
    assert found["rows"], said
    assert {row["outcome"] for row in found["rows"]} == {"ok"}, said
    page = (folder / f"{stage}.md").read_text().splitlines()
    assert page[0].startswith("# rehearsal: ")
    assert next(line for line in page if line.startswith("|")).startswith("| rehearsal: ")
    assert sum(line.startswith("| ") for line in page) == len(found["rows"]) + 2
    assert said.startswith("exit 0\n")
    assert (folder / "left").read_text() == ""


def test_parity_compares_every_home_with_plain_torch_and_with_the_first(rehearsed: Callable[[str], Path]) -> None:
    rows = json.loads((rehearsed("parity") / "parity.json").read_text())["rows"]
    groups = {(row["dtype"], row["accumulate"]) for row in rows}
    assert len(groups) == 4
    for group in groups:
        plain, first, *others = (row for row in rows if (row["dtype"], row["accumulate"]) == group)
        assert plain["weights"] == "plain torch"
        assert {row["shares"] for row in (first, *others)} == {
            *("1.0, 0.0, 0.0", "0.3, 0.3, 0.4", "0.0, 1.0, 0.0", "0.0, 0.0, 1.0")
        }
        assert all(row["same"] for row in others)
        assert all(row["apart"] < parity.BOUND for row in (first, *others))


def test_speed_leaves_a_trace_that_a_browser_reads(rehearsed: Callable[[str], Path]) -> None:
    trace = rehearsed("speed") / "speed-trace.json.gz"
    assert trace.stat().st_size < 10_000_000
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    rows = json.loads((rehearsed("speed") / "speed.json").read_text())["rows"]
    losses = {row["case"]: row["loss"] for row in rows}
    ours = {loss for case, loss in losses.items() if case.startswith("ours")}
    assert len(ours) == 1
    assert losses["FSDP2, CPU offload"] == pytest.approx(ours.pop(), abs=1e-3)
    against = {row["case"]: row["against"] for row in rows}
    assert against["plain torch"] == 1
    assert all(ratio > 0 for ratio in against.values())


def test_every_update_schedule_has_its_row_and_bits(rehearsed: Callable[[str], Path]) -> None:
    """Every update method has a row with the same last loss, so the updates are equal."""
    rows = json.loads((rehearsed("ways") / "ways.json").read_text())["rows"]
    assert [row["case"] for row in rows] == list(ways.CASES)
    assert len({row["loss"] for row in rows}) == 1
    assert all(len(row["steps"]) == 2 for row in rows)
    chosen = [row["plan"]["chosen"]["sizes"] for row in rows]
    assert {size["places"] for size in chosen} == {1, 2}
    assert {size["remainders"] for size in chosen} == {False, True}


def test_every_case_sets_its_overlap() -> None:
    """Every case names its overlap: `auto` turns it off on a machine without rates and would leave gaps in tables."""
    homes = [parity._home("gpu", shares, tiny=False) for shares in parity.SHARES]
    ours = [*llama_8b.CASES.values(), *gpt2_10b.CASES.values(), *saves.CASES.values(), *ways.CASES.values(), *homes]
    ours += [case.words for case in speed.cases() if case.name.startswith("ours")]
    named = [[word for word in words if word.startswith("tiered.overlap=")] for words in ours]
    assert all(len(one) == 1 and one[0] != "tiered.overlap=auto" for one in named)
    for cases in (llama_8b.CASES, ways.CASES, {case.name: case.words for case in speed.cases()}):
        told = [
            way
            for words in cases.values()
            for way in ("off", "forward", "backward")
            if f"tiered.overlap={way}" in words
        ]
        assert set(told) == {"off", "forward", "backward"}
        for name, words in cases.items():
            way = next((word.partition("=")[2] for word in words if word.startswith("tiered.overlap=")), None)
            assert way is None or f"overlap {way}" in name


def test_check_writes_rates_for_plans_of_that_machine(rehearsed: Callable[[str], Path]) -> None:
    words = ["plan", "--json", "--machine", rehearsed("check") / "bench.json"]
    done = subprocess.run([sys.executable, "-m", "offload_trainer", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"]["forward"] > 0


def test_the_tests_for_a_gpu_exist() -> None:
    assert [file for file in the_tests.COMPUTING if not (ROOT / file).exists()] == []


def test_the_command_line_accepts_every_case(tmp_path: Path) -> None:
    drive = ["--nvme", str(tmp_path), "--engine", "tiered", "--params", "gpu"]
    given = [*llama_8b.CASES.values(), *gpt2_10b.CASES.values(), *saves.CASES.values()]
    words = [
        *([*drive, *case] for case in given),
        *([word for word in (*drive, *case) if word != "{drive}"] for case in ways.CASES.values()),
        *(case for case, _ in llama_8b_plain.CASES.values()),
        *(case.words for case in speed.cases()),
    ]
    for weights, shares in (("plain torch", None), *product(parity.WEIGHTS, parity.SHARES)):
        home = parity._home(weights, shares, tiny=False)
        words.append([word for word in home if word != "{drive}"] + (["--nvme", str(tmp_path)] if shares else []))
    refused = {}
    for case in words:
        try:
            load_config(case)
        except UserError as error:
            refused[" ".join(case)] = str(error)
    assert not refused


# -- without a GPU, without time ---------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_run_or_written(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = suite("8b", tmp_path / "folder")
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr
    assert not (tmp_path / "folder").exists()


def test_rows_whose_update_is_the_fallback_are_marked() -> None:
    """Rows are marked if the machine has neither a compiler nor a prebuilt kernel."""
    built = "The update on the CPU: the native kernel, prebuilt for x86-64-v4 and checked to give torch's bits."
    slow = "The update on the CPU: torch's kernel; the faster native one is not used: adam.cpp needs a C++ compiler"

    def outcome(kernel: str, *, engine: str = "tiered", gpu: float = 0.5) -> str:
        sizes = {"gpu_fraction": gpu} if engine == "tiered" else None
        return outcome_of({"plan": {"chosen": {"engine": engine, "sizes": sizes}}, "kernel": kernel})

    assert outcome(slow) == f"not comparable: {slow}"
    assert [outcome(built), outcome(slow, gpu=1.0), outcome("", engine="plain")] == ["ok"] * 3
    chosen, words = choose_kernel("auto")
    assert (outcome(words) == "ok") == (chosen.name == "native")


def test_selected_cases_are_run(tmp_path: Path) -> None:
    """--only runs the cases that an earlier stage had no time for."""
    done = suite("ways", tmp_path, "--rehearse", "--only", "two places")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ways.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [name for name in ways.CASES if "two places" in name]


def test_cases_without_time_are_reported(tmp_path: Path) -> None:
    done = suite("8b", tmp_path, "--rehearse", "--seconds", "13")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "8b.json").read_text())
    assert [row["outcome"] for row in found["rows"]] == [OUT_OF_TIME] * 2
    assert found["done"]
    assert OUT_OF_TIME in (tmp_path / "8b.md").read_text()


def test_a_stage_that_is_killed_leaves_every_row_it_had(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    record.add(case="one", speed=1.5)
    kept = json.loads((tmp_path / "8b.json").read_text())
    assert (kept["done"], kept["rows"]) == (False, [{"outcome": "ok", "case": "one", "speed": 1.5}])
    page = (tmp_path / "8b.md").read_text()
    assert "| one | 1.5 | ok |" in page
    assert "not at its end yet, or killed" in page
    assert record.close()
    record.add("failed: a kernel", case="two")
    assert not record.close()


def a_record(folder: Path) -> Record:
    columns = {"case": "case", "speed": "speed"}
    return Record(folder, "8b", title="t", columns=columns, about={"gpu": None}, rehearsal=True)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(a_record(tmp_path / "pages"), seconds=300, drive=tmp_path) as made:
        yield made


def test_a_process_that_dies_costs_only_its_own_row(stage: Stage) -> None:
    with stage.worker("one") as one:
        os.kill(one._process.pid, 9)
        with pytest.raises(Failure, match="failed: killed by signal 9"):
            one.build(TINY)
    with stage.worker("another") as another, pytest.raises(Failure, match=r"(?s)failed: .*unknown flag"):
        another.build(["--no-such-flag", "1"])
    with stage.worker("large") as large, pytest.raises(Failure, match="not run: this does not fit"):
        large.build(["--model", "gpt2-10b", "--engine", "plain"])


def test_cases_without_an_export_need_no_room_for_it(stage: Stage) -> None:
    with stage.worker("one") as one:
        about = one.build([*TINY, "--engine", "tiered"])
        assert not [item for item in about["plan"]["items"] if item["name"] in ("export", "checkpoints")]
        assert one.ask("steps", count=2)["steps"][1]["loss"] > 0


def test_a_process_without_an_answer_is_ended_and_reported(stage: Stage) -> None:
    with stage.worker("slow") as slow:
        slow.rest()
        stage._end = 0.0
        slow._process.send_signal(19)
        with pytest.raises(Failure, match=OUT_OF_TIME):
            slow._line()
        assert slow._process.returncode == -9
        assert not slow.folder.exists()


PLACES = ":".join(map(str, (ROOT, SCRIPTS, ROOT / "benchmarks", ROOT / "soak")))


def _code_of(code: str) -> int:
    """Return the exit code of Python with this code, in the directory of the scripts."""
    run = [sys.executable, "-c", code]
    return subprocess.run(run, cwd=SCRIPTS, env=environment(PYTHONPATH=PLACES), check=False).returncode


def test_the_stage_itself_imports_no_torch() -> None:
    """The stage's process must survive a GPU failure, and use no GPU memory."""
    code = (
        "import gpu_suite, importlib, sys\n"
        "for name in gpu_suite.STAGES.values(): importlib.import_module(f'gpu_stages.{name}')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert _code_of(code) == 0


def test_a_memory_cap_applies_to_the_plan_and_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    gigabyte = 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (130 * gigabyte, 140 * gigabyte))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(total_memory=140 * gigabyte))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: gigabyte)
    served = SimpleNamespace(_driver_says=torch.cuda.mem_get_info)
    worker.Served._cap(served, 34 * gigabyte)  # type: ignore[arg-type]
    assert torch.cuda.mem_get_info() == (32.5 * gigabyte, 34 * gigabyte)
    assert fractions == [pytest.approx(33.5 / 140)]


def test_forks_may_still_initialise_cuda() -> None:
    """Loading the libraries leaves CUDA uninitialised, since the kill tests fork, and forks could not use it."""
    code = (
        "import torch\n"
        "def begun(*_, **__): raise SystemExit('CUDA was begun')\n"
        "for name in ('_lazy_init', 'device_count', 'get_device_capability', 'get_device_properties'):\n"
        "    setattr(torch.cuda, name, begun)\n"
        "import trials; trials.load_libraries()\n"
    )
    assert _code_of(code) == 0


def test_deterministic_is_more_than_a_warning() -> None:
    """Deterministic mode is an error, not a warning, with which torch leaves fused attention's backward as it is."""
    try:
        use_deterministic_algorithms()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# -- what is compared, and with what -----------------------------------------------------------------------------------


def a_row(**changed: Any) -> dict[str, Any]:
    return {"shares": "1.0, 0.0, 0.0", "losses": [3.0, 2.5], "norms": [1.0, 0.5], "digest": "a"} | changed


def test_a_home_that_differs_in_a_bit_fails() -> None:
    compared = parity.Compared()
    assert compared.outcome(a_row(shares=None, losses=[3.0, 2.51])) == "ok"
    assert compared.outcome(a_row()) == "ok"
    assert compared.outcome(a_row()) == "ok"
    assert compared.outcome(a_row(digest="b")) == "failed: digest differ"
    assert compared.outcome(a_row(losses=[3.0, 2.5 + 1e-12])) == "failed: losses differ"
    assert compared.outcome(a_row(norms=[1.0, None])) == "failed: norms differ"


def test_a_loss_that_is_far_from_plain_torchs_or_nan_fails() -> None:
    for loss in (2.6, float("nan")):
        compared = parity.Compared()
        compared.outcome(a_row(shares=None))
        assert compared.outcome(a_row(losses=[3.0, loss])).startswith("failed: loss is")


def test_filled_weights_are_the_same_each_time_and_rows_differ() -> None:
    from offload_trainer.config import ModelSection
    from offload_trainer.model.loader import resolve_model

    source = resolve_model(ModelSection(overrides={"n_layer": 2, "n_embd": 64}), seed=3)
    one, other = dict(filled_for_benchmarks(source)), dict(filled_for_benchmarks(source))
    assert {name: tuple(value.shape) for name, value in one.items()} == {w.name: w.shape for w in source.shape.weights}
    assert all(value.equal(other[name]) for name, value in one.items())
    matrix = one["transformer.wte.weight"]
    assert len(matrix.unique(dim=0)) == len(matrix)
    assert float(matrix.std()) == pytest.approx(source.config.initializer_range, rel=0.05)
    assert not one["transformer.h.0.attn.c_attn.weight"].equal(one["transformer.h.1.attn.c_attn.weight"])
    assert one["transformer.h.0.ln_1.weight"].unique().tolist() == [1.0]
    assert one["transformer.h.0.ln_1.bias"].unique().tolist() == [0.0]
