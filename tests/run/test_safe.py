"""Tests of safe defaults, and of what a start or a save finds: user files in its place, pipes, links, full disks."""

import errno
import fcntl
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import TINY, ask, command, environment, everything, faulty
from safetensors.torch import save_file
from small_architectures import ARCHITECTURES, reference
from synthetic_checkpoints import Small, save

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.data.run_data import source_sums
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.model.inference import empty_model
from offload_trainer.model.loader import resolve_model
from offload_trainer.run import checkpoint, checks, directory, train
from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.run.directory import WRITTEN, Log, hold, refuse_strangers, run_directory, stop_at
from offload_trainer.settings import load_config
from offload_trainer.storage.atomic_io import bytes_below, copy_tree, open_to_append
from offload_trainer.storage.manifest import FORMAT
from offload_trainer.storage.retention import bytes_that_go, complete_checkpoints, find_resume
from offload_trainer.storage.tensorfile import TensorFileReader
from offload_trainer.telemetry.metrics import read_metrics
from offload_trainer.telemetry.report import comparison_page, refuse_foreign
from offload_trainer.telemetry.sinks import JsonLines


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    ARCHITECTURES["llama, untied"].save_pretrained(tmp_path)
    torch.save({"model.norm.weight": Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    section = ModelSection(name=str(tmp_path), attention="eager")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        resolve_model(section, seed=0)
    reference(ARCHITECTURES["llama, untied"]).save_pretrained(tmp_path)
    assert dict(resolve_model(section, seed=0).weights())
    assert not (tmp_path / "exploded").exists()


def test_a_models_own_code_needs_permission(tmp_path: Path) -> None:
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('of its own')\n")
    with pytest.raises(UserError, match="trust_remote_code"):
        resolve_model(ModelSection(name=str(tmp_path), random_init=True), seed=0)
    assert not (tmp_path / "ran").exists()
    with pytest.raises((UserError, ValueError)):
        resolve_model(ModelSection(name=str(tmp_path), random_init=True, trust_remote_code=True), seed=0)
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_no_network_without_a_hub_id(tmp_path: Path) -> None:
    """A run without a hub id connects only to this machine; every connection from Python code is checked."""
    code = (
        "import socket, sys\n"
        "real = socket.socket.connect\n"
        "def connect(self, address):\n"
        "    assert self.family == socket.AF_UNIX or address[0] in ('127.0.0.1', 'localhost', '::1'), address\n"
        "    return real(self, address)\n"
        "socket.socket.connect = connect\n"
        "def refuse(*_, **__): raise AssertionError(f'looked up {_}')\n"
        "socket.getaddrinfo = refuse\n"
        "from offload_trainer.cli import main; raise SystemExit(main(sys.argv[1:]))"
    )
    argv = [command()[0], "-c", code, *map(str, [*TINY, "--steps", 2, "--output", tmp_path / "out"])]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(HF_HUB_OFFLINE="0"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_files_are_made_with_the_user_s_umask(umask: int, drive: Path, tmp_path: Path) -> None:
    here = tmp_path / "drive"
    here.mkdir(mode=0o777)
    before = os.umask(umask)
    try:
        words = ["--nvme", here, *TINY, "--steps", 4, "--ram-fraction", 0, "--save-every", 2]
        words += ["--params", "nvme", "tiered.state_copies=2", f"data.cache={tmp_path / 'cache'}"]
        listed = f"sh~find {here}/offload-trainer -mindepth 1 -printf '%m %p\\n' > {tmp_path}/listed@line=3"
        run = faulty(listed, *words, output=tmp_path / "out")
        assert run.code == 0, run.text
        assert ask("export", tmp_path / "out", tmp_path / "hf").returncode == 0
    finally:
        os.umask(before)
    lines = [line.split() for line in (tmp_path / "listed").read_text().splitlines()]
    seen = {Path(path): int(mode, 8) for mode, path in lines}
    assert {"state", "store.json", "record", "weights"} <= {path.name for path in seen}
    for folder in ("out", "cache", "hf"):
        seen |= {path: path.lstat().st_mode for path in (tmp_path / folder).rglob("*")}
    for path, mode in seen.items():
        trusted = path.is_relative_to(tmp_path / "cache") and path.suffix != ".lock"  # other users may not write these
        whole = 0o777 if path.is_dir() or path.parent.name == "offload-trainer" else 0o644 if trusted else 0o666
        assert stat.S_IMODE(mode) == whole & ~umask, f"{path}: {stat.S_IMODE(mode):o}"


# -- saves -------------------------------------------------------------------------------------------------------------


def test_a_checkpoints_file_is_no_link_to_outside(tmp_path: Path) -> None:
    """A link is refused although size and CRC-32 of the file outside are those of the manifest."""
    saved = save(tmp_path / "run", 1)
    (saved / "engine.json").rename(tmp_path / "outside")
    (saved / "engine.json").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"engine\.json, which lies outside"):
        read_manifest(saved)


@pytest.mark.parametrize("file", ["state.json", "MANIFEST.json", "master.safetensors"])
def test_a_disk_that_fills_up_while_saving(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1)

    def full(path: Path, *_: object) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *_)  # type: ignore[arg-type]

    write = checkpoint.write_text
    monkeypatch.setattr(checkpoint, "write_text", full)
    if file.endswith("safetensors"):
        monkeypatch.setattr(Small, "write", lambda self, directory, group: full(directory / file))
    with pytest.raises(TrainerError, match=r"step-00000002 could not be written: No space left.*untouched"):
        save(tmp_path, 2)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    read_manifest(first)
    monkeypatch.undo()
    assert save(tmp_path, 2) == complete_checkpoints(first.parent)[-1]


def test_only_named_checkpoints_are_pruned_or_resumed(tmp_path: Path) -> None:
    messages: list[str] = []
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9, say=messages.append)
    root = tmp_path / "checkpoints"
    (root / "step-00000001").rename(root / "step-00000001-best")
    (root / "step-00000004").rename(root / "step-00000004.damaged")
    (root / "step-00000002/notes.txt").write_text("the one for the paper")
    (tmp_path / "elsewhere").mkdir()
    (root / "step-00000003").rename(tmp_path / "elsewhere/step-00000003")
    (root / "step-00000003").symlink_to(tmp_path / "elsewhere/step-00000003")
    (root / ".step-x").symlink_to(tmp_path / "elsewhere")
    assert find_resume("auto", output=tmp_path) == root / "step-00000003"
    assert bytes_that_go(root) == 0
    for step in (5, 6):
        save(tmp_path, step, keep=1, say=messages.append)
    assert sorted(path.name for path in root.iterdir()) == [
        *(".step-x", "step-00000001-best", "step-00000002", "step-00000003", "step-00000004.damaged", "step-00000006"),
    ]
    read_manifest(tmp_path / "elsewhere/step-00000003")
    told = "\n".join(messages)
    assert "step-00000002 is not pruned: notes.txt in it is not the checkpoint's" in told
    assert "step-00000003 is not pruned: it is a link" in told
    assert bytes_that_go(root) == bytes_below(root / "step-00000006") > 0


