"""Sample machines, configurations and model shapes for tests of the planner."""

from dataclasses import replace

from counted_once import cached_counts

from offload_trainer.config import ModelSection, TrainConfig
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.machine import DriveFacts, DriveRates, Links, MachineProfile, Rate, Rates
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.settings import load_config

GB = 10**9


def machine(*, gpu: int = 0, ram: int = 64 * GB, drive: int = 500 * GB) -> MachineProfile:
    return MachineProfile(
        gpu="V100" if gpu else None,
        gpu_bytes=gpu,
        ram_bytes=ram,
        cores=8,
        drives=(DriveFacts("/ssd", drive, "ext4"),),
        output=DriveFacts("/out", 1000 * GB, "ext4"),
    )


def rate(value: float) -> Rate:
    return Rate(value, "measured", "for a test")


def timed(*, drive: float = 1e9, mixed: float = 0.5e9, matmul: float = 1e12, update: float = 1e9) -> MachineProfile:
    """Return a machine without a GPU whose every rate is known."""
    here = machine()
    rates = DriveRates(read=rate(drive), write=rate(drive), mixed_read=rate(mixed), mixed_write=rate(mixed))
    return replace(
        here,
        drives=(replace(here.drives[0], rates=rates),),
        rates=Rates(matmul={"bf16": rate(matmul)}, memory=rate(50e9), update={"native": rate(update)}),
    )


def cluster(
    *,
    gpu: int = 80 * GB,
    copies: tuple[float, float, float] = (1e18, 1e18, 1e18),  # rates to the device, from it, and both ways
    matmul: float = 1e24,
    memory: float = 1e18,
    update: float = 1e18,
    **links: Rate,
) -> MachineProfile:
    """Return a machine with linked GPUs; by default nothing takes time except what the ranks exchange."""
    ways = dict(zip(("to_device", "from_device", "both_ways"), map(rate, copies), strict=True))
    rates = Rates(matmul={"bf16": rate(matmul)}, memory=rate(memory), update={"native": rate(update)}, **ways)
    return replace(machine(gpu=gpu, ram=500 * GB), rates=rates, links=Links(**links))


def with_products(here: MachineProfile, speed: float) -> MachineProfile:
    """Return the machine with `speed` FLOP/s in matrix products of each dtype."""
    return replace(here, rates=replace(here.rates, matmul={dtype: rate(speed) for dtype in here.rates.matmul}))


def wish(*words: str) -> TrainConfig:
    return load_config(["--nvme", "/ssd", "--save-every", "0", *words])


def shape_of(name: str, **changes: int) -> ModelShape:
    """Return the shape of a preset in bf16, with these keys of its configuration changed."""
    with cached_counts():
        return resolve_model(ModelSection(name=name, overrides=changes), seed=0).shape


class _Shapes(dict[str, ModelShape]):
    def __missing__(self, name: str) -> ModelShape:
        self[name] = shape_of(name)
        return self[name]


SHAPES = _Shapes()  # shapes of the presets, computed at first use


def least_ram(plan: Plan) -> int:
    """Return the RAM that a plan needs where there is no room to keep freed memory for reuse."""
    return plan.tiers["ram"]["need"] - sum(item.bytes for item in plan.items if item.name == "heap")
