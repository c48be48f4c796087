"""Read and write an engine's checkpoint state: masters and moments by weight name, in one format for all engines.

    DIR/master.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors    trainable weights, whole
        exp_avg_scales.safetensors  exp_avg_sq_scales.safetensors           with 8-bit moments
        fixed.safetensors                                                   frozen weights, if there are any
        engine.json                                                         `EngineState`

The files do not depend on ranks and placement, so any engine can resume from any other's. Manifest and the run's other
files are run/checkpoint.py's.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import Field, Strict

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import Number, Steps, exact_record, read_back
from offload_trainer.config import RuleName
from offload_trainer.optim.moments import StoredField
from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import (
    FORMATS,
    KINDS,
    MOMENTS,
    StateFormat,
    UpdateRule,
    is_signed,
    scales_of,
    state_format,
)
from offload_trainer.ranks import ALONE, Group
from offload_trainer.storage.atomic_io import StoredFile, write_text
from offload_trainer.storage.manifest import ENGINE
from offload_trainer.storage.tensorfile import (
    PlacedWriter,
    TensorEntry,
    TensorFileReader,
    describe_invalid_values,
    file_of,
)

_FIX = "Move that checkpoint away, and the same command resumes from the one before it"
INITIAL_SCALE = 65536.0
WINDOW = 1000
FormatName = Annotated[str, Field(pattern=f"^({'|'.join(FORMATS)})$")]


@exact_record
class LossScale:
    """The factor on the loss in fp16, and when it changes, like torch's GradScaler's.

    It halves after an overflow and doubles after `window` good steps.
    """

    value: Annotated[Number, Field(gt=0, le=2.0**127)]
    window: Annotated[int, Strict(), Field(ge=1)] | None  # None: the scale is constant
    good_steps: Steps = 0  # steps since it last changed

    @classmethod
    def initial(cls, dtype: str) -> Self:
        """Return the scale of the first step with weights of `dtype`: constant 1 unless they are in fp16."""
        return cls(INITIAL_SCALE, WINDOW) if dtype == "fp16" else cls(1.0, None)

    def resumed(self, saved: Self) -> Self:
        """Return the scale of a checkpoint; this one if the run or the checkpoint is not in fp16."""
        return saved if self.window and saved.window else self

    def after_step(self, *, finite: bool) -> Self:
        """Return the scale after a step; `finite`: all gradients were finite."""
        if self.window is None:
            return self
        if not finite:
            return replace(self, value=max(1.0, self.value / 2), good_steps=0)
        if self.good_steps + 1 >= self.window:
            return replace(self, value=self.value * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


CONSTANT = LossScale(1.0, None)


@exact_record
class EngineState:
    """The part of an engine's state that is not tensors."""

    optimizer_steps: Steps  # steps that changed the weights, which Adam's bias correction counts
    loss_scale: LossScale = CONSTANT
    states: FormatName = "fp32"  # storage format of the moments
    weight_steps: dict[str, Steps] = field(default_factory=dict)  # steps of weights that had no gradient in some steps
    rule: RuleName = "adamw"
    masters: FormatName = "fp32"  # storage format of the masters

    def __post_init__(self) -> None:
        state_format(self.rule, self.states, self.masters)  # raises ValueError for an unsupported combination

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states, self.masters)


def write_file(
    path: Path, entries: Sequence[TensorEntry], read: Callable[[str], torch.Tensor], *, writes: bool = True
) -> dict[str, StoredFile]:
    """Write a file of whole tensors; return its name, size and CRC-32 on the rank with `writes`, {} on the others.

    All ranks `read` the tensors in the same order, since that may be collective. Raises TrainerError if a value is NaN,
    infinite or impossible, or the disk fails.
    """
    writer = PlacedWriter(path, entries, whole=True) if writes else None
    for entry in entries:
        tensor = read(entry.name).detach().cpu()
        refuse_to_save(entry.name, tensor, field=path.stem)
        if writer is not None:
            writer.put(entry.name, 0, tensor)
    return {} if writer is None else {path.name: file_of(writer.close())}


def refuse_to_save(name: str, values: torch.Tensor, *, field: str) -> None:
    """Raise TrainerError if a weight's masters, moments or scales hold NaN, infinity or impossible values."""
    if wrong := describe_invalid_values(values, signed=is_signed(field)):
        raise TrainerError(
            f"{name}: of {field}, {wrong}: the training has diverged, or memory or a drive has changed them. No "
            "checkpoint was made of it, and the older ones are untouched: resume from one, maybe with a lower optim.lr"
        )


def write_engine_state(directory: Path, state: EngineState) -> None:
    write_text(directory / ENGINE, json.dumps(asdict(state), indent=1))


