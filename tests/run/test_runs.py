"""Tests of whole runs of the command: engines, placements, kills, ranks, refusals, epochs, conversations."""

import json
import math
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from commands import COMMAND, KILL, TINY, Run, ask, assert_same_run, call, faulty, results, run_script
from filelock import FileLock
from forked_ranks import call_ranks
from safetensors.torch import load_file
from sample_chats import CHATS, lines, turns
from test_telemetry import CONTRACT
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_trainer.cli import main
from offload_trainer.common.errors import UserError
from offload_trainer.data.packing import _PLAIN_TEMPLATE
from offload_trainer.data.rows import RowReader
from offload_trainer.data.tokenfile import TokenFile
from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.run.export import export
from offload_trainer.run.loop import learning_rate
from offload_trainer.settings import load_config
from offload_trainer.storage.manifest import MANIFEST, weights_alone

STEPS = ["--steps", 20, "train.eval_every=0", "--lr", "1e-3"]
_STOCK = ["--engine", "deepspeed"]
PLACEMENTS = {
    "plain": ["--params", "gpu", "--optimizer", "gpu"],  # made by torch alone (plain_engine.py)
    "tiered": ["--engine", "tiered", "--optimizer", "nvme", "--ram-fraction", "0.5"],
    "tiered nvme": ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme", "--engine", "tiered"],
    "zero-2 cpu": [*_STOCK, "--params", "gpu", "--optimizer", "cpu"],
    "zero-3 cpu": [*_STOCK, "--params", "cpu", "--optimizer", "cpu"],
    "zero-3 nvme weights": [*_STOCK, "--params", "nvme", "--optimizer", "cpu"],
    "zero-3 nvme": [*_STOCK, "--params", "nvme", "--optimizer", "nvme"],
}
STOCK_KERNELS = [pytest.mark.slow, pytest.mark.ops]


def words(name: str, drive: Path) -> list:
    # Stock DeepSpeed loses the moments of the last one.
    saves = ["--save-every", 0] if name == "zero-3 nvme" else ["--save-every", 6, "save.keep=9"]
    return ["--nvme", drive, *TINY, *STEPS, *PLACEMENTS[name], *saves]


@pytest.fixture(scope="session")
def finished(shared: Path):
    """Return `finished(name)`: an uninterrupted run of 20 steps, made once for all of pytest's workers."""

    @cache
    def make(name: str) -> Run:
        output = shared / f"finished-{name.replace(' ', '-')}"
        with FileLock(f"{output}.lock"):
            if not (output / "finished").exists():
                drive = output.with_name(f"drive-of-{output.name}")
                drive.mkdir(exist_ok=True)
                by_torch = {"ENGINE": "plain"} if name == "plain" else {}
                run = faulty("none", *words(name, drive), output=output, **by_torch)
                assert not list(drive.glob("offload-trainer/run-*"))
                assert run.code == 0, run.text[-4000:]
                (output / "finished").write_text(run.text)
        return Run(0, (output / "finished").read_text(), output)

    return make


# -- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU plain torch's AdamW is CUDA's, with other last bits")
@pytest.mark.parametrize("name", ["tiered", "tiered nvme"])
def test_the_tiered_engine_has_the_bits_of_plain_torch(name: str, finished) -> None:
    assert_same_run(finished(name), finished("plain"))


@pytest.mark.slow
@pytest.mark.ops
@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name.startswith("zero")])
def test_every_placement_follows_plain_torch(name: str, finished) -> None:
    ours, plain = finished(name), finished("plain")
    assert len(ours.losses) == len(plain.losses) == 20
    for one, other in zip(ours.steps, plain.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)


