"""Tests of ranks that share rows: losses and norms match one rank with whole rows, bytes match the plan, and resuming
is exact.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import TINY
from engine_bench import assert_near, batches, engine, model_directory, train
from forked_ranks import Case, Result, call_ranks, count_calls, run_ranks, train_cases
from safetensors.torch import load_file
from sample_plans import GB, SHAPES, machine
from uneven_targets import masked

from offload_trainer.config import ModelSection, PlacementSection
from offload_trainer.engine import tiered
from offload_trainer.errors import UserError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.shape import ModelShape
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow

STEPS, MICRO = 3, 4  # micro-batches of whole rows in a step
ALWAYS = ("--dtype", "fp32", "--seq-len", "24", "--micro-batch", "2")
LLAMA = {"model_type": "llama", "head_dim": 18}
SHAPED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),  # 2 heads of keys, so two of 4 ranks share each
    "gpt2": ("gpt2", {}),
    "mistral": ("qwen3", LLAMA | {"model_type": "mistral", "sliding_window": 7, "num_hidden_layers": 2}),
    "3 of 6 heads": ("qwen3", LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}),
}
CHECKPOINTED = ("model.activation_checkpointing=on", "model.offload_activations=cpu", "--params", "cpu")


def whole_rows(model: Path) -> list[tuple[float, float | None]]:
    """Return one plain torch rank's steps, and the evaluation losses of the last step's micro-batches."""
    data, losses = masked(batches(STEPS * MICRO)), []

    def before(step: int) -> None:
        if step == STEPS:
            losses.extend(plain.eval_loss(batch) for batch in data[:MICRO])

    with engine(model, "--engine", "plain", *ALWAYS, "--accumulate", str(MICRO)) as plain:
        steps = train(plain, data, accumulate=MICRO, before=before)
    return steps + [(loss, None) for loss in losses]


def plan_of(shape: ModelShape, *words: str, ranks: int, gpu: int = 0) -> Plan:
    config = load_config(["--engine", "tiered", *words])
    here = machine(gpu=gpu, ram=64 * GB) if gpu else probe_machine(PlacementSection())
    return make_plan(config, shape, here, world=ranks)


def count_pieces(cases: Sequence[Case]) -> list[Result]:
    """Train the cases as one of the ranks; count the bytes of rows' pieces that it sends to the others."""
    sent = lambda parts, **_: {"pieces": parts.nbytes // len(parts) * (len(parts) - 1)}  # noqa: E731
    count_calls(tiered, "all_to_all", sent)
    return train_cases(cases)


@pytest.mark.parametrize(("ranks", "sequence"), [(2, 2), (4, 4), (4, 2)])
def test_pieces_of_rows_have_the_losses_of_whole_rows(ranks: int, sequence: int, tmp_path: Path) -> None:
    """fp32 losses match, even if some pieces have no counted target; each rank sends the planned bytes."""
    groups = ranks // sequence
    names = {(2, 2): ["gpt2", "mistral", "3 of 6 heads"], (4, 4): ["qwen3"], (4, 2): ["gpt2"]}[ranks, sequence]
    cases = []
    for name in names:
        model = model_directory(tmp_path / name, SHAPED[name][0], **SHAPED[name][1])
        words = (f"parallel.sequence={sequence}", *ALWAYS, "--accumulate", str(MICRO // groups))
        words += CHECKPOINTED if name == "qwen3" else ()
        case = Case(model, words, tmp_path / f"{name} out", steps=STEPS, micro=MICRO, unequal=True)
        cases.append(replace(case, evaluate=name == "gpt2"))
    results = run_ranks(cases, count=ranks, folder=tmp_path / "ranks", work=count_pieces)
    for case, of_ranks in zip(cases, results, strict=True):
        found, expected = of_ranks[0].steps, whole_rows(case.model)
        assert_near(found[:STEPS], expected[:STEPS], rel=1e-5)
        if case.evaluate:  # groups evaluate their own micro-batches in turn
            told = [loss for loss, _ in expected[STEPS:]]
            assert [loss for loss, _ in found[STEPS:]] == pytest.approx(told, rel=1e-5)
            continue
        shape = resolve_model(ModelSection(name=str(case.model), random_init=True), seed=0).shape
        planned = plan_of(shape, "--model", str(case.model), "--scratch", *case.words, ranks=ranks)
        sent = sum(one.written for one in planned.links if one.place == "gpus" and one.phase != "update")
        for result in of_ranks:
            assert result.counts["pieces"] == pytest.approx(STEPS * sent, rel=0.02), case.model
            assert result.counts["pieces"] > 0


def test_a_run_resumes_with_the_same_pieces_and_with_whole_rows(tmp_path: Path) -> None:
    """Two ranks resume their checkpoint bit for bit; one rank resumes it to 1e-5."""
    model = model_directory(tmp_path / "model", "qwen3", **LLAMA)
    words = ("parallel.sequence=2", *ALWAYS, "--accumulate", "2")
    case = Case(model, words, tmp_path / "whole", steps=4, micro=2)
    half = replace(case, out=tmp_path / "first", steps=2)
    rest = replace(case, out=tmp_path / "second", steps=2, skip=2, load=half.out)
    whole, first, second = (one for one, _ in run_ranks([case, half, rest], count=2, folder=tmp_path / "ranks"))
    assert whole.steps == first.steps + second.steps
    assert whole.masters == second.masters
    with engine(model, "--engine", "tiered", *words[1:]) as alone:
        alone.load(half.out)
        data = batches(8)
        assert_near(second.steps, train(alone, data[4:], accumulate=2), rel=1e-5)


def test_the_command_trains_and_evaluates(tmp_path: Path) -> None:
    words = [*TINY, "--steps", "4", "--dtype", "fp32", "train.eval_every=2", "--lr", "1e-3"]
    words += ["model.overrides.resid_pdrop=0.0", "model.overrides.embd_pdrop=0.0", "model.overrides.attn_pdrop=0.0"]
    messages = []
    for count in (1, 2):
        output = tmp_path / f"out{count}"
        runs = call_ranks(*words, f"parallel.sequence={count}", output=output, count=count)
        assert not any(run.code for run in runs), runs[0].text[-3000:]
        lines = [
            [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "evaluations")
        ]
        messages.append((*lines, load_file(output / "checkpoints/step-00000004/master.safetensors")))
    (steps, losses, one), (in_pieces, others, two) = messages
    for before, after in zip(steps, in_pieces, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
        assert after["tokens"] == before["tokens"]
    for before, after in zip(losses, others, strict=True):
        assert after["validation_loss"] == pytest.approx(before["validation_loss"], rel=1e-5)
    for key, tensor in one.items():
        if tensor.dim() > 1:  # biases of keys have no gradient except rounding errors
            assert (two[key] - tensor).norm() < 1e-3 * tensor.norm(), key


# -- the plan ---------------------------------------------------------------------------------------------------------

SHAPE = SHAPES["gpt2-medium"]  # 16 heads


def test_a_piece_of_a_row_needs_the_memory_of_a_row_of_its_length() -> None:
    """Attention needs a little more, and sharing rows does not add tokens to a step."""
    words = ("--micro-batch", "1", "model.activation_checkpointing=on", "--params", "cpu")
    whole, pieces, short = (
        plan_of(SHAPE, *words, "--seq-len", str(length), f"parallel.sequence={count}", ranks=4, gpu=80 * GB)
        for length, count in ((1024, 1), (1024, 4), (256, 1))
    )

    def held(plan: Plan) -> dict[str, int]:
        return {item.name: item.bytes for item in plan.items if item.tier == "gpu"}

    assert held(pieces)["NCCL"] > 0
    assert "NCCL" not in held(whole)
    for name in ("block inputs", "activations"):
        assert held(short)[name] <= held(pieces)[name] <= 1.1 * held(short)[name]
        assert held(pieces)[name] < held(whole)[name]
    assert (pieces.work.tokens, whole.work.tokens) == (1024, 4096)
    assert any(
        "each GPU processes 256 of the 1024 tokens of a row; 1 data-parallel group(s) of 4 ranks" in note
        for note in pieces.notes
    )
    work = workload(load_config([*words, "parallel.sequence=4"]), SHAPE, world=8)
    assert (work.data, work.added, work.length) == (2, 8, 256)


@pytest.mark.parametrize(
    ("words", "ranks", "changes", "message"),
    [
        (["parallel.sequence=2"], 1, {}, r"parallel.sequence=2 with 1 rank\(s\): a multiple of 2 is needed"),
        (["parallel.sequence=2"], 3, {}, r"with 3 rank\(s\): a multiple of 2"),
        (["parallel.sequence=3"], 3, {}, "16 attention heads are not a multiple of 3"),
        (["parallel.sequence=4", "--seq-len", "1022"], 4, {}, "rows of 1022 tokens are not a multiple of 4"),
        (["parallel.sequence=2"], 2, {"heads": 0}, "number of attention heads is not known"),
        (["parallel.sequence=2"], 2, {"packed": True}, "data.packing=on: attention masks between documents"),
    ],
)
def test_what_cannot_be_in_pieces_is_refused(
    words: list[str], ranks: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(replace(SHAPE, **changes), *words, ranks=ranks)
