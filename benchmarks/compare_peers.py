"""Compare this package with other trainers on the same model, rows and precision, without a GPU: seconds, bytes,
memory, losses, resuming. On a GPU `scripts/gpu_suite.sh rivals` does.

    compare_peers.py [--model gpt2-medium] [--drive DIR] [--steps 6] [--seq-len 128] [--micro-batch 1] [--accumulate 1]
                     [--limit 1200] [--only NAME ...]

Each peer is a training loop as in that project's documentation, in a separate process. It takes all steps. Then two
more processes take half of the steps with a save, and the rest after loading it. The weights come from the same file
and the rows from the same array. All use bf16, AdamW with a constant rate, and clipping at 1. If a peer cannot run
here, its row has its own error message. The tables of docs/benchmarks/peers.md are printed. For a drive of known speed,
run this in a cgroup that limits the drive's bytes per second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.telemetry.meters import peak_rss_bytes

ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "offload-trainer")


@dataclass(frozen=True)
class Job:
    """The input of each peer."""

    model: Path  # a directory written by transformers
    rows: Any  # int64 [steps, accumulate, micro_batch, seq_len]
    drive: Path
    saves: Path
    begin: int  # first step to take
    end: int
    save: bool  # after the last step

    @property
    def accumulate(self) -> int:
        return int(self.rows.shape[1])


Steps = Iterator[float]  # yields the mean loss of each step

# -- peers -------------------------------------------------------------------------------------------------------------


def ours(job: Job, **keys: Any) -> Steps:
    """Train with this package as docs/library.md shows."""
    import offload_trainer as ot

    keys |= {"seq_len": job.rows.shape[3], "micro_batch_size": job.rows.shape[2], "dtype": "bf16"}
    keys |= {"gradient_accumulation_steps": job.accumulate, "say": lambda line: None}
    with ot.load(str(job.model), nvme=[str(job.drive)], **keys) as session:
        optimizer = session.adamw(**ADAM)
        if job.begin:
            assert session.resume(job.saves) == job.begin
        for step in range(job.begin, job.end):
            losses = []
            for number, rows in enumerate(job.rows[step], 1):
                with session.micro_batch(last=number == job.accumulate):
                    loss = session.model(input_ids=rows, labels=rows).loss
                    (loss / job.accumulate).backward()
                losses.append(loss.item())
            session.clip_grad_norm_(1.0)
            optimizer.step()
            yield sum(losses) / len(losses)
        if job.save:
            session.save(job.saves)


def zero(job: Job, *, optimizer: dict[str, Any], settings: dict[str, Any] | None = None) -> Steps:
    """Train with ZeRO-3 as in deepspeed.ai/tutorials/zero-offload and docs/config-json, weights on the CPU."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    _alone()
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": job.rows.shape[2],
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": optimizer},
    }
    for name, value in (settings or {}).items():
        config[name] = {**config[name], **value} if isinstance(config.get(name), dict) else value
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if job.begin:
        where, _ = engine.load_checkpoint(str(job.saves))
        assert where, "nothing was loaded"
    for step in range(job.begin, job.end):
        losses = []
        for rows in job.rows[step]:
            loss = engine(input_ids=rows.to(engine.device), labels=rows.to(engine.device)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)
    if job.save:
        engine.save_checkpoint(str(job.saves))


