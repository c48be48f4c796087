"""Implement the `Engine` protocol with `OffloadedModel`: the training step, gradient clipping and loss scaling.

The offloading itself is in `offloading/`; `plan/` decides the placement and the sizes of buffers.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import OptimSection
from offload_trainer.data.rows import Batch, weights_in_step
from offload_trainer.engine.protocol import StepResult
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.init_weights import parameters_without_memory, set_buffers, without_values
from offload_trainer.model.loader import ModelSource
from offload_trainer.model.pretrained import as_parameter
from offload_trainer.offloading.allocation import Drives, EngineParts
from offload_trainer.offloading.device import CpuDevice, CudaDevice, Device
from offload_trainer.offloading.model import OffloadedModel
from offload_trainer.offloading.ranks.cuts import Cuts
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernel_api import Kernel
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.native_kernel import UNKNOWN, NativeKernel
from offload_trainer.optim.norms import clip_factor
from offload_trainer.optim.rules import MUON_SETTINGS, Hyper, hypers_of
from offload_trainer.optim.state_files import LossScale
from offload_trainer.plan.memory import inputs_of, slots_of
from offload_trainer.plan.shape import decay_groups
from offload_trainer.plan.tiered.layout import TierMap, Unit
from offload_trainer.plan.tiered.spec import TierSizes, gradient_ring, layouts_of
from offload_trainer.plan.tiered.weight_streaming import block_numbers
from offload_trainer.plan.tiers import DEVICE, Placement, TierKind
from offload_trainer.plan.workload import Workload
from offload_trainer.ranks import all_gather_json
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import Transfers
from offload_trainer.telemetry.meters import PhaseClock

Say = Callable[[str], None]
_RECENT, _AT_MOST = 8, 2  # recent steps, and how many of them may have been clipped or skipped


class TieredEngine:
    """An engine that trains `source` with its state on the device, in RAM and in the private directories `drives`.

    `rank` and `world` count data-parallel ranks: the ranks of a pipeline have the same `rank`.
    """

    def __init__(
        self,
        source: ModelSource,
        work: Workload,
        optim: OptimSection,
        *,
        placement: Placement,
        sizes: TierSizes,
        drives: Sequence[Path],
        load_weights: bool = True,
        say: Say = lambda line: None,
    ) -> None:
        """Build the model and allocate its state. All ranks call it. Without `load_weights` a checkpoint is loaded."""
        self._optim = optim
        with ExitStack() as stack:
            parts = open_parts(work, placement, sizes, drives, stack=stack, say=say)
            self._torch_device, self._overlaps, self._hidden = parts.device.torch_device, parts.sizes.overlap, 0.0
            self._overlaps_backward, self._surprises = parts.sizes.ahead, deque[bool](maxlen=_RECENT)
            self._node = parts.node
            self._pipeline, self._computes_loss = work.pipeline, work.owners[-1]  # ranks of each, and one of them
            self.rank, self.world = self._node.rank // self._pipeline, self._node.world // self._pipeline
            context = parameters_without_memory()
            self._module = source.build(dtype=parts.dtype, context=context, checkpointed=work.checkpointed)
            parameters = without_values(self._module.model, dtype=parts.dtype, device=self._torch_device, separate=True)
            self._module.to(self._torch_device)
            set_buffers(self._module.model, source.buffers(), self._torch_device)
            self.offloaded = OffloadedModel(self._module.model, parameters, parts, seed=source.seed)
            self.offloaded.loss_scale = LossScale.initial(work.dtype)
            stack.callback(self.offloaded.close)
            self.synchronize, self.named_master_parameters = self.offloaded.synchronize, self.offloaded.masters
            self.snapshot, self.load = self.offloaded.snapshot, self.offloaded.load
            if work.inputs_away:
                self.offloaded.keep_inputs(inputs_of(work))
            self._breadth_first: BreadthFirst | None = None
            cuts = None
            if self._pipeline > 1:
                self._blocks = [self._module.model.get_submodule(name) for name in work.shape.blocks]
                owners = [self.rank * self._pipeline + owner for owner in work.owners]
                cuts = Cuts(parts, owners, slots_of(work), stream=self.offloaded.stream)
            if work.breadth_first:
                # Inputs that have left the device come back in the reverse order.
                in_order = cuts is not None and not work.inputs_away
                self._breadth_first = BreadthFirst(self._module, saving=self._in_thread, cuts=cuts, in_order=in_order)
            self._cuts = cuts
            if load_weights:
                self.offloaded.put((name, as_parameter(w, parts.dtype), w) for name, w in source.weights())
            self._open = stack.pop_all()
        self._updating = False  # the state is partly that of the next step
        self._decayed, self._plain = decay_groups(source.shape.weights)

    @property
    def _as_expected(self) -> bool:
        """Return whether few steps are clipped or skipped, which wastes early updates and moves their bytes again."""
        return sum(self._surprises) <= _AT_MOST

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        self._module.train()
        self._updating = False
        scale = self.offloaded.loss_scale.value
        rule, group = self.offloaded.store.format.rule, dict(self._optim) | {"lr": lr, **MUON_SETTINGS}
        rules = hypers_of(rule, group, self._decayed) | hypers_of(rule, group | {"weight_decay": 0.0}, self._plain)
        if self._overlaps_backward and self._as_expected:
            self.offloaded.expect(rules, scale=1.0 / scale)  # neither clipped nor skipped
        losses = self._accumulate(batches, scale=scale, clock=clock)
        before, self._hidden = self._hidden, self.offloaded.update_progress.hidden
        mean = torch.stack([torch.as_tensor(loss, device=self._torch_device) for loss in self._of_all(losses)]).mean()
        with clock.phase("update"), torch.no_grad():
            norm = self._update(rules)
            self.offloaded.begin()
        return StepResult(
            loss=float(mean),
            grad_norm=norm,
            loss_scale=scale,
            skipped=norm is None,
            hidden=self._hidden - before if self._overlaps else 0.0,
            update_running=self._overlaps,
        )

    def _accumulate(self, batches: Sequence[Batch], *, scale: float, clock: PhaseClock) -> list[torch.Tensor]:
        """Run forward and backward of a step's micro-batches; return their weighted losses."""
        counts = self._of_all([batch.counted for batch in batches])
        weights = weights_in_step(counts)[self.rank :: self.world]
        if self._breadth_first is not None:
            given = [batch.arguments(self._torch_device, training=True) for batch in batches]
            factors = [scale * weight / len(counts) for weight in weights]
            means = self._accumulate_breadth_first(self._breadth_first, given, factors, clock=clock)
            return [loss * weight for loss, weight in zip(means, weights, strict=True)]
        losses = []
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1):
            with self._phase(clock, "forward"), self.offloaded.forward(then=True):
                loss = self._module(*batch.arguments(self._torch_device, training=True))
                losses.append(loss.detach() * weight)
            with self._phase(clock, "backward"), self.offloaded.backward(last=number == len(batches)):
                (loss * (scale * weight / len(counts))).backward()
        return losses

    def _accumulate_breadth_first(
        self, model: BreadthFirst, batches: Sequence[tuple[Any, ...]], factors: Sequence[float], *, clock: PhaseClock
    ) -> list[torch.Tensor]:
        """Run forward and backward of a step's micro-batches block by block; return their losses."""

        def turn(number: int) -> None:
            self.offloaded.turn_to(number, last=number + 1 == len(batches))

        with model.step(batches):
            with self._phase(clock, "forward"), self.offloaded.forward(then=True):
                model.forward()
            with self._phase(clock, "backward"), self.offloaded.backward(last=True):
                return model.backward(turn, factors)

    @contextmanager
    def _in_thread(self) -> Iterator[None]:
        """Prepare a thread that runs part of a forward."""
        if self._torch_device.type == "cuda":
            torch.cuda.set_device(self._torch_device)
        with self.offloaded.stream.saving():
            yield

    @contextmanager
    def _phase(self, clock: PhaseClock, name: str) -> Iterator[None]:
        """Time a phase, and count waits for the update in it as the separate phase `wait`."""
        before = self.offloaded.update_progress.waited
        with clock.phase(name):
            yield
        if self._overlaps:
            clock.move(self.offloaded.update_progress.waited - before, from_=name, to="wait")

    def abandon_step(self) -> None:
        if self._updating:
            raise TrainerError("the update of the next step had begun")
        self.offloaded.abandon()

    def _of_all(self, values: list[Any]) -> list[Any]:
        """Return all ranks' values, micro-batch by micro-batch in rank order; of a pipeline its last rank's."""
        if self._node.world == 1:
            return values
        self._node.barrier()  # its error names a rank that stalls
        gathered = all_gather_json([float(value) for value in values])[self._computes_loss :: self._pipeline]
        return [value for each in zip(*gathered, strict=True) for value in each]

    def _update(self, rules: Mapping[str, Hyper]) -> float | None:
        """Clip and update; return the gradient norm, or None without a change if it is not finite."""
        scale = self.offloaded.loss_scale
        norm = self.offloaded.norm() / scale.value
        finite = math.isfinite(norm)
        factor = clip_factor(norm, limit=self._optim.max_grad_norm) if finite else 0.0
        self._updating = True  # cleared by the next step or evaluation, when the caller knows that this step is done
        if finite:
            self.offloaded.step(rules, scale=factor / scale.value)
        self.offloaded.clear()
        self.offloaded.loss_scale = scale.after_step(finite=finite)
        self._surprises.append(factor != 1.0)
        return norm if finite else None

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> float:
        self._module.eval()
        self._updating = False
        if self._cuts is not None:
            inputs, targets, _, count, positions = batch.arguments(self._torch_device, training=False)
            loss = 0.0
            with self.offloaded.forward(then=False), self._cuts.evaluating(self._blocks):
                output = self._module.run(inputs, positions)
                if self._cuts.here(self._cuts.blocks):
                    loss = float(self._module.of(output, targets, count))
            return float(self._of_all([loss])[self.rank])
        with self.offloaded.forward(then=False):
            return float(self._module(*batch.arguments(self._torch_device, training=False)))

    def commit(self, train: Mapping[str, int]) -> None:
        """Record the training loop's state with the page files, after each step (`ManifestWriter.commit`)."""
        ours = self.offloaded
        assert ours.manifest is not None
        state = ours.scalars()
        ours.manifest.commit(state.optimizer_steps, {"engine": asdict(state), "train": dict(train)})

    def close(self) -> None:
        self._open.close()


