"""Tests of JSON that is read back: it is typed and limited, and anything else is refused in one line."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_checkpoints import save

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import file_bytes, parsed, quoted, read_back
from offload_trainer.machine import rate_cache
from offload_trainer.model.pretrained import checkpoint_files
from offload_trainer.plan.machine import DriveFacts, MachineProfile, Rate, Rates, read_machine
from offload_trainer.run.checkpoint import RunRecord, TrainState, check_resume, read_state, reading
from offload_trainer.storage.manifest import Manifest
from offload_trainer.storage.retention import find_checkpoint


def test_json_of_another_type_and_names_outside_are_refused_in_one_line() -> None:
    for text, wrong in {
        "": "not JSON",
        "[": "not JSON",
        "null": "should be",
        "{}": "step is missing",
        '{"step": 1, "tokens": 0, "data_position": "0"}': "data_position should be a valid integer, and is '0'",
        '{"step": true}': "step should be a valid integer, and is True",
        '{"step": -1}': "step should be greater than or equal to 0, and is -1",
        '{"step": 1e999}': "step should be a valid integer",
        '{"step": NaN}': "step should be a valid integer",
        '{"step": ' + "9" * 5000 + "}": "not JSON: number out of range",
        "[" * 100_000: "not JSON: recursion limit exceeded",
        '{"step": "\\u001b[31m\\u0000"}': r"and is '\\x1b\[31m\\x00'",
    }.items():
        with pytest.raises(ValueError, match=wrong) as refused:
            parsed(text, TrainState)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400
    for name in ("", "/", "..", "../a", "a/../../b", "/etc/passwd", "a\0", "a\nb", "a" * 300, "\x1b[2J"):
        files = {name: {"bytes": 1, "crc32": 1}}
        told = {"format": 2, "step": 1, "identity": {}, "layout": {}, "files": files}
        with pytest.raises(ValueError, match="the name of a file"):
            parsed(json.dumps(told), Manifest)
        assert quoted(name).isprintable()


def test_pipes_and_links_are_refused_without_blocking(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "held").write_text("{}")
    (tmp_path / "link").symlink_to("held")
    (tmp_path / "large").write_bytes(b" " * 1001)
    (tmp_path / "utf16").write_bytes('{"a": 1}'.encode("utf-16"))
    for name, wrong in {
        "directory": "it is a directory",
        "fifo": "not a regular file",
        "link": "it is a link",
        "utf16": "not JSON",
        "nowhere": "it is not there",
    }.items():
        with pytest.raises(UserError, match=rf"{name} cannot be read: .*{wrong}.*\. Mend it"):
            read_back(tmp_path / name, dict[str, Any], fix="Mend it")
    with pytest.raises(ValueError, match="1001 bytes, and at most 1000"):
        file_bytes(tmp_path / "large", most=1000)
    assert read_back(tmp_path / "link", dict[str, Any], fix="", links=True) == {}
    assert len(file_bytes(tmp_path / "large", most=1001)) == 1001


RECORD = RunRecord(identity={}, layout={}, run={"config": {"model": {}, "optim": {}, "train": {}}}, model=Path())


def _edit(checkpoint: Path, change: Callable[[dict[str, Any]], Any], *, name: str = "MANIFEST.json") -> None:
    """Change one file, and update its entry in the manifest."""
    held = json.loads((checkpoint / name).read_text())
    change(held)
    (checkpoint / name).write_text(json.dumps(held))
    if name != "MANIFEST.json":
        data = (checkpoint / name).read_bytes()
        _edit(checkpoint, lambda told: told["files"].update({name: {"bytes": len(data), "crc32": zlib.crc32(data)}}))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda c: ((c / "MANIFEST.json").unlink(), os.mkfifo(c / "MANIFEST.json")), "not a regular file"),
        (lambda c: _edit(c, lambda m: m["files"].update({"model": {"bytes": 1, "crc32": 1}})), "model is not a file"),
        (lambda c: _edit(c, lambda r: r.update(config=[]), name="run.json"), "config should be"),
    ],
    ids=["special file", "directory", "kind"],
)
def test_damaged_checkpoints_are_refused(change: Callable[[Path], object], wrong: str, tmp_path: Path) -> None:
    """A manifest may hold more than is read. soak/damage.py has more kinds of damage, also of the files below."""
    save(tmp_path, 1)
    checkpoint = save(tmp_path, 2)
    _edit(checkpoint, lambda manifest: manifest.update(more=1))
    assert check_resume(checkpoint, RECORD) == []
    assert read_state(checkpoint).step == 2
    change(checkpoint)
    with pytest.raises(UserError, match=wrong) as refused:  # noqa: PT012 - either call may raise
        with reading(find_checkpoint(tmp_path)):
            check_resume(checkpoint, RECORD)
        read_state(checkpoint)
    assert "and the same command resumes from the one before it" in str(refused.value)
    assert str(refused.value).isprintable()


# -- machines --------------------------------------------------------------------------------------------------------

MACHINE = MachineProfile(
    gpu=None,
    gpu_bytes=0,
    ram_bytes=10**9,
    cores=2,
    drives=(),
    output=DriveFacts("out", 10**9, "ext4"),
    rates=Rates(memory=Rate(1e9, "measured", "a triad")),
)


def noted(words: str) -> None:
    """Assert that the machine's rates are not used, for the reason that the only note gives in one line."""
    found = rate_cache.with_cached_rates(MACHINE)
    assert found.rates == Rates()
    (note,) = found.notes
    assert words in note
    assert note.isprintable()


