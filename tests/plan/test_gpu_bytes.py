"""Tests of the planned bytes of a forward and a backward, against torch's MemTracker on the module that a run trains.

It runs on tensors without memory (FakeTensorMode). The planned figure leaves out what no tensor shows.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_plans import SHAPES, machine, wish
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from offload_trainer.config import ModelSection, TrainConfig
from offload_trainer.model import activations
from offload_trainer.model.init_weights import without_values
from offload_trainer.model.loader import ModelSource, resolve_model
from offload_trainer.model.presets import PRESETS
from offload_trainer.plan.memory import peak_of
from offload_trainer.plan.planner import checkpointed_blocks, make_plan, workload
from offload_trainer.plan.shape import Activations, Growth, Part
from offload_trainer.settings import load_config

_SMALL = {"vocab_size": 3000, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "intermediate_size": 160}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 3000, "n_positions": 512}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama, untied": {**_SMALL, "model_type": "llama", "tie_word_embeddings": False},
    "mistral, windows": {**_SMALL, "model_type": "mistral", "sliding_window": 32},
    "mixtral, experts": {**_SMALL, "model_type": "mixtral", "num_local_experts": 4},
    "deepseek, latent attention": {**_SMALL, "model_type": "deepseek_v3", "num_key_value_heads": 4}
    | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    | {"moe_intermediate_size": 48, "first_k_dense_replace": 1},
    "opt": {"model_type": "opt", "vocab_size": 3000, "hidden_size": 64, "ffn_dim": 256, "word_embed_proj_dim": 64}
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512, "dropout": 0.0},
    # Without checkpointing only. Gemma 2 keeps the attention matrices, and ProphetNet computes whole logits.
    "gemma2, eager attention": {**_SMALL, "model_type": "gemma2", "head_dim": 16},
    "prophetnet, whole logits": {"model_type": "prophetnet", "vocab_size": 3000, "hidden_size": 64, "dropout": 0.0}
    | {"num_encoder_layers": 1, "num_decoder_layers": 4, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 256}
    | {"num_encoder_attention_heads": 4, "encoder_ffn_dim": 256, "max_position_embeddings": 2048}
    | {"attention_dropout": 0.0, "activation_dropout": 0.0},
    "gpt2-xl": PRESETS["gpt2-xl"],
    "Llama-3-8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}


def config_of(shape: dict[str, Any], kept: str, *, folder: Path, rows: int, length: int, **model: Any) -> TrainConfig:
    """Return the configuration of a model with the config.json `shape`; `kept`: blocks checkpointed, " in RAM"."""
    (folder / "config.json").write_text(json.dumps(shape))
    checkpointed, _, offloaded = kept.partition(" in ")
    model |= {"activation_checkpointing": checkpointed, "offload_activations": "true" if offloaded else "false"}
    words = ["--engine", "tiered", "--params", "gpu", "--optimizer", "cpu", "--ram-fraction", "1", "--save-every", "0"]
    words += ["--seq-len", str(length), "--micro-batch", str(rows)]
    words += [f"model.{key}={value}" for key, value in model.items()]
    return load_config(["--model", str(folder), "--scratch", *words])


def planned(config: TrainConfig, source: ModelSource, *, session: bool = False) -> int:
    """Return the planned GPU bytes of a run or a session, without those that no tensor shows."""
    plan = make_plan(config, source.shape, machine(gpu=10**13, ram=10**13), saves=not session)
    unseen = ["CUDA context", "reserve", "allocator", "gradients in flight", "broadcasts"]
    unseen += ["block inputs"] * config.model.offload_activations  # inputs in transit
    return sum(item.bytes for item in plan.items if item.tier == "gpu" and item.name not in unseen)


def tracked(config: TrainConfig, source: ModelSource, *, session: bool = False) -> int:
    """Return the peak bytes of a micro-batch with the weights; `session`: uses of a tied weight share a parameter."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        # transformers would inspect values that do not exist; rows of consecutive positions are not packed.
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
        module = source.build(dtype=torch.bfloat16, checkpointed=checkpointed_blocks(source.section, source.shape))
        module.train()
        module.summed = partial(module.summed, gpu=True)
        tokens = torch.zeros(config.train.micro_batch_size, config.data.seq_len, dtype=torch.int64)
        parameters = without_values(module.model, dtype=torch.bfloat16, device=tokens.device, separate=not session)
        for uses in parameters.values():
            memory, waiting = torch.empty(uses[0].shape, dtype=torch.bfloat16), list[torch.Tensor]()
            for use in uses:
                use.data = memory
                use.register_post_accumulate_grad_hook(partial(_hand_over, waiting if len(uses) > 1 else None))
        if config.model.offload_activations:
            _keep_inputs_elsewhere(module)
        tracker = _Peak()
        tracker.track_external(module, tokens)
        with tracker:
            module(tokens, tokens, None, tokens.numel()).backward()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


class _Peak(MemTracker):
    """A MemTracker without per-module statistics, which take most of its time."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda *_: None


def _hand_over(waiting: list[torch.Tensor] | None, parameter: torch.nn.Parameter) -> None:
    """Drop a complete gradient; a tied weight's first one is kept until that of its other use is added."""
    gradient, parameter.grad = parameter.grad, None
    if waiting:
        waiting.pop().add_(gradient)
    elif waiting is not None:
        waiting.append(gradient)