@pytest.mark.slow
@pytest.mark.ops
def test_nvme_is_really_used(finished) -> None:
    run = finished("zero-3 nvme")
    trained = json.loads((run.output / "plan.json").read_text())
    state = next(item["bytes"] for item in trained["items"] if item["name"] == "masters and moments")
    for step in run.steps[2:]:
        assert step["nvme_read_bytes"] > 0.9 * state
        assert step["nvme_written_bytes"] > 0.9 * state
    without = sorted(step["nvme_read_bytes"] for step in finished("zero-2 cpu").steps)
    assert without[len(without) // 2] < 0.1 * state  # a step may read a library's pages again


# -- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tiered", *(pytest.param(name, marks=STOCK_KERNELS) for name in ("zero-2 cpu", "zero-3 nvme weights"))]
)
def test_kill_9_and_resume_bit_for_bit(name: str, finished, drive: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    saved = output / "checkpoints/step-00000012/MANIFEST.json"
    killed = faulty(f"pause~{saved}+kill@line=16", *words(name, drive), output=output)
    assert (killed.code, len(killed.steps)) == (-KILL, 16), killed.text
    run = call(*words(name, drive), output=output)
    assert re.search("resumed from .*step-00000012", run.text), run.text
    assert "the last run here ended without a message" in run.text
    assert "removed what 1 run(s) left that died" in run.text or name != "tiered"
    assert_same_run(run, finished(name))


@pytest.mark.slow
@pytest.mark.ops
@pytest.mark.parametrize(("before", "after"), [("zero-3 cpu", "tiered"), ("tiered", "zero-2 cpu")])
def test_resume_into_another_placement(before: str, after: str, finished, drive: Path, tmp_path: Path) -> None:
    start = finished(before).output / "checkpoints/step-00000012"
    run = call(*words(after, drive), "--resume", start, output=tmp_path / "out")
    assert [step["step"] for step in run.steps] == list(range(13, 21))
    for ours, other in zip(run.steps, finished(before).steps[12:], strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], abs=1e-2)


@pytest.mark.slow
def test_a_checkpoint_on_demand(finished, drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *TINY, *STEPS, *PLACEMENTS["tiered"], "--save-every", 0]
    output = tmp_path / "out"
    run = faulty(f"sh~touch {output}/save@line=5", *words, output=output)
    assert run.code == 0, run.text
    assert run.losses == finished("tiered").losses
    assert not (output / "save").exists()
    made, last = sorted((output / "checkpoints").iterdir())
    assert (made.name, weights_alone(last)) == ("step-00000005", True)
    assert call(*words[:-1], 20, "--resume", made, output=tmp_path / "again").losses == finished("tiered").losses[5:]


@pytest.mark.slow
@pytest.mark.ops
def test_stock_deepspeed_resumes_after_many_steps_and_leaves_frozen_weights(drive: Path, tmp_path: Path) -> None:
    """Bias correction resumes after step 100, although DeepSpeed's fp32 powers of beta differ from pow() by then."""
    args = ["--nvme", drive, *TINY, "--steps", 130, "train.eval_every=0", "--save-every", 110, "save.keep=9"]
    args += [*PLACEMENTS["zero-3 cpu"], "--seq-len", 8, "--micro-batch", 1, "optim.betas=[0.9, 0.999]"]
    args += ['model.freeze=["wpe"]']
    whole = call(*args, output=tmp_path / "a")
    fixed = [load_file(path / "fixed.safetensors") for path in sorted((tmp_path / "a/checkpoints").iterdir())]
    assert [list(weights) for weights in fixed] == [["transformer.wpe.weight"]] * 2
    assert fixed[0]["transformer.wpe.weight"].equal(fixed[1]["transformer.wpe.weight"])
    assert ask("export", tmp_path / "a", tmp_path / "hf", "--dtype", "fp32").returncode == 0
    held = load_file(tmp_path / "hf/model.safetensors")
    assert held["transformer.wpe.weight"].equal(fixed[0]["transformer.wpe.weight"].float())
    assert len(held) == 28
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000130")
    resumed = call(*args, output=tmp_path / "b")
    assert "step-00000110" in resumed.text
    assert resumed.losses == whole.losses


