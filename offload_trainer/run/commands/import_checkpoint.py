"""The `import` command: make a run directory whose first checkpoint is another trainer's.

    SOURCE ── one of two readers ──> ForeignState ── one tensor at a time ──> RUN/checkpoints/step-N

Sources are a checkpoint directory of transformers' Trainer, and one of torch.distributed.checkpoint (DCP), as training
with FSDP2 saves it. Only AdamW's state is imported. The new checkpoint is like one that a run has saved, except that
nothing is known of the data: every key of the run's identity but the number of parameters is null, so any data can
follow. The run that resumes from it writes all other files of the run directory.
"""

import io
import math
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from offload_trainer.common.errors import TrainerError, UserError, reason
from offload_trainer.common.safe_files import Steps, as_kind, is_there, open_file, open_given, quoted, read_back
from offload_trainer.config import TrainConfig
from offload_trainer.data.run_data import UNKNOWN_IDENTITY
from offload_trainer.data.tokenizer import load_tokenizer, save_tokenizer
from offload_trainer.model.loader import ModelSource, resolve_model, save_model_config
from offload_trainer.model.pretrained import opened_weights
from offload_trainer.optim.state_files import BlockingSnapshot, EngineState, LossScale
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiered.state_formats import ADAMW, KINDS, is_signed
from offload_trainer.ranks import ALONE
from offload_trainer.run.checkpoint import RunRecord, TrainState, checkpoint_of, write_checkpoint
from offload_trainer.run.directory import environment
from offload_trainer.run.export import check_destination
from offload_trainer.run.loop import learning_rate
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.owned_dirs import replacing, scratch
from offload_trainer.storage.tensorfile import DTYPES, describe_invalid_values

_WORK = "the import to"  # purpose written in the scratch directory's mark
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Settings of a run that no foreign checkpoint records, so a resume does not compare them.
_UNKNOWN = ("model.attention", "train.micro_batch_size", "train.gradient_accumulation_steps", "placement.gpus")
_STATE, _OPTIMIZER, _SCHEDULER, _SCALER = "trainer_state.json", "optimizer.pt", "scheduler.pt", "scaler.pt"
_METADATA = ".metadata"
_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")  # directories that a Trainer with FSDP writes through accelerate
_DEEPSPEED = ("latest", "latest_universal", "zero", "*_optim_states.pt", "zero_to_fp32.py")
_NAMED = 5  # number of weights named in a message
# The names that `Trainer.get_decay_parameter_names` exempts from weight decay; all weights of nn.LayerNorm are too.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_MOMENT = re.compile(r"(?P<optimizer>.+?)\.state\.(?P<name>.+)\.exp_avg")
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")


@dataclass(frozen=True)
class ForeignState:
    """A checkpoint of another trainer, under the names that it uses."""

    told: str  # description for messages
    step: int  # completed steps of the run
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the weights
    updates: Mapping[str, int]  # number of updates of each weight that has moments
    read: Callable[[str, str], torch.Tensor]  # (name, kind) -> a weight ("master"), or a trained weight's moment
    rate: float  # learning rate of the next step
    optim: Mapping[str, Any]  # keys of the configuration's `optim` with which a run continues as the source did
    steps: int | None = None  # length of the run, if it is known
    loss_scale: LossScale | None = None  # None: it does not train in fp16


class Imported(NamedTuple):
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
    if (rule := config.optim.name) != ADAMW.name:
        raise UserError(f"optim.name={rule}: an import brings AdamW's moments, so its run updates by adamw")
    directories = _directories_of(source)
    named = "name" in model.model_fields_set
    if not named:
        if not is_there(source / "config.json") or not any(source.glob("*.safetensors")):
            raise UserError(
                f"{source}: there is no config.json of a model with its weights in safetensors: name the model that it "
                "trained: --model"
            )
        model = model.model_copy(update={"name": str(source)})
    of = resolve_model(model, seed=0)
    with ExitStack() as stack:
        state = _read_distributed(source, directories) if directories else _read_trainer(source, of, stack)
        state = _with_trainer_files(state, source)
        module = of.meta()
        parts = module.named_parameters(remove_duplicate=False), module.named_buffers()
        names = _names_for(state, of.shape.weights, others=[name for part in parts for name, _ in part])
        size = 4 * sum(w.numel * (len(KINDS) if w.trainable else 1) for w in of.shape.weights)
        check_destination(run.absolute(), size)
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
    words += [f"optim.{key}={value!r}" for key, value in state.optim.items()]
    optim = config.optim.model_copy(update=dict(state.optim))
    there, here = state.rate, learning_rate(state.step, optim, steps=steps)
    rates = (
        f"learning rate of step {state.step + 1}: {there:g} in the source; {here:g} here with --lr {optim.lr:g}, "
        f"optim.schedule={optim.schedule}, optim.warmup_steps={optim.warmup_steps}, "
        f"optim.schedule_delay={optim.schedule_delay} and --steps {steps}"
    )
    if not math.isclose(here, there, rel_tol=1e-6, abs_tol=1e-12):
        rates += (
            "\nThey differ: give this command and the run the source's optim.schedule, optim.warmup_steps and "
            "optim.final_lr_ratio (0 in transformers' schedules)"
        )
    return Imported(f"{state.told}, step {state.step}", made, bytes_below(made), join(words), rates)


