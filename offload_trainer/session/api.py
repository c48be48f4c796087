"""`load` and `offload`: create a Session from a model name or from a module in memory.

Keywords are keys of the configuration without their sections. The plan is made as for the command line, printed, and
refused with UserError if it does not fit; `translate_errors` replaces flags and keys in messages by keywords.
"""

import copy
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypedDict, Unpack

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from offload_trainer.common.errors import UserError
from offload_trainer.config import Home, RuleName, TrainConfig
from offload_trainer.engine.tiered import Say, open_parts
from offload_trainer.model.images import class_names
from offload_trainer.model.init_weights import meta_model, parameters_without_memory, set_buffers, without_values
from offload_trainer.model.loader import resolve_model, save_model_config, write_config
from offload_trainer.offloading.allocation import EngineParts
from offload_trainer.offloading.model import OffloadedModel, refuse_other_default
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import CUDA_PROCESS, PROCESS, inputs_of
from offload_trainer.plan.shape import ModelShape, Weight, unit_of
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.tiers import Item
from offload_trainer.ranks import all_gather_json, from_rank_zero, join, place_here, rank_zero_first
from offload_trainer.run import machine_rates, planning
from offload_trainer.run.build import lease_drives
from offload_trainer.run.checks import refuse_other_data, refuse_other_programs
from offload_trainer.run.directory import record_of
from offload_trainer.run.planning import Planned, machine_here
from offload_trainer.run.process_setup import ranks_of_environment
from offload_trainer.session.session import Session
from offload_trainer.settings import FLAGS, all_keys, refuse_unwritable, validated
from offload_trainer.storage.host_memory import return_now, set_malloc_threshold
from offload_trainer.storage.manifest import CONFIG
from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.storage.tensorfile import DTYPES


class SessionKeys(TypedDict, total=False):
    """Keywords of `ot.load` and `ot.offload`: last parts of keys in docs/config.md; `rule` is optim.name."""

    random_init: bool
    overrides: Mapping[str, bool | int | float | str]
    dtype: Literal["bf16", "fp32"]
    attention: Literal["auto", "sdpa", "eager"]
    activation_checkpointing: int | Literal["auto", "on", "off"]
    offload_activations: bool
    freeze: Sequence[str]
    base: Literal["model", "nf4", "int8"]
    trust_remote_code: bool
    seq_len: int | Literal["auto"]
    moment_dtype: Literal["fp32", "bf16", "8bit"]
    master_dtype: Literal["fp32", "bf16"]
    kernel: Literal["auto", "torch", "native"]
    micro_batch_size: int
    gradient_accumulation_steps: int
    seed: int
    params: Home
    optimizer: Home
    nvme: str | Path | Sequence[str | Path]
    gradients: Home
    gpu_fraction: float | Literal["auto"]
    ram_fraction: float | Literal["auto"]
    force: bool
    page_size: int
    page_buffers: int
    weight_buffers: int
    overlap: Literal["auto", "off", "forward"]
    state_copies: Literal["auto", 1, 2]
    rule: RuleName


_LAST_PARTS = {key.rpartition(".")[2]: key for key in all_keys()} | {"rule": "optim.name"}
KEYS = {keyword: _LAST_PARTS[keyword] for keyword in SessionKeys.__annotations__}  # the key of each keyword
INSTEAD = {  # other keys that a caller may try, and what to do instead
    "name": "give it to ot.load",
    "image_patches": "ot.load takes it; of a module in memory all weights are counted for each token of a row",
    "loss_chunk": "your code computes the loss",
    "engine": "a session always uses the tiered engine",
    "gpus": "start the script with torchrun --nproc-per-node N",
    "threads": "use torch.set_num_threads",
    "weight_transfer": "the plan chooses it",
    "micro_batch_order": "your code runs the micro-batches",
    **dict.fromkeys(("lr", "eps", "weight_decay"), "give it to session.adamw"),
    "betas": "give them to session.adamw",
    "max_grad_norm": "call session.clip_grad_norm_",
}
_OF_LOAD = dict.fromkeys(
    ("random_init", "overrides", "attention", "trust_remote_code", "base"),
    "ot.load takes it; a module in memory stays as is",
) | {"freeze": "call requires_grad_(False) of the module's parameters instead, before it is offloaded"}


