"""Read checkpoints of other trainers: masters and Adam's moments by name, one tensor at a time.

    opened(source) ──> ForeignState ── names_for(our weights) ──> commands/import_checkpoint.py

A checkpoint directory of transformers' Trainer:

    model.safetensors (or shards)   weights; fp32 unless the model was loaded in another dtype
    optimizer.pt                    state by position: weights with decay in the model's order, then the others
    trainer_state.json              steps
    scheduler.pt, scaler.pt         steps that the learning rate scheduler has counted; the loss scale, in fp16

The optimizer numbers parameters in the order of `Trainer.create_optimizer` and does not name them. Every count and
shape is compared with the model's before a number is taken for a weight.

A directory of torch.distributed.checkpoint (DCP), as training with FSDP2 saves it. A Trainer with FSDP writes two of
them, for the model and the optimizer, and the other files as above:

    .metadata       names, shapes, and the file, offset and length of each chunk of a tensor
    __N_M.distcp    chunks, each written by torch.save

Expected is what `get_state_dict` returns: weights `model.NAME`, state `optim.state.NAME.{step,exp_avg,exp_avg_sq}`,
and settings `optim.param_groups...`. The words `model` and `optim` are the caller's and may be others.

torch's own reader of these directories runs what code their pickles name, opens any path that `.metadata` names, and
leaves elements unset that no chunk holds. Here torch's weights-only reader builds tensors, numbers, text and
collections; for the classes in `.metadata` `Record` stands. No other module of the package reads pickles.
"""

import io
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.model.loader import ModelSource
from offload_trainer.model.pretrained import opened_weights
from offload_trainer.optim.state_files import LossScale
from offload_trainer.plan.shape import Weight
from offload_trainer.safe_files import Steps, as_kind, is_there, lenient_record, open_file, open_given, read_back, shown

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
    optim: Mapping[str, Any]  # keys of the configuration's `optim` with which a run goes on as the source did
    steps: int | None = None  # length of the run, if it is known
    loss_scale: LossScale | None = None  # None: it does not train in fp16

    def names_for(self, weights: Sequence[Weight], *, others: Iterable[str]) -> dict[str, str]:
        """Return the name that this checkpoint has for each of the model's weights, perhaps with a wrapper's prefix.

        `others`: names of buffers, and second names of tied weights. Raises UserError with the numbers of weights that
        are missing, unexpected, of another shape, or trained on one side only.
        """
        held, prefix = self.shapes, _common_prefix(self.shapes, [weight.name for weight in weights])
        names = {weight.name: f"{prefix}{weight.name}" for weight in weights}
        known = {*names.values(), *(f"{prefix}{name}" for name in others)}
        problems: dict[str, list[str]] = {"missing there": [], "not in the model": [n for n in held if n not in known]}
        for weight in weights:
            name, its = weight.name, names[weight.name]
            if its not in held:
                what = "missing there"
            elif tuple(held[its]) != weight.shape:
                name, what = f"{name} {held[its]}, in the model {weight.shape}", "of another shape"
            elif weight.trainable and its not in self.updates:
                what = "trained by the model's configuration, without moments there"
            elif its in self.updates and not weight.trainable:
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
                f"{self.told}: its weights do not fit the model{told}\n"
                "Name the model that it trained with --model, and weights that it did not train with model.freeze"
            )
        return names


def _common_prefix(keys: Collection[str], names: Sequence[str]) -> str:
    """Return the prefix, such as "model.", that most of the names have among the keys; the shortest of several."""
    for name in names:
        if prefixes := [key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")]:
            return max(sorted(prefixes, key=len), key=lambda prefix: sum(f"{prefix}{other}" in keys for other in names))
    return ""


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


# -- finding and opening -----------------------------------------------------------------------------------------------


def directories_of(source: Path) -> list[Path]:
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


@contextmanager
def opened(source: Path, of: ModelSource, *, directories: Sequence[Path]) -> Iterator[ForeignState]:
    """Open the checkpoint `source` of the model `of`. `directories`: those that `directories_of` has found.

    Raises UserError for a file that is missing or damaged, another optimizer, and state that does not fit the model.
    """
    with ExitStack() as stack:
        state = _read_distributed(source, directories) if directories else _open_trainer(source, of, stack)
        yield _with_trainer_files(state, source)


@lenient_record
class _TrainerState:
    global_step: Steps
    max_steps: Steps = 0


@lenient_record
class _ScalerState:
    scale: Annotated[float, Field(gt=0, le=2.0**127)]  # the largest power of two in fp32
    good_steps: Annotated[int, Field(ge=0, alias="_growth_tracker")]  # steps without overflow since it last changed
    window: Annotated[int, Field(ge=1, alias="growth_interval")]  # number of such steps after which it grows


def _with_trainer_files(state: ForeignState, directory: Path) -> ForeignState:
    """Return `state` with the steps, the scheduler's delay and the loss scale of the Trainer's files in `directory`.

    A directory without trainer_state.json is not a Trainer's, and changes nothing. Raises UserError for a damaged file.
    """
    if not is_there(directory / _STATE):
        return state
    fix = "Import another checkpoint of that run"
    about = read_back(directory / _STATE, _TrainerState, links=True, fix=fix)
    delay, loss_scale = 1, None
    if is_there(directory / _SCHEDULER):
        saved = load_pickle(directory / _SCHEDULER)
        # torch's ReduceLROnPlateau has no base_lrs, and counts evaluations as last_epoch.
        if isinstance(saved, Mapping) and "base_lrs" in saved and saved.get("last_epoch") is not None:
            # It gives the next step the rate at the scheduler's position: 1 for one that counts each step, as torch's
            # do, and more if overflows have held it up. One that counts several steps at a time has no such number.
            delay = about.global_step + 1 - saved["last_epoch"]
            delay = delay if delay >= 0 else 1
    # A scaler that is switched off has an empty state.
    if is_there(directory / _SCALER) and (saved := load_pickle(directory / _SCALER)):
        try:
            scaler = as_kind(saved, _ScalerState)
        except ValueError as error:
            raise UserError(f"{directory / _SCALER} has no loss scale to go on with: {error}. {fix}") from error
        loss_scale = LossScale(scaler.scale, scaler.window, scaler.good_steps)
    optim = {**state.optim, "schedule_delay": delay}
    return replace(state, step=about.global_step, steps=about.max_steps or None, optim=optim, loss_scale=loss_scale)


# -- pickles -----------------------------------------------------------------------------------------------------------


def load_pickle(source: Path | bytes, *, told: str | None = None) -> Any:
    """Return what `torch.save` has written to a file (tensors are mapped, not read) or the bytes of one.

    Raises UserError if the file is missing or damaged, or holds an object of another class.
    """
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
                f"{told} holds a {shown(named[1])}, and an import reads tensors and plain data only: save the "
                "checkpoint without that object"
            ) from error
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{told} cannot be read as a file of torch.save: {shown(why)}") from error


