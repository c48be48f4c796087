"""Tests of whole runs on conversations: trained tokens, reports, and a killed run that resumes with the same bits."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commands import COMMAND, KILL, TINY, ask, call, faulty, results, run_script
from sample_chats import CHATS, lines, turns
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_trainer.data.packing import _PLAIN_TEMPLATE
from offload_trainer.data.rows import RowReader
from offload_trainer.data.tokenfile import TokenFile
from offload_trainer.run.export import export

WORDS = [*TINY, "--steps", "6", "--save-every", "2", "data.validation=0.2", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    words = [(asked, told[:12]) for asked, told in CHATS] * 3
    talks = [turns(*talk) for talk in words]
    file.write_text(lines({"messages": talk} for talk in talks))
    return file


@pytest.mark.slow
def test_a_run_resumes_on_another_day_and_machine(chat: Path, drive: Path, tmp_path: Path) -> None:
    """A template prints the date of the first start, in streamed and prepared rows, from all that is resumed."""
    template = tmp_path / "template.jinja"
    template.write_text('{{ strftime_now("%d %b %Y") }}\n' + _PLAIN_TEMPLATE.read_text())
    data = ["--data", f"stream:{chat}", "--validation-data", chat, f"data.chat_template={template}"]
    first, later = "Etc/GMT+12", "Etc/GMT-14"  # 26 hours apart

    def run(name: str, *words: object, zone: str, fault: str = "none", code: int = 0) -> list[list[object]]:
        words = (*WORDS, *data, f"data.cache={tmp_path / zone[-3:]}", *words)
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
    done = run_script(COMMAND, *WORDS, *data, *pages, "--output", tmp_path / "pages", TZ=first)
    assert "done before: 6 steps" in done.stdout + done.stderr
    assert "strftime_now" in AutoTokenizer.from_pretrained(tmp_path / "pages/export").chat_template


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
    ask("prepare", *WORDS, "--data", chat, *words)
    (sidecar,) = tmp_path.glob("chat-*.bin.json")
    rows = (json.loads(sidecar.read_text())["tokens"] - 1) // 32
    assert rows % 2 == 0
    words += ["--steps", str(rows // 2), "--micro-batch", str(2 // ranks)]
    words += ["--gpus", str(ranks)] if ranks > 1 else []
    run = call(*WORDS, "--data", chat, *words, output=tmp_path / "run")
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
    words = [*WORDS, "--data", file, f"data.cache={tmp_path}", "data.packing=on", "data.validation=0"]
    printed = ask("prepare", *words, "--seq-len", "256").stderr
    told = [line.strip() for line in printed[printed.index("the first row:") :].splitlines() if line.startswith("  ")]
    first = ["conversation 1 of 3:", r"given    'User: Что?\nAssistant:'", r"learned  ' Да.\n<|endoftext|>'"]
    assert told[:3] == first
    assert [line for line in told if line.startswith("conversation")] == [f"conversation {n} of 3:" for n in (1, 2, 3)]
    assert any("为什么" in line for line in told)
    assert told[-1].startswith("padding ")
    assert "an epoch: 1 rows are 1 steps of 2 (--micro-batch x --accumulate x ranks); --steps 6 is 12 epochs" in printed
