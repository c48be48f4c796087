"""Tests of the memory plan: a Trainer, and adapters in a loop, hold no more than planned, also in a cgroup."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import HELPERS, environment, in_turn
from hf_trainers import model_folder

pytestmark = pytest.mark.slow

SCRIPT = HELPERS / "hf_trainers.py"


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    """Return a folder, shared by pytest's workers, with a model of 118 MB in bf16.

    Training all of it takes 940 MB.
    """
    made = shared / "measured"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    with in_turn(made):
        if not (made / "model/model.safetensors").exists():
            (made / "drive").mkdir(parents=True, exist_ok=True)
            model_folder(made / "model", **sizes, num_key_value_heads=8, vocab_size=8192)
    return made


def measured(what: str, folder: Path, *before: str) -> dict[str, int]:
    """Run a script once; return the planned and the peak bytes of host memory.

    `before`: words before the command.
    """
    output = folder / f"{what}{len(before)}"
    found = output.with_suffix(".json")
    with in_turn(output):
        if not found.exists():
            words = [*before, sys.executable, SCRIPT, what, folder / "model", output, folder / "drive"]
            env = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, timeout=500)
            assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
            found.write_text(done.stdout.splitlines()[-1])
    return json.loads(found.read_text())


@pytest.mark.parametrize("what", ["trainer", "loop"])
def test_memory_is_at_most_the_plans(what: str, folder: Path) -> None:
    found = measured(what, folder)
    assert 0.6 * found["plan"] < found["peak"] <= found["plan"], found


@pytest.mark.box
def test_it_runs_within_the_planned_memory(folder: Path, box: Path) -> None:
    limit = measured("trainer", folder)["plan"]
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (box / name).exists():
            (box / name).write_text(str(limit))
    found = measured("trainer", folder, "sh", "-c", f'echo $$ > {box}/cgroup.procs && exec "$@"', "box")
    assert 0 < found["peak"] <= limit
