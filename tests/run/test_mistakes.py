"""Tests of errors: one message each with a remedy, and nothing written; one line in log.txt unless it is a bug."""

import errno
import json
import os
import shlex
import struct
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import TINY, ask, call, everything
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

from offload_trainer.config import PlacementSection
from offload_trainer.errors import Interrupted, Stopped, TrainerError, UserError, exit_code, explain
from offload_trainer.machine import probe
from offload_trainer.run.directory import Log, hold, run_directory
from offload_trainer.storage.atomic_io import write_text

SMALL = {"vocab_size": 2048, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]

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
    "a warm-up longer than the epochs": (
        "TINY --data long.txt --epochs 0.1 optim.warmup_steps=200",
        "more than train.steps=",
    ),
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
    (folder / "chat.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 50)
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
    assert explain(ZeroDivisionError()) is explain(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
    text = logged(ZeroDivisionError("by zero"), tmp_path)
    assert "Traceback" in text
    assert "ZeroDivisionError: by zero" in text


def logged(error: BaseException, folder: Path) -> str:
    """Return the content of log.txt after a run that ended with this error, without times."""
    log = Log(loud=True)
    with ExitStack() as stack:
        lock = hold(stack, folder, log, create=True)
        with pytest.raises(type(error)), run_directory(folder, log, lock=lock):
            raise error
    return "\n".join(line[20:] for line in (folder / "log.txt").read_text().splitlines())


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
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "config.yaml", "a")
    assert str(explain(caught.value)).startswith(f"{tmp_path / 'config.yaml'}: No space left on device")
    assert not list(tmp_path.iterdir())