def _keep_inputs_elsewhere(module: Any) -> None:
    """Simulate offloading of checkpointed inputs by moving them to the meta device, which is not counted."""

    def kept_elsewhere(function: Any, *args: Any, **kwargs: Any) -> Any:
        ways = (lambda here: here.to("meta")), (lambda there: torch.empty(there.shape, dtype=there.dtype))
        with torch.autograd.graph.saved_tensors_hooks(*ways):
            return checkpoint(function, *args, **kwargs)

    for part in module.modules():
        if hasattr(part, "_gradient_checkpointing_func"):
            part._gradient_checkpointing_func = partial(kept_elsewhere, use_reentrant=False)


def assert_planned(config: TrainConfig, source: ModelSource, *, session: bool = False) -> int:
    """Assert that the plan is at most 2 % below and 8 % above the tracked bytes; return those."""
    found = tracked(config, source, session=session)
    assert 0.98 * found <= planned(config, source, session=session) <= 1.08 * found
    return found


CASES: list[tuple[str, str, dict[str, int]]] = [
    ("gpt2", "on", {"loss_chunk": 128}),
    ("gpt2", "1 in RAM", {}),
    ("gpt2", "off", {"loss_chunk": 128}),
    ("llama, untied", "on in RAM", {"loss_chunk": 128}),
    ("llama, untied", "off", {}),
    ("mistral, windows", "1", {"loss_chunk": 128}),
    ("mixtral, experts", "on", {}),
    ("deepseek, latent attention", "1 in RAM", {}),
    ("deepseek, latent attention", "off", {"loss_chunk": 128}),
    ("opt", "1", {}),
]
LONGER: list[tuple[str, str, dict[str, int]]] = [
    ("gemma2, eager attention", "off", {"loss_chunk": 128}),
    ("prophetnet, whole logits", "off", {"loss_chunk": 128}),
    ("gpt2-xl", "off", {"rows": 4, "length": 1024, "loss_chunk": 1024}),
    ("Llama-3-8B", "on", {"rows": 4, "length": 1024, "loss_chunk": 1024}),
]


@pytest.mark.usefixtures("counted_once")
@pytest.mark.parametrize(
    ("name", "kept", "more"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER)]
)
def test_planned_bytes_are_those_that_torch_tracks(name: str, kept: str, more: dict[str, int], tmp_path: Path) -> None:
    """The loss has one or several chunks, and the row a length that was not counted before."""
    size = {"rows": 3, "length": 320, "loss_chunk": 4096} | more
    config = config_of(MODELS[name], kept, folder=tmp_path, **size)
    source = resolve_model(config.model, seed=0)
    assert_planned(config, source)
    assert source.shape.whole_logits == (name == "prophetnet, whole logits")


@pytest.mark.parametrize("session", [False, True])
def test_gradients_of_a_tied_weight_are_counted_as_they_are_added(session: bool, tmp_path: Path) -> None:
    """Few rows under a large vocabulary: a run adds both gradients in place, autograd in a session to a third."""
    shape = {**_SMALL, "model_type": "qwen2", "vocab_size": 30_000, "tie_word_embeddings": True}
    config = config_of(shape, "on", folder=tmp_path, rows=1, length=64)
    found = assert_planned(config, resolve_model(config.model, seed=0), session=session)
    assert found >= (4 if session else 3) * 2 * 64 * 30_000  # the weight and its gradients


def test_a_recurrence_in_steps_or_pieces_is_counted(tmp_path: Path) -> None:
    """Mamba processes tokens one by one, so other row lengths have other numbers of operations."""
    given = {"model_type": "mamba", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(given))
    shape = resolve_model(ModelSection(name=str(tmp_path), random_init=True, attention="eager"), seed=0).shape
    block = shape.on_gpu.kinds[0]
    assert block.kept.token > 64 * 2 * 2
    assert block.kept.at(2, 1000) > 900 * block.kept.at(2, 1) > 0


def test_models_that_cannot_be_counted_are_estimated_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count ends after so many operations."""
    counted = resolve_model(ModelSection(name="gpt2"), seed=0).shape
    monkeypatch.setattr(activations, "_MOST_OPERATIONS", 1000)
    shape = resolve_model(ModelSection(name="gpt2"), seed=0).shape
    assert shape.on_gpu is None
    for words in ([], ["model.activation_checkpointing=off"]):
        needs = []
        for one in (shape, counted):
            items = make_plan(wish(*words, "--micro-batch", "8"), one, machine(gpu=80 * 10**9)).items
            needs.append(sum(i.bytes for i in items if "activations" in i.name or i.name == "block inputs"))
            assert any("a rough estimate" in item.why for item in items) == (one is shape)
        assert needs[0] == pytest.approx(needs[1], rel=0.25)


def test_gradients_kept_elsewhere_are_not_counted() -> None:
    """Stock ZeRO-1 keeps all gradients in a buffer of its own: a block's and the head's are not added again."""
    block = Part(Growth(token=10), (Growth(token=12),), (Growth(fixed=1000, token=15),))
    small = Part(Growth(), (Growth(token=1),), (Growth(token=1),))
    head = Part(Growth(), (), (Growth(token=40), Growth(fixed=300, token=20)))
    counted = Activations(Growth(token=2), (block,), (0, 0), Growth(token=2), small, head, (Growth(fixed=500),))
    work = replace(workload(wish(), SHAPES["gpt2"]), micro_batch=1, seq_len=10, loss_chunk=10**6, checkpointed=0)
    assert peak_of(counted, work).bytes == 2 * 10 + 10 * 10 + 1000 + 15 * 10
    assert peak_of(counted, work, gradients=False).bytes == (2 + 20 + 40) * 10
