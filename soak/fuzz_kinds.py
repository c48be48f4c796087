"""The kinds of files that fuzz_files.py changes: how to create valid ones, and the code that reads them in a run."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from offload_trainer.checkpoint import (
    Checkpoints,
    RunRecord,
    TrainState,
    check_resume,
    find_resume,
    read_state,
    reading,
)
from offload_trainer.data.rows import DataState, RowReader, split_rows
from offload_trainer.data.tokenfile import TokenFile, TokenWriter
from offload_trainer.engine.plain import PlainEngine
from offload_trainer.export.sources import finite_weights, opened
from offload_trainer.machine import rate_cache
from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import resolve_model, save_model_config
from offload_trainer.model.presets import preset_shape
from offload_trainer.model.pretrained import pretrained_weights
from offload_trainer.offloading.pages.manifest import ManifestWriter
from offload_trainer.plan.machine import DriveFacts, DriveRates, MachineProfile, Rate, Rates, read_machine
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.tiered.layout import pages_of, units_of
from offload_trainer.plan.tiered.state_formats import state_format
from offload_trainer.plan.tiers import RAM
from offload_trainer.settings import load_config

_TINY = [
    *("model.overrides.n_layer=1", "model.overrides.n_embd=16", "model.overrides.vocab_size=64"),
    *("model.overrides.n_head=2", "--seq-len", "16", "--micro-batch", "2"),
]


@dataclass
class Kind:
    """Valid files in a separate folder, the `files` among them that are mutated, and a function that reads them as a
    run does.
    """

    name: str
    folder: Path
    files: list[str]
    use: Callable[[], None]
    # updates other files that describe the changed one
    synchronize: Callable[[str, random.Random], None] = lambda name, draw: None
    beside: tuple[str, ...] = ()  # files that change together with those
    links: bool = False  # links are followed, since these files belong to the user

    def __post_init__(self) -> None:
        self._whole = {path: path.read_bytes() for path in (self.folder / name for name in (*self.files, *self.beside))}
        self._moved = 0

    def restore(self) -> None:
        """Restore the original files."""
        for path, data in self._whole.items():
            if path.is_dir() and not path.is_symlink():
                self._moved += 1
                path.rename(self.folder.parent / f"moved-{self._moved}")
            elif path.is_symlink() or not path.is_file() or path.stat().st_size != len(data):
                path.unlink(missing_ok=True)
            path.write_bytes(data)
            path.chmod(0o644)


def _checkpoint(name: str, files: list[str]) -> Callable[[Path], Kind]:
    """Return a function that creates the second checkpoint of a run with a one-layer model."""

    def make(folder: Path) -> Kind:
        config = load_config(_TINY)
        source = resolve_model(config.model, seed=0)
        engine = PlainEngine(source, config.model, config.optim)
        (folder / "model").mkdir(parents=True)
        save_model_config(source, folder / "model", dtype=torch.bfloat16, end_of_text=0)
        layout = {w.name: {"shape": list(w.shape), "trained": w.trainable} for w in source.shape.weights}
        packages = {"torch": torch.__version__, "bitsandbytes": None}
        run = {"config": config.model_dump(mode="json"), "random": True, "environment": {"packages": packages}}
        identity = {"seed": 0, "text": None, "tokens": 99}
        record = RunRecord(identity=identity, layout=layout, run=run, model=folder / "model")
        root = folder / "checkpoints"
        with Checkpoints(root, record=record, keep=2, need_bytes=10, say=lambda _: None) as checkpoints:
            for step in (1, 2):
                checkpoints.save(engine, TrainState(step=step, tokens=64 * step, data_position=4 * step))
        with TokenWriter(folder / "t.bin", tokenizer=None, vocabulary=64) as writer:
            writer.write([i % 64 for i in range(400)])
        tokens = TokenFile.open(folder / "t.bin")
        return Kind(
            name,
            folder,
            [f"{_STEP}/{file}" for file in files],
            use=lambda: _resume_and_export(folder, record, engine, tokens),
            synchronize=lambda name, draw: _say_in_manifest(folder / name, draw),
            beside=(f"{_STEP}/MANIFEST.json",),
        )

    return make


def _resume_and_export(folder: Path, record: RunRecord, engine: PlainEngine, tokens: TokenFile) -> None:
    found = find_resume("auto", output=folder)
    assert found is not None, "started anew"
    with reading(found):
        check_resume(found, record)
    engine.load(found)
    state = read_state(found)
    rows = split_rows(len(tokens), seq_len=16, validation=0.0).train
    reader = RowReader(tokens, rows=rows, seq_len=16, vocabulary=64, seed=0, shuffle=True)
    next(iter(reader.train_batches(DataState(state.data_position), micro_batch=2)))
    _export(folder)


def _export(path: Path) -> None:
    with opened(path, mixed=True) as source:
        source.card("fp16")
        for _ in finite_weights(source):
            pass


def _say_in_manifest(path: Path, draw: random.Random) -> None:
    """Update the manifest for the changed file in most cases, since otherwise the checksum would reject
    every change.
    """
    if path.name == "MANIFEST.json" or not os.access(path.parent, os.X_OK):
        return
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24 or draw.random() < 0.1:
        return
    if not path.stat().st_mode & 0o400 or not path.parent.stat().st_mode & 0o100:
        return
    data, manifest = path.read_bytes(), path.parent / "MANIFEST.json"
    told = json.loads(manifest.read_bytes())
    told["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest.write_text(json.dumps(told))


def _store(folder: Path) -> Kind:
    """Create page files of a run that died."""
    config = load_config(_TINY)
    source = resolve_model(config.model, seed=0)
    lease, model = folder / "run-0000dead", folder / "model"
    lease.mkdir(parents=True)
    model.mkdir()
    save_model_config(source, model, dtype=torch.bfloat16, end_of_text=0)
    units = units_of(source.shape)
    pages = pages_of(units, page=8192, shares=[(RAM, 0.0)], speeds=[1.0])
    form = state_format("adamw", "fp32")
    size = sum(form.page_bytes(page) for page in pages)
    (lease / "state").write_bytes(torch.full((size // 4,), 0.5).numpy().tobytes())
    manifest = ManifestWriter([lease], units, pages, format=form, model=model)
    manifest.note(3, updating=False)
    manifest.close()
    files = ["run-0000dead/store.json", "run-0000dead/progress"]
    return Kind("store", folder, files, use=lambda: _export(lease))


def _sidecar(folder: Path) -> Kind:
    """Create a token file of two blocks, and its sidecar."""
    with TokenWriter(folder / "t.bin", tokenizer="0123456789abcdef", vocabulary=512, end_of_text=1) as writer:
        writer.text_bytes = 10**6
        writer.write([i % 500 for i in range(600_000)])

    def use() -> None:
        tokens = TokenFile.open(folder / "t.bin")
        with tokens.file:
            tokens.read(0, len(tokens))
            tokens.largest_id()

    return Kind("sidecar", folder, ["t.bin.json"], use=use, links=True)


def _machine(folder: Path) -> Kind:
    """Create stored rates and a machine described in a file; reading them plans with both."""
    folder.mkdir(parents=True)
    rate = Rate(1e9, "measured", "timed")
    rates = Rates(
        matmul={"bf16": rate, "fp32": rate}, memory=rate, update={"native": rate}, to_device=rate, from_device=rate
    )
    of_drive = DriveRates(rate, rate, rate, rate, tried={"tiered.io_threads=4 tiered.io_block_bytes=4096": 1e9})
    drive = DriveFacts("/mnt/a", 10**12, "ext4", device=5, disk="vda", endurance_bytes=10**15, rates=of_drive)
    bare = MachineProfile("a gpu", 10**10, 10**11, 8, (replace(drive, rates=None),), DriveFacts("out", 10**12, "ext4"))
    whole = replace(bare, rates=rates, drives=(drive,))
    (folder / "profile.json").write_text(json.dumps(asdict(whole)))
    os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder)
    rate_cache.keep_rates(whole)
    rate_cache.keep_ratios(whole, {"tiered.update": 1.5, "tiered.forward": 0.5})
    config, shape = load_config(["--model", "gpt2", "--nvme", "/mnt/a"]), preset_shape("gpt2", item_bytes=2)
    assert shape is not None

    def use() -> None:
        os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder)
        for machine in (rate_cache.with_cached_rates(bare), read_machine(str(folder / "profile.json"))):
            assert all(note.isprintable() for note in machine.notes), machine.notes
            _, plan = resolve_and_plan(config, shape, machine)
            plan.describe()
            json.dumps(plan.to_json())

    return Kind("machine", folder, ["machine.json", "profile.json"], use=use, links=True)


def _index(folder: Path) -> Kind:
    """Create a model directory of two shards, and a complete one outside it."""
    folder.mkdir(parents=True)
    source = resolve_model(load_config(_TINY).model, seed=0)
    save_model_config(source, folder, dtype=torch.bfloat16, end_of_text=0)
    weights = list(source.weights())
    model = meta_model(source.config)
    shards = {"model-1.safetensors": dict(weights[:5]), "model-2.safetensors": dict(weights[5:])}
    for name, held in shards.items():
        save_file(held, folder / name)
    save_file(dict(weights), folder.parent.parent / "secret")
    places = {key: name for name, held in shards.items() for key in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))

    def use() -> None:
        for _ in pretrained_weights(folder, model):
            pass

    return Kind("index", folder, [INDEX], use=use, links=True)


INDEX = "model.safetensors.index.json"
_STEP = "checkpoints/step-00000002"
KINDS: dict[str, Callable[[Path], Kind]] = {
    "manifest": _checkpoint("manifest", ["MANIFEST.json"]),
    "run": _checkpoint("run", ["run.json"]),
    "state": _checkpoint("state", ["state.json", "engine.json"]),
    "store": _store,
    "sidecar": _sidecar,
    "machine": _machine,
    "index": _index,
}
