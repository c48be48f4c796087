"""Offload a model: place its weights, gradients and optimizer state on the device, in RAM or on drives, and train it.

Engines and sessions train through `OffloadedModel`. It takes a module, a layout and update kernels, and does not depend
on the configuration, the data or the loss. The placement never changes a bit of the result.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offload_trainer.common.errors import UserError
from offload_trainer.offloading.allocation import EngineParts, allocate_stores
from offload_trainer.offloading.device import Device, DeviceCopy
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.manifest import ManifestWriter
from offload_trainer.offloading.pages.named_state import TieredSnapshot, TieredState
from offload_trainer.offloading.pages.store import DamagedPage
from offload_trainer.offloading.update.updater import StepParams, Updater, ranges_of
from offload_trainer.offloading.weights.parameter import LazyWeight, offload_parameter
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.optim.rules import Hyper
from offload_trainer.optim.state_files import CONSTANT, EngineState
from offload_trainer.plan.memory import INPUTS_UNDER_WAY, BlockInputs
from offload_trainer.storage.host_memory import Heap, host_buffer
from offload_trainer.storage.transfer import Future, done, together

_BLOCKS_PER_TRIM = 8  # a trim takes 10 ms, and a block of 1024 x 1024 elements leaves 20 MB


def refuse_other_default() -> None:
    """Raise UserError if torch's default dtype is not fp32, in which the update's arithmetic creates its numbers."""
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        raise UserError(
            f"torch.set_default_dtype({dtype}) would round the numbers of the update: set it to torch.float32 again; "
            "the model's own dtype is unaffected"
        )


class OffloadedModel:
    """A module with hooks that fetch its weights and collect its gradients, and the optimizer that updates it."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Sequence[nn.Parameter]], parts: EngineParts, *, seed: int
    ) -> None:
        """Allocate weights, gradients and state as they are placed, and register the hooks.

        `parameters` are those of `module` by weight name, one for each use of a tied weight. Their values are lost;
        `put` sets them. The caller closes `parts` after this object. `seed` is that of stochastic rounding.
        """
        self.node, self.units, self.parameters = parts.node, parts.units, parameters
        self._module, self._device, self._drives, self._seed = module, parts.device, parts.drives, seed
        trainable = {place.weight.name: place.weight.trainable for unit in parts.units for place in unit.places}
        self.trained = [name for name in parameters if trainable[name]]
        self.fixed = [name for name in parameters if not trainable[name]]
        self.steps = dict.fromkeys(self.trained, 0)  # number of updates of each weight
        self._cleared = 0  # how often the gradient sums were dropped
        self.last = True  # the current micro-batch is the step's last
        self.sum_changes = 0  # collected gradients and other changes to gradient sums
        self.before_sums: Callable[[], None] = lambda: None  # called before a gradient sum is read or changed
        self.closed = False
        self.adds_up = True  # gradients of several micro-batches may be accumulated
        self._prefetches_pages = False  # prefetch pages when the next backward begins
        self.manifest: ManifestWriter | None = None
        self.activations: Activations | None = None
        self.heap = Heap()
        self.loss_scale = CONSTANT  # the engine's, a part of the saved state
        with ExitStack() as stack:
            stores = allocate_stores(parts, order=self.trained)
            self.store, self.weights, self.gradients = stores.state, stores.weights, stores.gradients
            self._fetches, self.update_progress = stores.fetches, stores.update_progress
            for store in (self._fetches, self.gradients, self.update_progress):
                stack.callback(store.close)
            self.updater = Updater(stores, parts)
            stack.callback(self.updater.close)
            self.state = TieredState(parts.units, self.store, self.weights, numbers=self.updater.numbers)
            self.places = self.state.places
            self.stream = WeightPrefetcher(stores, parts, parameters)
            stack.callback(self.stream.close)
            self.stream.attach(module, overlaps=parts.sizes.overlap)
            self._watch_gradients(stack)
            self._open = stack.pop_all()

    def _watch_gradients(self, stack: ExitStack) -> None:
        """Register hooks that collect gradients and, on a CPU, hooks that return freed memory to the system."""
        uses = [(name, use) for name in self.trained for use in self.parameters[name]]
        hooks = [use.register_post_accumulate_grad_hook(partial(self._collect, name)) for name, use in uses]
        if not self._device.is_cuda:
            # glibc up to 2.37 cuts each aligned allocation out of a larger one and does not reuse the holes. A forward
            # through 24 blocks of GPT-2 leaves 570 MB of them, beside the largest tensors: the loss and the embeddings'
            # gradients.
            blocks = [unit.name for unit in self.units if unit.block]
            # The gradient of a block's first trainable weight arrives last in a backward.
            last = {self.places[name][0].name: self.parameters[name][0] for name in reversed(self.trained)}
            for block in {*blocks[_BLOCKS_PER_TRIM - 1 :: _BLOCKS_PER_TRIM], *blocks[-1:]}:
                hooks.append(self._module.get_submodule(block).register_forward_hook(lambda *_: self.heap.trim()))
            for block in last.keys() & blocks[::_BLOCKS_PER_TRIM]:
                hooks.append(last[block].register_post_accumulate_grad_hook(lambda _: self.heap.trim()))
        for hook in hooks:
            stack.callback(hook.remove)

    def _collect(self, name: str, parameter: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UserError(
                f"{name} got a sparse gradient, which AdamW does not take: make its embedding with sparse=False"
            )
        self._begin_backward()
        if not self.adds_up and name in self.gradients.arrived:
            raise UserError(
                f"{name} got a second gradient before its step, and gradient_accumulation_steps=1 keeps the sums "
                "in 16 bits: load the model with gradient_accumulation_steps=2, or leave that out, for sums in fp32"
            )
        self.sum_changes += 1
        self.gradients.add(name, gradient, last=self.last)

    def keep_inputs(self, inputs: BlockInputs) -> None:
        """Offload the block inputs that activation checkpointing keeps to host memory."""
        self.activations = Activations(inputs, device=self._device, references=self.stream)
        self._open.callback(self.activations.close)
        self.activations.attach(self._module)

    def enable_manifest(self, *, model: Path) -> None:
        """Keep a manifest of the page files, which have the whole state; `model` has the model's configuration."""
        self.manifest = ManifestWriter(self._drives.directories, self.units, self.store, model=model)
        self._open.callback(self.manifest.close)

    @torch.no_grad()
    def put(self, values: Iterator[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Set all weights from (name, weight in the run's dtype, initial master). All ranks call it."""

        def put() -> None:
            for name, weight, master in values:
                unit, place = self.places[name]
                self.weights.put(unit.index, place.start, weight.reshape(-1))
                if place.weight.trainable:
                    self.store.put(unit.index, place.start, master.float().reshape(-1))
            self.store.flush()

        self.node.on_first_rank(put)
        self.weights.broadcast_all()

    # -- reading weights outside their modules ------------------------------------------------------------------------

    def guard_reads(self) -> None:
        """Make each parameter fetch its values whenever it is read (`weights/parameter.py`)."""
        for name, uses in self.parameters.items():
            for parameter in uses:
                offload_parameter(parameter, name, self)

    def borrow_weights(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which these weights have their values. Raises UserError if the model is closed."""
        if self.closed:
            raise UserError(f"{names[0]}: the session is closed, and its weights are gone with it")
        return self.stream.borrow_weights(names)

    # -- reading and changing gradients between the backward and the step ---------------------------------------------

    def gradient(self, name: str) -> LazyWeight | None:
        """Return a lazy tensor (`LazyWeight`) for a weight's gradient sum, or None without a gradient."""
        if name not in self.gradients.arrived:
            return None
        like, device, of_step = self.parameters[name][0], self._device.torch_device, self._cleared

        def read() -> torch.Tensor:
            if of_step != self._cleared or name not in self.gradients.arrived:
                raise UserError(
                    f"this gradient of {name} was used up by a step or dropped by zero_grad(): read .grad anew after "
                    "the next backward; clone() keeps values"
                )
            return self._complete_sums().sums(name).to(device, copy=True).view(like.shape)

        def write(values: torch.Tensor) -> None:
            self._complete_sums().replace(name, values)
            self.sum_changes += 1

        return LazyWeight.of(like, read, write=write, dtype=self.gradients.dtype, device=device)

    def drop_gradient(self, name: str) -> None:
        """Drop the gradient sum of one weight, as if it had no gradient in this step."""
        if name in self.gradients.arrived:
            self._complete_sums().forget(name)
            self.sum_changes += 1

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradient sums by `factor` in place."""
        sums = self._unsharded()
        sums.finish()
        sums.scale(factor)
        self.sum_changes += 1

    def _complete_sums(self) -> Gradients:
        """Return the gradient sums once they are complete and `before_sums` has applied pending changes (clipping)."""
        sums = self._unsharded()
        self.before_sums()
        sums.finish()
        return sums

    def _unsharded(self) -> Gradients:
        if not isinstance(self.gradients, Gradients):
            raise UserError(
                f"{self.node.world} ranks: each has a part of the gradient sums, so .grad cannot be read or changed, "
                "clipping is by the 2-norm, once a step: session.clip_grad_norm_(limit)"
            )
        return self.gradients

    def weight(self, name: str) -> torch.Tensor:
        """Return a CPU copy of one weight in the run's dtype."""
        self.update_progress.wait(self.places[name][0].index)
        return self.state.weight(name)

    def master(self, name: str) -> torch.Tensor:
        """Return a CPU copy of one whole master, in fp32. With several nodes all ranks call it. Then `store.flush`."""
        self.synchronize()  # the update may write a weight before its master
        unit, place = self.places[name]
        values = self.store.get(unit.index, place.start, place.weight.numel)
        self.weights.complete(values, unit, place)
        return values.view(place.weight.shape)

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, *, then: bool) -> Iterator[None]:
        """Wrap each forward; `then`: a backward follows."""
        keeping = self.activations.forward() if self.activations and then else nullcontext()
        self.stream.restore_uncalled()
        with self.stream.passing(backward=False, then=then), keeping:
            yield
        if not then and self.node.peers.meet is not None:
            self.node.peers.meet()  # a backward has barriers that align the ranks

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Wrap each backward; `last`: it is its step's last, so norms are computed and the update may begin."""
        self._begin_backward()
        self.last = last
        with self.stream.passing(backward=True, then=None if last else False):
            if last:
                self.updater.begin_last_backward()
            self.heap.trim()  # a forward leaves holes in the heap, and the first gradient, that of the head, is large
            yield
            self.gradients.end_of_backward(last=last)
        if last:
            self.update_progress.finish()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wrap a micro-batch of user code, the step's `last` or not. All ranks call it, and exchange gradients."""
        self._prefetches_pages = last
        if not self.update_progress.is_running:
            self._begin_backward()
        self.stream.then_after_backward = None if last else False
        with self.stream.saving():
            yield
        self.stream.end_backward()
        if self.node.world > 1:
            self.synchronize()  # a rank whose backward reached no weight has not waited for the update yet
            self.sum_changes += 1  # other ranks may have added gradients
        self.gradients.end_of_backward(last=self.last)

    def turn_to(self, micro_batch: int, *, last: bool) -> None:
        """Announce whose gradients arrive next, in a backward of several micro-batches that take turns."""
        self.last = last
        self.gradients.turn_to(micro_batch)

    def _begin_backward(self) -> None:
        """Wait until the previous update has read the gradient sums, because the backward overwrites them."""
        # One rank does not wait for state that is still being written if pages are updated during this backward, which
        # begins when that update has ended. Other ranks could overwrite pages that rank 0's last record names.
        if self.updater.announced is not None and self.node.world == 1:
            self.update_progress.wait_for_weights()
            self.stream.restore()
        else:
            self.synchronize()
        if self._prefetches_pages:
            self._prefetches_pages = False
            self.updater.pipeline.prefetch()

    def synchronize(self) -> None:
        """Wait until no update is running; raise the error of the last one, if any."""
        self.update_progress.finish()
        self.stream.restore()

    def expect(self, rules: Mapping[str, Hyper], *, scale: float) -> None:
        """Announce the expected `step`, so that its last backward may overlap the update of pages."""
        steps = {name: count + 1 for name, count in self.steps.items()}
        self.updater.expect(self._step_params(rules, steps, scale=scale))

    def norm(self) -> float:
        """Return the global norm of the gradient sums, unscaled; infinite or NaN if any element is."""
        norms = [*self.norms().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def norms(self, order: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norm of the gradient sum of each weight that has one, in the model's order (fp32, 0-dim, CPU)."""
        sums = self.gradients if order == 2.0 else self._unsharded()
        sums.finish()
        return sums.norms() if order == 2.0 else self._unsharded().norms(order)

    def step(self, rules: Mapping[str, Hyper], *, scale: float) -> None:
        """Update the weights in `rules` that have a gradient, with `scale` times their sums; then call `clear`.

        The update may still run when this returns; later uses of a weight wait for it. Raises TrainerError, here or at
        a later wait, if a drive failed. The state is then partly of the previous step.
        """
        assert not self.update_progress.is_running  # the backward has waited for the previous update
        self.store.flush()
        arrived = self.gradients.arrived & rules.keys()
        self._note(updating=True)
        for name in arrived:
            self.steps[name] += 1
        self.stream.forget()
        params = self._step_params({name: rules[name] for name in arrived}, self.steps, scale=scale)
        self.node.barrier()  # rank 0 has recorded the update, and no rank still computes with the old weights

        def at_end() -> None:  # after all ranks' new weights have arrived, this rank's new pages become the valid ones
            self.store.copies.flip()
            self._note(updating=False)

        self.updater.start(params, at_end=at_end)
        self.stream.block()

    def clear(self) -> None:
        """Drop the gradient sums and begin the next step. Without a preceding `step`, undo speculative updates."""
        if self.updater.skip():
            self.stream.forget()
            self.node.barrier()  # all ranks have restored their weights and pages
        self._cleared += 1
        self.gradients.clear()

    def drop(self) -> None:
        """Drop the gradient sums at any time, after waiting for gradients in flight."""
        self.gradients.finish()
        self.clear()

    def abandon(self) -> None:
        """Return to the state after the last step from any point of a forward or backward that failed."""
        self.synchronize()
        if self.updater.skip():
            self.stream.forget()
        self.updater.pipeline.drop_prefetched()
        with suppress(Exception):  # copies of gradients may have failed, too
            self.gradients.finish()
        self.gradients.clear()

    def begin(self) -> None:
        """Start prefetching the weights that the next forward needs first."""
        self.stream.begin()
        self.heap.trim()

    @property
    def steps_done(self) -> int:
        """Return the number of optimizer steps, the largest over all weights."""
        return max(self.steps.values(), default=0)

    def _note(self, *, updating: bool) -> None:
        if self.manifest:
            self.manifest.note(self.steps_done, updating=updating)

    def _step_params(self, rules: Mapping[str, Hyper], steps: Mapping[str, int], *, scale: float) -> StepParams:
        refuse_other_default()
        noise_seed = self._seed if self.store.format.stochastic else None
        return StepParams([ranges_of(unit, rules, steps) for unit in self.units], scale, noise_seed)

    # -- state --------------------------------------------------------------------------------------------------------

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole master on the CPU in fp32) one at a time; frozen weights come last."""
        for name in self.trained:
            yield name, self.master(name)
        for name in self.fixed:
            yield name, self.weight(name).float()
        self.store.flush()

    def snapshot(self) -> TieredSnapshot:
        """Return a snapshot of the current state. The next update waits for pages that are not written yet."""
        self.synchronize()
        return TieredSnapshot(self.state, self.scalars(), self.updater.snapshot())

    def scalars(self) -> EngineState:
        """Return the part of the state that is not tensors."""
        most, form = self.steps_done, self.store.format
        return EngineState(
            optimizer_steps=most,
            loss_scale=self.loss_scale,
            states=form.moments.name,
            masters=form.masters.name,
            rule=form.rule.name,
            weight_steps={name: count for name, count in self.steps.items() if count != most},
        )

    @torch.no_grad()
    def resume_from_pages(self, state: EngineState, newest: Sequence[int], sums: bytes) -> None:
        """Resume from page files with the whole state: `state`, and what `PageCopies.record` returned. Collective."""
        self.store.copies.begin(newest, sums)

        def make_weights() -> None:
            try:
                self.state.make_weights()
            except DamagedPage as error:
                raise UserError(str(error)) from error

        self.node.on_each_rank(make_weights)
        self.weights.broadcast()
        self._take_scalars(state)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load the state that a snapshot wrote, with this or another layout. All ranks call it."""
        self.synchronize()
        self.drop()
        self.updater.pipeline.drop_prefetched()
        self.stream.forget()  # before weights change, because a prefetch could read a mix of old and new ones
        self._take_scalars(self.state.load(directory, self.node))

    def _take_scalars(self, state: EngineState) -> None:
        self.steps = {name: state.weight_steps.get(name, state.optimizer_steps) for name in self.trained}
        self.loss_scale = self.loss_scale.resumed(state.loss_scale)

    def close(self) -> None:
        """Wait for asynchronous work and close everything except the device and the drives."""
        self.closed = True
        self.updater.close()  # it uses everything that is closed below
        self._fetches.cancel()  # otherwise the prefetcher would wait for collective fetches that other ranks never join
        self._open.close()


@dataclass(frozen=True)
class _SavedInput:
    """An offloaded input: its number in a forward, and its part of a host buffer (1-D)."""

    forward: int
    number: int
    shape: torch.Size
    values: torch.Tensor
    filled: Future


class Activations:
    """The inputs of checkpointed blocks of one forward, in host memory until its backward uses them.

    The computation never waits for copies to the host, but the host waits if more than a few are in flight. Each input
    comes back one block ahead of its recomputation, if they are needed from the last to the first.
    """

    def __init__(self, inputs: BlockInputs, *, device: Device, references: WeightPrefetcher) -> None:
        """Allocate a buffer for each of the expected `inputs`; additional and larger ones get theirs when they come.

        `references` are those of offloaded weights, which autograd may save with the inputs.
        """
        self._device, self._references = device, references
        memory = host_buffer(inputs.count * inputs.size, pinned=device.is_cuda)
        self._buffers = [*memory.split(inputs.size)]  # uint8, one for each input of a forward
        self._free = [done() for _ in self._buffers]  # each completes when no copy uses the buffer any more
        self._forward, self._in_forward = 0, False  # number of the current forward, and whether it is running
        self._kept: list[_SavedInput] = []  # inputs of this forward, by number
        self._downloads: deque[Future] = deque()  # copies from the device, the oldest first
        self._prefetched: dict[int, tuple[torch.Tensor, DeviceCopy]] = {}

    def attach(self, model: nn.Module) -> None:
        """Make the checkpointed blocks of `model` store inputs here; call it after each change of checkpointing."""
        for module in model.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None and getattr(checkpoint, "func", None) != self._checkpoint:
                setattr(module, "_gradient_checkpointing_func", partial(self._checkpoint, checkpoint))  # noqa: B010

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **words: Any
    ) -> Any:
        """Call torch's `checkpoint` function, and store the block inputs that it saves here."""
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, **words)
        # Masks and positions need no gradient; all blocks share them, so they stay on the device.
        wanted = {_identity(one) for one in args if isinstance(one, torch.Tensor) and one.requires_grad}

        def pack(tensor: torch.Tensor) -> Any:
            if _identity(tensor) in wanted and tensor.is_contiguous() and tensor.numel():
                return self.pack_input(tensor)
            return self._references.pack(tensor)

        if not self._in_forward:
            raise UserError(
                "a part of the model, or its forward(), was called by itself, and offload_activations keeps what "
                "whole forwards keep: call the model"
            )
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            return checkpoint(function, *args, **words)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap each forward that a backward follows; its inputs replace those of the previous forward."""
        self._kept.clear()
        self._prefetched.clear()
        self._forward += 1
        with patch.object(self, "_in_forward", True):
            yield
        self._look_ahead(len(self._kept) - 1)

    def pack_input(self, tensor: torch.Tensor) -> _SavedInput:
        """Start copying a block input to its host buffer; return its handle."""
        number, size = len(self._kept), tensor.nbytes
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
            self._free.append(done())
        self._free[number].wait()
        if self._buffers[number].numel() < size:
            self._buffers[number] = host_buffer(size, pinned=self._device.is_cuda)
        values = self._buffers[number][:size].view(tensor.dtype)
        filled = self._free[number] = self._device.keep(tensor.detach().view(-1), values)
        kept = _SavedInput(self._forward, number, tensor.shape, values, filled)
        self._kept.append(kept)
        self._downloads.append(filled)
        if len(self._downloads) > INPUTS_UNDER_WAY:
            self._downloads.popleft().wait()  # otherwise inputs in flight would fill the device's memory
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return a saved tensor on the device, and prefetch the one before. Raises UserError if it is gone."""
        if not isinstance(kept, _SavedInput):
            return self._references.unpack(kept)
        if kept.forward != self._forward:
            raise UserError(
                "another forward came between a forward and its backward, and what the first one kept is gone: with "
                "offload_activations each backward follows its forward"
            )
        known = kept.number in self._prefetched
        values, arrival = self._prefetched.pop(kept.number) if known else self._fetch(kept)
        arrival.wait()
        self._look_ahead(kept.number - 1)
        return values.view(kept.shape)

    def _look_ahead(self, number: int) -> None:
        if number >= 0 and not self._prefetched:
            self._prefetched[number] = self._fetch(self._kept[number])

    def _fetch(self, kept: _SavedInput) -> tuple[torch.Tensor, DeviceCopy]:
        values, after = torch.empty_like(kept.values, device=self._device.torch_device), self._device.mark()
        arrival, read = self._device.copy_back(kept.values, values, after=after, ready=kept.filled)
        self._free[kept.number] = together([self._free[kept.number], read])
        return values, arrival

    def close(self) -> None:
        """Wait for all copies, successful or not."""
        for free in self._free:
            with suppress(Exception):
                free.wait()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key for a tensor's memory, shape and dtype, because autograd saves an alias, not the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