def test_unreadable_rates_are_timed_again_and_those_that_others_may_have_written_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unreadable ones are reported once, and other entries stay."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    cache = rate_cache.cache_file()
    other = {"warp": 9, "more": [1]}  # rates that another version wrote
    held = {rate_cache.rates_key(MACHINE): {"warp": {"value": 1}}, "rates other": other, "drives": {}}
    cache.write_text(json.dumps(held))
    noted("warp is not known to")
    rate_cache.keep_rates(MACHINE)
    again = rate_cache.with_cached_rates(MACHINE)
    assert again.notes == ()
    assert again.rates.memory == MACHINE.rates.memory
    assert json.loads(cache.read_text())["rates other"] == other
    cache.chmod(0o666)
    noted("others may change it (mode 666; chmod go-w), and it is not trusted")
    with pytest.raises(UserError, match="others may change it"):
        rate_cache.refuse_unwritable()
    cache.chmod(0o644)
    rate_cache.refuse_unwritable()
    moved = cache.rename(tmp_path / "moved")
    cache.symlink_to(moved)
    noted("it is a link")
    moved.replace(cache)
    if os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
        noted("it belongs to another user (number 65534), and is not trusted")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"cores": 0}, "cores should be greater than or equal to 1"),
        ({"gpu": "\u001b[2J"}, r"gpu should be text of one line that can be printed, and is '\\x1b"),
        ({"warp": 1}, "warp is not known"),
        ({"rates": {"memory": {"value": 1e-300, "origin": "measured", "source": ""}}}, "rates.memory.value should be"),
        ({"drives": [{}]}, "drives.0.directory is missing"),
    ],
)
def test_a_described_machine_is_validated(change: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    assert read_machine(str(path)) == MACHINE
    path.write_text(json.dumps(asdict(MACHINE) | change))
    with pytest.raises(UserError, match=wrong):
        read_machine(str(path))
    with pytest.raises(UserError, match="it is a directory"):
        read_machine(str(tmp_path))


def test_an_index_of_other_types_is_refused(tmp_path: Path) -> None:
    for index in ("{}", '{"weight_map": {"a": "../b"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match=r"index\.json cannot be read: .*It is no index of shards"):
            checkpoint_files(tmp_path)
