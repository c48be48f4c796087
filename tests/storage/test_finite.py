"""Tests of invalid values: no weight or moment with NaN, infinity or a wrong sign is saved, exported or trained."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import batches, engine, model_directory, train
from safetensors.torch import load_file, save_file
from small_architectures import ARCHITECTURES, reference
from synthetic_checkpoints import checkpoint_of

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.tiered.state_formats import is_signed
from offload_trainer.run.checkpoint import Checkpoints, RunRecord, TrainState, complete_checkpoints, read_manifest
from offload_trainer.run.export import export
from offload_trainer.storage.tensorfile import describe_invalid_values

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("field", ["master", "exp_avg_sq"])
def test_one_value_among_others_is_found_wherever_it_is(dtype: torch.dtype, field: str) -> None:
    bad = [NAN, -NAN, INF, -INF] + [-1e-4] * (field == "exp_avg_sq")
    for place in range(150):
        values = torch.full((150,), 0.5, dtype=dtype)
        assert describe_invalid_values(values, signed=is_signed(field)) is None
        values[place] = bad[place % len(bad)]
        told = describe_invalid_values(values, signed=is_signed(field))
        assert told is not None
        assert told.startswith("1 of 150")
    assert describe_invalid_values(torch.full((150,), -0.0, dtype=dtype), signed=is_signed(field)) is None
    assert describe_invalid_values(torch.empty(0, dtype=dtype), signed=is_signed(field)) is None
    negative = describe_invalid_values(torch.full((3,), -1.0, dtype=dtype), signed=is_signed(field))
    assert (negative is None) == (field == "master")


def save(checkpoints: Checkpoints, made: Any, step: int) -> None:
    checkpoints.save(made, TrainState(step=step, tokens=0, data_position=0))
    checkpoints.synchronize()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("optim.moment_dtype=fp32", "master", NAN),
        ("optim.moment_dtype=fp32", "master", INF),
        ("optim.moment_dtype=fp32", "exp_avg_sq", -1e-3),
        ("optim.moment_dtype=bf16", "exp_avg", -INF),
        ("optim.moment_dtype=8bit", "exp_avg_scales", NAN),
        ("optim.moment_dtype=8bit", "exp_avg_sq_scales", -1.0),
        ("--dtype bf16 optim.master_dtype=bf16", "master", NAN),
        ("--dtype bf16 optim.master_dtype=bf16", "master", INF),
        ("model.freeze=[ln_f]", "fixed", NAN),
    ],
)
def test_no_checkpoint_with_nan_is_saved_or_resumed(words: str, field: str, value: float, tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "gpt2", n_layer=1)
    (tmp_path / "run/model").mkdir(parents=True)
    record = RunRecord(identity={}, layout={}, run={}, model=tmp_path / "run/model")
    root = tmp_path / "run/checkpoints"
    weight = "transformer.ln_f.weight" if field == "fixed" else "transformer.h.0.mlp.c_fc.weight"
    with engine(model, "--engine", "tiered", *words.split()) as made:
        train(made, batches(2))
        with Checkpoints(root, record=record, keep=1, need_bytes=10, say=print) as checkpoints:
            save(checkpoints, made, 2)
            good = root / "step-00000002"
            made.load(good)
            state, store = made.offloaded.state, made.offloaded.store
            unit, place = state.places[weight]
            if field == "fixed":
                state.weights.put(unit.index, place.start, torch.tensor([value]))
            else:
                ((number, at, _),) = store._table.touched(unit.index, place.start, 1)
                store.fields(number, store.in_memory(number))[field][at.start // store.format.fields[field].per] = value
            with pytest.raises(TrainerError, match=rf"{weight}: of {field}, 1 of .*the older ones are untouched") as no:
                save(checkpoints, made, 3)
        assert not isinstance(no.value, UserError)
        assert [path.name for path in root.iterdir()] == [good.name]
        read_manifest(good)
        file = good / f"{field}.safetensors"
        held = load_file(file)
        held[weight].view(-1)[-1] = value
        save_file(held, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"{field}\.safetensors: {weight}: 1 of .* no run can resume from it"):
            made.load(good)


def test_no_export_holds_a_nan(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "gpt2", n_layer=1)
    with engine(model, "--engine", "plain", "--dtype", "fp32") as made:
        run = checkpoint_of(made, model, tmp_path / "run")
    checkpoint = complete_checkpoints(run / "checkpoints")[0]
    held = load_file(checkpoint / "master.safetensors")
    held["transformer.wte.weight"][7] = NAN
    held["transformer.ln_f.bias"][0] = -INF
    save_file(held, checkpoint / "master.safetensors", metadata={"format": "pt"})
    told = json.loads((checkpoint / "MANIFEST.json").read_text())
    data = (checkpoint / "master.safetensors").read_bytes()
    told["files"]["master.safetensors"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(told))
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"2 weights cannot be used: .*wte\.weight \(72 of 15192") as refused:
        export(run, tmp_path / "out", dtype="fp16", check=False)
    assert "ln_f.bias (1 of 72 values are NaN or infinite)" in str(refused.value)
    assert "bf16" not in str(refused.value)
    assert set(tmp_path.iterdir()) == before


def test_no_training_begins_from_a_nan(tmp_path: Path) -> None:
    made = reference(ARCHITECTURES["llama, untied"])
    with torch.no_grad():
        made.lm_head.weight[3, 1] = NAN
    made.save_pretrained(tmp_path)
    source = resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)
    with pytest.raises(UserError, match=r"lm_head\.weight: 1 of .* no training can begin"):
        dict(source.weights())
