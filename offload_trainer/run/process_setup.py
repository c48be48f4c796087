"""Prepare the process before torch is imported: ranks, CPU threads, NUMA binding, network access, library messages."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from offload_trainer.config import STREAM, TrainConfig
from offload_trainer.model.presets import local_directory
from offload_trainer.run.launcher import end_with_launcher
from offload_trainer.settings import load_config

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # read when CUDA is first used


def ranks_of_environment() -> tuple[int, int]:
    """Return (rank, world size) from the launcher's environment variables; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def prepared(words: list[str], *, check: Callable[[TrainConfig], None] = lambda _: None) -> TrainConfig:
    """Return the configuration, which `check` accepts, and prepare the process for a command that loads torch."""
    config = load_config(words)
    check(config)
    prepare_process(config)
    quieten()
    return config


def refuse_missing(config: TrainConfig, *, data: bool = True) -> None:
    """Raise UserError if a model, a drive or, with `data`, a file of data is missing. Takes none of torch's seconds."""
    from offload_trainer.data import sources
    from offload_trainer.machine.probe import find_drive

    local_directory(config.model.name)
    for directory in config.placement.nvme:
        find_drive(directory)
    for paths in (config.data.path, config.data.validation_path) if data else ():
        sources.refuse_missing_files(paths)


def prepare_process(config: TrainConfig) -> int:
    """Set the environment for this rank and return its number of CPU threads. Call it before torch is imported.

    A command that plans or benchmarks for several ranks gets the threads of all of them. The OMP_NUM_THREADS=1 of
    torchrun is overridden. DeepSpeed's kernels load an OpenMP runtime that torch.set_num_threads does not affect.
    """
    end_with_launcher()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    _stay_near(int(os.environ.get("LOCAL_RANK", "0")), ranks=local_world)
    alone = "RANK" not in os.environ
    ranks = config.placement.gpus if alone else local_world
    each = max(1, cores // ranks) if config.placement.threads == "auto" else config.placement.threads
    threads = each * ranks if alone else each
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Threads that wait for others of a product would otherwise spin on the cores that the update needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The default is 8 hardware queues; copies in each direction, the update and NCCL use separate streams.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        # Expandable segments avoid fragmentation. torch before 2.9 reads the second name.
        os.environ |= dict.fromkeys(_ALLOCATOR[:2], "expandable_segments:True")
    paths = (*config.data.path, *config.data.validation_path)
    named = [path.partition(":")[2] for path in paths if path.startswith(("hub:", STREAM))]
    names = (config.model.name, config.data.tokenizer, *named)
    if not any("/" in name and not os.path.exists(os.path.expanduser(name)) for name in names):
        os.environ["HF_HUB_OFFLINE"] = "1"  # no network at all unless a hub id asks for it
    if alone:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return threads


def _stay_near(rank: int, *, ranks: int) -> None:
    """Bind a rank to all NUMA nodes, ordered as GPUs usually are, that its share of the CPUs touches."""
    nodes = numa_nodes()
    if ranks > 1 and len(nodes) > 1:
        cpus = [node for node in nodes for _ in node]
        first, end = rank * len(cpus) // ranks, (rank + 1) * len(cpus) // ranks
        os.sched_setaffinity(0, frozenset().union(*cpus[first : max(end, first + 1)]))


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """Return the CPUs that this thread may run on, one set per NUMA node; nodes without any are left out."""
    allowed = os.sched_getaffinity(0)
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return [node for path in lists if (node := frozenset(_cpus(path.read_text()) & allowed))]


def _cpus(words: str) -> set[int]:
    """Return the CPU numbers in a list such as "0-3,8"."""
    ends = [[int(end) for end in part.split("-")] for part in words.strip().split(",") if part]
    return {cpu for pair in ends for cpu in range(pair[0], pair[-1] + 1)}


def go_offline() -> None:
    """Forbid requests to the Hugging Face hub: all files that the command needs are local."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    quieten()


def quieten(*, loads: bool = True) -> None:
    """Silence library messages that a user cannot act on. `loads`: say on a terminal that torch is being loaded."""
    if loads and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch and transformers", file=sys.stderr, flush=True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed")
