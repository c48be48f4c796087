"""Time steps of one model by placement of the optimizer state and overlap of the update, and those of other libraries.

Each case has its own process, and the machine to itself: two steps are not timed, and the process ends before the next
case is built. The forward and backward of plain torch alone are the floor under every case. No timed step is clipped,
since a clipped one updates the pages again that `overlap=backward` has updated early; rows that did so are marked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import peers
from worker import Failure

from gpu_stages.stage import Record, Stage

PHASES = ("step", "forward", "backward", "update")  # keys of a step's seconds
WARM, STEPS = 2, 5  # untimed and timed steps
UNCLIPPED = "optim.max_grad_norm=1000"
FLOOR = "floor: forward and backward alone"
TRACE = "trace-{}.json.gz"


@dataclass(frozen=True)
class Case:
    """One way to train: arguments of `offload-train`, and the foreign engine (peers.py), if any."""

    name: str
    words: Sequence[str]
    peer: str | None = None
    least_gib: float = 0.0  # GPU memory without which the case is not tried
    traced: str = ""  # name of a trace of two more steps, for chrome://tracing and https://ui.perfetto.dev


@dataclass(frozen=True)
class Group:
    """Cases of one model, the most important ones first."""

    title: str
    words: Callable[[Stage], list[str]]
    cases: Sequence[Case]
    steps: int = STEPS
    cap_bytes: int | None = None  # limit of GPU memory; None: all of it
    most: float = float("inf")  # seconds within a call of several stages

    def carry_out(self, stage: Stage) -> None:
        words = [*self.words(stage), UNCLIPPED]
        stage.record.note(f"All cases: `{' '.join(words)}`")
        for case in self.cases:
            whole = [*words, *case.words]
            stage.add_row(partial(self._measure, stage, case, whole), case=case.name, words=whole)
            _relate(stage.record)

    def _measure(self, stage: Stage, case: Case, words: Sequence[str], row: dict[str, Any]) -> str:
        """Measure a case, complete its row and return the outcome."""
        if missing := _missing(stage, case):
            raise Failure(f"not run: {missing}")
        if case.peer:
            stage.record.note(f"{case.peer}: {peers.SETTINGS[case.peer]}")
        job: dict[str, Any] = {"cap_bytes": self.cap_bytes, "peer": case.peer, "fill": True, "warm": WARM}
        job |= {"product": 128, "steps": 2} if stage.rehearsal else {"product": 8192, "steps": self.steps}
        trace = stage.record.folder / TRACE.format(case.traced)
        found = stage.run(words, **job, end=time.monotonic() + stage.left(), trace=str(trace) if case.traced else "")
        row |= _row_of(found, ours=case.peer is None)
        if trace.is_file() and trace.stat().st_size > 10_000_000:
            trace.unlink()
            stage.record.note("The trace was too large to keep")
        if self.cap_bytes is not None and found["reserved"] > self.cap_bytes:
            return "failed: more than the cap"
        return outcome_of(found, steps=WARM + len(row["steps"]))


def _relate(record: Record) -> None:
    """Set each row's rate as a share of the first floor's, once that was measured."""
    rates = [row["tokens/s"] for row in record.rows if row["case"].startswith(FLOOR) and "tokens/s" in row]
    for row in record.rows if rates else ():
        if "tokens/s" in row:
            row["of the floor"] = row["tokens/s"] / rates[0]
    record.save()


def outcome_of(found: dict[str, Any], *, steps: int) -> str:
    """Return "ok", or why a row must not be quoted as the speed of the schedule in its name.

    `found` is an answer of `Stage.run` after all `steps`, with those that were not timed.
    """
    chosen, early = found["plan"]["chosen"], found["early"]
    sizes = chosen["sizes"] or {}
    if chosen["engine"] != "tiered":
        return "ok"
    # The CPU updates state in RAM and on drives. Without a compiler torch's kernel does so, several times as slowly.
    if sizes["gpu_fraction"] < 1 and "native kernel," not in found["kernel"]:
        return f"not comparable: {found['kernel']}"
    if not sizes["ahead"]:
        return "ok"
    on_drives = sizes["gpu_fraction"] + sizes["ram_fraction"] < 0.999
    if (sizes["shadow_fraction"] or on_drives) and not early["pages"]:
        return "not comparable: no page was updated before its step was decided"
    if early["steps"] < steps or early["valid"] < early["pages"]:
        return (
            f"not comparable: {early['steps']} of {steps} steps were updated early, and {early['valid']} of their "
            f"{early['pages']} pages were valid, since the others were clipped or skipped"
        )
    return "ok"


def _row_of(found: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    """Return the keys of a row from an answer of `Stage.run`; those of the plan count for our engine alone."""
    plan, steps, early = found["plan"], found["steps"], found["early"]
    taken = [step["step"] for step in steps]
    middle = {key: median(step[key] for step in steps) for key in (*PHASES, "read_bytes", "written_bytes")}
    tokens, tiers, seconds = plan["chosen"]["tokens_per_step"], plan["tiers"], plan["seconds"].values()
    planned: dict[str, Any] = {
        "where the plan puts it": placement(plan["chosen"]),
        "planned step s": None if None in seconds else sum(seconds) - plan["hidden"],
        "GPU planned GB": tiers.get("gpu", {"need": 0})["need"] / 1e9,
        "host planned GB": tiers["ram"]["need"] / 1e9,
        "CPU kernel s": early.get("seconds", 0.0) / (WARM + len(steps)),
        "pages updated early, valid": f"{early.get('valid')} of {early.get('pages')} in {early.get('steps')} steps",
    }
    return {
        "tokens/s": tokens / middle["step"],
        "of the floor": None,
        "MFU": found["flops_per_step"] / middle["step"] / found["product"],
        "step s (smallest-largest)": f"{middle['step']:.3g} ({min(taken):.3g}-{max(taken):.3g})",
        **{f"{key} s": middle[key] for key in PHASES[1:]},
        **(planned if ours else {}),
        "tokens a step": tokens,
        "allocated GB": max(step["device_peak_bytes"] for step in steps) / 1e9,
        "reserved GB": found["reserved"] / 1e9,
        "in use GB": found["in_use"] / 1e9,
        "allocation retries": steps[-1]["allocation_retries"],
        "host peak GB": max(step["host_rss_bytes"] for step in steps) / 1e9,
        "read GB a step": middle["read_bytes"] / 1e9,
        "written GB a step": middle["written_bytes"] / 1e9,
        "skipped": f"{sum(step['skipped'] for step in steps)} of {len(steps)}",
        "built in s": found["build_seconds"],
        **{key: found[key] for key in ("product", "kernel", "plan", "steps", "early")},
    }


def placement(chosen: dict[str, Any]) -> str:
    """Describe what a plan has chosen: the placement of weights and state, the overlap and the checkpointed blocks."""
    sizes, said = chosen["sizes"], [chosen["homes"]]
    if chosen["engine"] == "tiered":
        overlap = "backward" if sizes["ahead"] else "forward" if sizes["overlap"] else "off"
        said.append(f"overlap {overlap}, {sizes['shadow_fraction']:.0%} with shadows")
    return "; ".join([*said, f"{chosen['checkpointed_blocks']} blocks checkpointed"])


def _missing(stage: Stage, case: Case) -> str | None:
    """Return what a case lacks on this machine, or None."""
    library = case.peer if case.peer == "torchao" else "deepspeed" if "deepspeed" in case.words else None
    if library:
        if find_spec(library) is None:
            return f"{library} is not installed"
        return f"{library} needs a GPU, or minutes to compile kernels" if stage.rehearsal else None
    if not stage.rehearsal and stage.record.about["GiB"] < case.least_gib:
        return f"it needs more than this GPU's {stage.record.about['GiB']:.0f} GiB"
    return None


# -- models ------------------------------------------------------------------------------------------------------------

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_TINY_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_LLAMA |= {"num_key_value_heads": 2, "vocab_size": 2048}
_TINY = ["model.overrides.n_layer=2", "model.overrides.n_embd=64", *("--seq-len", "32", "--micro-batch", "2")]


def gpt2(stage: Stage) -> list[str]:
    """Return arguments for 1.6e9 parameters if plain torch can train them on this GPU, else for half as many."""
    if stage.rehearsal:
        return [*_TINY, "--dtype", "bf16"]
    model = "gpt2-xl" if stage.record.about["GiB"] > 70 else "gpt2-large"
    return ["--model", model, "--dtype", "bf16", "--seq-len", "1024", "--micro-batch", "8", "--accumulate", "1"]


def llama_8b(stage: Stage) -> list[str]:
    """Return arguments for Llama-3-8B's shape, whose configuration is written into a directory on the drive."""
    folder = stage.drive / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | (_TINY_LLAMA if stage.rehearsal else {}), indent=1))
    rows = ["--seq-len", "32", "--micro-batch", "2"] if stage.rehearsal else ["--seq-len", "4096", "--micro-batch", "4"]
    words = ["--model", str(folder), "--scratch", "data.tokenizer=builtin", "--dtype", "bf16", "--accumulate", "1"]
    return [*words, *rows]


