"""Tests of compiled blocks: one compiled function for all blocks of a shape, in every placement with the same bits, and
refusals of what cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import Step, assert_same, batches, engine, masters, model_directory, train
from sample_plans import SHAPES, machine, wish
from torch._dynamo.utils import counters

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model import compiled_blocks
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan
from offload_trainer.settings import load_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_small")]

ON = "model.compile=on"
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"gpt2": ("gpt2", DROPOUT), "llama": ("llama", {})}
ALL = ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme", "tiered.weight_buffers=2"]
HOMES = {
    "resident": ["--params", "gpu"],
    "resident, updated during the forward": ["--params", "gpu", "tiered.overlap=forward"],
    "in RAM": ["--params", "cpu", "tiered.weight_buffers=1"],
    "all on the drive": ALL,
    "inputs too": [*ALL, "model.offload_activations=nvme"],
    "updated during the backward": [*ALL, "tiered.overlap=backward"],
}
CHECKPOINTED = {"inputs too": ("on",)}


@pytest.fixture(autouse=True, scope="module")
def cache_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a directory of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@cache
def plain(model: Path, *words: str) -> tuple[list[Step], dict[str, torch.Tensor]]:
    with engine(model, "--engine", "plain", *words) as reference:
        return train(reference, batches(4)), masters(reference)


@pytest.mark.parametrize("kind", MODELS)
def test_every_placement_has_the_bits_of_plain_compiled_torch(kind: str, folder: Path, drive: Path) -> None:
    """Each placement, with all, some and no blocks checkpointed, calls the functions that the first engine compiled."""
    model = model_directory(folder / kind, MODELS[kind][0], **MODELS[kind][1])
    losses, weights = plain(model, ON)
    for home, words in HOMES.items():
        for blocks in CHECKPOINTED.get(home, ("on", "2", "off")):
            counters.clear()
            with engine(model, *words, ON, f"model.activation_checkpointing={blocks}", drives=[drive]) as ours:
                assert train(ours, batches(4)) == losses, (home, blocks)
                assert_same(masters(ours), weights)


def test_micro_batches_pass_breadth_first_through_compiled_blocks(folder: Path, drive: Path) -> None:
    model = model_directory(folder / "gpt2", "gpt2", **DROPOUT)
    words = [ON, "--accumulate", "3"]
    with engine(model, "--engine", "plain", *words) as reference:
        losses, weights = train(reference, batches(9), accumulate=3), masters(reference)
    order = ["tiered.micro_batch_order=breadth_first", "model.activation_checkpointing=on"]
    with engine(model, *ALL, *words, *order, drives=[drive]) as ours:
        assert ours._breadth_first is not None
        assert train(ours, batches(9), accumulate=3) == losses
        assert_same(masters(ours), weights)


def test_losses_are_those_of_torch_without_compilation(folder: Path) -> None:
    """fp32 operations differ only in their last bits. The model has no dropout, which would draw other numbers."""
    model = model_directory(folder / "llama, without dropout", "llama")
    expected, _ = plain(model, "--dtype", "fp32")
    found, _ = plain(model, "--dtype", "fp32", ON)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert found != expected  # if nothing were compiled, every bit would be the same


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace blocks without compiling them, and count the graphs anew."""
    eager = compiled_blocks.compile_blocks
    monkeypatch.setattr(compiled_blocks, "compile_blocks", lambda model, **_: eager(model, backend="eager"))
    monkeypatch.setattr(compiled_blocks, "refuse_uncompiled", lambda model: None)
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("traced")
def test_one_function_is_compiled_for_all_blocks(folder: Path, drive: Path) -> None:
    """Five blocks, steps, checkpointed and not: one graph, without a graph break or another compilation."""
    model = model_directory(folder / "llama", "llama")
    with engine(model, *ALL, ON, "model.activation_checkpointing=2", drives=[drive]) as ours:
        train(ours, batches(3))
        ours.eval_loss(batches(1, length=12)[0])
        train(ours, batches(1))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompile_limit"]


@pytest.mark.usefixtures("traced")
def test_blocks_of_other_shapes_are_compiled_separately(folder: Path) -> None:
    kinds = ("full_attention", "sliding_attention") * 2
    changes = {"layer_types": kinds, "num_hidden_layers": len(kinds), "use_sliding_window": True, "sliding_window": 8}
    model = model_directory(folder / "qwen3", "qwen3", **changes, max_window_layers=0)
    with engine(model, "--engine", "plain", ON) as ours:
        train(ours, batches(2))
    assert counters["stats"]["unique_graphs"] == 2


def section(model: Path) -> ModelSection:
    return load_config(["--model", str(model), "--scratch", ON]).model


def test_without_a_compiler_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_directory(folder / "llama", "llama")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is no no-such-compiler: install g\+\+"):
        resolve_model(section(model), seed=0)


def test_blocks_that_cannot_be_traced_are_refused_before_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that branches on a value has a graph break."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    model = model_directory(folder / "llama", "llama")
    resolve_model(section(model), seed=0)

    def branches(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x if x.sum() > 0 else -x)

    monkeypatch.setattr(LlamaMLP, "forward", branches)
    with pytest.raises(UserError, match=r"torch cannot compile LlamaDecoderLayer as a whole: .*Use model\.compile=off"):
        resolve_model(section(model), seed=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "deepspeed"], r"model\.compile=on belongs to --engine tiered, not to deepspeed"),
        (["model.mlp_chunk=256"], r"model\.mlp_chunk=256 with model\.compile=on: a block is compiled as a whole"),
        (["tiered.fetch_granularity=module"], r"tiered\.fetch_granularity=module with model\.compile=on"),
        (["parallel.sequence=2", "--gpus", "2"], r"parallel\.sequence=2 with model\.compile=on"),
    ],
)
def test_settings_that_divide_a_block_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wish(ON, *words)


def test_a_plan_counts_the_compiler_and_the_gradients_of_a_block() -> None:
    here = machine()
    off, on = (make_plan(wish(word), SHAPES["gpt2"], here) for word in ("model.compile=off", ON))
    items = {(item.tier, item.name): item.bytes for item in off.items}
    more = {(i.tier, i.name): i.bytes for i in on.items if (i.tier, i.name) not in items}
    assert {name for _, name in more} == {"compiler", "gradients of a block"}
    assert more["gpu" if here.gpu else "ram", "gradients of a block"] == 2 * (12 * 768**2 + 13 * 768)
    assert any(note.startswith("model.compile=on: losses differ") for note in on.notes)
    assert not any("model.compile" in note for note in off.notes)
