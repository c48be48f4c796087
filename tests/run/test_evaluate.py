"""Tests of `eval`: lm-eval's figures over streamed weights are those over the export, which lm-eval loads itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, ask, call

from offload_trainer import cli
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.export.export_command import export
from offload_trainer.model.inference import set_weight
from offload_trainer.run.commands import evaluate as evaluation
from offload_trainer.run.commands.evaluate import Evaluation, evaluate

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: eval)")
pytest.importorskip("lm_eval.tasks")  # lm_eval does not import it, and any test of this file may be the first

TASKS = ("ours_choice", "ours_generate", "ours_rolling")
# Prompts of different lengths, so that a batch has padding; more of them than fit into one batch.
DOCUMENTS = [
    {
        "question": f"What {'on earth ' * number}is the end of this?",
        "choices": ["It was the best of times", "no", "The quick brown fox, and more"],
        "answer": number % 3,
        "said": "the end of the the of and" * (1 + number % 2),
        "text": f"It was the best of times. {'It was the worst of times. ' * number}" * 3,
    }
    for number in range(5)
]
FORMS = {
    "ours_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "ours_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["###"], max_gen_toks: 12, do_sample: false, repetition_penalty: 3.0}
metric_list: [{metric: chrf}]
""",
    "ours_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one task for each kind of request, whose data are local files."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in DOCUMENTS))
    for name, form in FORMS.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{data}test_split: test\nmetadata: {{version: 1}}\n{form}")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has saved its 20th and its last step."""
    folder = tmp_path_factory.mktemp("evaluate")
    return call(*TINY, "--steps", "40", "--save-every", "20", "--lr", "1e-2", output=folder / "run").output


@pytest.fixture(scope="module")
def expected(run: Path, tasks: Path) -> dict[str, Any]:
    """Return lm-eval's results for an export in fp32, which lm-eval loads itself."""
    export(run, run.parent / "exported", dtype="fp32", check=False)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(run.parent / "exported"), "dtype": "float32"},
        device="cpu",
        batch_size=2,
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
    )
    return found["results"]


def wish(folder: Path, **others: Any) -> Evaluation:
    return Evaluation(**{"tasks": ("ours_*",), "batch_size": 2, "include_path": str(folder)} | others)


@pytest.fixture(autouse=True)
def _only_our_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out lm-eval's own tasks, whose thousands of files take seconds to index."""
    real = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path: real(include_path=include_path, include_defaults=False)
    )


