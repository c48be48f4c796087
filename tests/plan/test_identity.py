"""Tests that another run's checkpoint is refused with advice, and that a resumed run keeps choices that affect bits."""

import json
from pathlib import Path

import pytest
from commands import TINY
from sample_plans import GB, machine

from offload_trainer.cli import main
from offload_trainer.common.errors import UserError
from offload_trainer.run import planning, resume
from offload_trainer.run.planning import _with_resumed_choices, plan_run
from offload_trainer.settings import load_config
from offload_trainer.storage.manifest import CONFIG, FORMAT, MANIFEST, Manifest, differences, refuse_other_run

SAVED = {"seed": 0, "seq_len": 32, "tokens": 100, "training rows": 3, "text": 77, "tokenizer": "abc"}
SAVED[CONFIG] = {"rope_theta": 1e4, "head_dim": None, "of_an_older_version": 1}

DATA = "the text of --data is another, or has changed since"
VALIDATION = DATA.replace("--data", "--validation-data") + "; or only one of the two has such a text"
HEAD = "config.json's head_dim: it has none, this run 8"
NUMBERS = {"rope_theta": 5e5, "head_dim": 8, "of_a_newer_version": 2}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        (dict.fromkeys(("tokens", "training rows", "text", "tokenizer", "validation text")), []),  # not known
        ({"text": 78, "tokens": 120, "training rows": 4}, [f"{DATA}: 100 tokens, now 120"]),
        ({"text": 78}, [f"{DATA}: as many tokens (100), but not the same"]),
        ({"training rows": 4}, ["training rows: it has 3, this run 4"]),
        ({"tokenizer": "xyz", "text": 5, "tokens": 90}, ["tokenizer: it has abc, this run xyz"]),
        ({"seed": 1, "seq_len": 64}, ["seed: it has 0, this run 1", "seq_len: it has 32, this run 64"]),
        ({CONFIG: NUMBERS}, ["config.json's rope_theta: it has 10000.0, this run 500000.0", HEAD]),
        ({"validation text": 5}, [VALIDATION]),
    ],
)
def test_differences_are_described(changes: dict[str, object], lines: list[str]) -> None:
    assert differences(SAVED, SAVED | changes) == lines
    assert len(differences(SAVED | changes, SAVED)) == len(lines)


def test_the_advice_is_one_that_works() -> None:
    many = {f"w{i}": 0 for i in range(30)}
    saved = Manifest(FORMAT, 2, identity=SAVED, layout=many, files={})
    with pytest.raises(UserError) as caught:
        refuse_other_run(Path("runs/a/checkpoints/step-2"), saved, identity=SAVED | {"text": 1}, layout={})
    assert "name another --output, or move runs/a/checkpoints away" in str(caught.value)
    assert "--resume never" not in str(caught.value)
    with pytest.raises(UserError, match="and 20 more"):
        refuse_other_run(Path("c"), saved, identity=SAVED, layout=dict.fromkeys(many, 1))


@pytest.mark.slow
def test_a_plan_refuses_another_runs_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the manifest exists, since `plan` reads nothing else of a checkpoint."""
    output = tmp_path / "run"
    checkpoint = output / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    assert main(["plan", *TINY, "--output", str(output)]) == 2
    identity = SAVED | {"shuffle": True, "tokens": 5, "text": 6, "parameters": None, "initial weights": None}
    del identity["training rows"]
    manifest = {"format": 2, "step": 2, "identity": identity, "layout": {}, "files": {}}
    for other, words, told in (
        ({}, ["--seed", "1"], "seed: it has 0, this run 1"),
        ({}, [], "transformer.wte.weight: it has none"),  # the weights are missing
        ({"format": 1, "layout": None}, [], "written in format 1, this version reads 2"),
    ):
        (checkpoint / MANIFEST).write_text(json.dumps(manifest | other))
        assert main(["plan", *TINY, "--output", str(output), *words]) == 2
        assert told in capsys.readouterr().err


def test_choices_that_change_bits_are_kept_unless_the_user_chooses() -> None:
    """On a CPU the bits do not depend on the number of checkpointed blocks, so the plan chooses it again."""

    def resumed(before: int | str, *more: str, on_gpu: bool = True) -> int | str:
        was = {"model": {"activation_checkpointing": before}}
        return _with_resumed_choices(load_config([*TINY, *more]), was, on_gpu=on_gpu).model.activation_checkpointing

    for count in (1, "on", "off"):
        assert resumed(count) == count
        assert resumed(count, on_gpu=False) == "auto"
    assert resumed("on", "model.activation_checkpointing=1") == 1
    assert resumed(1, "parallel.pipeline=2") == "auto"  # whose blocks are all checkpointed
    # Nothing could be offloaded with the number of the run before.
    assert resumed("off", "model.offload_activations=true") == "auto"


def test_a_run_keeps_the_checkpointed_blocks_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; unless nothing fits with them, or the user chooses."""

    def blocks(before: object, *words: str, gpu: int = 24 * GB) -> int:
        monkeypatch.setattr(planning, "machine_here", lambda *_, **__: machine(gpu=gpu))
        monkeypatch.setattr(resume, "earlier_run", lambda _: ({"model": {"activation_checkpointing": before}}, False))
        return plan_run(load_config([*TINY, *words])).plan.work.checkpointed

    assert [blocks(count) for count in (0, 1, 2)] == [0, 1, 2]
    assert blocks(1, "model.activation_checkpointing=on") == 2
    assert blocks("off", "--micro-batch", "64", gpu=GB) == 2
