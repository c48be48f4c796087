"""Tests of Muon: the bits of torch.optim.Muon and AdamW for every placement, after resumes and in sessions."""

import copy
import json
import math
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from dead_run_files import stored_masters
from engine_bench import Step, assert_same, batches, engine, masters, model_directory, saved, skip_last_block, train
from plain_engine import MuonWithAdamW
from safetensors.torch import load_file
from sample_plans import rate, timed, wish, with_products

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.model.loader import resolve_model
from offload_trainer.optim.muon import MatrixKernel, Products, TorchMuon, has_torchs_muon, orthogonalised
from offload_trainer.optim.native_kernel import NativeKernel
from offload_trainer.optim.rules import Muon
from offload_trainer.optim.state_files import read_engine_state
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.step_time import RATE as RATE_OF_PRODUCTS
from offload_trainer.plan.step_time import products_of
from offload_trainer.plan.tiered.layout import ALIGN, pages_of, range_of_rank, rank_of, units_of
from offload_trainer.plan.tiered.state_formats import RULES, state_format
from offload_trainer.plan.tiers import DEVICE, RAM
from offload_trainer.settings import load_config

pytestmark = [
    pytest.mark.usefixtures("nothing_is_small"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference has the CPU's products"),
]

RATE = 3e-3
MUON = ["optim.name=muon", "--lr", str(RATE)]
CLIPPED = ["--dtype", "fp32", "--accumulate", "2", "optim.max_grad_norm=0.3", "--lr", str(RATE)]
HOMES = {
    "in RAM": ["optim.kernel=native"],
    "by torch's kernel": ["optim.kernel=torch"],
    "on the device": ["--optimizer", "gpu"],
    "on two drives and in RAM": ["--optimizer", "nvme", "--ram-fraction", "0.3"],
    "all on the drives": ["--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme"],
    "behind the forward": ["--optimizer", "nvme", "--ram-fraction", "0.5", "tiered.overlap=forward"],
    "behind the backward": ["--optimizer", "nvme", "--ram-fraction", "0.5", "tiered.overlap=backward"],
    "small pages": ["--optimizer", "nvme", "tiered.page_size=4096"],
}


@pytest.fixture(autouse=True)
def same_products() -> None:
    """torch.optim.Muon multiplies bf16 matrices, which torch rounds otherwise on a CPU without units for them."""
    use_fp32_products(torch.bfloat16)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return {name: model_directory(folder / name, name, tied=name == "gpt2") for name in ("gpt2", "qwen3", "mixtral")}


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / "one", tmp_path / "two"]


