"""Integration with transformers' and TRL's Trainers: a mixin class, and models whose weights are offloaded.

    class MyTrainer(Offloaded, SFTTrainer): pass
    MyTrainer(load("Qwen/Qwen3-8B", nvme=["/mnt/ssd"]), args, ...).train()

The Trainer keeps its loop, data, schedule, callbacks and logs. The mixin routes gradients, optimizer state and weight
files to the Session. A checkpoint has the Trainer's layout, with the Session's state in `offload/`. If only
adapters are trained, the Session handles the micro-batch boundaries and the Trainer does the rest.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack
from unittest.mock import patch

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, rotate_checkpoints

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import file_bytes
from offload_trainer.model.loader import write_config
from offload_trainer.offloading.weights.parameter import OffloadedParameter
from offload_trainer.ranks import wait_for_all
from offload_trainer.run.export import EXPORT
from offload_trainer.session.api import SessionKeys
from offload_trainer.session.api import load as load_session
from offload_trainer.session.optimizer import OffloadedOptimizer
from offload_trainer.session.session import Session, listed
from offload_trainer.storage.atomic_io import sync_tree
from offload_trainer.storage.manifest import MANIFEST
from offload_trainer.storage.owned_dirs import ScratchDirectory, remove_dead
from offload_trainer.storage.tensorfile import DTYPES

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # at run time the subclass supplies the Trainer, after Offloaded in its bases

STATE = "offload"  # subdirectory of a checkpoint with the session's state
# Scratch directory where a model is written before its files are renamed into place. The Trainer pushes no name that
# begins with an underscore to the hub.
_WORK = "_export"
_CARD = "README.md"
_TRAINER_STATE = "trainer_state.json"  # the Trainer writes this file last
_ADAMW = ("adamw_torch", "adamw_torch_fused")
# TRL's arguments, by the names of their classes, since TRL need not be installed
_PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")  # an example is two rows, chosen and rejected
_GENERATING = ("GRPOConfig", "RLOOConfig")  # their reference model, without adapters, is a second one unless beta is 0
_MAKES = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")  # methods


def load(
    name: str | Path,
    *,
    say: Callable[[str], None] = print,
    image_patches: int | Literal["auto"] = "auto",
    **keys: Unpack[SessionKeys],
) -> PreTrainedModel:
    """Load a model as `offload_trainer.load` does and return it, ready for a Trainer with `Offloaded`."""
    return attach(load_session(name, say=say, image_patches=image_patches, **keys))


def attach(session: Session) -> Any:
    """Attach the session to its model, whose state_dict and save_pretrained then stream weights; return the model."""
    model: Any = session.model
    model._offload_session = session
    model.state_dict = partial(listed, model, session.weight)
    if isinstance(model, PreTrainedModel):
        model.save_pretrained = partial(_save_pretrained, session)
        with suppress(OSError):  # only models for generation have a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(session.configuration)
    return model


def session_of(model: nn.Module) -> Session:
    """Return the session that was attached to the model or to one of its submodules. Raises UserError if none was."""
    for module in model.modules():
        if (session := module.__dict__.get("_offload_session")) is not None:
            return session
    raise UserError(
        "this model's weights are not offloaded: make it with offload_trainer.hf.load(...), or with "
        "offload_trainer.hf.attach(session)"
    )


class Offloaded(_Trainer):
    """Mixin for a Trainer class, which must come after it: `class MyTrainer(Offloaded, Trainer): pass`."""

    optimizer: Any

    def __init__(self, model: Any = None, *positional: Any, **words: Any) -> None:
        if not isinstance(model, nn.Module):
            raise UserError("Offloaded needs the model itself, of offload_trainer.hf.load(...); it takes no model_init")
        self._session = session_of(model)
        args = next((given for given in (*positional, *words.values()) if isinstance(given, TrainingArguments)), None)
        if args is not None and args.mixed_precision == "bf16" and self._session.dtype is torch.bfloat16:
            args.bf16, args.mixed_precision = False, "no"
            warnings.warn(f"bf16=True changes nothing: {_AUTOCAST}; they are in bf16 already", stacklevel=2)
        mistakes = list(argument_mistakes(args, self._session)) if args is not None else []
        if words.get("optimizer_cls_and_kwargs") or any(words.get("optimizers", ())):
            mistakes.append("optimizers=: leave it out; the arguments' rate, betas and decay go to the session's AdamW")
        _refuse(mistakes)
        if positional:
            super().__init__(model, *positional, **words)
        else:
            super().__init__(model=model, **words)  # some Trainers take the model by its name only
        _refuse([*argument_mistakes(self.args, self._session), *model_mistakes(self.model, self._session)])
        if self._session.trained:
            self._make_own_optimizer()

    def _make_own_optimizer(self) -> None:
        """Call a subclass's create_optimizer now. Refuse one that finds no gradients, and those never called."""
        from transformers import Trainer

        classes = type(self).__mro__
        here = classes.index(Offloaded)
        overrides = any("create_optimizer" in vars(one) for one in classes[:here])
        for name in _MAKES:
            following = next((one for one in classes[here + 1 :] if name in vars(one)), None)
            front = next((one for one in classes[:here] if name in vars(one)), None)
            if (following not in (None, Trainer) and not overrides) or (front and name != "create_optimizer"):
                raise UserError(
                    f"{name} of {(front or following).__name__} would not be called: override create_optimizer in a "  # type: ignore[union-attr]
                    "class in front of Offloaded, to return offload_trainer.hf.session_of(self.model).adamw(groups)"
                )
        if overrides:
            made = self.create_optimizer() or self.optimizer
            if not isinstance(made, OffloadedOptimizer):
                raise UserError(
                    f"create_optimizer of {type(self).__name__} makes {type(made).__name__}, which has no state of the "
                    "weights: return super().create_optimizer(), or session_of(self.model).adamw(groups)"
                )
            self.optimizer = made
            self.create_optimizer = lambda *_, **__: made  # type: ignore[method-assign]

    # -- a step -------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the session's optimizer, with the Trainer's two groups: parameters with and without weight decay.

        It is AdamW, or Muon if the model was loaded with rule="muon". Muon's updates are then as large as AdamW's.
        """
        if not self._session.trained:
            return super().create_optimizer(*(() if model is None else (model,)))
        if self.optimizer is None:
            model = model or self.model
            decays = set(self.get_decay_parameter_names(model))
            trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            args, make = self.args, self._session.adamw
            if self._session.rule == "muon":
                make = partial(self._session.muon, adjust_lr_fn="match_rms_adamw")
            groups = [
                {"params": [p for name, p in trained if (name in decays) == decaying], "weight_decay": decay}
                for decaying, decay in ((True, args.weight_decay), (False, 0.0))
            ]
            betas = args.adam_beta1, args.adam_beta2
            self.optimizer = make(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
        return self.optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create the session's optimizer and its scheduler in place of those of later classes in the MRO."""
        if not self._session.trained:
            return super().create_optimizer_and_scheduler(num_training_steps)
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def training_step(self, *positional: Any, **words: Any) -> torch.Tensor:
        with self._session.micro_batch(last=self.accelerator.sync_gradients):
            return super().training_step(*positional, **words)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the gradient norm before clipping; the session applies the clipping factor in the update."""
        if not self._session.trained:
            return super()._clip_grad_norm(model)
        return self._session.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        if grad_norm is not None or not self._session.trained:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._session.clip_grad_norm_(float("inf"))

    def create_accelerator_and_postprocess(self) -> None:
        """Leave the model to the session, also with several ranks, without DistributedDataParallel."""
        super().create_accelerator_and_postprocess()
        if self._session.world > 1:
            prepare = partial(self.accelerator.prepare_model, device_placement=False, evaluation_mode=True)
            self.accelerator.prepare_model = lambda model, **_: prepare(model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the session has already placed it."""

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **words: Any) -> Any:
        """Train as the Trainer does; True resumes from the newest complete checkpoint, and others are refused."""
        state, saves = bool(self._session.trained), self.args.save_strategy != "no"
        if state and saves and not isinstance(self._session.model, PreTrainedModel):
            raise UserError(
                f"save_strategy={self.args.save_strategy.value!r}: the Trainer would copy all weights of a model that "
                "is not transformers': save_strategy='no', and call session.save or session.export"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_whole(Path(self.args.output_dir), state=state))
        elif resume_from_checkpoint and (lack := what_lacks(Path(resume_from_checkpoint), state=state)):
            raise UserError(f"{resume_from_checkpoint} cannot be resumed: {lack}")
        return super().train(resume_from_checkpoint, *positional, **words)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as the Trainer does, but remove older checkpoints only once this one would survive a power cut."""
        output = Path(self._get_output_dir(trial))
        folder = output / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        # A file left by an earlier run would make this checkpoint look complete while it is being written.
        if self.args.should_save:
            (folder / _TRAINER_STATE).unlink(missing_ok=True)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            sync_tree(folder)
            rotate_checkpoints(str(output), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        wait_for_all()  # the file that rank 0 writes next makes the checkpoint complete

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._session.trained:
            self._session.save(Path(output_dir) / STATE)
        with self._saved_apart():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load adapters only. Trained base weights are restored from the master weights with the optimizer state."""
        if not self._session.trained:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._saved_apart():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._session.trained:
            self._session.resume(Path(checkpoint) / STATE)

    def _saved_apart(self) -> AbstractContextManager[object]:
        """Return a context in which the optimizer's state dict has no moments: the session saves those itself."""
        return patch.object(self._session.optimizer, "saved_apart", True) if self._session.trained else nullcontext()

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights together with its moments."""
        if not self._session.trained:
            return super()._load_best_model()
        best = Path(self.state.best_model_checkpoint)
        if lack := what_lacks(best, state=True):
            raise UserError(f"the weights of {best}, the best checkpoint, cannot be loaded: {lack}")
        self._session.resume(best / STATE)


def newest_whole(output: Path, *, state: bool) -> Path:
    """Return the newest complete checkpoint of the Trainer in `output`. Raises UserError without one."""
    found = [folder for folder in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if folder.name.rpartition("-")[2].isdigit()]
    for folder in sorted(found, key=lambda folder: -int(folder.name.rpartition("-")[2])):
        if not what_lacks(folder, state=state):
            return folder
    raise UserError(f"{output} has no checkpoint to resume, of {len(found)} that were begun there")


def what_lacks(folder: Path, *, state: bool) -> str | None:
    """Return why a checkpoint cannot be resumed, or None. `state`: it must have a session's state too."""
    try:
        json.loads(file_bytes(folder / _TRAINER_STATE, most=1 << 30, links=True))  # all lines of the log
    except (OSError, ValueError):
        return f"its {_TRAINER_STATE} is missing or cut short, so it was not written to its end"
    if state and not (folder / STATE / MANIFEST).is_file():
        return f"it has no {STATE}/{MANIFEST}: another Trainer wrote it, or save_only_model was set"
    return None


