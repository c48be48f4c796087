"""Tests of commands around a run: `ls` and `cp` of recipes, `doctor`, and `tune` with given outcomes of its trials."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import TINY, ask
from sample_plans import SHAPES, machine, wish

from offload_trainer import cli
from offload_trainer.engine import op_builder
from offload_trainer.errors import TrainerError
from offload_trainer.plan.machine import DriveFacts, read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.commands import doctor, tune
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
# Configurations; other tests run copies of the scripts and of the batch file.
NAMES = [recipe.name for recipe in recipes() if recipe.run.startswith(f"offload-train configs/{recipe.file}")]
ALL = sorted([*NAMES, "dpo", "qlora", "slurm"])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes_are_listed_with_what_they_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert all(load_config([str(path)]) != load_config([]) for path in (ROOT / "configs").glob("*.yaml"))
    assert cli.main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line and line[0] not in " `"] == ALL
    told = " ".join(" ".join(lines).split())
    for path in (ROOT / "configs").iterdir():
        heads = [line for line in path.read_text().splitlines() if line.startswith("# memory: ")]
        assert all(head.removeprefix("# memory: ") in told for head in heads)
    assert cli.main(["ls", "--json"]) == 0
    held = {recipe["name"]: recipe for recipe in json.loads(capsys.readouterr().out)}
    assert held["tiny"]["run"] == "offload-train configs/tiny.yaml --nvme /mnt/ssd"
    assert held["tiny"]["memory"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_recipe_under_its_own_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for words, path in (
        ([name], f"{name}.yaml"),
        ([f"{name}.yaml", "a b.yaml"], "a b.yaml"),
        ([name, "mine"], f"mine/{name}.yaml"),
    ):
        assert cli.main(["cp", *words]) == 0
        printed = capsys.readouterr().out
        text = (tmp_path / path).read_text()
        assert load_config([path]) == load_config([str(ROOT / f"configs/{name}.yaml")])
        assert "configs/" not in text + printed
        shell = f"'{path}'" if " " in path else path
        assert printed.startswith(f"{path}: written; offload-train {shell} ")
        assert f"# run:    offload-train {shell} " in text


@pytest.mark.parametrize("there", ["a file", "a link to nothing"])
def test_a_copy_overwrites_nothing(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text("mine") if there == "a file" else path.symlink_to("nowhere")
    assert cli.main(["cp", "tiny"]) == 2
    assert "tiny.yaml: already exists" in capsys.readouterr().err
    assert (path.read_text() == "mine") if there == "a file" else not (tmp_path / "nowhere").exists()


# -- doctor: each state of each check, with given facts of a machine ---------------------------------------------------


@pytest.mark.slow
def test_this_machine_passes_and_a_failure_ends_with_1(drive: Path, tmp_path: Path) -> None:
    done = ask("doctor", "--json", "--nvme", drive, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert {"torch", "memory", "GPU", f"drive {drive}"} <= set(checks)
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
    done = ask("doctor", "--nvme", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "failure  directories" in done.stdout
    assert "nowhere: no such directory" in done.stdout


def test_drives() -> None:
    for state, facts in (
        ("ok", {"disk": "nvme0n1"}), ("failure", {"filesystem": "tmpfs"}), ("warning", {"network": True}),
        ("warning", {"rotational": True}), ("warning", {"direct": False}), ("warning", {"throttle": "io.max 1:2"}),
    ):  # fmt: skip
        checks = list(doctor._drive(DriveFacts("/ssd", 10**12, **{"filesystem": "ext4", **facts})))
        assert (checks[0].state, checks[-1].state) == ("ok", state)
        assert state == "ok" or checks[-1].fix


def test_the_compilers_message_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the limit of locked memory, which async_io has with a drive."""
    broken = Mock(side_effect=TrainerError("could not be built: fatal error: omp.h: No such file"))
    monkeypatch.setattr(op_builder, "load_kernel", broken)
    for words, limit, warned in (([], 1, False), (["--nvme", "."], 1, True), (["--nvme", "."], None, False)):
        here = replace(read_machine("v100-32gb"), memlock_bytes=limit)
        monkeypatch.setattr(doctor, "probe_machine", lambda *_, found=here, **__: found)
        checks = {check.name: check for check in doctor.examine(load_config(["--engine", "deepspeed", *words]))}
        assert (checks["kernel cpu_adam"].state, "omp.h" in checks["kernel cpu_adam"].found) == ("failure", True)
        assert ("locked memory" in checks) == warned


# -- tune: its trials and the settings that it keeps, with given outcomes and one real trial ---------------------------


def test_each_group_starts_from_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain within the noise is none, and if the plan itself fails, there is nothing to tune."""
    tried: list[str] = []

    def tuned(*groups: tuple[str, ...], **seconds: float | None) -> list[tune.Trial]:
        """Tune with trials that take these seconds (None: fail), by their words, of which `plan` stands for none."""

        def pretend(_: object, added: str, *, steps: int, say: object) -> tune.Trial:
            tried.append(added)
            taken = seconds[added.replace(" ", "_") or "plan"]
            trial = tune.Trial(added, [{"step": taken, "update": taken}] * steps)
            return replace(trial, failed="killed by signal 9") if taken is None else trial

        monkeypatch.setattr(tune, "run_trial", pretend)
        return tune.tune([], groups, phase="step", steps=4, say=lambda line: None)

    trials = tuned(("a", "b"), ("c", "d"), plan=2.0, a=1.5, b=1.8, a_c=None, a_d=1.2)
    assert tried == ["", "a", "b", "a c", "a d"]
    assert (trials[0].words, len(trials)) == ("a d", 5)
    assert [trial.failed for trial in trials if trial.words == "a c"] == ["killed by signal 9"]
    assert tuned(("a",), plan=2.0, a=1.97)[0].words == ""
    with pytest.raises(TrainerError, match="killed by signal 9"):
        tuned(("a",), plan=None)
    # the first two steps do not count
    assert tune.Trial("", [{"step": seconds} for seconds in (9.0, 9.0, 1.0, 3.0, 2.0)]).seconds == 2.0


def test_only_what_matters_to_the_placement_is_tried(tmp_path: Path) -> None:
    """Each trial is a valid configuration."""
    here = replace(machine(), drives=(replace(machine().drives[0], directory=str(tmp_path)),))
    for words, keys in (
        (["--ram-fraction", "0", "tiered.overlap=off"], {"tiered.page_size", "tiered.page_buffers"}),
        (["--ram-fraction", "1"], set()),
        (["--params", "cpu", "--ram-fraction", "1"], {"tiered.weight_buffers"}),
        (["--engine", "deepspeed", "--optimizer", "cpu"], {"deepspeed.reduce_bucket_size"}),
    ):
        plan = make_plan(load_config(["--nvme", str(tmp_path), "--save-every", "0", *words]), SHAPES["gpt2"], here)
        tried = [added for group in tune.tunable(plan) for added in group]
        assert {added.partition("=")[0] for added in tried} == keys
        assert tune.steered_phase(plan) == ("update" if "tiered.page_size" in keys else "step")
        for added in tried:
            wish(*words, *added.split())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A plan with nothing to vary makes one real trial, and the file is a valid configuration."""
    best = tmp_path / "best.yaml"
    words = [*TINY, "--engine", "tiered", "--ram-fraction", "1", "--output", tmp_path / "run"]
    done = ask("tune", "--json", "--write", best, "--trial-steps", "3", *words)
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)
    assert len(trial["steps"]) == 3
    assert trial["seconds"] > 0
    assert load_config([str(best)]).placement.ram_fraction == 1
    assert not (tmp_path / "run").exists()
