"""Test that the code of docs/notebook.ipynb runs unchanged, and trains as plain torch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

NOTEBOOK = json.loads((Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's")
def test_the_notebook_runs_and_trains_as_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses equal those of torch.optim.AdamW bit for bit, also after a resume; the export has its weights."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in CODE:
        exec(compile(code, "notebook.ipynb", "exec"), names)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    expected = []
    for batch in names["batches"]:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert names["losses"] == names["uninterrupted"] == expected
    assert expected[-1] < expected[0]
    for (name, exported), trained in zip(names["trained"].named_parameters(), model.parameters(), strict=True):
        assert torch.equal(exported.float(), trained.bfloat16().float()), name
    assert names["written"].startswith(b"It was the ")
    assert b" of times" in names["written"]  # it has learned the text


def test_the_notebook_has_no_outputs() -> None:
    """The notebook in the repository has no results of a machine, which would be outdated after the next change."""
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