@cache
def by_torch(
    model: Path, steps: int, *words: str, accumulate: int = 1, skipped: frozenset[int] = frozenset()
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Return steps and masters of torch.optim.Muon and AdamW; in the `skipped` steps the last block is not used."""
    with engine(model, "--engine", "plain", *words) as reference:
        shape = resolve_model(load_config(["--model", str(model), "--scratch"]).model, seed=0).shape
        matrices = [reference._masters[weight.name] for weight in shape.weights if weight.matrix]
        groups = reference._adam.param_groups
        reference._adam = MuonWithAdamW(groups, matrices, lr=RATE, adjust_lr_fn="match_rms_adamw")
        before = skip_last_block(reference, set(skipped)) if skipped else lambda step: None
        found = train(reference, batches(steps * accumulate), accumulate=accumulate, lr=RATE, before=before)
        return found, masters(reference)


@pytest.mark.parametrize(
    ("architecture", "home"),
    [*(("gpt2", home) for home in HOMES), ("qwen3", "small pages"), ("mixtral", "small pages")],
)
def test_placements_have_torchs_bits(architecture: str, home: str, models: dict[str, Path], drives: list[Path]) -> None:
    """Every step is clipped and has two micro-batches. Each expert is a matrix."""
    with engine(models[architecture], *MUON, *CLIPPED, *HOMES[home], drives=drives) as ours:
        steps = train(ours, batches(8), accumulate=2, lr=RATE)
        expected, right = by_torch(models[architecture], 4, *CLIPPED, accumulate=2)
        assert steps == expected
        assert_same(masters(ours), right)
    assert all(norm > 0.3 for _, norm in steps)
    assert steps[-1][0] < steps[0][0]


def test_matrices_without_a_gradient_are_unchanged(models: dict[str, Path], drives: list[Path]) -> None:
    """Their momentum stays as well, and no weight decay is applied, as in torch."""
    words = ["--dtype", "fp32", "--lr", str(RATE)]
    expected, right = by_torch(models["gpt2"], 3, *words, skipped=frozenset([2]))
    with engine(models["gpt2"], *MUON, *words, *HOMES["all on the drives"], drives=drives) as ours:
        assert train(ours, batches(3), lr=RATE, before=skip_last_block(ours, {2})) == expected
        assert_same(masters(ours), right)


@pytest.mark.slow
def test_a_checkpoint_without_second_moments(models: dict[str, Path], drives: list[Path], tmp_path: Path) -> None:
    model = models["qwen3"]
    with engine(model, *MUON, *HOMES["on two drives and in RAM"], drives=drives) as ours:
        steps = train(ours, batches(8)[:4], lr=RATE)
        saved(ours, tmp_path / "half")
        steps += train(ours, batches(8)[4:], lr=RATE)
        weights, shape = masters(ours), {place.weight for unit in ours.offloaded.units for place in unit.places}
    assert steps == by_torch(model, 8, "--lr", str(RATE))[0]
    held = {kind: load_file(tmp_path / "half" / f"{kind}.safetensors") for kind in ("exp_avg", "exp_avg_sq")}
    assert held["exp_avg"].keys() == weights.keys()
    assert held["exp_avg_sq"].keys() == {weight.name for weight in shape if weight.matrix is None}
    assert 0 < len(held["exp_avg_sq"]) < len(weights)
    with engine(model, *MUON, *HOMES["small pages"], drives=drives, load_weights=False) as other:
        other.load(tmp_path / "half")
        assert train(other, batches(8)[4:], lr=RATE) == steps[4:]
        assert_same(masters(other), weights)
    told = r"holds the state of Muon, and this run updates by AdamW, .*optim\.name=muon"
    with engine(model) as adamw, pytest.raises(UserError, match=told):
        adamw.load(tmp_path / "half")


def test_a_state_of_adamw_or_of_moments_that_the_rule_lacks_is_refused(tmp_path: Path) -> None:
    """A state that names no rule is AdamW's."""
    (tmp_path / "engine.json").write_text('{"optimizer_steps": 3, "states": "8bit"}')
    assert read_engine_state(tmp_path, rule=RULES["adamw"]).format == state_format("adamw", "8bit")
    with pytest.raises(UserError, match=r"of AdamW.* optim\.name=adamw"):
        read_engine_state(tmp_path, rule=RULES["muon"])
    (tmp_path / "engine.json").write_text('{"optimizer_steps": 3, "rule": "muon", "states": "8bit"}')
    with pytest.raises(UserError, match="Muon has no moments in 8bit"):
        read_engine_state(tmp_path, rule=RULES["muon"])


def test_masters_of_a_dead_run_are_read_by_its_manifest(models: dict[str, Path], tmp_path: Path) -> None:
    words = [*MUON, *HOMES["all on the drives"], "tiered.state_copies=2"]
    with engine(models["qwen3"], *words, drives=[tmp_path / "drive"]) as ours:
        ours.offloaded.enable_manifest(model=tmp_path)
        train(ours, batches(2), lr=RATE)
        ours.commit({})
        ours.synchronize()
        (index,) = tmp_path.glob("drive/offload-trainer/run-*/store.json")
        assert_same(stored_masters(index.parent)[1], masters(ours))
        told = json.loads(index.read_text())
        assert told["rule"] == "muon"
        for wrong in ({"rule": "sgd"}, {"states": "8bit"}):
            index.write_text(json.dumps(told | wrong))
            with pytest.raises(UserError):
                stored_masters(index.parent)


@pytest.mark.parametrize(("ranks", "largest"), [(1, 20_000), (2, ALIGN), (3, 1 << 20), (7, 20_000)])
def test_no_page_and_no_range_of_a_rank_cuts_a_matrix(ranks: int, largest: int) -> None:
    weights: list[Weight] = [Weight("wte", (500, 60), unit="wte")]
    sizes: list[tuple[int, ...]] = [(60, 180), (180,), (61, 59), (7, 64, 96), (300, 60), (60,)]
    for block, (number, size) in product(range(3), enumerate(sizes)):
        name = f"h.{block}.experts.{number}" if len(size) == 3 else f"h.{block}.{number}"
        weights.append(Weight(name, size, unit=f"h.{block}", block=True))
    shape = ModelShape(tuple(weights), 3, 60, 500, 64)
    for shares in ([(DEVICE, 0.0), (RAM, 1.0)], [(DEVICE, 0.2), (RAM, 0.3)], [(DEVICE, 0.0), (RAM, 0.0)]):
        units = units_of(shape, matrices=True)
        pages = pages_of(units, page=largest, shares=shares, speeds=[1.0, 3.0], ranks=ranks).pages
        for unit in units:
            its = [page for page in pages if page.unit == unit.index]
            starts = [page.start for page in its]
            assert [*starts, unit.trained] == [0, *accumulate(page.elements for page in its)]
            ends = {end for rank in range(ranks) for end in range_of_rank(unit, rank, ranks=ranks)}
            assert ends <= {*starts, unit.trained}
            for page in its:
                last = page.start + page.elements - 1
                assert rank_of(unit, page.start, ranks=ranks) == rank_of(unit, last, ranks=ranks)
            for place in (place for place in unit.places if place.weight.matrix):
                size = math.prod(place.weight.matrix)
                for first in range(place.start, place.start + place.weight.numel, size):
                    assert not any(first < start < first + size for start in starts)
            assert sum(page.elements for page in its if not page.matrices) == unit.trained - unit.matrices


def test_only_matrices_of_blocks_are_updated_as_such() -> None:
    given: list[tuple[dict[str, Any], tuple[int, int] | None]] = [
        ({"shape": (4, 6)}, (4, 6)),
        ({"shape": (4,)}, None),
        ({"shape": (4, 6), "block": False}, None),
        ({"shape": (4, 6), "trainable": False}, None),
        ({"shape": (4, 6), "spared": True}, None),
        ({"shape": (4, 6), "products": 0.0}, None),
        ({"shape": (8, 1, 4)}, None),
        ({"shape": (8, 6, 4), "name": "h.0.experts.up"}, (6, 4)),
    ]
    for keys, expected in given:
        assert Weight(**{"name": "h.0.w", "unit": "h.0", "block": True, **keys}).matrix == expected


def test_the_native_arithmetic_is_compared_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = NativeKernel()
    assert MatrixKernel(kernel, gpu=None)._arithmetic is kernel
    direction = NativeKernel.muon_direction

    def wrong(self: NativeKernel, hyper: Muon, *tensors: torch.Tensor, scale: float) -> torch.Tensor:
        return direction(self, replace(hyper, momentum=0.94), *tensors, scale=scale)

    monkeypatch.setattr(NativeKernel, "muon_direction", wrong)
    assert not has_torchs_muon(kernel)
    assert isinstance(MatrixKernel(kernel, gpu=None)._arithmetic, TorchMuon)


@pytest.mark.parametrize("shape", [(700, 900), (5, 40), (1, 3)])
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    # A square random matrix has singular values as small as rounding errors. The last two checks need known ones.
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = ((left * torch.linspace(0.1, 1.0, min(shape))) @ right).bfloat16()
    torch.set_num_threads(3)  # the default of a new thread
    results = [orthogonalised(matrix.clone(), Products(threads)) for threads in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    singular = torch.linalg.svdvals(results[0].float())
    assert singular.min() > 0.3
    assert singular.max() < 1.4


@pytest.mark.parametrize(
    ("home", "settings"),
    [
        ({"params": "gpu"}, {"momentum": 0.3, "adjust_lr_fn": "match_rms_adamw"}),
        ({"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}, {}),
    ],
)
def test_a_session_supports_the_rule(home: dict[str, str], settings: dict[str, Any], tmp_path: Path) -> None:
    """Groups have rates of their own, and a scheduler changes them. Without `settings` the values are torch's."""

    def trained(network: torch.nn.Module, session: ot.Session | None = None) -> list[float]:
        matrices, vectors = ([p for p in network.parameters() if p.dim() == size] for size in (2, 1))
        rate = {"lr": 1e-3, "weight_decay": 0.0}
        if session:
            optimizers = [session.muon([{"params": matrices}, {"params": vectors, **rate}], lr=1e-2, **settings)]
        else:
            muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, **settings)
            optimizers = [muon, torch.optim.AdamW(vectors, **rate, fused=True)]
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in optimizers]
        losses = []
        for step in range(4):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            loss = (network(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(3)]
    network = torch.nn.Sequential(*blocks)
    expected = copy.deepcopy(network)
    losses = trained(expected)
    (tmp_path / "drive").mkdir()
    keys = {"nvme": [str(tmp_path / "drive")], "dtype": "fp32", "page_size": 4096, "say": lambda line: None, **home}
    with ot.offload(network, rule="muon", **keys) as session:
        with pytest.raises(UserError, match="the session stores Muon's state: call muon"):
            session.adamw()
        assert trained(session.model, session) == losses
        held = dict(session.named_masters())
    assert all(torch.equal(held[name], weight) for name, weight in expected.named_parameters())
    with pytest.raises(UserError, match="no repeated block of this model has a trainable matrix"):
        ot.offload(torch.nn.Linear(32, 32), rule="muon", **keys)


@pytest.mark.slow
def test_the_plan_counts_products_and_the_transfers_beside_them() -> None:
    """Embeddings come first and have no products, so their transfers take their own time."""
    shape = resolve_model(load_config(["--model", "gpt2"]).model, seed=0).shape
    products = sum(products_of(weight.matrix) for weight in shape.weights if weight.matrix)
    others = sum(weight.numel for weight in shape.weights if not weight.matrix)
    here = timed(drive=5e8, mixed=5e8, matmul=4e11)

    def update(share: str, *, products: float | None = None) -> float:
        config = wish("--model", "gpt2", "--optimizer", "nvme", "--ram-fraction", share, "optim.name=muon")
        layers = {} if products is None else {RATE_OF_PRODUCTS: rate(products)}
        machine = replace(here, rates=replace(here.rates, layers=layers))
        seconds = make_plan(config, shape, machine).forecast.seconds["update"]
        assert seconds is not None
        return seconds

    assert update("1") - update("1", products=1e15) == pytest.approx(products / 4e11, rel=0.01)
    assert update("1", products=1e11) - update("1", products=1e15) == pytest.approx(products / 1e11, rel=0.01)
    assert update("0", products=1e11) - update("1", products=1e11) == pytest.approx(others * 12 / 5e8, rel=0.01)
    assert update("0", products=1e15) == pytest.approx((12 * others + 8 * (shape.trainable - others)) / 5e8, rel=0.05)


@pytest.mark.slow
def test_on_a_cpu_the_update_uses_all_cores() -> None:
    """Behind the model it would have one core, and its products take longer than all else of a step."""
    words = ["--model", "gpt2-xl", "--nvme", "/ssd", "--optimizer", "nvme", "optim.name=muon"]
    machine, seconds = with_products(replace(read_machine("h200"), gpu=None), 1e12), list[float]()
    for overlap in ("auto", "forward"):
        config = load_config([*words, f"tiered.overlap={overlap}"])
        plan = make_plan(config, resolve_model(config.model, seed=0).shape, machine)
        assert plan.sizes.overlap == (overlap == "forward")
        seconds += [bound.seconds or 0 for bound in plan.forecast.bounds if bound.what.startswith("Muon on")]
    assert seconds[1] > 10 * seconds[0]
