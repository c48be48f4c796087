"""Build engines in this process on small models with fixed batches, for tests that compare engines bit for bit."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from counted_once import cached_counts
from plain_engine import PlainEngine

from offload_trainer import ranks
from offload_trainer.data.rows import Batch
from offload_trainer.engine import tiered
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.engine import TieredCandidate
from offload_trainer.plan.tiered.spec import TierSizes, layouts_of
from offload_trainer.run.train import use_deterministic_algorithms
from offload_trainer.settings import load_config
from offload_trainer.storage.scratch_dir import leased
from offload_trainer.telemetry.meters import PhaseClock

VOCABULARY = 211
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)

torch.set_num_threads(1)  # Two tests run at the same time.
ON_GPU = torch.cuda.is_available()
if ON_GPU:  # A GPU needs deterministic algorithms to give the same bits twice.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    use_deterministic_algorithms()
# Every placement must have its bits. On a GPU torch's own AdamW rounds differently: everything is in RAM.
REFERENCE = ("--ram-fraction", "1") if ON_GPU else ("--engine", "plain")

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_DENSE = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 5, **_HEADS}
_EXPERTS = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_experts_per_tok": 2, **_HEADS}
# These shapes have odd weight sizes, blocks of several pages, and units outside the blocks that are large enough to be
# offloaded.
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 5, "n_embd": 72, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, **_DENSE},
    "llama": {"model_type": "llama", **_DENSE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, **_EXPERTS},
    "phimoe": {"model_type": "phimoe", "num_local_experts": 4, **_EXPERTS},
    "opt": {  # its biases are multiples of 16: torch's fused update rounds the elements behind one differently
        "model_type": "opt", "hidden_size": 80, "ffn_dim": 112, "num_hidden_layers": 5, "num_attention_heads": 4,
        "word_embed_proj_dim": 80, "max_position_embeddings": 64, "dropout": 0.0, "layerdrop": 0.3,
    },
}  # fmt: skip


def model_directory(folder: Path, name: str, *, tied: bool = True, **changes: Any) -> Path:
    """Create a directory with a small model's configuration and `changes`, but no weights: they are drawn at random."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(_SHAPES[name] | shape | changes))
    return folder


def batches(count: int, *, rows: int = 2, length: int = 24) -> list[Batch]:
    """Return the same learnable batches on every call: each token is a function of the one before it."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        columns = [torch.randint(VOCABULARY, (rows,), generator=generator)]
        for _ in range(length):
            columns.append((5 * columns[-1] + 3) % VOCABULARY)
        tokens = torch.stack(columns, 1)
        made.append(Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], seed=number))
    return made


@contextmanager
def engine(
    model: Path,
    *words: str,
    drives: Sequence[Path] = (),
    shadows: float = 0.0,  # share of the blocks' state in RAM with shadow memory
    device_sums: int | None = None,  # `TierSizes.device_sums`, which a plan chooses only for a GPU
    device: Any = None,  # replaces this machine's device
    **extra: Any,
) -> Iterator[Any]:
    """Yield the engine that all ranks' command builds for `words`, or torch alone, with its `plan` and `candidate`."""
    for drive in drives:
        drive.mkdir(exist_ok=True)
    alone, named = "plain" in words, [word for drive in drives for word in ("--nvme", str(drive))]
    words = tuple(word for word in words if not alone or word not in ("--engine", "plain"))
    always = ["--scratch"] if alone else ["--scratch", "tiered.page_size=8192", "optim.kernel=torch"]
    if ON_GPU and not alone:  # otherwise a plan moves the state there that `words` place in RAM or on a drive
        always += ["--gpu-fraction", "0"]
    config = load_config(["--model", str(model), "--lr", "1e-2", *always, *named, *words])
    use_fp32_products(torch.bfloat16)
    with cached_counts():
        source = resolve_model(config.model, seed=config.train.seed)
    if alone:
        yield PlainEngine(source, config.model, config.optim)
        return
    machine = probe_machine(config.placement, output=str(model))
    (rank, world), nodes = ranks.place_here(), ranks.nodes()
    first = next(its.start for its in nodes if rank in its)
    plan = make_plan(config, source.shape, machine, world=world, nodes=len(nodes))
    assert isinstance(plan.sizes, TierSizes)
    most = plan.sizes.device_sums if device_sums is None else device_sums
    sizes = replace(plan.sizes, shadow_fraction=shadows, device_sums=most)
    with ExitStack() as held:
        places = [held.enter_context(leased(drive)) for drive in drives if plan.uses_drives and rank == first]
        places = ranks.all_gather_json(places, list[Path])[first]
        with patch.object(tiered, "_device", lambda *_, **__: device) if device else nullcontext():
            of_plan = {"placement": plan.placement, "sizes": sizes, "drives": places}
            made = TieredEngine(source, plan.work, config.optim, **of_plan, **extra)
        held.callback(made.close)
        candidate = TieredCandidate(plan.work, machine, plan.placement, sizes, layouts_of(plan.work))
        vars(made).update(plan=plan, candidate=candidate)  # tests compare the engine's bytes with these
        yield made


Step = tuple[float, float | None]


def train(
    engine: Any,
    data: Sequence[Batch],
    *,
    accumulate: int = 1,
    lr: float = 1e-2,
    before: Callable[[int], None] = lambda step: None,
) -> list[Step]:
    """Train and return (loss, gradient norm) of each step; `before(step)` is called before each step, from 1 on."""
    done = []
    for start in range(0, len(data), accumulate):
        before(start // accumulate + 1)
        result = engine.train_step(data[start : start + accumulate], lr=lr, clock=PhaseClock())
        done.append((result.loss, result.grad_norm))
    return done


def skip_last_block(trained: Any, steps: set[int]) -> Callable[[int], None]:
    """Return a `before` hook that removes the last block in these steps, so that its weights get no gradient."""
    body = trained._module.model.transformer
    whole = body.h

    def before(step: int) -> None:
        body.h = whole[:-1] if step in steps else whole

    return before


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_master_parameters()}


def assert_near(steps: Sequence[Step], expected: Sequence[Step], *, rel: float) -> None:
    """Assert that losses differ by at most `rel`, and gradient norms by at most ten times as much."""
    for found, right in zip(steps, expected, strict=True):
        for value, wanted, limit in zip(found, right, (rel, 10 * rel), strict=True):
            assert math.isclose(value, wanted, rel_tol=limit), (steps, expected)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same names and bit-identical tensors."""
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@cache
def plain(
    model: Path, steps: int, *words: str, accumulate: int = 1, reference: tuple[str, ...] = REFERENCE, **size: int
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Return the steps and masters of the reference for batches of this size."""
    with engine(model, *reference, *words) as made:
        return train(made, batches(steps * accumulate, **size), accumulate=accumulate), masters(made)


def saved(ours: TieredEngine, place: Path) -> dict[str, bytes]:
    """Return the files of a snapshot: masters, moments, step counts and the loss scale."""
    place.mkdir()
    ours.snapshot().write(place)
    return {path.name: path.read_bytes() for path in place.iterdir()}
