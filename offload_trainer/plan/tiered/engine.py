"""Planning for the tiered engine: check its settings, list the placements that they allow, and compute their cost.

Unless the shares are set, each candidate has as much of the optimizer state on the GPU as fits, then as much in RAM as
fits, and the rest on drives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf

from offload_trainer.common.errors import UserError
from offload_trainer.common.packages import lacks
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.config import PlacementSection, TieredSection
from offload_trainer.plan import step_time
from offload_trainer.plan.communication import bounds_of, exchange_of
from offload_trainer.plan.machine import MachineProfile, sums_key, update_key
from offload_trainer.plan.memory import LONG, gpu_reserve, heap_holes
from offload_trainer.plan.tiered import footprint
from offload_trainer.plan.tiered.layout import FORMATS, TierMap
from offload_trainer.plan.tiered.spec import Layouts, TierSizes, layouts_of
from offload_trainer.plan.tiered.state_formats import ADAMW, FP32, StateFormat
from offload_trainer.plan.tiered.weight_streaming import seconds_of, seconds_of_both, uses_all_gather
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME, Item, Placement, TierKind, kind_asked, on_drive, tier_names
from offload_trainer.plan.workload import Workload

WORTH = 0.05  # share of a step that an alternative update schedule must save, since forecasts are inexact

FULL = "tiered.overlap=backward"  # the update schedule that needs two copies of the state

_LARGE = 64 * 10**9  # bytes of RAM


def left_free(ram: int) -> int:
    """Return the bytes of RAM that stay free if the rest of the state is on drives: 5 %, and 2 % of what exceeds 64 GB.

    They cover the plan's error, which comes from the process and its libraries; the state's bytes are exact.
    """
    return min(ram, _LARGE) // 20 + max(0, ram - _LARGE) // 50


@dataclass(frozen=True)
class Tiered:
    """The settings of the tiered engine."""

    place: PlacementSection
    section: TieredSection

    name, packages = "tiered", ()

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each: of ranks, and of shares that contradict."""
        place, asked = self.place, kind_asked(self.place.optimizer)
        given = {flag: share for flag, share in place.shares.items() if share != "auto"}
        words = " and ".join(f"{flag} {share:g}" for flag, share in given.items())
        left = round(1 - sum(given.values()), 9)
        only, where = ("--gpu-fraction", "on the GPU") if asked == TierKind.GPU else ("--ram-fraction", "in RAM")
        other = "" if place.gpu_fraction != "auto" else f", or --gpu-fraction {left:g}"
        shares = {
            f"{words} add up to {1 - left:g} of the state: lower one of them": left < 0,
            f"{words} with --optimizer {place.optimizer}, which puts all of it {where}: leave one out": (
                asked in (TierKind.GPU, TierKind.RAM) and any(one != (flag == only) for flag, one in given.items())
            ),
            f"{words} leaves {left:g} of the state for a drive: add --nvme DIR{other}": (
                place.ram_fraction != "auto" and left and not place.nvme
            ),
        }
        return [*self._not_with_ranks(place.gpus), *[one for one, wrong in shares.items() if wrong][:1]]

    def _not_with_ranks(self, world: int) -> list[str]:
        place, ranks, gpu = self.place, f"with {world} ranks and --engine tiered", TierKind.GPU
        away = "must be in RAM or on drives; leave it out"
        found = {
            f"--optimizer gpu {ranks}: the state {away}": kind_asked(place.optimizer) == gpu,
            f"--gpu-fraction {ranks}: the state {away}": place.gpu_fraction not in ("auto", 0),
            f"placement.gradients=gpu {ranks}: gradient sums {away}": kind_asked(place.gradients) == gpu,
        }
        return [sentence for sentence, wrong in found.items() if wrong and world > 1]

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Raise UserError for settings that the machine, or the launcher's number of ranks, makes impossible."""
        if impossible := self.impossible(work):
            raise UserError("; ".join(impossible))
        if work.shape.base_format and machine.lacks("bitsandbytes"):
            raise UserError(lacks(f"model.base={work.shape.base_format}", "bitsandbytes"))
        on_gpu = self.place.gpu_fraction not in ("auto", 0) or kind_asked(self.place.optimizer) == TierKind.GPU
        if on_gpu and machine.no_state_on_gpu:
            raise UserError(f"this GPU cannot store optimizer state: {machine.no_state_on_gpu}; use --gpu-fraction 0")

    def impossible(self, work: Workload) -> list[str]:
        """Return the settings that a step of this workload does not support, one sentence each."""
        section, shape, why = self.section, work.shape, why_not_breadth_first(work)
        pipeline, shared = f"parallel.pipeline={work.pipeline}", why_no_pipeline(work)
        found = {
            "tiered.overlap=backward: in a session, the learning rate and clipping factor of a step are known only "
            "after its backward; leave it out": work.checkpoints is None and section.overlap == "backward",
            f"{pipeline}: {shared}": shared,
            f"tiered.overlap=backward with {pipeline} on {work.world} ranks: it is for one pipeline; leave it out": (
                work.world > work.pipeline > 1 and section.overlap == "backward"
            ),
            f"tiered.micro_batch_order=breadth_first: {why}; leave it out": (
                section.micro_batch_order == "breadth_first" and work.accumulate > 1 and why
            ),
            f"tiered.micro_batch_order=depth_first with {pipeline}, which is breadth-first; leave it out": (
                work.pipeline > 1 and section.micro_batch_order == "depth_first"
            ),
            f"optim.master_dtype=bf16 with --dtype {work.dtype}: a bf16 master is the weight in use; leave it out, or "
            "use --dtype bf16": work.state.masters.stochastic and work.dtype != "bf16",
            f"optim.name={work.state.rule.name}: no repeated block of this model has a trainable matrix; use "
            "optim.name=adamw": work.state.rule.matrices and not any(weight.matrix for weight in shape.weights),
        }
        return [*self._not_with_ranks(work.world), *(sentence for sentence, wrong in found.items() if wrong)]

    def why_not_full(self, work: Workload, machine: MachineProfile) -> str:
        """Return why `auto` does not consider this engine, whose update overlaps the backward, or ""."""
        if reasons := self.impossible(work):
            return "; ".join(reason.removesuffix("; leave it out") for reason in reasons)
        if work.state.rule.matrices and machine.gpu is None:
            return f"{FULL} with optim.name={work.state.rule.name} on a CPU: the update has only one core then"
        return f"{FULL} with {work.world} ranks: auto chooses it only for one rank" if work.world > 1 else ""

    def candidates(self, work: Workload, machine: MachineProfile) -> list[TieredCandidate]:
        """Return the candidates, from the fastest to the one that needs the least memory."""
        if work.world > 1 and self.place.gpu_fraction == "auto":
            return replace(self, place=self.place.model_copy(update={"gpu_fraction": 0.0})).candidates(work, machine)
        layouts, found, homes = layouts_of(work), list[TieredCandidate](), self._homes(work, machine)
        ways = [(*one, step) for one in homes for step in self._orders(work, machine, one[0].params)]
        for placement, gradients, step in ways:
            sizes = self._sizes(step, machine, placement, gradients=gradients)
            one = TieredCandidate(step, machine, placement, sizes, layouts, self.section)
            if placement.optimizer != TierKind.GPU:
                one = self._with_device_sums(one)
            if one.sizes.gpu_fraction == 1:
                everything = replace(one.sizes, gradients=TierKind.GPU, device_sums=0)
                one = replace(one, placement=replace(placement, optimizer=TierKind.GPU), sizes=everything)
            if one not in found:  # "everything on the GPU" occurs twice if it fits
                found.append(one)
        return found

    def _sizes(
        self, work: Workload, machine: MachineProfile, placement: Placement, *, gradients: TierKind
    ) -> TierSizes:
        """Return the configured sizes. A share of `auto` becomes all or nothing here, by `placement.optimizer`."""
        place, tiered = self.place, self.section
        on_gpu = float(placement.optimizer == TierKind.GPU) if place.gpu_fraction == "auto" else place.gpu_fraction
        in_ram = 0.0 if placement.optimizer == TierKind.DRIVES else 1.0 - on_gpu
        timed, speeds = [drive.rates for drive in machine.drives if drive.rates is not None], (1.0,) * len(place.nvme)
        if len(timed) == len(speeds):  # equal speeds, if they were not measured
            speeds = tuple(rates.mixed_read.value + rates.mixed_write.value for rates in timed)
        all_gather = uses_all_gather(tiered.weight_transfer, machine, ranks=work.here)
        return TierSizes(
            gpu_fraction=on_gpu,
            ram_fraction=in_ram if place.ram_fraction == "auto" else place.ram_fraction,
            gradients=gradients,
            page=tiered.page_size,
            page_buffers=tiered.page_buffers,
            unit_buffers=tiered.weight_buffers,
            overlap=tiered.overlap in ("forward", "backward"),
            ahead=tiered.overlap == "backward",
            speeds=speeds,
            places=2 if tiered.overlap == "backward" else 1 if tiered.state_copies == "auto" else tiered.state_copies,
            by_parts=placement.params == TierKind.RAM and all_gather and work.pipeline == 1,
        )

    def _orders(self, work: Workload, machine: MachineProfile, params: TierKind) -> list[Workload]:
        """Return the step with its micro-batches depth-first, breadth-first or both, the preferred order first."""
        order, breadth_first = self.section.micro_batch_order, replace(work, breadth_first=True)
        is_depth_first = order == "depth_first" or (order == "auto" and params == TierKind.GPU)
        if work.pipeline == 1 and (is_depth_first or work.accumulate == 1 or why_not_breadth_first(work)):
            return [work]
        if order == "breadth_first" or work.pipeline > 1:
            return [breadth_first]
        # Breadth-first needs more memory, so it must gain enough; where nothing was timed it is the better guess.
        copies = [drive.rates for drive in machine.drives] if params == TierKind.DRIVES else [machine.rates.to_device]
        return [work, breadth_first] if machine.rates.matmul and all(copies) else [breadth_first, work]

    def _with_device_sums(self, one: TieredCandidate) -> TieredCandidate:
        """Return the candidate with its shares, and with gradients added on the GPU if that fits and is no slower."""
        work, machine, units, counts = one.work, one.machine, one.layouts.units, [0]
        is_added = one.sizes.gradients != TierKind.GPU and work.world == work.pipeline and work.accumulate > 1
        if is_added and work.breadth_first and machine.gpu is not None:
            counts += [max((unit.trained for unit in units if unit.block >= only), default=0) for only in (0, 1)]
        room, fitting = work.here * (machine.gpu_bytes - gpu_reserve(machine)), list[TieredCandidate]()
        for most in sorted({*counts}, reverse=True):
            way = self._with_shares(replace(one, sizes=replace(one.sizes, device_sums=most)))
            if not most or sum(item.bytes for item in way.items if item.tier == GPU_NAME) <= room:
                fitting.append(way)
            if fitting and self.place.gpu_fraction != "auto":
                break  # no state would take the room instead

        def cost(way: TieredCandidate) -> tuple[float, int]:
            costs = way.costs()
            step = way.settled(step_time.forecast(way.work, machine, costs))[1].step
            written = sum(it.written for it in costs.traffic if it.place != step_time.DEVICE_COPIES)
            return inf if step is None else step, written

        return min(fitting, key=cost) if len(fitting) > 1 else fitting[0]

    def _with_shares(self, one: TieredCandidate) -> TieredCandidate:
        """Return the candidate with as much of the state on the GPU and then in RAM as fits, where that is left open.

        Shares are multiples of 1/1000, or all that the other shares leave. What is left of RAM is shadow memory.
        """
        place, work, machine, sizes, ram = self.place, one.work, one.machine, one.sizes, one.machine.ram_bytes
        room, ram_is_open = ram - left_free(ram), place.ram_fraction == "auto"

        @cache
        def with_sizes(sizes: TierSizes, keeps_heap: bool) -> TieredCandidate:
            return replace(one, work=replace(work, keeps_heap=keeps_heap), sizes=sizes)

        def needs(sizes: TierSizes, tier: str = RAM_NAME) -> int:
            return sum(item.bytes for item in with_sizes(sizes, keeps_heap).items if item.tier == tier)

        # malloc may keep freed memory in a run of one process on a CPU; a session's process also runs other code. For
        # long rows the arithmetic outweighs fresh pages (`mapped_from`).
        run = work.world == 1 and work.checkpoints is not None
        may_keep = run and machine.gpu is None and work.seq_len < LONG
        keeps_heap = may_keep and heap_holes(work, one.items) <= left_free(ram)  # small holes come before state
        trained = sum(unit.trained for unit in one.layouts.units) // work.nodes
        is_open, each = place.optimizer == "auto" and trained > 0, work.state.mean_bytes(work.shape)
        if is_open and place.gpu_fraction == "auto" and machine.gpu is not None and not machine.no_state_on_gpu:
            bare = replace(sizes, gpu_fraction=0.0, ram_fraction=0.0 if ram_is_open else sizes.ram_fraction)
            share = bare.on_drives
            while share > 0:
                rest = round(1 - share, 9) if ram_is_open else bare.ram_fraction
                shared = replace(bare, gpu_fraction=share, ram_fraction=rest)
                over = needs(shared, GPU_NAME) - (machine.gpu_bytes - gpu_reserve(machine))
                if over <= 0:
                    sizes = shared
                    break
                # This reduction never overshoots: an element of state needs its own bytes and at most 4 of gradient.
                share = max(0.0, int(1000 * (share - over / (trained * (each + 4)))) / 1000)
        if is_open and ram_is_open and place.nvme and needs(sizes) > ram:
            # State on a drive also needs page buffers in RAM, so the bytes are those of a plan without any in RAM.
            share = max(0, room - needs(replace(sizes, ram_fraction=0.0))) / (each * trained)
            sizes = replace(sizes, ram_fraction=int(1000 * min(sizes.ram_fraction, share)) / 1000)
        if may_keep:
            keeps_heap = True
            keeps_heap = needs(sizes) <= room
        # Without a GPU the model and the update share the cores. Starting early would only move the update's seconds
        # into the backward and add those of copying the old bytes.
        if sizes.ahead and machine.gpu is not None:
            used = needs(sizes)
            whole = needs(replace(sizes, shadow_fraction=1.0)) - used
            share = min(1.0, max(0, room - used) / whole) if whole else 0.0
            sizes = replace(sizes, shadow_fraction=int(1000 * share) / 1000)
        return with_sizes(sizes, keeps_heap)

    def _homes(self, work: Workload, machine: MachineProfile) -> list[tuple[Placement, TierKind]]:
        """Return (placement, tier of gradient sums), from the fastest to the one that needs the least memory."""
        place, gpu, ram, drives = self.place, TierKind.GPU, TierKind.RAM, TierKind.DRIVES
        # Without a GPU the device's memory is RAM already.
        params = [asked] if (asked := kind_asked(place.params)) else [gpu, *[ram] * (machine.gpu is not None), drives]
        all_there = machine.gpu is not None and not machine.no_state_on_gpu and params[0] == gpu
        all_there = all_there and {place.optimizer, *place.shares.values()} == {"auto"}
        found = [(Placement(gpu, gpu), gpu)] if all_there else []
        for home in params:
            homes = [ram, drives] if home == drives else [ram]
            if machine.gpu is not None and work.accumulate > 1 and work.world == 1:  # sums there are the fastest
                homes.insert(0, gpu)
            asked = kind_asked(place.gradients)
            placement = Placement(home, kind_asked(place.optimizer) or ram)
            found += [(placement, one) for one in ([asked] if asked else homes)]
        return [one for one in found if place.nvme or drives not in (one[0].params, one[1])]