def gpt2_10b(stage: Stage) -> list[str]:
    model = _TINY if stage.rehearsal else ["--model", "gpt2-10b", "--seq-len", "1024", "--micro-batch", "4"]
    return [*model, "--dtype", "fp16", "{drive}"]


# -- cases -------------------------------------------------------------------------------------------------------------


def ours(name: str, gpu: str, ram: str, overlap: str, *more: str, params: str = "gpu", traced: str = "") -> Case:
    """Return a case with these shares of the state on the GPU and in RAM; nothing is left to `auto`."""
    words = ["--engine", "tiered", "--params", params, "--gpu-fraction", gpu, "--ram-fraction", ram, *more]
    return Case(f"ours, {name}, overlap {overlap}", [*words, f"tiered.overlap={overlap}"], traced=traced)


_ON_GPU = ["--engine", "tiered", "--params", "gpu", "--optimizer", "gpu"]  # the plan of engines that are not ours
_PLAIN = [*_ON_GPU, "--force"]  # the plan counts optimizer state on the GPU, which a floor lacks
_LARGE = ["tiered.page_size=16777216"]
_STOCK = ["--engine", "deepspeed", "--optimizer", "cpu"]
_PLANNED = Case("ours, as planned", ["--engine", "tiered"])


def _floor(checkpointing: str, *, least_gib: float = 0.0) -> Case:
    name = f"{FLOOR}, checkpointing {checkpointing}"
    return Case(name, [*_PLAIN, f"model.activation_checkpointing={checkpointing}"], peer="native", least_gib=least_gib)


