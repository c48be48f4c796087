"""Tests of machine profiles, timed rates and links, of cards and their dtypes, and of ranks' NUMA nodes."""

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sample_plans import SHAPES

from offload_trainer.cli import main
from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import parsed
from offload_trainer.config import PlacementSection
from offload_trainer.machine import bench, rate_cache
from offload_trainer.machine.bench import TimedUpdate, make_pages, timed_updates
from offload_trainer.machine.probe import probe_machine
from offload_trainer.optim import cuda_adam
from offload_trainer.optim.kernel_api import TorchKernel
from offload_trainer.plan.machine import Links, MachineProfile, Rate, Rates, card_mistakes, describe_rates, read_machine
from offload_trainer.plan.memory import CUDA_CONTEXT
from offload_trainer.plan.planner import make_plan, resolved
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS
from offload_trainer.run import machine_rates, process_setup, train
from offload_trainer.run.commands import doctor
from offload_trainer.run.commands.plan import described
from offload_trainer.run.process_setup import numa_nodes, prepare_process
from offload_trainer.settings import load_config

CLUSTERS = ["4xa100-80gb-100gbe", "4xrtx4090-10gbe", "8xa100-80gb", "8xh100-80gb"]
NAMED = [*CLUSTERS, "a100-40gb", "a100-80gb", "h200", "rtx4090-64gb", "v100-32gb"]


def _a_few(work: Callable[[], object], *, seconds: float, least: int = 3) -> list[float]:
    for _ in range(least):
        work()
    return [0.01] * least


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    """Return this machine's profile, timed with a tiny budget."""
    drive = tmp_path_factory.mktemp("drive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_PIECE", 1 << 20)
        patch.setattr(bench, "_repeat", _a_few)
        patch.setattr(bench, "ON_CPU", bench.LayerSizes((256, 1024, 4096), tokens=32, width=64))
        return bench.bench_machine(
            probe_machine(PlacementSection(nvme=(str(drive),)), output=str(drive)),
            [TimedUpdate(TorchKernel())],
            dtypes=["fp32"],
            matrices=False,
            budget=bench.Budget(
                drive_bytes=24 << 20,
                contention_seconds=0.2,
                layer_seconds=0,
                update_elements=100_000,
                update_page=32_768,
            ),
            say=lambda line: None,
        )


def test_a_bench_times_everything_and_leaves_nothing(timed: MachineProfile) -> None:
    rates, of_drive = timed.rates, timed.drives[0].rates
    assert set(rates.matmul) == {"fp32"}
    parts = [*itertools.product(("attention", "values", "loss", "weights"), ("forward", "backward"))]
    assert set(rates.layers) == {".".join(("fp32", *part)) for part in [*parts, ("tables", "backward")]}
    assert "in pages of 0.0328 M" in rates.update["torch"].source
    found = [*rates.layers.values(), rates.update["torch"], rates.memory, *vars(of_drive).values()]
    assert all(rate.value > 0 and rate.origin == "measured" for rate in found)
    assert not list(Path(timed.drives[0].directory, "offload-trainer").glob("run-*"))
    assert parsed(json.dumps(asdict(timed)), MachineProfile) == timed
    for told in ("products, fp32", "AdamW, torch", "read, alone", "write, both"):
        assert told in describe_rates(timed)