def trainer(job: Job) -> Steps:
    """Train with transformers' Trainer and the NVMe JSON of huggingface.co/docs/transformers/deepspeed."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    _alone()
    length = job.rows.shape[3]
    losses: list[float] = []

    class InOrder(Trainer):  # keeps the order of rows, which Trainer would shuffle
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *words: Any, **keys: Any) -> Any:
            found = super().compute_loss(*words, **keys)
            # The Trainer divides by all tokens of the step, including each row's first, which is not predicted.
            losses.append(
                float(found[0] if isinstance(found, tuple) else found) * job.accumulate * length / (length - 1)
            )
            return found

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    times = [time.perf_counter()]
    rows = job.rows.flatten(0, 2)
    data = [{"input_ids": row, "labels": row} for row in rows[: job.end * rows.shape[0] // job.rows.shape[0]]]
    words = {"bf16": True, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    words |= {"learning_rate": ADAM["lr"], "adam_beta2": 0.95, "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    words |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(
        str(job.saves),
        per_device_train_batch_size=job.rows.shape[2],
        gradient_accumulation_steps=job.accumulate,
        max_steps=job.end,
        save_strategy="steps" if job.save else "no",
        save_steps=job.end,
        deepspeed=_documented(job.drive),
        **words,
    )
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    InOrder(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train(
        resume_from_checkpoint=bool(job.begin) or None
    )
    taken = [sum(losses[at : at + job.accumulate]) / job.accumulate for at in range(0, len(losses), job.accumulate)]
    _CLOCK.extend(later - sooner for sooner, later in pairwise(times))
    yield from taken[-(job.end - job.begin) :]


def _documented(drive: Path) -> dict[str, Any]:
    """Return the documented example for NVMe; the Trainer fills in its `auto` values."""
    home = {"device": "nvme", "nvme_path": str(drive), "pin_memory": True}
    zero_optimization = {
        "stage": 3,
        "offload_optimizer": home | {"buffer_count": 4, "fast_init": False},
        "offload_param": home | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    }
    zero_optimization |= {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    zero_optimization |= {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    chosen = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero_optimization |= dict.fromkeys(chosen, "auto") | {"stage3_gather_16bit_weights_on_model_save": True}
    aio = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
    adam = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    sizes = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": zero_optimization, "aio": aio, "optimizer": adam}
    return config | dict.fromkeys(sizes, "auto")


def fsdp2(job: Job) -> Steps:
    """Train with fully_shard, MixedPrecisionPolicy and distributed checkpoints, as in docs.pytorch.org."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    _alone()
    dist.init_process_group("gloo", rank=0, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": mixed}
    for block in model.transformer.h:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    adam = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    if job.begin:
        held = dict(zip(("model", "optimizer"), get_state_dict(model, adam), strict=True))
        dcp.load(held, checkpoint_id=str(job.saves))
        set_state_dict(model, adam, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    for step in range(job.begin, job.end):
        losses = []
        for number, rows in enumerate(job.rows[step], 1):
            model.set_requires_gradient_sync(number == job.accumulate)
            loss = model(input_ids=rows, labels=rows).loss
            (loss / job.accumulate).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        yield sum(losses) / len(losses)
    if job.save:
        held = dict(zip(("model", "optimizer"), get_state_dict(model, adam), strict=True))
        dcp.save(held, checkpoint_id=str(job.saves))
    dist.destroy_process_group()


def _alone() -> None:
    """Set the environment of a single rank without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (given | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        os.environ.setdefault(name, value)


def _swapped(job: Job, **keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(job.drive), **keys}


# The fastest of a sweep of these keys (docs/benchmarks/step.md).
_TUNED: dict[str, Any] = {
    "zero_optimization": {"sub_group_size": 20_000_000},
    "aio": {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "overlap_events": True},
}
_BUFFERS = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
PEERS: dict[str, tuple[str, Callable[[Job], Steps]]] = {
    "ours, state on the drive": (
        "weights in RAM, all of the optimizer state on the drive",
        lambda job: ours(job, params="cpu", optimizer="nvme", ram_fraction=0.0),
    ),
    "ours, half of it": (
        "weights in RAM, half of the optimizer state on the drive",
        lambda job: ours(job, params="cpu", optimizer="nvme", ram_fraction=0.5),
    ),
    "ours, in RAM": ("weights and all of the optimizer state in RAM", lambda job: ours(job, params="cpu")),
    "DeepSpeed, NVMe, defaults": (
        "ZeRO-3, weights in RAM, optimizer on the drive; no key but the device and its path",
        lambda job: zero(job, optimizer=_swapped(job)),
    ),
    "DeepSpeed, NVMe, tuned": (
        f"the same with {json.dumps(_BUFFERS)} and {json.dumps(_TUNED)}",
        lambda job: zero(job, optimizer=_swapped(job, **_BUFFERS), settings=_TUNED),
    ),
    "DeepSpeed, RAM": (
        "ZeRO-3, weights and optimizer in RAM",
        lambda job: zero(job, optimizer={"device": "cpu"}),
    ),
    "Trainer, documented JSON": ("transformers' Trainer with its page's ZeRO-3 JSON for NVMe", trainer),
    "FSDP2": ("fully_shard, fp32 masters and AdamW in RAM", fsdp2),
}

# -- a process of each peer --------------------------------------------------------------------------------------------

_CLOCK: list[float] = []  # seconds of steps, for a peer that takes all steps before it yields a loss


def child(name: str, words: dict[str, Any]) -> None:
    """Take the steps, and print one line of JSON to the original stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    import torch

    torch.manual_seed(0)
    rows = torch.load(words["rows"], weights_only=True)
    paths = {key: Path(words[key]) for key in ("model", "drive", "saves")}
    job = Job(rows=rows, **paths, begin=words["begin"], end=words["end"], save=words["save"])
    losses, seconds, moved = [], [], []
    at, before = time.perf_counter(), _moved()
    for loss in PEERS[name][1](job):
        now, after = time.perf_counter(), _moved()
        losses.append(loss)
        seconds.append(now - at)
        moved.append([b - a for a, b in zip(before, after, strict=True)])
        at, before = time.perf_counter(), _moved()
    told = {"losses": losses, "seconds": _CLOCK[-len(losses) :] or seconds, "moved": [] if _CLOCK else moved}
    print(json.dumps(told | {"peak": peak_rss_bytes()}), file=answers, flush=True)
    answers.close()
    os._exit(0)  # some peers leave threads running


def _moved() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to drives."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


@dataclass
class Row:
    """A row of the table."""

    name: str
    about: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    moved: list[list[int]] = field(default_factory=list)
    peak: int = 0
    resumes: str = ""
    failed: str = ""


def measure(name: str, folder: Path, *, drive: Path, steps: int, limit: int) -> Row:
    """Run three processes of at most `limit` s each: all steps, half of them with a save, and the rest after loading
    it.
    """
    row = Row(name, PEERS[name][0])
    words = {"model": str(folder / "model"), "rows": str(folder / "rows.pt"), "drive": str(drive)}

    def run(begin: int, end: int, *, save: bool) -> dict[str, Any]:
        given = words | {"saves": str(drive / "saves"), "begin": begin, "end": end, "save": save}
        log = folder / "log"
        with log.open("w") as file:
            command = [sys.executable, __file__, "--child", name, json.dumps(given)]
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=limit)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"was not done after {limit} s, and was ended") from error
        if done.returncode or not done.stdout.strip():
            raise RuntimeError(_last_words(log.read_text(errors="replace"), done.returncode))
        return json.loads(done.stdout.splitlines()[-1])

    try:
        whole = run(0, steps, save=False)
        row.losses, row.seconds, row.moved, row.peak = (whole[key] for key in ("losses", "seconds", "moved", "peak"))
    except RuntimeError as error:
        row.failed = str(error)
        return row
    try:
        first, rest = run(0, steps // 2, save=True), run(steps // 2, steps, save=False)
        parted = first["losses"] + rest["losses"]
        apart = max(abs(one - other) for one, other in zip(parted, row.losses, strict=True))
        row.resumes = "bit for bit" if parted == row.losses else f"no: losses up to {apart:.2g} apart"
    except RuntimeError as error:
        row.resumes = f"no: {error}"
    return row


def _last_words(log: str, code: int) -> str:
    """Return the last line that looks like an error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("AssertionError")]
    return (errors or lines or [f"exit code {code}"])[-1][:300]


# -- the parent --------------------------------------------------------------------------------------------------------


def prepare(folder: Path, options: argparse.Namespace) -> int:
    """Write a model with random weights, and rows of the text that the package includes; return the parameter count."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    from offload_trainer.data.sources import BUILTIN_CORPUS
    from offload_trainer.data.tokenizer import BUILTIN_TOKENIZER
    from offload_trainer.model.presets import PRESETS

    torch.manual_seed(0)
    keys = {key: value for key, value in PRESETS[options.model].items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(GPT2Config(**keys), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    ids = AutoTokenizer.from_pretrained(BUILTIN_TOKENIZER)(BUILTIN_CORPUS.read_text(encoding="utf-8")).input_ids
    shape = (options.steps, options.accumulate, options.micro_batch, options.seq_len)
    torch.save(torch.tensor(ids[: int(torch.tensor(shape).prod())]).reshape(shape), folder / "rows.pt")
    return model.num_parameters()


def table(rows: Sequence[Row], *, parameters: int) -> Iterator[str]:
    """Yield a table of medians over all steps except the first, bytes per parameter and step, and peak
    resident memory.
    """
    yield "| | seconds a step | read B/param | written B/param | peak RSS | loss of step 2 | last loss | resumes |"
    yield "|" + " --- |" * 8
    for row in rows:
        if row.failed:
            yield f"| {row.name} | cannot run here: {_cell(row.failed)} | | | | | | |"
            continue
        drive = (
            [f"{median(step[way] for step in row.moved[1:]) / parameters:.2f}" for way in (0, 1)]
            if row.moved
            else ["", ""]
        )
        timed = row.seconds[1:]
        seconds = f"{median(timed):.2f} ({min(timed):.2f}-{max(timed):.2f})"
        cells = [row.name, seconds, *drive, f"{row.peak / 1e9:.2f} GB"]
        cells += [*(f"{loss:.4f}" for loss in (row.losses[1], row.losses[-1])), _cell(row.resumes)]
        yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def about(parameters: int, options: argparse.Namespace) -> str:
    """Return the model, the machine and the versions that the numbers depend on."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, text=True)
    tokens = options.accumulate * options.micro_batch * options.seq_len
    lines = [line.partition(": ") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = next((value for name, _, value in lines if name.startswith("model name")), "CPU")
    return (
        f"{options.model}, {parameters:,} parameters, random weights, {tokens} tokens a step ({options.accumulate} x "
        f"{options.micro_batch} x {options.seq_len}), bf16, gradient checkpointing, AdamW at {ADAM['lr']}, clipping "
        f"at 1, {options.steps} steps; {cpu}, {os.cpu_count()} cores; commit {commit.strip()}, "
        f"{time.strftime('%Y-%m-%d')}; {', '.join(f'{name} {version(name)}' for name in PACKAGES)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--drive", type=Path, default=Path())
    for name, default in (("steps", 6), ("seq-len", 128), ("micro-batch", 1), ("accumulate", 1), ("limit", 1200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", action="append", choices=list(PEERS))
    options = parser.parse_args()
    rows = []
    with scratch("peers-", directory=options.drive.absolute()) as folder:
        parameters = prepare(folder, options)
        for name in options.only or PEERS:
            with scratch("drive-", directory=folder) as drive:
                rows.append(measure(name, folder, drive=drive, steps=options.steps, limit=options.limit))
            print("\n".join(table(rows[-1:], parameters=parameters)).splitlines()[-1], file=sys.stderr, flush=True)
    print("\n".join([about(parameters, options), "", *table(rows, parameters=parameters), "", "| | settings |"]))
    print("\n".join(["| --- | --- |", *(f"| {row.name} | {_cell(row.about)} |" for row in rows)]))


if __name__ == "__main__":
    child(sys.argv[2], json.loads(sys.argv[3])) if sys.argv[1:2] == ["--child"] else main()
