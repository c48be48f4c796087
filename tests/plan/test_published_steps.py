"""Tests of a plan's seconds against steps of stock DeepSpeed that others measured and published.

Llama-3.1-8B with rows of 1,024 tokens on one RTX 4090: RegiaYoung/SlideFormer at a0ddba65,
bench/DeepSpeed/ds_bench_1024_bf16_on_20260224_211132.csv, by ds_bench.py and ds_bench.sh beside it. The processor and
memory of the host are not published; the process was bound to one NUMA node.
"""

from dataclasses import replace

import pytest
from sample_plans import with_products

from offload_trainer.plan.machine import MachineProfile, Rate, layer_key, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.settings import load_config

PUBLISHED = {8: 8.9672, 16: 11.9340, 32: 18.2987}  # rows -> seconds a step
# Checkpointing as in ds_bench.py, sizes as in it at eeab7d0f: a0ddba65 has 1e8 live and 5e8 prefetched elements, with
# the same planned seconds, but 32 rows do not fit then. Every matrix is above its persistence threshold and above ours.
STOCK = ["--engine", "deepspeed", "--params", "cpu", "--optimizer", "cpu", "model.activation_checkpointing=on"]
STOCK += ["deepspeed.reduce_bucket_size=500000000", "deepspeed.prefetch_bucket_size=50000000"]
STOCK += ["deepspeed.max_live_parameters=50000000"]
MEMORY = 921e9  # bytes/s of a 4090's memory, as in plan/machines.json


def llama() -> ModelShape:
    """Return Llama-3.1-8B's counts, from the sizes in its published config.json."""
    hidden, inner, keys, vocabulary, layers = 4096, 14336, 1024, 128256, 32
    matrices = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    block: list[tuple[int, ...]] = [*matrices, (hidden,), (hidden,)]  # two norms
    weights = [Weight("embedding", (vocabulary, hidden), unit="embedding", products=0.0)]
    for unit in map(str, range(layers)):
        weights += [
            Weight(f"{unit}.{number}", size, unit=unit, block=True, products=float(len(size) > 1))
            for number, size in enumerate(block)
        ]
    weights += [Weight("norm", (hidden,), unit="norm", products=0.0), Weight("head", (vocabulary, hidden), unit="head")]
    sizes = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary, "heads": 32, "key_heads": 8}
    return ModelShape(weights=tuple(weights), context=131072, attention=(2 * hidden,) * layers, **sizes)


SHAPE = llama()


def one_4090() -> MachineProfile:
    return replace(read_machine("4xrtx4090-10gbe"), gpus=1)


def plan_of(*words: str, rows: int, machine: MachineProfile) -> Plan:
    step = ["--dtype", "bf16", "--seq-len", "1024", "--micro-batch", str(rows), "--save-every", "0"]
    plan = make_plan(load_config([*step, *words]), SHAPE, machine)
    assert plan.fits
    return plan


def with_fused_layers(machine: MachineProfile) -> MachineProfile:
    """Return the machine with the speed of Liger's kernels, which the benchmark used and our engine does not.

    What is not a product takes the bytes that fused kernels move, counted for Llama: 188 kB a token and block in the
    forward (two norms, rotations, the gated activation, two sums), 262 kB in the backward, and 10 bytes a logit.
    Transformers' layers move about three times as many. Attention, which skips padding in the benchmark, is counted
    over whole rows at the rate of products.
    """
    products, layers = machine.rates.matmul["bf16"].value, dict[str, Rate]()
    for phase, moved in (("forward", 188e3), ("backward", 262e3)):
        values = {"attention": products, "values": MEMORY * 81_920 / moved, "loss": MEMORY / 10}
        layers |= {layer_key("bf16", part, phase): Rate(rate, "assumed", "") for part, rate in values.items()}
    return replace(machine, rates=replace(machine.rates, layers=layers))