def test_lost_computation_is_what_products_alone_would_have_done_more(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = 15 * 10**8, 2.0  # bytes each way, seconds
    for of_product, lost in ((0.0, 2.0), (1e6, 0.002)):
        monkeypatch.setattr(bench, "_repeat", lambda work, seconds, its=of_product: [its])
        begun, matrix = threading.Event(), MagicMock()
        matrix.__matmul__.side_effect = lambda _, its=begun: its.set()
        monkeypatch.setattr(bench.torch, "randn", lambda *shape, its=matrix: its)
        found = bench._computation_lost(lambda its=begun: (its.wait(60), moved)[1], seconds=1.0)
        assert found.value == pytest.approx(3e9 / lost)
        assert "3 GB read and written in 2.0 s" in found.source


def test_rates_that_are_known_are_not_measured_again(timed: MachineProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_drive", None)
    monkeypatch.setattr(bench, "_triad", None)
    monkeypatch.setattr(bench, "_repeat", _a_few)
    how: dict[str, Any] = {"matrices": False, "budget": bench.Budget(layer_seconds=0), "say": lambda line: None}
    again = bench.bench_machine(timed, [TimedUpdate(TorchKernel())], dtypes=["fp32"], **how)
    assert again == timed
    monkeypatch.setattr(bench, "ON_CPU", bench.LayerSizes((8, 8, 8), 8, 64))
    more = bench.bench_machine(timed, [], dtypes=["bf16"], **how)
    assert set(more.rates.matmul) == {"fp32", "bf16"}
    assert more.rates.matmul["fp32"] == timed.rates.matmul["fp32"]


def test_each_form_of_moments_is_timed_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the cache of all tests has compiled kernels
    made = {update.name: update for update in timed_updates(("native", "torch"), ADAMW_FORMATS, say=print)}
    assert {"native", "native.bf16", "native.8bit", "native.8bit_bf16_masters", "torch"} <= set(made)
    pages = make_pages(70_000, page=32_768, format=made["native.8bit"].format)
    assert [(page.first, page.grad.numel()) for page in pages] == [(0, 32_768), (32_768, 32_768), (65_536, 4464)]
    run_once = lambda work, **_: [work() or 1.0]  # noqa: E731
    monkeypatch.setattr(bench, "_repeat", run_once)
    for name in ("native", "native.bf16", "native.8bit"):
        pages = make_pages(70_000, page=32_768, format=made[name].format)
        before = [page.fields["master"].clone() for page in pages]
        monkeypatch.setattr(bench, "make_pages", lambda *_, its=pages, **__: its)
        bench._update(made[name], bench.Budget())
        for page, old in zip(pages, before, strict=True):  # Every number changes, and none becomes NaN.
            assert (page.fields["master"] != old).float().mean() > 0.99
            assert (page.fields["master"] - old).abs().max() < 1e-3


def test_rates_are_of_the_same_machine(timed: MachineProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are those of all ranks: a user's program sets no count, and torchrun's ranks have one thread each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rate_cache.os, "cpu_count", lambda: 6)
    bare = replace(probe_machine(PlacementSection(nvme=(timed.drives[0].directory,)), output=str(tmp_path)), cores=6)
    assert rate_cache.with_cached_rates(bare).rates == Rates()
    rate_cache.keep_rates(replace(timed, cores=6))
    known = rate_cache.with_cached_rates(bare)
    assert (known.rates, known.drives[0].rates, known.notes) == (timed.rates, timed.drives[0].rates, ())
    boxed = replace(bare, drives=(replace(bare.drives[0], throttle="read_bps_device 254:0 1000"),))
    assert rate_cache.with_cached_rates(boxed).drives[0].rates is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = rate_cache.with_cached_rates(bare)
    assert found.rates == Rates()
    told = "timed with 6 CPU threads, and is unknown with the 2 used now .*`offload-train bench placement.threads=2`"
    assert re.search(told, "".join(found.notes))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rate_cache.with_cached_rates(replace(bare, cores=3)).rates == timed.rates  # on its own NUMA node
    rate_cache.cache_file().write_text("{torn")
    assert rate_cache.with_cached_rates(bare).rates == Rates()


def test_named_machines() -> None:
    for name in NAMED:
        machine = read_machine(name)
        assert machine.gpu
        assert machine.drives[0].rates
        rates, links = machine.rates, [machine.links.network, machine.links.message] if name in CLUSTERS else []
        every = [*rates.matmul.values(), *rates.update.values(), rates.to_device, rates.from_device, rates.both_ways]
        assert all(isinstance(rate, Rate) and rate.source for rate in (*every, *links))
        assert (machine.gpus in (4, 8)) == bool(links)
        cited = ["github.com/" in rate.source for rate in every if rate.origin == "measured"]
        assert all(cited)
        assert len(cited) >= 2
    told = re.escape(f"neither a file nor a known machine ({', '.join(NAMED)}); did you mean")
    with pytest.raises(UserError, match=told):
        read_machine("v100")


def test_drives_of_a_named_machine_are_where_nvme_says(tmp_path: Path) -> None:
    """A named machine's drive figures apply to the user's directory; a probed machine has only its own drives."""
    named = read_machine("v100-32gb")
    machine = described(named, ["/my/path"])
    assert machine.drives == (replace(named.drives[0], directory="/my/path"),)
    assert machine.notes == ("--nvme /my/path stands for /mnt/nvme of that machine",)
    assert described(named, ["/mnt/nvme"]) == named
    (tmp_path / "run.yaml").write_text("placement: {nvme: []}")
    for words, nvme in (([], ("/mnt/nvme",)), (["--nvme=/x"], ("/x",)), (["placement.nvme=[]"], ())):
        for file in ([], [str(tmp_path / "run.yaml")]):
            assert load_config([*file, *words], drives=["/mnt/nvme"]).placement.nvme == nvme
    two = replace(named, drives=(*named.drives, replace(named.drives[0], directory="/mnt/b")))
    assert [drive.directory for drive in described(two, ["/x", "/mnt/nvme"]).drives] == ["/mnt/nvme", "/x"]
    for other, nvme in ((named, ("/a", "/b")), (replace(named, origin="measured"), ("/a",))):
        with pytest.raises(UserError, match="--nvme /a: the machine has /mnt/nvme"):
            described(other, nvme)


@pytest.mark.parametrize("words", [(), ("placement.threads=3",)])
def test_ranks_use_rates_of_as_many(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has its share of the cores, and rates are stored for all ranks' threads together."""
    monkeypatch.setattr(process_setup, "end_without_launcher", lambda say: None)
    monkeypatch.setattr(process_setup.os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(process_setup, "numa_nodes", list)
    machine = probe_machine(PlacementSection(), output=str(tmp_path))
    of_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
    plain = {name: value for name, value in os.environ.items() if name not in of_rank}

    def prepared(*more: str, **environment: str) -> int:
        monkeypatch.setattr(os, "environ", plain | environment)
        prepare_process(load_config([*words, *more]))
        return int(os.environ["OMP_NUM_THREADS"])

    each = 3 if words else 64 // 6
    assert prepared("--gpus", "6") == 6 * each
    rate_cache.keep_rates(replace(machine, rates=Rates(matmul={"bf16": Rate(1e12, "measured", "six ranks' threads")})))
    rank = {"RANK": "1", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "6"}
    assert prepared("--gpus", "6", **rank) == each
    assert "bf16" in rate_cache.with_cached_rates(machine).rates.matmul
    assert prepared("--gpus", "5") == (15 if words else 60)
    # 5 ranks have 12 threads each, 60 as 6 ranks with 10
    assert ("bf16" in rate_cache.with_cached_rates(machine).rates.matmul) == (not words)
    assert prepared() == (3 if words else 64)
    assert "bf16" not in rate_cache.with_cached_rates(machine).rates.matmul


# -- links between ranks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_time_their_link_and_cache_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found for any number of threads, since ranks have fewer threads each than the process that timed."""
    known = Links(message=Rate(1e4, "specified", "of a data sheet"))
    messages: list[str] = []
    found = bench.bench_links(known, ranks=2, say=messages.append)
    assert messages == ["bench: links between 2 ranks"]
    assert (found.ranks, found.message) == (2, known.message)
    for one in (found.to_device_at_once, found.from_device_at_once, found.all_gather):
        assert (one.origin, "2 ranks" in one.source) == ("measured", True)
    here = probe_machine(PlacementSection(), output=str(tmp_path))
    rate_cache.keep_rates(replace(here, links=found))
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert rate_cache.with_cached_rates(here).links == found
    rate_cache.keep_rates(here)  # timed again without ranks
    assert rate_cache.with_cached_rates(here).links == found
    assert rate_cache.with_cached_rates(replace(here, gpu="another")).links == Links()
    again = parsed(json.dumps(asdict(replace(here, links=found))), MachineProfile)
    assert again.links == found
    assert "all gather" in describe_rates(again)


@pytest.mark.slow
def test_a_rank_that_fails_or_is_killed_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for second, why in ((failing, "OSError: no second rank"), (killed, "process 1 terminated with signal SIGKILL")):
        monkeypatch.setattr(bench, "run_rank", second)
        with pytest.raises(TrainerError, match=f"between 2 ranks could not be timed: rank 1: {why}"):
            bench.bench_links(Links(), ranks=2, say=lambda line: None)


def failing(rank: int, *how: Any) -> None:
    if rank == 1:
        bench.all_ranks.join = MagicMock(side_effect=OSError("no second rank"))  # rank 1 has its own process
    bench.run_rank(rank, *how)


def killed(rank: int, *how: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    bench.run_rank(rank, *how)


@pytest.mark.slow
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "probe_machine", lambda *_, **__: read_machine("v100-32gb"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="--gpus 4: there are 2"):
        machine_rates.bench_here(load_config(["--gpus", "4"]), drive_bytes=None, say=lambda line: None)


# -- GPUs --------------------------------------------------------------------------------------------------------------

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")  # torch 2.11's wheels for CUDA 13.0


def card(capability: tuple[int, int], built_for: tuple[str, ...] | None = CU130) -> MachineProfile:
    return replace(read_machine("a100-40gb"), gpu="NVIDIA X", capability=capability, built_for=built_for)


def test_code_and_cards() -> None:
    """Code runs from its minor version on, PTX also on later major ones; other names are no CUDA architecture."""
    for works, pairs in (
        (True, "sm_80:80 sm_80:89 sm_90a:90 sm_100:100 sm_100f:103 compute_70:120 gfx90a:70"),
        (False, "sm_86:80 sm_75:70 sm_75:80 sm_100a:103 compute_80:75 compute_90a:100"),
    ):
        for code, number in (pair.split(":") for pair in pairs.split()):
            mistakes = card_mistakes(card(divmod(int(number), 10), (code,)), dtype="fp32")
            assert (not list(mistakes)) == works, (code, number)


def test_a_card_that_the_installed_torch_has_no_kernels_for() -> None:
    ((told, fix),) = card_mistakes(card((7, 0)), dtype="fp16")
    assert told.startswith("the installed torch has no kernels for NVIDIA X (sm_70); it has sm_75, sm_80")
    assert fix.endswith("--index-url https://download.pytorch.org/whl/cu126")
    assert "--force-reinstall" in fix  # pip takes another build of the same version for the same version
    assert not list(card_mistakes(card((7, 0), ("sm_50", "sm_60", "sm_70")), dtype="fp16"))
    assert not list(card_mistakes(card((12, 1)), dtype="bf16"))
    ((_, fix),) = card_mistakes(card((12, 1), ("sm_80", "sm_90")), dtype="bf16")
    assert "newer torch" in fix
    assert not list(card_mistakes(replace(card((7, 0)), gpu=None), dtype="bf16"))


def test_the_dtype_depends_on_the_card() -> None:
    """Without bf16 units fp16 is chosen and bf16 refused by name. bf16 masters need weights in bf16."""
    assert bench.dtypes_to_time(card((7, 0)), "fp16") == ["fp16", "fp32"]
    assert bench.dtypes_to_time(card((9, 0)), "fp32") == ["bf16", "fp16", "fp32"]
    assert bench.dtypes_to_time(replace(card((9, 0)), gpu=None), "bf16") == ["bf16", "fp32"]
    for words, capability, dtype in (
        ([], (7, 0), "fp16"), ([], (8, 0), "bf16"), ([], None, "bf16"), (["--dtype", "fp32"], (7, 0), "fp32"),
        (["--dtype", "fp32"], (8, 0), "fp32"), (["--dtype", "fp16"], (8, 0), "fp16"),
        (["--dtype", "fp16"], (9, 0), "fp16"), (["--dtype", "fp16"], (7, 5), "fp16"),
        (["--dtype", "bf16"], (8, 0), "bf16"), (["--dtype", "bf16"], (9, 0), "bf16"),
    ):  # fmt: skip
        config, here = load_config(["--model", "gpt2", *words]), replace(card((8, 0), None), capability=capability)
        plan = make_plan(config, SHAPES["gpt2"], here)
        assert resolved(config, plan).model.dtype == dtype
        noted = "has no bf16 units: training in fp16 with dynamic loss scaling" in "".join(plan.notes)
        assert noted == (dtype == "fp16" and capability in ((7, 0), (7, 5)))
        assert [check.state for check in doctor._gpu(config.model, here)] == ["ok"]
        if dtype != "bf16":
            masters = load_config(["--model", "gpt2", "optim.master_dtype=bf16", *words])
            with pytest.raises(UserError, match=f"master_dtype=bf16 with --dtype {dtype}: .* use --dtype bf16"):
                make_plan(masters, SHAPES["gpt2"], here)
    config = load_config(["--model", "gpt2", "--dtype", "bf16"])
    for capability in ((7, 0), (7, 5)):
        here = card(capability, None)
        assert [check.state for check in doctor._gpu(config.model, here)] == ["ok", "failure"]
        with pytest.raises(UserError, match=r"NVIDIA X \(sm_7[05]\) has no bf16 units, .*: use --dtype fp16"):
            make_plan(config, SHAPES["gpt2"], here)


def faked(
    monkeypatch: pytest.MonkeyPatch,
    *,
    hip: str | None = None,
    cuda: str | None = "13.0",
    capability: tuple[int, int] = (7, 0),
    without_triton: Exception | None = None,
) -> None:
    """Fake what torch reports for a GPU without any driver files, on which no kernel can run."""
    there = {
        "is_available": lambda: True,
        "mem_get_info": lambda: (30 << 30, 32 << 30),
        "get_device_name": lambda: "a card",
        "get_device_capability": lambda _=None: capability,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"],
        "current_device": lambda: 0,
    }
    for name, told in there.items():
        monkeypatch.setattr(torch.cuda, name, told)
    monkeypatch.setattr(cuda_adam, "CudaKernel", MagicMock(side_effect=without_triton or TrainerError("no Triton")))
    monkeypatch.setattr(torch.version, "cuda", None if hip else cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_a_gpu_is_found_wherever_torch_finds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU is found although WSL2 has no /dev/nvidiactl and ROCm has no NVIDIA device at all."""
    faked(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = probe_machine(PlacementSection(), output=str(tmp_path))
    assert (machine.gpu, machine.gpu_bytes, machine.capability) == ("a card", (30 << 30) + 500_000_000, (7, 0))
    assert machine.built_for == ("sm_75", "sm_80", "sm_90")
    assert machine.no_state_on_gpu == "no Triton"
    found = [check.found for check in doctor._gpu(load_config(["--model", "gpt2"]).model, machine)]
    assert "it cannot store optimizer state: no Triton" in " ".join(found)
    assert parsed(json.dumps(asdict(machine)), MachineProfile) == machine
    assert doctor._torch().state == "ok"
    for used in (400 * 10**6, 700 * 10**6):  # asking makes a CUDA context, which plans count
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda used=used: (30 << 30, (30 << 30) + used))
        found = probe_machine(PlacementSection(), output=str(tmp_path))
        assert found.gpu_bytes == (30 << 30) + min(used, CUDA_CONTEXT)
    faked(monkeypatch, hip="7.1")  # a card of AMD is not judged by NVIDIA's numbers
    machine = probe_machine(PlacementSection(), output=str(tmp_path))
    assert (machine.gpu, machine.capability, machine.built_for) == ("a card", None, None)
    assert not list(card_mistakes(machine, dtype="bf16"))
    assert "built for ROCm" in machine.no_state_on_gpu
    assert "ROCm 7.1" in doctor._torch().found


def test_auto_leaves_a_reserve_free() -> None:
    """It is the larger of 1 % and 500 MB, for cuBLAS workspaces, kernels that are loaded late, and rounding."""
    for gpu, shape in ((16 * 10**9, SHAPES["gpt2-xl"]), (150 * 10**9, SHAPES["gpt2-10b"])):
        machine = replace(read_machine("v100-32gb"), gpu_bytes=gpu, ram_bytes=10**12)
        plan = make_plan(load_config(["--model", "gpt2-10b", "--dtype", "fp16", "--engine", "tiered"]), shape, machine)
        assert plan.fits
        assert 0 < plan.sizes.gpu_fraction < 1 or gpu > 10**11
        held = {item.name: item.bytes for item in plan.items if item.tier == "gpu"}
        assert (held["CUDA context"], held["reserve"]) == (CUDA_CONTEXT, max(500 * 10**6, gpu // 100))


def test_an_unusable_gpu_is_refused_in_one_line_and_the_doctor_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # the cache of all tests has compiled kernels
    busy = "CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with TORCH_USE_CUDA_DSA"
    faked(monkeypatch, capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", MagicMock(side_effect=RuntimeError(busy)))
    assert main(["plan", "--model", "gpt2", "--output", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert "torch finds a GPU but cannot use it: CUDA error: all CUDA-capable devices are busy" in printed
    assert "CUDA_VISIBLE_DEVICES=" in printed
    assert len(printed.strip().splitlines()) == 1
    config = load_config(["--model", "gpt2", "--output", str(tmp_path / "run")])
    checks = doctor.examine(config)
    assert [(check.name, check.state) for check in checks if check.state == "failure"] == [("GPU", "failure")]


@pytest.mark.parametrize(
    "error", [AttributeError("no attribute 'sqrt_rn'"), OSError("invalid ELF header"), RuntimeError("no C compiler")]
)
def test_without_a_usable_triton_plan_and_doctor_work(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # the cache of all tests has compiled kernels
    faked(monkeypatch, capability=(9, 0), without_triton=error)
    assert main(["plan", "--model", "gpt2", "--output", str(tmp_path / "run")]) == 0
    assert f"this GPU cannot store optimizer state: {type(error).__name__}: {error}" in capsys.readouterr().out
    assert main(["doctor", "--output", str(tmp_path / "run")]) == 0
    assert f"it cannot store optimizer state: {type(error).__name__}: {error}" in capsys.readouterr().out


def test_variables_of_libraries_are_set_before_their_start_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_WAIT_POLICY")

    def prepared(**environment: str) -> list[str | None]:
        monkeypatch.setattr(process_setup, "end_without_launcher", lambda say: None)
        kept = {key: value for key, value in os.environ.items() if key not in names}
        monkeypatch.setattr(os, "environ", kept | environment)
        process_setup.prepare_process(load_config(["--nvme", "."]))
        return [os.environ.get(name) for name in names]

    # Both names are set: torch 2.9 and later read the first, and warn if they must read the second.
    grows = "expandable_segments:True"
    assert prepared() == [grows, grows, "32", "passive"]
    own = "max_split_size_mb:128"
    assert prepared(PYTORCH_ALLOC_CONF=own, OMP_WAIT_POLICY="active") == [own, None, "32", "active"]
    assert prepared(PYTORCH_CUDA_ALLOC_CONF=own, CUDA_DEVICE_MAX_CONNECTIONS="1") == [None, own, "1", "passive"]


@pytest.mark.parametrize("words", [["train.deterministic=true"], []])
def test_a_gpu_repeats_its_bits_with_train_deterministic(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS is configured before CUDA starts, and torch before anything is built."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(train.checks, "refuse_other_programs", lambda _: None)  # it would ask the GPU for its name
    monkeypatch.setattr(train, "plan_run", MagicMock(side_effect=LookupError("at the plan")))
    before, config = torch.get_num_threads(), load_config(words)
    torch.use_deterministic_algorithms(False)
    try:
        prepare_process(config)
        with pytest.raises(LookupError, match="at the plan"):
            train.train_run(config)
        # An error, since with a warning torch leaves fused attention's backward as it is.
        assert torch.get_deterministic_debug_mode() == (2 if words else 0)
        assert torch.utils.deterministic.fill_uninitialized_memory != bool(words)  # type: ignore[attr-defined]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if words else None)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.set_num_threads(before)


def test_a_driver_that_torch_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, cuda in ((None, None), ("AMD's (/dev/kfd)", None), ("WSL2's (/dev/dxg)", "13.0")):
        faked(monkeypatch, cuda=cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(doctor, "_driver", lambda found=driver: found)
        check = doctor._torch()
        assert (check.state, bool(check.fix)) == (("failure", True) if driver else ("ok", False))
        assert (driver or "") in check.found


def test_the_forecast_of_fp16() -> None:
    """It is that of bf16 if only that was timed. A CPU without 16-bit units computes in fp32 and rounds."""
    config, told = load_config(["--model", "gpt2", "--dtype", "fp16"]), "matrix products in fp16 were not timed on "

    def forward(gpu: str | None, **speeds: float) -> tuple[float | None, str]:
        rates = {dtype: Rate(speed, "measured", "here") for dtype, speed in speeds.items()}
        here = replace(card((8, 0)), gpu=gpu)
        plan = make_plan(config, SHAPES["gpt2"], replace(here, rates=replace(here.rates, matmul=rates)))
        bounds = (one for one in plan.forecast.bounds if (one.phase, one.kind) == ("forward", "compute"))
        return next(bounds).seconds, "".join(note for note in plan.notes if told in note)

    assert forward("X", bf16=2e14, fp16=1e14, fp32=1e13) == forward("X", fp16=1e14) != (None, "")
    as_bf16 = f"{told}X and are assumed to be as fast as bf16: run `offload-train bench`"
    assert forward("X", bf16=2e14, fp32=1e13) == (forward("X", fp16=2e14)[0], as_bf16)
    assert forward("X", fp32=1e13) == (None, f"{told}X and no time can be forecast: run `offload-train bench`")
    assert forward(None, fp32=1e13)[0]


# -- NUMA: the CPUs of each node, and the nodes of each rank -----------------------------------------------------------


def test_nodes_have_the_cpus_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7"), ("node2", ""), ("node10", "9")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 8, 9})
    assert numa_nodes(tmp_path) == [{1, 2, 8}, {5}, {9}]
    assert numa_nodes(tmp_path / "none") == []


def test_ranks_stay_on_the_nodes_of_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(*nodes: set[int], ranks: int) -> list[frozenset[int]]:
        found: list[frozenset[int]] = []
        monkeypatch.setattr(process_setup, "numa_nodes", lambda: [frozenset(node) for node in nodes])
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(cpus))
        for rank in range(ranks):
            process_setup._stay_near(rank, ranks=ranks)
        return found

    two, four = [set(range(8)), set(range(8, 16))], [{0}, {1}, {2}, {3}]
    assert bound(*two, ranks=4) == [two[0], two[0], two[1], two[1]]
    assert bound(*two, ranks=3)[1] == two[0] | two[1]
    assert bound(*four, ranks=2) == [{0, 1}, {2, 3}]
    assert {*bound(*four, ranks=8)} == {*map(frozenset, four)}  # more ranks than CPUs
    assert bound(*two, ranks=1) == bound({0, 1, 2, 3}, ranks=2) == []
