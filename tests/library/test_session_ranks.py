"""Tests of sessions on two ranks: Trainers, TRL and own loops, compared with the stock ones.

torchrun starts the ranks, which run this file: test_session_ranks.py FOLDER OUTPUT DRIVE. The model is in FOLDER.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_script
from engine_bench import assert_same
from hf_trainers import arguments, loaded, rows, weights
from hf_trainers import told as log_of
from peft import LoraConfig
from safetensors.torch import load_file
from sample_chats import chat_tokenizer, preferences, prompts
from test_trl import words
from transformers import AutoModelForCausalLM, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from offload_trainer.common.errors import UserError
from offload_trainer.hf import Offloaded, session_of

pytestmark = pytest.mark.slow

STEPS, ACCUMULATE, LIMIT = 6, 2, 0.5
QUIET = {"max_steps": STEPS, "save_steps": 3, "use_cpu": True, "ddp_backend": "gloo"}


def _trainer(model: Any, output: Path, base: type, accumulate: int = 1) -> Any:
    words = QUIET | {"eval_steps": 3, "max_grad_norm": LIMIT, "warmup_steps": 1}
    words["gradient_accumulation_steps"] = accumulate
    return base(model, arguments(output, **words), train_dataset=rows(48), eval_dataset=rows(8))


def _adapters(model: Any, output: Path, base: type) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))  # adapters of the other rank must be replaced by those of rank 0
    return base(
        model,
        args=DPOConfig(**words(output, gradient_accumulation_steps=1, **QUIET)),
        train_dataset=preferences(),
        processing_class=chat_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )


def _grpo(model: Any, output: Path, base: type) -> Any:
    given = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0, "gradient_accumulation_steps": 1}
    return base(
        model,
        args=GRPOConfig(**words(output, **given, **QUIET)),
        reward_funcs=lambda completions, **_: [float(len(str(one)) % 7) for one in completions],
        train_dataset=prompts(),
        processing_class=chat_tokenizer(),
    )


# The stock trainer, the function that makes one, and where the weights are
KINDS: dict[str, tuple[type, Callable[..., Any], str]] = {
    "trainer": (Trainer, _trainer, "drive"),
    "again": (Trainer, _trainer, "drive"),
    "accumulated": (Trainer, partial(_trainer, accumulate=ACCUMULATE), "resident"),
    "adapters": (DPOTrainer, _adapters, "resident"),
    "grpo": (GRPOTrainer, _grpo, "resident"),
}


def batch_of(step: int, number: int) -> dict[str, torch.Tensor]:
    """Return the rows of a step's micro-batch, counted over all ranks."""
    at = 2 * (2 * ACCUMULATE * step + number)
    chosen = rows(64)[at : at + 2]
    return {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}


def _loop(model: Any, output: Path) -> None:
    """Train as docs/library.md does, save after three steps, resume once; then try what ranks refuse."""
    session, told_here = session_of(model), []
    optimizer = session.adamw(lr=1e-2, weight_decay=0.1)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            losses = []
            for number in range(ACCUMULATE):
                with session.micro_batch(last=number + 1 == ACCUMULATE):
                    loss = model(**batch_of(step, number * session.world + session.rank)).loss
                    (loss / ACCUMULATE).backward()
                losses.append(loss.item())
            told_here.append([*losses, session.clip_grad_norm_(LIMIT).item()])
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 3)
    session.save(output / "save")
    steps(3, STEPS)
    assert session.resume(output / "save") == 3
    steps(3, STEPS)
    (output / f"told-{session.rank}.json").write_text(json.dumps(told_here))
    session.export(output / "final", dtype="fp32")
    with session.micro_batch(last=True):
        model(**batch_of(0, session.rank)).loss.backward()
    said = []

    def backward_outside() -> None:
        optimizer.zero_grad()
        model(**batch_of(0, session.rank)).loss.backward()
        session.clip_grad_norm_(1.0)

    for refused in (partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0), backward_outside):
        try:
            refused()
        except UserError as error:
            said.append(str(error))
    (output / f"refused-{session.rank}.json").write_text(json.dumps(said))


