"""Storage formats of optimizer state: the fields that a page has for each update rule and dtype, and their bytes.

A page stores its fields one after the other, each padded to whole sectors. `optim/moments.py` reads and writes them.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

from offload_trainer.config import RuleName
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import BLOCK_8BIT, Page, aligned

_BYTES = {"fp32": 4, "bf16": 2, "uint8": 1}
MASTER, EXP_AVG, EXP_AVG_SQ = KINDS = ("master", "exp_avg", "exp_avg_sq")  # tensors that a rule keeps for each weight
MOMENTS = (EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True)
class FieldFormat:
    """A storage format of masters or moments."""

    name: str  # the value of optim.master_dtype or optim.moment_dtype
    dtype: str
    block: int = 0  # number of elements that share a scale; 0: no scales
    stochastic: bool = False  # rounded stochastically, which consumes random bits


FP32 = FieldFormat("fp32", "fp32")
BF16 = FieldFormat("bf16", "bf16", stochastic=True)
EIGHT_BIT = FieldFormat("8bit", "uint8", block=BLOCK_8BIT, stochastic=True)
FORMATS = {form.name: form for form in (FP32, BF16, EIGHT_BIT)}


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer's update rule."""

    name: RuleName  # the value of optim.name
    title: str
    formats: tuple[FieldFormat, ...]  # the formats that its moments may be stored in
    no_other: str = ""  # why they may not be stored in another format, and what to use
    masters: tuple[FieldFormat, ...] = (FP32,)  # the formats that its masters may be stored in
    note: str = ""  # a sentence of the plan; {matrices} is their number of parameters
    matrices: bool = False  # it updates whole matrices (`Weight.matrix`), with the first moment only; the rest as AdamW


ADAMW = UpdateRule("adamw", "AdamW", (FP32, BF16, EIGHT_BIT), masters=(FP32, BF16))
MUON = UpdateRule(
    "muon",
    "Muon",
    (FP32,),
    no_other="its momentum would be rounded before it is orthogonalised, which was not tried; use fp32",
    note="optimizer Muon for the matrices of blocks, {matrices} parameters; all other weights by AdamW",
    matrices=True,
)
RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (ADAMW, MUON)}


@dataclass(frozen=True)
class Field:
    """A field of a page: one entry of `dtype` for each `per` elements."""

    dtype: str
    per: int = 1
    for_matrices: bool = True  # pages of whole matrices have it; without it, their field is empty

    def entries(self, elements: int) -> int:
        return -(-elements // self.per)

    def holds(self, weight: Weight) -> bool:
        """Return whether a weight has entries."""
        return self.for_matrices or weight.matrix is None

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of a weight's entries in a checkpoint."""
        return weight.shape if self.per == 1 else (self.entries(weight.numel),)

    def bytes(self, page: Page) -> int:
        """Return the bytes of a page's entries, without padding."""
        return _BYTES[self.dtype] * self.entries(page.elements) if self.for_matrices or not page.matrices else 0

    def padded(self, page: Page) -> int:
        """Return the bytes of a page's entries, padded to whole sectors."""
        return aligned(self.bytes(page))


@dataclass(frozen=True)
class StateFormat:
    """The state of one rule with its moments in one format, and its masters in one."""

    rule: UpdateRule
    moments: FieldFormat
    masters: FieldFormat = FP32
    _bytes_by_kind: dict[tuple[int, bool], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.rule.name}_{self.name}"

    @property
    def name(self) -> str:
        """Return a name that is unique within the rule; with fp32 masters that of the moments' format."""
        return self.moments.name if self.masters == FP32 else f"{self.moments.name}_{self.masters.name}_masters"

    @property
    def stochastic(self) -> bool:
        """Return whether a field is rounded stochastically."""
        return self.moments.stochastic or self.masters.stochastic

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Return a page's fields by name, in storage order; pages of Muon's matrices have an empty exp_avg_sq."""
        fields = {MASTER: Field(self.masters.dtype)}
        for moment in MOMENTS:
            fields[moment] = Field(self.moments.dtype, for_matrices=moment == EXP_AVG or not self.rule.matrices)
            if self.moments.block:
                fields[scales_of(moment)] = Field("fp32", per=self.moments.block)
        return fields

    @cached_property
    def bytes_each(self) -> float:
        """Return the bytes per parameter, without the padding of weights and pages; of Muon's matrices less."""
        return sum(_BYTES[field.dtype] / field.per for field in self.fields.values())

    def mean_bytes(self, shape: ModelShape) -> float:
        """Return the bytes per trainable parameter of a model, without the padding of weights and pages."""
        less = sum(_BYTES[field.dtype] for field in self.fields.values() if not field.for_matrices)
        matrices = sum(weight.numel for weight in shape.weights if weight.matrix) if less else 0
        return self.bytes_each - less * matrices / max(1, shape.trainable)

    def page_bytes(self, page: Page) -> int:
        """Return the bytes of a page."""
        kind = page.elements, page.matrices  # a plan asks for millions of pages of a few kinds
        if kind not in self._bytes_by_kind:
            self._bytes_by_kind[kind] = sum(field.padded(page) for field in self.fields.values())
        return self._bytes_by_kind[kind]


def scales_of(moment: str) -> str:
    """Return the name of the field that holds a moment's scales."""
    return f"{moment}_scales"


def is_signed(field: str) -> bool:
    """Return whether a field may be negative. Averages of squares and scales (largest magnitudes) may not."""
    return not field.endswith("_scales") and field != EXP_AVG_SQ


ADAMW_FORMATS = tuple(StateFormat(ADAMW, moments, masters) for masters in ADAMW.masters for moments in ADAMW.formats)


@cache
def state_format(rule: str, moments: str, masters: str = "fp32") -> StateFormat:
    """Return the format for optim.name, optim.moment_dtype and optim.master_dtype; raise ValueError if unsupported."""
    found = StateFormat(RULES[rule], FORMATS[moments], FORMATS[masters])
    if found.moments not in found.rule.formats:
        raise ValueError(f"{found.rule.title} has no moments in {moments}")
    if found.masters not in found.rule.masters:
        raise ValueError(f"{found.rule.title} has no masters in {masters}")
    return found
