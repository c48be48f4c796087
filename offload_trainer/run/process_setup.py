"""Start the ranks of a node, and prepare each process before torch is imported: threads, NUMA, network, messages.

The first rank that fails prints its error; ranks that end only because another is gone print nothing (`errors.LOST`).
The launcher's exit code is that of the rank that failed first, or 128 + the number of the signal that ended the run.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from offload_trainer.common.errors import LOST, STORE, UserError
from offload_trainer.common.packages import is_installed, lacks
from offload_trainer.common.stdio import write_now
from offload_trainer.config import STREAM, TrainConfig
from offload_trainer.model.presets import local_directory
from offload_trainer.run.signals import STOPPING
from offload_trainer.settings import load_config

LAUNCHER = "OFFLOAD_TRAINER_LAUNCHER"  # environment variable: the launcher's pid, which may exit before a rank looks
COMMAND = [sys.executable, "-m", "offload_trainer", "train"]  # the command that a rank runs

_STOPPED = {code for number in STOPPING for code in (-number, 128 + number)}  # exit codes of ranks told to stop
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL to ranks after another one, or their launcher, has ended
_LOOK = 1.0  # seconds between checks: of the ranks when no signal arrives, and of the launcher
ECHO = 5.0  # seconds within which a rank gets a signal twice: sent to it too, and passed on by its launcher
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


def prepare_process(config: TrainConfig) -> None:
    """Set the environment for this rank, such as its number of CPU threads. Call it before torch is imported.

    A command that plans or benchmarks for several ranks gets the threads of all of them. The OMP_NUM_THREADS=1 of
    torchrun is overridden. DeepSpeed's kernels load an OpenMP runtime that torch.set_num_threads does not affect.
    """
    end_without_launcher(lambda line: write_now(f"offload-train: {line}"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    _stay_near(int(os.environ.get("LOCAL_RANK", "0")), ranks=local_world)
    alone = "RANK" not in os.environ
    ranks = config.placement.gpus if alone else local_world
    each = max(1, cores // ranks) if config.placement.threads == "auto" else config.placement.threads
    os.environ["OMP_NUM_THREADS"] = str(each * ranks if alone else each)
    if config.placement.nvme:  # Threads that wait for others of a product would spin on cores that the update needs.
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


def quieten() -> None:
    """Silence library messages that a user cannot act on, and say on a terminal that torch is being loaded."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch and transformers", file=sys.stderr, flush=True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed")


def start_ranks(words: Sequence[str], *, count: int, engine: str) -> None:
    """Start `count` ranks of the same command and exit with their exit code; return if this process trains itself."""
    if count == 1 or "RANK" in os.environ:
        return
    if engine == "deepspeed" and not is_installed("deepspeed"):
        raise UserError(lacks("--engine deepspeed", "deepspeed"))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(run_ranks(words, count=count))


def run_ranks(words: Sequence[str], *, count: int) -> int:
    """Run `count` ranks of `offload-train train WORDS` to their end; return the exit code.

    They have separate sessions, so that a terminal's signals reach the launcher only, and its signal mask before.
    """
    own, file = os.getpid(), os.memfd_create("offload-trainer")  # without a name; other users cannot open it
    all_alike = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHER: own, STORE: f"/proc/{own}/fd/{file}"}
    waited = {number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN}  # SIGHUP under nohup
    waited |= {signal.SIGCHLD, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    living: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(count):
        place = {name: str(value) for name, value in {**all_alike, "RANK": rank, "LOCAL_RANK": rank}.items()}
        living[rank] = subprocess.Popen(
            [*COMMAND, *words],
            env={**os.environ, **place},
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
    return _report_failure(*wait_for(living, waited), words)


def wait_for(living: dict[int, subprocess.Popen[bytes]], waited: set[signal.Signals]) -> tuple[dict[int, int], int]:
    """Wait for all ranks, which the first failure ends, and pass on the `waited` signals, which are blocked.

    Return (rank: code or -signal) of each failure in order, and the first signal that asked the run to stop, or 0.
    """
    failed: dict[int, int] = {}
    stopped = 0
    until, ask = math.inf, math.inf  # when the ranks that are left get SIGKILL and SIGTERM

    def send(number: int) -> None:
        for process in living.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    while living:
        arrived = signal.sigtimedwait(waited, _LOOK)
        number = arrived.si_signo if arrived else 0
        # Python leaves the number uninitialised if the launcher is stopped beyond the timeout.
        if number in waited - {signal.SIGCHLD}:
            send(number)
            if number in STOPPING:
                stopped = stopped or number
        for rank, process in list(living.items()):
            if (code := process.poll()) is not None:
                del living[rank]
            if code:
                failed[rank] = code
        # Ranks that were told to stop may be saving, unless one of them has ended for another reason.
        now = time.monotonic()
        if until == math.inf and any(not (stopped and code in _STOPPED) for code in failed.values()):
            until = now + _GRACE
            ask = math.inf if stopped else now + _LOOK  # most see closed connections, and end without a word
        if now > ask:
            ask = math.inf
            send(signal.SIGTERM)
            send(signal.SIGCONT)  # one that is stopped would not end before SIGKILL
        if now > until:
            send(signal.SIGKILL)
    return failed, stopped


def first_failure(failed: dict[int, int]) -> tuple[int, int]:
    """Return (rank, exit code) of the rank whose failure has ended the others by SIGTERM or with `LOST`."""
    own = [rank for rank, code in failed.items() if code not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)]
    rank = next(iter(own or failed))
    return rank, failed[rank]


def _report_failure(failed: dict[int, int], stopped: int, words: Sequence[str]) -> int:
    """Print why the run ended, unless a rank has, and where the command `words` resumes; return the exit code."""
    rank, code = first_failure(failed) if failed else (0, 0)
    unsaved = [code for code in failed.values() if 0 < code < 128 and code != LOST]
    if stopped and unsaved:  # the rank has printed why
        return unsaved[0]
    if stopped:
        why, code = f"stopped by {signal.Signals(stopped).name}", 128 + stopped
    elif code < 0:
        why, code = f"rank {rank} was killed by {signal.Signals(-code).name}, and the run ended with it", 128 - code
    elif code == LOST:
        why, code = "the ranks lost each other", 1
    elif code - 128 in {*signal.Signals}:
        why = f"rank {rank} was terminated by {signal.Signals(code - 128).name}, and the run ended with it"
    else:
        return code
    from offload_trainer.run.resume import resume_hint  # late: it imports torch

    print(f"offload-train: {why}; {resume_hint(words)}", file=sys.stderr)
    return code


def has_launcher() -> bool:
    """Return True in a rank that was started by this program's launcher or by torchrun."""
    return bool({LAUNCHER, "TORCHELASTIC_RUN_ID"} & set(os.environ)) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_without_launcher(say: Callable[[str], None]) -> None:
    """Start a thread that ends this rank, and says so, if it has a launcher that is gone (a shell may exit)."""
    if has_launcher():
        launcher = int(os.environ.get(LAUNCHER, os.getppid()))
        threading.Thread(target=_end_after, args=(launcher, say), name="watch", daemon=True).start()


def _end_after(launcher: int, say: Callable[[str], None]) -> None:
    """Wait until the launcher is gone; then send SIGTERM to this process, and SIGKILL if that does not end it."""
    while os.getppid() == launcher:
        time.sleep(_LOOK)
    if int(os.environ["LOCAL_RANK"]) == 0:
        say(f"the launcher of the ranks (process {launcher}) has ended, and the run ends. The same command resumes")
    else:
        time.sleep(_LOOK)  # let the first rank print the reason before this rank's end stops it
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