def be_a_rank(folder: Path, output: Path, drive: Path) -> None:
    """Train with `KINDS`, stock and ours, and in a loop; rank 0 writes OUTPUT/WHO/KIND/told.json and final."""
    for who, (kind, (stock, make, home)) in product(("stock", "ours"), KINDS.items()):
        place = output / who / kind
        place.mkdir(parents=True, exist_ok=True)
        keys: dict[str, Any] = {"freeze": ["."]} if kind == "adapters" else {}
        with (
            nullcontext(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
            if who == "stock"
            else loaded(folder, drive, home=home, seq_len=64, micro_batch_size=4, **keys)
        ) as model:
            trainer = make(model, place, stock if who == "stock" else type("Ours", (Offloaded, stock), {}))
            trainer.train()
            trainer.save_model(str(place / "final"))
            if trainer.is_world_process_zero():
                (place / "told.json").write_text(json.dumps(log_of(trainer)))
            trainer.accelerator.wait_for_everyone()
    (output / "loop").mkdir(exist_ok=True)
    with loaded(folder, drive, seq_len=64, micro_batch_size=4) as model:
        _loop(model, output / "loop")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all kinds in one start of two ranks with one thread each; return the directory of the results."""
    place = tmp_path_factory.mktemp("trained")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)
    words, paths = (folder, place, tmp_path_factory.mktemp("drive")), os.pathsep.join(sys.path)
    done = run_script(*launch, *words, own=True, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr[-6000:]
    return place


def told(place: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((place / "told.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["trainer", "adapters", "grpo"])
def test_logs_and_weights_are_those_of_two_stock_ranks(kind: str, trained: Path) -> None:
    """A clipped, evaluated and saved Trainer, DPO of adapters, and GRPO, whose ranks generate, have the same bits."""
    ours, stock = trained / "ours" / kind, trained / "stock" / kind
    assert len(told(ours)) > STEPS
    assert told(ours) == told(stock)
    name = "adapter_model.safetensors" if kind == "adapters" else "model.safetensors"
    assert_same(*(dict(load_file(place / "final" / name)) for place in (ours, stock)))


def test_a_resumed_run_and_one_with_accumulation(trained: Path) -> None:
    """Losses agree within 1e-6 with accumulation: DistributedDataParallel adds each rank's micro-batches first."""
    again, whole = trained / "ours/again", trained / "ours/trainer"
    assert told(again)[:-1] == told(whole)[:-1]  # the last entry has the mean loss since the start
    assert_same(weights(again / "final"), weights(whole / "final"))
    for one, other in zip(*(told(trained / who / "accumulated") for who in ("ours", "stock")), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_a_loop_and_what_it_refuses(folder: Path, trained: Path) -> None:
    """A loop with accumulation, saved and resumed, has the bits of plain torch that adds gradients in rank order."""
    found = [json.loads((trained / f"loop/told-{rank}.json").read_text()) for rank in range(2)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        losses = []
        for number in range(2 * ACCUMULATE):
            loss = model(**batch_of(step, number)).loss
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        for rank, told in enumerate(found):
            assert told[step] == [*losses[rank::2], norm]
        optimizer.step()
        optimizer.zero_grad()
    for told in found:
        assert told[STEPS:] == told[3:STEPS]  # resumed
    assert_same(weights(trained / "loop/final"), dict(model.state_dict()))
    for rank in range(2):  # refused: torch's own clipping, which reads gradients, and a backward outside micro_batch
        clipping, outside = json.loads((trained / f"loop/refused-{rank}.json").read_text())
        assert "2 ranks" in clipping
        assert "micro_batch(last=True)" in outside


if __name__ == "__main__":
    be_a_rank(*map(Path, sys.argv[1:]))
