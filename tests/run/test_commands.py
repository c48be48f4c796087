"""Tests of commands around a run: recipes, `doctor`, `tune`, `sample`, `chat` and `runs`; and of errors."""

import errno
import io
import json
import os
import shlex
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from commands import TINY, ask, call, everything
from sample_chats import CHATS, lines, turns
from sample_plans import SHAPES, machine, wish
from test_telemetry import a_step
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertConfig, GPT2Config, GPT2LMHeadModel

from offload_trainer import cli
from offload_trainer.common.errors import Interrupted, Stopped, TrainerError, UserError, exit_code, explain
from offload_trainer.config import PlacementSection
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.engine import deepspeed as stock
from offload_trainer.machine import probe
from offload_trainer.model.inference import empty_model, generate, read_as_called
from offload_trainer.plan.machine import DriveFacts, read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.commands import doctor, tune
from offload_trainer.run.commands import generate as commands
from offload_trainer.run.commands.generate import chat, inference_model, sample
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.run.commands.runs import aligned, run_table, runs_in
from offload_trainer.run.directory import Log, hold, run_directory
from offload_trainer.run.export import export, opened
from offload_trainer.settings import load_config
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.locks import open_lock, try_lock
from offload_trainer.telemetry.metrics import EvalRecord

ROOT = Path(__file__).resolve().parents[2]
# Configurations; other tests run copies of the scripts and of the batch file.
NAMES = [recipe.name for recipe in recipes() if recipe.run.startswith(f"offload-train configs/{recipe.file}")]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert all(load_config([str(path)]) != load_config([]) for path in (ROOT / "configs").glob("*.yaml"))
    assert cli.main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line and line[0] not in " `"]
    assert names == sorted([*NAMES, "dpo", "qlora", "slurm"])
    told = " ".join(" ".join(lines).split())
    for path in (ROOT / "configs").iterdir():
        heads = [line for line in path.read_text().splitlines() if line.startswith("# memory: ")]
        assert all(head.removeprefix("# memory: ") in told for head in heads)
    assert cli.main(["ls", "--json"]) == 0
    held = {recipe["name"]: recipe for recipe in json.loads(capsys.readouterr().out)}
    assert held["tiny"]["run"] == "offload-train configs/tiny.yaml --nvme /mnt/ssd"
    assert held["tiny"]["memory"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_recipe_under_its_own_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for words, path in (
        ([name], f"{name}.yaml"),
        ([f"{name}.yaml", "a b.yaml"], "a b.yaml"),
        ([name, "mine"], f"mine/{name}.yaml"),
    ):
        assert cli.main(["cp", *words]) == 0
        printed = capsys.readouterr().out
        text = (tmp_path / path).read_text()
        assert load_config([path]) == load_config([str(ROOT / f"configs/{name}.yaml")])
        assert "configs/" not in text + printed
        shell = f"'{path}'" if " " in path else path
        assert printed.startswith(f"{path}: written; offload-train {shell} ")
        assert f"# run:    offload-train {shell} " in text


@pytest.mark.parametrize("there", ["a file", "a link to nothing"])
def test_a_copy_overwrites_nothing(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text("mine") if there == "a file" else path.symlink_to("nowhere")
    assert cli.main(["cp", "tiny"]) == 2
    assert "tiny.yaml: already exists" in capsys.readouterr().err
    assert (path.read_text() == "mine") if there == "a file" else not (tmp_path / "nowhere").exists()


# -- doctor: each state of each check, with given facts of a machine ---------------------------------------------------


@pytest.mark.slow
def test_this_machine_passes_and_a_failure_ends_with_1(drive: Path, tmp_path: Path) -> None:
    done = ask("doctor", "--json", "--nvme", drive, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert {"torch", "memory", "GPU", f"drive {drive}"} <= set(checks)
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
    done = ask("doctor", "--nvme", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "failure  directories" in done.stdout
    assert "nowhere: no such directory" in done.stdout


def test_drives() -> None:
    for state, facts in (
        ("ok", {"disk": "nvme0n1"}), ("failure", {"filesystem": "tmpfs"}), ("warning", {"network": True}),
        ("warning", {"rotational": True}), ("warning", {"direct": False}), ("warning", {"throttle": "io.max 1:2"}),
    ):  # fmt: skip
        checks = list(doctor._drive(DriveFacts("/ssd", 10**12, **{"filesystem": "ext4", **facts})))
        assert (checks[0].state, checks[-1].state) == ("ok", state)
        assert state == "ok" or checks[-1].fix


def test_the_compilers_message_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the limit of locked memory, which async_io has with a drive."""
    broken = Mock(side_effect=TrainerError("could not be built: fatal error: omp.h: No such file"))
    monkeypatch.setattr(stock, "load_kernel", broken)
    for words, limit, warned in (([], 1, False), (["--nvme", "."], 1, True), (["--nvme", "."], None, False)):
        here = replace(read_machine("v100-32gb"), memlock_bytes=limit)
        monkeypatch.setattr(doctor, "probe_machine", lambda *_, found=here, **__: found)
        checks = {check.name: check for check in doctor.examine(load_config(["--engine", "deepspeed", *words]))}
        assert (checks["kernel cpu_adam"].state, "omp.h" in checks["kernel cpu_adam"].found) == ("failure", True)
        assert ("locked memory" in checks) == warned


# -- tune: its trials and the settings that it keeps, with given outcomes and one real trial ---------------------------


def test_each_group_starts_from_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain within the noise is none, and if the plan itself fails, there is nothing to tune."""
    tried: list[str] = []

    def tuned(*groups: tuple[str, ...], **seconds: float | None) -> list[tune.Trial]:
        """Tune with trials that take these seconds (None: fail), by their words, of which `plan` stands for none."""

        def pretend(_: object, added: str, *, steps: int, say: object) -> tune.Trial:
            tried.append(added)
            taken = seconds[added.replace(" ", "_") or "plan"]
            trial = tune.Trial(added, [{"step": taken, "update": taken}] * steps)
            return replace(trial, failed="killed by signal 9") if taken is None else trial

        monkeypatch.setattr(tune, "run_trial", pretend)
        return tune.tune([], groups, phase="step", steps=4, say=lambda line: None)

    trials = tuned(("a", "b"), ("c", "d"), plan=2.0, a=1.5, b=1.8, a_c=None, a_d=1.2)
    assert tried == ["", "a", "b", "a c", "a d"]
    assert (trials[0].words, len(trials)) == ("a d", 5)
    assert [trial.failed for trial in trials if trial.words == "a c"] == ["killed by signal 9"]
    assert tuned(("a",), plan=2.0, a=1.97)[0].words == ""
    with pytest.raises(TrainerError, match="killed by signal 9"):
        tuned(("a",), plan=None)
    # the first two steps do not count
    assert tune.Trial("", [{"step": seconds} for seconds in (9.0, 9.0, 1.0, 3.0, 2.0)]).seconds == 2.0


def test_only_what_matters_to_the_placement_is_tried(tmp_path: Path) -> None:
    here = replace(machine(), drives=(replace(machine().drives[0], directory=str(tmp_path)),))
    for words, keys in (
        (["--ram-fraction", "0", "tiered.overlap=off"], {"tiered.page_size", "tiered.page_buffers"}),
        (["--ram-fraction", "1"], set()),
        (["--params", "cpu", "--ram-fraction", "1"], {"tiered.weight_buffers"}),
        (["--engine", "deepspeed", "--optimizer", "cpu"], {"deepspeed.reduce_bucket_size"}),
    ):
        plan = make_plan(load_config(["--nvme", str(tmp_path), "--save-every", "0", *words]), SHAPES["gpt2"], here)
        tried = [added for group in tune.tunable(plan) for added in group]
        assert {added.partition("=")[0] for added in tried} == keys
        assert tune.steered_phase(plan) == ("update" if "tiered.page_size" in keys else "step")
        for added in tried:
            wish(*words, *added.split())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A plan with nothing to vary makes one real trial, and the file is a valid configuration."""
    best = tmp_path / "best.yaml"
    words = [*TINY, "--engine", "tiered", "--ram-fraction", "1", "--output", tmp_path / "run"]
    done = ask("tune", "--json", "--write", best, "--trial-steps", "3", *words)
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)
    assert len(trial["steps"]) == 3
    assert trial["seconds"] > 0
    assert load_config([str(best)]).placement.ram_fraction == 1
    assert not (tmp_path / "run").exists()


TOKENS = 12
LIKELIEST = {"tokens": TOKENS, "temperature": 0, "seed": 0}
TRAINED = [*TINY, "--steps", "2", "--lr", "1e-2", "data.validation=0.2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with tied embeddings, trained on conversations for two steps."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "chat.jsonl").write_text(lines({"messages": turns(asked, told[:12])} for asked, told in CHATS * 3))
    return call(*TRAINED, "--data", folder / "chat.jsonl", output=folder / "run").output


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    directory = run.parent / "exported"
    export(run, directory, dtype="fp32", check=False)
    return directory


def likeliest(directory: Path, ids: list[int]) -> list[int]:
    """Return the greedy continuation by transformers' module, token by token without a cache."""
    model, size = AutoModelForCausalLM.from_pretrained(directory).eval(), len(AutoTokenizer.from_pretrained(directory))
    end, found = model.generation_config.eos_token_id, list(ids)
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([found])).logits[0, -1, :size]
        found.append(int(logits.argmax()))
        if found[-1] == end:
            break
    return found[len(ids) :]


@contextmanager
def read_from_disk(streams: bool) -> Iterator[None]:
    """Within this context no RAM is free if `streams`, so that weights are read from the disk for each token."""
    with pytest.MonkeyPatch.context() as patch:
        if streams:
            patch.setattr("offload_trainer.run.commands.generate.available_ram_bytes", lambda: 0)
        yield


def test_text_is_that_of_transformers_wherever_the_weights_are(run: Path, exported: Path, tmp_path: Path) -> None:
    """The same run without checkpoints leaves the same weights, without moments."""
    last = call(*TRAINED, "--save-every", "0", "--data", run.parent / "chat.jsonl", output=tmp_path / "last").output
    tokenizer = load_tokenizer(str(exported))
    ids = tokenizer("What follows one", add_special_tokens=False)["input_ids"]
    expected = likeliest(exported, ids)
    messages: list[str] = []
    places = [(path, streams) for path in (run, exported, last) for streams in (False, True)]
    for path, streams in places:
        with read_from_disk(streams), inference_model(path, say=messages.append) as found:
            assert generate(*found, ids, tokens=TOKENS, temperature=0, seed=0) == expected
    assert sum("read from the disk for each token" in line for line in messages) == 3
    texts = set[str]()
    for path, streams in places:
        with read_from_disk(streams):
            for seed in (1, 2):
                texts.add(sample(path, "What", tokens=TOKENS, temperature=0.9, seed=seed, say=messages.append))
    assert len(texts) == 2
    assert all(text.startswith("What") for text in texts)
    assert sample(run, "", tokens=2, temperature=0, seed=0, say=messages.append)


def test_a_continuation_ends_with_a_token_that_the_model_names(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    whole = likeliest(exported, [5, 6, 7])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, whole[1]]}))
    with inference_model(tmp_path, say=print) as found:
        ended = generate(*found, [5, 6, 7], tokens=TOKENS, temperature=0, seed=0)
    assert ended == whole[: whole.index(whole[1]) + 1]
    assert len(ended) < len(whole)


