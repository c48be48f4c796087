"""The tiered engine's memory on each tier, and the bytes that each phase of its step moves. Pure arithmetic.

Both are exact, since the engine lays out and fetches with the same functions. Each rank has a process, a device and
buffers. State, weights and gradient sums in RAM and on drives exist once per node.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod

from offload_trainer.common.units import format_bytes, format_count
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import activation_items, heap_holes, inputs_of, process_items, slots_of
from offload_trainer.plan.step_time import DEVICE_COPIES, Traffic
from offload_trainer.plan.tiered import spec, weight_streaming
from offload_trainer.plan.tiered.layout import DEVICE, PIECE, PageGroup, TierMap, Unit, largest_range, range_of_rank
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import RAM, RAM_NAME, WHERE, Item, on_drive, tier_names
from offload_trainer.plan.workload import Workload


def tiered_items(work: Workload, homes: TierMap, sizes: spec.TierSizes, machine: MachineProfile) -> Iterator[Item]:
    """Yield the memory of a node's ranks at its peak."""
    ram, device, here, gpu = partial(Item, RAM_NAME), partial(Item, machine.device), work.here, machine.gpu is not None
    e, units = work.item_bytes, homes.units
    yield from process_items(machine, here=here)
    yield from _page_items(work, homes, sizes, machine)
    yield from _weight_items(work, homes, sizes, machine)
    yield from _gradient_items(work, homes, machine)
    if work.pipeline > 1:
        slots, why = slots_of(work), "a block's output, or its gradient, of each micro-batch on its way between ranks"
        yield ram("cuts", here // work.pipeline * slots.count * slots.size, why)
    if work.state.rule.matrices:
        matrices = [weight.matrix for weight in work.shape.weights if weight.matrix]
        each = 6 if gpu else 8  # the iteration's matrices, and on a CPU an fp32 copy
        size = max((each * prod(matrix) + 4 * min(matrix) ** 2 for matrix in matrices), default=0)
        yield device("orthogonalisation", here * size, "of the largest matrix, one at a time")
    if work.world == work.pipeline:
        why = "buffer between the device and gradient sums in RAM or on drives"
        yield ram("gradient staging", here * spec.gradient_ring(work, homes, sizes, gpu=gpu), why)
        # On a CPU copies are synchronous. On a GPU the largest gradient and up to `GRADIENTS_IN_FLIGHT` bytes may wait.
        # The gradient being computed, and those of a tied weight that wait for each other, count as activations.
        leaving = _leaving(homes, sizes)
        copied = [e * place.weight.numel for unit in leaving for place in unit.places if place.weight.trainable]
        size, why = 0, "added on the GPU" if gpu else "copied immediately"
        if gpu and copied:
            more = spec.GRADIENTS_IN_FLIGHT
            size = min(sum(copied), max(copied) + more)
            why = f"being copied off the GPU: the largest weight's, and at most {format_bytes(more)} more"
        yield device("gradients in flight", here * size, why)
        if any(sums := _sums_on_device(work, homes, sizes)):
            why = "of the block that gets gradients, and of the one before it, whose sums leave the GPU"
            yield replace(device("gradient sums", here * max(sums), why), of_ranks=sums)
    else:
        outbox = spec.exchange_bytes(units, item_bytes=e)
        why = f"{spec.OUTBOXES} buffers for the largest block's gradients, shared by all ranks"
        yield ram("gradient exchange", here * outbox, why)
        if work.nodes > 1:
            givers = work.world // work.pipeline  # ranks with gradients of a unit
            inboxes = here * (givers - givers // work.nodes) * e * largest_range(units, ranks=givers)
            yield ram("gradient receive buffers", inboxes, "the largest shard from each rank of other nodes")
        if gpu:
            why = "of one block, until they are copied to the exchange buffers"
            yield device("gradients in flight", here * (outbox // spec.OUTBOXES), why)
        if gpu and DEVICE in homes.weights:
            why = "NCCL's buffers for broadcasting updated weights to the other ranks' devices; assumed"
            yield device("broadcasts", here * weight_streaming.NCCL_BYTES, why)
    outside = [one.page for one in homes.cut.groups if on_drive(one.page.home) or one.page.home == DEVICE]
    stored = max(map(work.state.page_bytes, outside), default=0)
    if stored and work.checkpoints != 0:
        why = f"{spec.SAVE_BUFFERS} pages being written to a checkpoint"
        yield ram("save buffers", here * spec.SAVE_BUFFERS * stored, why)
    # Only a session's modules share one parameter.
    model = [*activation_items(work, machine, gradients=True, sums_tied=work.checkpoints is None)]
    yield from model
    if work.keeps_heap:
        why = "freed memory that malloc keeps for reuse, since RAM has room for it; measured, not computed"
        yield ram("heap", heap_holes(work, model), why)


def _page_items(work: Workload, homes: TierMap, sizes: spec.TierSizes, machine: MachineProfile) -> Iterator[Item]:
    state, e, g = work.state, work.item_bytes, work.gradient_bytes
    less = " (4 B less for Muon's matrices)" if state.rule.matrices else ""
    why = f"{state.masters.name} master, {state.moments.name} moments: {state.bytes_each:.3g} B a parameter{less}"
    for home, tier in tier_names(machine).items():
        held = sum(one.count * state.page_bytes(one.page) for one in homes.cut.groups if one.page.home == home)
        if home in sizes.shares:
            yield Item(tier, f"state {WHERE[home]}", held, f"{sizes.shares[home]:.0%} of the optimizer state; {why}")
            continue
        yield Item(tier, "state", held, why)
        if sizes.places > 1:
            yield Item(tier, "state, second copy", held, "of the previous step (tiered.state_copies=2)")
    if kept := shadow_bytes(homes, state):
        why = f"old bytes of {len(homes.shadows)} pages, whose update may be undone (tiered.overlap=backward)"
        yield Item(RAM_NAME, "shadow memory", kept, why)
    here = [one for one in homes.cut.groups if one.page.home != spec.ELSEWHERE]
    routes = [(spec.route_of(one.number, one.page, homes, is_gpu=machine.gpu is not None), one) for one in here]
    if any(route.through_host for route, _ in routes):
        count = size = 0
        for rank in range(work.here):
            mine = [(route, one) for route, one in routes if one.rank == rank]
            moved = sum(one.count for route, one in mine if route.through_host)
            slot = spec.slot_bytes([route for route, _ in mine], on_device=False, format=state, gradient=g, weight=e)
            buffers = min(sizes.page_buffers, moved)
            count, size = count + buffers, size + buffers * sum(slot.values())
        yield Item(RAM_NAME, "page buffers", size, f"{count}, each for one page in transfer")
    slot = spec.slot_bytes([route for route, _ in routes], on_device=True, format=state, gradient=g, weight=e)
    if each := sum(slot.values()):
        yield Item(machine.device, "update buffers", each, "one page of gradients or updated weights in transfer")


def shadow_bytes(homes: TierMap, format: StateFormat) -> int:
    """Return the bytes of shadow memory for pages in RAM."""
    return sum(format.page_bytes(homes.pages[number]) for number in homes.shadows)


def _weight_items(work: Workload, homes: TierMap, sizes: spec.TierSizes, machine: MachineProfile) -> Iterator[Item]:
    ram, device, here, gpu = partial(Item, RAM_NAME), partial(Item, machine.device), work.here, machine.gpu is not None
    e, units, placed = work.item_bytes, homes.units, [*zip(homes.units, homes.weights, strict=True)]
    used, stored_at = Counter[int](), Counter[int]()
    for unit, home in placed:
        used[home] += e * unit.elements
        stored_at[home] += unit.stored_bytes(e)
    each = {home: f"{e * size / used[home]:.3g} B a parameter" for home, size in stored_at.items() if size}
    name, why = ("weights", each[DEVICE]) if {*homes.weights} == {DEVICE} else ("small weights", "always on the device")
    yield device(name, here * stored_at[DEVICE], why)
    names = tier_names(machine)
    yield from (Item(names[at], "weights", size, each[at]) for at, size in stored_at.items() if at != DEVICE)
    if not (streamed := [unit for unit, home in placed if not unit.in_place(home)]):
        return
    blocks, others = (
        weight_streaming.slot_sizes(streamed, blocks=sizes.unit_buffers, of_blocks=kind) for kind in (True, False)
    )
    counts = ((len(blocks), "block"), (len(others), "other module"))
    words = " and ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    yield device("weights in use", here * e * (sum(blocks) + sum(others)), words)
    if any(unit.quantised for unit in units):
        packed = [
            weight_streaming.packed_bytes(units, homes.weights, of_blocks=kind, item_bytes=e) for kind in (True, False)
        ]
        size = len(blocks) * packed[0] + len(others) * packed[1]
        yield device("quantised weights in use", here * size, "as they are fetched")
        frozen = [weight for unit in units if unit.quantised for weight in unit.stored_weights(e)]
        pieces = [(one.format.block, one.elements if gpu else min(PIECE, one.elements)) for one in frozen if one.format]
        # Scales are in fp32, and a CPU also has a piece's values.
        scratch = max(4 * piece // block + (0 if gpu else e * piece) for block, piece in pieces)
        yield device("dequantisation", here * scratch, "temporary memory, for one weight at a time")
    if sizes.by_parts and gpu:
        yield device("all-gather", here * weight_streaming.NCCL_BYTES, "NCCL's buffers for gathering weights; assumed")
    stored = max((unit.stored_bytes(e) for unit, home in placed if on_drive(home)), default=0)
    if work.nodes > 1 and stored:
        through = here * e * largest_range(streamed, ranks=work.world)
        yield ram("weights between nodes", through, "one shard of each rank, between drives of different nodes")
    if gpu and stored:
        staging = 2 * max(unit.stored_bytes(e) for unit in units)
        yield ram("weight staging", here * staging, "2 buffers for the largest block, between drive and GPU")
    if work.world > work.pipeline and stored:
        count = work.pipeline * spec.SHARED_READS
        yield ram("weights read", count * stored, f"{count} buffers for the largest block, read once for all ranks")


def _gradient_items(work: Workload, homes: TierMap, machine: MachineProfile) -> Iterator[Item]:
    g, placed, held = work.gradient_bytes, [*zip(homes.units, homes.gradients, strict=True)], Counter[int]()
    for unit, home in placed:  # files have all elements; untouched memory takes no physical pages
        held[home] += g * (_trained_here(unit, work) if home == RAM else unit.trained)
    for home, size in held.items():
        why = f"{g} B for each of {format_count(size // g)} trainable parameters, until the update"
        yield Item(tier_names(machine)[home], "gradients", size, why)
    on_drives = [unit for unit, home in placed if on_drive(home)]
    if on_drives:  # up to `GRADIENT_BUFFERS` buffers for blocks, and one for all other modules
        blocks, others = ([unit.trained for unit in on_drives if unit.block == kind] for kind in (True, False))
        many, one = min(spec.GRADIENT_BUFFERS, len(blocks)), min(1, len(others))
        staging = many * max(blocks, default=0) + one * max(others, default=0)
        why = f"{many} blocks and {one} other module in transfer"
        yield Item(RAM_NAME, "gradient buffers", work.pipeline * g * staging, why)


def _trained_here(unit: Unit, work: Workload) -> int:
    """Return the elements of a unit that the first node's ranks update."""
    return range_of_rank(unit, work.here - 1, ranks=work.world)[1]


def _leaving(homes: TierMap, sizes: spec.TierSizes) -> list[Unit]:
    """Return the units whose gradients leave the device one by one, as they are not added there."""
    placed = zip(homes.units, homes.gradients, strict=True)
    return [unit for unit, home in placed if home != DEVICE and not sizes.adds_on_device(unit, home)]


def _sums_on_device(work: Workload, homes: TierMap, sizes: spec.TierSizes) -> tuple[int, ...]:
    """Return the most bytes of sums that each rank of a pipeline has on the device while a backward adds them there."""
    found = []
    for rank in range(work.pipeline):
        of_block = Counter[int]()
        for unit, block in weight_streaming.block_numbers(homes.units, work.shape).items() if sizes.device_sums else ():
            if work.owners[block] == rank and sizes.adds_on_device(homes.units[unit], homes.gradients[unit]):
                of_block[block] += work.gradient_bytes * homes.units[unit].trained
        found.append(max(map(sum, pairwise([0, *of_block.values()])), default=0))
    return tuple(found)


_Moved = Counter[tuple[int, str, str]]  # bytes by home, phase and way: "read" or "written", as in a `Traffic`


def _traffic(moved: _Moved, machine: MachineProfile) -> list[Traffic]:
    names = {**dict(enumerate(drive.directory for drive in machine.drives)), DEVICE: DEVICE_COPIES}
    kinds = dict.fromkeys((home, phase) for home, phase, _ in moved if home in names)
    return [Traffic(names[h], phase, moved[h, phase, "read"], moved[h, phase, "written"]) for h, phase in kinds]


def tiered_traffic(work: Workload, homes: TierMap, sizes: spec.TierSizes, machine: MachineProfile) -> list[Traffic]:
    """Return the bytes that one node moves in a step; to and from the device those of one rank, or of a mean one."""
    units, moved = homes.units, _moved_by_update(work, homes, homes.cut.groups)
    e, g, micro = work.item_bytes, work.gradient_bytes, work.accumulate
    every = sum((fetched(work, homes, sizes, rank=rank) for rank in range(work.pipeline)), Counter())
    for (unit, phase), times in every.items():
        size, by_parts = units[unit].stored_bytes(e), sizes.by_parts and homes.weights[unit] == RAM
        if homes.weights[unit] == DEVICE:
            continue  # quantised weights are dequantised on the device
        into, _ = weight_streaming.transfer_bytes(size, item_bytes=e, ranks=work.here if by_parts else 1)
        moved[homes.weights[unit], phase, "read"] += times * size
        moved[DEVICE, phase, "read"] += times * into // work.pipeline
    collected = {unit.index for unit in units if on_drive(homes.gradients[unit.index])}
    gradients = weight_streaming.as_gradients_come(units, work.shape)
    if work.breadth_first:
        _, gradients = weight_streaming.breadth_first([], gradients, units, times=micro)
    once = {unit.index for unit in units if sizes.adds_on_device(unit, homes.gradients[unit.index])}
    last = {unit: place for place, unit in enumerate(gradients)}
    gradients = [unit for place, unit in enumerate(gradients) if unit not in once or place == last[unit]]
    for unit, visits in _visits(units, collected, gradients, times=work.passes).items():
        size = g * _trained_here(units[unit], work)
        moved[homes.gradients[unit], "backward", "read"] += (visits - 1) * size
        moved[homes.gradients[unit], "backward", "written"] += visits * size
    outside = [units[unit] for unit in set(gradients) if homes.gradients[unit] != DEVICE]
    sizes_of = [(unit.index, place.weight.numel) for unit in outside for place in unit.places if place.weight.trainable]
    given = sum(numel * (g if unit in once else e * micro) for unit, numel in sizes_of)
    moved[DEVICE, "backward", "written"] += given // work.pipeline
    # Between owners, hidden states (in the backward, their gradients) are copied out and in.
    cuts = sum(one != other for one, other in pairwise(work.owners))
    for phase in ("forward", "backward") if cuts else ():
        for way in ("read", "written"):
            moved[DEVICE, phase, way] += cuts * micro * work.hidden_bytes // work.pipeline
    if work.inputs_away:
        inputs = inputs_of(work)
        moved[DEVICE, "forward", "written"] += work.passes * inputs.count * inputs.size
        moved[DEVICE, "backward", "read"] += work.passes * inputs.count * inputs.size
    return _traffic(moved, machine)


def traffic_beside_matrices(work: Workload, homes: TierMap, machine: MachineProfile) -> list[Traffic]:
    """Return the bytes that the update moves for pages without matrices, of those that `tiered_traffic` returns."""
    beside = [one for one in homes.cut.groups if not one.page.matrices]
    return _traffic(_moved_by_update(work, homes, beside), machine)


def _moved_by_update(work: Workload, homes: TierMap, groups: Sequence[PageGroup]) -> _Moved:
    e, g, moved = work.item_bytes, work.gradient_bytes, _Moved()
    for one in groups:
        weights, gradients = homes.weights[one.page.unit], homes.gradients[one.page.unit]
        elements, inside = one.elements, one.page.home == DEVICE
        if not inside and one.page.home != spec.ELSEWHERE:
            for way in ("read", "written"):
                moved[one.page.home, "update", way] += one.count * work.state.page_bytes(one.page)
        if weights != DEVICE:
            moved[weights, "update", "written"] += e * elements
        if one.page.home == spec.ELSEWHERE:
            continue
        if gradients != DEVICE:
            moved[gradients, "update", "read"] += g * elements
        if inside != (gradients == DEVICE):  # the gradient and its page are on different sides of the bus
            moved[DEVICE, "update", "read" if inside else "written"] += g * elements
        if inside != (weights == DEVICE):
            moved[DEVICE, "update", "written" if inside else "read"] += e * elements
    return moved


def fetched(work: Workload, homes: TierMap, sizes: spec.TierSizes, *, rank: int = 0) -> Counter[tuple[int, str]]:
    """Return how often a rank of a pipeline fills a buffer with each unit in each phase of a step, by (unit, phase).

    A prefetch counts in the phase that uses it.
    """
    units = homes.units
    forward, backward = weight_streaming.orders(units, work.shape, checkpointing=work.checkpointed > 0)
    if work.breadth_first:
        forward, backward = weight_streaming.breadth_first(forward, backward, units, times=work.accumulate)
    if work.pipeline > 1:
        blocks, owners = weight_streaming.block_numbers(units, work.shape), work.owners
        forward, backward = ([unit for unit in order if owners[blocks[unit]] == rank] for order in (forward, backward))
    offloaded = [unit for unit in units if not unit.in_place(homes.weights[unit.index])]
    needed = weight_streaming.fetches(offloaded, [*forward, *backward], blocks=sizes.unit_buffers, times=work.passes)
    passes = len(forward) + len(backward)
    return Counter((unit, "forward" if place % passes < len(forward) else "backward") for unit, place in needed)


def gathered_weights(work: Workload, homes: TierMap, sizes: spec.TierSizes) -> dict[str, tuple[int, int]]:
    """Return the bytes of weights that each device receives by all-gather, from RAM and from others, by phase."""
    found: dict[str, tuple[int, int]] = {}
    for (unit, phase), times in fetched(work, homes, sizes).items() if sizes.by_parts else ():
        if homes.weights[unit] == RAM:
            size = homes.units[unit].stored_bytes(work.item_bytes)
            moved = weight_streaming.transfer_bytes(size, item_bytes=work.item_bytes, ranks=work.here)
            from_ram, from_others = found.get(phase, (0, 0))
            found[phase] = from_ram + times * moved[0], from_others + times * moved[1]
    return found


def added_bytes(work: Workload, homes: TierMap, sizes: spec.TierSizes, *, gpu: bool) -> dict[bool, int]:
    """Return the bytes of host memory that adding gradients to sums in RAM and on drives reads and writes in a step.

    Those of additions that also compute the norms of the new sums are under True, the others under False. A CPU copies
    a weight's first gradient, which moves as much as an addition; a GPU's first one needs none.
    """
    count = sum(unit.trained for unit in _leaving(homes, sizes))
    added = work.item_bytes + 2 * work.gradient_bytes
    passes = [0 if gpu else added, *[added] * (work.added - 1)]
    return {False: sum(passes[:-1]) * count, True: passes[-1] * count}


def _visits(units: Sequence[Unit], collected: set[int], order: Sequence[int], *, times: int) -> Counter[int]:
    """Return how often each unit's sums are written to a drive; consecutive visits of the same unit count as one."""
    found, last = Counter[int](), dict[bool, int]()
    for number in range(min(2, times)):  # all repetitions but the first are equal
        for unit in order:
            if unit in collected and last.get(units[unit].block) != unit:
                found[unit] += times - 1 if number else 1
                last[units[unit].block] = unit
    return found
