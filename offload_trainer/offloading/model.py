"""A model whose weights, gradients and optimizer state have homes of their own: on the device, in RAM, on drives.

    forward, backward   Stream brings the weights that are away; each gradient goes to Gradients as autograd makes it
    norm, step          the norm of the sums, then Updater walks the pages, and new weights go to their homes
    snapshot, load      the state by the weight's name

Where something lives never changes a bit of the result. No configuration, data or loss is known here: a module, where
each of its weights goes, and what updates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.offloading.activations.offload import Activations
from offload_trainer.offloading.activations.recompute_hooks import keep_weights
from offload_trainer.offloading.allocation import Layout, homes_made
from offload_trainer.offloading.device.base import Device
from offload_trainer.offloading.device.heap_trim import trimmed
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.checksums import DamagedPage
from offload_trainer.offloading.pages.drive_dirs import Drives
from offload_trainer.offloading.pages.index import PageIndex
from offload_trainer.offloading.pages.named_state import TieredSnapshot, TieredState
from offload_trainer.offloading.ranks.update_progress import renewal_of
from offload_trainer.offloading.update.step_params import StepParams, decision_of
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.offloading.weights.lazy_weight import LazyWeight
from offload_trainer.offloading.weights.parameter import offload_parameter
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher, modules_of_units
from offload_trainer.offloading.weights.resident_guard import ResidentGuard, give_memory
from offload_trainer.optim.checksum import sum_with
from offload_trainer.optim.kernel_api import Kernel
from offload_trainer.optim.rules import Hyper
from offload_trainer.optim.state_files import EngineState
from offload_trainer.plan.memory.activation_offload import BlockInputs
from offload_trainer.plan.tiered.update_staging import routes_of
from offload_trainer.storage.host_memory import return_now


class OffloadedModel:
    """Hooks on `module` that bring its weights and take its gradients, and the update over what they have taken."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        layout: Layout,
        *,
        device: Device,
        drives: Drives,
        kernels: tuple[Kernel, Kernel],
        seed: int,
    ) -> None:
        """`parameters` of `module` by the name of their weight, one for each use; their memory is replaced.

        What they hold is lost: `put` sets it. `kernels`: the CPU's, and the one for pages that live on `device`. `seed`
        is of the rounding of moments that are not fp32. Device and drives are closed by whoever made them, after this.
        """
        self.node = layout.node
        self.units, self.parameters = layout.units, parameters
        self._module, self._device, self._drives, self._seed = module, device, drives, seed
        trainable = {place.weight.name: place.weight.trainable for unit in layout.units for place in unit.places}
        self.trained = [name for name in parameters if trainable[name]]
        self.fixed = [name for name in parameters if not trainable[name]]
        self.steps = dict.fromkeys(self.trained, 0)  # of each weight, that changed it
        self._cleared = 0  # how often the sums were dropped
        self.last = True  # whether gradients that come now are of the step's last micro-batch
        self.taken = 0  # gradients, and changes of their sums, ever
        self.before_sums: Callable[[], None] = lambda: None  # called before somebody reads or changes a sum
        self.closed = False
        self.adds_up = True  # whether several micro-batches may be added up
        self._reads_ahead = False  # when the backward begins
        self.account: PageIndex | None = None
        self.activations: Activations | None = None
        with ExitStack() as stack:
            page_sum = sum_with(kernels[0])
            stores = homes_made(layout, device=device, drives=drives, order=self.trained, page_sum=page_sum)
            self.store, self.weights, self.gradients = stores.state, stores.weights, stores.gradients
            stack.callback(self.weights.close)
            stack.callback(self.gradients.close)
            every = routes_of(layout.homes, is_gpu=device.is_cuda)
            routes = [route for route in every if layout.homes.of_rank(route.number, self.node.rank)]
            self.update_progress = renewal_of(
                layout, [route.page for route in routes], weights=self.weights, device=device
            )
            stack.callback(self.update_progress.close)
            self.updater = Updater(
                self.store,
                self.weights,
                self.gradients,
                self.update_progress,
                device=device,
                kernels=kernels,
                routes=routes,
                slots=layout.page_buffers,
                behind=layout.behind,
                ahead=layout.ahead,
            )
            stack.callback(self.updater.close)
            self.state = TieredState(layout.units, self.store, self.weights, numbers=self.updater.numbers)
            self.places = self.state.places
            give_memory(self.weights, parameters)
            self.stream, self.resident_guard = self._attach(layout, stack)
            self._watch_gradients(stack)
            self._open = stack.pop_all()

    # -- putting together ---------------------------------------------------------------------------------------------

    def _blocks(self) -> list[tuple[nn.Module, nn.Parameter | None]]:
        """Each block with its first weight that is trained, whose gradient is its last."""
        first = {self.places[name][0].within: self.parameters[name][0] for name in reversed(self.trained)}
        blocks = dict.fromkeys(unit.within for unit in self.units if unit.within)
        return [(self._module.get_submodule(name), first.get(name)) for name in blocks]

    def _attach(self, layout: Layout, stack: ExitStack) -> tuple[WeightPrefetcher | None, ResidentGuard | None]:
        """What brings the weights that are away, and what withholds the others; None where it has nothing to do."""
        unit_of = {use: self.places[name][0].index for name, uses in self.parameters.items() for use in uses}
        names = {n: unit_of[p] for n, p in self._module.named_parameters(remove_duplicate=False)}
        wanted = modules_of_units(self._module, names, blocks=[unit for unit in self.units if unit.block])
        held, stream, resident_guard = (self.weights, self.parameters, self.update_progress), None, None
        if any(self.weights.resident(unit.index) is None for unit in self.units):
            stream = WeightPrefetcher(*held, device=self._device, blocks=layout.unit_buffers)
            stack.callback(stream.close)
            stream.attach(wanted)
            if any(unit.is_part for unit in self.units):
                keep_weights(self._module, stream)
        if layout.behind:
            resident_guard = ResidentGuard(*held, place=self._device.place)
            resident_guard.attach(wanted)
        return stream, resident_guard

    def _watch_gradients(self, stack: ExitStack) -> None:
        """Each is taken as it comes; on a CPU what blocks have freed goes back to the system now and then."""
        hooks = [
            use.register_post_accumulate_grad_hook(self._hand_over(n))
            for n in self.trained
            for use in self.parameters[n]
        ]
        if not self._device.is_cuda:
            hooks += trimmed(self._blocks())
        for hook in hooks:
            stack.callback(hook.remove)

    def _hand_over(self, name: str) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise UserError(
                    f"{name} got a sparse gradient, which AdamW does not take: make its embedding with sparse=False"
                )
            self._begin_backward()
            self._refuse_another(name)
            self.taken += 1
            self.gradients.add(name, gradient, last=self.last)

        return hook

    def _refuse_another(self, name: str) -> None:
        """UserError for a second micro-batch's gradient where sums have the 16 bits of one."""
        if not self.adds_up and self.gradients.has(name):
            raise UserError(
                f"{name} got a second gradient before its step, and gradient_accumulation_steps=1 keeps the sums in "
                "16 bits: load the model with gradient_accumulation_steps=2, or leave that out, for sums in fp32"
            )

    def keep_inputs(self, inputs: BlockInputs, *, on_drives: bool) -> None:
        """Keep away from the device what gradient checkpointing keeps: in host memory, or on the drives."""
        drives = self._drives.directories if on_drives else ()
        homes = inputs.homes(len(drives))
        name, sizes = f"activations-{self.node.rank}", [inputs.size] * inputs.count
        files = self._drives.files(name, sizes, homes, shared=False) if drives else []
        kept = Activations(
            inputs, device=self._device, files=files, transfers=self._drives.transfers, otherwise=self.stream
        )
        self._open.callback(kept.close)
        kept.attach(self._module)
        self.activations = kept

    def keep_account(self, *, model: Path) -> None:
        """Write beside the page files what lies in them; `model` is the directory with the model's configuration."""
        paths, its = self._drives.directories, self.store
        self.account = PageIndex(
            paths, self.units, its.pages, format=its.format, model=model, sums=its.sums, sync=its.sync
        )
        self._open.callback(self.account.close)

    @torch.no_grad()
    def put(self, values: Iterator[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Weights to their homes, one at a time: (name, as the model computes with it, as its master begins).

        All ranks call it, and the first of each node asks for the values.
        """

        def put() -> None:
            for name, weight, master in values:
                unit, place = self.places[name]
                self.weights.put(unit.index, place.start, weight.reshape(-1))
                if place.weight.trainable:
                    self.state.put_master(name, master.float().reshape(-1))
            self.state.flush()

        self.node.once(put)
        self.weights.spread_all()

    # -- weights that are read outside their modules ------------------------------------------------------------------

    def guard_reads(self) -> None:
        """From now on whoever reads a parameter gets its values, wherever they are (`parameter.py`)."""
        for name, uses in self.parameters.items():
            for parameter in uses:
                offload_parameter(parameter, name, self)

    def borrow_weights(self, names: Sequence[str]) -> AbstractContextManager[None]:
        if self.closed:
            raise UserError(f"{names[0]}: the session is closed, and its weights are gone with it")
        if self.resident_guard is not None:
            self.resident_guard.restore(self.places[name][0].index for name in names)
        if self.stream is None:
            return nullcontext()
        places = {name: self.places[name] for name in names}
        return self.stream.borrow_weights({name: (unit.index, place.start) for name, (unit, place) in places.items()})

    # -- gradients that are read or changed between the backward and the step ----------------------------------------

    def gradient(self, name: str) -> LazyWeight | None:
        """Return a stand-in for the sum of one weight: each operation reads it, and one in place writes it back."""
        if not self.gradients.has(name):
            return None
        like, place, of_step = self.parameters[name][0], self._device.place, self._cleared

        def read() -> torch.Tensor:
            if of_step != self._cleared or not self.gradients.has(name):
                raise UserError(
                    f"this gradient of {name} was used up by a step or dropped by zero_grad(): read .grad anew after "
                    "the next backward; clone() keeps values"
                )
            return self._settled().sums(name).to(place, copy=True).view(like.shape)

        def write(values: torch.Tensor) -> None:
            self._change(lambda sums: sums.replace(name, values))

        return LazyWeight.of(like, read, write=write, dtype=self.gradients.dtype, device=place)

    def drop_gradient(self, name: str) -> None:
        """Forget the sum of one weight, as if no backward had made it."""
        if self.gradients.has(name):
            self._change(lambda sums: sums.forget(name))

    def scale_gradients(self, factor: float) -> None:
        """Multiply all sums by `factor`, wherever they are."""
        self.gradients.finish()
        self._one_ranks().scale(factor)
        self.taken += 1

    def _settled(self) -> Gradients:
        """The sums as torch would have them now: complete, and times the factor of a clip before."""
        self.before_sums()
        self.gradients.finish()
        return self._one_ranks()

    def _change(self, change: Callable[[Gradients], None]) -> None:
        change(self._settled())
        self.taken += 1

    def _one_ranks(self) -> Gradients:
        assert isinstance(self.gradients, Gradients)  # several ranks exchange theirs, and nobody reads them there
        return self.gradients

    def trains(self, name: str) -> bool:
        return name in self.steps

    def weight(self, name: str) -> torch.Tensor:
        """A copy of one weight as the model computes with it, on the CPU."""
        self.update_progress.wait(self.places[name][0].index)
        return self.state.weight(name)

    def master(self, name: str) -> torch.Tensor:
        """A copy of one master: fp32, whole, on the CPU. `state.flush` follows the last one."""
        self.synchronize()  # its weight may be home before it is
        return self.state.master(name)

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, *, then: bool) -> Iterator[None]:
        """Around each forward; `then`: whether a backward follows."""
        keeping = self.activations.forward() if self.activations and then else nullcontext()
        with self._passing(backward=False, then=then), keeping:
            yield
        if not then:
            self.node.align()  # in a backward ranks meet anyway

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around each backward; `last`: it is the step's last, so the norms of its sums count."""
        self.synchronize()
        self.last = last
        with self._passing(backward=True, then=None if last else False):
            if last:
                self.updater.begin_ahead()
            return_now()  # a forward leaves holes in the heap, and the first gradient, the head's, is a large one
            yield
            self.gradients.end_of_backward(last=last)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around a forward, whatever makes a loss of it, and the backward, where nobody says which of them it is."""
        self._reads_ahead = last
        if not self.update_progress.under_way:
            self._begin_backward()
        if self.stream is None:
            yield
            return
        self.stream.then_after_backward = None if last else False
        with self.stream.saving():
            yield
        self.stream.end_backward()

    def _begin_backward(self) -> None:
        """From here on the sums of the last step are overwritten."""
        self.synchronize()
        if self._reads_ahead:
            self._reads_ahead = False
            self.updater.moving.read_ahead()

    def synchronize(self) -> None:
        """No update is under way when this returns. Raises what went wrong with the last one."""
        self.update_progress.finish()
        if self.resident_guard is not None:
            self.resident_guard.give_all_back()

    def _passing(self, *, backward: bool, then: bool | None) -> AbstractContextManager[Any]:
        return self.stream.passing(backward=backward, then=then) if self.stream else nullcontext()

    def expect(self, rules: Mapping[str, Hyper], *, scale: float) -> None:
        """Pages on drives are updated in the last backward that follows, as if the step were to be this one."""
        steps = {name: count + 1 for name, count in self.steps.items()}
        self.updater.expect(self._decision(rules, steps, scale=scale))

    def norm(self) -> float:
        """Global norm of the sums as they are; infinite or NaN if one of them is."""
        self.gradients.finish()
        return self.gradients.norm()

    def norms(self, order: float = 2.0) -> dict[str, torch.Tensor]:
        """The norm of each weight's sum, where it got a gradient, in the model's order, 0-dim on the CPU."""
        self.gradients.finish()
        return self._one_ranks().norms(order)

    def step(self, rules: Mapping[str, Hyper], *, scale: float) -> None:
        """The update of the weights in `rules` that got a gradient, with `scale` times their sums; after `norm`.

        `clear` follows. It may go on after this has returned: who needs what is new waits for it. Raises TrainerError,
        here or from whoever waits next, where a drive fails; the state is then partly of the step before.
        """
        assert not self.update_progress.under_way  # the backward has waited for it
        self.state.flush()
        arrived = self.gradients.arrived & rules.keys()
        self._note(updating=True)
        for name in arrived:
            self.steps[name] += 1
        if self.stream:
            self.stream.forget()
        decision = self._decision({name: rules[name] for name in arrived}, self.steps, scale=scale)
        self.node.barrier()  # rank 0 has noted it, and no rank computes with the weights of before
        self.updater.start(decision, at_end=self._all_home)
        if self.resident_guard is not None:
            self.resident_guard.begin()

    def _all_home(self) -> None:
        """An update is over: on this rank its pages hold, and of all ranks the new weights are here."""
        self.store.flip()
        self._note(updating=False)

    def clear(self) -> None:
        """Let go of the sums: the next step begins. What was done of one that was not taken never was."""
        if self.updater.skip():
            if self.stream:
                self.stream.forget()
            self.node.barrier()  # on all ranks the weights are those of before, and the places
        self._cleared += 1
        self.gradients.clear()

    def drop(self) -> None:
        """`clear` at any time: what is on its way arrives first."""
        self.gradients.finish()
        self._cleared += 1
        self.gradients.clear()

    def begin(self) -> None:
        """A forward follows: what it needs first is started."""
        if self.stream:
            self.stream.begin()
        return_now()

    @property
    def steps_done(self) -> int:
        return max(self.steps.values(), default=0)

    def _note(self, *, updating: bool) -> None:
        if self.account:
            self.account.note(self.steps_done, updating=updating)

    def _decision(self, rules: Mapping[str, Hyper], steps: Mapping[str, int], *, scale: float) -> StepParams:
        noise_of = self._seed if self.store.format.moments.stochastic else None
        return decision_of(self.units, rules, steps, scale=scale, noise_of=noise_of)

    # -- state --------------------------------------------------------------------------------------------------------

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole fp32 master on the CPU) one at a time; weights that are fixed last, as fp32."""
        for name in self.trained:
            yield name, self.master(name)
        for name in self.fixed:
            yield name, self.weight(name).float()
        self.state.flush()

    def snapshot(self, *, loss_scale: float | None = None, good_steps: int = 0) -> TieredSnapshot:
        """The state of now, to be written once; the update waits for pages that are not written yet."""
        self.synchronize()
        state = self.state.beside(self.steps, loss_scale=loss_scale, good_steps=good_steps)
        return TieredSnapshot(self.state, state, self.updater.snapshot())

    @torch.no_grad()
    def resume_from_pages(self, state: EngineState, newest: Sequence[int], sums: bytes) -> None:
        """Resume from the page files, which hold all of the state. All ranks call it.

        Each page is where `newest` says, and has its part of `sums` (`PageSums.of_newest`). UserError where it has not.
        """
        self.store.sums.begin(newest, sums)
        self.node.each(self._make_weights)
        self.weights.broadcast()
        self.steps = {name: state.steps_of(name) for name in self.trained}

    def _make_weights(self) -> None:
        """Make this rank's 16-bit weights from the masters in the page files of another process."""
        try:
            self.state.make_weights()
        except DamagedPage as error:
            raise UserError(str(error)) from error

    @torch.no_grad()
    def load(self, directory: Path) -> EngineState:
        """Go on from what a snapshot has written, of this or another layout. All ranks call it."""
        self.synchronize()
        self.drop()
        self.updater.moving.forget_ahead()
        if self.stream:
            self.stream.forget()  # before weights change: a prefetch would read some of the old and some of the new
        state = self.state.load(directory, self.node)
        self.steps = {name: state.steps_of(name) for name in self.trained}
        return state

    def close(self) -> None:
        """Wait for what is under way; what was taken from the device and the drives stays theirs."""
        self.closed = True
        self.updater.close()  # it uses all that follows
        self.weights.cancel()  # or the stream would wait for what other ranks need not come to
        self._open.close()