def with_waits(plan: Plan, machine: MachineProfile) -> float:
    """Return the seconds of a step with DeepSpeed 0.16.7, which the benchmark used.

    Until 0.19.5 (deepspeedai/DeepSpeed#8207) the thread of the backward waited for each bucket's gradients to leave in
    fp32, behind their 16-bit copies out and in on the same stream.
    """
    moved, rates, seconds = (
        [one for one in plan.traffic if one.phase == "backward"],
        machine.rates,
        plan.forecast.seconds,
    )
    written, read = sum(one.written for one in moved), sum(one.read for one in moved) - 2 * SHAPE.parameters
    assert (written, read) == (6 * SHAPE.parameters, 2 * SHAPE.parameters)
    (computing,) = [one.seconds for one in plan.forecast.bounds if (one.phase, one.kind) == ("backward", "compute")]
    copying = written / rates.from_device.value + read / rates.to_device.value
    return computing + seconds["forward"] + seconds["update"] + copying


@pytest.mark.parametrize(("rows", "of_published"), [(8, 0.79), (16, 0.93), (32, 1.04)])
def test_a_published_step_of_stock_deepspeed(rows: int, of_published: float) -> None:
    """The plan, for the kernels and the DeepSpeed that the benchmark used, is within 4 % of each step.

    As users get it, with transformers' layers and without the waits, the differences cancel with 16 and 32 rows.
    """
    machine = with_fused_layers(one_4090())
    plan = plan_of(*STOCK, rows=rows, machine=machine)
    assert with_waits(plan, machine) == pytest.approx(PUBLISHED[rows], rel=0.04)
    step = plan_of(*STOCK, rows=rows, machine=one_4090()).forecast.step
    assert step / PUBLISHED[rows] == pytest.approx(of_published, abs=0.01)


def test_copies_of_gradients_take_turns() -> None:
    """Each gradient leaves in 16 bits, comes back and leaves in fp32 on one stream; weights come in on another.

    The step waits for the last gradient's copies, those of the embeddings.
    """
    fast = with_products(one_4090(), 1e20)
    plan = plan_of(*STOCK, rows=8, machine=fast)
    count, into, out, in_beside, out_beside = SHAPE.parameters, 25.6e9, 26.8e9, 12.5e9, 24e9
    together = 2 * count / in_beside  # seconds in which weights come in
    seconds = together + (6 * count - out_beside * together) / out + 2 * count / into
    last = SHAPE.weights[0].numel * (6 / out + 2 / into)
    assert plan.forecast.slowest("backward").kind == "device"
    assert plan.forecast.seconds["backward"] == pytest.approx(seconds + last)
    roomy, words = replace(fast, gpu_bytes=10**12), ("--engine", "deepspeed", "--params", "gpu", "--optimizer", "cpu")
    zero_2 = plan_of(*words, "deepspeed.zero_stage=2", rows=1, machine=roomy).forecast
    assert zero_2.seconds["backward"] == pytest.approx(4 * count / out)  # its copies leave only


def test_new_weights_in_ram_are_not_copied_to_the_gpu_by_the_update() -> None:
    """Weights that each pass fetches are not copied after the update; gradients of each micro-batch come back."""
    words = ("--engine", "deepspeed", "--optimizer", "cpu", "model.activation_checkpointing=on", "--accumulate", "2")
    roomy = replace(one_4090(), gpu_bytes=10**12, ram_bytes=10**12)

    def moved(*more: str) -> dict[str, tuple[float, float]]:
        plan = plan_of(*words, *more, rows=1, machine=roomy)
        found = {}
        for phase in ("backward", "update"):
            of_phase = [one for one in plan.traffic if one.phase == phase]
            ways = sum(one.read for one in of_phase), sum(one.written for one in of_phase)
            found[phase] = ways[0] / SHAPE.parameters, ways[1] / SHAPE.parameters
        return found

    assert moved("--params", "cpu") == {"backward": (4 + 2 * 4, 2 * 4 + 4), "update": (0, 0)}
    assert moved("--params", "gpu", "deepspeed.zero_stage=3") == {"backward": (2 * 4, 2 * 4 + 4), "update": (2, 0)}
    assert moved("--params", "gpu", "deepspeed.zero_stage=2") == {"backward": (0, 4), "update": (2, 0)}
    fp32 = ("--params", "gpu", "deepspeed.zero_stage=2", "--dtype", "fp32")  # sums have the weights' dtype
    assert moved(*fp32) == {"backward": (4, 2 * 4 + 4), "update": (4, 0)}