def why_not_breadth_first(work: Workload) -> str:
    """Return why the micro-batches of a step cannot pass through the model block by block, or "" if they can."""
    reasons = {
        "in a session, other code runs the micro-batches": work.checkpoints is None,
        f"{work.world} ranks: it is for one rank": work.world > 1 and work.pipeline == 1,
        "not all blocks are checkpointed (model.activation_checkpointing=on)": work.checkpointed < work.shape.layers,
        "the model's head and body run together, on whole micro-batches": work.shape.whole_logits,
        work.shape.no_chain: True,
    }
    return next(reason for reason, here in reasons.items() if here)


def why_no_pipeline(work: Workload) -> str:
    """Return why `work.pipeline` ranks cannot compute the model together, and what to do, or "" if they can."""
    shape, ranks = work.shape, work.pipeline
    reasons = {
        f"{work.here} rank(s) on a node, and a multiple of {ranks} is needed (--gpus)": work.here % ranks,
        f"each rank needs a block, and the model has {len(shape.blocks)}": len(shape.blocks) < ranks,
        "frozen weights (model.freeze)": shape.trainable < shape.parameters,
        "blocks share weights": any(weight.block and weight.uses > 1 for weight in shape.weights),
        "models with parts for images": bool(shape.images),
        why_not_breadth_first(work): True,
    }
    found = next(reason for reason, here in reasons.items() if here)
    return f"{found}; leave it out" if found and ranks > 1 else ""


