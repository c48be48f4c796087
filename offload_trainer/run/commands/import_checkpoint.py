"""The import command: make a run directory whose first checkpoint is another trainer's (run/foreign.py: which ones).

    SOURCE ── opened ──> ForeignState ── one tensor at a time ──> RUN/checkpoints/step-N (optim/state_files.py)
    configuration, model, tokenizer, the source's settings ─────> the checkpoint's manifest and model/
    rates of the next step, there and here ─────────────────────> what the command prints (`Imported`)

Only AdamW's state is imported. The new checkpoint is like one that a run has saved, except that nothing is known of
the data: every key of the run's identity but the number of parameters is null, so any data can follow. The run that
resumes from it writes all other files of the run directory.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

import torch

from offload_trainer.config import OptimSection, TrainConfig
from offload_trainer.data.run_data import UNKNOWN_IDENTITY
from offload_trainer.data.tokenizer import load_tokenizer, save_tokenizer
from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.model.loader import ModelSource, resolve_model, save_model_config
from offload_trainer.optim.state_files import BlockingSnapshot, EngineState
from offload_trainer.plan.tiered.state_formats import ADAMW, KINDS, is_signed
from offload_trainer.ranks import ALONE
from offload_trainer.run.checkpoint import RunRecord, TrainState, checkpoint_of, write_checkpoint
from offload_trainer.run.directory import environment
from offload_trainer.run.export import check_destination
from offload_trainer.run.foreign import ForeignState, directories_of, opened
from offload_trainer.run.loop import learning_rate
from offload_trainer.safe_files import is_there
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.owned_dirs import replacing, scratch
from offload_trainer.storage.tensorfile import DTYPES, describe_invalid_values

_WORK = "the import to"  # purpose written in the scratch directory's mark
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Settings of a run that no foreign checkpoint records, so a resume does not compare them.
_UNKNOWN = {
    "model": ("attention",),
    "train": ("micro_batch_size", "gradient_accumulation_steps"),
    "placement": ("gpus",),
}


@dataclass(frozen=True)
class Imported:
    told: str  # description of the source
    checkpoint: Path
    bytes: int
    words: str  # settings of the source, as words of the command that resumes from it
    rates: str  # learning rates of the next step, in the source and here


def import_checkpoint(source: Path, run: Path, config: TrainConfig, *, say: Callable[[str], None]) -> Imported:
    """Write the state in `source`, of another trainer, as the first checkpoint of the new run directory `run`.

    `config`: the configuration of the run. Without a name its model is the one whose config.json is in `source`. The
    whole of it, with the source's settings, is recorded in the checkpoint. `say` prints a note. Raises UserError if the
    source is of another format, optimizer or model, or incomplete, or `run` exists, and TrainerError if the disk fails.
    """
    model = config.model
    if config.optim.name != ADAMW.name:
        raise UserError(
            f"optim.name={config.optim.name}: an import brings AdamW's moments, so its run updates by adamw"
        )
    directories = directories_of(source)
    named = "name" in model.model_fields_set
    if not named:
        if not is_there(source / "config.json") or not any(source.glob("*.safetensors")):
            raise UserError(
                f"{source}: there is no config.json of a model with its weights in safetensors: name the model that it "
                "trained: --model"
            )
        model = model.model_copy(update={"name": str(source)})
    of = resolve_model(model, seed=0)
    with opened(source, of, directories=directories) as state:
        module = of.meta()
        parts = module.named_parameters(remove_duplicate=False), module.named_buffers()
        names = state.names_for(of.shape.weights, others=[name for part in parts for name, _ in part])
        need = 4 * sum(w.numel * (len(KINDS) if w.trainable else 1) for w in of.shape.weights)
        check_destination(run.absolute(), need)
        steps = state.steps or config.train.steps
        try:
            with replacing(run.absolute(), what=_WORK) as new, scratch("offload-trainer-import-") as place:
                save_model_config(of, place / "model", dtype=DTYPES[model.dtype], end_of_text=None)
                if of.directory is not None and any(is_there(of.directory / name) for name in _TOKENIZERS):
                    tokenizer = load_tokenizer(str(of.directory), trust_remote_code=model.trust_remote_code)
                    save_tokenizer(tokenizer, place / "model")
                else:
                    say(f"note: {model.name} has no tokenizer: name one for the run with --tokenizer")
                record = _record(state, of, config, steps=steps, model=place / "model")
                final, train = checkpoint_of(new / "checkpoints", state.step), TrainState(state.step, 0, 0)
                write_checkpoint(final, _snapshot(state, of, names=names), ALONE, state=train, record=record)
        except OSError as error:
            raise TrainerError(f"{run}: {reason(error)}; nothing is left there") from error
    made = checkpoint_of(run / "checkpoints", state.step)
    if (scale := state.loss_scale) and model.dtype == "fp16":
        say(f"the loss scale goes on at {scale.value:g}, after {scale.good_steps} steps without overflow")
    words = [*([] if named else ["--model", model.name]), "--output", str(run), "--steps", str(steps)]
    return Imported(
        told=f"{state.told}, step {state.step}",
        checkpoint=made,
        bytes=bytes_below(made),
        words=join([*words, *(f"optim.{key}={value!r}" for key, value in state.optim.items())]),
        rates=_rates(state, config.optim, steps=steps),
    )


def _record(state: ForeignState, of: ModelSource, config: TrainConfig, *, steps: int, model: Path) -> RunRecord:
    """Return the checkpoint's record with the source's settings. A null in its identity is compared with nothing."""
    made = {
        section: {key: value for key, value in keys.items() if key not in _UNKNOWN.get(section, ())}
        for section, keys in config.model_dump(mode="json").items()
    }
    made["optim"] |= dict(state.optim, moment_dtype="fp32", master_dtype="fp32")  # those of the files
    made["train"]["steps"] = steps
    identity = dict.fromkeys(("seed", "seq_len", "shuffle", "initial weights")) | UNKNOWN_IDENTITY
    return RunRecord(
        identity=identity | {"parameters": of.shape.parameters},
        layout={w.name: {"shape": list(w.shape), "trained": w.trainable} for w in of.shape.weights},
        run={"config": made, "random": False, "imported": state.told, "environment": environment()},
        model=model,
    )


def _snapshot(state: ForeignState, of: ModelSource, *, names: Mapping[str, str]) -> BlockingSnapshot:
    trained = {w.name: w.shape for w in of.shape.weights if w.trainable}
    fixed, dtype = {w.name: w.shape for w in of.shape.weights if not w.trainable}, DTYPES[of.section.dtype]

    def read(name: str, kind: str) -> torch.Tensor:
        if kind == "fixed":
            return state.read(names[name], "master").to(dtype).reshape(fixed[name])
        values = state.read(names[name], kind).to(torch.float32).reshape(trained[name])
        if wrong := describe_invalid_values(values, signed=is_signed(kind)):
            raise UserError(f"{state.told}: {kind} of {name}: {wrong}: no run can go on from that; import an older one")
        return values

    counts = {name: state.updates[names[name]] for name in trained}
    most = max(counts.values())
    engine = EngineState(most, weight_steps={name: count for name, count in counts.items() if count != most})
    if state.loss_scale:
        engine = replace(engine, loss_scale=state.loss_scale)
    return BlockingSnapshot(engine, trained, fixed, dtype, read)


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
