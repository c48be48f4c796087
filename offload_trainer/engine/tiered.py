"""The tiered engine behind the `Engine` protocol: weights, gradients and optimizer state in RAM and on drives at once.

    forward, backward   Stream brings weights where they are away; each gradient goes to Gradients as it is made
    update              the norm, then Updater walks the pages; new 16-bit weights go to their homes

Where something lives never changes a bit of the result. What is put together here is in `offload/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_trainer.config import TrainConfig
from offload_trainer.data.rows import Batch, weights_in_step
from offload_trainer.engine.loss_scale import LossScale
from offload_trainer.engine.op_builder import load_async_io
from offload_trainer.engine.protocol import StepResult
from offload_trainer.errors import UserError
from offload_trainer.model.pretrained import as_parameter
from offload_trainer.model.source import DTYPES, ModelSource, parameters_without_memory
from offload_trainer.offload.activations import Activations
from offload_trainer.offload.cuda import CudaDevice
from offload_trainer.offload.device import CpuDevice, Device
from offload_trainer.offload.gradients import Gradients
from offload_trainer.offload.norms import clip_factor
from offload_trainer.offload.page_index import StoreAccount
from offload_trainer.offload.state import TieredSnapshot, TieredState
from offload_trainer.offload.store import PageStore, size_of_home
from offload_trainer.offload.stream import Stream
from offload_trainer.offload.update import Updater
from offload_trainer.offload.weights import Weights
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.protocol import Kernel, Stretch
from offload_trainer.optim.rules import AdamW
from offload_trainer.optim.state_files import EngineState
from offload_trainer.plan.auto import row_length, wants_checkpointing
from offload_trainer.plan.kept import kept_inputs
from offload_trainer.plan.layout import Unit, units_of
from offload_trainer.plan.routes import routes_of
from offload_trainer.plan.tiered import (
    GRADIENT_BUFFERS,
    GRADIENTS_IN_FLIGHT,
    TierSizes,
    gradient_bytes,
    gradient_ring,
    homes_in,
)
from offload_trainer.plan.zero import Placement
from offload_trainer.storage.host_memory import return_now, return_what_is_freed
from offload_trainer.storage.transfer import (
    AioTransfers,
    CheckedTransfers,
    DriveFile,
    ThreadedTransfers,
    Transfers,
    async_io_handle,
)
from offload_trainer.telemetry.meters import PhaseClock


class TieredEngine:
    """Trains `source` with one rank, its state in RAM and in the private directories `drives`."""

    rank, world = 0, 1

    def __init__(
        self,
        source: ModelSource,
        config: TrainConfig,
        *,
        placement: Placement,
        sizes: TierSizes,
        drives: Sequence[Path],
        load_weights: bool = True,
        say: Callable[[str], None] = lambda line: None,
        device: Device | None = None,
    ) -> None:
        """`device` is for tests; without it CUDA where there is a GPU, else the CPU."""
        self._config = config
        self._dtype = DTYPES[config.model.dtype]
        self._units = units_of(source.shape)
        self._trained = [weight.name for weight in source.shape.weights if weight.trainable]
        self._fixed = [weight.name for weight in source.shape.weights if not weight.trainable]
        self._steps = dict.fromkeys(self._trained, 0)
        self._scale = LossScale.of(config)
        self._last_batch = True
        self._account: StoreAccount | None = None
        self._open = ExitStack()
        return_what_is_freed()
        self._device = device or _device(self._units, placement, itemsize=self._dtype.itemsize)
        self._open.callback(self._device.close)
        self._opened_files = self._open.enter_context(ExitStack())  # closed after what still moves bytes in them
        self._transfers = _transfers(config, sizes)
        self._open.callback(self._transfers.close)
        self._make_homes(placement, sizes, drives, order=self._trained)
        self._state = TieredState(self._units, self._store, self._weights)
        self._places = self._state.places
        kernel, why = choose_kernel(config.optim.kernel)
        say(why)
        self._updater = Updater(
            self._store,
            self._weights,
            self._gradients,
            kernel,
            device=self._device,
            device_kernel=self._kernel_there(kernel, say=say),
            routes=self._routes,
            slots=sizes.page_buffers,
        )
        self._module = source.build(
            dtype=self._dtype,
            context=parameters_without_memory(),
        )
        self._parameters = self._give_memory(self._module.model)
        self._module.to(self._device.place)
        for name, value in source.buffers().items():
            _set_buffer(self._module.model, name, value.to(self._device.place))
        self._stream = self._make_stream(sizes)
        self._activations = self._keep_inputs(source, drives)
        for name in self._trained:
            for parameter in self._parameters[name]:
                parameter.register_post_accumulate_grad_hook(self._hand_over(name))
        if load_weights:
            self._load_weights(source)
        return_now()

    # -- putting together ---------------------------------------------------------------------------------------------

    def _make_homes(
        self, placement: Placement, sizes: TierSizes, drives: Sequence[Path], *, order: Sequence[str]
    ) -> None:
        """Files on the drives, and the homes of state, weights and gradients in them and in memory."""
        homes = homes_in(self._units, placement, sizes)
        gradient_dtype = torch.float32 if gradient_bytes(self._config) == 4 else self._dtype
        state_sizes = [sizes.format.page_bytes(page.elements) for page in homes.pages]
        self._store = PageStore(
            homes.pages,
            format=sizes.format,
            files=self._files(drives, "state", state_sizes, [page.home for page in homes.pages]),
            transfers=self._transfers,
            device=self._device,
        )
        self._routes = routes_of(homes, is_gpu=self._device.is_cuda)
        weight_sizes = [unit.elements * self._dtype.itemsize for unit in self._units]
        self._weights = Weights(
            self._units,
            homes.weights,
            dtype=self._dtype,
            device=self._device,
            files=self._files(drives, "weights", weight_sizes, homes.weights),
            transfers=self._transfers,
        )
        gradient_sizes = [unit.trained * gradient_dtype.itemsize for unit in self._units]
        self._gradients = Gradients(
            self._units,
            homes.gradients,
            dtype=gradient_dtype,
            device=self._device,
            files=self._files(drives, "gradients", gradient_sizes, homes.gradients),
            transfers=self._transfers,
            stagings=GRADIENT_BUFFERS,
            ring_bytes=gradient_ring(self._config, self._units, homes.gradients, gpu=self._device.is_cuda),
            in_flight_bytes=GRADIENTS_IN_FLIGHT,
            order=order,
        )
        self._open.callback(self._gradients.close)

    def _kernel_there(self, kernel: Kernel, *, say: Callable[[str], None]) -> Kernel:
        """What updates the pages on the device with the bits of `kernel`. UserError where a GPU has no such kernel."""
        if self._device.place.type != "cuda" or not any(route.on_device for route in self._routes):
            return kernel
        found, why = choose_cuda_kernel(self._device.place, kernel)
        say(why)
        if found is None:
            raise UserError(f"{why}. Use --gpu-fraction 0, so that the state is in RAM and on drives")
        return found

    def _files(self, drives: Sequence[Path], name: str, sizes: Sequence[int], homes: Sequence[int]) -> list[DriveFile]:
        """A file on each drive for what has its home there."""
        files = []
        for home, drive in enumerate(drives):
            files.append(DriveFile(drive / name, size_of_home(sizes, homes, home)))
            self._opened_files.callback(files[-1].close)
        return files

    def _give_memory(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """Parameters on their units' memory, where that stays on the device; the stream gives it to the others.

        A tied weight is one parameter for each module that holds it: its gradients are handed over one by one.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        made: dict[str, list[nn.Parameter]] = {name: [] for name in names.values()}
        for module in model.modules():
            for key, old in module._parameters.items():
                if old is None:
                    continue
                made[names[old]].append(nn.Parameter(self._memory_of(names[old]), requires_grad=old.requires_grad))
                module._parameters[key] = made[names[old]][-1]
        return made

    def _memory_of(self, name: str) -> torch.Tensor:
        unit, place = self._places[name]
        resident = self._weights.resident(unit.index)
        if resident is None:
            return torch.empty(1, dtype=self._dtype, device=self._device.place).expand(place.weight.shape)
        return resident[place.start : place.start + place.weight.numel].view(place.weight.shape)

    def _make_stream(self, sizes: TierSizes) -> Stream | None:
        if all(self._weights.resident(unit.index) is not None for unit in self._units):
            return None
        stream = Stream(self._weights, self._parameters, device=self._device, blocks=sizes.unit_buffers)
        self._open.callback(stream.close)
        unit_of = {use: self._places[name][0].index for name, uses in self._parameters.items() for use in uses}
        model = self._module.model
        stream.attach(model, {n: unit_of[p] for n, p in model.named_parameters(remove_duplicate=False)})
        return stream

    def _keep_inputs(self, source: ModelSource, drives: Sequence[Path]) -> Activations | None:
        """Where what gradient checkpointing keeps goes, if it does not stay on the device."""
        home = self._config.model.offload_activations
        if not home or not wants_checkpointing(self._config.model, source.shape):
            return None
        inputs = kept_inputs(self._config, source.shape, seq_len=row_length(self._config, source.shape))
        drives = drives if home == "nvme" else ()
        files = self._files(drives, "activations", [inputs.size] * inputs.count, inputs.homes(len(drives)))
        kept = Activations(inputs, device=self._device, files=files, transfers=self._transfers, otherwise=self._stream)
        self._open.callback(kept.close)
        kept.attach(self._module.model)
        return kept

    @torch.no_grad()
    def _load_weights(self, source: ModelSource) -> None:
        """Weights to their homes one at a time: as masters, and rounded to the run's dtype."""
        for name, value in source.weights():
            unit, place = self._places[name]
            self._weights.put(unit.index, place.start, as_parameter(value, self._dtype).reshape(-1))
            if place.weight.trainable:
                self._store.put("master", unit.index, place.start, place.weight.numel, value.float().reshape(-1))
        self._state.put_away()

    def _hand_over(self, name: str) -> Callable[[nn.Parameter], None]:
        first_of_blocks = next((n for n in self._trained if self._places[n][0].block), None)

        def hook(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._gradients.add(name, gradient, last=self._last_batch)
            if name == first_of_blocks:
                return_now()  # what autograd needs next, for the embeddings, is its largest

        return hook

    # -- a step -------------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        self._module.train()
        scale = self._scale.value
        losses = []
        weights = weights_in_step([batch.counted for batch in batches])
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1):
            self._last_batch = number == len(batches)
            with clock.phase("forward"), self._passing(backward=False, then=True), self._keeping():
                loss = self._module(*self._given(batch), batch.seed, batch.counted)
                losses.append(loss.detach() * weight)
            with clock.phase("backward"), self._passing(backward=True, then=None if self._last_batch else False):
                if self._last_batch:
                    self._updater.read_ahead()
                return_now()  # a forward leaves holes in the heap, and the first gradient, the head's, is a large one
                (loss * (scale * weight / len(batches))).backward()
                self._gradients.end_of_backward(last=self._last_batch)
        with clock.phase("update"), torch.no_grad():
            norm = self._update(lr=lr)
            if self._stream:
                self._stream.begin()
            return_now()
        mean = float(torch.stack(losses).mean())
        return StepResult(loss=mean, grad_norm=norm, loss_scale=scale, skipped=norm is None)

    def _keeping(self) -> AbstractContextManager[Any]:
        return self._activations.forward() if self._activations else nullcontext()

    def _passing(self, *, backward: bool, then: bool | None) -> AbstractContextManager[Any]:
        return self._stream.passing(backward=backward, then=then) if self._stream else nullcontext()

    def _update(self, *, lr: float) -> float | None:
        """AdamW on the masters, then the weights from them. None, and nothing changed, if the norm is not finite."""
        self._gradients.finish()
        norm = self._gradients.norm() / self._scale.value
        arrived = self._gradients.arrived
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        if finite:
            clip = clip_factor(norm, limit=self._config.optim.clip)
            self._note(updating=True)
            for name in arrived:
                self._steps[name] += 1
            if self._stream:
                self._stream.forget()
            self._updater.update(
                [self._stretches(unit, arrived, lr=lr) for unit in self._units],
                scale=clip / self._scale.value,
                noise=self._noise(),
            )
            self._note(updating=False)
        self._gradients.clear()
        self._scale.after_step(finite=finite)
        return norm if finite else None

    def _note(self, *, updating: bool) -> None:
        if self._account:
            self._account.note(max(self._steps.values()), updating=updating)

    def _stretches(self, unit: Unit, arrived: frozenset[str], *, lr: float) -> list[Stretch]:
        """The unit's trainable elements that got a gradient, as long as they are updated alike."""
        optim = self._config.optim
        decayed, plain = (AdamW(lr, optim.betas, optim.eps, decay) for decay in (optim.weight_decay, 0.0))
        places = [place for place in unit.places if place.weight.trainable]
        ends = [place.start for place in places[1:]] + [unit.trained]
        found: list[Stretch] = []
        for place, end in zip(places, ends, strict=False):
            if place.weight.name not in arrived:
                continue
            alike = (decayed if place.weight.decays else plain, self._steps[place.weight.name])
            if found and found[-1].end == place.start and (found[-1].hyper, found[-1].step) == alike:
                found[-1] = Stretch(found[-1].start, end, *alike)
            else:
                found.append(Stretch(place.start, end, *alike))
        return found

    def _noise(self) -> Noise | None:
        if not self._store.format.moments.stochastic:
            return None
        return Noise(seed=self._config.train.seed, step=max(self._steps.values()))

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> float:
        self._module.eval()
        with self._passing(backward=False, then=False):
            return float(self._module(*self._given(batch), None, batch.counted))

    def _given(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.inputs.to(self._device.place), batch.targets.to(self._device.place)

    @torch.no_grad()
    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self._module.eval()
        with self._passing(backward=False, then=False):
            return self._module.next_logits(tokens.to(self._device.place)).float().cpu()

    def keep_account(self, drives: Sequence[Path], *, model: Path) -> None:
        """Write beside the page files what lies in them; `model` is the directory with the model's configuration."""
        self._account = StoreAccount(
            drives, units=self._units, pages=self._store.pages, format=self._store.format, model=model
        )
        self._open.callback(self._account.close)

    # -- state --------------------------------------------------------------------------------------------------------

    def named_master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._trained:
            yield name, self._state.master(name)
        for name in self._fixed:
            yield name, self._state.fixed(name).float()
        self._state.put_away()

    def snapshot(self) -> TieredSnapshot:
        most = max(self._steps.values())
        state = EngineState(
            optimizer_steps=most,
            loss_scale=self._scale.saved,
            good_steps=self._scale.good_steps,
            states=self._store.format.moments.name,
            rule=self._store.format.rule.name,
            weight_steps={name: count for name, count in self._steps.items() if count != most},
        )
        return TieredSnapshot(self._state, state, self._updater.snapshot())

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        state = self._state.load(directory)
        self._scale.go_on(state.loss_scale, state.good_steps)
        self._steps = {name: state.steps_of(name) for name in self._trained}
        if self._stream:
            self._stream.forget()

    def close(self) -> None:
        self._open.close()


def _device(units: Sequence[Unit], placement: Placement, *, itemsize: int) -> Device:
    if not torch.cuda.is_available():
        return CpuDevice()
    largest = max(unit.elements for unit in units) * itemsize
    return CudaDevice(
        torch.device("cuda", torch.cuda.current_device()),
        staging_bytes=largest if placement.params == "nvme" else 0,
        stagings=2,
    )


def _transfers(config: TrainConfig, sizes: TierSizes) -> Transfers:
    """What moves bytes to and from drives."""
    tiered = config.tiered
    if tiered.io == "async_io":
        handle = async_io_handle(load_async_io(), block_bytes=min(sizes.io_block_bytes, 1 << 20))
        return CheckedTransfers(AioTransfers(handle))  # the kernel tells no errors, so each of its bytes is checked
    threads = ThreadedTransfers(threads=sizes.io_threads, block=sizes.io_block_bytes)
    return CheckedTransfers(threads) if tiered.checksums else threads


def _set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    holder = model.get_submodule(owner)
    assert leaf in holder._buffers, name
    holder._buffers[leaf] = value