def test_other_weights_and_damaged_files_are_refused(
    finished, drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older checkpoint is refused while newer ones exist, which a rerun would take, and is resumed without them."""
    output = tmp_path / "out"
    shutil.copytree(finished("plain").output, output)
    checkpoints = {step: output / f"checkpoints/step-{step:08d}" for step in (6, 12, 18, 20)}

    def refused(*more: object, output: Path = output) -> str:
        """Return the message of a command in this process that is refused before it trains."""
        assert main([*map(str, (*words("plain", drive), *more)), "--output", str(output)]) == 2
        return capsys.readouterr().err

    for word, told in (
        ('model.freeze=["wpe"]', "transformer.wpe.weight: it has {'shape': [256, 96], 'trained': True}"),
        ("model.overrides.attn_pdrop=0.2", "config.json's attn_pdrop: it has"),
    ):
        assert told in refused("--resume", checkpoints[12], word, output=tmp_path / "a")
        assert not (tmp_path / "a").exists()
    moments = checkpoints[20] / "exp_avg.safetensors"
    data = bytearray(moments.read_bytes())
    data[-5] ^= 1
    moments.write_bytes(data)
    text = refused("--steps", 25)
    assert "exp_avg.safetensors has CRC-32" in text
    assert "step-00000018" in text
    moments.write_bytes(data[:-100])
    with pytest.raises(UserError, match=f"has {len(data) - 100} bytes, the manifest says {len(data)}"):
        read_manifest(checkpoints[20])
    text = refused("--resume", checkpoints[12])
    assert "holds newer checkpoints (step-00000018, step-00000020): leave --resume out to go on from them" in text
    manifests = {step: (path / MANIFEST).read_bytes() for step, path in checkpoints.items()}
    for path in checkpoints.values():
        (path / MANIFEST).unlink()
    assert "step-00000020 has no MANIFEST.json, so it is damaged" in refused()
    for step in (6, 12):
        (checkpoints[step] / MANIFEST).write_bytes(manifests[step])
    run = call(*words("plain", drive), output=output)
    assert "step-00000012, step 12" in run.text
    assert_same_run(run, finished("plain"))


# -- what else a run must do -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ops
def test_two_ranks_of_stock_deepspeed_train_as_one(drive: Path, tmp_path: Path) -> None:
    """One rank that accumulates resumes their checkpoint. Other dropout masks would change losses by 0.01."""
    both = ["--nvme", drive, *TINY, "--steps", 8, "train.eval_every=0", "--save-every", 4, *PLACEMENTS["zero-3 cpu"]]
    both += [f"model.overrides.{key}_pdrop=0.5" for key in ("attn", "embd", "resid")]
    one = call(*both, "--accumulate", 2, output=tmp_path / "one")
    two = call(*both, "--gpus", 2, output=tmp_path / "two")
    assert len(one.losses) == len(two.losses) == 8
    for single, double in zip(one.steps, two.steps, strict=True):
        assert single["tokens"] == double["tokens"]
        assert single["loss"] == pytest.approx(double["loss"], abs=4e-3)
        assert single["grad_norm"] == pytest.approx(double["grad_norm"], rel=3e-2)
    start = tmp_path / "two/checkpoints/step-00000004"
    resumed = call(*both, "--accumulate", 2, "--resume", start, output=tmp_path / "three")
    for single, double in zip(resumed.steps, two.steps[4:], strict=True):
        assert single["loss"] == pytest.approx(double["loss"], abs=4e-3)


def test_two_ranks_of_the_tiered_engine_have_the_bits_of_one(drive: Path, tmp_path: Path) -> None:
    away = ["--params", "nvme", "placement.gradients=nvme", "tiered.overlap=forward"]
    both = ["--nvme", drive, *TINY, "--ram-fraction", "0.5", "model.overrides.resid_pdrop=0.5", "--steps", 3]
    both += ["--save-every", 3, "tiered.page_size=65536", "train.eval_every=0"]
    one = call(*both, "--accumulate", 2, output=tmp_path / "one")
    two, other = call_ranks(*both, *away, output=tmp_path / "two", count=2)
    assert (two.code, other.code) == (0, 0), two.text
    assert_same_run(two, one)
    assert not any(drive.glob("*/run-*"))


def test_run_directory_is_what_is_documented(finished) -> None:
    run = finished("plain")
    names = "config.yaml plan.json machine.json environment.json log.txt metrics.jsonl report.html"
    assert set(names.split()) <= {path.name for path in run.output.iterdir()}
    assert set(run.steps[0]) == {*CONTRACT.split(), "memory"}
    plan = json.loads((run.output / "plan.json").read_text())
    assert {"fits", "chosen", "tiers", "items", "seconds", "rejected"} <= set(plan)
    optim = load_config([str(run.output / "config.yaml")]).optim
    rates = [learning_rate(number, optim, steps=len(run.steps)) for number in range(len(run.steps))]
    assert [step["lr"] for step in run.steps] == rates
    assert len(set(rates)) > 1


def position(run: Run) -> int:
    newest = sorted((run.output / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "state.json").read_text())["data_position"]


@pytest.mark.slow
def test_epochs_make_the_steps_that_visit_the_rows(tmp_path: Path, drive: Path) -> None:
    """No fewer steps visit all rows, also when the run continues; one that resumes from page files ends at the same."""
    text = "it was the best of times, it was the worst of times, and it was an age of small rows. " * 60
    (tmp_path / "text.txt").write_text(text)
    words = [*TINY, "--micro-batch", "3", "--accumulate", "2", "train.eval_every=0", "--save-every", "2"]
    words += ["--data", tmp_path / "text.txt"]
    run = call(*words, "--epochs", "1.5", output=tmp_path / "epochs")
    rows, steps = int(run.text.split(" rows to train on")[0].rpartition(" ")[2]), len(run.steps)
    assert rows % 6
    assert 6 * (steps - 1) < 1.5 * rows <= 6 * steps == position(run)
    assert f"epochs: 1.5 of {rows} rows, 6 rows a step: {steps} steps" in run.text
    kept = yaml.safe_load((run.output / "config.yaml").read_text())["train"]
    assert (kept["steps"], kept["epochs"]) == (steps, "auto")
    assert_same_run(run, call(*words, "--steps", steps, output=tmp_path / "steps"))
    more = call(*words, "--accumulate", "3", "--epochs", "2", output=run.output)
    assert len(more.steps) == steps + math.ceil((2 * rows - 6 * steps) / 9)
    assert 2 * rows <= position(more) < 2 * rows + 9
    words += ["--epochs", "1", "--nvme", drive, "--ram-fraction", "0", "tiered.state_copies=2", "--save-every", "0"]
    whole = call(*words, output=tmp_path / "whole")
    killed = tmp_path / "killed"
    assert faulty("kill@line=4", *words, output=killed).code == -KILL
    again = call(*words, output=killed)
    assert "resuming from the page files" in again.text
    assert_same_run(again, whole)
    assert "done" in call(*words, output=killed).text


# -- conversations -----------------------------------------------------------------------------------------------------

CHATTING = [*TINY, "--steps", "6", "--save-every", "2", "data.validation=0.2", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    file.write_text(lines({"messages": turns(asked, told[:12])} for asked, told in CHATS * 3))
    return file


@pytest.mark.slow
def test_a_run_resumes_on_another_day_and_machine(chat: Path, drive: Path, tmp_path: Path) -> None:
    """A template prints the date of the first start, in streamed and prepared rows, from all that is resumed."""
    template = tmp_path / "template.jinja"
    template.write_text('{{ strftime_now("%d %b %Y") }}\n' + _PLAIN_TEMPLATE.read_text())
    data = ["--data", f"stream:{chat}", "--validation-data", chat, f"data.chat_template={template}"]
    first, later = "Etc/GMT+12", "Etc/GMT-14"  # 26 hours apart

    def run(name: str, *words: object, zone: str, fault: str = "none", code: int = 0) -> list[list[object]]:
        words = (*CHATTING, *data, f"data.cache={tmp_path / zone[-3:]}", *words)
        done = faulty(fault, *words, output=tmp_path / name, TZ=zone)
        assert done.code == code, done.text[-3000:]
        return results(done.output)["metrics"]

    whole = run("whole", zone=first)
    assert run("other", zone=later) != whole
    saved = tmp_path / "killed/checkpoints/step-00000002/MANIFEST.json"
    run("killed", zone=first, fault=f"pause~{saved}+kill@line=3", code=-KILL)
    assert run("killed", zone=later) == whole
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    pages = ["--nvme", drive, "--save-every", "0", "--ram-fraction", "0", "tiered.state_copies=2"]
    run("pages", *pages, zone=first, fault="kill@line=3", code=-KILL)
    assert run("pages", *pages, zone=later) == whole
    done = run_script(COMMAND, *CHATTING, *data, *pages, "--output", tmp_path / "pages", TZ=first)
    assert "is already at step 6 of 6" in done.stdout + done.stderr
    assert run_script(COMMAND, "export", tmp_path / "pages", tmp_path / "hf").returncode == 0
    assert "strftime_now" in AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_packed_run_trains_each_document_by_itself(kind: str, chat: Path, tmp_path: Path) -> None:
    """The loss of a step over two rows is transformers' for each document alone; a resume packs in the same way."""
    data = chat
    if kind == "text":
        data = tmp_path / "documents.jsonl"
        texts = [" ".join(asked for asked, _ in CHATS[n : n + 1 + n % 2]) for n in range(6)]
        data.write_text(lines({"text": text} for text in texts * 3))
    words = [*TINY, "--dtype", "fp32", "--data", data, "data.validation=0", f"data.cache={tmp_path / 'cache'}"]
    words += ["--seq-len", "96", "--steps", "1", "--lr", "1e-30", "optim.warmup_steps=0"]
    run = call(*words, "data.packing=on", output=tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(run.output / "model")
    tokens = TokenFile.open(next((tmp_path / "cache").glob("*.bin")))
    count = (len(tokens) - 1) // 96
    reader = RowReader(tokens, seq_len=96, rows=range(count), vocabulary=len(tokenizer), shuffle=True)
    batch = next(reader.train_batches(0, micro_batch=2))
    begins = batch.positions == 0 if batch.positions is not None else torch.zeros_like(batch.inputs, dtype=torch.bool)
    if kind == "text":
        begins[:, 1:] = batch.inputs[:, :-1] == tokenizer.eos_token_id
    assert begins[:, 1:].any()
    export(run.output, tmp_path / "hf", dtype="fp32", check=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()

    def loss(begins: torch.Tensor) -> float:
        total, learned = 0.0, 0
        for ids, targets, cuts in zip(batch.inputs, batch.targets, begins, strict=True):
            ends = [0, *(int(n) for n in cuts.nonzero().flatten() if n), len(ids)]
            for first, end in pairwise(ends):
                with torch.no_grad():
                    logits = model(ids[None, first:end]).logits[0]
                total += functional.cross_entropy(logits, targets[first:end], reduction="sum").item()
            learned += int((targets != -100).sum())
        return total / learned

    assert run.losses[0] == pytest.approx(loss(begins), abs=2e-5)
    assert abs(run.losses[0] - loss(torch.zeros_like(begins))) > 2e-4
    again = call(*words, "--steps", "2", "data.packing=off", output=run.output, check=False)
    assert (again.code, "belongs to another run" in again.text) == (2, True), again.text
    assert "documents apart" in again.text


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "ranks"), [("on", 1), ("off", 2)])
def test_tokens_are_those_of_the_conversations(packing: str, ranks: int, chat: Path, tmp_path: Path) -> None:
    """The token count has each conversation's tokens once and no padding, on one rank and on two."""
    words = ["data.validation=0", f"data.packing={packing}", f"data.cache={tmp_path}", "--save-every", "0"]
    ask("prepare", *CHATTING, "--data", chat, *words)
    (sidecar,) = tmp_path.glob("chat-*.bin.json")
    rows = (json.loads(sidecar.read_text())["tokens"] - 1) // 32
    assert rows % 2 == 0
    words += ["--steps", str(rows // 2), "--micro-batch", str(2 // ranks)]
    words += ["--gpus", str(ranks)] if ranks > 1 else []
    run = call(*CHATTING, "--data", chat, *words, output=tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(run.output / "model")
    talks = [json.loads(line)["messages"] for line in chat.read_text().splitlines()]
    found = [len(tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]) for talk in talks]
    assert max(found) <= 32
    assert run.steps[-1]["tokens"] == sum(found) < rows * 32
    per_step = [run.steps[0]["tokens"]]
    per_step += [after["tokens"] - before["tokens"] for before, after in pairwise(run.steps)]
    for step, tokens in zip(run.steps, per_step, strict=True):
        assert step["tokens_per_second"] * step["seconds"] == pytest.approx(tokens)


@pytest.mark.slow
def test_prepare_shows_where_conversations_of_a_packed_row_begin(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(lines({"messages": turns(question, "Да.\n")} for question in ("Что?", "为什么", "لماذا")))
    words = [*CHATTING, "--data", file, f"data.cache={tmp_path}", "data.packing=on", "data.validation=0"]
    printed = ask("prepare", *words, "--seq-len", "256").stderr
    told = [line.strip() for line in printed[printed.index("the first row:") :].splitlines() if line.startswith("  ")]
    first = ["conversation 1 of 3:", r"given    'User: Что?\nAssistant:'", r"learned  ' Да.\n<|endoftext|>'"]
    assert told[:3] == first
    assert [line for line in told if line.startswith("conversation")] == [f"conversation {n} of 3:" for n in (1, 2, 3)]
    assert any("为什么" in line for line in told)
    assert told[-1].startswith("padding ")
    assert "an epoch: 1 rows are 1 steps of 2 (--micro-batch x --accumulate x ranks); --steps 6 is 12 epochs" in printed