GROUPS = {
    "speed": Group(
        "1.6e9 parameters, 8 thousand tokens a step, by where the optimizer state is",
        gpt2,
        [
            _floor("off"),
            replace(_PLANNED, traced="planned"),
            ours("state in RAM", "0", "1", "backward", traced="ram"),
            Case("plain torch, fused AdamW", _ON_GPU, peer="plain"),
            ours("state in RAM, pages of 16M", "0", "1", "backward", *_LARGE),
            ours("state half GPU, half RAM", "0.5", "0.5", "backward"),
            ours("state in RAM", "0", "1", "off"),
            ours("state in RAM, pages of 16M", "0", "1", "off", *_LARGE),
            ours("state in RAM", "0", "1", "forward"),
            ours("state on the GPU, pages of 128M", "1", "0", "off", "tiered.page_size=134217728"),
            ours("state on the GPU", "1", "0", "off"),
            ours("weights and state in RAM", "0", "1", "backward", params="cpu"),
            _floor("on"),
        ],
    ),
    "8b": Group(
        "8B parameters, 16 thousand tokens a step, by where the optimizer state is",
        llama_8b,
        [
            _PLANNED,
            ours("state half GPU, half RAM", "0.5", "0.5", "backward"),
            _floor("off", least_gib=120),
            _floor("on"),
            ours("state in RAM", "0", "1", "backward"),
            ours("state in RAM", "0", "1", "off"),
        ],
        most=110.0,
    ),
    "drive": Group(
        "1.6e9 parameters, 8 thousand tokens a step, half of the state on a drive",
        gpt2,
        [
            ours("state half in RAM, half on the drive", "0", "0.5", "backward", "{drive}"),
            _floor("off"),
            ours("state half in RAM, half on the drive", "0", "0.5", "off", "{drive}"),
            ours("weights and half of the state on the drive", "0", "0.5", "backward", "{drive}", params="nvme"),
        ],
        most=60.0,
    ),
    "rivals": Group(
        "1.6e9 parameters, 8 thousand tokens a step: other libraries' offload",
        gpt2,
        [
            Case("torchao, CPU offload", _PLAIN, peer="torchao"),
            ours("state in RAM", "0", "1", "backward"),
            Case("FSDP2, CPU offload", _PLAIN, peer="fsdp2"),
            _floor("off"),
            Case("ZeRO-2, optimizer in RAM", [*_STOCK, "--params", "gpu"]),
            Case("ZeRO-3, both in RAM", [*_STOCK, "--params", "cpu"]),
        ],
    ),
    "10b": Group(
        "10B parameters in fp16 under a cap of 32 GiB of GPU memory, which imitates a smaller card's capacity only",
        gpt2_10b,
        [
            Case("ours, shares as planned, overlap backward", ["--engine", "tiered", "tiered.overlap=backward"]),
            ours("no state on the GPU, the rest as planned", "0", "auto", "backward"),
        ],
        steps=3,
        cap_bytes=32 << 30,
    ),
}