def _directories_of(source: Path) -> list[Path]:
    """Return the DCP directories of `source`, none for the Trainer's own files. Raises UserError for others."""
    if not source.is_dir():
        raise UserError(f"{source}: {'not a directory' if is_there(source) else 'no such directory'}")
    if is_there(source / _STATE) and is_there(source / _OPTIMIZER):
        return []
    if is_there(source / _METADATA):
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
        f"{source}: no checkpoint that can be imported. A Trainer's has {_STATE} and {_OPTIMIZER}, or {_FSDP[0]} and "
        f"{_FSDP[1]} with FSDP; torch.distributed.checkpoint's has {_METADATA}. It holds {held}"
    )


def _names_for(state: ForeignState, weights: Sequence[Weight], *, others: Iterable[str]) -> dict[str, str]:
    """Return the name that a checkpoint has for each of the model's weights, perhaps with a wrapper's prefix.

    `others`: names of buffers, and second names of tied weights. Raises UserError if the weights do not fit the model.
    """
    held, prefix = state.shapes, _common_prefix(state.shapes, [weight.name for weight in weights])
    names = {weight.name: f"{prefix}{weight.name}" for weight in weights}
    known = {*names.values(), *(f"{prefix}{name}" for name in others)}
    problems: dict[str, list[str]] = {"missing there": [], "not in the model": [n for n in held if n not in known]}
    for weight in weights:
        name, theirs = weight.name, names[weight.name]
        if theirs not in held:
            what = "missing there"
        elif tuple(held[theirs]) != weight.shape:
            name, what = f"{name} {held[theirs]}, in the model {weight.shape}", "of another shape"
        elif weight.trainable and theirs not in state.updates:
            what = "trained by the model's configuration, without moments there"
        elif theirs in state.updates and not weight.trainable:
            what = "frozen by model.freeze, with moments there"
        else:
            continue
        problems.setdefault(what, []).append(name)
    told = ""
    for what, found in problems.items():
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            told += f"\n  {len(found)} {what}: {', '.join(found[:_NAMED])}{more}"
    if told:
        raise UserError(
            f"{state.told}: its weights do not fit the model{told}\n"
            "Name the model that it trained with --model, and weights that it did not train with model.freeze"
        )
    return names