def test_figures_are_those_of_transformers(run: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    """All figures are equal, with the weights in memory, read for each call, and from the export."""
    assert expected.keys() == set(TASKS)
    assert 0 < expected["ours_generate"]["chrf,none"] < 100
    messages: list[str] = []
    for number, (source, most) in enumerate(((run, None), (run, 0), (run.parent / "exported", 0))):
        done = evaluate(source, wish(tasks), write=tmp_path / f"{number}.json", say=messages.append, most_bytes=most)
        found = json.loads(done.json)
        assert found["results"] == json.loads(json.dumps(expected))
        assert json.loads((tmp_path / f"{number}.json").read_text()) == found
        assert found["model_name"].endswith(("step-00000040", "exported"))
    assert sum("read from the disk" in line for line in messages) == 2
    before = evaluate(run / "checkpoints/step-00000020", wish(tasks, tasks=("ours_rolling",)), say=messages.append)
    figure = json.loads(before.json)["results"]["ours_rolling"]["word_perplexity,none"]
    assert figure != pytest.approx(expected["ours_rolling"]["word_perplexity,none"])
    assert before.written is None


def test_the_command(run: Path, tasks: Path, expected: dict[str, Any]) -> None:
    """The command prints lm-eval's table and writes the results into the run directory, once."""
    words = ["eval", run, "--tasks", "ours_rolling", "--include-path", tasks, "--batch-size", "2"]
    done = ask(*words)
    assert done.returncode == 0, done.stderr
    figure = expected["ours_rolling"]["bits_per_byte,none"]
    assert re.search(rf"\|ours_rolling\|.*\|bits_per_byte *\|.*\| *{figure:.4f}\|", done.stdout)
    written = json.loads((run / "lm_eval.json").read_text())
    assert written["results"]["ours_rolling"] == json.loads(json.dumps(expected["ours_rolling"]))
    again = ask(*words)
    assert again.returncode == 2
    assert "lm_eval.json: already exists; name another file" in again.stderr


def test_limits_and_json(run: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--limit", "2", "--num-fewshot", "1", "--json", "--write", str(tmp_path / "other.json")]
    assert cli.main(["eval", str(run), "--tasks", "ours_choice", "--include-path", str(tasks), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n-samples"]["ours_choice"]["effective"] == 2
    assert found["n-shot"]["ours_choice"] == 1
    assert found == json.loads((tmp_path / "other.json").read_text())


def test_an_unknown_task(run: Path, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no task ours_chioce among its \d+; did you mean ours_choice\?"):
        evaluate(run, wish(tasks, tasks=("ours_chioce",)), write=tmp_path / "a.json", say=lambda line: None)
    (tmp_path / "lost.yaml").write_text((tasks / "ours_rolling.yaml").read_text().replace("data.jsonl", "gone.jsonl"))
    lost = wish(tmp_path, tasks=("ours_rolling",))
    with pytest.raises(UserError, match=r"the data of ours_rolling cannot be loaded: .*gone.jsonl"):
        evaluate(run, lost, write=tmp_path / "a.json", say=lambda line: None)
    assert not (tmp_path / "a.json").exists()


def test_a_directory_without_a_model(run: Path, tasks: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"neither a checkpoint .* nor a run directory that holds one"):
        evaluate(tmp_path, wish(tasks), say=lambda line: None)
    for file in (run.parent / "exported").iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(UserError, match="holds no tokenizer that can be loaded"):
        evaluate(tmp_path, wish(tasks), say=lambda line: None)
    with pytest.raises(UserError, match="its tokenizer has no chat template: leave --apply-chat-template out"):
        evaluate(run.parent / "exported", wish(tasks, apply_chat_template=True), say=lambda line: None)


def test_weights_that_are_not_numbers_give_no_figures(
    run: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = evaluation.inference_model

    @contextmanager
    def spoilt(*given: Any, **named: Any) -> Iterator[Any]:
        with real(*given, **named) as found:
            weight = found.model.get_parameter("transformer.ln_f.weight")
            set_weight(found.model, "transformer.ln_f.weight", weight * float("nan"))
            yield found

    monkeypatch.setattr(evaluation, "inference_model", spoilt)
    with pytest.raises(TrainerError, match="the model's logits are not numbers"):
        evaluate(run, wish(tasks, tasks=("ours_rolling",)), write=tmp_path / "a.json", say=lambda line: None)
    assert not (tmp_path / "a.json").exists()


def test_figures_are_told_if_their_file_cannot_be_written(
    run: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file appears, or the disk fills, while the model is evaluated."""
    evaluated, said = tmp_path / "a.json", list[str]()
    refuse = evaluation._refuse_nan

    def meanwhile(*given: Any) -> None:
        evaluated.touch()
        refuse(*given)

    monkeypatch.setattr(evaluation, "_refuse_nan", meanwhile)
    with pytest.raises(UserError, match=r"a.json: already exists"):
        evaluate(run, wish(tasks, tasks=("ours_rolling",)), write=evaluated, say=said.append)
    assert "bits_per_byte" in said[-1]


def test_without_lm_eval(run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "is_installed", lambda module: module != "lm_eval")
    with pytest.raises(UserError, match=r"eval needs lm_eval, which is not installed: pip install 'lm_eval>="):
        evaluate(run, wish(tasks), say=lambda line: None)


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (["eval", "--tasks", "a"], "eval needs one SOURCE; got nothing"),
        (["eval", "a", "b", "--tasks", "a"], "eval needs one SOURCE; got a, b"),
        (["eval", "a"], "eval needs --tasks NAMES, such as"),
        (["eval", "a", "--tasks", "a", "--limit", "0"], "--limit 0: it should be a whole number, at least 1"),
        (["eval", "a", "--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot -1: it should be a whole number"),
        (["eval", "a", "--tasks", "a", "--task", "b"], "eval: --task: unknown flag; known: --tasks, --limit"),
        (["eval", "a", "--tasks", "a", "--include-path", "nowhere"], "--include-path nowhere: no such directory"),
    ],
)
def test_mistakes(words: list[str], expected_text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert expected_text in capsys.readouterr().err
