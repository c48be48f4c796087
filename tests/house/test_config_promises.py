"""Tests that every key of docs/config.md is used: runs read it, or a named test elsewhere sets it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import TINY
from forked_child import in_a_fork
from sample_plans import SHAPES, machine

from offload_trainer import config as schema
from offload_trainer.config import TrainConfig
from offload_trainer.engine.deepspeed import deepspeed_config
from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed import zero_sizes
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiers import Placement
from offload_trainer.run import process_setup
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.run.train import train_run
from offload_trainer.settings import all_keys, load_config

# Words of runs that together read all keys but these, which the named tests set.
RUNS = (
    ["--ram-fraction", "0.5", "--save-every", "1"],
    ["--dtype", "fp16", "optim.schedule=wsd", "optim.decay_steps=1"],
)
ELSEWHERE = {
    "model.random_init": "model/test_model.py",
    "data.train_on": "data/test_conversations.py",
    "optim.betas": "run/test_import_trainer.py",
    "optim.eps": "offload/test_against_torch.py",
    "optim.weight_decay": "run/test_import_trainer.py",
    "optim.on_nonfinite_grad": "offload/test_nonfinite.py",
    "train.stop_within": "run/test_ends.py",
}

# Sizes for DeepSpeed: the test checks only that DeepSpeed receives them.
STOCK = {
    "sub_group_size": "123456",
    "reduce_bucket_size": "234567",
    "prefetch_bucket_size": "345678",
    "max_live_parameters": "45678901",
    "param_buffer_count": "77",
    "optimizer_buffer_count": "16",
    "pipeline_read": "false",
    "pipeline_write": "false",
    "aio_block_size": "524288",
    "aio_queue_depth": "7",
    "aio_threads": "3",
}


@pytest.mark.slow
def test_runs_read_every_key(tmp_path: Path) -> None:
    """A key that nothing but the check of combinations reads has no effect."""
    sections = {info.annotation: name for name, info in TrainConfig.model_fields.items()}
    read = set()

    def recording(section: Any, name: str) -> Any:
        here, checked = type(section), sys._getframe(1).f_code.co_filename.endswith("plan/engines.py")
        if here in sections and name in here.model_fields and not checked:
            read.add(f"{sections[here]}.{name}")
        return object.__getattribute__(section, name)

    def work() -> None:
        schema._Section.__getattribute__ = recording
        for number, words in enumerate(RUNS):
            where = ["--nvme", str(tmp_path), "--output", str(tmp_path / f"out-{number}")]
            config = load_config([*TINY, "--steps", "2", "optim.warmup_steps=0", *where, *words])
            prepare_process(config)
            train_run(config)
        unread = {key for key in set(all_keys()) - read if not key.startswith("deepspeed.")}
        assert unread == ELSEWHERE.keys(), unread ^ ELSEWHERE.keys()

    assert in_a_fork(work) == 0
    for key, file in ELSEWHERE.items():
        assert key.partition(".")[2] in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("name", STOCK)
def test_keys_reach_deepspeed(name: str) -> None:
    def told(*words: str) -> dict[str, Any]:
        config = load_config(["--engine", "deepspeed", "--nvme", "/ssd", "--save-every", "0", *words])
        params = "cpu" if name == "prefetch_bucket_size" else "nvme"
        placement = Placement(params, "nvme")
        work, section = workload(config, SHAPES["gpt2-medium"]), config.deepspeed
        sizes = zero_sizes(work.shape, section, placement, world=1, item_bytes=2)
        words = {"accelerator": "cuda", "swap_directory": "/ssd/run"}
        return deepspeed_config(work, config.optim, section, placement, sizes, **words)

    assert STOCK[name] in json.dumps(told(f"deepspeed.{name}={STOCK[name]}"))
    assert told(f"deepspeed.{name}={STOCK[name]}") != told()
    assert {f"deepspeed.{key}" for key in STOCK} == {key for key in all_keys() if key.startswith("deepspeed.")} - {
        "deepspeed.zero_stage"  # engine/test_deepspeed_engine.py
    }


def test_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(process_setup, "run_ranks", lambda words, count: 10 * count)
    process_setup.start_ranks([], count=1, engine="tiered")
    with pytest.raises(SystemExit) as ended:
        process_setup.start_ranks([], count=load_config(["--gpus", "2"]).placement.gpus, engine="tiered")
    assert ended.value.code == 20


def test_force_lets_a_plan_pass_that_does_not_fit() -> None:
    for words, passes in (([], False), (["--force"], True)):
        config = load_config(["--save-every", "0", *words])
        plan = make_plan(config, SHAPES["gpt2-10b"], machine(ram=10**9))
        if passes:
            plan.refuse(force=config.placement.force)
        else:
            with pytest.raises(UserError, match="does not fit"):
                plan.refuse(force=config.placement.force)