def _common_prefix(keys: Collection[str], names: Sequence[str]) -> str:
    """Return the prefix, such as "model.", that most of the names have among the keys; the shortest of several."""
    for name in names:
        if prefixes := [key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")]:
            return max(sorted(prefixes, key=len), key=lambda prefix: sum(f"{prefix}{other}" in keys for other in names))
    return ""


# -- what is written ---------------------------------------------------------------------------------------------------


def _record(state: ForeignState, of: ModelSource, config: TrainConfig, *, steps: int, model: Path) -> RunRecord:
    """Return the checkpoint's record with the source's settings. A null in its identity is compared with nothing."""
    made = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in _UNKNOWN}
        for section, keys in config.model_dump(mode="json").items()
    }
    made["optim"] |= dict(state.optim, moment_dtype="fp32", master_dtype="fp32")  # dtypes of the files
    made["train"]["steps"] = steps
    identity = dict.fromkeys(("seed", "seq_len", "shuffle", "initial weights")) | UNKNOWN_IDENTITY
    return RunRecord(
        identity=identity | {"parameters": of.shape.parameters},
        layout={w.name: {"shape": list(w.shape), "trained": w.trainable} for w in of.shape.weights},
        run={"config": made, "imported": state.told, "environment": environment()},
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


# -- settings of both formats ------------------------------------------------------------------------------------------


def _adam_settings(groups: Sequence[Mapping[str, Any]], *, told: str) -> tuple[float, dict[str, Any]]:
    """Return `rate` and `optim` of a ForeignState from a torch optimizer's groups of parameters.

    Raises UserError unless all groups are of Adam or AdamW with one pair of betas, one eps and decoupled weight decay.
    """
    if not (used := [group for group in groups if group.get("params")]):
        raise UserError(f"{told}: its optimizer has no groups of parameters")
    # torch's NAdam and RAdam have no amsgrad.
    if lacking := [key for key in ("betas", "eps", "lr", "amsgrad") if any(key not in group for group in used)]:
        raise UserError(f"{told}: its optimizer is neither Adam nor AdamW: its groups have no {', '.join(lacking)}")
    for key in ("amsgrad", "maximize"):
        if any(group.get(key) for group in used):
            raise UserError(f"{told}: its optimizer has {key}=True, which AdamW here has not")
    betas = {tuple(float(beta) for beta in group["betas"]) for group in used}
    eps = {float(group["eps"]) for group in used}
    decays = {float(group.get("weight_decay", 0.0)) for group in used} - {0.0}
    for what, values in (("betas", betas), ("eps", eps), ("weight decays other than 0", decays)):
        if len(values) > 1:
            raise UserError(f"{told}: its groups have several {what}: {sorted(values)}; one run has one")
    if decays and any(group.get("decoupled_weight_decay") is False for group in used):
        raise UserError(
            f"{told}: its optimizer is Adam with weight_decay={max(decays):g} added to the gradient, and AdamW here "
            "decays the weights themselves: its moments cannot be continued"
        )
    rate = float(used[0]["lr"])
    adam = {"betas": list(betas.pop()), "eps": eps.pop(), "weight_decay": max(decays, default=0.0)}
    return rate, {"lr": float(used[0].get("initial_lr", rate)), **adam, "schedule_delay": 1}


@dataclass(frozen=True)
class _TrainerState:
    global_step: Steps
    max_steps: Steps = 0


@dataclass(frozen=True)
class _ScalerState:
    scale: Annotated[float, Field(gt=0, le=2.0**127)]  # the largest power of two in fp32
    good_steps: Annotated[int, Field(ge=0, alias="_growth_tracker")]  # steps without overflow since it last changed
    window: Annotated[int, Field(ge=1, alias="growth_interval")]  # number of such steps after which it grows


def _with_trainer_files(state: ForeignState, directory: Path) -> ForeignState:
    """Return `state` with the steps, the scheduler's delay and the loss scale of the Trainer's files in `directory`."""
    if not is_there(directory / _STATE):  # not a Trainer's
        return state
    fix = "Import another checkpoint of that run"
    about = read_back(directory / _STATE, _TrainerState, links=True, fix=fix)
    delay, loss_scale = 1, None
    if is_there(directory / _SCHEDULER):
        saved = _load_pickle(directory / _SCHEDULER)
        # torch's ReduceLROnPlateau has no base_lrs, and counts evaluations as last_epoch.
        if isinstance(saved, Mapping) and "base_lrs" in saved and saved.get("last_epoch") is not None:
            # It gives the next step the rate at the scheduler's position: 1 for one that counts each step, as torch's
            # do, and more if overflows have held it up. One that counts several steps at a time has no such number.
            delay = about.global_step + 1 - saved["last_epoch"]
            delay = delay if delay >= 0 else 1
    # A scaler that is switched off has an empty state.
    if is_there(directory / _SCALER) and (saved := _load_pickle(directory / _SCALER)):
        try:
            scaler = as_kind(saved, _ScalerState)
        except ValueError as error:
            raise UserError(f"{directory / _SCALER} has no loss scale to go on with: {error}. {fix}") from error
        loss_scale = LossScale(scaler.scale, scaler.window, scaler.good_steps)
    optim = {**state.optim, "schedule_delay": delay}
    return replace(state, step=about.global_step, steps=about.max_steps or None, optim=optim, loss_scale=loss_scale)


# -- pickles: torch's weights-only reader builds tensors, numbers, text and collections --------------------------------


def _load_pickle(source: Path | bytes, *, told: str | None = None) -> Any:
    """Return what `torch.save` has written to a file (tensors are mapped, not read) or the bytes of one."""
    told = told or str(source)
    try:
        if isinstance(source, Path):
            os.close(open_file(source, links=True))  # refuses pipes, which would block
            return torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{told} is missing") from None
    except Exception as error:  # a damaged pickle may raise anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{told} holds a {quoted(named[1])}, and an import reads tensors and plain data only: save the "
                "checkpoint without that object"
            ) from error
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{told} cannot be read as a file of torch.save: {quoted(why)}") from error


