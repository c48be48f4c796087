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
from offload_trainer.common.errors import UserError
from offload_trainer.config import DeepSpeedSection, TrainConfig
from offload_trainer.engine.deepspeed import deepspeed_config
from offload_trainer.plan.deepspeed import zero_sizes
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiers import Placement
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.run.train import train_run
from offload_trainer.settings import all_keys, load_config

# Keys that no run of this file reads: the tests that set them.
ELSEWHERE = {
    "model.random_init": "model/test_model.py",
    "data.train_on": "data/test_conversations.py",
    "optim.betas": "run/test_import.py",
    "optim.eps": "offload/test_against_torch.py",
    "optim.weight_decay": "run/test_import.py",
    "optim.on_nonfinite_grad": "offload/test_nonfinite.py",
    "train.stop_within": "run/test_ends.py",
}

# Sizes for DeepSpeed: the test checks only that DeepSpeed receives them. engine/test_deepspeed_engine.py has its stage.
STOCK = {key: None for key in DeepSpeedSection.model_fields if key != "zero_stage"}
STOCK |= {"pipeline_read": "false", "pipeline_write": "false", "max_live_parameters": "45678901"}


@pytest.mark.slow
def test_runs_read_every_key(tmp_path: Path) -> None:
    """A key that nothing but the check of combinations reads has no effect."""
    checks = ("engine_of", "combination_mistakes", "_settings_of_others", "mistakes_of_length")  # in plan/planner.py
    sections = {info.annotation: name for name, info in TrainConfig.model_fields.items()}
    read = set()

    def recording(section: Any, name: str) -> Any:
        here, reader = type(section), sys._getframe(1).f_code.co_qualname.partition(".")[0]
        if here in sections and name in here.model_fields and reader not in checks:
            read.add(f"{sections[here]}.{name}")
        return object.__getattribute__(section, name)

    def work() -> None:
        schema._Section.__getattribute__ = recording
        wsd = ["--dtype", "fp16", "optim.schedule=wsd", "optim.decay_steps=1"]
        for number, words in enumerate((["--ram-fraction", "0.5", "--save-every", "1"], wsd)):
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

    value = STOCK[name] or "123457"
    assert value in json.dumps(told(f"deepspeed.{name}={value}"))
    assert told(f"deepspeed.{name}={value}") != told()


def test_force_lets_a_plan_pass_that_does_not_fit() -> None:
    plan = make_plan(load_config(["--save-every", "0"]), SHAPES["gpt2-10b"], machine(ram=10**9))
    plan.refuse(force=load_config(["--force"]).placement.force)
    with pytest.raises(UserError, match="does not fit"):
        plan.refuse(force=load_config([]).placement.force)