# -- what a start finds ------------------------------------------------------------------------------------------------


@contextmanager
def held(folder: Path) -> Iterator[int]:
    with ExitStack() as stack:
        yield hold(stack, folder, Log(loud=False), create=True)


def test_what_a_run_would_replace_is_the_users_own(tmp_path: Path) -> None:
    for number, name in enumerate((*WRITTEN, "model/config.json", "pages", "save")):
        here = tmp_path / str(number)
        (here / name).parent.mkdir(parents=True)
        (here / name).write_text("mine")
        with pytest.raises(UserError, match=rf"holds {name.partition('/')[0]}, which a run there would replace"):
            refuse_strangers(here)
        with held(here):
            refuse_strangers(here)  # files next to the mark belong to a run
    for number, make in enumerate((lambda path: path.symlink_to("elsewhere"), os.mkfifo, Path.mkdir)):
        here = tmp_path / f"other{number}"
        refuse_strangers(here)
        (here / "checkpoints").mkdir(parents=True)
        (here / "notes.txt").write_text("mine")
        refuse_strangers(here)  # other files are left alone
        make(here / "log.txt")
        with pytest.raises(UserError, match=r"log\.txt is a link, a directory or no regular file"):
            refuse_strangers(here)


@pytest.mark.slow
def test_a_page_replaces_pages_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):
        refuse_foreign(page)
        page.write_text(comparison_page([], [("a",), ("b",)]))
    page.write_text("<!doctype html><title>mine</title>")
    with pytest.raises(UserError, match=r"page\.html: already exists, but is not a report of this program"):
        refuse_foreign(page)
    page.unlink()
    page.symlink_to("other.html")
    (tmp_path / "other.html").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        refuse_foreign(page)