class _Record:
    """The attributes of a pickled object, without its class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Metadata(pickle.Unpickler):
    """Reader of a .metadata file that builds plain values and `_Record`, and calls no function of another module."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            return int if name == "_MEM_FORMAT_ENCODING" else _Record
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        raise ValueError(f"it holds a {module}.{name}, which no .metadata file needs")


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
    ("builtins", "getattr"): lambda _, name: name,  # an enumeration's member as Python 3.11 stores it
}


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


def _read_trainer(directory: Path, of: ModelSource, stack: ExitStack) -> ForeignState:
    """Open model.safetensors (or shards), which `stack` closes, and optimizer.pt of a Trainer's checkpoint.

    optimizer.pt numbers parameters in the order of `Trainer.create_optimizer`, those with weight decay first, and does
    not name them. So every count and shape is compared with the model's before a number is taken for a weight. Raises
    UserError if the file is not the state_dict of torch's Adam or AdamW for the model's parameters.
    """
    told = f"{directory} (transformers' Trainer)"
    if is_there(directory / "adapter_config.json"):
        raise UserError(f"{told}: holds adapters, and a run trains whole weights: merge them into their model first")
    model = of.meta()
    for weight in of.shape.weights:
        model.get_parameter(weight.name).requires_grad_(weight.trainable)
    saved = _load_pickle(directory / _OPTIMIZER)
    groups, state = (saved.get(key) if isinstance(saved, Mapping) else None for key in ("param_groups", "state"))
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise UserError(f"{told}: {_OPTIMIZER} is not the state_dict of a torch optimizer")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise UserError(f"{told}: {_OPTIMIZER} has no groups of numbered parameters")
    wanted = {"step", "exp_avg", "exp_avg_sq"}
    for number, moments in state.items():
        held = set(moments) if isinstance(moments, dict) else set()
        if held != wanted:
            raise UserError(
                f"{told}: its optimizer is neither torch's Adam nor its AdamW: parameter {number} has "
                f"{', '.join(sorted(map(str, held))) or 'no state'}, expected {', '.join(sorted(wanted))}"
            )
    rate, optim = _adam_settings(groups, told=told)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    of_norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    spared = [name for name in trained if _WITHOUT_DECAY.search(name.lower()) or name.startswith(of_norms)]
    decayed, sizes = [name for name in trained if name not in spared], [len(group["params"]) for group in groups]
    if sizes not in ([len(decayed), len(spared)], [len(trained)]):
        raise UserError(
            f"{told}: its optimizer has groups of {sizes} parameters; the model has {len(decayed)} with weight "
            f"decay and {len(spared)} without. Freeze with model.freeze what it did not train"
        )
    order = list(trained) if len(sizes) == 1 else [*decayed, *spared]
    number_of = dict(zip(order, (number for group in groups for number in group["params"]), strict=True))
    wrong = [
        f"parameter {number} {tuple(state[number][kind].shape)}, {name} {trained[name]}"
        for name, number in number_of.items()
        if number in state
        for kind in ("exp_avg", "exp_avg_sq")
        if tuple(state[number][kind].shape) != trained[name]
    ]
    if wrong:
        raise UserError(
            f"{told}: {len(wrong)} moments do not have the shapes of the model's weights, the first: {wrong[0]}"
        )
    known: dict[str, dict[str, torch.Tensor] | None] = {name: state.get(number) for name, number in number_of.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    updates = {name: int(moments["step"]) if moments else 0 for name, moments in known.items()}
    weights, step = stack.enter_context(opened_weights(directory, model)), max(updates.values(), default=0)

    def read(name: str, kind: str) -> torch.Tensor:
        if kind == "master":
            return weights.read(name)
        return moments[kind] if (moments := known[name]) else torch.zeros(shapes[name])

    return ForeignState(told=told, step=step, shapes=shapes, updates=updates, read=read, rate=rate, optim=optim)


# -- torch.distributed.checkpoint: .metadata names the chunks of tensors in the files __N_M.distcp ---------------------
# torch's own reader of these directories runs what code their pickles name, opens any path that .metadata names, and
# leaves elements unset that no chunk holds.


class _Chunk(NamedTuple):
    """A part of a tensor, or a whole pickled object, in one file."""

    offsets: tuple[int, ...]
    path: Path
    start: int
    bytes: int


@dataclass(frozen=True)
class _Stored:
    """Tensors and objects by name, of one directory or two."""

    told: str  # name of the checkpoint in messages
    shapes: dict[str, tuple[int, ...]]  # shapes of the tensors
    chunks: dict[str, list[_Chunk]]

    def object(self, name: str) -> Any:
        return self.tensor(name) if name in self.shapes else self._load(name, self.chunks[name][0])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor in fp32. Raises UserError if its chunks do not fill it."""
        shape = self.shapes[name]
        whole, filled = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
        for chunk in self.chunks.get(name, ()):
            part = self._load(name, chunk)
            try:
                box = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, part.shape, strict=True))
                whole[box] = part
                filled[box] = True
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                raise UserError(f"{self.told}: a chunk of {name} at {chunk.offsets} does not fit {shape}") from error
        if not filled.all():
            raise UserError(f"{self.told}: the chunks of {name} hold {int(filled.sum())} of {filled.numel()} elements")
        return whole

    def _load(self, name: str, chunk: _Chunk) -> Any:
        with io.BufferedReader(open_given(chunk.path)) as file:  # an unbuffered read returns at most 2 GiB
            file.seek(chunk.start)
            data = file.read(chunk.bytes)
        if len(data) < chunk.bytes:
            raise UserError(f"{chunk.path} ends after {chunk.start + len(data)} bytes; {name} needs {chunk.bytes} more")
        return _load_pickle(data, told=f"{chunk.path}: {name}")

    def add(self, directory: Path) -> None:
        """Add what the metadata of `directory` names. Raises UserError if it is damaged or names files outside."""
        path = directory / _METADATA
        try:
            with open_given(path) as file:
                about = _Metadata(file).load()
            tensors = {name: stored for name, stored in about.state_dict_metadata.items() if hasattr(stored, "size")}
            self.shapes.update({name: tuple(tensor.size) for name, tensor in tensors.items()})
            for index, place in about.storage_data.items():
                if getattr(place, "transform_descriptors", None):
                    raise UserError(f"{path}: its files are compressed, which is not read: save it without extensions")
                if Path(place.relative_path).name != place.relative_path:
                    raise UserError(f"{path} names {quoted(place.relative_path)}, which lies outside the directory")
                offsets = tuple(getattr(index, "offset", None) or ())
                chunk = _Chunk(offsets, directory / place.relative_path, place.offset, place.length)
                self.chunks.setdefault(index.fqn, []).append(chunk)
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{path} cannot be read: {quoted(str(error).strip() or type(error).__name__)}") from error


def _read_distributed(source: Path, directories: Sequence[Path]) -> ForeignState:
    """Read what `get_state_dict` returns: weights `model.NAME`, state `optim.state.NAME.{step,exp_avg,exp_avg_sq}` and
    settings `optim.param_groups...`. The words `model` and `optim` are the caller's and may be others.
    """
    told = f"{source} (torch.distributed.checkpoint)"
    stored = _Stored(told, {}, {})
    for directory in directories:
        stored.add(directory)
    found = {match["name"]: match["optimizer"] for key in stored.shapes if (match := _MOMENT.fullmatch(key))}
    if not found:
        names = ", ".join(map(quoted, sorted(stored.chunks)[:5])) or "nothing"
        raise UserError(
            f"{told}: holds no moments of Adam, named such as optim.state.NAME.exp_avg; it holds {names}. Save it with "
            "get_state_dict of torch.distributed.checkpoint.state_dict, model and optimizer"
        )
    optimizer, *others = sorted(set(found.values()))
    if others:
        raise UserError(f"{told}: holds {1 + len(others)} optimizers, {', '.join([optimizer, *others])}; a run has one")
    state = f"{optimizer}.state."
    for name in found:
        if lacking := [key for key in ("exp_avg_sq", "step") if f"{state}{name}.{key}" not in stored.chunks]:
            raise UserError(f"{told}: its optimizer is not Adam: it has no {lacking[0]} for {name}")
    prefix = _common_prefix(stored.shapes, list(found))
    if lost := [name for name in found if f"{prefix}{name}" not in stored.shapes]:
        raise UserError(f"{told}: holds moments of {len(lost)} weights, such as {lost[0]}, and not the weights")
    begin, groups = f"{optimizer}.param_groups.", dict[str, dict[str, Any]]()
    for key in stored.chunks:  # settings are stored by the number of a group, or by the name of a weight
        group, _, word = key.removeprefix(begin).rpartition(".")
        if key.startswith(begin) and word in _SETTINGS:
            groups.setdefault(group, {"params": [group]})[word] = stored.object(key)
    rate, optim = _adam_settings(list(groups.values()), told=told)
    updates = {name: int(stored.object(f"{state}{name}.step")) for name in found}
    return ForeignState(
        told=told,
        step=max(updates.values()),
        shapes={key.removeprefix(prefix): shape for key, shape in stored.shapes.items() if key.startswith(prefix)},
        updates=updates,
        read=lambda name, kind: stored.tensor(f"{prefix}{name}" if kind == "master" else f"{state}{name}.{kind}"),
        rate=rate,
        optim=optim,
    )
