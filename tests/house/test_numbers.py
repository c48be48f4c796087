"""Tests of the numbers of a run's records against an independent count."""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run, call
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer.config import ModelSection, PlacementSection
from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.machine import rate_cache
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.machine import Rate, Rates

pytestmark = pytest.mark.slow

# -- floating-point operations: torch's counter ------------------------------------------------------------------------

_SMALL = {"vocab_size": 331, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64}
_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2, tied": {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "n_positions": 64},
    "qwen3, untied, heads of 40 of 24": {
        **_HEADS,
        **{"model_type": "qwen3", "hidden_size": 96, "intermediate_size": 200, "head_dim": 40},
        "tie_word_embeddings": False,
    },
    "gemma2, tied": {**_HEADS, "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "head_dim": 24},
    "mixtral, 2 of 8": {
        **_HEADS,
        **{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    },
    "deepseek-v3, keys of 32 and values of 20": {
        **_HEADS,
        **{"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48},
        **{"num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20},
    },
}
FROZEN = {
    "gpt2, tied": [r"wte|wpe|h\.0\.", r"mlp", r"wpe|h\.|ln_f", r"wte|wpe|h\.[01]\.|attn"],
    "qwen3, untied, heads of 40 of 24": [r"^model", r"lm_head"],
    "mixtral, 2 of 8": [r"embed|gate", r"experts"],
}
CASES = [(name, "") for name in MODELS] + [(name, pattern) for name, some in FROZEN.items() for pattern in some]
ROWS, LENGTH = 2, 48


@pytest.mark.parametrize(("name", "frozen"), CASES)
def test_flops_are_torchs(name: str, frozen: str, tmp_path: Path) -> None:
    """Frozen weights have no gradients, and the backward stops at the first trained weight."""
    (tmp_path / "config.json").write_text(json.dumps(_SMALL | MODELS[name]))
    freeze = (frozen,) if frozen else ()
    # The counter includes recomputation in the backward of fused attention, and lacks the CPU's grouped product, so
    # attention uses plain products, and experts run in a loop.
    section = ModelSection(name=str(tmp_path), random_init=True, attention="eager", freeze=freeze)
    source = resolve_model(section, seed=0)
    source.config._experts_implementation = "eager"
    shape = source.shape
    module = source.build(dtype=torch.float32)
    assert shape.parameters == module.model.num_parameters()
    trained = [weight.name for weight in shape.weights if weight.trainable]
    assert trained == [name for name, parameter in module.model.named_parameters() if parameter.requires_grad]
    for parameter in module.model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    tokens = torch.randint(331, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        loss = module(tokens[:, :-1], tokens[:, 1:])
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    count, ours = ROWS * LENGTH, shape.block_flops(seq_len=LENGTH) + shape.head_flops()
    assert count * ours == pytest.approx(forward.get_total_flops(), rel=1e-6)
    assert count * shape.backward_flops(seq_len=LENGTH) == pytest.approx(backward.get_total_flops(), rel=1e-6)
    assert shape.flops_per_token(seq_len=LENGTH) == ours + shape.backward_flops(seq_len=LENGTH)


# -- a run: each number of its records

PEAK = 1e12  # FLOP/s, as if matrix products had been timed
STEPS, MICRO, SEQ, EVAL_ROWS = 6, 8, 128, 16


@dataclass(frozen=True)
class Counted:
    """A finished run of the default model, and its inputs, made with transformers alone."""

    run: Run
    wall: float
    ids: torch.Tensor

    def rows(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, cut from the text's ids."""
        held = self.ids[first * SEQ : (first + count) * SEQ + 1]
        return held[:-1].view(count, SEQ), held[1:].view(count, SEQ)

    def model(self) -> Any:
        """Return the initial model: transformers' random weights, in bf16."""
        config = AutoConfig.from_pretrained(self.run.output / "model", attn_implementation="eager")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16()


def loss_of(model: Any, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(rows[0]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[1].flatten())


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    folder, drive = tmp_path_factory.mktemp("numbers"), tmp_path_factory.mktemp("drive")
    words = ["--steps", STEPS, "train.eval_every=3", "--save-every", 3, "data.shuffle=false", "optim.warmup_steps=0"]
    words += ["placement.threads=2", "--nvme", drive, "--ram-fraction", "0.5", f"train.eval_rows={EVAL_ROWS}"]
    words += ["--seq-len", SEQ, "--micro-batch", MICRO, "--lr", "1e-3", "optim.schedule=cosine", "--params", "gpu"]
    words += ["tiered.overlap=off"]  # phases then add up to the step
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_TRAINER_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "2")
        here = probe_machine(PlacementSection(), output=str(folder))
        rate_cache.keep_rates(replace(here, rates=Rates(matmul={"bf16": Rate(PEAK, "measured", "for a test")})))
        start = time.perf_counter()
        run = call(*words, output=folder / "run")
        wall = time.perf_counter() - start
    tokenizer = load_tokenizer("builtin")
    text = BUILTIN_CORPUS.read_text("utf-8")
    return Counted(run, wall, torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))


def test_steps_have_transformers_loss_norm_and_operations(counted: Counted) -> None:
    first, model = counted.run.steps[0], counted.model()
    with FlopCounterMode(display=False) as flops:
        loss = loss_of(model, counted.rows(0, MICRO))
        loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert first["loss"] == pytest.approx(float(loss.detach()), abs=5e-3)
    assert first["grad_norm"] == pytest.approx(norm, rel=0.02)
    for step in counted.run.steps:
        assert step["mfu"] * step["seconds"] * PEAK == pytest.approx(flops.get_total_flops(), rel=1e-6)


def test_steps_count_tokens_rates_and_seconds(counted: Counted) -> None:
    steps = counted.run.steps
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["tokens"] for step in steps] == [number * MICRO * SEQ for number in range(1, STEPS + 1)]
    rates = [1e-4 + 9e-4 * (1 + math.cos(math.pi * done / (STEPS - 1))) / 2 for done in range(STEPS)]
    assert [step["lr"] for step in steps] == pytest.approx(rates)
    assert 0 < sum(step["seconds"] for step in steps) < counted.wall
    for step in steps:
        assert step["tokens_per_second"] * step["seconds"] == pytest.approx(MICRO * SEQ)
        assert set(step["phases"]) == {"data", "forward", "backward", "update"}
        assert 0 < sum(step["phases"].values()) <= step["seconds"]
        assert (step["loss_scale"], step["skipped"]) == (1.0, False)
        assert "hidden" not in step  # an update without overlap hides no time


def test_steps_count_the_bytes_of_memory_and_drives(counted: Counted) -> None:
    """Drive traffic is the plan's. A save reads more, and peak memory varies with its moment and with threads."""
    half, steps = 6 * counted.model().num_parameters(), counted.run.steps
    plan = json.loads((counted.run.output / "plan.json").read_text())
    moved = [one for one in plan["traffic"] if one["place"] != "device"]
    for way, key in (("read", "nvme_read_bytes"), ("written", "nvme_written_bytes")):
        counts = [step[key] for step in steps[2:]]
        if None not in counts:
            assert sorted(counts)[len(counts) // 2] == pytest.approx(half, rel=0.02)
            assert sorted(counts)[len(counts) // 2] == pytest.approx(sum(one[way] for one in moved), rel=0.005)
    peaks = [step["host_rss_bytes"] for step in steps]
    assert peaks == sorted(peaks)
    assert peaks[-1] == pytest.approx(plan["tiers"]["ram"]["need"], rel=0.15)
    (drive,) = {one["place"] for one in moved}
    for step in steps:
        assert 0.5 * step["host_rss_bytes"] < step["memory"]["ram"] <= 1.01 * step["host_rss_bytes"]
        assert step["memory"]["drives"] == pytest.approx(plan["tiers"][drive]["need"], rel=0.02)
        assert step["memory"]["drives"] > 0.98 * half
        assert torch.cuda.is_available() or step["device_peak_bytes"] == 0
        assert torch.cuda.is_available() or "allocation_retries" not in step


def test_evaluations_have_transformers_loss(counted: Counted) -> None:
    evaluations = [json.loads(line) for line in (counted.run.output / "evaluations.jsonl").read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [3, 6]
    model, rows = counted.model(), (len(counted.ids) - 1) // SEQ
    held = load_file(counted.run.output / f"checkpoints/step-{STEPS:08d}/master.safetensors")
    model.load_state_dict({name: value.bfloat16() for name, value in held.items()}, strict=False)
    with torch.no_grad():
        loss = float(loss_of(model, counted.rows(rows - int(0.05 * rows), EVAL_ROWS)))
    assert evaluations[-1]["validation_loss"] == pytest.approx(loss, abs=5e-3)
    for record in evaluations:
        assert record["perplexity"] == pytest.approx(math.e ** record["validation_loss"])