def open_parts(
    work: Workload,
    placement: Placement,
    sizes: TierSizes,
    directories: Sequence[Path],
    *,
    stack: ExitStack,
    say: Say,
) -> EngineParts:
    """Open the device, drives and kernels of a run; `stack` closes them. All ranks of a node share the `directories`.

    Raises UserError if pages are on the GPU, and it has no update kernel.
    """
    layouts, dtype = layouts_of(work), DTYPES[work.dtype]
    units = layouts.units
    device = _device(units, placement, itemsize=dtype.itemsize)
    stack.callback(device.close)
    node = Node(together=work.world > 1, by_parts=sizes.by_parts)
    stages = [(0, [*reversed(units)])]
    if work.pipeline > 1:
        node.peers = Node(together=True, every=work.pipeline)
        numbers = block_numbers(units, work.shape)
        stages = [
            (owner, [units[unit] for unit, number in numbers.items() if number == block])
            for block, owner in reversed([*enumerate(work.owners)])
        ]
    assert node.world == work.world, "pages are laid out for other ranks than there are"
    assert len(node.nodes) == work.nodes, "and for other nodes"
    drives = Drives(directories, Transfers(drives=len(directories)))
    stack.callback(drives.close)
    homes = layouts.homes(placement, sizes, node=node.number)
    kernel, why = choose_kernel(work.kernel)
    say(why)
    if isinstance(kernel, NativeKernel) and kernel.lanes == UNKNOWN:
        say("Measuring gradients in host memory: torch's slower operations, since the compiled ones differ here.")
    return EngineParts(
        units=units,
        homes=homes,
        sizes=sizes,
        format=work.state,
        dtype=dtype,
        gradient_dtype=torch.float32 if work.gradient_bytes == 4 else dtype,
        ring_bytes=gradient_ring(work, homes, sizes, gpu=device.is_cuda),
        node=node,
        stages=stages,
        device=device,
        drives=drives,
        kernels=(kernel, _device_kernel(homes, device, kernel, say=say)),
    )


def _device(units: Sequence[Unit], placement: Placement, *, itemsize: int) -> Device:
    if not torch.cuda.is_available():
        return CpuDevice()
    # Threads of copies and of the update hand the interpreter over to the launching thread sooner than after 5 ms.
    sys.setswitchinterval(0.0005)
    largest = max(unit.stored_bytes(itemsize) for unit in units)
    staging = largest if placement.params == TierKind.DRIVES else 0
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()), staging_bytes=staging, stagings=2)


def _device_kernel(homes: TierMap, device: Device, kernel: Kernel, *, say: Say) -> Kernel:
    """Return the kernel that updates pages on the device with the bits of `kernel`. Raises UserError without one."""
    if device.torch_device.type != "cuda" or not any(page.home == DEVICE for page in homes.pages):
        return kernel
    found, words = choose_cuda_kernel(device.torch_device)
    if found is None:
        raise UserError(
            f"The update on {device.torch_device} cannot be used: {words}. Use --gpu-fraction 0, so that the state is "
            "in RAM and on drives"
        )
    say(words)
    return found
