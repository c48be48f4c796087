"""Tests of safe defaults: no pickles, no model code, no network, the user's umask, no paths outside a directory."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from commands import TINY, ask, command, environment, faulty
from small_architectures import ARCHITECTURES, reference
from synthetic_checkpoints import save

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model
from offload_trainer.run.checkpoint import read_manifest


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
    words = [*TINY, "--steps", 2, "--output", tmp_path / "out"]
    argv = [command()[0], "-c", code, *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(HF_HUB_OFFLINE="0"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_files_are_made_with_the_user_s_umask(umask: int, drive: Path, tmp_path: Path) -> None:
    """The run directory, checkpoints, page files, token cache and exports follow the umask."""
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


def test_a_checkpoints_file_is_no_link_to_outside(tmp_path: Path) -> None:
    """A link is refused although size and CRC-32 of the file outside are those of the manifest."""
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / "engine.json").rename(tmp_path / "outside")
    (checkpoint / "engine.json").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"engine\.json, which lies outside"):
        read_manifest(checkpoint)