def test_a_prompt_begins_as_a_text_does(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample continues transformers' ids of its prompt without an end; a template prints its own beginning."""
    asked: list[list[int]] = []
    monkeypatch.setattr(commands, "generate", lambda model, tokenizer, ids, **_: asked.append(ids) or [70])
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    marks = {"special_tokens": [("<|endoftext|>", 0), ("!", tokenizer.convert_tokens_to_ids("!"))]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A !", **marks)
    tokenizer.save_pretrained(tmp_path)
    for prompt in ("What", "<|endoftext|>What", ""):
        sample(tmp_path, prompt, **LIKELIEST, say=print)
    chat(tmp_path, ["What"], **LIKELIEST, say=print)
    whole = AutoTokenizer.from_pretrained(tmp_path)("What")["input_ids"]
    assert asked[:3] == [whole[:-1], whole[:-1], [0]]
    assert asked[3][0] == 0 != asked[3][1]


def test_a_sample_without_text_says_why(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a chat without a template is refused."""
    monkeypatch.setattr(commands, "generate", lambda *_, **__: [0])
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template, so it was not trained on conversations: use `offload-train"):
        chat(tmp_path, ["a"], **LIKELIEST, say=print)
    for path, hint in ((exported, "; it has a chat template: `offload-train chat` applies it"), (tmp_path, "")):
        messages: list[str] = []
        assert sample(path, "What", **LIKELIEST, say=messages.append) == "What"
        assert messages[1:] == [f"the model ended the text at once, with '<|endoftext|>' alone{hint}"]


@pytest.mark.slow
def test_an_export_is_read_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """It has separate experts, bf16, several files, and a router correction, which is a buffer; logits are in fp32."""
    config = AutoConfig.for_model(
        "glm4_moe",
        **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "vocab_size": 2048, "head_dim": 8, "tie_word_embeddings": True},
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0, 1, len(buffer)))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    load_tokenizer("builtin").save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    given = torch.arange(40, 60)[None]
    with torch.no_grad():
        expected = whole(given).logits
        for streams in (False, True):
            with read_from_disk(streams), inference_model(tmp_path, say=lambda line: None) as (read, _):
                assert torch.equal(read(given).logits, expected)


@pytest.mark.slow
def test_one_modules_weights_are_in_memory_at_a_time(run: Path) -> None:
    """A model whose weights were not read generates no text."""
    with opened(run) as source:
        model = empty_model(source.model)
        with pytest.raises(TrainerError, match="the model's logits are not numbers"):
            generate(model, load_tokenizer(str(run / "model")), [5], tokens=1, temperature=0, seed=0)
        asked, sizes = list[str](), list[int]()

        def read(name: str) -> torch.Tensor:
            asked.append(name)
            sizes.append(held())
            return source.read(name)

        def held() -> int:
            return sum(p.untyped_storage().nbytes() for p in model.parameters() if p.untyped_storage().nbytes() > 4)

        read_as_called(model, source.shapes, read)
        generate(model, load_tokenizer(str(source.model)), [5, 6, 7], tokens=3, temperature=0, seed=0)
        assert set(asked) == set(source.shapes)
        assert asked.count("transformer.wte.weight") == 6  # three tokens, each through the embedding and the head
        assert held() == 0
        assert max(sizes) <= max(4 * shape[0] * shape[-1] for shape in source.shapes.values())


@pytest.mark.slow
def test_answers_follow_the_whole_conversation(run: Path, exported: Path) -> None:
    tokenizer = load_tokenizer(str(exported))
    answers = chat(run, ["What follows one?\n", "\n", "And two?\n"], **LIKELIEST, say=print)
    messages = []
    for asked, answer in zip(("What follows one?", "And two?"), answers, strict=True):
        messages.append({"role": "user", "content": asked})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert answer == tokenizer.decode(likeliest(exported, ids), skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.slow
def test_the_commands(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["sample", str(run), "--prompt", "What", "--tokens", "3", "--temperature", "0", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("What")
    monkeypatch.setattr(sys, "stdin", io.StringIO("What follows one?\n"))
    assert cli.main(["chat", str(run), "--tokens", "3", "--temperature", "0"]) == 0
    answer = capsys.readouterr().out
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for end in (EOFError(), Stopped(signal.SIGINT)):
        monkeypatch.setattr("builtins.input", Mock(side_effect=["What follows one?", end]))
        assert cli.main(["chat", str(run), "--tokens", "3", "--temperature", "0"]) == 0
        told = capsys.readouterr()
        assert told.out == answer
        assert "earlier ones are remembered; Ctrl-D ends" in told.err
    assert cli.main(["runs", str(run.parent)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("done")
    assert cli.main(["runs", str(run), "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["steps"], printed["saved"], printed["state"]) == (2, 2, 2, "done")


@pytest.mark.slow
def test_runs_say_whether_they_can_resume(tmp_path: Path) -> None:
    evaluation = EvalRecord(step=3, validation_loss=2.25, perplexity=None).to_json() + "\n"
    weights, ended = ({f"checkpoints/step-0000000{step}/MANIFEST.json": "{}"} for step in (2, 9))
    saved = weights | {"checkpoints/step-00000002/engine.json": "{}"}
    # Files of runs that have made three of nine steps, in a folder that has only the directory `nothing`; what is said.
    runs: list[tuple[dict[str, str], str]] = [
        (saved, "resumes from step 2"),
        ({}, "no checkpoint: starts from step 0"),
        (saved | {".lock": ""}, "is running"),
        (saved | {"config.yaml": "["}, "resumes from step 2"),
        ({"pages": "{folder}/nothing\n{folder}/gone\n"}, "resumes from its page files"),
        ({"pages": "{folder}/gone\n"}, "no checkpoint: starts from step 0"),
        (weights, "holds the weights of step 2 alone, cannot resume"),
        (saved | ended | {"evaluations.jsonl": evaluation}, "done"),
    ]
    (tmp_path / "nothing").mkdir()
    always = {"config.yaml": "train:\n  steps: 9\n", "metrics.jsonl": a_step(3, loss=2.5).to_json() + "\n"}
    for number, (files, _) in enumerate(runs):
        for name, text in (always | files).items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{folder}", str(tmp_path)))
    with open(open_lock(tmp_path / "2/.lock")) as lock:
        try_lock(lock.fileno())
        found = runs_in(tmp_path)
    assert [run["state"] for run in found] == [state for _, state in runs]
    assert [found[number]["validation_loss"] for number in (0, 7)] == [None, 2.25]
    head, first, *rest = aligned(run_table(found)).splitlines()
    assert head.split() == ["run", "step", "loss", "validation"]
    assert first.split()[1:] == ["3/9", "2.5000", "-", "resumes", "from", "step", "2"]
    assert "3/?" in rest[2]
    assert runs_in(tmp_path / "7") == found[-1:]
    with pytest.raises(UserError, match="holds no run"):
        runs_in(tmp_path / "nothing")


# -- errors: one message each with a remedy, and nothing written; one line in log.txt unless it is a bug ---------------

SMALL = {"vocab_size": 2048, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}

# name of the mistake -> the command, in the folder that `places` makes; a part of the message
MISTAKES: dict[str, tuple[str, str]] = {
    "text where a configuration is expected": ("little.txt", "--data little.txt"),
    "text without its flag": ("--lr 1e-3 little.txt", "--data little.txt"),
    "a model without its flag": ("whole", "--model whole"),
    "a configuration behind flags": ("--nvme drive torn.yaml", "a configuration file is the first word"),
    "a pattern that nothing matches": ("--data 'none*.txt'", "none*.txt"),
    "no such model": ("--model nowhere", "nowhere"),
    "a folder that is no model": ("--model empty", "empty"),
    "a model without weights": ("--model shape", "add --scratch"),
    "a model's configuration that is torn": ("--model torn", "config.json"),
    "weights that are cut short": ("--model short", "model.safetensors"),
    "a model that is not causal": ("--model bert --scratch", "bert"),
    "another shape without scratch": ("--model whole model.overrides.n_layer=3", "add --scratch"),
    "everything frozen": ("--model gpt2-mini model.freeze=[.]", "leaves nothing to train"),
    "a plan with all frozen": ("plan --machine h200 --model gpt2-mini model.freeze=[.]", "leaves nothing to train"),
    "no such data": ("--data nowhere.txt", "nowhere.txt"),
    "data that is empty": ("--data empty.txt", "empty.txt"),
    "too little text for a row": ("--data little.txt --seq-len 64", "row"),
    "what is not text": ("--data picture.png", "picture.png"),
    "ids without their tokenizer": ("--data large.bin", "name it with --tokenizer"),
    "no such template": ("--data chat.jsonl data.chat_template=nowhere.jinja", "nowhere.jinja"),
    "no such tokenizer": ("--tokenizer nowhere", "nowhere"),
    "no such validation text": ("--validation-data nowhere.txt", "nowhere.txt"),
    "no such drive": ("--nvme nowhere", "nowhere"),
    "a drive that is a file": ("--nvme little.txt", "little.txt"),
    "a run directory that is a file": ("--output little.txt", "little.txt"),
    "a model that does not fit": (
        "--model gpt2-10b model.overrides.n_embd=8192 --nvme drive --ram-fraction 0 --save-every 0",
        "/drive (--force runs it anyway)",
    ),
    "too long a warm-up": ("TINY --data long.txt --epochs 0.1 optim.warmup_steps=200", "more than train.steps="),
    "fp16 of stock DeepSpeed without a GPU": ("--dtype fp16 --engine deepspeed", "fp16 without a GPU"),
    "no such checkpoint": ("--resume nowhere", "nowhere"),
    "another text where a run was": ("--data long.txt --output run TINY", "the text of --data is"),
    "an export of nothing": ("export nowhere out --dtype bf16", "nowhere"),
    "a sample of nothing": ("sample nowhere", "nowhere: no such directory"),
    "a command without its argument": ("sample", "arguments are required: SOURCE; `offload-train sample --help`"),
    "a sample of no tokens": ("sample run --tokens 0", "--tokens: 0: it should be a whole number, at least 1"),
    "runs of nothing": ("runs nowhere", "nowhere: no such directory"),
    "a plan with what is not text": ("plan --data picture.png", "picture.png"),
    "a machine that is no JSON": ("plan --machine torn.yaml", "torn.yaml"),
    "no such recipe": ("cp tinny", "did you mean tiny?"),
    "settings over a file": ("tune --write torn.yaml", "torn.yaml: already exists"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the files of the mistakes, and one finished run."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("drive", "empty"):
        (folder / name).mkdir()
    (folder / "torn.yaml").write_text("optim: [")
    (folder / "empty.txt").touch()
    (folder / "little.txt").write_text("too little")
    (folder / "long.txt").write_text("another text, long enough for some rows. " * 400)
    (folder / "chat.jsonl").write_text(lines([{"messages": turns("Why?", "So.")}] * 50))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9)
    (folder / "large.bin").write_bytes(struct.pack("<9I", *range(70000, 70009)) * 99)
    GPT2Config(**SMALL, architectures=["GPT2LMHeadModel"]).save_pretrained(folder / "shape")
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder / "bert")
    for name in ("whole", "short", "torn"):
        GPT2LMHeadModel(GPT2Config(**SMALL)).save_pretrained(folder / name)
    (folder / "torn" / "config.json").write_text('{"model_type": "gp')
    os.truncate(folder / "short" / "model.safetensors", 5000)
    call(*TINY, "--steps", "2", "--nvme", folder / "drive", output=folder / "run")
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_one_message_and_nothing_written(name: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("without a GPU") and torch.cuda.is_available():
        pytest.skip("a GPU computes in fp16")
    words, expected = MISTAKES[name]
    command = [part for word in shlex.split(words) for part in (TINY if word == "TINY" else [word])]
    monkeypatch.chdir(places)
    before = everything(places)
    done = ask(*command)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    printed = [line for line in done.stderr.splitlines() if line.startswith("offload-train: ")]
    assert len(printed) == 1, done.stderr
    assert everything(places) == before


@pytest.mark.parametrize(
    ("error", "code", "expected_text"),
    [
        (TrainerError("a drive failed"), 1, "a drive failed"),
        (UserError("no such key"), 2, "no such key"),
        (Interrupted("stopped after step 3", code=143), 143, "stopped after step 3"),
        (Stopped(1), 129, "stopped by SIGHUP, with nothing to save"),
        (Stopped(3, unsaved="stopped at once"), 131, "SIGQUIT: stopped at once; the same command resumes"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/a"), 1, "/out/a: No space left on device. Free space"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/out/a"), 1, "/out/a: Permission denied"),
    ],
)
def test_ends_in_one_line(error: BaseException, code: int, expected_text: str, tmp_path: Path) -> None:
    """The line is on the screen and last in log.txt."""
    assert exit_code(error) == code
    assert str(explain(error)).startswith(expected_text)
    assert logged(error, tmp_path).startswith(f"ended: {expected_text}")


def test_a_bug_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no such file", "x"), ZeroDivisionError("by zero")):
        assert exit_code(error) == 1
        assert explain(error) is None
        text = logged(error, tmp_path)
        assert "Traceback" in text
        assert f"{type(error).__name__}: {error}" in text


def logged(error: BaseException, output: Path) -> str:
    log = Log(loud=True)
    with ExitStack() as stack:
        lock = hold(stack, output, log, create=True)
        with pytest.raises(type(error)), run_directory(output, log, lock=lock):
            raise error
    return "\n".join(line[20:] for line in (output / "log.txt").read_text().splitlines())


def test_a_read_only_filesystem_is_called_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a directory for page files that is another user's."""
    here, real = tmp_path / "offload-trainer", os.access
    here.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here and real(path, mode))
    with pytest.raises(UserError, match="offload-trainer: not writable for this user"):
        probe.probe_machine(PlacementSection(nvme=(str(tmp_path),)), output=str(tmp_path / "out"))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UserError, match="is mounted read-only; name another directory"):
        probe.probe_machine(PlacementSection(), output="out")


def test_a_write_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "config.yaml", "a")
    assert str(explain(caught.value)).startswith(f"{tmp_path / 'config.yaml'}: No space left on device")
    assert not list(tmp_path.iterdir())
