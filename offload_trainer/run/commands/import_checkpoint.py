"""The import command: make a run directory whose first checkpoint is another trainer's.

    SOURCE ── opened ──> ForeignState ── one tensor at a time ──> RUN/checkpoints/step-N (optim/state_files.py)

The new checkpoint is like one that a run has saved, except that nothing is known of the data: keys of the run's
identity are null in its manifest, so any data can follow. The run that resumes from it writes all other files of the
run directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

import torch

from offload_trainer.checkpoint import RunRecord, TrainState, checkpoint_of, finish_checkpoint
from offload_trainer.config import ModelSection, OptimSection, TrainConfig
from offload_trainer.data.run_data import UNKNOWN_IDENTITY
from offload_trainer.data.tokenizer import load_tokenizer, save_tokenizer
from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.export.directory import check_destination
from offload_trainer.model.loader import ModelSource, resolve_model, save_model_config
from offload_trainer.optim.loss_scale import LossScale
from offload_trainer.optim.state_files import EngineState, state_files, write_engine_state, write_files
from offload_trainer.plan.tiered.state_formats import ADAMW, KINDS, is_signed
from offload_trainer.run.directory import environment
from offload_trainer.run.foreign import (
    METADATA,
    OPTIMIZER,
    STATE,
    ForeignState,
    opened_trainer,
    read_distributed,
    with_trainer_files,
)
from offload_trainer.safe_files import is_there
from offload_trainer.storage.atomic_io import bytes_below, put_in_place, sync_directory
from offload_trainer.storage.owned_dirs import replacing, scratch
from offload_trainer.storage.tensorfile import DTYPES, describe_invalid_values
from offload_trainer.trainer import learning_rate

_WORK = "the import to"  # purpose written in the scratch directory's mark
_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")  # directories that a Trainer with FSDP writes through accelerate
_DEEPSPEED = ("latest", "latest_universal", "zero", "*_optim_states.pt", "zero_to_fp32.py")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Settings of a run that no foreign checkpoint records, so a resume does not compare them.
_UNKNOWN = {
    "model": ("attention", "mlp_chunk"),
    "train": ("micro_batch_size", "gradient_accumulation_steps"),
    "placement": ("gpus",),
}


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    told: str  # description of the source
    checkpoint: Path
    bytes: int
    words: str  # settings of the source, as words of the command that resumes from it
    rates: str  # learning rates of the next step, in the source and here


def import_checkpoint(source: Path, run: Path, config: TrainConfig, *, say: Callable[[str], None]) -> Imported:
    """Write the state in `source`, of another trainer, as the first checkpoint of the new run directory `run`.

    `config`: the configuration of the run. Without a name its model is the one whose config.json is in `source`. The
    whole of it, with the source's settings, is recorded in the checkpoint. `say` prints a note.

    Raises:
        UserError: the source is of another format, optimizer or model, or incomplete, or `run` exists.
        TrainerError: the disk fails.
    """
    model, optim = config.model, config.optim
    if optim.name != ADAMW.name:
        raise UserError(f"optim.name={optim.name}: an import brings AdamW's moments, so its run updates by adamw")
    directories = _distributed(source)
    named = "name" in model.model_fields_set
    if not named:
        if not is_there(source / "config.json") or not any(source.glob("*.safetensors")):
            raise UserError(
                f"{source}: there is no config.json of a model with its weights in safetensors: name the model that it "
                "trained: --model"
            )
        model = model.model_copy(update={"name": str(source)})
    of = resolve_model(model, seed=0)
    with _opened(source, directories, of) as state:
        buffers = [name for name, _ in of.meta().named_buffers()]
        names = state.names_for(of.shape.weights, others=[*of.tied, *buffers])
        need = 4 * sum(w.numel * (len(KINDS) if w.trainable else 1) for w in of.shape.weights)
        check_destination(run.absolute(), need)
        steps = state.steps or config.train.steps
        try:
            with replacing(run.absolute(), what=_WORK) as new, scratch("offload-trainer-import-") as place:
                new.mkdir()
                (new / "checkpoints").mkdir()
                checkpoint = checkpoint_of(new / "checkpoints", state.step)
                checkpoint.mkdir()
                _write_model(place / "model", of, model, say=say)
                record = _record(state, of, config, steps=steps, model=place / "model")
                _write_state(checkpoint, state, of, names=names, record=record)
                sync_directory(new / "checkpoints")
                put_in_place(new, run.absolute())
        except OSError as error:
            raise TrainerError(f"{run}: {reason(error)}; nothing is left there") from error
    made = checkpoint_of(run / "checkpoints", state.step)
    if state.scaler is not None and model.dtype == "fp16":
        say(f"the loss scale goes on at {state.scaler.scale:g}, after {state.scaler.good_steps} steps without overflow")
    return Imported(
        told=f"{state.told}, step {state.step}",
        checkpoint=made,
        bytes=bytes_below(made),
        words=_words(state, run, model=None if named else model.name, steps=steps),
        rates=_rates(state, optim, steps=steps),
    )


def _distributed(source: Path) -> list[Path]:
    """Return the directories of torch.distributed.checkpoint that make up `source`; none for the Trainer's own files.

    Raises UserError if the names in `source` are of no checkpoint that is read.
    """
    if not source.is_dir():
        raise UserError(f"{source}: {'not a directory' if is_there(source) else 'no such directory'}")
    if is_there(source / STATE) and is_there(source / OPTIMIZER):
        return []
    if is_there(source / METADATA):
        return [source]
    if all((source / name).is_dir() for name in _FSDP):
        return [source / name for name in _FSDP]
    if any(any(source.glob(pattern)) for pattern in _DEEPSPEED):
        raise UserError(
            f"{source}: a checkpoint of DeepSpeed, whose optimizer state is not imported. Write its weights with "
            "DeepSpeed's own zero_to_fp32.py, which lies in each checkpoint directory of ZeRO: `python zero_to_fp32.py "
            ". DIR --safe_serialization`. Copy config.json and the tokenizer to DIR, and start with --model DIR"
        )
    if any(source.glob("pytorch_model_fsdp*")):
        raise UserError(
            f"{source}: a checkpoint of FSDP with pickles or without {_FSDP[1]}, which is not imported. Save it with "
            "fsdp_state_dict_type=SHARDED_STATE_DICT; or write its weights as safetensors, and start with --model DIR"
        )
    held = ", ".join(sorted(path.name for path in source.iterdir())[:10]) or "nothing"
    raise UserError(
        f"{source}: no checkpoint that can be imported. A Trainer's has {STATE} and {OPTIMIZER}, or {_FSDP[0]} and "
        f"{_FSDP[1]} with FSDP; torch.distributed.checkpoint's has {METADATA}. It holds {held}"
    )


@contextmanager
def _opened(source: Path, directories: Sequence[Path], of: ModelSource) -> Iterator[ForeignState]:
    """Open the checkpoint, with what a Trainer has stored next to it."""
    if directories:
        yield with_trainer_files(read_distributed(source, directories), source)
        return
    module = of.meta()
    trainable = {weight.name: weight.trainable for weight in of.shape.weights}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable[name])
    with opened_trainer(source, module) as state:
        yield with_trainer_files(state, source)


# -- what is written ---------------------------------------------------------------------------------------------------


def _record(state: ForeignState, of: ModelSource, config: TrainConfig, *, steps: int, model: Path) -> RunRecord:
    """Return the checkpoint's record, with the source's settings, which the run is compared with when it resumes.

    A null in its identity is compared with nothing.
    """
    made = {
        section: {key: value for key, value in keys.items() if key not in _UNKNOWN.get(section, ())}
        for section, keys in config.model_dump(mode="json").items()
    }
    made["optim"] |= state.optim
    made["train"]["steps"] = steps
    identity = dict.fromkeys(("seed", "seq_len", "shuffle", "initial weights")) | UNKNOWN_IDENTITY
    return RunRecord(
        identity=identity | {"parameters": of.shape.parameters},
        layout={w.name: {"shape": list(w.shape), "trained": w.trainable} for w in of.shape.weights},
        run={"config": made, "random": False, "imported": state.told, "environment": environment()},
        model=model,
    )


def _write_model(directory: Path, of: ModelSource, model: ModelSection, *, say: Callable[[str], None]) -> None:
    """Write the model's configuration, and its tokenizer if it has one."""
    save_model_config(of, directory, dtype=DTYPES[model.dtype], end_of_text=None)
    if of.directory is not None and any(is_there(of.directory / name) for name in _TOKENIZERS):
        save_tokenizer(load_tokenizer(str(of.directory), trust_remote_code=model.trust_remote_code), directory)
    else:
        say(f"note: {model.name} has no tokenizer: name one for the run with --tokenizer")


