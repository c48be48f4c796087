"""Tests that every key of docs/config.md has an effect, by a run here or a named test elsewhere.

A row makes a short run with the key and one without, in this process, and states what must differ. If the key is
ignored, the runs are equal and the row fails.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, products_of_torch
from engine_bench import model_directory
from sample_plans import SHAPES, machine

from offload_trainer import trainer
from offload_trainer.engine import build_tiered
from offload_trainer.engine.ds_config import deepspeed_config
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.deepspeed.zero_buffers import zero_sizes
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiers import Placement
from offload_trainer.run import launcher
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.run.train import train_run
from offload_trainer.settings import all_keys, load_config
from offload_trainer.storage import transfer

BASE = [*TINY, "--steps", "4", "--lr", "1e-2", "train.eval_every=0", "optim.schedule=constant", "optim.warmup_steps=0"]
DRIVE = ["--nvme", "ONE", "--optimizer", "nvme"]
AWAY = ["--nvme", "ONE", "--params", "nvme"]
CHECKPOINTED = ["model.activation_checkpointing=on"]
FP16 = ["--dtype", "fp16", "optim.initial_loss_scale=1024", "optim.loss_scale_window=2"]
WSD = ["optim.schedule=wsd"]

# key: arguments of both runs, those of the second alone, and what must differ
RUNS: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "model.name": ([], ["--model", "MODEL", "--scratch", "--tokenizer", "builtin"], "weights"),
    "model.overrides": ([], ["model.overrides.n_layer=3"], "weights"),
    "model.dtype": ([], ["--dtype", "fp32"], "losses"),
    "model.attention": ([], ["model.attention=eager"], "attention"),
    "model.activation_checkpointing": ([], CHECKPOINTED, "forwards of a block"),
    "model.offload_activations": (["--nvme", "ONE", *CHECKPOINTED], ["model.offload_activations=nvme"], "files"),
    "model.loss_chunk": ([], ["model.loss_chunk=7"], "forwards of the head"),
    "model.mlp_chunk": ([], ["model.mlp_chunk=9"], "forwards of an MLP"),
    "model.freeze": ([], ["model.freeze=wpe"], "trained"),
    "data.path": ([], ["--data", "TEXT"], "losses"),
    "data.seq_len": ([], ["--seq-len", "24"], "tokens"),
    "data.validation": ([], ["data.validation=0.2"], "rows"),
    "data.shuffle": ([], ["data.shuffle=false"], "losses"),
    "data.cache": ([], ["data.cache=CACHE"], "cache"),
    "data.mixture": (["--data", "TEXT", "--data", "DOCUMENTS"], ["data.mixture=[3,1]"], "losses"),
    "data.packing": (["--data", "DOCUMENTS"], ["data.packing=on"], "losses"),
    "data.tokenizer": (["--data", "TEXT"], ["--tokenizer", "TOKENIZER"], "tokens of the text"),
    "optim.lr": ([], ["--lr", "2e-2"], "rates"),
    "optim.name": ([], ["optim.name=muon"], "losses"),
    "optim.betas": ([], ["optim.betas=[0.8, 0.95]"], "losses"),
    "optim.eps": ([], ["optim.eps=1e-3"], "losses"),
    "optim.muon_lr": (["optim.name=muon"], ["optim.muon_lr=0.02"], "losses"),
    "optim.muon_momentum": (["optim.name=muon"], ["optim.muon_momentum=0.5"], "losses"),
    "optim.muon_adjust_lr": (["optim.name=muon"], ["optim.muon_adjust_lr=original"], "losses"),
    "optim.moment_dtype": ([], ["optim.moment_dtype=8bit"], "checkpoint"),
    "optim.kernel": (["optim.kernel=torch"], ["optim.kernel=native"], "kernel"),
    "optim.weight_decay": ([], ["optim.weight_decay=0.9"], "masters"),
    "optim.max_grad_norm": ([], ["optim.max_grad_norm=0.01"], "masters"),
    "optim.schedule": ([], ["optim.schedule=linear"], "rates"),
    "optim.warmup_steps": ([], ["optim.warmup_steps=3"], "rates"),
    "optim.decay_steps": (WSD, ["optim.decay_steps=3"], "rates"),
    "optim.final_lr_ratio": (["optim.schedule=linear"], ["optim.final_lr_ratio=0.5"], "rates"),
    "optim.schedule_delay": (["optim.schedule=linear"], ["optim.schedule_delay=1"], "rates"),
    "optim.accumulate_dtype": (["--accumulate", "3"], ["optim.accumulate_dtype=model"], "norms"),
    "optim.initial_loss_scale": (FP16, ["optim.initial_loss_scale=512"], "scales"),
    "optim.loss_scale_window": (FP16, ["optim.loss_scale_window=1"], "scales"),
    "train.steps": ([], ["--steps", "3"], "tokens"),
    "train.micro_batch_size": ([], ["--micro-batch", "3"], "tokens"),
    "train.gradient_accumulation_steps": ([], ["--accumulate", "2"], "tokens"),
    "train.seed": ([], ["--seed", "1"], "losses"),
    "train.eval_every": ([], ["train.eval_every=2"], "evaluated"),
    "train.eval_rows": ([], ["train.eval_rows=5"], "validation loss"),
    "placement.engine": ([], ["--engine", "plain"], "engine"),
    "placement.params": (["--nvme", "ONE", "tiered.weight_buffers=1"], ["--params", "nvme"], "files"),
    "placement.optimizer": (["--nvme", "ONE"], ["--optimizer", "nvme"], "files"),
    "placement.nvme": (DRIVE, ["--nvme", "TWO"], "files"),
    "placement.gradients": (DRIVE, ["placement.gradients=nvme"], "files"),
    "placement.gpu_fraction": (["--nvme", "ONE", "--ram-fraction", "0"], ["--gpu-fraction", "0.5"], "files"),
    "placement.ram_fraction": (DRIVE, ["--ram-fraction", "0.5"], "files"),
    "placement.threads": ([], ["placement.threads=2"], "threads"),
    "save.output": ([], ["--output", "OTHER"], "output"),
    "save.every": (["save.keep=9"], ["--save-every", "3"], "saved"),
    "save.keep": (["--save-every", "1"], ["save.keep=3"], "saved"),
    "save.trackers": ([], ["save.trackers=tensorboard"], "run directory"),
    "tiered.page_size": (DRIVE, ["tiered.page_size=4096"], "pages"),
    "tiered.state_copies": (DRIVE, ["tiered.state_copies=2"], "files"),
    "tiered.page_buffers": ([*DRIVE, "tiered.page_size=4096"], ["tiered.page_buffers=3"], "page buffers"),
    "tiered.weight_buffers": ([*AWAY, "model.overrides.n_layer=5"], ["tiered.weight_buffers=2"], "unit buffers"),
    "tiered.io_threads": (DRIVE, ["tiered.io_threads=2"], "readers"),
    "tiered.io_block_bytes": (DRIVE, ["tiered.io_block_bytes=4096"], "largest request"),
    "tiered.drive_speeds": ([*DRIVE, "--nvme", "TWO"], ["tiered.drive_speeds=[1.0, 3.0]"], "files"),
}

_TOKENS = "data/test_data_token_files.py"
# Keys that other tests cover, by test id.
ELSEWHERE = {
    "deepspeed.zero_stage": ("engine/test_deepspeed_engine.py::test_the_mean_is_over_all_targets_that_all_ranks_count"),
    "model.random_init": "model/test_model.py::test_a_directory_without_weights_asks_for_scratch",
    "data.validation_path": f"{_TOKENS}::test_validation_from_a_file_of_its_own_takes_nothing_from_the_training",
    "data.shuffle_block_size": "data/test_streamed.py::test_rows_are_shuffled_inside_blocks",
    "data.token_dtype": "data/test_data_token_files.py::test_what_may_be_either_needs_the_key",
    "data.text_field": "data/test_data_prepare.py::test_documents_become_their_tokens_with_end_of_text_behind_each",
    "data.format": "data/test_conversations.py::test_forms_are_known_by_their_keys",
    "data.train_on": "data/test_conversations.py::test_data_train_on_makes_another_file",
    "data.chat_template": "run/test_chat_run.py::test_a_template_of_the_users",
    "optim.on_nonfinite_grad": "offload/test_nonfinite.py::test_a_skipped_step_changes_nothing",
    "train.deterministic": "engine/test_plain.py::test_a_gpu_repeats_its_bits_with_train_deterministic",
    "train.epochs": "run/test_epochs.py::test_epochs_make_the_steps_that_visit_the_rows",
    "train.stop_within": "run/test_stop_within.py::test_a_stop_that_does_not_fit_ends_at_once_and_resumes",
    "train.tokens_per_step": "plan/test_time.py::test_tokens_a_step_choose_micro_batch_and_accumulation",
    "save.resume": "run/test_runs.py::test_resume_from_an_older_checkpoint",
    "parallel.sequence": "engine/test_sequence_parallel.py::test_pieces_of_rows_have_the_losses_of_whole_rows",
    "parallel.partition_activations": "engine/test_tensor_parallel.py::test_two_ranks_share_each_product",
    "parallel.tensor": "engine/test_tensor_parallel.py::test_two_ranks_share_each_product",
    "tiered.micro_batch_order": (
        "offload/test_breadth_first.py::test_auto_chooses_it_if_weights_are_read_for_each_micro_batch"
    ),
    "tiered.overlap": "offload/test_overlap.py::test_forty_steps_match_plain_torch",
    "tiered.fetch_granularity": "offload/test_parts.py::test_parts_of_blocks_have_plain_torchs_bits",
    "tiered.weight_transfer": "offload/test_rank_bytes.py::test_bytes_are_the_plans",
    "tiered.io": "house/test_config_promises.py::test_the_backend_of_transfers",
    "tiered.checksums": "offload/test_tiered.py::test_a_changed_block_is_found_with_checksums",
    "model.base": "library/test_quantised_base.py::test_bytes_of_a_pass",
    "model.compile": "model/test_compiled_blocks.py::test_one_function_is_compiled_for_all_blocks",
    "model.kernels": "model/test_compiled_blocks.py::test_liger_replaces_everything_but_the_loss",
    "model.trust_remote_code": "house/test_config_promises.py::test_a_models_own_code_runs_where_it_is_allowed",
    "placement.force": "house/test_config_promises.py::test_force_lets_a_plan_pass_that_does_not_fit",
    "placement.gpus": "house/test_config_promises.py::test_ranks_are_started",
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

UNSEEN = {}


def test_every_key_has_a_row() -> None:
    rows = [*RUNS, *ELSEWHERE, *(f"deepspeed.{name}" for name in STOCK), *UNSEEN]
    assert sorted(rows) == sorted(all_keys())
    for key, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        source = (Path(__file__).parents[1] / file).read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{key}: {test} is not there"


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """Return `observe(words...)`: the observations of a run with these arguments, made once."""
    held, patch = dict(os.environ), pytest.MonkeyPatch()
    threads = torch.get_num_threads()

    @cache
    def seen(*words: str) -> dict[str, Any]:
        products_of_torch()  # restores what an earlier run changed
        return _observed(tmp_path_factory.mktemp("run"), list(words), patch)

    yield seen
    patch.undo()
    os.environ.clear()
    os.environ.update(held)
    torch.set_num_threads(threads)


def _observed(folder: Path, words: list[str], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("ONE", "TWO"):
        (folder / name).mkdir()
    (folder / "TEXT").write_text("It was the best of times, it was the worst of times. " * 400)
    (folder / "DOCUMENTS.jsonl").write_text('{"text": "It was the best of times."}\n' * 400)
    model_directory(folder / "MODEL", "gpt2")
    shape = json.loads((folder / "MODEL/config.json").read_text())
    (folder / "MODEL/config.json").write_text(json.dumps(shape | {"vocab_size": 2048}))
    _small_tokenizer(folder / "TOKENIZER")
    named = {name: str(folder / name) for name in ("ONE", "TWO", "TEXT", "MODEL", "TOKENIZER", "CACHE", "OTHER")}
    named["DOCUMENTS"] = str(folder / "DOCUMENTS.jsonl")
    given = [named.get(word, _put(word, named)) for word in words]
    config = load_config([*BASE, "--output", str(folder / "out"), *given])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        patch.delenv(name, raising=False)
    facts: dict[str, Any] = {"threads": prepare_process(config)}
    train = trainer.train
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(trainer, "train", lambda *given, **more: _trained(train, given, more, facts, inner, folder))
        train_run(config)
    output = next(path for path in (folder / "OTHER", folder / "out") if path.exists())
    facts |= _left_behind(output) | {"output": output.name, "cache": (folder / "CACHE").exists()}
    return facts


def _put(word: str, named: dict[str, str]) -> str:
    key, equals, value = word.partition("=")
    return f"{key}={named[value]}" if equals and value in named else word


def _small_tokenizer(directory: Path) -> None:
    """Save a tokenizer with one id for each character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate([*map(chr, range(32, 127)), "<end>"])}
    made = Tokenizer(models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(directory)


def _trained(train: Callable[..., Any], given: Any, more: Any, facts: dict[str, Any], patch: Any, folder: Path) -> Any:
    """Run the training loop and record observations of it."""
    job = given[0]
    engine, calls, requests = job.engine, {"block": 0, "head": 0, "mlp": 0}, []
    model = engine._module.model
    count = lambda name: lambda *_: calls.__setitem__(name, calls[name] + 1)  # noqa: E731
    hooks = [model.transformer.h[0].attn.register_forward_pre_hook(count("block"))]
    hooks.append(model.transformer.h[0].mlp.c_fc.register_forward_hook(count("mlp")))
    hooks.append(model.lm_head.register_forward_hook(count("head")))
    preadv = os.preadv

    def counted(descriptor: int, parts: Any, at: int) -> int:
        requests.append(sum(map(len, parts)))
        return preadv(descriptor, parts, at)

    patch.setattr(transfer.os, "preadv", counted)
    state = train(*given, **more)
    patch.undo()
    for hook in hooks:
        hook.remove()
    facts |= {
        "engine": type(engine).__name__,
        "attention": model.config._attn_implementation,
        "weights": sorted((name, tuple(tensor.shape)) for name, tensor in engine.named_master_parameters()),
        "trained": len([name for name, parameter in model.named_parameters() if parameter.requires_grad]),
        "masters": [zlib.crc32(tensor.numpy().tobytes()) for _, tensor in engine.named_master_parameters()],
        "forwards of a block": calls["block"],
        "forwards of the head": calls["head"],
        "forwards of an MLP": calls["mlp"],
        "rows": (len(job.train_rows._rows), len(job.validation_rows._rows)),
        "tokens of the text": len(job.train_rows._tokens),
        "largest request": max(requests, default=0),
        "files": {
            str(path.relative_to(folder).parts[0]) + "/" + path.name: path.stat().st_blocks
            for swap in job.swaps
            for path in swap.iterdir()
            if path.suffix != ".json"
        },
    }
    if facts["engine"] == "TieredEngine":
        facts["kernel"] = type(engine.offloaded.updater._kernel).__name__
        facts["pages"] = len(engine.offloaded.store.pages)
        facts["page buffers"] = len(engine.offloaded.updater.pipeline._slots)
        stream = engine.offloaded.stream
        facts["unit buffers"] = [slot.size for slot in stream._rings.slots] if stream else []
        facts["readers"] = len(getattr(getattr(engine.offloaded._drives.transfers, "_readers", None), "_threads", []))
    return state


def _left_behind(output: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    newest = max((output / "checkpoints").glob("step-*"))
    return {
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "rates": [step["lr"] for step in steps],
        "scales": [step["loss_scale"] for step in steps],
        "tokens": [step["tokens"] for step in steps],
        "evaluated": [evaluation["step"] for evaluation in evaluations],
        "validation loss": evaluations[-1]["validation_loss"],
        "saved": sorted(path.name for path in (output / "checkpoints").glob("step-*")),
        "checkpoint": sorted(path.name for path in newest.iterdir()),
        "run directory": sorted(path.name for path in output.iterdir()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("key", RUNS)
def test_each_key_changes_a_run(key: str, observe: Callable[..., dict[str, Any]]) -> None:
    base, words, fact = RUNS[key]
    without = observe(*base)[fact]
    assert observe(*base, *words)[fact] != without


@pytest.mark.slow
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


def test_the_backend_of_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiered.io selects the class that opens page files.

    tests/offload/test_tiered.py tests DeepSpeed's kernel itself.
    """
    monkeypatch.setattr(build_tiered, "load_async_io", lambda: None)
    monkeypatch.setattr(build_tiered, "async_io_handle", lambda *_, **__: lambda: None)
    names = []
    for io in ("threads", "async_io"):
        config = load_config(["--nvme", "/ssd", "--optimizer", "nvme", f"tiered.io={io}"])
        made = build_tiered._transfers(make_plan(config, SHAPES["gpt2"], machine()).sizes, Node())
        names.append(type(made).__name__)
        made.close()
    assert names == ["ThreadedTransfers", "CheckedTransfers"]


def test_a_models_own_code_runs_where_it_is_allowed(tmp_path: Path) -> None:
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('of its own')\n")
    config = load_config(["--model", str(tmp_path), "--scratch", "model.trust_remote_code=true"])
    with pytest.raises((UserError, ValueError)):
        resolve_model(config.model, seed=0)
    assert (tmp_path / "ran").exists()


def test_force_lets_a_plan_pass_that_does_not_fit() -> None:
    for words, passes in (([], False), (["--force"], True)):
        config = load_config(["--save-every", "0", *words])
        plan = make_plan(config, SHAPES["gpt2-10b"], machine(ram=10**9))
        if passes:
            plan.refuse(force=config.placement.force)
        else:
            with pytest.raises(UserError, match="does not fit"):
                plan.refuse(force=config.placement.force)


@pytest.mark.slow
def test_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launcher, "run_ranks", lambda words, count: 10 * count)
    launcher.start_ranks([], count=1, engine="tiered")
    for words in (["--gpus", "3", "--engine", "deepspeed"], ["--gpus", "2"]):
        place = load_config(words).placement
        with pytest.raises(SystemExit) as ended:
            launcher.start_ranks(words, count=place.gpus, engine=place.engine)
        assert ended.value.code == 10 * place.gpus
