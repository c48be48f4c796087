"""Tests of micro-batches that pass through a model block by block, of what cannot run so, and of offloaded inputs."""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import emulated_gpu, queued
from engine_bench import DROPOUT, batches, engine, model_directory, train
from placements import ON, moved_in_step
from sample_plans import GB, SHAPES, machine, shape_of, wish
from seen_calls import calls_of, run_before
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.model.breadth_first import why_no_chain
from offload_trainer.model.init_weights import meta_model
from offload_trainer.offloading.device import CpuDevice, CudaDevice
from offload_trainer.offloading.model import Activations
from offload_trainer.plan.memory import INPUTS_UNDER_WAY, BlockInputs
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.planning import model_of

pytestmark = pytest.mark.usefixtures("nothing_is_small")

MICRO = 4
INPUT = 8192  # bytes: 2 rows of 24 tokens, 72 wide, in bf16, rounded up to a multiple of 4096
BREADTH = ["tiered.micro_batch_order=breadth_first", ON, "--accumulate", str(MICRO)]


def test_inputs_come_back_in_the_reverse_order(qwen3: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would be copied only when it is needed."""

    def ask(kept: Activations, one: Any) -> tuple[int, bool]:
        number = getattr(one, "number", -1)  # -1: of a tensor that stays
        return number, number in kept._prefetched

    asked = calls_of(monkeypatch.setattr, Activations, "unpack", ask)
    words = [*BREADTH, "--params", "nvme", "model.offload_activations=true", "tiered.weight_buffers=2"]
    with engine(qwen3, *words, drives=[drive]) as ours:
        train(ours, batches(MICRO), accumulate=MICRO)
    assert [one for one in asked if one[0] >= 0] == [(number, True) for number in reversed(range(5 * MICRO))]


def test_an_error_ends_all_threads(qwen3: Path, drive: Path) -> None:
    with engine(qwen3, *BREADTH, "--params", "nvme", drives=[drive]) as ours:
        train(ours, batches(MICRO), accumulate=MICRO)
        block = ours._module.model.model.layers[2].mlp

        def fail(*_: Any) -> None:
            raise RuntimeError("no memory")

        hook = block.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            train(ours, batches(MICRO), accumulate=MICRO)
        assert not [thread for thread in threading.enumerate() if thread.name == "micro-batch"]
        hook.remove()


def test_a_probe_finds_chains_of_blocks(folder: Path) -> None:
    routers = "the loss of MixtralForCausalLM has a part of the routers of all blocks (output_router_logits)"
    cases: list[tuple[str, dict[str, Any], bool, str]] = [
        ("gpt2", {}, False, ""),
        ("llama", {}, True, ""),
        ("mixtral", {"output_router_logits": True}, False, ""),
        ("mixtral", {"output_router_logits": True}, True, routers),
        ("opt", {}, False, "OPTForCausalLM skips blocks at random (layerdrop)"),
        ("opt", {"layerdrop": 0.0}, False, ""),
    ]
    for name, changes, pipeline, reason in cases:
        config = AutoConfig.from_pretrained(model_directory(folder / f"{name}-{len(changes)}", name, **changes))
        assert why_no_chain(meta_model(config, trust_remote_code=False), pipeline=pipeline) == reason


def test_blocks_that_share_a_result_with_later_ones_are_no_chain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each block gets the embeddings too, so the embedding's gradient would come in parts."""
    config = AutoConfig.from_pretrained(model_directory(folder / "qwen3", "qwen3"))
    model = meta_model(config, trust_remote_code=False)
    assert why_no_chain(model) == ""
    forward, first = Qwen3RMSNorm.forward, list[torch.Tensor]()

    def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return forward(module, hidden + first[0] if hidden.shape == first[0].shape else hidden)

    def embed(module: Any, ids: torch.Tensor) -> torch.Tensor:
        first[:] = [torch.nn.functional.embedding(ids, module.weight)]
        return first[0]

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(torch.nn.Embedding, "forward", embed)
    assert why_no_chain(model) != ""


def test_auto_chooses_it_if_weights_are_read_for_each_micro_batch() -> None:
    def orders(*words: str, shape: ModelShape = SHAPES["gpt2-xl"]) -> tuple[bool, list[str]]:
        plan = make_plan(wish(*words), shape, machine(gpu=32 * GB))
        return plan.work.breadth_first, [note for note in plan.notes if "micro_batch_order" in note]

    assert orders("--params", "nvme", "--accumulate", "8")[0]
    assert orders("--params", "nvme") == (False, [])
    assert orders("--params", "gpu", "--accumulate", "8") == (False, [])
    assert orders("--params", "nvme", "--accumulate", "8", "tiered.micro_batch_order=depth_first") == (False, [])
    breadth, notes = orders("--params", "nvme", "--accumulate", "8", "model.activation_checkpointing=off")
    assert (breadth, len(notes)) == (False, 1)
    assert "not all blocks are checkpointed" in notes[0]
    with pytest.raises(UserError, match="breadth_first: not all blocks are checkpointed"):
        orders("--accumulate", "8", "model.activation_checkpointing=off", "tiered.micro_batch_order=breadth_first")


def test_memory_grows_by_inputs_of_all_micro_batches() -> None:
    """gpt2-xl with 8 x 1 x 1024 tokens has 48 inputs of 3.3 MB in each micro-batch; away, two stay on the GPU."""
    each, shape = 2 * 1024 * 1600, shape_of("gpt2-xl", vocab_size=4096)  # the peak is in a block
    for order, many in (("depth_first", 48 * each), ("breadth_first", 8 * 48 * each)):
        for away, others in (("false", {}), ("true", {"ram": many})):
            words = ["--params", "cpu", "--accumulate", "8", "--micro-batch", "1", f"tiered.micro_batch_order={order}"]
            plan = make_plan(wish(*words, f"model.offload_activations={away}"), shape, machine(gpu=32 * GB))
            found = {item.tier: item.bytes for item in plan.items if item.name == "block inputs"}
            assert found == {"gpu": 2 * each if others else many, **others}
            (out,) = (one.written for one in plan.traffic if (one.place, one.phase) == ("device", "forward"))
            assert out == (8 * 48 * each if others else 0)


def test_blocks_that_are_skipped_at_random_stop_the_run(folder: Path, drive: Path) -> None:
    """The trial refuses them; a model whose configuration does not tell is noticed when micro-batches differ."""
    model = model_directory(folder / "opt", "opt")
    other = pytest.raises(TrainerError, match="pass through different blocks")
    with engine(model, *BREADTH, "--params", "nvme", drives=[drive]) as ours, other:
        train(ours, batches(4 * MICRO), accumulate=MICRO)


def test_a_command_keeps_the_order_of_a_model_that_is_no_chain_and_names_it(folder: Path) -> None:
    words = ["--model", str(model_directory(folder / "opt", "opt")), "--params", "nvme", "--accumulate", "8"]
    config = wish("--scratch", *words, "model.activation_checkpointing=on")
    plan = make_plan(config, model_of(config).shape, machine(gpu=32 * GB))
    assert not plan.work.breadth_first
    assert any("since OPTForCausalLM skips blocks at random (layerdrop)" in note for note in plan.notes)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("order", ["depth_first", "breadth_first"])
def test_gradients_leave_once(order: str, home: str, qwen3: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the GPU in the planned bytes: as sums in fp32, each once, or in 16 bits for each micro-batch."""
    words = [*BREADTH, f"tiered.micro_batch_order={order}", f"placement.gradients={home}", "--params", "cpu"]
    words += ["--micro-batch", "2", "--seq-len", "24", "tiered.overlap=off"]
    with emulated_gpu(monkeypatch, haste=0.2) as gpu:
        size = lambda _, copies, **__: sum(values.nbytes for values, _ in copies)  # noqa: E731
        sizes = calls_of(monkeypatch.setattr, CudaDevice, "download", size)
        with engine(qwen3, *words, drives=[drive], device=gpu.device(staging_bytes=1 << 20, stagings=2)) as ours:
            train(ours, batches(MICRO), accumulate=MICRO)
            sizes.clear()
            moved_in_step(ours, batches(MICRO))
            (given,) = (one.written for one in ours.plan.traffic if (one.place, one.phase) == ("device", "backward"))
    trained = sum(weight.numel for weight in ours.plan.work.shape.weights)
    assert sum(sizes) == given == trained * (4 if order == "breadth_first" else 2 * MICRO)


@pytest.mark.slow
def test_weights_move_once_a_pass_as_planned(qwen3: Path, drive: Path) -> None:
    """The kernel's count of a step equals the plan, and blocks are read as often as for a single micro-batch."""
    read = {}
    for micro in (1, MICRO):
        words = ["--params", "nvme", "model.offload_activations=true", "--seq-len", "24", "--micro-batch", "2"]
        words += [*BREADTH, "--accumulate", str(micro), "tiered.overlap=off"]
        with engine(qwen3, *words, drives=[drive]) as ours:
            train(ours, batches(2 * micro), accumulate=micro)
            read[micro], _ = moved_in_step(ours, batches(micro))
        inputs = [item.bytes for item in ours.plan.items if item.name == "block inputs"]
        assert max(inputs) == micro * 5 * INPUT
    assert read[MICRO] == read[1]


@pytest.fixture
def nine_blocks(folder: Path) -> Path:
    return model_directory(folder / "gpt2", "gpt2", n_layer=9, **DROPOUT)


@pytest.mark.slow
@pytest.mark.parametrize("away", ["false", "true"])
def test_inputs_are_copied_and_the_plan_counts_the_copies(away: str, nine_blocks: Path) -> None:
    """On the CPU too, at most two of nine inputs stay in memory as they are."""
    words = (ON, f"model.offload_activations={away}", "--seq-len", "24", "--micro-batch", "2")
    inputs, held = list[weakref.ref[Any]](), list[int]()
    with engine(nine_blocks, *words) as ours:
        body = ours._module.model.transformer
        for block in body.h:
            block.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
        train(ours, batches(2))
        body.ln_f.register_forward_hook(lambda *_: held.append(sum(one() is not None for one in inputs[-9:])))
        train(ours, batches(1))
    if away == "false":
        assert held == [9]
        return
    assert held[0] <= INPUTS_UNDER_WAY
    assert sum(buffer.numel() for buffer in ours.offloaded.activations._buffers) == 9 * INPUT
    assert [item.bytes for item in ours.plan.items if item.name == "block inputs"] == [2 * INPUT, 9 * INPUT]


def test_an_input_is_prefetched_while_the_previous_is_used(nine_blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the forward starts the backward's first copy; each later copy starts one block ahead of its use."""
    events: list[str] = []
    run_before(monkeypatch.setattr, CpuDevice, "keep", lambda *_: events.append("out"))
    run_before(monkeypatch.setattr, CpuDevice, "copy_back", lambda *_, **__: events.append("back"))
    with engine(nine_blocks, ON, "model.offload_activations=true", device=CpuDevice()) as ours:
        for number, told in ((0, "first block"), (8, "last block")):
            block = ours._module.model.transformer.h[number].attn
            block.register_forward_pre_hook(lambda *_, told=told: events.append(told))
        train(ours, batches(1))
    forward = ["out", "first block", *["out"] * 8, "last block"]
    assert events == [*forward, "back", "back", "last block", *["back"] * 7, "first block"]


@pytest.mark.parametrize(
    ("planned", "sizes", "order"),
    [
        (11, [1000] * 11, range(11)),
        (11, [1000] * 11, range(10, -1, -1)),
        (11, [1000] * 11, (3, 9, 0, 1, 10, 2, 4, 8, 5, 7, 6)),
        (2, [900, 5000, 700, 1000], (3, 2, 1, 0)),  # more and larger ones than planned
        (2, [900, 5000, 700, 1000], (1, 0, 3, 2)),
    ],
)
def test_any_order_of_the_backward_is_correct(
    planned: int, sizes: Sequence[int], order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    with queued(monkeypatch, haste=0.05, seconds=0.001) as cuda:
        device = cuda.device()
        kept = Activations(BlockInputs(planned, 4096), device=device, references=None)  # type: ignore[arg-type]
        for given in (inputs, inputs, inputs[:2]):
            with kept.forward():
                handles = [kept.pack_input(one) for one in given]
            for number in (number for number in order if number < len(given)):
                assert torch.equal(kept.unpack(handles[number]), inputs[number])
        kept.close()
        device.close()


def test_a_plan_notes_that_host_memory_is_the_device() -> None:
    """Without a GPU, offload_activations only adds copies in transit, at most three, and the plan says so."""
    found = {}
    for away in ("false", "true"):
        plan = make_plan(wish("--micro-batch", "4", f"model.offload_activations={away}"), SHAPES["gpt2-xl"], machine())
        found[away] = sum(item.bytes for item in plan.items if item.name in ("block inputs", "activations"))
        assert any("offload_activations has no effect without a GPU" in note for note in plan.notes) == (away == "true")
    assert found["false"] < found["true"] <= found["false"] + 3 * 2 * 4 * 1024 * 1600
