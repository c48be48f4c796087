"""Tests of safe defaults: no pickles, no model code, no network, the user's umask, no paths outside a directory."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from commands import TINY, ask, call_and_kill, command, environment
from small_architectures import ARCHITECTURES, reference
from synthetic_checkpoints import save

from offload_trainer.checkpoint import read_manifest
from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


class Bomb:
    """An object whose pickle creates a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    """Weights that exist only as a pickle are refused, and a pickle next to safetensors is ignored."""
    ARCHITECTURES["llama, untied"].save_pretrained(tmp_path)
    torch.save({"model.norm.weight": Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    section = ModelSection(name=str(tmp_path), attention="eager")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        resolve_model(section, seed=0)
    reference(ARCHITECTURES["llama, untied"]).save_pretrained(tmp_path)
    assert dict(resolve_model(section, seed=0).weights())
    assert not (tmp_path / "exploded").exists()


def unpicklers(tree: ast.Module) -> set[str]:
    """Return the pickle readers that a module imports or calls: libraries, torch.load and object collectives."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & PICKLES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)} & PICKLES
        elif isinstance(node, ast.Attribute):
            collective = "object_list" in node.attr or node.attr.endswith("_object")
            if collective or ast.unparse(node) in ("torch.load", "torch.serialization.load"):
                found.add(ast.unparse(node))
    return found


READER = "run/foreign.py"  # the one module that reads pickles, those of imports


def test_only_one_module_reads_pickles() -> None:
    package = Path(__file__).resolve().parents[2] / "offload_trainer"
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path != package / READER:
            assert not unpicklers(tree), path
            continue
        assert unpicklers(tree) == {"pickle", "torch.load"}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
        assert loads
        assert all("weights_only=True" in ast.unparse(call) for call in loads)
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert {name for name in used if name.startswith("pickle.")} == {"pickle.Unpickler"}
    for bad in ("import pickle", "from torch import load, serialization\nimport cloudpickle", "x = torch.load(f)"):
        assert unpicklers(ast.parse(bad)), bad
    assert unpicklers(ast.parse("dist.broadcast_object_list([x])"))


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
    done = subprocess.run(
        [command()[0], "-c", code, *map(str, words)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_files_are_made_with_the_user_s_umask(umask: int, drive: Path, tmp_path: Path) -> None:
    """The run directory, checkpoints, page files, token cache and exports follow the umask."""
    here = tmp_path / "drive"
    here.mkdir(mode=0o777)
    seen: dict[Path, int] = {}
    before = os.umask(umask)
    try:
        words = ["--nvme", here, *TINY, "--steps", 4, "--optimizer", "nvme", "--save-every", 2]
        words += [f"data.cache={tmp_path / 'cache'}"]

        def look(lines: list[str]) -> bool:
            if len(lines) == 3:
                seen.update((path, path.lstat().st_mode) for path in (here / "offload-trainer").rglob("*"))
            return len(lines) == 3

        run = call_and_kill(*words, output=tmp_path / "out", when=look, number=0, hold=3)
        assert run.code == 0, run.text
        assert ask("export", tmp_path / "out", tmp_path / "hf").returncode == 0
    finally:
        os.umask(before)
    assert {"state", "store.json", "progress", "weights"} <= {path.name for path in seen}
    for folder in ("out", "cache", "hf"):
        seen |= {path: path.lstat().st_mode for path in (tmp_path / folder).rglob("*")}
    for path, mode in seen.items():
        trusted = path.is_relative_to(tmp_path / "cache") and path.suffix != ".lock"  # other users may not write these
        whole = 0o777 if stat.S_ISDIR(mode) else 0o644 if trusted else 0o666
        assert stat.S_IMODE(mode) == whole & ~umask, f"{path}: {stat.S_IMODE(mode):o}"


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "model/../../outside", "link"])
def test_paths_of_a_manifest_stay_inside(name: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    outside = checkpoint.parent / "outside"
    outside.write_text("secret")
    (checkpoint / "link").symlink_to(outside)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    target = Path(name) if name.startswith("/") else checkpoint / name
    data = target.read_bytes()
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="lies outside"):
        read_manifest(checkpoint)
