"""Tests that freed host memory returns to the system between blocks, or is kept for reuse up to a limit."""

from itertools import pairwise
from pathlib import Path

import pytest
from commands import run_script
from engine_bench import batches, engine, model_directory, train


def test_the_heap_is_trimmed_after_every_eighth_and_last_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    note = lambda text: lambda *_: messages.append(text)  # noqa: E731
    with engine(model_directory(folder / "gpt2", "gpt2", n_layer=10), 'model.freeze=["h.0."]') as ours:
        monkeypatch.setattr(ours.offloaded.heap, "trim", note("trim"))
        blocks = ours._module.model.transformer.h
        for number, block in enumerate(blocks):
            block.register_forward_hook(note(f"forward {number}"))
            if number:  # block 0 trains nothing here
                block.ln_1.weight.register_post_accumulate_grad_hook(note(f"gradient {number}"))
        train(ours, batches(1))
        places = [after for before, after in pairwise(messages) if before == "trim"]
        assert places == ["forward 7", "forward 9", "gradient 9", "gradient 8"]  # the third trim precedes the backward
    assert [len(block._forward_hooks) for block in blocks] == [1] * 10  # only this test's hooks are left


LONG_ROW = """
from offload_trainer.storage.host_memory import set_malloc_threshold
from offload_trainer.telemetry.meters import current_rss_bytes

set_malloc_threshold("deepspeed", row=8192)
before, stay, values = current_rss_bytes(), [], []
for number in range(1, 21):
    values.append(bytes([number]) * (4 << 20))
    stay.append(bytes([number]) * (16 << 10))
assert current_rss_bytes() - before > 75 << 20
values.clear()
assert current_rss_bytes() - before < 8 << 20
"""


KEPT = """
import resource
from offload_trainer.storage.host_memory import Heap, set_malloc_threshold
from offload_trainer.telemetry.meters import current_rss_bytes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    values = [bytes([1]) * (48 << 20) for _ in range(4)]
    values.clear()

set_malloc_threshold("tiered")
heap, before = Heap(), current_rss_bytes()
step()
assert current_rss_bytes() - before < 8 << 20
heap.keep(before + (300 << 20))
step()
heap.trim()
held, then = current_rss_bytes() - before, faults()
assert held > 180 << 20, held
step()
assert faults() - then < 1000, faults() - then  # 192 MiB of fresh pages are 49,000 faults
heap.keep(before + (100 << 20))
heap.trim()
assert current_rss_bytes() - before < 8 << 20
set_malloc_threshold("tiered")
step()
assert current_rss_bytes() - before < 8 << 20
"""


@pytest.mark.parametrize("script", [KEPT, pytest.param(LONG_ROW, marks=pytest.mark.slow)], ids=["kept", "long row"])
def test_freed_memory_is_reused_up_to_the_limit_or_returned_for_long_rows(script: str, tmp_path: Path) -> None:
    """Shorter rows' freed allocations below live ones would remain as holes. A new process has none yet."""
    (tmp_path / "script.py").write_text(script)
    done = run_script(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
