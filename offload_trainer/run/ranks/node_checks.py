"""Checks of each node in a multi-node run: the same kind of device, enough memory, and the shared run directory."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.planner import on_another, workload
from offload_trainer.ranks import broadcast_json, on_rank_zero, on_some, place_here
from offload_trainer.run.planning import Planned

_PATIENCE, _AGAIN = 10.0, 0.2  # seconds until a shared filesystem shows what another machine has written


def refuse_node(planned: Planned, machine: MachineProfile) -> None:
    """Raise UserError if this node differs in kind from rank 0's node or lacks memory or disk space for its plan.

    `machine`: the profile of this node.
    """
    here, plan, config = f"node {socket.gethostname()}", planned.plan, planned.config
    if machine.device != planned.machine.device:
        kinds = {"gpu": "computes on a GPU", "ram": "has no GPU"}
        raise UserError(
            f"{here} {kinds[machine.device]}, and the node of rank 0 {kinds[planned.machine.device]}: all nodes "
            "of a run must use the same kind of device"
        )
    drives = [[drive.directory for drive in one.drives] for one in (planned.machine, machine)]
    if len(drives[0]) != len(drives[1]):
        raise UserError(
            f"{here} was given {len(drives[1])} --nvme, the node of rank 0 {len(drives[0])}: the numbers must match"
        )
    names = dict(zip(*drives, strict=True))
    items = [replace(item, tier=names.get(item.tier, item.tier)) for item in plan.items]
    work = workload(config, planned.source.shape, world=plan.world, nodes=plan.nodes)
    try:
        on_another(plan, items, work, machine).refuse(force=config.placement.force)
    except UserError as error:
        raise UserError(f"{here}: {error}") from error


def refuse_unseen(output: Path, *, first: int) -> None:
    """Raise UserError if a node does not see the run directory, in which all nodes write checkpoints.

    Collective. `first`: the first rank of this node, which checks for a file that rank 0 has written.
    """
    token = output / broadcast_json(f".seen-{secrets.token_hex(4)}")
    on_rank_zero(partial(token.write_text, ""))
    try:
        on_some(partial(_look, token), mine=place_here()[0] == first)
    finally:
        if place_here()[0] == 0:
            token.unlink(missing_ok=True)


def _look(token: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not token.exists():
        if time.monotonic() > until:
            raise UserError(
                f"{token.parent}: node {socket.gethostname()} does not see there what rank 0 has written: the run "
                "directory must be on a filesystem that all nodes share (--output); --nvme is separate for each node"
            )
        time.sleep(_AGAIN)