# -- arguments that do not fit ----------------------------------------------------------------------------------------


_AUTOCAST = "the weights have the dtype that load() gave them, and autocast would copy and round them again"
_IN_PLACE = "it converts offloaded weights in place: leave it out"
_REFUSED = {  # arguments that must not be set, of the Trainer and of TRL, and why
    "bf16": f"{_AUTOCAST}: bf16=False, and load(..., dtype='bf16')",
    "fp16": f"{_AUTOCAST}: fp16=False",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval", "cast_lm_head_to_fp32"), _IN_PLACE),
    "torch_compile": "compiled code keeps weights that have moved, so a session runs eagerly: leave it out",
    **dict.fromkeys(("deepspeed", "fsdp"), "it would place the weights a second time: leave it out"),
    "auto_find_batch_size": "leave it out: load(..., micro_batch_size=N) plans and refuses a number of rows",
    "use_liger_kernel": "leave it out, and apply liger_kernel to the module before ot.offload(module, ...)",
    "activation_offloading": "it would keep weights: leave it out",
    "use_vllm": "leave it out: the model generates, or rollout_func sends session.named_weights() to a server of yours",
    "use_transformers_continuous_batching": "it runs the model in another thread: leave it out",
}


def argument_mistakes(args: TrainingArguments, session: Session) -> Iterator[str]:
    """Yield one message for each training argument that cannot work with offloaded weights, with the remedy."""
    yield from (f"{name}={value}: {why}" for name, why in _REFUSED.items() if (value := getattr(args, name, None)))
    of_trl = _is_one_of(args, _GENERATING)
    if session.trained and of_trl and (beta := getattr(args, "beta", 0.0)):
        yield f"beta={beta}: the reference would be a second model in memory: beta=0.0, or adapters over a frozen base"
    if session.fetches_together and (of_trl or getattr(args, "predict_with_generate", False)):
        yield f"{session.world} ranks that fetch weights together cannot generate: load(..., params='gpu')"
    strategy = HubStrategy(args.hub_strategy)
    pushes_state = strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS) and not args.save_only_model
    if args.push_to_hub and session.trained and pushes_state:
        yield (
            f"hub_strategy={strategy.value!r}: each save would push all masters and moments: 'every_save' or 'end', "
            "which push the model, or save_only_model=True"
        )
    if args.mixed_precision != "no" and not (args.bf16 or args.fp16):
        yield f"ACCELERATE_MIXED_PRECISION={args.mixed_precision}: {_AUTOCAST}: set it to no"
    if session.trained and args.optim not in _ADAMW:
        yield f"optim={str(getattr(args.optim, 'value', args.optim))!r}: AdamW alone, {' or '.join(_ADAMW)}"
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process would be DataParallel: set CUDA_VISIBLE_DEVICES to one"
    if args.world_size != session.world:
        yield f"the Trainer has {args.world_size} processes, the session {session.world}: start both with torchrun"
    if args.device.type != session.device.type:
        yield f"the Trainer's device is {args.device}, the model's {session.device}: leave use_cpu out"
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model with load_best_model_at_end: the best weights come from a checkpoint's state"
    if getattr(args, "precompute_ref_log_probs", None) is False and session.trained:
        yield "the reference would be a second model in memory: precompute_ref_log_probs=True"
    several = 2 if _is_one_of(args, _PAIRS) else 1
    rows, planned = args.per_device_train_batch_size * several, session.plan.work.micro_batch
    if rows > planned:
        yield f"{rows} rows in a micro-batch, and the plan counts {planned}: load(..., micro_batch_size={rows})"
    words: dict[str, Any] = {}
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # transformers' versions differ
        words |= getattr(args, name, None) or {}
    right = {"use_reentrant": False, "every_n_layers": 1, "offload": False, "selective": False}
    for name, value in words.items():
        if name not in right or value != right[name]:
            yield f"gradient_checkpointing_kwargs: {name}={value!r} is not what load() planned with: leave it out"