@dataclass(frozen=True)
class BlockingSnapshot:
    """A snapshot of an fp32 state that reads tensors as they are, so it must be written before training continues."""

    state: EngineState
    trained: Mapping[str, tuple[int, ...]]  # shapes
    fixed: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype  # dtype of the frozen weights
    read: Callable[..., torch.Tensor]  # (name, kind) -> a master, a moment or a frozen weight ("fixed")
    concurrent: bool = False

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, StoredFile]:
        written: dict[str, StoredFile] = {}
        for kind in (*KINDS, "fixed") if self.fixed else KINDS:
            shapes, dtype = (self.fixed, self.dtype) if kind == "fixed" else (self.trained, torch.float32)
            entries = [TensorEntry(name, dtype, shape) for name, shape in shapes.items()]
            path, read = directory / f"{kind}.safetensors", partial(self.read, kind=kind)
            written |= write_file(path, entries, read, writes=group.rank == 0)
        if group.rank == 0:
            write_engine_state(directory, self.state)
        return written

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class WeightsSnapshot:
    """A snapshot of all weights in fp32, without moments: an export can be made of it, and no run resumes from it."""

    shapes: Mapping[str, tuple[int, ...]]  # name -> shape, in the order of `weights`
    weights: Iterator[tuple[str, torch.Tensor]]  # on the CPU; all ranks iterate
    concurrent: bool = False

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, StoredFile]:
        def read(name: str) -> torch.Tensor:
            found, tensor = next(self.weights)
            assert found == name, (found, name)
            return tensor

        entries = [TensorEntry(name, torch.float32, shape) for name, shape in self.shapes.items()]
        written = write_file(directory / "master.safetensors", entries, read, writes=group.rank == 0)
        assert next(self.weights, None) is None, "more weights came than shapes"
        return written

    def close(self) -> None:
        pass


def read_engine_state(directory: Path, *, rule: UpdateRule) -> EngineState:
    """Read engine.json. Raise UserError if it cannot be read or belongs to another update rule."""
    state = read_back(directory / ENGINE, EngineState, fix=_FIX)
    if state.rule != rule.name:
        theirs = state.format.rule
        raise UserError(
            f"{directory} holds the state of {theirs.title}, and this run updates by {rule.title}, "
            f"whose moments are others: go on with optim.name={theirs.name}, or export it and train its weights anew"
        )
    return state


class StoredKind:
    """Masters or a moment in a directory, from files that `stack` closes. Raises UserError if `shapes` are others."""

    def __init__(self, directory: Path, kind: str, *, shapes: Mapping[str, tuple[int, ...]], stack: ExitStack) -> None:
        self._kind = kind
        self._file = stack.enter_context(TensorFileReader(directory / f"{kind}.safetensors"))
        self.dtypes = {entry.dtype for entry in self._file.entries.values()}  # dtypes of the stored values
        held = {name: entry.shape for name, entry in self._file.entries.items()}
        if wrong := [name for name in {**held, **shapes} if held.get(name) != shapes.get(name)]:
            listing = ", ".join(f"{n} (file {held.get(n)}, model {shapes.get(n)})" for n in sorted(wrong)[:5])
            raise UserError(f"{self._file.path}: {len(wrong)} weights do not fit this model: {listing}")
        scales = directory / f"{scales_of(kind)}.safetensors"
        self._scales = stack.enter_context(TensorFileReader(scales)) if kind in MOMENTS and scales.exists() else None
        # Masters are in fp32 or bf16; moments are in fp32, in bf16, or 8-bit codes with scales.
        right = kind == "fixed" or self.dtypes <= {torch.float32} or self.dtypes <= {torch.bfloat16}
        if self._scales is not None:
            scaled = {name: (-(-math.prod(shape) // BLOCK_8BIT),) for name, shape in shapes.items()}
            held = {name: entry.shape for name, entry in self._scales.entries.items()}
            wide = {entry.dtype for entry in self._scales.entries.values()}
            right = self.dtypes <= {torch.uint8} and wide <= {torch.float32} and held == scaled
        if not right:
            listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
            raise UserError(f"{self._file.path}: holds {listing}, which is no state of these weights. {_FIX}")

    def as_stored(self, name: str, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `count` elements from `start` (a multiple of 256), and their scales if they are 8-bit."""
        values = self._read(self._file, name, start, count)
        if self._scales is None:
            return values, None
        return values, self._read(self._scales, name, start // BLOCK_8BIT, -(-count // BLOCK_8BIT))

    def _read(self, file: TensorFileReader, name: str, start: int, count: int) -> torch.Tensor:
        values = file.read_part(name, start, count)
        if wrong := describe_invalid_values(values, signed=is_signed(file.path.stem)):
            raise UserError(f"{file.path}: {name}: {wrong}: no run can resume from it. {_FIX}")
        return values

    def in_fp32(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return `count` elements from `start` (a multiple of 256) as fp32; frozen weights in their dtype."""
        values, scales = self.as_stored(name, start, count)
        return StoredField(is_signed(self._kind), values, scales).read() if self._kind in KINDS else values


def read_tensors(
    directory: Path, kind: str, *, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one kind: masters and moments in fp32, frozen weights in their dtype."""
    with ExitStack() as stack:
        stored = StoredKind(directory, kind, shapes=shapes, stack=stack)
        for name, shape in shapes.items():
            yield name, stored.in_fp32(name, 0, math.prod(shape)).view(shape)
