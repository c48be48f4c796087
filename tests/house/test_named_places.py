"""Tests that an update rule, a format of weights and images are named only where they belong.

All other modules ask for a property, such as `Weight.matrix`, `UpdateRule.matrices` or `Unit.stored_bytes`, so that one
more rule or format changes none of them. A place that no longer names its word fails as an unlisted one does.
"""

from __future__ import annotations

import re

import pytest
from test_floors import PACKAGE

MUON = {
    "config.py": "its keys",
    "synonyms.py": "other trainers' words for it",
    "plan/shape.py": "`Weight.matrix`: what such a rule updates as a matrix",
    "plan/tiered/state_formats.py": "the rule: its state and what it refuses",
    "plan/tiered/footprint.py": "a line of the plan: bytes that matrices do not have",
    "plan/tiered/orthogonalisation.py": "operations, seconds and memory",
    "optim/muon.py": "the arithmetic",
    "optim/matrix_kernel.py": "the arithmetic on pages",
    "optim/native/muon.h": "the compiled part",
    "optim/native/adam.cpp": "includes the compiled part",
    "optim/rules.py": "which weights follow it, and with which settings",
    "optim/torch_adam.py": "asserts that it gets none of them",
    "engine/tiered.py": "passes its keys on",
    "engine/timed_updates.py": "what is timed of it",
    "session/kwargs.py": "keywords of a session",
    "session/optimizer.py": "the optimizer that a session returns",
    "session/session.py": "`session.muon`",
    "hf.py": "the Trainer's optimizer",
}
NF4 = {
    "config.py": "the values of `model.base`",
    "plan/tiered/weight_formats.py": "the format and its bytes",
    "session/kwargs.py": "keywords of a session",
    "session/session.py": "`session.base`",
    "recipes/qlora.py": "a script for users",
}
IMAGE = {
    "plan/shape.py": "the parts that only images pass through, in a model's shape",
    "plan/images.py": "their activations, products and note",
    "plan/memory.py": "adds their activations",
    "plan/step_time.py": "leaves out their frozen products",
    "plan/planner.py": "prints the note",
    "plan/tiered/weight_streaming.py": "which blocks are recomputed",
    "model/auto_class.py": "transformers' class for a configuration",
    "model/image_parts.py": "finds the parts in a model",
    "model/shape.py": "puts them into the shape",
    "model/loader.py": "loads the class and copies the processor's files",
    "data/conversations.py": "refuses messages with images",
    "export/sources.py": "exports the image-text class",
    "run/commands/export_trainer.py": "exports the image-text class",
    "session/api.py": "keyword of `ot.load`",
    "session/kwargs.py": "keyword that `ot.offload` refuses",
    "hf.py": "keyword of `load`",
    "recipes/llama_factory.py": "refuses processors",
}


@pytest.mark.parametrize(
    ("word", "places"), [("muon", MUON), ("nf4", NF4), ("image", IMAGE)], ids=["muon", "nf4", "image"]
)
def test_it_is_named_only_in_these_places(word: str, places: dict[str, str]) -> None:
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu")]
    named = {
        path.relative_to(PACKAGE).as_posix() for path in sources if re.search(word, path.read_text(), re.IGNORECASE)
    }
    assert named == set(places)


def test_what_moves_weights_and_state_names_none_of_them() -> None:
    modules = list((PACKAGE / "offloading").rglob("*.py"))
    assert len(modules) > 30
    for path in modules:
        assert not re.search("muon|nf4|image", path.read_text(), re.IGNORECASE), path