def session_config(name: str | None, given: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration for the model `name`, or for a module in memory if it is None."""
    for key, value in given.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1, cutoff=0.5)
            hint = "a session has no such key" + (f"; did you mean {near[0]}?" if near else "")
            raise UserError(f"{key}={value!r}: {INSTEAD.get(key, hint)}")
        if name is None and key in _OF_LOAD and value and value not in ("auto", "model"):
            raise UserError(f"{key}={value!r}: {_OF_LOAD[key]}")
    if given.get("overlap") == "backward":
        raise UserError("overlap='backward': rate and clipping are known only after it; use overlap='forward'")
    refuse_unwritable([name or ""])
    values: dict[str, dict[str, Any]] = {
        "model": {"activation_checkpointing": "off"} if name is None else {"name": name},
        "placement": {"engine": "tiered"},
        "save": {"every": 1},  # makes the plan count memory for saves
        "train": {"gradient_accumulation_steps": 2},  # the plan allows for accumulation
    }
    for key, value in given.items():
        if key in ("nvme", "freeze") and (value is None or isinstance(value, str | Path | Iterable)):
            value = [value] if isinstance(value, str | Path) else list(value or ())
            refuse_unwritable(list(map(str, value)))
        section, _, leaf = KEYS[key].partition(".")
        values.setdefault(section, {})[leaf] = value
    with translate_errors():
        return validated(values)


_FLAGS = {valued: "|".join(flag for flag in FLAGS if bool(FLAGS[flag].metavar) == valued) for valued in (True, False)}
_SPELLED = re.compile(
    rf"(?P<flag>{_FLAGS[True]})(?![\w-])(?:[ =](?P<value>[\w./][\w./-]*))?|(?P<switch>{_FLAGS[False]})(?![\w-])"
    rf"|\b(?P<key>{'|'.join(map(re.escape, all_keys()))})\b"
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Within this context, replace flags and keys in UserError messages by the caller's keywords."""
    try:
        yield
    except UserError as error:
        raise UserError(_SPELLED.sub(_keyword, str(error))) from error


def _keyword(found: re.Match[str]) -> str:
    """Return the keyword for a flag, with its value if one follows, or for a key: `--nvme /a` is `nvme=["/a"]`."""
    key = found["key"] or FLAGS[found["flag"] or found["switch"]].key
    leaf, value = "rule" if key == KEYS["rule"] else key.rpartition(".")[2], found["value"]
    if found["switch"]:
        return f"{leaf}=True"
    if value is None:
        return leaf
    if leaf == "nvme":
        return f'nvme=["{value}"]'
    return f"{leaf}={value}" if re.fullmatch(r"[\d.]+", value) else f'{leaf}="{value}"'


def load(
    name: str | Path, *, say: Say = print, image_patches: int | Literal["auto"] = "auto", **keys: Unpack[SessionKeys]
) -> Session:
    """Load a causal language model or an image-text model of transformers with offloaded weights.

    Args:
        name: a directory, a hub id, or a preset.
        say: receives the plan as text.
        image_patches: of an image-text model, the patches of a row's images that the plan counts; "auto": as many as
            a row has room for. 0: rows hold text alone, and of a model that transformers has without its parts for
            images, only the language model is loaded.
        keys: configuration as on the command line: dtype, nvme, params, optimizer, ram_fraction, ... (docs/library.md).

    Raises UserError for invalid keys, an unusable model, or a plan that does not fit.
    """
    config = session_config(str(name), keys)
    with translate_errors():
        if image_patches != "auto" and (type(image_patches) is not int or image_patches < 0):
            raise UserError(f"image_patches={image_patches!r}: must be a number of patches, 0 or more, or 'auto'")
        say = _joined(say)
        source = rank_zero_first(
            lambda: resolve_model(config.model, seed=config.train.seed, image_patches=image_patches)
        )
        if source.shape.images and config.model.offload_activations:
            why = "the inputs of a vision tower's blocks are not planned: leave it out, or give image_patches=0"
            raise UserError(f"offload_activations: {why}")
        planned = _planned(config, source, say=say)

        def made(parts: EngineParts, folder: Path) -> _Made:
            without, checkpointed = parameters_without_memory(), planned.plan.work.checkpointed
            model = source.build(dtype=parts.dtype, context=without, checkpointed=checkpointed).model
            uses = without_values(model, dtype=parts.dtype, device=parts.device.torch_device)
            set_buffers(model, source.buffers(), parts.device.torch_device)
            save_model_config(source, folder, dtype=parts.dtype, end_of_text=None)
            return model, uses, source.weights(), True

        return _session(planned, made, say=say)


def offload(
    module: nn.Module, *, blocks: Sequence[str] | None = None, say: Say = print, **keys: Unpack[SessionKeys]
) -> Session:
    """Offload a module that is in memory. Its parameters stay the same objects.

    Args:
        module: any module with bf16 or fp32 parameters. Those with requires_grad=False get no master weights or
            moments.
        blocks: names of the repeated blocks, whose weights are on the device one block at a time, or of ModuleLists
            of them. None: the children of each ModuleList or Sequential of modules of one class.
        say: receives the plan as text.
        keys: as for `load`. `dtype` defaults to the parameters' dtype.

    Raises UserError for invalid keys, parameters of several dtypes without `dtype`, a compiled module, or a plan that
    does not fit.
    """
    _refuse_unusable(module)
    parameters = dict(module.named_parameters())
    config = session_config(None, {"dtype": _dtype_of(parameters, given="dtype" in keys), **keys})
    source = SimpleNamespace(shape=shape_of(module, blocks=blocks), random=False, identity={})
    with translate_errors():
        say = _joined(say)
        here = sum(p.nbytes for p in parameters.values() if p.device.type == "cpu")
        planned = _planned(config, source, say=say, moves=here)

        def made(parts: EngineParts, folder: Path) -> _Made:
            from_config = _keep_configuration(module, folder)
            held = {name: parameter.detach() for name, parameter in parameters.items()}
            if parts.node.rank:
                held.clear()  # all ranks get the weights of rank 0
            for parameter in parameters.values():
                parameter.grad = None
            for part in module.modules():
                for key, buffer in part._buffers.items():
                    part._buffers[key] = None if buffer is None else buffer.to(parts.device.torch_device)
            uses = {name: [parameter] for name, parameter in parameters.items()}
            return module, uses, ((name, held.pop(name)) for name in parameters), from_config

        return _session(planned, made, say=say)


def _joined(say: Say) -> Say:
    """Join the ranks that torchrun or accelerate has started on this machine; return `say`, silent on others than 0."""
    world = ranks_of_environment()[1] if {"RANK", "LOCAL_RANK"} <= os.environ.keys() else 1
    if dist.is_initialized() and dist.get_world_size() != world:
        processes = f"torch.distributed has {dist.get_world_size()} processes, the environment {world}"
        raise UserError(f"{processes}: start them with torchrun or accelerate launch")
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world > 1:
        raise UserError(f"{world} processes on several machines, on which the command alone trains (docs/scaling.md)")
    if world > 1 and place_here()[1] == 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        join()
    return say if place_here()[0] == 0 else lambda line: None


# -- planning and building --------------------------------------------------------------------------------------------


def _planned(config: TrainConfig, source: Any, *, say: Say, moves: int = 0) -> Planned:
    """Plan the session, on all ranks alike, and print the plan. `source` has the model's shape.

    `moves`: bytes of the model in this process, which are freed while the weights are placed.
    """
    refuse_other_default()
    refuse_other_programs(config.model_dump(mode="json"))
    machine = from_rank_zero(lambda: machine_here(config.placement), MachineProfile)
    planned = _plan_on(machine, config, source, moves=moves)
    if machine_rates.is_due_in_session(planned):
        planned = _plan_on(machine_rates.rates_at_start(planned, say=say), config, source, moves=moves)
    plan = planned.plan
    say(plan.describe())
    plan.refuse(force=planned.config.placement.force)
    refuse_other_data({"plan": zlib.crc32(json.dumps(plan.to_json(), sort_keys=True).encode())}, planned.layout)
    return planned


def _plan_on(machine: MachineProfile, config: TrainConfig, source: Any, *, moves: int) -> Planned:
    """Plan on this machine, next to what this process already uses. Raises UserError for fp16."""
    world, memory = place_here()[1], psutil.Process().memory_info()
    usual = PROCESS + CUDA_PROCESS * (machine.gpu is not None)
    own = memory.rss - memory.shared - moves  # mapped files are reclaimable
    # host memory of all ranks' processes that the plan counts again (`moves` included), and what is beyond
    mine = [max(0, min(own, usual)) + moves, max(0, memory.rss - moves - usual)]
    counted, beside = map(sum, zip(*all_gather_json(mine, list[int]), strict=True))
    free = replace(machine, ram_bytes=machine.ram_bytes + counted)
    tokens = config.train.micro_batch_size * (1024 if config.data.seq_len == "auto" else config.data.seq_len)
    whole = config.with_keys("model", loss_chunk=tokens)  # the caller's loss uses all logits, unchunked
    # saves=False: the directory of a save is not known yet, so its disk space cannot be planned.
    found = planning.planned(whole, source, free, world=world, saves=False)
    if found.config.model.dtype == "fp16":
        raise UserError('a session has no loss scale, so no fp16: use dtype="bf16", or "fp32" if the GPU has no bf16')
    plan = found.plan
    if beside:
        item = Item("ram", "libraries and data", beside, "of the caller, in this process when it was planned")
        ram = {key: size + beside for key, size in plan.tiers["ram"].items()}
        plan = replace(plan, items=(*plan.items, item), tiers=plan.tiers | {"ram": ram})
    return replace(found, plan=plan, machine=machine)


# A module, its parameters by weight name, (name, initial master) of each, and whether transformers builds the module
# from the configuration that was written
_Made = tuple[nn.Module, dict[str, list[nn.Parameter]], Iterator[tuple[str, torch.Tensor]], bool]


def _session(planned: Planned, made: Callable[[EngineParts, Path], _Made], *, say: Say) -> Session:
    """Open device, drives and kernels, and place the weights of what `made` returns, which writes its configuration."""
    set_malloc_threshold("tiered")
    plan, work = planned.plan, planned.plan.work
    drives = [Path(drive).expanduser() for drive in planned.config.placement.nvme] if plan.uses_drives else []
    with ExitStack() as stack:
        places = lease_drives(drives, stack, say=say)
        assert isinstance(plan.sizes, TierSizes)
        once = tuple(replace(weight, uses=1) for weight in work.shape.weights)  # one parameter object each
        one_use = replace(work, shape=replace(work.shape, weights=once))
        parts = open_parts(one_use, plan.placement, plan.sizes, places, stack=stack, say=say)
        # a subdirectory, so that the scratch directory's lock file is not copied with it
        folder = stack.enter_context(scratch("offload-trainer-session-")) / "model"
        folder.mkdir()
        identity = {"session": True, CONFIG: planned.source.identity.get(CONFIG)}
        record = record_of(planned, identity=identity, model=folder)
        model, uses, masters, from_config = made(parts, folder)
        offloaded = OffloadedModel(model, uses, parts, seed=planned.config.train.seed)
        stack.callback(offloaded.close)
        offloaded.adds_up = parts.gradient_dtype is torch.float32
        offloaded.put((name, master.to(parts.dtype), master) for name, master in masters)
        return_now()
        if work.inputs_away:
            offloaded.keep_inputs(inputs_of(work))
        return Session(model, offloaded, plan=plan, record=record, from_config=from_config, opened=stack.pop_all())


# -- the shape of a module in memory ---------------------------------------------------------------------------------


def shape_of(module: nn.Module, *, blocks: Sequence[str] | None) -> ModelShape:
    """Return a module's shape, in part estimated. `blocks`: names of blocks or of ModuleLists; None: repeated ones."""
    names: list[str] = []
    parts = dict(module.named_modules())
    for name, part in parts.items() if blocks is None else ():  # the outermost with several children of one class
        alike = len({type(child) for child in part.children()}) == 1 and len(list(part.children())) > 1
        nested = any(name.startswith(f"{block}.") for block in names)
        if isinstance(part, nn.ModuleList | nn.Sequential) and alike and not nested:
            names += [f"{name}.{key}".lstrip(".") for key, child in part.named_children() if [*child.parameters()]]
    for name in blocks or ():
        if name not in parts:
            names_here = ", ".join(list(parts)[1:9])
            raise UserError(f"blocks={name!r}: the module has no submodule of that name; it has {names_here}")
        inner = [f"{name}.{key}".lstrip(".") for key, _ in parts[name].named_children()]
        names += inner if isinstance(parts[name], nn.ModuleList) else [name]
    weights = []
    for name, parameter in module.named_parameters():
        unit, block = unit_of(name, names)
        weights.append(Weight(name, tuple(parameter.shape), trainable=parameter.requires_grad, unit=unit, block=block))
    inside = [weight.shape for weight in weights if weight.block and len(weight.shape) > 1] or [(1, 1)]
    outside = [weight.shape[0] for weight in weights if not weight.block and len(weight.shape) > 1]
    return ModelShape(
        weights=tuple(weights),
        layers=_told(module, "num_hidden_layers") or len(names) or 1,
        hidden=_told(module, "hidden_size") or min(min(shape) for shape in inside),
        vocabulary=_told(module, "vocab_size") or max(outside, default=1),
        context=_told(module, "max_position_embeddings") or 2048,
    )


def _told(module: nn.Module, key: str) -> int | None:
    """Return an integer of the module's transformers (text) configuration; None if it lacks the key."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    found = getattr(text, key, None)
    return found if isinstance(found, int) else None


def _refuse_unusable(module: nn.Module) -> None:
    """Raise UserError for what cannot be offloaded: max_norm, torch.compile, and tensors without shape or values."""
    for name, part in module.named_modules():
        told = f"{name or 'the module'} ({type(part).__name__})"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            why = "which would write to an offloaded weight: set it to None, or scale the rows in your own forward"
            raise UserError(f"{told} has max_norm={part.max_norm}, {why}")
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            raise UserError(f"{told} is compiled: offload the module that was passed to torch.compile; it runs eagerly")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UserError(f"{name} has no shape before the first forward: call the module once before offloading it")
        if tensor.is_meta:
            raise UserError(f"{name} is on the meta device and has no values: load or initialise it before offloading")


def _dtype_of(parameters: dict[str, nn.Parameter], *, given: bool) -> str:
    """Return the dtype of most elements. UserError for unsupported ones, and for several, unless one is `given`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    found: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.dtype not in names:
            raise UserError(f"{name} is {parameter.dtype}: weights of bf16 and fp32 can be offloaded")
        found.setdefault(names[parameter.dtype], []).append(name)
    if not found:
        raise UserError("the module has no parameters")
    if len(found) > 1 and not given:
        told = ", ".join(f"{len(its)} in {dtype} ({its[0]})" for dtype, its in found.items())
        raise UserError(f"the module has several dtypes, {told}: choose one, such as dtype={next(iter(found))!r}")
    return max(found, key=lambda dtype: sum(parameters[name].numel() for name in found[dtype]))


def _keep_configuration(module: nn.Module, folder: Path) -> bool:
    """Write the configuration of a transformers model; return whether transformers builds this model from it."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return False
    config = copy.deepcopy(config)
    if type(module).__name__ in class_names(config):
        config.architectures = [type(module).__name__]
    write_config(config, folder)
    try:
        built = meta_model(config, trust_remote_code=False)
    except Exception:  # transformers' constructors fail in many ways for another kind of model
        return False
    return [name for name, _ in built.named_parameters()] == [name for name, _ in module.named_parameters()]
