"""Tests of what a start finds: user files in a run's or report's place, pipes, links, and another start."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import TINY, ask, everything
from safetensors.torch import save_file

from offload_trainer.data.run_data import source_sums
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.model.inference import empty_model
from offload_trainer.run import checks, directory, train
from offload_trainer.run.directory import WRITTEN, Log, hold, refuse_strangers, run_directory, stop_at
from offload_trainer.settings import load_config
from offload_trainer.storage.atomic_io import copy_tree, open_to_append
from offload_trainer.storage.tensorfile import TensorFileReader
from offload_trainer.telemetry.metrics import read_metrics
from offload_trainer.telemetry.report import comparison_page, refuse_foreign
from offload_trainer.telemetry.sinks import JsonLines


@contextmanager
def held(folder: Path) -> Iterator[int]:
    with ExitStack() as stack:
        yield hold(stack, folder, Log(loud=False), create=True)


# -- the user's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRITTEN, "model/config.json", "pages", "save"])
def test_a_file_that_a_run_would_replace_is_the_users_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"holds {name.partition('/')[0]}, which a run there would replace"):
        refuse_strangers(tmp_path)
    with held(tmp_path):
        refuse_strangers(tmp_path)  # files next to the mark belong to a run


@pytest.mark.parametrize(
    "make", [lambda p: p.symlink_to("elsewhere"), os.mkfifo, Path.mkdir], ids=["link", "fifo", "dir"]
)
def test_links_and_directories_in_place_of_files_are_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    refuse_strangers(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    refuse_strangers(tmp_path)  # other files are left alone
    make(tmp_path / "log.txt")
    with pytest.raises(UserError, match=r"log\.txt is a link, a directory or no regular file"):
        refuse_strangers(tmp_path)


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
    (first / "MANIFEST.json").write_text('{"format": 2, "step": 2, "identity": {"seed": 7}, "layout": {}, "files": {}}')
    (tmp_path / "config.yaml").write_text(f"# mine\nsave: {{output: {tmp_path}}}\n")
    before, other = everything(tmp_path), "belongs to another run"
    for command, code, told in (
        (["plan"], 0, other),
        (["plan", "--output", "runs/default"], 2, other),
        ([], 2, other),
        (["train", "config.yaml"], 2, "holds config.yaml, which a run there would replace"),
        (["plan", "config.yaml"], 2, "holds config.yaml, which a run there would replace"),
    ):
        done = ask(*command, *TINY)
        assert (done.returncode, told in done.stderr) == (code, True), done.stderr
        assert everything(tmp_path) == before


# -- what is no file ---------------------------------------------------------------------------------------------------


READERS: list[tuple[str, Callable[[Path], Any]]] = [
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


@pytest.mark.slow
@pytest.mark.timeout(300)  # for one that waits for the writer of a pipe
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    for number, (name, read) in enumerate(READERS):
        here = tmp_path / str(number) / "here"
        here.mkdir(parents=True)
        os.mkfifo(here / name)
        with pytest.raises(UserError, match=rf"{name}.*(regular file|a pipe)|(regular file|a pipe).*{name}"):
            read(here / name)


@pytest.mark.slow
def test_a_link_is_not_appended_to(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_tensors_behind_a_link_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    with TensorFileReader(tmp_path / "model.safetensors") as file:
        assert file.read("a").tolist() == [1, 1]


def test_a_generation_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """The model's own is copied to the run directory as it is."""
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": NaN}')
    stop_at(file, (7,))
    file.write_text('{"top_k": 1')
    with pytest.raises(UserError, match=r"generation_config.json cannot be read: it is not JSON: .*. It is a copy"):
        stop_at(file, (7,))


# -- two simultaneous starts: which one gets the directory, and the state that each resumes from ----------------------


def test_a_start_waits_for_one_that_looks_and_not_long_for_a_living_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_start_locks_the_directory_before_it_reads_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_that_ends_in_a_new_directory_meanwhile_is_not_mixed_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that was new is locked late; checkpoints that another run has left there by then are refused."""
    older, newer = tmp_path / "step-00000002", tmp_path / "step-00000004"
    monkeypatch.setattr(checks, "refuse_output", lambda planned: newer)
    planned: Any = SimpleNamespace(output=tmp_path)
    checks.refuse_another(planned, newer)
    for begins in (older, newer):
        with pytest.raises(UserError, match=r"another run has ended in .* repeat the command"):
            checks.refuse_another(planned, begins)
        (tmp_path / "export.json").touch()  # of one without checkpoints