class Record:
    """The attributes of a pickled object, without its class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Metadata(pickle.Unpickler):
    """Reader of a .metadata file that builds plain values and `Record`, and calls no function of another module."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            return int if name == "_MEM_FORMAT_ENCODING" else Record
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


def _open_trainer(directory: Path, of: ModelSource, stack: ExitStack) -> ForeignState:
    told = f"{directory} (transformers' Trainer)"
    if is_there(directory / "adapter_config.json"):
        raise UserError(f"{told}: holds adapters, and a run trains whole weights: merge them into their model first")
    model = of.meta()
    for weight in of.shape.weights:
        model.get_parameter(weight.name).requires_grad_(weight.trainable)
    rate, optim, state = _read_optimizer(directory, model, told=told)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    updates = {name: int(moments["step"]) if moments else 0 for name, moments in state.items()}
    weights, step = stack.enter_context(opened_weights(directory, model)), max(updates.values(), default=0)

    def read(name: str, kind: str) -> torch.Tensor:
        if kind == "master":
            return weights.read(name)
        return moments[kind] if (moments := state[name]) else torch.zeros(shapes[name])

    return ForeignState(told=told, step=step, shapes=shapes, updates=updates, read=read, rate=rate, optim=optim)


def _read_optimizer(
    directory: Path, model: nn.Module, *, told: str
) -> tuple[float, dict[str, Any], dict[str, dict[str, torch.Tensor] | None]]:
    """Return `rate` and `optim` of a ForeignState, and the moments of each trained parameter, None before its first.

    Raises UserError if the file is not the state_dict of torch's Adam or AdamW for the model's parameters.
    """
    saved = load_pickle(directory / _OPTIMIZER)
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
    if sizes == [len(decayed), len(spared)]:
        order = [*decayed, *spared]  # of a Trainer's groups
    elif sizes == [len(trained)]:
        order = list(trained)
    else:
        raise UserError(
            f"{told}: its optimizer has groups of {sizes} parameters; the model has {len(decayed)} with weight "
            f"decay and {len(spared)} without. Freeze with model.freeze what it did not train"
        )
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
    return rate, optim, {name: state.get(number) for name, number in number_of.items()}


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
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
        with open_given(chunk.path) as file:
            file.seek(chunk.start)
            data = file.read(chunk.bytes)
        if len(data) < chunk.bytes:
            raise UserError(f"{chunk.path} ends after {chunk.start + len(data)} bytes; {name} needs {chunk.bytes} more")
        return load_pickle(data, told=f"{chunk.path}: {name}")

    def add(self, directory: Path) -> None:
        """Add what the metadata of `directory` names. Raises UserError if it is damaged or names files outside."""
        path = directory / _METADATA
        try:
            with open_given(path) as file:
                about = _Metadata(file).load()
            tensors = {name: its for name, its in about.state_dict_metadata.items() if hasattr(its, "size")}
            self.shapes.update({name: tuple(tensor.size) for name, tensor in tensors.items()})
            for index, place in about.storage_data.items():
                if getattr(place, "transform_descriptors", None):
                    raise UserError(f"{path}: its files are compressed, which is not read: save it without extensions")
                if Path(place.relative_path).name != place.relative_path:
                    raise UserError(f"{path} names {shown(place.relative_path)}, which lies outside the directory")
                offsets = tuple(getattr(index, "offset", None) or ())
                chunk = _Chunk(offsets, directory / place.relative_path, place.offset, place.length)
                self.chunks.setdefault(index.fqn, []).append(chunk)
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{path} cannot be read: {shown(str(error).strip() or type(error).__name__)}") from error


def _read_distributed(source: Path, directories: Sequence[Path]) -> ForeignState:
    told = f"{source} (torch.distributed.checkpoint)"
    stored = _Stored(told, {}, {})
    for directory in directories:
        stored.add(directory)
    found = {match["name"]: match["optimizer"] for key in stored.shapes if (match := _MOMENT.fullmatch(key))}
    if not found:
        names = ", ".join(map(shown, sorted(stored.chunks)[:5])) or "nothing"
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
