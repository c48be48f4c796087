"""What the optimizer keeps of each weight, as fields of a page, and their bytes. Pure arithmetic.

    AdamW   master, exp_avg, exp_avg_sq        a moment as   fp32   4 bytes
    Lion    master, exp_avg                                  bf16   2 bytes, rounded stochastically
                                                             8bit   1 byte, and a scale of fp32 for each 256

    a master as   fp32         4 bytes
                  remainder    2 bytes beside its bf16 weight, and a count for each 256 (`optim/remainders.py`)

A page is its fields, one after the other, each padded to whole sectors; `optim/stored.py` reads and writes moments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

from offload_trainer.plan.layout import BLOCK_8BIT, aligned

_BYTES = {"fp32": 4, "bf16": 2, "int16": 2, "uint8": 1}


@dataclass(frozen=True)
class Moment:
    """A running average that a rule keeps beside each master; one of squares has no sign."""

    name: str
    signed: bool


EXP_AVG, EXP_AVG_SQ = Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)
MOMENTS = {moment.name: moment for moment in (EXP_AVG, EXP_AVG_SQ)}


@dataclass(frozen=True)
class MomentFormat:
    """How a moment is stored."""

    name: str  # of optim.states
    dtype: str  # of its entries
    block: int = 0  # elements that share a scale; 0: there are none
    stochastic: bool = False  # rounded so, which takes random bits


FP32 = MomentFormat("fp32", "fp32")
BF16 = MomentFormat("bf16", "bf16", stochastic=True)
EIGHT_BIT = MomentFormat("8bit", "uint8", block=BLOCK_8BIT, stochastic=True)
MOMENT_FORMATS = {form.name: form for form in (FP32, BF16, EIGHT_BIT)}


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated, by what is kept for it."""

    name: str  # of optim.name
    title: str
    moments: tuple[Moment, ...]
    formats: tuple[MomentFormat, ...]  # in which they may be

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is kept of each weight, however it is stored."""
        return ("master", *(moment.name for moment in self.moments))


ADAMW = UpdateRule("adamw", "AdamW", (EXP_AVG, EXP_AVG_SQ), (FP32, BF16, EIGHT_BIT))
# In 8 bits a first moment is rounded to nearest, and Lion's, which moves by a hundredth a step, would stand still.
LION = UpdateRule("lion", "Lion", (EXP_AVG,), (FP32, BF16))
RULES = {rule.name: rule for rule in (ADAMW, LION)}


@dataclass(frozen=True)
class Field:
    """A field of a page: an entry of `dtype` for each `per` elements."""

    dtype: str
    per: int = 1

    def entries(self, elements: int) -> int:
        return -(-elements // self.per)

    def bytes(self, elements: int) -> int:
        """Of all its entries, without what pads them."""
        return _BYTES[self.dtype] * self.entries(elements)

    def padded(self, elements: int) -> int:
        """The same with that: whole sectors."""
        return aligned(self.bytes(elements))


@dataclass(frozen=True)
class StateFormat:
    """What a rule keeps, with its moments in one format."""

    rule: UpdateRule
    moments: MomentFormat
    remainders: bool = False  # of masters that lies on a page what rounding to the bf16 weight took away

    def __str__(self) -> str:
        return f"{self.rule.name}_{self.moments.name}{'_remainders' * self.remainders}"

    @property
    def whole(self) -> StateFormat:
        """The same with masters in fp32, as checkpoints hold them."""
        return replace(self, remainders=False)

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Of a page, in the order in which they lie."""
        fields = {"master": Field("fp32")}
        if self.remainders:
            fields = {"remainder": Field("int16"), "ties": Field("int16", per=BLOCK_8BIT)}
        for moment in self.rule.moments:
            fields[moment.name] = Field(self.moments.dtype)
            if self.moments.block:
                fields[scales_of(moment.name)] = Field("fp32", per=self.moments.block)
        return fields

    @cached_property
    def bytes_each(self) -> float:
        """Bytes a parameter, without what pads its weight and its page."""
        return sum(_BYTES[field.dtype] / field.per for field in self.fields.values())

    def page_bytes(self, elements: int) -> int:
        """Bytes of a page of so many elements."""
        return sum(field.padded(elements) for field in self.fields.values())


def scales_of(moment: str) -> str:
    """The field that holds a moment's scales."""
    return f"{moment}_scales"


def is_signed(field: str) -> bool:
    """Whether a field may be below zero: not where it holds squares, nor scales, which are greatest magnitudes."""
    return not field.endswith("_scales") and (field not in MOMENTS or MOMENTS[field].signed)


@cache
def state_formats() -> tuple[StateFormat, ...]:
    """All that there are, with masters in fp32."""
    return tuple(StateFormat(rule, moments) for rule in RULES.values() for moments in rule.formats)


@cache
def state_format(rule: str, moments: str, *, remainders: bool = False) -> StateFormat:
    """That of optim.name and optim.states. ValueError where the rule's moments cannot be so."""
    found = StateFormat(RULES[rule], MOMENT_FORMATS[moments], remainders)
    if found.whole not in state_formats():
        raise ValueError(f"{found.rule.title} has no moments in {moments}")
    return found