def _write_state(
    checkpoint: Path, state: ForeignState, of: ModelSource, *, names: Mapping[str, str], record: RunRecord
) -> None:
    """Write masters, moments and frozen weights by name, then the other files of a checkpoint."""
    trained = {w.name: w.shape for w in of.shape.weights if w.trainable}
    fixed = {w.name: (w.shape, DTYPES[of.section.dtype]) for w in of.shape.weights if not w.trainable}

    def read(name: str, kind: str) -> torch.Tensor:
        values = state.read(names[name], kind).to(torch.float32).reshape(trained[name])
        if wrong := describe_invalid_values(values, signed=is_signed(kind)):
            raise UserError(f"{state.told}: {kind} of {name}: {wrong}: no run can go on from that; import an older one")
        return values

    def read_fixed(name: str) -> torch.Tensor:
        shape, dtype = fixed[name]
        return state.read(names[name], "master").to(dtype).reshape(shape)

    files = write_files(checkpoint, state_files(trained, read, fixed=fixed, read_fixed=read_fixed), writes=True)
    counts = {name: state.updates(names[name]) for name in trained}
    most = max(counts.values())
    others = {name: count for name, count in counts.items() if count != most}
    engine = EngineState(optimizer_steps=most, weight_steps=others)
    if state.scaler is not None:
        scaler = state.scaler
        engine = replace(engine, loss_scale=LossScale(scaler.scale, scaler.window, scaler.good_steps))
    write_engine_state(checkpoint, engine)
    finish_checkpoint(checkpoint, files, TrainState(step=state.step, tokens=0, data_position=0), record)


