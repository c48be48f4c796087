"""Checks before a run writes anything: its plan, its data, its run directory, and that all ranks and nodes agree.

Each check raises UserError that says what is wrong and what to do. A check of several ranks lists each difference with
its values on rank 0 and on the other rank.
"""

import json
import os
import platform
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from offload_trainer import __version__
from offload_trainer.common.errors import PeerFailed, UserError
from offload_trainer.common.safe_files import quoted
from offload_trainer.data.run_data import UNKNOWN_IDENTITY, check_data
from offload_trainer.optim.cpu_units import has_native_16bit
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.planner import room_of
from offload_trainer.ranks import all_gather_json, everybody, from_rank_zero, place_here
from offload_trainer.run.checkpoint import check_identity
from offload_trainer.run.directory import refuse_strangers
from offload_trainer.run.planning import Planned
from offload_trainer.settings import refuse_unwritable
from offload_trainer.storage.manifest import weights_alone
from offload_trainer.storage.retention import complete_checkpoints, find_resume, step_of
from offload_trainer.telemetry.sinks import refuse_missing

_MOST = 10  # lines in a message
_PATIENCE, _AGAIN = 10.0, 0.2  # seconds until a shared filesystem shows what another machine has written


def refuse(planned: Planned) -> None:
    """Raise UserError for a plan that does not fit, or that cannot write or resume from the requested checkpoints."""
    config, plan = planned.config, planned.plan
    plan.refuse(force=config.placement.force)
    if not (reason := plan.cannot_save):
        return
    resumes = find_resume(config.save.resume, output=planned.output)
    if resumes and not weights_alone(resumes):
        raise UserError(f"{plan.homes} cannot go on from {resumes}: {reason}. Use --optimizer cpu or another --output")
    if config.save.every != 0:
        fix = "Add --save-every 0, which saves the weights at the end, or use --engine tiered"
        raise UserError(f"{plan.homes}: no exact checkpoints are possible: {reason}. {fix}")


def check_start(planned: Planned, *, say: Callable[[str], None]) -> None:
    """Raise UserError for paths that no record can hold, missing trackers, and data that is missing or not text."""
    refuse_unwritable([os.path.realpath(str(path)) for path in (planned.output, *planned.config.placement.nvme)])
    refuse_missing(planned.config.save.trackers)
    check_data(planned.config.data, planned.source, say=say)


def refuse_output(planned: Planned) -> Path | None:
    """Return the checkpoint to resume from, or None. UserError for files that the run cannot replace."""
    config = planned.config
    refuse_strangers(planned.output)
    resumes = find_resume(config.save.resume, output=planned.output)
    here = complete_checkpoints(planned.output / "checkpoints")
    way = "" if here and weights_alone(here[-1]) else "leave --resume out to go on from them, "
    if newer := [path.name for path in here if resumes and step_of(path) > step_of(resumes)]:
        raise UserError(
            f"--resume {config.save.resume}: {config.save.output} holds newer checkpoints ({', '.join(newer)}): {way}"
            "move them away, or name another --output"
        )
    if config.save.resume == "never" and here:
        held = f"{config.save.output} holds checkpoints of an earlier run"
        raise UserError(f"--resume never, but {held}: {way}move them away, or name another --output")
    if resumes:
        check_identity(resumes, planned.identity | UNKNOWN_IDENTITY, planned.layout)
    return resumes


def refuse_another(planned: Planned, checkpoint: Path | None) -> None:
    """Raise UserError if another run has left more than `checkpoint` in a directory that was new."""
    if refuse_output(planned) != checkpoint:
        raise UserError(f"another run has ended in {planned.output} in the meantime: repeat the command")


def refuse_other_programs(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError if ranks differ in versions, configuration or hardware that changes the last bits. Collective."""
    facts: dict[str, Any] = {
        "offload_trainer": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "CPU instruction set (torch)": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
        facts["CUDA"] = torch.version.cuda
    else:
        for dtype in (torch.bfloat16, torch.float16):
            facts[f"products of {str(dtype).removeprefix('torch.')} in hardware"] = has_native_16bit(dtype)
    facts |= {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    _refuse_different(facts, fix="Install the same software on every node, and start every rank with the same command")


def refuse_other_data(identity: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise UserError if ranks have different training data, or weights of different names or shapes. Collective."""
    facts = {**identity, "the model's weights": zlib.crc32(json.dumps(layout, sort_keys=True).encode())}
    _refuse_different(facts, fix="Every node must see the same data and the same model")


def _refuse_different(mine: Mapping[str, Any], *, fix: str) -> None:
    first, *others = all_gather_json(dict(mine))
    lines = [
        f"  {quoted(key)}: rank {rank} has {quoted(its.get(key))}, rank 0 {quoted(first.get(key))}"
        for rank, its in enumerate(others, 1)
        for key in {**first, **its}
        if first.get(key) != its.get(key)
    ]
    if lines:
        more = [f"  and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
        words = "\n".join(["the ranks of this run differ:", *lines[:_MOST], *more, fix])
        raise UserError(words) if place_here()[0] == 0 else PeerFailed(words, code=UserError.exit_code)


def refuse_node(planned: Planned, machine: MachineProfile) -> None:
    """Raise UserError if this node, `machine`, differs in kind from rank 0's, or lacks memory or space for its plan."""
    here, plan, config = f"node {socket.gethostname()}", planned.plan, planned.config
    if machine.device != planned.machine.device:
        kinds = {"gpu": "computes on a GPU", "ram": "has no GPU"}
        differ = f"{here} {kinds[machine.device]}, and the node of rank 0 {kinds[planned.machine.device]}"
        raise UserError(f"{differ}: all nodes of a run must use the same kind of device")
    drives = [[drive.directory for drive in one.drives] for one in (planned.machine, machine)]
    if len(drives[0]) != len(drives[1]):
        raise UserError(f"{here} has {len(drives[1])} --nvme, the node of rank 0 {len(drives[0])}: give as many")
    names = dict(zip(*drives, strict=True))
    items = tuple(replace(item, tier=names.get(item.tier, item.tier)) for item in plan.items)
    try:
        tiers, shared = room_of(items, plan.work, machine)
        replace(plan, items=items, tiers=tiers, shared=shared).refuse(force=config.placement.force)
    except UserError as error:
        raise UserError(f"{here}: {error}") from error


def refuse_unseen(output: Path, *, first: int) -> None:
    """Raise UserError if a node, whose first rank is `first`, does not see the run directory. Collective."""
    token = output / from_rank_zero(lambda: f".seen-{secrets.token_hex(4)}")
    everybody().first(partial(token.write_text, ""))
    try:
        everybody().some(partial(_read_token, token), mine=place_here()[0] == first)
    finally:
        if place_here()[0] == 0:
            token.unlink(missing_ok=True)


def _read_token(token: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not token.exists():
        if time.monotonic() > until:
            unseen = f"node {socket.gethostname()} does not see in {token.parent} what rank 0 has written"
            raise UserError(f"{unseen}: --output must be on a filesystem that all nodes share")
        time.sleep(_AGAIN)
