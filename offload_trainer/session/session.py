"""Session: an offloaded model for a custom training loop, with its optimizer, gradient clipping, saving and export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from math import isfinite
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import psutil
import torch
from torch import nn

from offload_trainer.common.errors import NonFiniteGradient, UserError
from offload_trainer.common.units import format_bytes
from offload_trainer.model.pretrained import persistent_buffers
from offload_trainer.offloading.autograd import not_compiled, refuse_recording
from offload_trainer.offloading.model import OffloadedModel
from offload_trainer.offloading.weights.parameter import LazyWeight, OffloadedParameter, refuse_write, refuse_written
from offload_trainer.optim.norms import clip_factor
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.tiered.state_formats import ADAMW, MUON, UpdateRule
from offload_trainer.ranks import wait_for_all
from offload_trainer.run.checkpoint import RunRecord
from offload_trainer.session import optimizer, saving
from offload_trainer.storage.tensorfile import SAFETENSORS_DTYPES


class Session:
    """An offloaded model and its training state, created by `ot.load` and `ot.offload`.

    Use it as a context manager, or call `close`, to free memory and drives. `model` is the module to call; `plan` the
    placement; `device` the device that computes; `dtype` that of the offloaded weights; `rank` and `world` the number
    of this process among all that train.

    With several ranks a step uses the mean of the gradients of all ranks, as DistributedDataParallel does. All ranks
    make the same calls; `export` writes on rank 0 only.
    """

    def __init__(
        self,
        model: nn.Module,
        offloaded: OffloadedModel,
        *,
        plan: Plan,
        record: RunRecord,
        from_config: bool,
        opened: ExitStack,
    ) -> None:
        """Install the hooks on the model. `record`: metadata of saves; `opened` is closed with the session."""
        self.model = model
        self.plan = plan
        first = next(iter(offloaded.parameters.values()))[0]
        self.device, self.dtype = first.device, first.dtype
        self.rank, self.world = offloaded.node.rank, offloaded.node.world
        self._offloaded, self._record, self._from_config, self._opened = offloaded, record, from_config, opened
        self._model_parameters = [use for uses in offloaded.parameters.values() for use in uses]
        self._optimizer: optimizer.OffloadedOptimizer | None = None
        self._pass = ExitStack()
        self._residents_broadcast = self.world == 1  # the other parameters have the values of rank 0
        self._depth = 0  # nesting depth of the model's forwards
        self._counted = False  # norms of the accumulated gradients are being computed
        self._norm: float | None = None  # norm of the accumulated gradients when `_taken` was recorded
        self._taken: tuple[int, dict[torch.Tensor, int]] = (0, {})
        self._clip = 1.0
        offloaded.before_sums = self._apply_clip
        offloaded.guard_reads()
        self._buffers = frozenset(persistent_buffers(model))  # without those of adapters, which come later
        for module in model.modules():
            if any(isinstance(parameter, OffloadedParameter) for parameter in module._parameters.values()):
                module.register_load_state_dict_pre_hook(self._keep_equal)
        model.register_forward_pre_hook(not_compiled(self._begin_forward), prepend=True)
        model.register_forward_hook(not_compiled(self._end_forward), always_call=True)
        model.forward = self._around(model)  # PEFT's AdaLoRA calls forward directly, without hooks
        model.state_dict = self._state_dict  # type: ignore[method-assign, assignment]

    # -- forward and backward -----------------------------------------------------------------------------------------

    @property
    def fetches_together(self) -> bool:
        """Return whether ranks fetch weights together, so that all of them must make the same number of forwards."""
        return self._offloaded.node.meet is not None

    @contextmanager
    def micro_batch(self, *, last: bool = True) -> Iterator[None]:
        """Mark the forward, loss and backward of one micro-batch.

        `last`: the optimizer step follows, so gradient norms are computed during this backward. Outside this context
        every backward counts as the last one, which computes additional norms and changes nothing else.

        With several ranks this context is required, around one backward of every rank, since gradients are exchanged
        at its end. A rank without rows has no backward in it.
        """
        self._refuse_closed()
        wait_for_all()  # without the limit of 300 s within a step: rank 0 may have exported meanwhile
        if not self._residents_broadcast:
            optimizer.broadcast_residents(self._parameters(), self._offloaded.node)
            self._residents_broadcast = True
        # Without trained weights another optimizer may have the adapters, and the session does not see its steps.
        self._counted = last or (self._counted and bool(self._offloaded.trained))
        self._offloaded.last = self._counted
        with self._offloaded.micro_batch(last=last):
            yield
        if self._counted and self.world > 1:
            optimizer.average_gradients(self._parameters(), self._offloaded.node)

    def _begin_forward(self, *_: Any) -> None:
        self._refuse_closed()
        refuse_recording("an offloaded model")
        self._depth += 1
        if self._depth == 1:
            if self._offloaded.activations:
                self._offloaded.activations.attach(self.model)
            self._pass.enter_context(self._offloaded.forward(then=torch.is_grad_enabled()))

    def _end_forward(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)  # `_begin_forward` may have raised before it counted
        if self._depth == 0:
            self._pass.close()

    def _around(self, model: nn.Module) -> MethodType:
        """Return the model's forward, each call of which is a whole forward of the session.

        It is a bound method, since TRL 1.10 reads its `__func__`, and is not compiled, since a graph cannot follow
        weights that move.
        """
        forward = model.forward
        signature = inspect.signature(forward)

        @wraps(forward)
        def around(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._begin_forward()
            try:
                return forward(*args, **kwargs)
            finally:
                self._end_forward()

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        around.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return MethodType(torch.compiler.disable(around), model)

    # -- a step -------------------------------------------------------------------------------------------------------

    def adamw(
        self,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> optimizer.OffloadedOptimizer:
        """Create the session's optimizer, with the arguments and parameter groups of torch.optim.AdamW.

        `params`: None means all parameters with requires_grad. Groups may include parameters that are not offloaded,
        such as adapters; torch's fused AdamW updates those. Offloaded parameters outside all groups are not updated but
        still occupy optimizer state; to avoid that, call `requires_grad_(False)` on them before offloading the model.
        Raises UserError if the session already has an optimizer or stores Muon's state.
        """
        return self._made(ADAMW, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def muon(
        self,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> optimizer.OffloadedOptimizer:
        """Create the session's optimizer with the Muon rule, which orthogonalises the updates of whole matrices.

        The matrices of the model's blocks are updated as torch.optim.Muon does, with its arguments, its Nesterov
        momentum and five iterations. All other parameters of the groups are updated by AdamW with `betas` and `eps`;
        put them in groups of their own to give them another rate or decay. `adjust_lr_fn`: None means "original".
        The session must have been created with rule="muon". Raises UserError as `adamw` does.
        """
        muon = {"momentum": momentum, "adjust_lr_fn": adjust_lr_fn or "original"}
        return self._made(MUON, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **muon})

    def _made(
        self, rule: UpdateRule, params: Iterable[Any] | None, defaults: dict[str, Any]
    ) -> optimizer.OffloadedOptimizer:
        self._refuse_closed()
        if self._optimizer is not None:
            raise UserError(f"a session has one optimizer: give its groups to the first call of {rule.name}()")
        kept = self._offloaded.store.format.rule
        if rule != kept:
            raise UserError(f"the session stores {kept.title}'s state: call {kept.name}(), or give rule={rule.name!r}")
        if params is None:
            params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        made = optimizer.OffloadedOptimizer(params, session=self, rule=rule, defaults=defaults)
        if not made.residents and not self._offloaded.trained:
            raise UserError("every weight of the session is frozen, and no others are given: there is nothing to train")
        self.plan = optimizer.counted_in(self.plan, made.residents.values())
        self._optimizer = made
        return made

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip all gradients accumulated since the last step; return their norm before clipping, fp32 and 0-dim.

        The next step multiplies the gradients by max_norm / (norm + 1e-6) if that is less than 1. Arguments and results
        equal those of torch.nn.utils.clip_grad_norm_ bit for bit; a second call clips the clipped gradients. Norms are
        combined in the order of the model's parameters, then of the other parameters in the optimizer's groups. A
        `norm_type` other than 2 reads every gradient a second time.

        Raises UserError if `max_norm` is not positive, and NonFiniteGradient if `error_if_nonfinite` and the norm is
        not finite.
        """
        self._refuse_closed()
        if max_norm <= 0:
            raise UserError(f"clip_grad_norm_({max_norm}): give a limit above 0; float('inf') only computes the norm")
        self._apply_clip()
        norm = self._norm_of_sums()  # taken for any norm_type, so that later gradients are detected
        if norm_type != 2.0:
            with torch.no_grad():
                norm = optimizer.norm_of_all(self._parameters(), self._norms(norm_type), norm_type)
        if error_if_nonfinite and not isfinite(norm):
            raise NonFiniteGradient(f"the gradients' norm of order {norm_type} is {norm}: nothing was clipped")
        self._clip = clip_factor(norm, limit=max_norm)
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def _apply_clip(self) -> None:
        """Multiply the gradients by the pending clipping factor now, as torch does when it clips."""
        if self._clip == 1.0:
            return
        self._refuse_later_gradients()
        clip, self._clip, self._norm = self._clip, 1.0, None
        self._offloaded.scale_gradients(clip)
        for gradient in optimizer.with_gradient(self._parameters()).values():
            gradient.mul_(clip)

    @torch.no_grad()
    def _norm_of_sums(self) -> float:
        """Return the 2-norm of all gradients, without the pending clipping factor."""
        self._refuse_later_gradients()
        taken = self._gradients_now()
        if self._norm is None or taken != self._taken:
            self._norm = optimizer.norm_of_all(self._parameters(), self._norms())
            self._taken = taken
        return self._norm

    def _norms(self, order: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norms of the offloaded gradients, the means over all ranks, by weight name."""
        if self.world > 1 and not self._counted:
            where = "session.micro_batch(last=True), where ranks exchange gradients"
            raise UserError(f"{self.world} ranks: the backward before a step must be in {where}")
        return {name: norm / self.world for name, norm in self._offloaded.norms(order).items()}

    def _refuse_later_gradients(self) -> None:
        """Raise UserError if a clipping factor is pending and gradients have changed since it was computed."""
        if self._clip != 1.0 and self._gradients_now() != self._taken:
            raise UserError("a backward came after clip_grad_norm_, which was for the gradients before it")

    def _gradients_now(self) -> tuple[int, dict[torch.Tensor, int]]:
        """Return a value that stays equal only as long as no gradient arrives or is modified."""
        gradients = optimizer.with_gradient(self._parameters()).values()
        return self._offloaded.sum_changes, {gradient: gradient._version for gradient in gradients}

    def _parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters, then all parameters of the optimizer's groups; some appear twice."""
        groups = self._optimizer.param_groups if self._optimizer else ()
        return [*self.model.parameters(), *(parameter for group in groups for parameter in group["params"])]

    @torch.no_grad()
    def _step(self) -> None:
        """Update all parameters with gradients, and clear these. NonFiniteGradient: nothing was changed."""
        self._refuse_closed()
        refuse_written(self._model_parameters)
        arrived, made = self._offloaded.gradients.arrived, self.optimizer
        if not arrived and not optimizer.with_gradient(self._parameters()):
            return  # like torch's optimizers when no parameter has a gradient
        norm = self._norm_of_sums()
        if not isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm}: nothing was changed; zero_grad() drops gradients")
        if arrived:
            weights = {name: place.weight for name, (_, place) in self._offloaded.places.items()}
            self._offloaded.step(made.rules(weights), scale=self._clip / self.world)
        optimizer.update_residents(made.param_groups, made.state, scale=self._clip)
        self._clear()
        self._offloaded.begin()

    def _clear(self) -> None:
        self._offloaded.drop()
        for parameter in optimizer.with_gradient(self._parameters()):
            parameter.grad = None
        self._counted, self._norm, self._clip = False, None, 1.0
        self._taken = 0, {}
        self._offloaded.last = True

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def configuration(self) -> Path:
        """Directory with a copy of the model's configuration from when the session was created."""
        return self._record.model

    @property
    def rule(self) -> str:
        """The update rule whose state the session stores: "adamw" or "muon"."""
        return self._offloaded.store.format.rule.name

    @property
    def base(self) -> str:
        """The format of the base's quantised matrices, "nf4" or "int8"; "model" if none is quantised."""
        weights = [place.weight for unit in self._offloaded.units for place in unit.places]
        return next((weight.quantised for weight in weights if weight.quantised), "model")

    @property
    def trained(self) -> Sequence[str]:
        """Names of the weights with optimizer state, those that are not offloaded last."""
        return (*self._offloaded.trained, *(self._optimizer.residents if self._optimizer else ()))

    def named_weights(self, *, merge: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, copy on the CPU in the model's dtype) of each offloaded weight, tied weights once.

        They are the weights after the last step, one at a time, so a generation server can take them after each step.
        `merge`: merge LoRA adapters into them, bit for bit as PEFT's merge_and_unload; raises UserError for other
        parameters that cannot be merged.
        """
        self._refuse_closed()
        change: saving.Change = saving.merging(self.model) if merge else lambda _, weight: weight
        for name in self._offloaded.parameters:
            yield name, change(name, self._offloaded.weight(name))

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of one weight on the CPU, in the model's dtype."""
        self._refuse_closed()
        return self._offloaded.weight(name)

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over (name, master weight on the CPU in fp32); for a frozen weight, the weight itself."""
        self._refuse_closed()
        return self._offloaded.masters()

    def _state_dict(self, *_: Any, destination: Any = None, **words: Any) -> dict[str, Any]:
        """Return lazily read weights to an outer module's state_dict(), such as PEFT's, else copies, if they fit."""
        if destination is not None:
            return listed(self.model, self.weight, destination=destination, **words)
        size, free = sum(p.nbytes for p in self._model_parameters), psutil.virtual_memory().available
        if 2 * size > free:
            sizes = f"{format_bytes(size)} of {format_bytes(free)} that are free"
            raise UserError(
                f"state_dict() would hold all weights at once, {sizes}: use session.export(directory), "
                "session.save(directory), or session.named_weights(), which gives one at a time"
            )
        found = listed(self.model, cache(self.weight), **words)  # each tied weight once
        return {name: value.read() if isinstance(value, LazyWeight) else value for name, value in found.items()}

    def _keep_equal(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Before load_state_dict (as in PEFT), replace values equal to a weight's with its parameter; refuse others."""
        for name, parameter in module._parameters.items():
            given = state_dict.get(prefix + name)
            if given is None or not isinstance(parameter, OffloadedParameter) or given.shape != parameter.shape:
                continue
            if torch.equal(given.to("cpu", parameter.dtype), self.weight(parameter.weight)):
                state_dict[prefix + name] = parameter
            elif metadata.get("assign_to_params_buffers"):  # the parameter would not learn of it
                refuse_write("load_state_dict(assign=True)", parameter)

    # -- saves, in saving.py ------------------------------------------------------------------------------------------

    save, resume, export = saving.save, saving.resume, saving.export

    @property
    def _kept_buffers(self) -> dict[str, torch.Tensor]:
        """The model's persistent buffers by name, without those of adapters. Raises UserError for unknown dtypes."""
        found = {name: one for name, one in persistent_buffers(self.model).items() if name in self._buffers}
        for name, buffer in found.items():
            if buffer.dtype not in SAFETENSORS_DTYPES:
                raise UserError(f"buffer {name} is {buffer.dtype} and cannot be written: register it persistent=False")
        return found

    @property
    def optimizer(self) -> optimizer.OffloadedOptimizer:
        """The optimizer that `adamw` or `muon` returned. Raises UserError if none was called."""
        if self._optimizer is None:
            raise UserError("call adamw() or muon() first: a save holds the rates of its groups")
        return self._optimizer

    # -- closing ------------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._offloaded.closed:
            raise UserError("the session is closed")

    def close(self) -> None:
        """Free memory and files. The model has no weights afterwards, and reading one raises an error."""
        self._pass.close()
        self._opened.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listed(
    model: nn.Module,
    read: Callable[[str], torch.Tensor],
    *,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """Return a state_dict of LazyWeights, which `read` by name; safetensors can write those that PEFT saves."""
    found = {} if destination is None else destination
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = [module for module in (*model.modules(), head) if isinstance(module, nn.Embedding) or module is head]
    tables = {weight for one in modules if isinstance(weight := getattr(one, "weight", None), nn.Parameter)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, OffloadedParameter):
            keeps = parameter.dim() < 2 or parameter in tables
            found[prefix + name] = LazyWeight.of(parameter, partial(read, parameter.weight), keeps=keeps)
        else:
            found[prefix + name] = parameter if keep_vars else parameter.detach()
    found |= {prefix + name: buffer for name, buffer in persistent_buffers(model).items()}
    return found
