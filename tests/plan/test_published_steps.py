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
    norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    block: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
    block |= {f"self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
    block |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    block |= {"mlp.down_proj.weight": (hidden, inner), **norms}
    weights = [Weight("model.embed_tokens.weight", (vocabulary, hidden), unit="model.embed_tokens", products=0.0)]
    for unit in (f"model.layers.{layer}" for layer in range(layers)):
        weights += [
            Weight(f"{unit}.{name}", size, unit=unit, block=True, products=float(len(size) > 1))
            for name, size in block.items()
        ]
    weights += [Weight("model.norm.weight", (hidden,), unit="model.norm", products=0.0)]
    weights += [Weight("lm_head.weight", (vocabulary, hidden), unit="lm_head")]
    return ModelShape(
        weights=tuple(weights),
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        context=131072,
        attention=(2 * hidden,) * layers,
        heads=32,
        key_heads=8,
    )


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
    forward (two norms, rotations, the gated activation, two sums), 262 kB in the backward, and 10 bytes a logit. In
    transformers' own layers each operation reads and writes memory, about three times as many bytes. Attention, which
    skips padding in the benchmark, is counted over whole rows at the rate of products.
    """
    products, inputs_and_outputs = machine.rates.matmul["bf16"].value, 81_920
    bytes_of = {"forward": 188e3 / inputs_and_outputs, "backward": 262e3 / inputs_and_outputs}
    layers = {}
    for phase, each in bytes_of.items():
        values = {"attention": products, "values": MEMORY / each, "loss": MEMORY / 10}
        layers |= {layer_key("bf16", part, phase): Rate(rate, "assumed", "") for part, rate in values.items()}
    return replace(machine, rates=replace(machine.rates, layers=layers))


def with_waits(plan: Plan, machine: MachineProfile) -> float:
    """Return the seconds of a step with DeepSpeed 0.16.7, which the benchmark used.

    Until 0.19.5 (deepspeedai/DeepSpeed#8207) the thread of the backward waited for each bucket's gradients to leave in
    fp32, behind their 16-bit copies out and in on the same stream.
    """
    out, into = machine.rates.from_device, machine.rates.to_device
    assert out
    assert into
    moved = [one for one in plan.traffic if one.phase == "backward"]
    written, read = sum(one.written for one in moved), sum(one.read for one in moved) - 2 * SHAPE.parameters
    assert (written, read) == (6 * SHAPE.parameters, 2 * SHAPE.parameters)
    computing = [
        bound.seconds for bound in plan.forecast.bounds if (bound.phase, bound.kind) == ("backward", "compute")
    ]
    phases = [*computing, plan.forecast.seconds["forward"], plan.forecast.seconds["update"]]
    return sum(phases) + written / out.value + read / into.value


@pytest.mark.parametrize(("rows", "of_published"), [(8, 0.79), (16, 0.93), (32, 1.04)])
def test_a_published_step_of_stock_deepspeed(rows: int, of_published: float) -> None:
    """The plan, for the kernels and the DeepSpeed that the benchmark used, is within 4 % of each step.

    As users get it, with transformers' layers and without the waits, two differences cancel with 16 and 32 rows, and
    not with 8.
    """
    machine = with_fused_layers(one_4090())
    plan = plan_of(*STOCK, rows=rows, machine=machine)
    assert with_waits(plan, machine) == pytest.approx(PUBLISHED[rows], rel=0.04)
    step = plan_of(*STOCK, rows=rows, machine=one_4090()).forecast.step
    assert step
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
        count = SHAPE.parameters
        found = dict.fromkeys(("backward", "update"), (0.0, 0.0))
        for one in plan.traffic:
            if one.phase in found:
                read, written = found[one.phase]
                found[one.phase] = (read + one.read / count, written + one.written / count)
        return found

    assert moved("--params", "cpu") == {"backward": (4 + 2 * 4, 2 * 4 + 4), "update": (0, 0)}
    assert moved("--params", "gpu", "deepspeed.zero_stage=3") == {"backward": (2 * 4, 2 * 4 + 4), "update": (2, 0)}
    assert moved("--params", "gpu", "deepspeed.zero_stage=2") == {"backward": (0, 4), "update": (2, 0)}
    fp32 = ("--params", "gpu", "deepspeed.zero_stage=2", "--dtype", "fp32")  # sums have the weights' dtype
    assert moved(*fp32) == {"backward": (4, 2 * 4 + 4), "update": (4, 0)}
