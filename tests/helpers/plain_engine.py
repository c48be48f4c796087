"""The reference that tests and the GPU suite compare with: an engine by torch alone, on one device in one process.

On a CPU the tiered engine gives the same bits. On a GPU torch's fused AdamW rounds a product and a sum together, while
the tiered engine's update has the CPU's bits everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from offload_trainer.config import ModelSection, OptimSection
from offload_trainer.data.rows import Batch, weights_in_step
from offload_trainer.engine.protocol import StepResult
from offload_trainer.model.loader import ModelSource
from offload_trainer.model.pretrained import as_parameter
from offload_trainer.optim.norms import clip_factor, norm_of
from offload_trainer.optim.state_files import BlockingSnapshot, EngineState, LossScale
from offload_trainer.plan.planner import checkpointed_blocks
from offload_trainer.plan.shape import decay_groups
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.telemetry.meters import PhaseClock


class PlainEngine:
    """An engine that trains `source` on one device with torch alone."""

    rank, world = 0, 1

    def __init__(self, source: ModelSource, model: ModelSection, optim: OptimSection) -> None:
        self.shape, self._dtype = source.shape, DTYPES[model.dtype]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._module = source.build(dtype=self._dtype, checkpointed=checkpointed_blocks(model, source.shape))
        self._weights = dict(self._module.model.named_parameters())
        trained = [weight for weight in source.shape.weights if weight.trainable]
        self._masters: dict[str, Any] = {
            weight.name: torch.zeros(weight.shape, device=self._device, requires_grad=True) for weight in trained
        }
        self._shapes = {weight.name: tuple(weight.shape) for weight in trained}
        self._fixed = {n: tuple(w.shape) for n, w in self._weights.items() if n not in self._masters}
        with torch.no_grad():
            for name, value in source.weights():
                self._weights[name].copy_(as_parameter(value, self._dtype))
                if name in self._masters:
                    self._masters[name].copy_(value)
        self._module.to(self._device)
        groups = [
            {"params": [self._masters[weight.name] for weight in some], "weight_decay": decay}
            for some, decay in zip(decay_groups(source.shape.weights), (optim.weight_decay, 0.0), strict=True)
            if some
        ]
        self._adam = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        self._clip = optim.max_grad_norm
        self._scale = LossScale.initial(model.dtype)

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        self._module.train()
        scale = self._scale.value
        losses = []
        weights = weights_in_step([batch.counted for batch in batches])
        for batch, weight in zip(batches, weights, strict=True):
            with clock.phase("forward"):
                loss = self._module(*batch.arguments(self._device, training=True))
                losses.append(loss.detach() * weight)
            with clock.phase("backward"):
                (loss * (scale * weight / len(batches))).backward()
                self._collect()
        with clock.phase("update"):
            norm = self._update(lr=lr)
        mean = float(torch.stack(losses).mean())
        return StepResult(loss=mean, grad_norm=norm, loss_scale=scale, skipped=norm is None)

    def _collect(self) -> None:
        """Add this micro-batch's gradients to the sums on the masters."""
        for name, master in self._masters.items():
            grad = self._weights[name].grad
            self._weights[name].grad = None
            if grad is not None:
                total = grad.to(torch.float32)
                master.grad = total if master.grad is None else master.grad + total

    @torch.no_grad()
    def _update(self, *, lr: float) -> float | None:
        """Update the masters and then the weights; return the norm, or None without a change if it is not finite."""
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([norm_of(g.reshape(-1)) for g in grads])) / self._scale.value
        finite = bool(norm.isfinite())
        if finite:
            clip = clip_factor(float(norm), limit=self._clip)
            for grad in grads:
                grad.mul_(clip / self._scale.value)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            for name, master in self._masters.items():
                self._weights[name].copy_(master)
        self._adam.zero_grad()
        self._scale = self._scale.after_step(finite=finite)
        return float(norm) if finite else None

    def synchronize(self) -> None:
        """Return immediately, because a step has finished when `train_step` returns."""

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> float:
        self._module.eval()
        return float(self._module(*batch.arguments(self._device, training=False)))

    def named_master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._weights.items():
            held: torch.Tensor = self._masters[name] if weight.requires_grad else weight
            yield name, held.detach().float().cpu()

    def snapshot(self) -> BlockingSnapshot:
        steps = {name: int(self._adam.state.get(master, {}).get("step", 0)) for name, master in self._masters.items()}
        most = max(steps.values(), default=0)
        others = {name: count for name, count in steps.items() if count != most}
        state = EngineState(optimizer_steps=most, loss_scale=self._scale, weight_steps=others)
        return BlockingSnapshot(state, self._shapes, self._fixed, self._dtype, self._read)

    def _read(self, name: str, kind: str) -> torch.Tensor:
        if kind == "fixed":
            return self._weights[name].detach()
        master = self._masters[name]
        if kind == "master":
            return master.detach()
        state = self._adam.state.get(master)
        return state[kind] if state else torch.zeros_like(master, requires_grad=False)

    def close(self) -> None:
        pass


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of three dimensions, of which each index of the first one selects a matrix."""
    return weight if weight.dim() == 3 else weight[None]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW(fused=True) as one optimizer, which has their groups."""

    def __init__(self, groups: Iterable[dict[str, Any]], matrices: Iterable[torch.Tensor], **muon: Any) -> None:
        """Take the groups of an AdamW; of these, Muon with the options `muon` updates `matrices`."""
        whole, of_muon, others = set(matrices), [], []
        self._parts: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []  # a matrix, its weight, and which it is
        for group in groups:
            parts = [
                (torch.nn.Parameter(one), p, number)
                for p in group["params"]
                if p in whole
                for number, one in enumerate(_matrices(p.data))
            ]
            self._parts += parts
            of_muon.append({"params": [part for part, _, _ in parts], "weight_decay": group["weight_decay"]})
            others.append({**group, "params": [p for p in group["params"] if p not in whole]})
        self.muon = torch.optim.Muon([group for group in of_muon if group["params"]], **muon)
        self.adamw = torch.optim.AdamW([group for group in others if group["params"]], fused=True)
        super().__init__([part for part, _, _ in self._parts], {})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part, weight, number in self._parts:
            part.grad = None if weight.grad is None else _matrices(weight.grad)[number]
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight, _ in self._parts:
            weight.grad = None
        self.adamw.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: accelerate loads the state that it has just taken, and would separate the groups."""