@pytest.mark.slow
def test_starts_and_plans_leave_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run over another run or its configuration is refused; so is `plan` for a named directory, else it is a note."""
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "runs/default/checkpoints/step-00000002"
    first.mkdir(parents=True)
    manifest = {"format": FORMAT, "step": 2, "identity": {"seed": 7}, "layout": {}, "files": {}}
    (first / "MANIFEST.json").write_text(json.dumps(manifest))
    (tmp_path / "config.yaml").write_text(f"# mine\nsave: {{output: {tmp_path}}}\n")
    before, other = everything(tmp_path), "belongs to another run"
    for given, code, told in (
        (["plan"], 0, other),
        (["plan", "--output", "runs/default"], 2, other),
        ([], 2, other),
        (["train", "config.yaml"], 2, "holds config.yaml, which a run there would replace"),
        (["plan", "config.yaml"], 2, "holds config.yaml, which a run there would replace"),
    ):
        done = ask(*given, *TINY)
        assert (done.returncode, told in done.stderr) == (code, True), done.stderr
        assert everything(tmp_path) == before


@pytest.mark.slow
@pytest.mark.timeout(300)  # ends a reader that waits for the writer of a pipe
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    readers: list[tuple[str, Callable[[Path], Any]]] = [
        ("metrics.jsonl", read_metrics),
        ("metrics.jsonl", partial(JsonLines, done=0)),
        ("model.safetensors", TensorFileReader),
        ("a.txt", lambda path: source_sums([path], memory=path.with_name("memory"), say=print)),
        ("a.jinja", lambda path: load_tokenizer("builtin", chat_template=str(path))),
        ("tokenizer.json", lambda path: load_tokenizer(str(path.parent))),
        ("config.json", lambda path: empty_model(path.parent)),
        ("config.json", lambda path: copy_tree(path.parent, path.parent.with_name("copy"))),
        ("log.txt", open_to_append),
    ]
    for number, (name, read) in enumerate(readers):
        here = tmp_path / str(number) / "here"
        here.mkdir(parents=True)
        os.mkfifo(here / name)
        with pytest.raises(UserError, match=rf"{name}.*(regular file|a pipe)|(regular file|a pipe).*{name}"):
            read(here / name)


@pytest.mark.slow
def test_a_link_is_not_appended_to_and_tensors_behind_it_are_read(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "mine.txt"
    target.write_text("mine\n")
    run.mkdir()
    (run / "log.txt").symlink_to(target)
    log = Log(loud=True)
    with pytest.raises(UserError, match=r"log\.txt: a link or a pipe is not written to"):  # noqa: SIM117
        with held(run) as lock, run_directory(run, log, lock=lock):
            log.write("a line")
    with pytest.raises(UserError, match="a link"):
        JsonLines(run / "log.txt", done=0)
    assert target.read_text() == "mine\n"
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    with TensorFileReader(tmp_path / "model.safetensors") as file:
        assert file.read("a").tolist() == [1, 1]


def test_a_generation_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": NaN}')
    stop_at(file, (7,))
    file.write_text('{"top_k": 1')
    with pytest.raises(UserError, match=r"generation_config.json cannot be read: it is not JSON: .*. It is a copy"):
        stop_at(file, (7,))


# -- two simultaneous starts: which one gets the directory, and the state that each resumes from ----------------------


def test_a_start_waits_for_one_that_looks_not_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / ".lock", "w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(directory.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with held(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    waits: list[float] = []
    monkeypatch.setattr(directory.time, "sleep", waits.append)
    with held(tmp_path), pytest.raises(UserError, match="another run is using this directory"), held(tmp_path):
        pass
    assert 0 < len(waits) <= 20
    assert max(waits) < 0.1


def test_a_start_locks_before_it_reads_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run that ends there meanwhile would leave a newer checkpoint than the one that was chosen."""

    def plan(*_: Any, **__: Any) -> None:
        with open(tmp_path / ".lock") as looking, pytest.raises(BlockingIOError):
            fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        raise UserError("planned")

    (tmp_path / ".lock").touch()
    os.environ.update(OMP_NUM_THREADS=str(torch.get_num_threads()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    monkeypatch.setattr(train, "plan_run", plan)
    with pytest.raises(UserError, match=r"^planned$"):
        train.train_run(load_config(["--output", str(tmp_path)]))


def test_a_run_that_ends_there_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that was new is locked late; checkpoints that another run has left there by then are refused."""
    older, newer = tmp_path / "step-00000002", tmp_path / "step-00000004"
    monkeypatch.setattr(checks, "refuse_output", lambda planned: newer)
    planned: Any = SimpleNamespace(output=tmp_path)
    checks.refuse_another(planned, newer)
    with pytest.raises(UserError, match=r"another run has ended in .* repeat the command"):
        checks.refuse_another(planned, older)


def test_a_run_that_is_far_faster_than_its_plan_says_how_to_time_the_machine_again() -> None:
    """Rates that were measured while other programs ran would mislead all later plans."""
    planned = {"forward": 1.0, "backward": 2.0, "update": 0.0, "wait": None}
    for backward, told in ((1.5, False), (3.2, False), (1.2, True)):
        line = train._compared({"forward": 0.5, "backward": backward, "wait": 1.0}, planned)
        assert line.startswith(f"took, times the plan's seconds: forward 0.50, backward {backward / 2:.2f}")
        assert ("`offload-train bench` times this machine again" in line) == told
    assert train._compared({"forward": 1.0}, {}) == ""