def _is_one_of(args: TrainingArguments, names: Sequence[str]) -> bool:
    return any(one.__name__ in names for one in type(args).__mro__)


def model_mistakes(model: nn.Module, session: Session) -> Iterator[str]:
    """Yield a message if nothing would be trained, or if the planned optimizer state would be unused."""
    adapters = bool(getattr(model, "peft_config", None))
    offloaded = [p for p in model.parameters() if isinstance(p, OffloadedParameter) and p.requires_grad]
    if adapters and session.trained and not offloaded:
        yield "the base of these adapters was loaded to be trained, with state: load(..., freeze=['.'])"
    if not adapters and not session.trained:
        yield "every weight is fixed, and there are no adapters: leave freeze out, or take peft.get_peft_model"


def _refuse(mistakes: list[str]) -> None:
    if mistakes:
        raise UserError("; ".join(mistakes))


# -- exporting weights ------------------------------------------------------------------------------------------------


def _save_pretrained(session: Session, save_directory: str | Path, **words: Any) -> None:
    """Implement save_pretrained by streaming the weights next to the folder's files. Rank 0 alone writes."""
    harmless = ("is_main_process", "max_shard_size", "safe_serialization")
    if others := [f"{name}={value!r}" for name, value in words.items() if value and name not in harmless]:
        raise UserError(f"save_pretrained of offloaded weights takes a directory only, not {', '.join(others)}")
    if session.rank:
        return
    model: Any = session.model
    folder, dtype = Path(save_directory), next(name for name, dtype in DTYPES.items() if dtype is session.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        remove_dead(folder / _WORK, what=EXPORT)  # left by a killed process
    with ScratchDirectory(folder / _WORK, what=EXPORT) as place:
        session.export(place.path / "model", dtype=dtype, merge=False)
        new = {path.name: path for path in (place.path / "model").iterdir()}
        if session.base == "model" or (folder / _CARD).exists():
            new.pop(_CARD, None)  # the Trainer writes another card; the one that says how a base was rounded is kept
        for name, path in new.items():
            path.replace(folder / name)
        for path in folder.glob("model*.safetensors*"):
            if path.name not in new:
                path.unlink()  # shard of an earlier save that was divided differently
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], session.dtype
    write_config(config, folder, source=session.configuration)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