@dataclass(frozen=True)
class TieredCandidate:
    """One placement of the tiered engine with its sizes, and the memory, traffic and time that follow from them."""

    work: Workload
    machine: MachineProfile
    placement: Placement
    sizes: TierSizes
    layouts: Layouts = field(compare=False, repr=False)
    section: TieredSection = field(default_factory=TieredSection)

    engine, title, cannot_save = "tiered", "tiered engine", None

    @cached_property
    def _laid_out(self) -> TierMap:
        return self.layouts.homes(self.placement, self.sizes)

    @property
    def homes(self) -> str:
        """Return the placement of weights and optimizer state in words; without a GPU the device's memory is RAM."""
        sizes, names = self.sizes, tier_names(self.machine)
        shown = sizes.gradients != TierKind.RAM and sizes.gpu_fraction < 1
        gradients = f", gradients {sizes.gradients}" if shown else ""
        shares = defaultdict[str, float](float)
        for home, share in sizes.shares.items():
            shares["RAM" if names[home] == RAM_NAME else names[home]] += share
        shares[TierKind.DRIVES] = sizes.on_drives
        *parts, (last, _) = [(title, share) for title, share in shares.items() if share > 0]
        state = ", ".join([*(f"{share:.1%} {title}" for title, share in parts), f"rest {last}" if parts else last])
        inputs = f", block inputs {TierKind.RAM}" if self.work.inputs_away else ""
        order = ", micro-batches breadth-first" if self.work.breadth_first else ""
        return self.machine.in_words(f"params {self.placement.params}, optimizer {state}{gradients}{inputs}{order}")

    @property
    def uses_drives(self) -> bool:
        """Return whether anything is placed on a drive."""
        return self.sizes.on_drives > 0 or TierKind.DRIVES in (self.placement.params, self.sizes.gradients)

    @cached_property
    def items(self) -> list[Item]:
        """Return the bytes at the peak by tier, without checkpoints."""
        return [*footprint.tiered_items(self.work, self._laid_out, self.sizes, self.machine)]

    def costs(self) -> step_time.Costs:
        """Return the time on top of the model's computation: bytes moved, the update, ranks, and adding gradients."""
        work, machine, homes, sizes, gpu = self.work, self.machine, self._laid_out, self.sizes, self.machine.gpu
        traffic = footprint.tiered_traffic(work, homes, sizes, machine)
        by_parts = footprint.gathered_weights(work, homes, sizes)
        exchange = exchange_of(work, homes, by_parts=by_parts)
        waits, hidden = bounds_of(exchange, work, machine)
        bounds = [*self._updates(), *hidden]
        for phase, gathered in by_parts.items():
            from_ram, from_others = map(format_bytes, gathered)
            what = f"{from_ram} of weights to each device from RAM, {from_others} from other devices"
            bounds.append(step_time.Bound(phase, seconds_of(gathered, machine, ranks=work.here), what, "gpus"))
        bounds += [wait for wait in waits if wait.seconds is None]  # makes the phase unknown
        on_top = dict.fromkeys(step_time.PHASES, 0.0)
        for wait in waits:
            on_top[wait.phase] += wait.seconds or 0.0
        if self.placement.params != TierKind.GPU and sizes.unit_buffers == 1:
            bounds += step_time.in_turn(work, machine, traffic)
        adding, memory, rates = 0.0, machine.rates.memory, machine.rates.sums
        alone = work.world == work.pipeline  # other ranks exchange gradients instead
        for measured, size in footprint.added_bytes(work, homes, sizes, gpu=gpu is not None).items() if alone else ():
            keys = [sums_key(name, measured=measured) for name in step_time.kernels_of(work)]
            rate = next((rates[key] for key in keys if key in rates), memory)
            adding += size / rate.value if rate is not None else 0.0  # seconds to add gradients and measure their sums
        if gpu is not None and adding:
            bounds.append(step_time.Bound("backward", adding, "adding gradients in RAM", "memory"))
        if gpu is None:  # the cores that compute also add gradients and copy weights from RAM
            on_top["backward"] += adding
            for moved in traffic if self.placement.params == TierKind.RAM else ():
                if memory and moved.place == step_time.DEVICE_COPIES and moved.phase != "update":
                    on_top[moved.phase] += 2 * moved.read / memory.value
        return step_time.Costs(traffic, bounds, list(exchange.links), on_top=on_top, waits=waits)

    def _updates(self) -> Iterator[step_time.Bound]:
        """Yield the bounds of the update kernels on GPU and CPU.

        Rates were measured with AdamW and 16-bit gradients. The products of a rule on whole matrices come in addition.
        They do not overlap the transfers of pages without matrices, since a unit's pages are updated in turn.
        """
        work, machine, rates = self.work, self.machine, self.machine.rates.update
        on_gpu = self.sizes.gpu_fraction if machine.gpu is not None else 0.0
        trained = work.shape.trainable / work.nodes
        inside, outside = round(on_gpu * trained), round((1 - on_gpu) * trained)
        moved = 2 * work.state.mean_bytes(work.shape) + 2  # bytes per parameter without the gradient
        longer, title = (moved + work.gradient_bytes) / (moved + 2), work.state.rule.title
        products: float | None = 0.0
        others: float | None = 0.0
        if work.state.rule.matrices:
            products = step_time.seconds_of_matrices(work.shape, machine)
            cores = machine.cores / work.here if machine.gpu is None and self.sizes.overlap else 1
            products = None if products is None else products * cores / work.world
            beside = footprint.traffic_beside_matrices(work, self._laid_out, machine)
            others = step_time.transfer_seconds(beside, machine, phase="update")
        if inside:
            whole = 2 * StateFormat(ADAMW, FP32).bytes_each + 4
            timed, wide = rates.get(update_key("cuda", work.state.name)), rates.get("cuda")
            rate = timed.value if timed else wide.value * whole / (moved + 2) if wide else None
            seconds = inside / rate * longer + products * on_gpu if rate and products is not None else None
            what = f"{title} on {format_count(inside)} parameters on the GPU"
            yield step_time.Bound("update", seconds, what, "adamw_gpu")
        if outside:
            speed, seconds = step_time.update_rate(work, machine), None
            if speed and products is not None and others is not None:
                seconds = outside / speed * longer + products * (1 - on_gpu) + others + step_time.UPDATE_START
            yield step_time.Bound("update", seconds, f"{title} on {format_count(outside)} parameters", "adamw")

    def settled(self, found: step_time.Forecast) -> tuple[TierSizes, step_time.Forecast]:
        """Return the final sizes and forecast, after deciding whether the update overlaps other work.

        `found` is without overlap. New weights are ready before the state of their page has been written, except with
        several ranks and on drives.
        """
        sizes, work, machine, gpu = self.sizes, self.work, self.machine, self.machine.gpu is not None
        # An update that overlaps has one core of a CPU that computes the model, also for products of matrices.
        if not sizes.overlap and ((work.state.rule.matrices and not gpu) or self.section.overlap != "auto"):
            return sizes, found
        overlap = step_time.Overlap(found, step_time.parts_of(self._laid_out), work.passes, gpu)
        early = work.world == 1 and self.placement.params != TierKind.DRIVES
        pages = sum(group.count for group in self._laid_out.cut.groups if on_drive(group.page.home))
        hidden = overlap.hidden(read=overlap.read_before_update(pages, buffers=sizes.page_buffers) if early else 0.0)
        if found.step is not None:
            gains = hidden >= 0.02 * found.step  # below `WORTH`, since this needs no memory and changes no bits
        else:
            # Overlap changes no result and needs no memory, and without it drives are idle during the forward. If the
            # CPU computes the model, there must be more cores than ranks: each rank's update needs a core too.
            gains = self.uses_drives and (gpu or machine.cores > work.here)
        if not sizes.overlap and not gains:
            return sizes, found
        if sizes.ahead:
            return sizes, self._overlapping_backward(overlap, read_early=early)
        return replace(sizes, overlap=True), replace(found, behind=True, hidden=hidden)

    def _overlapping_backward(self, overlap: step_time.Overlap, *, read_early: bool) -> step_time.Forecast:
        homes, sizes = self._laid_out, self.sizes
        # The update writes the old bytes of pages with shadow memory once more. If the memory's rate was not measured,
        # it is that of the update, which is bound by memory.
        size, memory = footprint.shadow_bytes(homes, self.work.state), self.machine.rates.memory
        each = 2 * self.work.state.mean_bytes(self.work.shape) + 4  # the gradient and the weight have 16 bits
        moved = memory.value if memory is not None else (step_time.update_rate(self.work, self.machine) or 0.0) * each
        copying = size / moved if moved else 0.0
        early = step_time.early_pages(homes, copying=copying, buffers=sizes.page_buffers)
        done, saved, first = overlap.ahead(early)
        left = overlap.left_after(done, early)
        update, rest = (one.found.seconds["update"] or 0.0 for one in (overlap, left))
        ready = early.read * update if read_early else 0.0
        whole = left.hidden(read=ready / rest if rest else 0.0, after=min(first, ready))
        whole += update - rest - (done - saved)
        # A clipped step's update starts after the backward.
        longer = max(0.0, whole - overlap.hidden()) + 2 * early.copying  # old bytes are copied back
        return replace(overlap.found, behind=True, ahead=True, hidden=whole, if_clipped=longer)

    def notes(self, costs: step_time.Costs) -> Iterator[str]:
        """Yield the sentences of the plan about this placement."""
        work, machine = self.work, self.machine
        if machine.no_state_on_gpu:
            yield f"this GPU cannot store optimizer state: {machine.no_state_on_gpu}"
        if work.world > 1:
            nodes = f"{work.nodes} nodes" if work.nodes > 1 else "one node"
            yield f"{work.world} ranks on {nodes}: RAM holds optimizer state, gradient sums and weights once a node"
            if work.nodes > 1:
                yield "RAM and drives are those of one node, which stores the state of its own ranks and all weights"
        if work.pipeline > 1 and machine.gpu is not None:
            on_gpus = (item for item in self.items if item.tier == GPU_NAME)
            items = (item.of_ranks or (item.bytes // work.here,) * work.pipeline for item in on_gpus)
            each = ", ".join(format_bytes(sum(of_rank)) for of_rank in zip(*items, strict=True))
            yield (
                f"parallel.pipeline={work.pipeline}: the ranks need {each} of their GPUs; the embedding is on rank 0, "
                f"the head on rank {work.owners[-1]}"
            )
        if base := work.shape.base_format:
            frozen = sum(weight.numel for weight in work.shape.weights if weight.quantised)
            yield (
                f"model.base={base}: {format_count(frozen)} frozen parameters, the matrices of blocks, are stored in "
                f"{FORMATS[base].bytes_each:.3g} B each and dequantised when they are used; the plan does not count "
                "the seconds of that"
            )
        # The order of micro-batches, where it decides how often weights are fetched.
        why, count, key = why_not_breadth_first(work), work.accumulate, "tiered.micro_batch_order"
        is_open = self.section.micro_batch_order == "auto" and self.placement.params != TierKind.GPU
        if work.breadth_first:
            yield (
                f"{key}=breadth_first: the {count} micro-batches of a step pass through each block together, and its "
                f"weights are fetched once a pass{', its gradients copied out once' if self.sizes.device_sums else ''}"
            )
        elif is_open and count > 1 and why and work.checkpoints is not None:
            yield f"{key}=depth_first: weights are fetched for each of the {count} micro-batches, since {why}"
        asked, alone = self.section.weight_transfer, work.here == 1 or work.pipeline > 1
        in_ram = self.placement.params == TierKind.RAM and not alone
        if in_ram and (machine.gpu is not None or self.sizes.by_parts):
            size = max(unit.stored_bytes(work.item_bytes) for unit in self.layouts.units)
            both = seconds_of_both(size, machine, ranks=work.here, item_bytes=work.item_bytes)
            whole, parts = ("unknown" if one is None else format_seconds(one) for one in both)
            way = "all_gather" if self.sizes.by_parts else "direct"
            told = "" if asked == "auto" else f" (tiered.weight_transfer={asked})"
            yield (
                f"weight transfer for {work.here} GPUs: {way}{told}; the largest block takes {whole} if each GPU "
                f"copies all of it from RAM (direct), {parts} if each copies its shard and they exchange the shards "
                "(all_gather)"
            )
        elif asked != "auto":
            yield (
                f"tiered.weight_transfer={asked} has no effect here: there is one rank per node or a pipeline, or the "
                "weights are not in RAM"
            )
        for phase in step_time.PHASES:
            held_up = [wait for wait in costs.waits if wait.phase == phase and wait.seconds is not None]
            if parts_of_it := [f"{format_seconds(wait.seconds or 0.0)} for {wait.what}" for wait in held_up]:
                yield f"in the {phase}, ranks additionally wait {', '.join(parts_of_it)}"
