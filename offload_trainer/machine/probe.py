"""Detection of this machine's GPU, RAM, CPU and drives, and of the free space on each.

It only reads, except for one empty temporary file per directory, the only way to find out whether O_DIRECT works.
"""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from offload_trainer.common.errors import UserError
from offload_trainer.common.packages import OPTIONAL, is_installed
from offload_trainer.config import PlacementSection
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.memory import CUDA_CONTEXT
from offload_trainer.storage.scratch_dir import root_of

_CGROUPS = Path("/sys/fs/cgroup")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs", "beegfs")


class UnusableGpu(UserError):
    """Raised when torch reports a GPU but cannot use it."""


def probe_machine(place: PlacementSection, *, output: str = ".") -> MachineProfile:
    """Return the machine's profile: free bytes of the GPU, RAM (within the cgroup's limit), each drive and `output`.

    The drives are those of `place`. `output` need not exist. Raises UserError for a drive's directory that is missing
    or not writable, and UnusableGpu for a GPU that does not work.
    """
    cpu = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MachineProfile(
        **_gpu(),
        ram_bytes=available_ram_bytes(),
        cores=len(os.sched_getaffinity(0)),
        drives=tuple(find_drive(directory) for directory in place.nvme),
        output=_output(output),
        cpu=next((value.strip() for key, _, value in cpu if key.strip() == "model name"), "unknown"),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        packages=tuple(name for name in OPTIONAL if is_installed(name)),
    )


def _gpu() -> dict[str, Any]:
    """Return the GPU's facts as torch reports them, since a run can use only what torch can."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "gpu_bytes": 0}
    try:
        free, total = torch.cuda.mem_get_info()  # creates this process's CUDA context and does not count it as free
        # Plans count the context as needed memory, so it must be included in the free bytes.
        facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gpu_bytes": min(total, free + CUDA_CONTEXT)}
        if torch.version.cuda is not None:  # ROCm's torch reports numbers with another meaning
            facts["capability"] = torch.cuda.get_device_capability()
            facts["built_for"] = tuple(torch.cuda.get_arch_list())
    except Exception as error:  # torch, CUDA and the driver raise many kinds of errors
        raise UnusableGpu(
            f"torch finds a GPU but cannot use it: {' '.join(str(error).split())[:500]}; `nvidia-smi` shows what else "
            "uses it and whether its driver answers. With an empty CUDA_VISIBLE_DEVICES= training runs on the CPU"
        ) from error
    from offload_trainer.optim.cuda_adam import choose_cuda_kernel  # imports torch

    kernel, why = choose_cuda_kernel(torch.device("cuda"))
    return facts | {"no_state_on_gpu": None if kernel else why}


def available_ram_bytes() -> int:
    """Return the RAM that can be allocated: the smaller of the kernel's estimate and the cgroup's remaining limit."""
    room = [psutil.virtual_memory().available]
    for root, path in _cgroups("memory"):
        v2 = root == _CGROUPS
        limit, usage = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = root / path
        # In a container the path is the host's and does not exist inside; the root is then the container's own group.
        for folder in [group, *group.parents] if group.exists() else [root]:
            try:
                text, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
                # the page cache that counts against the limit but can be reclaimed
                counts = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                caches = (int(size) for key, size in counts if key in ("total_inactive_file", "inactive_file"))
                cache = next(caches, 0)
            except (OSError, ValueError):
                continue
            if text != "max":
                room.append(max(0, int(text) - used + cache))
    return min(room)


def _cgroups(controller: str) -> Iterator[tuple[Path, str]]:
    """Yield this process's cgroup v2, and its v1 cgroup of the controller: the root in /sys and the path below it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield _CGROUPS, path.lstrip("/")
        elif controller in controllers.split(","):
            yield _CGROUPS / controller, path.lstrip("/")


def find_drive(directory: str) -> DriveFacts:
    """Return the facts about a directory of placement.nvme. Raises UserError if it is missing or not writable."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise UserError(f"--nvme {directory}: no such directory; create it on the drive first")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--nvme {directory}: not writable for this user")
    root = root_of(path)
    if root.exists() and not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"{root}: not writable for this user, and page files go there; chmod u+rwx it, or move it away")
    return _facts(path.resolve(), path.resolve())


def _output(directory: str) -> DriveFacts:
    path = Path(directory).expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise UserError(f"--output {directory}: the filesystem of {there} is mounted read-only; name another directory")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output {directory}: {there} is not a directory that this user may write to")
    return _facts(path, there)


def _facts(path: Path, existing: Path) -> DriveFacts:
    number = existing.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    disk = node.parent if (node / "partition").exists() else node
    block = disk if disk.exists() else None  # filesystems without one: network, tmpfs, btrfs
    mounts = [(Path(part.mountpoint), part.fstype) for part in psutil.disk_partitions(all=True)]
    here = [(len(str(point)), kind) for point, kind in mounts if existing.is_relative_to(point)]
    filesystem = max(here, default=(0, "unknown"))[1]
    try:  # can a file there be opened with O_DIRECT?
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".probe-") as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        direct = True
    except OSError:
        direct = False
    return DriveFacts(
        directory=str(path),
        free_bytes=shutil.disk_usage(existing).free,
        filesystem=filesystem,
        device=number,
        disk=block.name if block else None,
        throttle=_throttle(block),
        rotational=_attribute(block, "queue/rotational") == "1",
        network=filesystem in _NETWORK,
        direct=direct,
    )


def _attribute(block: Path | None, name: str) -> str:
    try:
        return (block / name).read_text().strip() if block else ""
    except OSError:
        return ""


def _throttle(block: Path | None) -> str:
    """Return the limits of this process's cgroups on the disk, with which rates timed without them do not hold."""
    number, found = _attribute(block, "dev"), list[str]()
    for root, path in _cgroups("blkio") if number else ():
        v1 = [f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
        for name in ["io.max"] if root == _CGROUPS else v1:
            text = _attribute(root / path, name)
            found += [f"{name} {limit}" for limit in text.splitlines() if limit.split()[:1] == [number]]
    return "; ".join(found)