# -- what is said ------------------------------------------------------------------------------------------------------


def _words(state: ForeignState, run: Path, *, model: str | None, steps: int) -> str:
    """Return the words that the resuming command needs in addition to those of the import command."""
    words = [] if model is None else ["--model", model]
    words += ["--output", str(run), "--steps", str(steps)]
    words += [f"optim.{key}={value!r}" for key, value in state.optim.items()]
    return join(words)


def _rates(state: ForeignState, optim: OptimSection, *, steps: int) -> str:
    """Describe the learning rate of the next step in the source, and in a run with this schedule and its peak."""
    optim = optim.model_copy(update=dict(state.optim))
    there, here = state.rate, learning_rate(state.step, optim, steps=steps)
    told = (
        f"learning rate of step {state.step + 1}: {there:g} in the source; {here:g} here with --lr {optim.lr:g}, "
        f"optim.schedule={optim.schedule}, optim.warmup_steps={optim.warmup_steps}, "
        f"optim.schedule_delay={optim.schedule_delay} and --steps {steps}"
    )
    if not math.isclose(here, there, rel_tol=1e-6, abs_tol=1e-12):
        told += (
            "\nThey differ: give this command and the run the source's optim.schedule, optim.warmup_steps and "
            "optim.final_lr_ratio (0 in transformers' schedules)"
        )
    return told
